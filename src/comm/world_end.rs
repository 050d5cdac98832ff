//! How a world ends in order: all its ranks finalize all their meshes.

use std::sync::Arc;
use std::time::Duration;

use super::call::{Call, Peers};
use super::communicator::Communicator;
use super::ending::{end_together, finalize};
use super::groups::refuse_inside;
use super::world::World;
use crate::error::Result;

/// The call as the ranks agree on it, and as messages name it.
const CALL: &str = "dm_world_finalize()";

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
        self.tell_if_refused("dm_world_finalize", || {
            refuse_inside("dm_world_finalize", self.library().ok())?;
            self.library().map_or(Ok(()), |library| library.check_no_capture("dm_world_finalize", None))
        })?;
        let wait = self.wait(timeout.unwrap_or(self.rendezvous().timeout()));
        let scope = self.rendezvous().scope()?;
        let call = Call::begin(self, None, wait)?.agree(&scope, CALL)?;
        log::info!("rank {}: dm_world_finalize ends the world of {} ranks", self.rank(), self.size());
        let ended = call.run(|work| self.finalize_all(work.peers));
        self.comms().share_nothing();
        ended
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
