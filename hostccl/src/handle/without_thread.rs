//! The call of a handle that has no thread of its own: threads that wait for it drive it.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A call in progress that has no thread of its own. The call makes progress only while a thread
/// waits by `hostcclCommWait`.
pub(crate) trait WithoutThread: Send {
    /// Drives the call until it is over or `end` has come. Returns `None` where it is over, and its
    /// handles have the outcome then. Drops the call where `is_unwanted` says so at the end.
    fn drive_until(self: Box<Self>, end: Instant, is_unwanted: &dyn Fn() -> bool) -> Option<Box<dyn WithoutThread>>;
}

impl fmt::Debug for dyn WithoutThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WithoutThread")
    }
}

/// The place of a handle's call without a thread.
#[derive(Debug, Default)]
pub(crate) struct Place(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The call, while no thread drives it.
    call: Option<Box<dyn WithoutThread>>,
    /// Whether a thread drives the call.
    is_driven: bool,
    /// Whether the place takes no call any more, because the communicator is aborted or destroyed.
    is_closed: bool,
}

/// Who drives the call of a place.
pub(super) enum Driver {
    /// The calling thread has driven it.
    ThisThread,
    /// Another thread drives it now.
    AnotherThread,
    /// There is no call.
    Nobody,
}

/// A thread drives the call of a place while this value lives. The call may panic.
struct Driving<'a>(&'a Place);

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.0.state().is_driven = false;
    }
}

impl Place {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a call in progress. Gives the call back where there is another one, and where the
    /// communicator is aborted or destroyed, because then nobody waits for it.
    pub(crate) fn keep<T: WithoutThread + 'static>(&self, call: T) -> Result<(), T> {
        let mut state = self.state();
        if state.is_closed || state.is_driven || state.call.is_some() {
            return Err(call);
        }
        state.call = Some(Box::new(call));
        Ok(())
    }

    /// Drops the call, and takes no other one. The drop ends the call and gives its handles an
    /// error. A thread that drives the call drops it when it stops.
    pub(super) fn close(&self) {
        let call = {
            let mut state = self.state();
            state.is_closed = true;
            state.call.take()
        };
        drop(call);
    }

    /// Drives the call until it is over or `end` has come, unless another thread drives it. The
    /// lock is not held meanwhile, so an abort of another thread is never kept waiting by what this
    /// thread does.
    pub(super) fn drive_until(&self, end: Instant) -> Driver {
        let mut state = self.state();
        let Some(call) = state.call.take() else {
            return if state.is_driven { Driver::AnotherThread } else { Driver::Nobody };
        };
        state.is_driven = true;
        drop(state);
        let driving = Driving(self);
        let Some(left) = call.drive_until(end, &|| self.state().is_closed) else { return Driver::ThisThread };
        let mut state = self.state();
        // From here on another thread may drive the call.
        state.is_driven = false;
        std::mem::forget(driving);
        let unwanted = if state.is_closed { Some(left) } else { state.call.replace(left) };
        drop(state);
        drop(unwanted);
        Driver::ThisThread
    }
}
