//! The world that this process has joined.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hostccl::fork::{self, Own};

use super::agreement::{Departures, Epoch, Members, Membership, Recovery, Scope, ScopeKeys, WorldKeys};
use super::current_epoch::{CurrentEpoch, EpochScopes};
use super::door_watch::{Door, DoorWatch};
use super::incarnation::{Incarnation, Tickets};
use super::launcher::Place;
use super::local_place::LocalPlace;
use super::loss_watch::LossWatch;
use super::losses::Losses;
use super::newcomer::Newcomer;
use super::store::{Server, Store};
use super::turn_watch::TurnWatch;
use crate::error::{Error, Result, Status};
use crate::events::Source;
use crate::recorder;
use crate::wait::Wait;

/// A job as one of its ranks sees it.
pub struct World {
    /// "cuda" or "cpu".
    pub(super) device_type: String,
    /// Which rank this process is, and where the ranks meet.
    pub(super) place: Place,
    /// Where this rank is among the ranks of its host. In an offline world, and until the rank has
    /// joined, it is what this rank knows by itself.
    pub(super) local: LocalPlace,
    /// How long each wait lasts.
    pub(super) timeout: Duration,
    /// Whether there is no rendezvous by choice.
    pub(super) offline: bool,
    /// Whether the ranks compare each collective before they issue it.
    pub(super) checks_collectives: bool,
    /// The state that the rank has after joining; `None` in an offline world, and until the rank
    /// has joined.
    pub(super) session: Option<Own<Session>>,
}

/// The state that a rank has after it has joined. A forked child never drops it. The fields are
/// dropped in order, so the connections to the store end before the server to which they may lead.
pub(super) struct Session {
    /// This process.
    pub(super) me: Incarnation,
    /// The epoch in which this process is.
    pub(super) epoch: Arc<CurrentEpoch>,
    /// The processes that are known to be lost.
    pub(super) losses: Arc<Losses>,
    /// Watches for lost ranks, for the events of this process.
    pub(super) loss_watch: Arc<LossWatch>,
    /// The keys that this rank has left in the store for the world.
    pub(super) leftovers: Arc<WorldKeys>,
    /// The number of ranks of the world that this process leaves one day; 0 where it is a newcomer
    /// that was not let in.
    pub(super) leaves_of: Arc<AtomicUsize>,
    /// Counts the newcomers at the door.
    pub(super) door: DoorWatch,
    /// Tells threads that are blocked in communicators of a recovery.
    pub(super) turn_watch: Arc<TurnWatch>,
    /// The knowledge of this process about the running job that it has joined; `None` where it has
    /// joined with the others.
    pub(super) newcomer: Option<Newcomer>,
    /// The store in which the ranks meet.
    pub(super) store: Arc<dyn Store>,
    /// The keys of the world begin with this prefix.
    pub(super) prefix: String,
    /// The size of rank 0's world; `None` when rank 0 did not say it.
    pub(super) size_there: Option<usize>,
    /// Whether rank 0 serves the store.
    pub(super) served: bool,
    /// The world in the recording of this process.
    pub(super) record: recorder::World,
    /// The server, if this process runs it.
    pub(super) server: Option<Arc<Server>>,
}

impl Drop for Session {
    /// The session ends on the thread that drops it, and not on the one that watches for losses.
    fn drop(&mut self) {
        self.loss_watch.release();
    }
}

impl World {
    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Returns the number of ranks. The number grows when the job lets in a newcomer whose rank is
    /// not below it.
    pub fn size(&self) -> usize {
        // An offline world and a forked child have no epochs.
        let session = self.session.as_deref().filter(|_| !fork::is_child());
        session.map_or(self.place.size, |session| session.epoch.get().size)
    }

    /// Returns the number of ranks with which this process has joined.
    #[doc(hidden)]
    pub fn size_at_join(&self) -> usize {
        self.place.size
    }

    /// Returns the rank in this host.
    pub fn local_rank(&self) -> usize {
        self.local.local_rank
    }

