//! The raw communicator of this rank: who is inside it, and how it ends.
//!
//! A call of a communicator library may never return. `ncclCommAbort` and `ncclCommFinalize` of
//! NCCL wait until every captured CUDA graph with work of the communicator is destroyed, and until
//! the ranks of this host have ended theirs. So on a library with streams each call that ends a
//! communicator or asks about it runs on a thread of its own, and the caller waits for that thread
//! until a deadline.
//!
//! When the deadline passes, the thread is left behind inside the library, where nothing can end
//! it. The thread keeps its stack, this handle and the communicator's memory. If the call returns
//! later, the thread gives all of that back. Otherwise the memory stays until the process ends. The
//! end of the process does not wait for the thread.

mod inside;
mod questions;
#[cfg(test)]
mod tests;

pub(super) use inside::Inside;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use super::background::{Pending, Worker};
use super::gate::Gate;
use super::polling::poll_until_done;
use crate::ccl::{Library, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::wait::{Deadline, Wait};

/// How long the end of a communicator may take at the most, with the wait for a call of another
/// thread that is inside the library. Such a call puts its work on a stream and returns. Only a
/// call that connects to peers takes longer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How long the end of a communicator may take after the deadline of a call has passed. The end
/// goes on in the background.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// How long a thread sleeps before it looks again whether a communicator can end.
const PAUSE: Duration = Duration::from_millis(1);

/// The likely causes of an end that does not come, for messages.
pub(super) const CAUSES: &str = "the likely cause is a captured CUDA graph with work of this communicator that was not destroyed, because NCCL waits for its graphs (destroy the graphs before the mesh ends); or a rank of this host has not ended its communicator, or work on a stream waits for a rank";

/// The raw communicators that are still to be ended.
#[derive(Default)]
struct Ending {
    /// The raw communicators that were taken away and not ended yet, because a call was inside.
    taken: Vec<RawComm>,
    /// How many threads are inside the library to end raw communicators.
    under_way: usize,
    /// How many threads wait in [`Handle::take`] to end a raw communicator in order. Meanwhile a
    /// thread that leaves the communicator does not abort it.
    takers: usize,
}

/// The outcome of the try to end a communicator.
enum Begun {
    /// The communicator has ended, or its end has failed.
    Done(Result<()>),
    /// A thread has begun to end the communicator.
    UnderWay(Pending<()>),
    /// Nothing was begun, because another thread is inside the communicator or ends it.
    Busy,
}

/// The raw communicator, with the threads that are inside it. Threads that the library keeps hold
/// this handle past the life of its communicator.
pub(super) struct Handle {
    /// The library that makes and ends the communicator.
    library: Arc<Library>,
    /// The communicator's ranks, for messages.
    group: Mesh,
    /// Whether this library ends it; false for a communicator that was adopted and stays the
    /// caller's.
    is_owned: bool,
    /// The raw communicator; NULL when it is not made yet, and after it was taken away.
    raw: AtomicPtr<c_void>,
    /// On libraries with streams, lets in one host call at a time.
    gate: Gate,
    /// Whether a thread asks the library about the raw communicator. Meanwhile nobody else asks,
    /// and nobody ends the communicator.
    is_asked: AtomicBool,
    /// The raw communicators that are still to be ended.
    ending: Mutex<Ending>,
}

impl Handle {
    pub(super) fn new(library: Arc<Library>, group: Mesh, is_owned: bool) -> Arc<Handle> {
        Arc::new(Handle {
            library,
            group,
            is_owned,
            raw: AtomicPtr::new(ptr::null_mut()),
            gate: Gate::default(),
            is_asked: AtomicBool::new(false),
            ending: Mutex::default(),
        })
    }

    /// Whether this library ends it.
    pub(super) fn is_owned(&self) -> bool {
        self.is_owned
    }

    /// The raw communicator; NULL when there is none. This reads one atomic value.
    #[inline]
    pub(super) fn raw(&self) -> RawComm {
        RawComm(self.raw.load(Ordering::Acquire))
    }

    /// Puts a raw communicator in place.
    pub(super) fn set(&self, raw: RawComm) {
        self.raw.store(raw.0, Ordering::SeqCst);
    }

    /// The communicator's name in messages: its dimension, and its place.
    fn label(&self) -> String {
        self.group.describe()
    }

    fn ending(&self) -> MutexGuard<'_, Ending> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end.
impl Handle {
    /// Takes the raw communicator away, so that no further call can enter it.
    pub(super) fn take_away(&self) {
        // A call looks at the pointer after it has entered, and whoever ends the communicator looks
        // afterwards who is inside.
        let raw = RawComm(self.raw.swap(ptr::null_mut(), Ordering::SeqCst));
        if !raw.is_null() && self.is_owned {
            self.ending().taken.push(raw);
        }
    }

    /// Takes over a raw communicator that was never put in place, so that it ends with what was
    /// taken away.
    pub(super) fn take_over(&self, raw: RawComm) {
        self.ending().taken.push(raw);
    }

    /// Whether nothing that was taken away is left to be ended.
    fn has_ended(&self) -> bool {
        let ending = self.ending();
        ending.taken.is_empty() && ending.under_way == 0
    }

    /// Whether a thread is inside, with a call or a question.
    pub(super) fn is_occupied(&self) -> bool {
        !self.is_quiet()
    }

    fn is_quiet(&self) -> bool {
        self.gate.is_idle() && !self.is_asked.load(Ordering::SeqCst)
    }

    /// Begins to abort what was taken away, unless another thread is inside it. On a library with
    /// streams another thread makes the abort: `worker`, or else a new thread. If the calling
    /// thread made it inside an open group, NCCL would put the abort off until the group ends.
    fn begin(self: &Arc<Handle>, worker: Option<&Worker>) -> Begun {
        let mut ending = self.ending();
        if ending.taken.is_empty() {
            return if ending.under_way == 0 { Begun::Done(Ok(())) } else { Begun::Busy };
        }
        if !self.is_quiet() {
            return Begun::Busy;
        }
        let taken = std::mem::take(&mut ending.taken);
        ending.under_way += 1;
        drop(ending);
        let under_way = UnderWay(Arc::clone(self));
        let (library, raws) = (Arc::clone(&self.library), taken.clone());
        let work = move || {
            let outcome = raws.into_iter().map(|raw| library.abort(raw)).fold(Ok(()), Result::and);
            drop(under_way);
            outcome
        };
        if !self.library.has_streams() {
            return Begun::Done(work());
        }
        let started = match worker {
            Some(worker) => worker.start_abort(work),
            None => Worker::new(&self.library, "dm-abort").start_abort(work),
        };
        match started {
            Ok(pending) => Begun::UnderWay(pending),
            Err(error) => {
                // Without a thread nothing can bound the abort. A later abort tries again.
                self.ending().taken.extend(taken);
                Begun::Done(Err(error))
            }
        }
    }

    /// Waits until what was taken away has ended, and ends it when it can.
    fn finish(self: &Arc<Handle>, deadline: &Deadline, worker: Option<&Worker>) -> Result<()> {
        loop {
            match self.begin(worker) {
                Begun::Done(outcome) => return outcome,
                Begun::UnderWay(pending) => return self.finish_begun(pending, deadline),
                Begun::Busy if deadline.passed() => return Err(self.late(deadline)),
                Begun::Busy => self.rest(deadline),
            }
        }
    }

    fn finish_begun(&self, pending: Pending<()>, deadline: &Deadline) -> Result<()> {
        let wait = Wait { deadline: *deadline, ..Wait::after(Duration::ZERO) };
        let ended = pending.finish(|is_done| poll_until_done(&wait, String::new, sleep, is_done));
        ended.unwrap_or_else(|_| Err(self.late_abort(deadline)))
    }

    /// Lets a short time pass, or less when the call inside returns.
    fn rest(&self, deadline: &Deadline) {
        match self.gate.is_idle() {
            true => sleep(PAUSE.min(deadline.left())),
            false => {
                self.gate.wait_until_idle(&Deadline::after(deadline.slice()));
            }
        }
    }

    /// The error of an end that has not come by the deadline.
    fn late(&self, deadline: &Deadline) -> Error {
        let (library, label, millis) = (self.library.label(), self.label(), deadline.timeout().as_millis());
        if !self.gate.is_idle() {
            return Error::timeout(format!(
                "a thread was inside a call of {library} on the communicator of {label} for {millis} ms, and the library forbids ending a communicator meanwhile: it ends when that call returns; if the call waits for a rank that has gone, end this process"
            ));
        }
        if self.is_asked.load(Ordering::SeqCst) && self.ending().under_way == 0 {
            return Error::timeout(format!(
                "ncclCommGetAsyncError of {library} on the communicator of {label} did not return within {millis} ms, and the library forbids ending a communicator meanwhile: it ends when that call returns"
            ));
        }
        self.late_abort(deadline)
    }

    /// The error of an abort that has begun and not returned by the deadline.
    fn late_abort(&self, deadline: &Deadline) -> Error {
        let (library, label, millis) = (self.library.label(), self.label(), deadline.timeout().as_millis());
        Error::timeout(format!(
            "ncclCommAbort of {library} on the communicator of {label} did not return within {millis} ms; it continues on a thread that is left behind; {CAUSES}"
        ))
    }

    /// Aborts the raw communicator, if there is one. Returns when it has ended, and the host
    /// engine's background work on it is over too. Fails at the deadline. A thread that is inside
    /// then ends the communicator later.
    pub(super) fn abort(self: &Arc<Handle>, deadline: &Deadline, worker: Option<&Worker>) -> Result<()> {
        self.take_away();
        self.finish(deadline, worker)
    }

    /// Aborts the raw communicators of several handles at the same time. NCCL's abort raises the
    /// flag at which the communicator's kernels look, and then waits for the communicator's streams
    /// (`commDestroySync`). On a stream its work may lie behind the work of another communicator,
    /// which only that communicator's own flag ends.
    pub(super) fn abort_all(handles: &[Arc<Handle>], deadline: &Deadline) -> Result<()> {
        handles.iter().for_each(|handle| handle.take_away());
        Handle::finish_all(handles, deadline)
    }

    /// Ends, at the same time, what was taken away of several handles.
    pub(super) fn finish_all(handles: &[Arc<Handle>], deadline: &Deadline) -> Result<()> {
        let mut outcome = Ok(());
        let (mut begun, mut busy) = (Vec::new(), Vec::new());
        for handle in handles {
            match handle.begin(None) {
                Begun::Done(ended) => outcome = outcome.and(ended),
                Begun::UnderWay(pending) => begun.push((handle, pending)),
                Begun::Busy => busy.push(handle),
            }
        }
        // The call inside one communicator may end only when another one was aborted, so all are
        // looked at in turn.
        while !busy.is_empty() && !deadline.passed() {
            busy.retain(|handle| match handle.begin(None) {
                Begun::Done(Ok(())) => false,
                Begun::Done(Err(error)) => {
                    outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(error));
                    false
                }
                Begun::UnderWay(pending) => {
                    begun.push((*handle, pending));
                    false
                }
                Begun::Busy => true,
            });
            busy.first().inspect(|handle| handle.rest(deadline));
        }
        let late = busy.into_iter().map(|handle| Err(handle.late(deadline)));
        let outcome = late.fold(outcome, Result::and);
        begun.into_iter().map(|(handle, pending)| handle.finish_begun(pending, deadline)).fold(outcome, Result::and)
    }

    /// Takes the raw communicator away, waits until nobody is inside, and returns it for the caller
    /// to end. Returns `None` when there is none, or when the program ends the communicator itself.
    /// Fails at the deadline. The thread that is still inside then aborts the communicator when its
    /// call returns.
    pub(super) fn take(self: &Arc<Handle>, deadline: &Deadline) -> Result<Option<RawComm>> {
        self.ending().takers += 1;
        let taken = self.take_when_quiet(deadline);
        self.ending().takers -= 1;
        if taken.is_err() {
            // A thread that left in the last moment has not aborted what was taken away.
            let _ = self.begin(None);
        }
        taken
    }

    fn take_when_quiet(&self, deadline: &Deadline) -> Result<Option<RawComm>> {
        self.take_away();
        while !self.has_ended() {
            if self.is_quiet() {
                if let Some(raw) = self.ending().taken.pop() {
                    return Ok(Some(raw));
                }
            }
            if deadline.passed() {
                return Err(self.late(deadline));
            }
            self.rest(deadline);
        }
        Ok(None)
    }
}

/// A thread that ends what was taken away. Dropping it notes that the thread is done.
struct UnderWay(Arc<Handle>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.ending().under_way -= 1;
    }
}
