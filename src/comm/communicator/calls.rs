//! Calls on a communicator: how a thread enters it and leaves it again.

use super::super::handle::Inside;
use super::Communicator;
use crate::ccl::RawComm;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// Calls on a communicator of a library with streams. While a call is inside, no other thread
/// calls, and no thread ends the communicator.
impl Communicator {
    /// Enters the communicator and returns the raw communicator for the call. Waits while a call
    /// under another tag is inside. `call` describes this call in messages.
    #[inline]
    pub(in crate::comm) fn enter(
        &self,
        tag: u64,
        wait: impl FnOnce() -> Wait,
        call: &dyn Fn() -> String,
    ) -> Result<RawComm> {
        let raw = self.handle.enter(tag, wait, call)?;
        if raw.is_null() { Err(self.gone()) } else { Ok(raw) }
    }

    /// Enters the communicator for a further call of a group that keeps the gate.
    pub(in crate::comm) fn enter_again(&self) -> Result<RawComm> {
        let raw = self.handle.enter_again();
        if raw.is_null() { Err(self.gone()) } else { Ok(raw) }
    }

    /// The error of a call that found the raw communicator gone.
    #[cold]
    pub(super) fn gone(&self) -> Error {
        let ended = || Error::aborted(format!("the communicator of {} ended during the call", self.label()));
        self.ready().err().unwrap_or_else(ended)
    }

    /// Leaves the communicator after a call has returned.
    #[inline]
    pub(in crate::comm) fn leave(&self) {
        self.handle.leave();
    }

    /// The call that this thread has entered with, for the thread that leaves the communicator in
    /// its place.
    pub(in crate::comm) fn inside(&self) -> Inside {
        Inside::of(&self.handle)
    }

    /// Leaves the communicator after a call of a group has returned. Other threads enter when the
    /// group ends.
    pub(in crate::comm) fn pause(&self) {
        self.handle.pause();
    }
}
