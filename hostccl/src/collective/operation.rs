//! A collective under way: the state machine that takes one rank through the stages.

use std::sync::Arc;
use std::time::Duration;

use super::call::Call;
use super::descriptor::Descriptor;
use super::ragged::Ragged;
use super::stages::Stages;
use crate::admission::Admission;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::Result;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::recorder;
use crate::turn::Pass;

/// A collective under way.
pub(crate) struct Collective {
    /// The work of this rank, and the stage in which it is.
    work: Stages,
    /// The description of the call, which is posted in its first step.
    descriptor: Descriptor,
    /// The call's turn on this rank, and the ranks' agreement that it is this call's turn.
    admission: Admission,
    /// Whether this rank must first wait until all ranks have ended the step before the next stage.
    waiting: bool,
    /// Whether the call was polled before. A failure at the first poll belongs to an earlier call.
    /// A later failure belongs to this call, even while it waits for its turn.
    has_begun: bool,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
}

impl Collective {
    /// Returns a collective that has not begun. The caller has checked that the communicator takes
    /// calls ([`Comm::check_open`]). `ragged` has the counts where each rank has its own.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the operation is dropped.
    pub(crate) unsafe fn new(comm: Arc<Comm>, call: Call, ragged: Option<Box<Ragged>>, name: Name) -> Collective {
        let descriptor = Descriptor::new(&call, name);
        // SAFETY: the caller's promise.
        unsafe { Collective::described(comm, call, ragged, descriptor) }
    }

    /// Does what [`new`](Collective::new) does, with a description of its own.
    ///
    /// # Safety
    /// The contract of [`new`](Collective::new).
    pub(crate) unsafe fn described(
        comm: Arc<Comm>,
        call: Call,
        ragged: Option<Box<Ragged>>,
        descriptor: Descriptor,
    ) -> Collective {
        let admission = Admission::new(descriptor.name);
        // SAFETY: the caller's promise.
        let work = unsafe { Stages::new(comm, call, ragged) };
        Collective { work, descriptor, admission, waiting: false, has_begun: false, call_timeout: None }
    }

    /// The call's turn on this rank.
    pub(crate) fn turn(&mut self) -> &mut Pass {
        &mut self.admission.pass
    }

    /// The name under which the call is issued.
    pub(crate) fn name(&self) -> &Name {
        &self.descriptor.name
    }
}

impl Operation for Collective {
    fn poll(&mut self) -> Result<Poll> {
        loop {
            if self.waiting {
                if let Some(blocked) = self.work.moves.comm.step_blocked() {
                    return self.work.moves.comm.check_waiting(blocked);
                }
                self.waiting = false;
                self.work.moves.comm.fetch_next_end();
                if self.work.stage == 1 && !self.descriptor.compare(&self.work.moves.comm)? {
                    // Nobody uses what the call has written so far, so it can begin again.
                    self.work.stage = 0;
                    self.admission.withdraw(&self.work.moves.comm);
                }
                if self.work.stage == 1 {
                    // SAFETY: all ranks have ended the first stage's step.
                    unsafe { self.work.agree()? };
                }
            }
            if self.work.stage == 0 {
                match std::mem::replace(&mut self.has_begun, true) {
                    false => self.work.moves.comm.check_before_call()?,
                    true => self.work.moves.comm.check()?,
                }
                let (comm, signature) = (&self.work.moves.comm, &self.descriptor.signature);
                if let Some(blocked) = self.admission.poll(comm, || signature.to_string())? {
                    return Ok(blocked);
                }
                self.work.moves.first_step = self.work.moves.comm.step();
                self.descriptor.post(&self.work.moves.comm);
            }
            // SAFETY: all ranks have ended the steps before this stage, as the check of `waiting`
            // has shown.
            unsafe { self.work.critical() };
            if self.work.is_last() {
                return Ok(Poll::Done);
            }
            match self.work.stage {
                0 => {
                    self.descriptor.end_step(&self.work.moves.comm, self.work.moves.small.get());
                    recorder::note_begun();
                }
                _ => self.work.moves.comm.end_step(),
            }
            // SAFETY: as above.
            unsafe { self.work.overlapped() };
            self.work.stage += 1;
            self.waiting = true;
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.work.moves.comm)
    }

    fn call_timeout(&self) -> Option<Duration> {
        self.call_timeout
    }

    /// The ranks compare their calls at the end of the first step.
    fn is_matched(&self) -> bool {
        self.work.stage > 1
    }

    fn describe(&self) -> String {
        format!("{} on {}", self.descriptor.signature, self.work.moves.comm.own_label())
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        Some(&mut self.admission.pass)
    }

    fn end(&mut self) -> Result<()> {
        self.admission.pass.leave(&self.work.moves.comm)
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        // A failure of this communicator has been reported already.
        let _ = self.admission.pass.leave(&self.work.moves.comm);
    }
}
