//! Runs a blocking call of a communicator library on a thread of its own, so that the caller's wait
//! ends by its deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ccl::Library;
use crate::error::{Error, Result};

/// Where the work of the thread stands.
enum Progress<T> {
    UnderWay,
    Done(Result<T>),
    /// The caller has given up and takes no result any more.
    Abandoned,
}

/// Returns what `work` returns. `wait` waits for the end of the work. It gets a function that says
/// whether the work is done. When `wait` gives up first, its error is returned. The thread is then
/// left behind inside the library, where nothing can end it, and hands what it still makes to
/// `discard`. A panic of `work` ends the wait at once with an error.
pub(super) fn in_background<T: Send + 'static>(
    library: &Library,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    discard: impl FnOnce(T) + Send + 'static,
    wait: impl FnOnce(&dyn Fn() -> Result<bool>) -> Result<()>,
) -> Result<Result<T>> {
    let device = library.current_device()?;
    let progress = Arc::new(Mutex::new(Progress::UnderWay));
    let shared = Arc::clone(&progress);
    let work = move || {
        let done = catch_unwind(AssertUnwindSafe(|| device.select().and_then(|()| work())));
        let done = done.unwrap_or_else(|_| Err(Error::internal("a call on a background thread panicked")));
        let mut progress = shared.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*progress, done) {
            (Progress::Abandoned, Ok(made)) => {
                drop(progress);
                discard(made);
            }
            (_, done) => *progress = Progress::Done(done),
        }
    };
    let spawned = hostccl::thread::spawn("dm-background", work);
    spawned.map_err(|error| Error::no_thread(&error))?;
    let lock = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = wait(&|| Ok(!matches!(*lock(), Progress::UnderWay)));
    match (std::mem::replace(&mut *lock(), Progress::Abandoned), waited) {
        (Progress::Done(done), _) => Ok(done),
        (_, Err(error)) => Err(error),
        (_, Ok(())) => Err(Error::internal("a wait for a thread ended before it")),
    }
}

/// Runs `work` on a thread of its own, which has the calling thread's device and no group. Where no
/// thread can be started, runs it here.
pub(super) fn on_own_thread(library: &Library, name: &str, work: impl Fn() -> Result<()> + Sync) -> Result<()> {
    let device = library.current_device();
    std::thread::scope(|scope| {
        let begin = || {
            // Where the device cannot be selected, the work is tried all the same.
            let _ = device.and_then(|device| device.select());
            work()
        };
        match hostccl::thread::spawn_scoped(scope, name, begin) {
            Ok(thread) => {
                thread.join().unwrap_or_else(|_| Err(Error::internal("a call on a thread of its own panicked")))
            }
            Err(_) => work(),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ccl;
    use crate::comm::polling::poll_until_done;
    use crate::error::Status;
    use crate::wait::Wait;

    #[test]
    fn a_panic_of_the_work_ends_the_wait_at_once() {
        let library = ccl::for_device("cpu").unwrap();
        let wait = Wait::after(Duration::from_secs(3600));
        let ended = in_background(
            &library,
            || -> Result<()> { panic!("as it is meant to") },
            drop,
            |is_done| poll_until_done(&wait, || "the work".to_owned(), std::thread::sleep, is_done),
        );
        let error = ended.unwrap().unwrap_err();
        assert_eq!(error.status(), Status::Internal);
        assert!(error.message().contains("panicked"), "{error}");
    }
}
