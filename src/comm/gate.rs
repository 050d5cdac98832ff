//! Lets one host call at a time into a communicator of a library with streams.
//!
//! Such a library does not show the order of the peers' calls, and it forbids calls of two threads
//! on one communicator at the same time. So a call waits here until the call under another name has
//! returned. A second call under the same name is refused. The program decides in which order two
//! names are issued, and this order must be the same on all ranks.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// Lets one call in at a time.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// The tag of the call that is inside; 0 when no call is inside.
    inside: AtomicU64,
    /// The length of `waiting`, which can be read without the lock.
    waiters: AtomicUsize,
    /// The tags of the calls that wait.
    waiting: Mutex<Vec<u64>>,
    /// Wakes the calls that wait, when the call inside has left.
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

    /// Ends the call that is inside and wakes the calls that wait.
    #[inline]
    pub(super) fn leave(&self) {
        self.inside.store(0, Ordering::SeqCst);
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
}
