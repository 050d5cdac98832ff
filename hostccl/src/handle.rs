//! Communicator handles. Callers name them by tokens, which are in the file `table`.

mod table;

use std::cell::RefCell;
use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use self::table::{find, insert, remove, with};
use crate::comm::Comm;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fork::Own;
use crate::labels::GlobalRanks;
use crate::operators::Operators;
use crate::timeout;
use crate::types::*;

/// The object for which a live token stands.
#[derive(Debug)]
pub(crate) struct Handle {
    /// The rank that the caller gave. It is 0 where the communicator is made from another one,
    /// because this rank's number is known only afterwards.
    rank: c_int,
    /// The number of ranks that the caller gave; 0 for a communicator that is made of another one.
    nranks: c_int,
    /// The device number that `ncclCommCuDevice` writes.
    pub(crate) device: c_int,
    /// The caller's configuration.
    pub(crate) config: Config,
    /// The flag that `ncclCommAbort` raises. The communicator shares it.
    pub(crate) aborted: Arc<AtomicBool>,
    /// The ranks' numbers in messages. A communicator that was made by a unique id shares them.
    pub(crate) global_ranks: GlobalRanks,
    /// The communicator, once this rank has joined it.
    comm: OnceLock<Arc<Comm>>,
    /// How many calls on this handle are in progress in the background. Joining counts as one.
    in_progress: AtomicU32,
    /// Whether `error` has an error. It is read without the lock.
    failed: AtomicBool,
    /// How long the making of the communicator may wait without progress, in milliseconds; 0 where
    /// it is not set. The communicator gets the value when it is made. The lock is held until the
    /// communicator has the value. Otherwise the communicator could get an old value after a new
    /// one.
    timeout_millis: Mutex<u64>,
    /// The error of the first call that failed in the background.
    error: Mutex<Option<Error>>,
    /// Wakes threads when a call in the background ends. It goes with the lock of `error`.
    finished: Condvar,
    /// The call in progress that has no thread of its own.
    without_thread: Mutex<CallWithoutThread>,
    /// The operators that `ncclRedOpCreatePreMulSum` made for the communicator.
    pub(crate) operators: Operators,
    /// Forked children may not use the handle.
    _own: Own<()>,
}

/// A call in progress that has no thread of its own. The call makes progress only while a thread
/// waits by `hostcclCommWait`.
pub(crate) trait WithoutThread: Send {
    /// Drives the call until it is over or `end` has come. Returns `None` where it is over, and its
    /// handles have the outcome then. Drops the call where `is_unwanted` says so at the end.
    fn drive_until(self: Box<Self>, end: Instant, is_unwanted: &dyn Fn() -> bool) -> Option<Box<dyn WithoutThread>>;
}

/// The place of a handle's call without a thread.
#[derive(Debug, Default)]
struct CallWithoutThread {
    /// The call, while no thread drives it.
    call: Option<Box<dyn WithoutThread>>,
    /// Whether a thread drives the call.
    is_driven: bool,
    /// Whether the handle takes no such call any more, because the communicator is aborted or
    /// destroyed.
    is_closed: bool,
}

/// A thread drives the call of a handle while this value lives. The call may panic.
struct Driving<'a>(&'a Handle);

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        lock(&self.0.without_thread).is_driven = false;
    }
}

impl fmt::Debug for dyn WithoutThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WithoutThread")
    }
}

thread_local! {
    /// The handles whose calls this thread drives, by their addresses. The thread keeps these
    /// handles.
    static DRIVEN_HERE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread drives the calls of some handles while this value lives.
pub(crate) struct DrivenHere {
    /// How many handles the thread drove before.
    before: usize,
}

impl DrivenHere {
    pub(crate) fn new<'a>(handles: impl Iterator<Item = &'a Arc<Handle>>) -> DrivenHere {
        DRIVEN_HERE.with_borrow_mut(|driven| {
            let before = driven.len();
            driven.extend(handles.map(|handle| Arc::as_ptr(handle).addr()));
            DrivenHere { before }
        })
    }
}