    /// Returns where this rank is among the ranks of its host, and its host among the hosts. An
    /// offline world counts all ranks as ranks of one host.
    pub fn local_place(&self) -> LocalPlace {
        self.local
    }

    /// Whether all ranks share memory, so that the host engine needs no network. `None` for device
    /// types that do not use the host engine.
    pub(crate) fn shares_memory(&self) -> Option<bool> {
        (self.device_type == "cpu").then_some(self.local.num_hosts == 1)
    }

    /// Returns how long each wait lasts.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether there is no rendezvous by choice.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Returns the device type, "cuda" or "cpu".
    pub fn device_type(&self) -> &str {
        &self.device_type
    }

    /// Whether the ranks compare each collective before they issue it.
    pub(crate) fn checks_collectives(&self) -> bool {
        self.checks_collectives
    }

    /// Returns the name of what started this process, for messages.
    pub fn launcher(&self) -> &'static str {
        self.place.launcher
    }

    /// Returns where the ranks meet, for messages.
    pub fn store_name(&self) -> &str {
        self.session.as_ref().map_or("no store", |session| session.store.name())
    }

    /// Returns the ranks that make the collective calls of the world: all ranks, or after a
    /// recovery the ranks of the mesh. Fails where this rank is not one of them.
    pub fn scope(&self) -> Result<Arc<Scope>> {
        let epoch = self.session()?.epoch.get();
        self.refuse_at_door(&epoch)?;
        epoch.world.clone().ok_or_else(|| {
            Error::not_member(format!(
                "rank {} is not in the mesh of epoch {}, so it takes no part in collective calls",
                self.place.rank, epoch.number
            ))
        })
    }

    /// Returns the number of the epoch in which this process is. The job starts in epoch 0.
    pub fn epoch(&self) -> u64 {
        // An offline world and a forked child have no epochs. No error is made for these two
        // cases, because dm_init asks each time.
        let session = self.session.as_deref().filter(|_| !fork::is_child());
        session.map_or(0, |session| session.epoch.get().number)
    }

    /// Whether the store lets ranks decide together: exactly one of them can write a value, also
    /// when another one dies meanwhile.
    pub fn can_recover(&self) -> Result<bool> {
        Ok(self.session()?.store.decides_at_once())
    }

    /// Fails where one of these ranks takes no part in the collective calls of this process's
    /// epoch.
    pub(crate) fn check_in_epoch(&self, ranks: impl IntoIterator<Item = i32>) -> Result<()> {
        let epoch = self.epoch();
        if epoch == 0 {
            return Ok(());
        }
        let scope = self.scope()?;
        let mut known: Vec<i32> = (0..scope.num_ranks()).map(|position| scope.rank_at(position)).collect();
        known.sort_unstable();
        match ranks.into_iter().find(|rank| known.binary_search(rank).is_err()) {
            Some(rank) => Err(Error::invalid(format!(
                "rank {rank} is not in the mesh of epoch {epoch}: it was lost or waits for a place, so it takes no part in collective calls"
            ))),
            None => Ok(()),
        }
    }

    /// Returns some of the ranks, in an order of their own, as a set that makes collective calls.
    /// `id` is equal on all of these ranks and is used once in the epoch.
    pub fn subscope(&self, id: &str, ranks: Arc<[i32]>, position: usize) -> Result<Scope> {
        let session = self.session()?;
        let epoch = session.epoch.get();
        self.refuse_at_door(&epoch)?;
        Ok(self.scope_of(session, &epoch, id, (Members::Listed(ranks), position)))
    }

    /// Fails where this process is a newcomer that was not let in yet.
    fn refuse_at_door(&self, epoch: &EpochScopes) -> Result<()> {
        if !epoch.is_at_door {
            return Ok(());
        }
        Err(Error::invalid_state(format!(
            "rank {} has joined a running job and was not let in yet: call dm_init first, which asks for its place in the mesh and waits for the job's next recovery",
            self.place.rank
        )))
    }

    fn scope_of(&self, session: &Session, epoch: &EpochScopes, id: &str, ranks: (Members, usize)) -> Scope {
        let (members, me) = ranks;
        let left = ScopeKeys::new(&members, &session.leftovers, Some(epoch.number));
        let tickets = epoch.tickets.clone();
        let membership = Membership { tickets, epoch: epoch.number, ..self.membership(session, members, me, left) };
        Scope::new(membership, format!("{}/{id}", epoch.prefix))
    }

    fn membership(&self, session: &Session, members: Members, me: usize, left: ScopeKeys) -> Membership {
        let serving = session.served && self.place.rank == 0;
        let (store, losses) = (Arc::clone(&session.store), Arc::clone(&session.losses));
        let (tickets, epoch, served) = (Tickets::default(), 0, session.served);
        let record = session.record.clone();
        Membership { store, losses, members, tickets, epoch, me, served, serving, left, record }
    }

    /// Begins this process's way through the decisions of the world. `epoch` is the one in which
    /// the job has started. This function is called once for a world.
    #[doc(hidden)]
    pub fn recovery(&self, epoch: Epoch) -> Result<Recovery> {
        let session = self.session()?;
        self.refuse_at_door(&session.epoch.get())?;
        self.recovery_of(Members::All(self.place.size), epoch)
    }

    pub(super) fn recovery_of(&self, members: Members, epoch: Epoch) -> Result<Recovery> {
        let session = self.session()?;
        let left = ScopeKeys::new(&members, &session.leftovers, None);
        let membership = self.membership(session, members, self.place.rank, left);
        Ok(Recovery::new(membership, session.me, epoch))
    }

    /// Goes on to the epoch to which that recovery has come. From now on the world's scope and new
    /// scopes belong to that epoch, and calls in scopes of earlier epochs end.
    #[doc(hidden)]
    pub fn enter_epoch(&self, recovery: &Recovery) -> Result<()> {
        let session = self.session()?;
        let mut epoch = EpochScopes::of(&session.prefix, recovery.epoch_number(), recovery.epoch());
        let ranks: Vec<i32> = recovery.epoch().in_mesh().into_iter().map(|process| process.rank).collect();
        if let Some(me) = ranks.iter().position(|rank| *rank == session.me.rank) {
            let scope = self.scope_of(session, &epoch, "world", (Members::of(ranks), me));
            epoch.world = Some(Arc::new(scope));
        }
        session.leaves_of.store(epoch.size, Ordering::SeqCst);
        if let Some(server) = &session.server {
            server.expect_ranks(epoch.size);
        }
        session.losses.turns().enter(epoch.number);
        session.record.set_epoch(epoch.number);
        session.epoch.replace(epoch);
        session.door.look_again();
        Ok(())
    }

    /// Returns how many newcomers wait at the door of the job, as far as this process knows: those
    /// that have knocked since the last recovery was decided, and are not known to be lost. A
    /// newcomer that waits longer got no place then, and is no reason for another recovery.
    /// src/comm answers dm_waiting with this function. Local. This function asks the store for
    /// nothing while nobody comes, and is cheap enough for every step of a program
    /// (door_watch.rs).
    #[doc(hidden)]
    pub fn num_waiting(&self) -> Result<i32> {
        self.num_waiting_for(&|| None)
    }

    /// Does what [`num_waiting`](World::num_waiting) does. `seats_at_start` returns the number of
    /// seats of the mesh in epoch 0; `None` where that is the number of ranks of the world.
    pub(crate) fn num_waiting_for(&self, seats_at_start: &dyn Fn() -> Option<usize>) -> Result<i32> {
        let Session { store, prefix, losses, epoch, door, .. } = self.session()?;
        Ok(door.count(Door { store: &**store, prefix, losses, epoch, seats_at_start }))
    }

    /// Why a thread that is blocked in a communicator of this world ends its wait, as far as this
    /// process knows: another rank has begun a recovery. Returns the reason and that rank. Local,
    /// and meant for waits that last long (turn_watch.rs).
    #[doc(hidden)]
    pub fn begun_recovery(&self) -> Option<(String, i32)> {
        let session = self.session.as_deref().filter(|_| !fork::is_child())?;
        session.turn_watch.begun().map(|turn| (turn.reason(), turn.by))
    }

    /// Returns a question that blocked threads ask: why their waits end, or `None`. The answer is
    /// that of [`begun_recovery`](World::begun_recovery). The question does not keep the world
    /// alive.
    pub(crate) fn recovery_question(&self) -> Option<Arc<hostccl::Question>> {
        let session = self.session.as_deref().filter(|_| self.place.size > 1)?;
        let watch = Arc::downgrade(&session.turn_watch);
        Some(Arc::new(move || watch.upgrade()?.begun().map(|turn| turn.reason())))
    }

    /// Returns the world in the recording of this process. An offline world is not recorded.
    pub(crate) fn record(&self) -> recorder::World {
        let session = self.session.as_deref().filter(|_| !fork::is_child());
        session.map_or_else(recorder::World::default, |session| session.record.clone())
    }

    /// Returns the watch for lost ranks. An offline world and a forked child have none.
    pub(crate) fn loss_watch(&self) -> Option<&Arc<LossWatch>> {
        self.session.as_deref().filter(|_| !fork::is_child()).map(|session| &session.loss_watch)
    }

    /// Returns how many processes have joined the world under this rank before this one.
    #[doc(hidden)]
    pub fn ticket(&self) -> Result<u32> {
        Ok(self.session()?.me.ticket)
    }

    /// Returns the list of the ranks that have ended a mesh by dm_abort. `id` is equal on all
    /// ranks of the mesh and is used once.
    pub fn departures(&self, id: &str) -> Result<Departures> {
        let session = self.session()?;
        let (store, epoch) = (Arc::clone(&session.store), session.epoch.get());
        let prefix = format!("{}/{id}", epoch.prefix);
        Ok(Departures::new(store, prefix, epoch.number, self.place.rank as i32, &session.leftovers))
    }

    /// Tells the other ranks that this rank takes no further part. From now on the other ranks
    /// take this rank for lost.
    pub fn leave(&self) {
        if let Some(session) = self.session().ok().filter(|_| self.place.size > 1) {
            session.losses.announce(session.me);
        }
    }

    /// Returns the ranks that are known to be lost by now. Asks the store, for half a second at
    /// most and no longer than `wait` lasts. When the store does not answer, returns the ranks of
    /// whose loss this rank knows already. When rank 0 serves the store, and the store is out of
    /// reach, rank 0 is lost.
    pub fn lost_ranks(&self, wait: &Wait) -> Result<Vec<i32>> {
        let session = self.session()?;
        let refreshed = session.losses.refresh(wait);
        // A process that another one has replaced is not missed any more.
        let tickets = &session.epoch.get().tickets;
        let lost = session.losses.all(|process| process != session.me && tickets.are_of(process));
        let mut lost: Vec<i32> = lost.into_iter().map(|process| process.rank).collect();
        let is_unreachable = refreshed.is_err_and(|error| error.status() == Status::Store);
        if is_unreachable && session.served && self.place.rank != 0 && !lost.contains(&0) {
            lost.push(0);
        }
        Ok(lost)
    }

    /// Returns when every rank has called this function. **Collective over the world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        self.barrier_by(&Wait::after(timeout.unwrap_or(self.timeout)))
    }

    /// Does what [`World::barrier`] does, and waits no longer than `wait` lasts.
    pub fn barrier_by(&self, wait: &Wait) -> Result<()> {
        self.scope()?.agree("dm_world_barrier()", wait)?.finish(wait)
    }

    pub(super) fn session(&self) -> Result<&Session> {
        Error::check_fork()?;
        self.session
            .as_deref()
            .ok_or_else(|| Error::unsupported("this world was joined with DM_WORLD_OFFLINE: it talks to no other rank"))
    }
}
