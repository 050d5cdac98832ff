//! A process that joins a running job in place of a rank that was lost, or beyond its ranks
//! (docs/recovery.md, "The door").
//!
//! [`World::join`] finds the job (running.rs), compares this process with it, and returns a world.
//! In the calls of this world nobody waits for this process yet. Then dm_init calls
//! [`World::come_in`]. This function knocks, waits for the decision that lets this process in, and
//! makes the mesh with the others.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::agreement::{AtDoor, Epoch, Members, Recovery, Replicas, Request};
use super::engine_place::EnginePlace;
use super::equipment::Equipment;
use super::local_place::LocalPlace;
use super::newcomer::Newcomer;
use super::running::{Running, first_members};
use super::world::World;
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

impl World {
    /// Whether this process has joined a running job that has not let it in yet. Every collective
    /// call on this world fails with `DM_STATUS_INVALID_STATE` then, and dm_init must call
    /// [`come_in`](World::come_in) in place of agreeing on its call in the world's scope.
    #[doc(hidden)]
    pub fn is_at_door(&self) -> bool {
        let session = self.session.as_deref();
        let newcomer = session.and_then(|session| session.newcomer.as_ref());
        newcomer.is_some_and(|newcomer| !newcomer.is_in.load(Ordering::SeqCst))
    }

    /// Fails with `DM_STATUS_INVALID_STATE` when this process is not at the door any more, because
    /// another thread of this process has come in.
    #[doc(hidden)]
    pub fn check_at_door(&self) -> Result<()> {
        match self.is_at_door() {
            true => Ok(()),
            false => Err(Error::invalid_state(format!(
                "another thread of rank {} has just come into the running job: call dm_init again",
                self.rank()
            ))),
        }
    }

    /// Whether this process has joined a running job under a rank that the job did not have when it
    /// started.
    #[doc(hidden)]
    pub fn is_beyond_start(&self) -> bool {
        let newcomer = self.session.as_deref().and_then(|session| session.newcomer.as_ref());
        newcomer.is_some_and(|newcomer| self.place.rank >= newcomer.running.size)
    }

    /// Takes this process into the running job that it has joined: knocks, waits for a decision
    /// that lets this process in, and makes its part of the mesh together with the other ranks.
    ///
    /// src/comm calls this function in dm_init where [`is_at_door`](World::is_at_door) holds.
    ///
    /// `make` makes this rank's part of the mesh of an epoch, as dm_recover does on the ranks that
    /// were there before. The scopes of the world belong to that epoch by then
    /// ([`enter_epoch`](World::enter_epoch)). `make` may be called several times, because a rank
    /// may be lost meanwhile. A later call must end what an earlier call has made before it makes
    /// anything. This function reaches the verdict on the mesh, so nobody may use the result of
    /// `make` before this function has returned it.
    ///
    /// Returns the process's way through the decisions, which later calls of dm_recover use, and
    /// the result of `make`. The result is `None` where this process got a seat in a replica that
    /// lacks other ranks. Such a process is a member of the job, but not of the mesh: its dm_init
    /// gives a mesh without this rank, and its dm_recover waits for a place in the mesh.
    ///
    /// Fails with `DM_STATUS_TIMEOUT` when no decision has let this process in before the deadline.
    /// The next call then continues the wait, and must ask for the same mesh. These errors are
    /// final: `DM_STATUS_MISMATCH` when this process is refused, `DM_STATUS_INVALID_STATE` when the
    /// job has ended or another thread has come in, and `DM_STATUS_NOT_MEMBER` when the others take
    /// this process for lost. Every other error is the error of the recovery, which all ranks get,
    /// and the next call takes part in the next turn.
    #[doc(hidden)]
    pub fn come_in<T>(
        &self,
        request: &Request<'_>,
        make: impl FnMut(&Recovery) -> Result<T>,
        wait: &Wait,
    ) -> Result<(Recovery, Option<T>)> {
        let session = self.session()?;
        let Some(newcomer) = &session.newcomer else {
            return Err(Error::internal("come_in of a process that is in the job"));
        };
        let mut at_door = newcomer.at_door.lock().unwrap_or_else(PoisonError::into_inner);
        // The caller checked this before this thread had the lock.
        self.check_at_door()?;
        let mut way = at_door.take().map_or_else(|| self.at_door(newcomer), Ok)?;
        match way.come_in(request, |recovery| self.enter_epoch(recovery), make, wait) {
            Ok(made) => {
                newcomer.is_in.store(true, Ordering::SeqCst);
                Ok((way.into_recovery(), made))
            }
            Err(error) => {
                *at_door = Some(way);
                Err(error)
            }
        }
    }

    fn at_door(&self, newcomer: &Newcomer) -> Result<AtDoor> {
        let Running { size, since, .. } = newcomer.running;
        let ranks: Vec<i32> = first_members(size).iter().map(|member| member.rank).collect();
        // Only the members of this epoch are used, because its seats are of no concern to a
        // newcomer.
        let first = Epoch::first(size, Replicas { sizes: vec![size], dim: 0 }, &ranks);
        let members = Members::All(self.place.size.max(size));
        Ok(AtDoor::new(self.recovery_of(members, first)?, since))
    }

    /// Prepares this process for the running job, without waiting for any rank: finds its place on
    /// its host, and compares it with the job. `failure` says why this process cannot take part, if
    /// it cannot. `equip` makes what ranks compare, once the place is known.
    pub(super) fn join_running(
        &self,
        running: &Running,
        failure: Option<&Error>,
        equip: impl FnOnce(LocalPlace) -> Result<Option<Equipment>>,
    ) -> Result<LocalPlace> {
        if let Some(failure) = failure {
            return Err(failure.clone());
        }
        let local = LocalPlace::of_newcomer(&self.place, running.num_hosts);
        if self.device_type == "cpu" {
            let engine = EnginePlace::here(&*self.session()?.store, None)?;
            match &running.memory {
                Some(memory) if memory != engine.host() => {
                    return Err(Error::new(
                        Status::Mismatch,
                        format!(
                            "rank {} came back on a host that does not share the memory of the ranks of the running job ({memory}, here {}): start this process on their host, as their user",
                            self.rank(),
                            engine.host()
                        ),
                    ));
                }
                Some(_) => {}
                None => engine.introduce(running.is_one_network)?,
            }
        }
        let mine = equip(local)?.unwrap_or_default();
        if mine.library != running.library {
            return Err(Error::new(
                Status::Mismatch,
                format!(
                    "rank {} has {}, and the running job has {}: start this process with the communicator library of the job",
                    self.rank(),
                    named(&mine.library),
                    named(&running.library)
                ),
            ));
        }
        Ok(local)
    }
}

/// Returns a communicator library in words.
fn named(library: &str) -> &str {
    if library.is_empty() { "a communicator library without a version" } else { library }
}
