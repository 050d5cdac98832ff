//! Runs what may block on threads of the library's own: calls of a communicator library, so that
//! the caller's wait ends by its deadline, and the end of what nobody uses any more.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use hostccl::fork;

use crate::ccl::Library;
use crate::error::{Error, Result};
use crate::wait::Deadline;

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
        let done = done.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
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

/// How many threads of [`hand_over`] are at work.
static HANDED_OVER: Mutex<usize> = Mutex::new(0);
/// Wakes the threads that wait for the threads of [`hand_over`].
static HANDED_OVER_DONE: Condvar = Condvar::new();
/// How long the end of the process waits for those threads.
const AT_EXIT: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this is a thread of [`hand_over`].
    static IS_HANDED_OVER: Cell<bool> = const { Cell::new(false) };
}

/// Counts a thread of [`hand_over`] while this lives.
struct Counted;

impl Counted {
    fn new() -> Counted {
        *HANDED_OVER.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *HANDED_OVER.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        HANDED_OVER_DONE.notify_all();
    }
}

/// Drops `things` on a thread of the library's own, because that may join threads, talk to other
/// ranks and run functions of the program. Returns at once. A process that ends waits a moment for
/// such threads. Where no thread can be started, drops `things` here.
pub(super) fn hand_over<T: Send + 'static>(things: T) {
    if fork::is_child() {
        // The parent process owns what these things hold, so dropping them here does not block.
        return drop(things);
    }
    static AT_EXIT_ONCE: Once = Once::new();
    extern "C" fn wait_at_exit() {
        if !fork::is_child() {
            wait_for_handed_over(AT_EXIT);
        }
    }
    AT_EXIT_ONCE.call_once(|| {
        // SAFETY: the function takes no arguments, and does not unwind.
        unsafe { libc::atexit(wait_at_exit) };
    });
    let counted = Counted::new();
    let work = move || {
        let _counted = counted;
        IS_HANDED_OVER.set(true);
        // A panic has no caller to go to.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(things)));
    };
    // A closure that was not started is dropped, and the things with it.
    let _ = hostccl::thread::spawn("dm-free", work);
}

/// Waits until everything that was handed over is gone, but not longer than `patience`.
pub(super) fn wait_for_handed_over(patience: Duration) {
    if IS_HANDED_OVER.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let deadline = Deadline::after(patience);
    let mut count = HANDED_OVER.lock().unwrap_or_else(PoisonError::into_inner);
    while *count > 0 && !deadline.passed() {
        count = HANDED_OVER_DONE.wait_timeout(count, deadline.left()).unwrap_or_else(PoisonError::into_inner).0;
    }
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
    fn what_is_handed_over_is_dropped_elsewhere() {
        struct Slow(Arc<Mutex<Option<String>>>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let name = std::thread::current().name().map(str::to_owned);
                *self.0.lock().unwrap() = name;
            }
        }
        let name = Arc::new(Mutex::new(None));
        let held = name.lock().unwrap();
        hand_over(Slow(Arc::clone(&name)));
        drop(held);
        wait_for_handed_over(Duration::from_secs(60));
        assert_eq!(name.lock().unwrap().as_deref(), Some("dm-free"));
    }

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
        assert!(error.message().ends_with("please report it: as it is meant to"), "{error}");
    }
}