impl Drop for DrivenHere {
    fn drop(&mut self) {
        let _ = DRIVEN_HERE.try_with(|driven| driven.borrow_mut().truncate(self.before));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The longest time for which an abort or a revocation waits for calls that it has ended.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How long a thread waits for a call that another thread drives, before it looks whether that
/// thread has left the call.
const SECOND_LOOK: Duration = Duration::from_millis(20);

impl Handle {
    /// Returns a handle whose communicator is not made yet, with that call in progress.
    pub(crate) fn new(rank: c_int, nranks: c_int, device: c_int, config: Config) -> Handle {
        Handle {
            rank,
            nranks,
            device,
            config,
            aborted: Arc::default(),
            global_ranks: GlobalRanks::default(),
            comm: OnceLock::new(),
            in_progress: AtomicU32::new(1),
            failed: AtomicBool::new(false),
            timeout_millis: Mutex::new(0),
            error: Mutex::new(None),
            finished: Condvar::new(),
            without_thread: Mutex::default(),
            operators: Operators::default(),
            _own: Own::new(()),
        }
    }

    /// Returns the communicator. Fails while a call on the handle is in progress in the background.
    pub(crate) fn ready(&self) -> Result<&Arc<Comm>> {
        self.comm_unless_in_progress()?.ok_or_else(|| {
            Error::argument(
                "the communicator is still in progress: ask ncclCommGetAsyncError until it says ncclSuccess",
            )
        })
    }

    /// Returns the communicator for an operation. A split of it may be in progress in the
    /// background: the split and the operation take turns, as calls of several threads do.
    pub(crate) fn for_operation(&self) -> Result<&Arc<Comm>> {
        self.check()?;
        self.comm.get().map_or_else(|| self.ready(), Ok)
    }

    /// Returns the communicator, or `None` while a call on the handle is in progress in the
    /// background.
    fn comm_unless_in_progress(&self) -> Result<Option<&Arc<Comm>>> {
        // `in_progress` is read before the failure. So a call that fails between the two reads
        // counts as in progress.
        let busy = self.in_progress();
        self.check()?;
        Ok(self.comm.get().filter(|_| !busy))
    }

    /// Fails when a call in the background has failed.
    #[inline]
    fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Acquire) {
            true => Err(lock(&self.error).clone().unwrap_or_else(Error::aborted)),
            false => Ok(()),
        }
    }

    /// Returns the rank and the number of ranks.
    pub(crate) fn rank_and_size(&self) -> (c_int, c_int) {
        self.comm.get().map_or((self.rank, self.nranks), |comm| (comm.whole().0 as c_int, comm.whole().1 as c_int))
    }

