//! The steps of the collectives of a communicator's ranks on one host.

use crate::event::Event;

/// The words by which the ranks end their steps together.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Steps {
    /// How many ranks have ended the current step.
    pub(crate) count: Event,
    /// How many steps all ranks have ended. The number wraps.
    pub(crate) ended: Event,
}

impl Steps {
    /// Ends step `step` for the calling rank, which is one of `nranks`. The peers see what this
    /// rank wrote in the step once all ranks have ended it. `tells_last` says whether one rank
    /// waits until all others have ended the step, and has to be woken then.
    #[inline]
    pub(crate) fn end(&self, step: u32, nranks: usize, tells_last: bool) {
        let count = self.count.count() as usize;
        if count == nranks {
            // No rank counts for the next step before it has seen the new value of `ended`.
            self.count.store(0);
            self.ended.set(step);
        } else if count + 1 == nranks && tells_last {
            self.count.wake();
        }
    }
}
