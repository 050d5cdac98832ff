//! The library's errors, as far as the table uses them.

#[derive(Debug)]
pub(crate) enum Status {
    InvalidHandle,
    Exhausted,
}

#[derive(Debug)]
pub(crate) struct Error {
    pub(crate) status: Status,
    pub(crate) message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Error {
        Error { status, message: message.into() }
    }
}
