//! Runs work that may block on the library's own threads. One kind of work is a call of a
//! communicator library, whose caller waits only until its deadline. The other kind ends things
//! that nobody uses any more.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use hostccl::fork;

use crate::ccl::Library;
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// How far the work of a thread is.
enum Progress<T> {
    UnderWay,
    Done(Result<T>),
    /// The caller has given up and takes no result any more.
    Abandoned,
}

/// Work that a [`Worker`] has begun.
pub(super) struct Pending<T>(Arc<Mutex<Progress<T>>>);

impl<T> Pending<T> {
    fn progress(&self) -> MutexGuard<'_, Progress<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what the work returns. `wait` waits for the end of the work, and gets a function
    /// that says whether the work is done. When `wait` gives up first, its error is returned, and
    /// the thread is left behind.
    pub(super) fn finish(self, wait: impl FnOnce(&dyn Fn() -> Result<bool>) -> Result<()>) -> Result<Result<T>> {
        let waited = wait(&|| Ok(!matches!(*self.progress(), Progress::UnderWay)));
        let progress = std::mem::replace(&mut *self.progress(), Progress::Abandoned);
        match (progress, waited) {
            (Progress::Done(done), _) => Ok(done),
            (_, Err(error)) => Err(error),
            (_, Ok(())) => Err(Error::internal("the wait for a thread returned before the thread was done")),
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// The idle threads that have made communicators. These threads wait for the next call that makes
/// a communicator, and never end.
static IDLE: Mutex<Vec<Arc<Worker>>> = Mutex::new(Vec::new());

/// A [`Worker`] for one call of this library that makes communicators.
///
/// All of NCCL's calls that make a communicator, and the abort after a failure, run on one thread,
/// and this thread lives as long as the process. The reason is in NCCL up to 2.26: the job that
/// makes a non-blocking communicator is in a variable of the thread that began it
/// (`ncclGroupJobMain`). From 2.19 on the communicator points to it (`comm->groupJob`), and a later
/// call of any thread follows that pointer.
pub(super) struct MakingWorker(Arc<Worker>);

impl MakingWorker {
    /// Takes a thread that is idle, or one that is not started yet.
    pub(super) fn take(library: &Arc<Library>) -> MakingWorker {
        let mut idle = idle();
        let known = idle.iter().position(|worker| worker.library.is_same(library));
        let taken = known.map(|at| idle.swap_remove(at));
        MakingWorker(taken.unwrap_or_else(|| Arc::new(Worker::new(library, "dm-making"))))
    }
}

impl std::ops::Deref for MakingWorker {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        &self.0
    }
}

impl Drop for MakingWorker {
    fn drop(&mut self) {
        // A thread inside a call that does not return is left behind, and is not idle.
        if self.0.jobs().is_some() && self.0.under_way.load(Ordering::SeqCst) == 0 {
            idle().push(Arc::clone(&self.0));
        }
    }
}

fn idle() -> MutexGuard<'static, Vec<Arc<Worker>>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread on which calls of a communicator library run, one after another, so that the caller's
/// wait ends by its deadline. The thread starts with the first call and ends with this value. A
/// thread inside a call that does not return is left behind, because nothing can end it. The next
/// call then gets a new thread.
///
/// No group is open on the thread. Inside an open group a library would put the calls off.
pub(super) struct Worker {
    /// The library whose calls run here.
    library: Arc<Library>,
    /// The thread's name.
    name: &'static str,
    /// How many calls were handed to the thread and have not returned.
    under_way: Arc<AtomicUsize>,
    /// Where the thread gets its calls; `None` while there is no thread.
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Worker {
    /// Returns a worker whose thread has that name and is not started yet.
    pub(super) fn new(library: &Arc<Library>, name: &'static str) -> Worker {
        Worker { library: Arc::clone(library), name, under_way: Arc::default(), jobs: Mutex::new(None) }
    }

    fn jobs(&self) -> MutexGuard<'_, Option<Sender<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the thread, with the device of the calling thread, and returns what `work`
    /// returns. `wait` waits as in [`Pending::finish`]. If the wait gives up and `work` succeeds
    /// later, the thread passes the result to `discard`. A panic of `work` ends the wait at once
    /// with an error.
    ///
    /// The outer error says that `wait` gave up, and that the thread may still be inside `work`.
    /// After an inner error no thread is inside. The inner error is that of `work`, or says that
    /// the thread did not start or could not select the device, or that `work` panicked.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        discard: impl FnOnce(T) + Send + 'static,
        wait: impl FnOnce(&dyn Fn() -> Result<bool>) -> Result<()>,
    ) -> Result<Result<T>> {
        match self.start(work, discard) {
            // The thread may be inside a call that does not return.
            Ok(pending) => pending.finish(wait).inspect_err(|_| drop(self.jobs().take())),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Begins `work` on the thread, as [`run`](Worker::run) does, and does not wait. `work` does
    /// not run when the thread cannot select the caller's device.
    fn start<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        discard: impl FnOnce(T) + Send + 'static,
    ) -> Result<Pending<T>> {
        let device = self.library.current_device();
        self.start_job(move || device.and_then(|device| device.select()).and_then(|()| work()), discard)
    }

    /// Begins an abort on the thread and does not wait. The abort is tried even where the thread
    /// cannot select the caller's device, because nobody else ends the communicator.
    pub(super) fn start_abort(&self, abort: impl FnOnce() -> Result<()> + Send + 'static) -> Result<Pending<()>> {
        let device = self.library.current_device();
        let work = move || {
            let _ = device.and_then(|device| device.select());
            abort()
        };
        self.start_job(work, drop)
    }

    fn start_job<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        discard: impl FnOnce(T) + Send + 'static,
    ) -> Result<Pending<T>> {
        let progress = Arc::new(Mutex::new(Progress::UnderWay));
        let shared = Arc::clone(&progress);
        let counted = CallUnderWay::new(&self.under_way);
        let job: Job = Box::new(move || {
            let done = catch_unwind(AssertUnwindSafe(work));
            let done = done.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            // A caller that sees the result finds the thread idle.
            drop(counted);
            let mut progress = shared.lock().unwrap_or_else(PoisonError::into_inner);
            match (&*progress, done) {
                (Progress::Abandoned, Ok(made)) => {
                    drop(progress);
                    discard(made);
                }
                (_, done) => *progress = Progress::Done(done),
            }
        });
        self.hand_to_thread(job)?;
        Ok(Pending(progress))
    }

    fn hand_to_thread(&self, job: Job) -> Result<()> {
        let mut jobs = self.jobs();
        if jobs.is_none() {
            let (sender, receiver) = channel::<Job>();
            let spawned = hostccl::thread::spawn(self.name, move || receiver.into_iter().for_each(|job| job()));
            spawned.map_err(|error| Error::no_thread(&error))?;
            *jobs = Some(sender);
        }
        if jobs.as_ref().is_some_and(|sender| sender.send(job).is_ok()) {
            return Ok(());
        }
        // The next call gets a new thread.
        *jobs = None;
        Err(Error::internal("a thread of the library ended before its work"))
    }
}

/// Counts a call of a [`Worker`] as long as this value lives. The value is dropped when the call
/// has returned, or when the call could not be handed to the thread.
struct CallUnderWay(Arc<AtomicUsize>);

impl CallUnderWay {
    fn new(count: &Arc<AtomicUsize>) -> CallUnderWay {
        count.fetch_add(1, Ordering::SeqCst);
        CallUnderWay(Arc::clone(count))
    }
}

impl Drop for CallUnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
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

/// Counts a thread of [`hand_over`] as long as this value lives.
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

/// Drops `things` on a thread of the library's own, because dropping them may join threads, talk to
/// other ranks and run functions of the program. Returns at once. A process that exits waits for
/// such threads, but not longer than [`AT_EXIT`]. Where no thread can be started, drops `things`
/// here.
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
    fn a_call_without_a_thread_is_not_under_way() {
        let library = ccl::for_device("cpu").unwrap();
        let worker = Worker::new(&library, "dm-background");
        // A thread that has ended takes no calls.
        *worker.jobs() = Some(channel().0);
        let refused = worker.run(|| Ok(()), drop, |_| unreachable!("there is nothing to wait for"));
        assert_eq!(refused.unwrap().unwrap_err().status(), Status::Internal);
        assert_eq!(worker.under_way.load(Ordering::SeqCst), 0);
        // The next call gets a new thread.
        let wait = Wait::after(Duration::from_secs(3600));
        let done = worker.run(
            || Ok(7),
            drop,
            |is_done| poll_until_done(&wait, || "the work".to_owned(), std::thread::sleep, is_done),
        );
        assert_eq!(done.unwrap().unwrap(), 7);
        assert_eq!(worker.under_way.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panic_of_the_work_ends_the_wait_at_once() {
        let library = ccl::for_device("cpu").unwrap();
        let wait = Wait::after(Duration::from_secs(3600));
        let ended = Worker::new(&library, "dm-background").run(
            || -> Result<()> { panic!("as it is meant to") },
            drop,
            |is_done| poll_until_done(&wait, || "the work".to_owned(), std::thread::sleep, is_done),
        );
        let error = ended.unwrap().unwrap_err();
        assert_eq!(error.status(), Status::Internal);
        assert!(error.message().ends_with("please report it: as it is meant to"), "{error}");
    }
}
