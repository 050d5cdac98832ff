//! Questions of a process before it comes to a turn: whether there is a reason to recover, and
//! whether it has the state of the training.

use std::sync::Arc;

use super::Recovery;
use crate::error::Result;
use crate::rendezvous::agreement::decision::{Decision, Epoch, Why};
use crate::wait::Wait;

impl Recovery {
    /// Begins anew from `epoch`, in which the job has started. While no decision has made another
    /// epoch, the caller may take another mesh or another dimension of replicas than before.
    pub fn begin_from(&mut self, epoch: Epoch) {
        if self.epoch_number == 0 {
            self.last_made = (0, epoch.members());
            self.epoch = epoch;
        }
    }

    /// Whether this process has the state for certain: it is in the mesh, and the decision that
    /// made the epoch does not say that it needs the state.
    pub fn is_stateful(&self) -> bool {
        self.is_in_mesh() && !self.epoch.stateless.contains(&self.me)
    }

    /// Whether this process is in the mesh and needs the state of the training.
    pub fn has_joined(&self) -> bool {
        self.epoch.stateless.contains(&self.me)
    }

    /// Makes [`come`](Recovery::come) return when the store has one of these keys, on a process
    /// that is not in the mesh.
    pub fn watch_call(&mut self, keys: Vec<String>) {
        self.call_of_world = keys;
    }

    /// Whether this process knows a reason to recover, beside those that its communicators know.
    /// There are five: a member of the epoch is lost, another rank has come to the next turn, the
    /// last epoch was not made, the others have decided already, or a newcomer is at the door.
    pub fn is_due(&mut self, wait: &Wait) -> Result<bool> {
        let losses = Arc::clone(&self.membership.losses);
        losses.refresh(wait)?;
        let (number, members) = (self.number + 1, self.epoch.members());
        let is_over = self.fenced_since.is_some() || !self.is_made();
        if is_over || losses.any(|lost| members.contains(&lost)) || losses.turns().is_begun(number) {
            return Ok(true);
        }
        if self.somebody_waits(wait)? {
            return Ok(true);
        }
        // A refusal of another rank is no reason, because it has ended no call of this rank.
        let is_reason =
            |decision: Decision| !matches!(decision, Decision::Failure(failure) if failure.why == Why::Refused);
        Ok(self.decisions.read(number, wait)?.is_some_and(is_reason))
    }
}
