//! The calls inside a communicator: how they enter it, and how they leave it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Handle, PATIENCE};
use crate::ccl::RawComm;
use crate::error::Result;
use crate::wait::{Deadline, Wait};

/// Calls on the communicator. While a call is inside, no other thread calls, and no thread ends the
/// communicator.
impl Handle {
    /// Enters the communicator. Waits while a call under another tag is inside. Fails with
    /// `Mismatch` when a call under this tag is inside or waits, with `Timeout` at the deadline,
    /// and with `Aborted` when the wait is cancelled. `call` describes this call in messages.
    /// Returns NULL, and is not inside, where the communicator has ended.
    #[inline]
    pub(in crate::comm) fn enter(
        self: &Arc<Handle>,
        tag: u64,
        wait: impl FnOnce() -> Wait,
        call: &dyn Fn() -> String,
    ) -> Result<RawComm> {
        self.gate.enter(tag, wait, call)?;
        // A thread that ends the communicator takes the raw communicator away before it looks who
        // is inside.
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        if raw.is_null() {
            self.leave();
        }
        Ok(raw)
    }

    /// Enters the communicator for a further call of a group that keeps the gate. Returns NULL, and
    /// is not inside, where the communicator has ended.
    pub(in crate::comm) fn enter_again(self: &Arc<Handle>) -> RawComm {
        self.gate.resume();
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        if raw.is_null() {
            self.pause();
        }
        raw
    }

    /// Leaves the communicator after a call has returned. If another thread has taken the raw
    /// communicator away and waits no longer, this function ends it. That takes seconds and may
    /// write to the log, whose callback may call this library, so the caller holds no lock here.
    #[inline]
    pub(in crate::comm) fn leave(self: &Arc<Handle>) {
        self.gate.leave();
        if self.raw.load(Ordering::SeqCst).is_null() {
            self.end_what_was_taken();
        }
    }

    /// Leaves the communicator after a call of a group has returned, as [`leave`](Handle::leave)
    /// does. Other threads enter when the group ends.
    pub(in crate::comm) fn pause(self: &Arc<Handle>) {
        self.gate.pause();
        if self.raw.load(Ordering::SeqCst).is_null() {
            self.end_what_was_taken();
        }
    }

    /// Ends the communicator where another thread could not, because this thread was inside.
    #[cold]
    pub(super) fn end_what_was_taken(self: &Arc<Handle>) {
        let ending = self.ending();
        if ending.taken.is_empty() || ending.takers > 0 {
            return;
        }
        drop(ending);
        if let Err(error) = self.finish(&Deadline::after(PATIENCE), None) {
            log::warn!("rank {}: {error}", self.group.rank());
        }
    }
}

/// A call that has entered. Dropping it leaves the communicator, on whichever thread.
pub(in crate::comm) struct Inside(Arc<Handle>);

impl Inside {
    /// The call that has entered `handle`.
    pub(in crate::comm) fn of(handle: &Arc<Handle>) -> Inside {
        Inside(Arc::clone(handle))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.leave();
    }
}
