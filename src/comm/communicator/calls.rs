//! Calls on a communicator: how a thread enters it and leaves it again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::background::on_own_thread;
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
        self.gate.enter(tag, wait, call)?;
        self.entered()
    }

    /// Enters the communicator for a further call of a group that keeps the gate.
    pub(in crate::comm) fn enter_again(&self) -> Result<RawComm> {
        self.gate.resume();
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        if raw.is_null() {
            self.pause();
            return Err(self.gone());
        }
        Ok(raw)
    }

    /// Looks at the raw communicator, after the calling thread has entered. A thread that ends the
    /// communicator takes the raw communicator away before it looks who is inside.
    #[inline]
    fn entered(&self) -> Result<RawComm> {
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        if raw.is_null() {
            self.leave();
            return Err(self.gone());
        }
        Ok(raw)
    }

    /// The error of a call that found the raw communicator gone.
    #[cold]
    fn gone(&self) -> Error {
        let ended = || Error::aborted(format!("the communicator of {} ended during the call", self.label()));
        self.ready().err().unwrap_or_else(ended)
    }

    /// Leaves the communicator after a call has returned.
    #[inline]
    pub(in crate::comm) fn leave(&self) {
        self.gate.leave();
        if self.raw.load(Ordering::SeqCst).is_null() {
            self.end_what_was_taken();
        }
    }

    /// Leaves the communicator after a call of a group has returned. Other threads enter when the
    /// group ends.
    pub(in crate::comm) fn pause(&self) {
        self.gate.pause();
        if self.raw.load(Ordering::SeqCst).is_null() {
            self.end_what_was_taken();
        }
    }

    /// Ends the communicator where another thread could not, because this thread was inside.
    #[cold]
    fn end_what_was_taken(&self) {
        if self.taken().is_none() {
            return;
        }
        // This thread may have a group open, to whose end the library would put the abort off.
        let _ = on_own_thread(&self.library, "dm-abort", || self.abort_taken(Duration::ZERO));
    }
}
