//! The engine's errors, as far as the protocols use them.

use crate::blame::Blame;
use crate::types::{ncclInternalError, ncclInvalidUsage, ncclResult_t};

/// A failure of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    code: ncclResult_t,
    message: String,
    blame: Blame,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(code: ncclResult_t, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), blame: Blame::none() }
    }

    pub(crate) fn by(self, blame: Blame) -> Error {
        Error { blame, ..self }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Error {
        Error::new(ncclInvalidUsage, message)
    }

    pub(crate) fn aborted() -> Error {
        Error::new(ncclInternalError, "aborted")
    }

    pub(crate) fn code(&self) -> ncclResult_t {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn blame(&self) -> &Blame {
        &self.blame
    }
}
