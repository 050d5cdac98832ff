//! Communicator handles. Callers name them by tokens, which are in the file `table`. The file
//! `without_thread` has the call in progress that waiting threads drive.

mod table;
mod without_thread;

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use self::table::{find, insert, remove, with};
pub(crate) use self::without_thread::WithoutThread;
use self::without_thread::{Driver, Place};
use crate::call_name::Name;
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
    /// The rank that the caller gave. It is 0 for a split or a shrink, because this rank's number
    /// is known only afterwards.
    rank: c_int,
    /// The number of ranks that the caller gave; 0 for a split or a shrink.
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
    /// The tags of the names of the splits in progress in the background.
    splits: Mutex<Vec<u64>>,
    /// Whether `splits` has a tag. It is read without the lock, and changes only under the lock.
    has_split: AtomicBool,
    /// Whether `error` has an error. It is read without the lock, and changes only under the lock.
    failed: AtomicBool,
    /// The time for the whole making of the communicator, in milliseconds; 0 where it is not set.
    /// The communicator gets the value when it is made. The lock is held until the communicator has
    /// the value. Otherwise the communicator could get an old value after a new one.
    timeout_millis: Mutex<u64>,
    /// The error of the first call that failed in the background.
    error: Mutex<Option<Error>>,
    /// Wakes threads when a call in the background ends. It goes with the lock of `error`.
    finished: Condvar,
    /// The call in progress that has no thread of its own.
    pub(crate) without_thread: Place,
    /// The operators that `ncclRedOpCreatePreMulSum` made for the communicator.
    pub(crate) operators: Operators,
    /// Forked children may not use the handle.
    _own: Own<()>,
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

/// Returns the error of a call on a handle whose other call is in progress in the background.
#[cold]
fn in_progress() -> Error {
    Error::argument("the communicator is still in progress: ask ncclCommGetAsyncError until it says ncclSuccess")
}

/// The longest time for which an abort or a revocation waits for calls that it has ended.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How long a thread waits for a call that another thread drives, before it looks whether that
/// thread has left the call.
const SECOND_LOOK: Duration = Duration::from_millis(20);

impl Handle {
    /// Returns a handle whose communicator is not made yet. The call that makes the communicator
    /// counts as in progress.
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
            splits: Mutex::default(),
            has_split: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            timeout_millis: Mutex::new(0),
            error: Mutex::new(None),
            finished: Condvar::new(),
            without_thread: Place::default(),
            operators: Operators::default(),
            _own: Own::new(()),
        }
    }

    /// Returns the communicator. Fails while a call on the handle is in progress in the background.
    pub(crate) fn ready(&self) -> Result<&Arc<Comm>> {
        self.comm_unless_in_progress()?.ok_or_else(in_progress)
    }

    /// Does what [`ready`](Handle::ready) does, also where a call in the background has failed.
    pub(crate) fn ready_or_failed(&self) -> Result<&Arc<Comm>> {
        let made = self.comm.get().filter(|_| !self.in_progress());
        made.map_or_else(|| self.ready(), Ok)
    }

    /// Forgets that a call in the background has failed.
    pub(crate) fn forget_failure(&self) {
        let mut error = lock(&self.error);
        *error = None;
        self.failed.store(false, Ordering::Release);
    }

    /// Returns the communicator for a message.
    #[inline]
    pub(crate) fn for_message(&self) -> Result<&Arc<Comm>> {
        self.check()?;
        self.comm.get().map_or_else(|| self.ready(), Ok)
    }

    /// Returns the communicator for a collective under a name. A split under another name may be in
    /// progress; the two then take turns. While a split under the same name is in progress, the
    /// collective is refused, because the ranks could not tell the two apart.
    #[inline]
    pub(crate) fn for_collective(&self, name: &Name) -> Result<&Arc<Comm>> {
        match self.has_split.load(Ordering::Acquire) && lock(&self.splits).contains(&name.tag) {
            true => Err(in_progress()),
            false => self.for_message(),
        }
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
            // Where there is no error any more, a revocation has removed it meanwhile.
            true => lock(&self.error).clone().map_or(Ok(()), Err),
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

    /// Sets how long waits may last without progress from now on. While an init or a growth makes
    /// the communicator, this is the time for the whole making.
    pub(crate) fn set_timeout(&self, millis: u64) -> Result<()> {
        self.check()?;
        let mut timeout_millis = lock(&self.timeout_millis);
        *timeout_millis = millis;
        if let Some(comm) = self.comm.get() {
            comm.set_timeout(millis);
        }
        Ok(())
    }

    /// Sets the numbers by which messages name the ranks. Where numbers are set already, these
    /// numbers stay.
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

    /// Counts a call that begins in the background. `split` is the name of the call if it is a
    /// split.
    pub(crate) fn begin(&self, split: Option<Name>) {
        if let Some(name) = split {
            let mut splits = lock(&self.splits);
            splits.push(name.tag);
            self.has_split.store(true, Ordering::Release);
        }
        self.in_progress.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that a split of that name in the background is over.
    pub(crate) fn end_split(&self, name: Name) {
        let mut splits = lock(&self.splits);
        if let Some(at) = splits.iter().position(|tag| *tag == name.tag) {
            splits.swap_remove(at);
        }
        self.has_split.store(!splits.is_empty(), Ordering::Release);
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

    /// Returns the answer of `hostcclCommWait`. It is the answer of `ncclCommGetAsyncError`, but
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
        self.without_thread.close();
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
        // If a join in the background ends just now, `ready` returns its communicator.
        let comm = self.comm.get().map_or_else(|| self.ready(), Ok)?;
        comm.revoke()?;
        if !self.is_driven_here() {
            self.wait(LONGEST_WAIT);
        }
        // A call in the background may have failed. The communicator has ended for that call, too.
        self.forget_failure();
        comm.wait_until_idle(Some(LONGEST_WAIT))
    }

    /// Whether the calling thread is the one that drives this handle's calls.
    fn is_driven_here(&self) -> bool {
        // A thread that is ending has no list any more, and drives nothing.
        let address = std::ptr::from_ref(self).addr();
        DRIVEN_HERE.try_with(|driven| driven.borrow().contains(&address)).unwrap_or(false)
    }

    /// Leaves the communicator. While a call on the handle is in progress in the background, this
    /// function aborts the communicator on all ranks instead.
    pub(crate) fn destroy(&self) {
        if self.in_progress() {
            return self.abort();
        }
        self.without_thread.close();
        if let Some(comm) = self.comm.get() {
            comm.leave();
        }
    }

    /// Waits until no call is in progress in the background, but for `longest` at most. Drives the
    /// call that has no thread, unless another thread does so.
    pub(crate) fn wait(&self, longest: Duration) {
        let end = Instant::now() + longest;
        loop {
            let driver = self.without_thread.drive_until(end);
            let left = end.saturating_duration_since(Instant::now());
            match driver {
                Driver::ThisThread => return,
                Driver::Nobody => return self.wait_finished(left),
                Driver::AnotherThread => self.wait_finished(left.min(SECOND_LOOK)),
            }
            if !self.in_progress() || Instant::now() >= end {
                return;
            }
        }
    }

    /// Waits until no call is in progress in the background, but for `longest` at most.
    fn wait_finished(&self, longest: Duration) {
        let error = lock(&self.error);
        let _ = self.finished.wait_timeout_while(error, longest, |_| self.in_progress());
    }
}

#[cfg(test)]
mod tests;
