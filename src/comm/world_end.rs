//! How a world ends in order: all its ranks finalize all their meshes.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Call, Peers};
use super::communicator::Communicator;
use super::ending::{end_together, finalize};
use super::groups::refuse_inside;
use super::world::World;
use crate::error::Result;
use crate::wait::{Deadline, Wait};

/// The call as the ranks agree on it, and as messages name it.
const CALL: &str = "dm_world_finalize()";
/// How long the ranks that wait for a place may take to be told that the job has ended.
const TELL: Duration = Duration::from_secs(1);

impl World {
    /// Waits for the outstanding work of all meshes of the world, destroys their communicators, and
    /// ends the world. `timeout` bounds the call; `None` stands for the world's timeout.
    /// **Collective over the world** unless it is offline. If a rank does not make the call, the
    /// call fails and the world stays as it was. If the work of a rank has failed, the call fails
    /// too, but the world has ended.
    pub fn finalize(&self, timeout: Option<Duration>) -> Result<()> {
        self.alive()?;
        if self.rendezvous().is_offline() {
            self.take_to_finalize();
            return Ok(());
        }
        if self.rendezvous().is_at_door() {
            // The job knows nothing of this process, or goes on without it.
            self.end_alone();
            return Ok(());
        }
        self.tell_if_refused("dm_world_finalize", || {
            refuse_inside("dm_world_finalize", self.library().ok())?;
            self.library().map_or(Ok(()), |library| library.check_no_capture("dm_world_finalize", None))
        })?;
        self.end_with_others(&self.wait(timeout.unwrap_or(self.rendezvous().timeout())))
    }

    /// Ends the world together with the other ranks that make its calls.
    pub(super) fn end_with_others(&self, wait: &Wait) -> Result<()> {
        let scope = self.rendezvous().scope()?;
        let call = Call::begin(self, None, wait.clone())?.agree(&scope, CALL)?;
        log::info!("rank {}: dm_world_finalize ends the world of {} ranks", self.rank(), self.size());
        if self.rendezvous().epoch() > 0 {
            self.tell_end(wait);
        }
        let ended = call.run(|work| self.finalize_all(work.peers));
        self.comms().share_nothing();
        self.rendezvous().record().end();
        ended
    }

    /// Tells the ranks that wait for a place in the mesh that the job has ended. Every rank of the
    /// mesh does that, so it does not matter when one of them dies meanwhile.
    fn tell_end(&self, wait: &Wait) {
        // The end of the world itself needs the rest of the time more than this note does.
        let soon = wait.with_deadline(Deadline::after(TELL.min(wait.deadline.left())));
        let told = self.recovering().wait_and_lock(&soon);
        let told = told.and_then(|mut way| way.as_mut().map_or(Ok(()), |way| way.recovery.end(wait)));
        if let Err(error) = told {
            log::warn!(
                "rank {}: ranks that wait may not learn that the job has ended: {}",
                self.rank(),
                error.message()
            );
        }
    }

    /// Ends the world on this rank alone, because no other rank takes part: the job has ended, or
    /// this process was never let in.
    pub(super) fn end_alone(&self) {
        let wait = self.wait(self.rendezvous().timeout());
        let _ = self.finalize_all(Peers::none(&wait));
        self.comms().share_nothing();
        self.rendezvous().record().end();
    }

    fn finalize_all(&self, peers: Peers<'_>) -> Result<()> {
        let all = self.take_to_finalize();
        let (parents, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|communicator| self.comms().is_parent(communicator));
        let all_of = |communicators: &[Arc<Communicator>]| {
            end_together(communicators, |communicator| communicator, |communicator| end(communicator, peers))
        };
        let outcome = all_of(&others);
        outcome.and(all_of(&parents))
    }
}

/// Whether the next call of the world, which another rank has begun, is dm_world_finalize.
pub(super) fn ends_world(world: &World, wait: &Wait) -> Result<bool> {
    world.rendezvous().scope()?.next_call(wait).map(|text| text.as_deref() == Some(CALL))
}

/// Ends one communicator. A failed one has no work to wait for, so it is aborted.
fn end(communicator: &Arc<Communicator>, peers: Peers<'_>) -> Result<()> {
    match communicator.has_failed().then(|| communicator.earlier_failure()).flatten() {
        Some(error) => {
            peers.tell(&error);
            let _ = communicator.abort();
            Err(error)
        }
        None => finalize(communicator, peers.wait(), &|error| {
            peers.tell(error);
        }),
    }
}
