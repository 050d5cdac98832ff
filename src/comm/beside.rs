//! Calls of a communicator library that block, on a thread of their own: the caller's wait still ends by its deadline.

use std::sync::{Arc, Mutex, PoisonError};

use crate::ccl::Library;
use crate::error::{Error, Result};

enum Work<T> {
    UnderWay,
    Done(Result<T>),
    Abandoned,
}

/// What `work` gives, for whose end `wait` waits with the question whether it has come. Where that gives up first, its error: the thread is left
/// behind inside the library, where nothing could end it, and hands what it still makes to `too_late`.
pub(super) fn beside<T: Send + 'static>(
    library: &Library,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    too_late: impl FnOnce(T) + Send + 'static,
    wait: impl FnOnce(&dyn Fn() -> Result<bool>) -> Result<()>,
) -> Result<Result<T>> {
    let device = library.current_device()?;
    let state = Arc::new(Mutex::new(Work::UnderWay));
    let shared = Arc::clone(&state);
    let work = move || {
        let done = device.select().and_then(|()| work());
        let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*state, done) {
            (Work::Abandoned, Ok(made)) => too_late(made),
            (_, done) => *state = Work::Done(done),
        }
    };
    let spawned = hostccl::thread::spawn("dm-beside", work);
    spawned.map_err(|error| Error::no_thread(&error))?;
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = wait(&|| Ok(!matches!(*lock(), Work::UnderWay)));
    match (std::mem::replace(&mut *lock(), Work::Abandoned), waited) {
        (Work::Done(done), _) => Ok(done),
        (_, Err(error)) => Err(error),
        (_, Ok(())) => Err(Error::internal("a wait for a thread ended before it")),
    }
}
