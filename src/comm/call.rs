//! The collective calls of src/comm, and how each runs from its turn to its end.
//!
//! A collective call makes or ends communicators. Every rank of its scope must make it: every rank
//! of the world for dm_init, every rank of the root mesh for most other calls. All of these ranks
//! must make their collective calls in one order and with equal arguments. Otherwise each rank
//! gets an error: `DM_STATUS_MISMATCH` with the calls that differ, or `DM_STATUS_TIMEOUT` with the
//! ranks that did not come.
//!
//! The collective calls are: making a mesh (also the mesh of dm_recover), flatten, unflatten,
//! reshape, a range, the first use of a lazy communicator, dm_finalize, dm_world_finalize and
//! dm_shrink. Each of them goes through these steps, and only this file knows the steps:
//!
//! 1. The calling thread waits for its turn. On each rank the calls of one world happen one after
//!    another.
//! 2. The thread checks that the mesh (or the world, for a call that needs no mesh) is alive,
//!    because another thread may have ended it meanwhile.
//! 3. The ranks agree that all of them make this call: they compare its text in the rendezvous
//!    store, and all of them get the same verdict. No rank enters a communicator library before.
//! 4. The work of the call runs. Inside a group of the calling thread a library would put the work
//!    off until the end of the group. In that case the work runs on another thread.
//! 5. A rank whose work has failed tells the other ranks, which then stop their own work.
//! 6. The ranks agree a second time. When the work of every rank is done, the call has succeeded.
//!    Otherwise every rank gets the first failure of any rank.
//! 7. Each rank keeps what the work has made, or undoes it from the log of the call. A dimension's
//!    communicator stays unmade for other threads until this step.
//!
//! A rank may refuse its own call before step 3, for example because of a wrong argument. Then it
//! tells the other ranks (refusal.rs).
//!
//! The caller of this file hands in what differs between calls: the scope (the ranks that take
//! part), the text on which all ranks must agree, and the work.
//!
//! A call of the control plane (control.rs) is such a call too, but makes nothing: its work
//! exchanges bytes through the store. Some collective calls do not come here. dm_world_init,
//! dm_world_barrier and dm_world_locations only agree (world.rs). An operation such as
//! dm_all_reduce is collective over the ranks of one dimension, and the communicator library
//! matches the ranks' calls (operations.rs). A communicator that holds this rank alone needs no
//! other rank (`run_alone`).

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::call_log::Log;
use super::groups::outside_groups;
use super::root::RootComms;
use super::turn::Turn;
use super::world::World;
use crate::error::{Error, Result, Status};
use crate::rendezvous::{AgreedLosses, Round, Scope, TakenForLost};
use crate::wait::Wait;

/// A collective call that has its turn. Its ranks have not agreed on it yet.
pub(super) struct Call<'a> {
    world: &'a World,
    /// The mesh that must be alive; `None` where the call needs the world alone.
    mesh: Option<&'a RootComms>,
    /// How long the call may take, and what ends it early.
    wait: Wait,
    /// Keeps other threads from making a collective call of this world.
    turn: Turn<'a>,
}

/// A collective call on which its ranks have agreed.
pub(super) struct AgreedCall<'a> {
    call: Call<'a>,
    /// The agreement in the store, in which the ranks exchange values and reach the second verdict.
    round: Round,
}

/// The things that the work of a call uses.
pub(super) struct Work<'a> {
    /// The other ranks of the call.
    pub(super) peers: Peers<'a>,
    /// Notes what the work makes, so that it can be undone.
    pub(super) log: Log,
}

