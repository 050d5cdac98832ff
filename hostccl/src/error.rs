//! Errors, and the guard inside which every function of the C API runs.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::blame::Blame;
use crate::types::*;
use crate::{fork, machine};

/// When an earlier call has failed on a communicator, the message of each later call on it has
/// these words. The earlier call's name follows them.
pub const FAILED_EARLIER: &str = "failed earlier";

/// A failure of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    /// NCCL's code, which the C function returns.
    code: ncclResult_t,
    /// One line with the values of the failure.
    message: String,
    /// The ranks to blame, in the communicator on which the call was made.
    blame: Blame,
    /// How long the call waited for its peers without any progress; `None` where it did not wait.
    waited: Option<Duration>,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns an error that blames no rank.
    pub(crate) fn new(code: ncclResult_t, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), blame: Blame::none(), waited: None }
    }

    /// Returns this error with the ranks to blame.
    pub(crate) fn by(self, blame: Blame) -> Error {
        Error { blame, ..self }
    }

    /// Returns this error with the time for which the call waited.
    pub(crate) fn after(self, waited: Duration) -> Error {
        Error { waited: Some(waited), ..self }
    }

    /// Returns `ncclInvalidArgument`: an argument is wrong by itself.
    pub(crate) fn argument(message: impl Into<String>) -> Error {
        Error::new(ncclInvalidArgument, message)
    }

    /// Returns `ncclInvalidUsage`: the call does not fit other calls.
    pub(crate) fn usage(message: impl Into<String>) -> Error {
        Error::new(ncclInvalidUsage, message)
    }

    /// Returns the error of a call whose communicator this process has aborted.
    pub(crate) fn aborted() -> Error {
        Error::new(ncclInternalError, "the communicator was aborted by ncclCommAbort in this process")
    }

    /// Returns `ncclSystemError`: the operating system has refused `what`. The message has the text
    /// of `errno`, and says what to do about it.
    pub(crate) fn system(what: &str, reason: std::io::Error) -> Error {
        Error::new(ncclSystemError, format!("{what}: {}", machine::explained(&reason)))
    }

    pub(crate) fn code(&self) -> ncclResult_t {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The ranks to blame, in the communicator on which the call was made.
    pub(crate) fn blame(&self) -> &Blame {
        &self.blame
    }

    /// How long the call waited for its peers without any progress; `None` where it did not wait.
    pub(crate) fn waited(&self) -> Option<Duration> {
        self.waited
    }

    /// The first rank that was found lost or late. Returns `None` for `ncclInvalidUsage`, because a
    /// rank that made a wrong call is not lost.
    pub(crate) fn lost(&self) -> Option<usize> {
        let first = self.blame.lost.first().or(self.blame.ranks.first()).copied();
        first.filter(|_| self.code != ncclInvalidUsage)
    }

    /// Returns this error with a note behind the message.
    pub(crate) fn noting(mut self, note: &str) -> Error {
        self.message = format!("{}; {note}", self.message);
        self
    }

    /// Returns this error, which came from another process, without the ranks that a communicator
    /// of `nranks` ranks does not have.
    pub(crate) fn of_ranks_below(self, nranks: usize) -> Error {
        let blame = self.blame.renumbered(|rank| (rank < nranks).then_some(rank));
        self.by(blame)
    }

    /// Returns this error with `call`, which met the error, in front of the message.
    pub(crate) fn within(mut self, call: &str) -> Error {
        self.message = format!("{call}: {}", self.message);
        self
    }
}

/// The last error of a thread.
#[derive(Default)]
struct Last {
    /// The message as C reads it; empty when there was no error.
    text: CString,
    /// Earlier messages that C may still read. A call that succeeds may make another error the last
    /// one, and the program may read the string that it has until its next failing call.
    kept: Vec<CString>,
    /// The error; `None` when there was none.
    error: Option<Error>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
    /// Whether the last error came after the thread's last [`begin_call`].
    static IS_FRESH: Cell<bool> = const { Cell::new(false) };
}

impl Last {
    /// Makes `error` the last one. The strings that C may read stay where they are.
    fn replace(&mut self, error: Error, text: CString) {
        self.error = Some(error);
        if self.text == text {
            return;
        }
        // A program may ask for the states of several communicators in turn. A text that is kept
        // already is used again, so `kept` does not grow.
        let known = self.kept.iter().position(|kept| *kept == text);
        let text = known.map_or(text, |known| self.kept.swap_remove(known));
        self.kept.push(std::mem::replace(&mut self.text, text));
    }
}