    /// Returns the communicator if it is made.
    pub(crate) fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.get()
    }

    /// Sets how long waits may last without progress from now on, also while the communicator is
    /// made.
    pub(crate) fn set_timeout(&self, millis: u64) -> Result<()> {
        self.check()?;
        let mut timeout_millis = lock(&self.timeout_millis);
        *timeout_millis = millis;
        if let Some(comm) = self.comm.get() {
            comm.set_timeout(millis);
        }
        Ok(())
    }

    /// Sets the numbers by which messages name the ranks. The first numbers that are set stay.
    pub(crate) fn set_global_ranks(&self, ranks: &[i32]) {
        let _ = self.global_ranks.set(ranks.into());
        if let Some(comm) = self.comm.get() {
            let _ = comm.labels.global_ranks.set(ranks.into());
        }
    }

    /// Returns how long waits may last without progress, where `set_timeout` has set it.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        timeout::from_millis(*lock(&self.timeout_millis))
    }

    /// Counts a call that begins in the background.
    pub(crate) fn begin(&self) {
        self.in_progress.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes a call in progress that has no thread. Gives the call back where the handle has another
    /// one, and where the communicator is aborted or destroyed, because then nobody waits for it.
    pub(crate) fn keep_without_thread<T: WithoutThread + 'static>(&self, call: T) -> std::result::Result<(), T> {
        let mut place = lock(&self.without_thread);
        if place.is_closed || place.is_driven || place.call.is_some() {
            return Err(call);
        }
        place.call = Some(Box::new(call));
        Ok(())
    }

    /// Drops the call that has no thread, and takes no other one. The drop ends the call and gives
    /// its handles an error. A thread that drives the call drops it when it stops.
    fn close_without_thread(&self) {
        let call = {
            let mut place = lock(&self.without_thread);
            place.is_closed = true;
            place.call.take()
        };
        drop(call);
    }

    /// Ends the call that makes the communicator, with its outcome.
    pub(crate) fn set_comm(&self, joined: Result<Arc<Comm>>) {
        let outcome = joined.map(|comm| {
            let timeout_millis = lock(&self.timeout_millis);
            comm.set_timeout(*timeout_millis);
            let _ = self.comm.set(comm);
        });
        self.finish(outcome);
    }

    /// Ends a call in the background, with its outcome.
    pub(crate) fn finish(&self, outcome: Result<()>) {
        let mut error = lock(&self.error);
        if let Err(failure) = outcome {
            error.get_or_insert(failure);
            self.failed.store(true, Ordering::Release);
        }
        self.in_progress.fetch_sub(1, Ordering::AcqRel);
        self.finished.notify_all();
    }

    /// Returns the answer of `ncclCommGetAsyncError`: `ncclSuccess`, `ncclInProgress`, or the
    /// error.
    pub(crate) fn status(&self) -> Result<ncclResult_t> {
        let progress = self.progress()?;
        match self.comm.get() {
            Some(comm) if progress == ncclSuccess && !comm.is_revoked() => {
                comm.check_peers(None, &String::new).map(|()| ncclSuccess)
            }
            _ => Ok(progress),
        }
    }

    /// Returns the answer of `hostcclCommWait`, which is that of `ncclCommGetAsyncError` except that
    /// the processes of the peers are not checked. The first check opens a descriptor of each
    /// process. While 32 ranks make communicators, that takes them more than a quarter of their
    /// processor time.
    pub(crate) fn progress(&self) -> Result<ncclResult_t> {
        match self.comm_unless_in_progress()? {
            Some(comm) if comm.is_revoked() => Ok(ncclSuccess),
            Some(comm) => {
                comm.catch_up();
                comm.check_before_call().map(|()| ncclSuccess)
            }
            None => Ok(ncclInProgress),
        }
    }

    /// Returns the rank that a call found lost or late, including calls in the background.
    pub(crate) fn lost_rank(&self) -> Option<usize> {
        let in_background = lock(&self.error).as_ref().and_then(Error::lost);
        in_background.or_else(|| self.comm.get()?.lost_rank())
    }

    /// Whether a call on the handle is in progress in the background.
    pub(crate) fn in_progress(&self) -> bool {
        self.in_progress.load(Ordering::Acquire) > 0
    }

    /// Ends the communicator on all ranks.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        if let Some(comm) = self.comm.get() {
            comm.abort();
        }
        // A call in the background sees the raised flag after at most one slice of its sleep. The
        // thread of that call may itself abort, in a log callback of the program. It does not wait
        // for itself.
        self.close_without_thread();
        if !self.is_driven_here() {
            self.wait_finished(LONGEST_WAIT);
        }
        // That call may have joined the communicator just before it looked at the flag.
        if let Some(comm) = self.comm.get() {
            comm.abort();
        }
    }

    /// Revokes the communicator: ends its calls on all ranks, and waits until no call of this rank
    /// is under way.
    pub(crate) fn revoke(&self) -> Result<()> {
        let Some(comm) = self.comm.get() else { return self.ready().map(|_| ()) };
        comm.revoke()?;
        if !self.is_driven_here() {
            self.wait(LONGEST_WAIT);
        }
        // A call in the background may have failed. The communicator has ended for that call, too.
        lock(&self.error).take();
        self.failed.store(false, Ordering::Release);
        comm.wait_until_idle(Some(LONGEST_WAIT))
    }

    /// Whether the calling thread is the one that drives this handle's calls.
    fn is_driven_here(&self) -> bool {
        // A thread that is ending has no list any more, and drives nothing.
        let address = std::ptr::from_ref(self).addr();
        DRIVEN_HERE.try_with(|driven| driven.borrow().contains(&address)).unwrap_or(false)
    }

    /// Leaves the communicator. A call in progress in the background is aborted first.
    pub(crate) fn destroy(&self) {
        if self.in_progress() {
            return self.abort();
        }
        self.close_without_thread();
        if let Some(comm) = self.comm.get() {
            comm.leave();
        }
    }

    /// Waits until no call is in progress in the background, but for `longest` at most. Drives the
    /// call that has no thread, unless another thread does so.
    pub(crate) fn wait(&self, longest: Duration) {
        let end = Instant::now() + longest;
        loop {
            let mut place = lock(&self.without_thread);
            let Some(call) = place.call.take() else {
                let is_driven = place.is_driven;
                drop(place);
                let left = end.saturating_duration_since(Instant::now());
                self.wait_finished(if is_driven { left.min(SECOND_LOOK) } else { left });
                if is_driven && self.in_progress() && Instant::now() < end {
                    continue;
                }
                return;
            };
            place.is_driven = true;
            drop(place);
            // The lock is not held meanwhile, so an abort of another thread is never kept waiting by
            // what this thread does.
            let driving = Driving(self);
            let Some(left) = call.drive_until(end, &|| lock(&self.without_thread).is_closed) else { return };
            let mut place = lock(&self.without_thread);
            // From here on another thread may drive the call.
            place.is_driven = false;
            std::mem::forget(driving);
            let unwanted = if place.is_closed { Some(left) } else { place.call.replace(left) };
            drop(place);
            return drop(unwanted);
        }
    }

    /// Waits until no call is in progress in the background, but for `longest` at most.
    fn wait_finished(&self, longest: Duration) {
        let error = lock(&self.error);
        let _ = self.finished.wait_timeout_while(error, longest, |_| self.in_progress());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::crowd::Crowd;
    use crate::labels::{GlobalRanks, Labels};
    use crate::process::ProcessId;
    use crate::segment::{self, Segment};

    fn handle() -> Arc<Handle> {
        Arc::new(Handle::new(0, 1, 0, Config::default()))
    }

    #[test]
    fn a_token_dies_with_its_handle() {
        let first = insert(handle()).unwrap();
        assert!(find(first).is_ok());
        remove(first).unwrap();
        let second = insert(handle()).unwrap();
        assert_eq!(find(first).unwrap_err().code(), ncclInvalidArgument);
        assert_eq!(remove(first).unwrap_err().code(), ncclInvalidArgument);
        assert_ne!(first, second);
        remove(second).unwrap();
    }

    #[test]
    fn a_time_that_is_set_while_the_communicator_is_made_holds() {
        for _ in 0..200 {
            let fd = segment::create([5; 16]).unwrap();
            let labels =
                Labels { comm_name: "it".to_owned(), global_ranks: GlobalRanks::default(), seats: Box::default() };
            let segment = Segment::map(&fd, 1, 0, &Labels::default()).unwrap();
            let comm =
                Arc::new(Comm::new(segment, 0, Crowd::default(), labels, Arc::default(), ProcessId::current(), None));
            let (handle, both) = (handle(), std::sync::Barrier::new(2));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    handle.set_timeout(7).unwrap();
                });
                both.wait();
                handle.set_comm(Ok(comm));
            });
            assert_eq!(handle.comm().unwrap().timeout(), Some(Duration::from_millis(7)));
        }
    }

    #[test]
    fn a_thread_that_drives_a_call_in_the_background_can_abort_it() {
        let (driven, other) = (handle(), handle());
        let abort_here = |handle: &Arc<Handle>| {
            let began = Instant::now();
            handle.abort();
            began.elapsed()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _here = DrivenHere::new([&driven].into_iter());
                assert!(abort_here(&driven) < Duration::from_secs(4), "the thread has waited for itself");
                driven.finish(Err(Error::aborted()));
                other.finish(Err(Error::aborted()));
            });
            // Another thread waits until the call has ended.
            abort_here(&other);
            assert!(!other.in_progress());
        });
        assert!(driven.aborted.load(Ordering::SeqCst));
    }

    /// A call without a thread that counts its drives, and whether it was dropped.
    struct Counted {
        handle: Arc<Handle>,
        drives: Arc<AtomicU32>,
        /// The call is over when it was driven so many times.
        needed: u32,
        panics: bool,
    }

    impl WithoutThread for Counted {
        fn drive_until(
            self: Box<Self>,
            end: Instant,
            is_unwanted: &dyn Fn() -> bool,
        ) -> Option<Box<dyn WithoutThread>> {
            assert!(!self.panics, "as it is meant to");
            let drives = self.drives.fetch_add(1, Ordering::SeqCst) + 1;
            while drives < self.needed && Instant::now() < end && !is_unwanted() {
                std::thread::yield_now();
            }
            (drives < self.needed && !is_unwanted()).then_some(self as Box<dyn WithoutThread>)
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.handle.finish(Ok(()));
        }
    }

    fn counted(handle: &Arc<Handle>, needed: u32, panics: bool) -> (Counted, Arc<AtomicU32>) {
        let drives = Arc::<AtomicU32>::default();
        (Counted { handle: Arc::clone(handle), drives: Arc::clone(&drives), needed, panics }, drives)
    }

    #[test]
    fn a_thread_takes_a_call_over_that_another_one_has_left() {
        let handle = handle();
        let (call, drives) = counted(&handle, 2, false);
        assert!(handle.keep_without_thread(call).is_ok());
        assert!(handle.keep_without_thread(counted(&handle, 1, false).0).is_err(), "there is a call already");
        handle.begin();
        std::thread::scope(|scope| {
            scope.spawn(|| handle.wait(Duration::from_millis(50)));
            while drives.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let began = Instant::now();
            handle.wait(Duration::from_secs(60));
            assert!(began.elapsed() < Duration::from_secs(30), "nobody has driven the call");
        });
        assert!(!handle.in_progress());
        assert_eq!(drives.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_call_that_panics_is_dropped_and_leaves_the_handle_usable() {
        let handle = handle();
        assert!(handle.keep_without_thread(counted(&handle, 1, true).0).is_ok());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| handle.wait(Duration::ZERO)));
        assert!(panicked.is_err() && !handle.in_progress());
        handle.begin();
        assert!(handle.keep_without_thread(counted(&handle, 1, false).0).is_ok());
        handle.wait(Duration::from_secs(60));
        assert!(!handle.in_progress());
    }

    #[test]
    fn an_aborted_handle_keeps_no_call() {
        let handle = handle();
        let (call, drives) = counted(&handle, 2, false);
        assert!(handle.keep_without_thread(call).is_ok());
        std::thread::scope(|scope| {
            scope.spawn(|| handle.wait(Duration::from_secs(60)));
            while drives.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let began = Instant::now();
            handle.abort();
            assert!(began.elapsed() < Duration::from_secs(4), "the abort has waited for the other thread");
        });
        // A call that began before the abort and is kept after it would never end.
        handle.begin();
        assert!(handle.keep_without_thread(counted(&handle, 1, false).0).is_err());
        assert!(!handle.in_progress());
    }

    #[test]
    fn made_up_tokens_are_refused() {
        for raw in [0_usize, 1, 16, 0xb, 0xdead_beef, usize::MAX, usize::MAX - 4] {
            let made_up = std::ptr::without_provenance_mut(raw);
            assert_eq!(find(made_up).unwrap_err().code(), ncclInvalidArgument, "{raw:#x}");
        }
    }
}