impl<'a> Call<'a> {
    /// Waits for the turn, and checks that the mesh (or where there is none yet, the world) is
    /// alive.
    pub(super) fn begin(world: &'a World, mesh: Option<&'a RootComms>, wait: Wait) -> Result<Call<'a>> {
        let turn = world.take_turn(&wait)?;
        let call = Call { world, mesh, wait, turn };
        call.alive()?;
        Ok(call)
    }

    /// Agrees with the other ranks of `scope` that all of them make the call `text`.
    pub(super) fn agree(self, scope: &Scope, text: &str) -> Result<AgreedCall<'a>> {
        let round = self.wait.outcome(scope.agree(text, &self.wait))?;
        Ok(AgreedCall { call: self, round })
    }

    /// Does what [`agree`](Call::agree) does, in a scope that is made for this call. Returns `None`
    /// when this call has failed on all ranks, and this rank's caller was told of the failure in an
    /// earlier call. The other ranks are in another scope by then.
    pub(super) fn agree_once(self, scope: &Scope, text: &str) -> Result<Option<AgreedCall<'a>>> {
        let round = self.wait.outcome(scope.agree_once(text, &self.wait))?;
        Ok(round.map(|round| AgreedCall { call: self, round }))
    }

    /// Agrees with the other ranks of `scope` that are left on which of its ranks are lost, before
    /// the call `text` itself is agreed. `known` holds the ranks that this rank takes for lost
    /// because of its communicators.
    pub(super) fn agree_on_lost(&self, scope: &Scope, text: &str, known: TakenForLost<'_>) -> Result<AgreedLosses> {
        self.wait.outcome(scope.agree_on_lost(text, known, &self.wait))
    }

    /// Does what [`agree`](Call::agree) does, for a call on a mesh. The ranks also compare which
    /// mesh they mean, because several meshes may have equal dimension names.
    pub(super) fn agree_on_mesh(self, scope: &Scope, text: &str) -> Result<AgreedCall<'a>> {
        let detail = self.mesh.map_or_else(String::new, RootComms::apart);
        let round = self.wait.outcome(scope.agree_in_detail(text, &detail, &self.wait))?;
        Ok(AgreedCall { call: self, round })
    }

    /// Does what [`agree_on_mesh`](Call::agree_on_mesh) does. The ranks also agree on which of the
    /// offered communicators all of them share. `offers` names the communicators by place, and the
    /// flags tell for each place whether its communicator is shared.
    pub(super) fn agree_to_share(
        self,
        scope: &Scope,
        text: &str,
        offers: &[Option<String>],
    ) -> Result<(AgreedCall<'a>, Vec<bool>)> {
        let detail = self.mesh.map_or_else(String::new, RootComms::apart);
        let (round, shared) = self.wait.outcome(scope.agree_to_share(text, &detail, offers, &self.wait))?;
        Ok((AgreedCall { call: self, round }, shared))
    }

    fn alive(&self) -> Result<()> {
        match self.mesh {
            Some(mesh) => mesh.alive(),
            None => self.world.alive(),
        }
    }
}

impl<'a> AgreedCall<'a> {
    /// Returns the number of the call in its scope, which is equal on all ranks.
    pub(super) fn number(&self) -> u64 {
        self.round.number()
    }

