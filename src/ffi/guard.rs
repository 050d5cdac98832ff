//! Every export runs inside this guard. A panic becomes `DM_STATUS_INTERNAL`, and a failure is kept
//! for `dm_last_error`. In a forked child of a process that holds worlds or communicators, only
//! functions run that ask a handle or compute ([`ask`]). Other functions would speak for the
//! parent, or wait for a lock that no thread gives back.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};

use hostccl::fork;

use super::types::{DM_STATUS_OK, dm_status};
use crate::error::{Error, Result};
use crate::logging::{self, Me};

/// A thread's last failure, with its message as C reads it.
pub(super) struct LastError {
    /// The failure.
    pub(super) error: Error,
    /// Its message, to which dm_last_error points.
    pub(super) message: CString,
    /// The name of its dimension, to which dm_error_info points.
    pub(super) dimension: Option<CString>,
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Runs `body` and returns its status. A failure becomes this thread's last error. In a forked
/// child `body` is not run.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> dm_status {
    if fork::is_child() {
        return refused();
    }
    ask(body)
}

#[cold]
fn refused() -> dm_status {
    Error::check_fork().map_or_else(remember, |()| DM_STATUS_OK)
}

/// Does what [`guard`] does, but runs `body` in a forked child too. In a forked child, `body` must
/// change nothing, talk to no other rank, and wait for no lock that a thread of the parent may have
/// held. A body that does more calls `Error::check_fork` first, as `World::session` does.
pub(super) fn ask(body: impl FnOnce() -> Result<()>) -> dm_status {
    match caught(body) {
        Ok(()) => DM_STATUS_OK,
        Err(error) => remember(error),
    }
}

/// Frees a handle by `body`. A failure of `body` does not change the last error. Does nothing in a
/// forked child, where destructors free handles that belong to the parent.
pub(super) fn free(body: impl FnOnce()) {
    if !fork::is_child() {
        let _ = caught(|| {
            body();
            Ok(())
        });
    }
}

/// Does what [`ask`] does, for functions that return a value instead of a status. They return
/// `otherwise` on failure.
pub(super) fn guard_or<T>(otherwise: T, body: impl FnOnce() -> Result<T>) -> T {
    match caught(body) {
        Ok(value) => value,
        Err(error) => {
            remember(error);
            otherwise
        }
    }
}

/// Calls `look` with this thread's last failure. It is `None` when no call has failed, and while
/// the thread is being torn down.
pub(super) fn with_last<R>(look: impl FnOnce(Option<&LastError>) -> R) -> R {
    let mut look = Some(look);
    let seen = LAST.try_with(|last| match last.try_borrow() {
        Ok(last) => look.take().map(|look| look(last.as_ref())),
        Err(_) => None,
    });
    match (seen.ok().flatten(), look) {
        (Some(answer), _) => answer,
        (None, Some(look)) => look(None),
        (None, None) => unreachable!("look was taken, so it has answered"),
    }
}

fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Data that a panic can leave half done lies behind locks. The modules that lock keep their
    // data whole at every statement, so they ignore the poison of a lock on purpose.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Error::of_panic(&*panic)))
}

fn remember(error: Error) -> dm_status {
    let status = error.status() as dm_status;
    // A callback may make calls that fail, and so change the last error. So this comes first.
    logging::init_from_environment();
    log::debug!("{Me}: a call fails with {}: {}", error.status().name(), error.message());
    let text = |text: &str| CString::new(text.replace('\0', "\\0")).unwrap_or_default();
    let (message, dimension) = (text(error.message()), error.dimension().map(text));
    // A thread that is exiting has no place for the error. The status still says what happened.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = Some(LastError { error, message, dimension });
        }
    });
    status
}

/// The empty string that stands for "no failure yet".
pub(super) const NO_ERROR: &CStr = c"";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::types::DM_STATUS_INTERNAL;

    #[test]
    fn a_panic_becomes_internal_with_its_message() {
        let status = guard(|| panic!("table index {} of {}", 7, 3));
        assert_eq!(status, DM_STATUS_INTERNAL);
        let message = with_last(|last| last.unwrap().message.to_str().unwrap().to_owned());
        assert!(message.contains("table index 7 of 3"), "{message}");
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        guard(|| Err(Error::invalid("mine")));
        let theirs = std::thread::spawn(|| with_last(|last| last.is_none())).join().unwrap();
        assert!(theirs, "a fresh thread has no last error");
        assert_eq!(with_last(|last| last.unwrap().error.message().to_owned()), "mine");
    }
}
