//! What goes wrong, and the guard that every function of the C API runs in.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::types::*;
use crate::{fork, machine};

/// In the message of every call that finds its communicator failed by another call, which is named after these words.
pub const FAILED_EARLIER: &str = "failed earlier";

/// A failure: NCCL's code, one line with the values, and the rank that was found dead, gone or late.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    code: ncclResult_t,
    message: String,
    lost: Option<usize>,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(code: ncclResult_t, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), lost: None }
    }

    /// The same, because of that rank.
    pub(crate) fn by(self, lost: Option<usize>) -> Error {
        Error { lost, ..self }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Error {
        Error::new(ncclInvalidArgument, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Error {
        Error::new(ncclInvalidUsage, message)
    }

    pub(crate) fn aborted() -> Error {
        Error::new(ncclInternalError, "the communicator was aborted by ncclCommAbort in this process")
    }

    /// A refusal of the operating system, with `errno`'s text and what to do about it.
    pub(crate) fn system(what: &str, reason: std::io::Error) -> Error {
        Error::new(ncclSystemError, format!("{what}: {}", machine::explained(&reason)))
    }

    pub(crate) fn code(&self) -> ncclResult_t {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The rank that was found dead, gone or late, in the communicator that the call was made on.
    pub(crate) fn lost(&self) -> Option<usize> {
        self.lost
    }

    /// The same failure, with the call that met it in front.
    pub(crate) fn within(mut self, call: &str) -> Error {
        self.message = format!("{call}: {}", self.message);
        self
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Makes `message` this thread's last error.
pub(crate) fn remember(message: &str) {
    let text: Vec<u8> = message.bytes().map(|byte| if byte == 0 || byte == b'\n' { b' ' } else { byte }).collect();
    // A thread on its way out has lost its slot; there is nobody left to read it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
}

/// This thread's last error, valid until its next failing call.
pub(crate) fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Whether this thread has had an error.
pub(crate) fn has_last() -> bool {
    LAST.try_with(|last| !last.borrow().is_empty()).unwrap_or(false)
}

/// The static sentence for a code.
#[allow(non_upper_case_globals)] // NCCL's names
pub(crate) fn describe(code: ncclResult_t) -> &'static CStr {
    match code {
        ncclSuccess => c"no error",
        ncclUnhandledCudaError => c"unhandled cuda error",
        ncclSystemError => c"unhandled system error",
        ncclInternalError => c"internal error, or the communicator was aborted",
        ncclInvalidArgument => c"invalid argument",
        ncclInvalidUsage => c"invalid usage",
        ncclRemoteError => c"remote process exited or left the communicator",
        ncclTimeout => c"peers did not come before the deadline",
        ncclInProgress => c"operation in progress",
        _ => c"unknown result code",
    }
}

/// What a C function returns when its body fails.
pub(crate) trait Return {
    fn failed(code: ncclResult_t) -> Self;
}

impl Return for ncclResult_t {
    fn failed(code: ncclResult_t) -> ncclResult_t {
        code
    }
}

impl Return for *const c_char {
    fn failed(_: ncclResult_t) -> *const c_char {
        c"".as_ptr()
    }
}

/// Runs the body of one C function: an error becomes its code and this thread's last error, a panic becomes
/// `ncclInternalError`.
///
/// In a forked child the body does not run: everything that it could use is the parent's.
pub(crate) fn guard<R: Return>(function: &'static str, body: impl FnOnce() -> Result<R>) -> R {
    let body = || if fork::is_child() && !is_free(function) { Err(Error::usage(fork::refusal())) } else { body() };
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => return result,
        Ok(Err(error)) => error,
        Err(panic) => Error::new(ncclInternalError, format!("a bug in hostccl: {}", panic_text(&*panic))),
    };
    let message = error.message();
    if message.starts_with(function) {
        remember(message);
    } else {
        remember(&format!("{function}: {message}"));
    }
    R::failed(error.code)
}

/// Whether a function uses nothing that a parent may hold.
fn is_free(function: &str) -> bool {
    ["ncclGetVersion", "ncclGetErrorString", "ncclGetLastError", "ncclMemAlloc", "ncclMemFree"].contains(&function)
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_text() -> String {
        // SAFETY: `last` returns this thread's string, which lives until the next failing call.
        unsafe { CStr::from_ptr(last()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_message() {
        assert_eq!(guard("f", || -> Result<ncclResult_t> { panic!("slot {}", 7) }), ncclInternalError);
        assert_eq!(last_text(), "f: a bug in hostccl: slot 7");
    }

    #[test]
    fn an_error_leaves_its_code_and_one_line() {
        assert_eq!(
            guard("f", || -> Result<ncclResult_t> { Err(Error::argument("rank 3\nof 2")) }),
            ncclInvalidArgument
        );
        assert_eq!(last_text(), "f: rank 3 of 2");
        assert_eq!(guard("f", || Ok(ncclSuccess)), ncclSuccess);
        assert_eq!(last_text(), "f: rank 3 of 2", "a success leaves the last error alone");
    }
}
