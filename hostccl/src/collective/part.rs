//! The part of a collective over several hosts that takes place among the ranks of one host.

use std::sync::Arc;

use super::call::Call;
use super::ragged::Ragged;
use super::stages::Stages;
use crate::comm::Comm;
use crate::error::Result;
use crate::poll::Poll;

/// A collective among the seats of one host. It has no turn and no agreement of its own, because
/// the whole call has them. Its root is a seat, and its counts are listed by seat.
pub(crate) struct Part {
    /// The work of this rank, and the stage in which it is.
    work: Stages,
    /// Whether this rank must first wait until all ranks have ended the step before the next stage.
    waiting: bool,
    /// Whether the part is done.
    is_done: bool,
}

impl Part {
    /// Returns a part that has not begun.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the part is dropped. All seats of
    /// the host make the same parts in the same order.
    pub(crate) unsafe fn new(comm: Arc<Comm>, call: Call, ragged: Option<Ragged>) -> Part {
        // SAFETY: the caller's promise.
        let work = unsafe { Stages::new(comm, call, ragged.map(Box::new)) };
        Part { work, waiting: false, is_done: false }
    }

    /// Does as much of the part as is possible without waiting. Returns `None` once it is done, and
    /// otherwise what to wait for.
    pub(crate) fn poll(&mut self) -> Result<Option<Poll>> {
        while !self.is_done {
            if self.waiting {
                if let Some(blocked) = self.work.moves.comm.step_blocked() {
                    return Ok(Some(blocked));
                }
                self.waiting = false;
                if self.work.stage == 1 {
                    // SAFETY: all ranks have ended the first stage's step.
                    unsafe { self.work.agree()? };
                }
            }
            if self.work.stage == 0 {
                self.work.moves.first_step = self.work.moves.comm.step();
            }
            // SAFETY: all ranks have ended the steps before this stage, as the check of `waiting`
            // has shown.
            unsafe { self.work.critical() };
            if self.work.is_last() {
                self.is_done = true;
                break;
            }
            self.work.moves.comm.end_step();
            // SAFETY: as above.
            unsafe { self.work.overlapped() };
            self.work.stage += 1;
            self.waiting = true;
        }
        Ok(None)
    }
}
