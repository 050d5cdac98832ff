//! How a world ends in order: all its ranks finalize all their meshes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
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
/// How long dm_world_finalize waits for another thread's recovery, before it tells the ranks that
/// wait for a place that the job has ended, and before it tells the rank that serves the store that
/// this rank has left the call.
const TELL: Duration = Duration::from_secs(1);
/// How long it may take to tell them. The rank that serves the store stays for two seconds of this
/// time, so that they can read it ([`Recovery::end`](crate::rendezvous::Recovery::end)).
const LONGEST_TELL: Duration = Duration::from_secs(3);
/// How long it may take to tell the rank that serves the store that this rank needs the store no
/// more.
const TELL_ENDED: Duration = Duration::from_secs(1);

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
            self.is_over.store(true, Ordering::SeqCst);
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
        if self.rendezvous().epoch() > 0 {
            let way = self.recovering().wait_and_lock(&Wait::after(TELL));
            if let Some(way) = way.ok().as_ref().and_then(|way| way.as_ref()) {
                way.recovery.tell_ended(&Wait::after(TELL_ENDED));
            }
        }
        self.comms().share_nothing();
        self.rendezvous().record().end();
        ended
    }

    /// Tells the ranks that wait for a place in the mesh that the job has ended. Every rank of the
    /// mesh does that, so it does not matter when one of them dies meanwhile.
    fn tell_end(&self, wait: &Wait) {
        // At most half of the time is spent here, because the end of the meshes needs the rest.
        let soon = wait.with_deadline(Deadline::after(LONGEST_TELL.min(wait.deadline.left() / 2)));
        let turn = wait.with_deadline(Deadline::after(TELL.min(soon.deadline.left())));
        let told = self.recovering().wait_and_lock(&turn);
        let told = told.and_then(|mut way| way.as_mut().map_or(Ok(()), |way| way.recovery.end(&soon)));
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
        let outcome = outcome.and(all_of(&parents));
        self.is_over.store(true, Ordering::SeqCst);
        outcome
    }
}

/// Whether this is the text of dm_world_finalize, as the ranks agree on it.
pub(super) fn ends_world(text: &str) -> bool {
    text == CALL
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Barrier, Mutex};

    use super::*;
    use crate::comm::recovering::{Beginning, Way};
    use crate::comm::two_ranks::two_ranks_over;
    use crate::comm::view::View;
    use crate::error::Error;
    use crate::rendezvous::store::{Hooked, MemoryStore};

    /// Telling must leave time for the end of the meshes.
    #[test]
    fn ranks_that_wait_are_told_of_the_end_in_a_part_of_the_time() {
        let (is_ending, left) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (ending, seen) = (Arc::clone(&is_ending), Arc::clone(&left));
        let before = move |operation: &str, _: usize, wait: &Wait| match ending.load(Ordering::SeqCst) {
            true if operation == "set_once" => {
                seen.lock().unwrap().push(wait.deadline.left());
                Err(Error::store("the store is ill"))
            }
            _ => Ok(()),
        };
        let both = Barrier::new(2);
        two_ranks_over(Arc::new(Hooked { store: MemoryStore::new(), before }), |world| {
            let mesh = View::init(world, &[2], &["dp"]).unwrap();
            both.wait();
            if world.rank() == 0 {
                let root = mesh.root_comms();
                let beginning = Beginning { id: root.id(), mesh: root.mesh(), text: String::new() };
                Way::begin(&mut world.recovering().lock().unwrap(), world.rendezvous(), &beginning, 0).unwrap();
                is_ending.store(true, Ordering::SeqCst);
                world.tell_end(&Wait::after(Duration::from_secs(20)));
                world.tell_end(&Wait::after(Duration::from_secs(2)));
                is_ending.store(false, Ordering::SeqCst);
            }
            both.wait();
            world.finalize(None).unwrap();
        });
        let left = left.lock().unwrap();
        assert!(left.len() == 2 && left[0] <= LONGEST_TELL && left[1] <= Duration::from_secs(1), "{left:?}");
    }
}
