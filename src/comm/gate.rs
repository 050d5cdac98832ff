//! Lets one host call at a time into a communicator of a library with streams.
//!
//! Such a library does not show the order of the peers' calls, and it forbids calls of two threads
//! on one communicator at the same time. So a call waits here until the call under another name has
//! returned. A second call under the same name is refused. The program decides in which order two
//! names are issued, and this order must be equal on all ranks.
//!
//! The library also forbids ending a communicator while a call is inside. So a thread that ends one
//! first takes its handle away, and then waits here until no call is inside
//! ([`Gate::wait_until_idle`]). A call looks at the handle after it has entered. Either the call
//! finds the handle gone, or the ending thread finds the call inside.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// Lets one call in at a time.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// The tag of the call that is inside; 0 when no call is inside.
    inside: AtomicU64,
    /// Whether the call inside has returned, and a group of its thread keeps the gate until the
    /// group ends.
    is_paused: AtomicBool,
    /// How many threads wait, for their turn or for the gate to be idle. This number can be read
    /// without the lock.
    waiters: AtomicUsize,
    /// The tags of the calls that wait.
    waiting: Mutex<Vec<u64>>,
    /// Wakes the threads that wait, when the call inside has returned.
    freed: Condvar,
}

impl Gate {
    /// Waits until no other call is inside. Fails when a call with that tag is inside or waits
    /// already, at the deadline, and after an abort. `call` describes this call in messages.
    #[inline]
    pub(super) fn enter(&self, tag: u64, wait: impl FnOnce() -> Wait, call: &dyn Fn() -> String) -> Result<()> {
        let tag = tag.max(1);
        match self.inside.compare_exchange(0, tag, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ok(()),
            Err(_) => self.queue(tag, &wait(), call),
        }
    }

    #[cold]
    fn queue(&self, tag: u64, wait: &Wait, call: &dyn Fn() -> String) -> Result<()> {
        let mut waiting = self.lock();
        if self.inside.load(Ordering::SeqCst) == tag || waiting.contains(&tag) {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "{}: another thread of this rank is in a call along the same dimension: nobody can know which call of the other ranks belongs to which thread; let one thread at a time call, or give each a dimension of its own (DM_DIM_OWN_COMM)",
                    call()
                ),
            ));
        }
        waiting.push(tag);
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            if self.inside.compare_exchange(0, tag, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                break Ok(());
            }
            if let Err(aborted) = wait.cancel.check() {
                break Err(aborted);
            }
            if wait.deadline.passed() {
                break Err(Error::timeout(format!(
                    "{}: another thread of this rank was in a call on the same communicator, along another dimension, for {} ms",
                    call(),
                    wait.deadline.timeout().as_millis()
                )));
            }
            waiting = self.freed.wait_timeout(waiting, wait.deadline.slice()).unwrap_or_else(PoisonError::into_inner).0;
        };
        waiting.retain(|other| *other != tag);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Ends the call that is inside and wakes the threads that wait.
    #[inline]
    pub(super) fn leave(&self) {
        self.is_paused.store(false, Ordering::Relaxed);
        self.inside.store(0, Ordering::SeqCst);
        self.wake();
    }

    /// Notes that the call inside has returned. The gate stays closed for other calls, because a
    /// group of the calling thread keeps it.
    pub(super) fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Notes that the thread whose group keeps the gate makes a further call.
    pub(super) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }

    /// Waits until no call is inside. A group that keeps the gate does not count between two of its
    /// calls. Returns false when a call is still inside at the deadline.
    pub(super) fn wait_until_idle(&self, deadline: &Deadline) -> bool {
        if self.is_idle() {
            return true;
        }
        let mut waiting = self.lock();
        self.waiters.fetch_add(1, Ordering::SeqCst);
        while !self.is_idle() && !deadline.passed() {
            waiting = self.freed.wait_timeout(waiting, deadline.slice()).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        self.is_idle()
    }

    /// Whether no call is inside. A group that keeps the gate does not count between two calls.
    pub(super) fn is_idle(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0 || self.is_paused.load(Ordering::SeqCst)
    }

    #[inline]
    fn wake(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.freed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn call() -> String {
        "dm_all_reduce".to_owned()
    }

    #[test]
    fn one_name_is_refused_while_another_waits() {
        let gate = Gate::default();
        gate.enter(7, || Wait::after(Duration::ZERO), &call).unwrap();
        let refused = gate.enter(7, || Wait::after(Duration::from_secs(60)), &call).unwrap_err();
        assert_eq!(refused.status(), Status::Mismatch);
        let late = gate.enter(8, || Wait::after(Duration::from_millis(1)), &call).unwrap_err();
        assert_eq!(late.status(), Status::Timeout);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| gate.enter(8, || Wait::after(Duration::from_secs(60)), &call));
            while gate.waiters.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            gate.leave();
            other.join().unwrap().unwrap();
        });
        assert_eq!(gate.inside.load(Ordering::SeqCst), 8);
    }

    #[test]
    fn a_call_inside_is_waited_for_and_an_open_group_is_not() {
        let (gate, at_once) = (Gate::default(), || Deadline::after(Duration::ZERO));
        assert!(gate.wait_until_idle(&at_once()));
        gate.enter(7, || Wait::after(Duration::ZERO), &call).unwrap();
        assert!(!gate.wait_until_idle(&at_once()));
        gate.pause();
        assert!(gate.wait_until_idle(&at_once()));
        gate.resume();
        assert!(!gate.wait_until_idle(&at_once()));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| gate.wait_until_idle(&Deadline::after(Duration::from_secs(60))));
            while gate.waiters.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            gate.leave();
            assert!(other.join().unwrap());
        });
        gate.enter(7, || Wait::after(Duration::ZERO), &call).unwrap();
        assert!(!gate.wait_until_idle(&at_once()), "the gate remembers no pause of an earlier group");
    }
}