    /// Whether all ranks of `scope` have passed equal texts as `detail`. The call goes on either
    /// way.
    pub(super) fn all_say(&self, scope: &Scope, text: &str, detail: &str) -> Result<bool> {
        let wait = &self.call.wait;
        match wait.outcome(scope.agree_in_detail(text, detail, wait)) {
            Ok(_) => Ok(true),
            Err(error) if error.status() == Status::Mismatch => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Runs the work and ends the call. When any rank fails, every rank gets the first failure and
    /// keeps nothing of what the call made.
    pub(super) fn run<T: Send>(self, work: impl FnOnce(&mut Work<'_>) -> Result<T> + Send) -> Result<T> {
        let library = match self.call.world.library() {
            Ok(library) => library,
            Err(error) => return self.end(Err(error), Log::default()),
        };
        let mut agreed = Some(self);
        let outcome = outside_groups(library, || {
            let Some(agreed) = agreed.take() else { return Err(Error::internal("a call that has run already")) };
            let mut here = Work { peers: agreed.peers(), log: Log::default() };
            let done = catch_unwind(AssertUnwindSafe(|| work(&mut here)));
            let done = done.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            let log = here.log;
            agreed.end(done, log)
        });
        match (agreed, outcome) {
            // The work could not begin, for example because there was no thread for it.
            (Some(agreed), Err(error)) => agreed.end(Err(error), Log::default()),
            (_, outcome) => outcome,
        }
    }

    /// Runs work that exchanges values with the other ranks and makes nothing, and ends the call.
    /// The work enters no communicator library.
    pub(super) fn exchange<T>(self, work: impl FnOnce(&Round, &Wait) -> Result<T>) -> Result<T> {
        let done = catch_unwind(AssertUnwindSafe(|| work(&self.round, &self.call.wait)));
        self.end(done.unwrap_or_else(|panic| Err(Error::of_panic(&*panic))), Log::default())
    }

    fn peers(&self) -> Peers<'_> {
        let shares_memory = self.call.world.rendezvous().shares_memory();
        Peers { round: Some(&self.round), wait: &self.call.wait, shares_memory }
    }

    /// Ends the call after its work: tells the other ranks of a failure, reaches the second
    /// verdict, keeps or undoes what the work made, and gives the turn back.
    fn end<T>(self, done: Result<T>, log: Log) -> Result<T> {
        let AgreedCall { call, round } = self;
        let agreed = round.end(done, &call.wait);
        let kept = log.keep_or_undo(agreed, call.world, || call.alive());
        let outcome = call.wait.outcome(kept);
        drop(call.turn);
        outcome
    }
}

/// Runs work that makes something for this rank alone. There is no other rank to agree with, so
/// the work needs no turn.
pub(super) fn run_alone<T>(
    world: &World,
    mesh: &RootComms,
    wait: &Wait,
    work: impl FnOnce(&mut Work<'_>) -> Result<T>,
) -> Result<T> {
    let mut here = Work { peers: Peers::none(wait), log: Log::default() };
    let done = work(&mut here);
    // All meshes of the world share the communicator of this rank alone, so it stays when another
    // thread ends this mesh. It ends with the world.
    let made = here.log.keep_or_undo(done, world, || world.alive())?;
    mesh.alive().map(|()| made)
}

/// The other ranks of a call while its work runs.
#[derive(Clone, Copy)]
pub(super) struct Peers<'a> {
    /// The agreed call, in which the ranks exchange what they need; `None` where no other rank
    /// takes part.
    round: Option<&'a Round>,
    /// How long the call may take, and what ends it early.
    wait: &'a Wait,
    /// Whether all ranks of the world share memory; `None` where nobody has asked.
    shares_memory: Option<bool>,
}

impl<'a> Peers<'a> {
    /// Returns the peers of a call in which no other rank takes part.
    pub(super) fn none(wait: &'a Wait) -> Peers<'a> {
        Peers { round: None, wait, shares_memory: Some(true) }
    }

    /// How long the call may take, and what ends it early.
    pub(super) fn wait(&self) -> &'a Wait {
        self.wait
    }

    /// The agreed call, in which its ranks exchange values; `None` where no other rank takes part.
    pub(super) fn round(&self) -> Option<&'a Round> {
        self.round
    }

    /// Whether all ranks of the world share memory; `None` where nobody has asked.
    pub(super) fn share_memory(&self) -> Option<bool> {
        self.shares_memory
    }

    /// Returns the name of `part` of what the call makes. The name is equal on all ranks of the
    /// call, and nothing else has it.
    pub(super) fn name_of(&self, part: &str) -> Option<String> {
        self.round.map(|round| format!("{}/{part}", round.name()))
    }

    /// Does what [`Round::tell`] does, where other ranks take part.
    pub(super) fn tell(&self, error: &Error) -> bool {
        self.round.is_none_or(|round| round.tell(error, self.wait))
    }

    /// Tells the other ranks why this rank is about to abort a communicator. Otherwise they would
    /// take the abort for the reason, and blame this rank.
    pub(super) fn tell_before_abort(&self, error: &Error) {
        if matches!(error.status(), Status::PeerLost | Status::Ccl | Status::Timeout) {
            self.tell(error);
        }
    }

    /// Fails when another rank has reported a failure by now.
    pub(super) fn check(&self) -> Result<()> {
        let Some(round) = self.round else { return Ok(()) };
        match round.failed(self.wait) {
            Ok(Some(failure)) => Err(failure),
            // When the store does not answer, the work goes on until its own deadline.
            Err(error) if error.status() != Status::Timeout => Err(error),
            _ => Ok(()),
        }
    }

    /// Agrees with the ranks of a smaller `scope`, inside a call of the whole world, on which of
    /// the offered communicators they share.
    pub(super) fn agree_to_share(&self, scope: &Scope, text: &str, offers: &[Option<String>]) -> Result<Vec<bool>> {
        scope.agree_to_share(text, "", offers, self.wait).map(|(_, shared)| shared)
    }
}