/// Makes `error`, with `message` in place of its own, this thread's last error, because a call
/// fails.
pub(crate) fn remember(error: Error, message: &str) {
    let text = c_text(message);
    note_last(|last| *last = Last { text, kept: Vec::new(), error: Some(error) });
}

/// Makes `error`, the state of a communicator, this thread's last error, while the call that asks
/// for the state succeeds.
pub(crate) fn remember_state(error: Error) {
    let text = c_text(error.message());
    note_last(|last| last.replace(error, text));
}

fn note_last(change: impl FnOnce(&mut Last)) {
    // A thread that is about to end has no such variables any more, and nobody can read its last
    // error.
    let _ = LAST.try_with(|place| change(&mut place.borrow_mut()));
    let _ = IS_FRESH.try_with(|is_fresh| is_fresh.set(true));
}

fn c_text(message: &str) -> CString {
    let text: Vec<u8> = message.bytes().map(|byte| if byte == 0 || byte == b'\n' { b' ' } else { byte }).collect();
    CString::new(text).unwrap_or_default()
}

/// Notes that the thread's last error, if there is one, belongs to an earlier call.
pub(crate) fn begin_call() {
    let _ = IS_FRESH.try_with(|is_fresh| is_fresh.set(false));
}

/// Returns this thread's last error. The string is valid until this thread's next failing call.
pub(crate) fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns this thread's last error, if it came after the last [`begin_call`].
pub(crate) fn fresh() -> Option<Error> {
    let is_fresh = IS_FRESH.try_with(Cell::get).unwrap_or(false);
    LAST.try_with(|last| last.borrow().error.clone().filter(|_| is_fresh)).ok().flatten()
}

/// Whether this thread has had an error.
pub(crate) fn has_last() -> bool {
    LAST.try_with(|last| last.borrow().error.is_some()).unwrap_or(false)
}

/// Returns the static sentence for a code.
#[allow(non_upper_case_globals)] // The constants have NCCL's names.
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

/// The results of the C functions.
pub(crate) trait Return {
    /// Returns what the C function returns when its body fails.
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

/// Runs the body of one C function. An error becomes its code and this thread's last error. A panic
/// becomes `ncclInternalError`.
///
/// In a forked child the body does not run, because everything that it could use belongs to the
/// parent.
#[inline]
pub(crate) fn guard<R: Return>(function: &'static str, body: impl FnOnce() -> Result<R>) -> R {
    let body = || if fork::is_child() && !is_free(function) { Err(Error::usage(fork::refusal())) } else { body() };
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => return result,
        Ok(Err(error)) => error,
        Err(panic) => Error::new(ncclInternalError, format!("a bug in hostccl: {}", panic_text(&*panic))),
    };
    R::failed(keep(function, error))
}

/// Makes the error of a function this thread's last error, and returns its code.
#[cold]
fn keep(function: &'static str, error: Error) -> ncclResult_t {
    let code = error.code;
    let message = error.message();
    let message = if message.starts_with(function) { message.to_owned() } else { format!("{function}: {message}") };
    remember(error, &message);
    code
}

/// Whether a function uses nothing that may belong to the parent of a forked child.
fn is_free(function: &str) -> bool {
    [
        "ncclGetVersion",
        "ncclGetErrorString",
        "ncclGetLastError",
        "ncclMemAlloc",
        "ncclMemFree",
        // It looks for the fork itself, because it has to release its data.
        "hostcclCommSetInterrupt",
    ]
    .contains(&function)
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

    #[test]
    fn a_string_stays_readable_while_no_call_fails() {
        remember(Error::usage("the first"), "the first");
        let first = last();
        for _ in 0..3 {
            for state in ["the first", "a longer second state", "a third"] {
                remember_state(Error::usage(state));
                // SAFETY: the string is valid until the next failing call.
                assert_eq!(unsafe { CStr::from_ptr(last()) }.to_str(), Ok(state));
            }
        }
        // SAFETY: as above; no call has failed since.
        assert_eq!(unsafe { CStr::from_ptr(first) }, c"the first");
        remember_state(Error::usage("the first"));
        assert_eq!(last(), first, "the string of an error that comes again is the same");
        assert_eq!(LAST.with_borrow(|last| last.kept.len()), 2, "each string is kept once");
        remember(Error::usage("the last"), "the last");
        assert_eq!(LAST.with_borrow(|last| last.kept.len()), 0);
    }
}
