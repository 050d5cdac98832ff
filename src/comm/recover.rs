//! Recovery: the mesh with which a job goes on after ranks were lost (docs/recovery.md).
//!
//! All living ranks of the world come to a turn, and wait until its decision stands in the store.
//! The decision says who goes on, and where. Each rank of the next mesh then makes its
//! communicators in the scopes of the new epoch, and all get one verdict on that. When a rank was
//! lost meanwhile, all go on to the next turn within the same call.
//!
//! A rank that is not in the mesh, because it is a spare or its replica is not whole, waits in the
//! call until it has a place in a mesh that was made, or until the job has ended.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::call::Call;
use super::create::{as_weak, mesh_text};
use super::dims::{SharedComms, WantedDims, make_dims};
use super::names::ranks_text;
use super::options::{DimOptions, MeshOptions, RecoverOptions};
use super::path::{from_text, to_text};
use super::recovered::Recovered;
use super::recovering::{Beginning, Way, first_epoch};
use super::refusal::is_refusal;
use super::root::{Life, RootComms, RootSpec};
use super::view::View;
use super::world::World;
use super::world_end::ends_world;
use crate::error::{Error, Result};
use crate::rendezvous::{Arrival, Made, Outcome, Recovery, Request, Terms};
use crate::wait::{Deadline, Wait};

const CALL: &str = "dm_recover";

/// How long the store may take to hear of a refusal. The caller waits for that, and for no other
/// rank.
const TELL: Duration = Duration::from_secs(1);

/// How long a rank that knows no reason to recover waits for the news of one.
const NEWS: Duration = Duration::from_millis(200);

/// How often it looks meanwhile.
const LOOK: Duration = Duration::from_millis(10);

impl View {
    /// The mesh with which the job goes on after ranks were lost. **Collective over the ranks of
    /// the world that live**, also those that are not in the mesh. Ends all root meshes of the
    /// world on this rank, as [`RootComms::abort`] does, unless this rank refuses the call. This
    /// view is the whole root mesh that the last recovery has given, or before the first recovery
    /// any root mesh. [`RootComms::recovered`] of the result says what the recovery has come to.
    ///
    /// A rank that is not in the mesh waits, without a limit, until it has a place. Where a rank of
    /// the mesh has no place in the next one, because a rank of its replica was lost, it gets a
    /// view that it is no member of.
    pub fn recover(&self, options: &RecoverOptions) -> Result<View> {
        self.tell_recover_if_refused(|| self.recover_or_refuse(options))
    }

    /// Runs `call`, which is a recovery of this mesh. If this rank refuses the call, the other
    /// ranks are told.
    pub(crate) fn tell_recover_if_refused<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let world = self.root_comms().world().filter(|world| !world.rendezvous().is_offline());
        let Some(world) = world.filter(|_| Error::check_fork().is_ok()) else { return call() };
        let begun = world.recovering().begun();
        let outcome = call();
        if let Err(error) = &outcome
            && is_refusal(error)
            && world.recovering().begun() == begun
            && world.alive().is_ok()
        {
            self.refuse_recovery(world, error);
        }
        outcome
    }

    /// Tells the other ranks that this one has refused its own call.
    fn refuse_recovery(&self, world: &World, error: &Error) {
        let root = self.root_comms();
        // Another thread that recovers now is in the turn for this rank.
        let Ok(mut way) = world.recovering().lock() else { return };
        let known = way.as_ref().map_or(0, |way| way.recovery.epoch().replicas.dim);
        let Ok(way) = Way::begin(&mut way, world.rendezvous(), &beginning(root), known) else { return };
        if way.root == root.id() {
            world.recovering().begin();
            way.recovery.refuse(error, &world.wait(TELL));
        }
    }

    fn recover_or_refuse(&self, options: &RecoverOptions) -> Result<View> {
        let root = self.root_comms();
        let Some(world) = root.world() else {
            return Err(Error::unsupported(format!(
                "dm_recover is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                self.mesh().describe()
            )));
        };
        let index = self.check_recover(world, options)?;
        let mut way = world.recovering().lock()?;
        let way = Way::begin(&mut way, world.rendezvous(), &beginning(root), index)?;
        self.check_way(way, index, options)?;

        world.recovering().begin();
        let wait = world.wait(options.timeout.unwrap_or(root.timeout()));
        if way.recovery.is_in_mesh() && root.life() == Life::Alive && !self.has_reason(&mut way.recovery, &wait) {
            return Err(Error::invalid_state(format!(
                "there is nothing to recover on {}: this rank knows of no lost rank, of no failed communicator and of nobody who waits to join",
                self.mesh().describe()
            )));
        }
        let mut job = Job { world, before: root, is_newcomer: false, index, options, wait };
        let wait = job.wait.clone();
        wait.outcome(job.go_on(way)).map(View::of_root)
    }

    /// Refuses what this rank alone can find wrong. Returns the number of the dimension of
    /// replicas.
    fn check_recover(&self, world: &World, options: &RecoverOptions) -> Result<usize> {
        let root = self.root_comms();
        if world.rendezvous().is_offline() {
            return Err(Error::unsupported("dm_recover: no rank of an offline world (DM_WORLD_OFFLINE) is ever lost"));
        }
        world.alive()?;
        if matches!(root.life(), Life::Finalized | Life::Shrunk) {
            root.alive()?;
        }
        if !world.rendezvous().can_recover()? {
            return Err(Error::unsupported(
                "dm_recover needs a store in which ranks decide by one operation, which dm_store_callbacks has not: use a server or a folder",
            ));
        }
        let is_root = Arc::ptr_eq(self.space(), root) && self.mesh().dim_names() == root.mesh().dim_names();
        if !is_root {
            return Err(Error::invalid(format!(
                "{} is a view of {}: pass the root mesh, which dm_root gives",
                self.mesh().describe(),
                root.mesh().describe()
            )));
        }
        root.library().map_or(Ok(()), |library| library.check_no_capture(CALL, None))?;
        options.check_dims(self.mesh().ndim())?;
        if options.silent.is_some() && options.min_size == 0 {
            return Err(Error::invalid(
                "silent_ms is given, but min_size is 0: a rank that is impatient could go on alone; say how many indices must be left",
            ));
        }
        options.dim.as_deref().map_or(Ok(0), |dim| self.mesh().dim_index(dim))
    }

    /// Fails where the mesh or the options do not fit the recoveries before.
    fn check_way(&self, way: &Way, index: usize, options: &RecoverOptions) -> Result<()> {
        let (root, epoch) = (self.root_comms(), way.recovery.epoch());
        if way.root != root.id() {
            if root.is_of_past_epoch() {
                return Err(root.ended_by_recovery());
            }
            return Err(Error::invalid(format!(
                "{} is not the mesh that the last dm_recover gave, and no other mesh of the world is recovered: make it anew by dm_init",
                self.mesh().describe()
            )));
        }
        if epoch.replicas.dim != index {
            return Err(Error::invalid(format!(
                "dim is {}, but earlier recoveries of this job were along {}: places that stayed empty belong to an index of that dimension",
                self.mesh().dim_name(index),
                self.mesh().dim_name(epoch.replicas.dim)
            )));
        }
        let count = epoch.replicas.count();
        if options.min_size > count {
            return Err(Error::invalid(format!(
                "min_size is {}, but dimension {} has size {count} in its full shape",
                options.min_size,
                self.mesh().dim_name(index)
            )));
        }
        Ok(())
    }

    /// Whether this rank knows a reason to recover this mesh, which is alive, or hears of one
    /// within a moment. Other ranks may have learned of a loss some milliseconds before.
    fn has_reason(&self, recovery: &mut Recovery, wait: &Wait) -> bool {
        let root = self.root_comms();
        let until = Deadline::after(NEWS);
        loop {
            let has_failed = root.communicators().iter().any(|communicator| communicator.has_failed());
            // Where the store does not answer, the turn says what is wrong.
            if has_failed || recovery.is_due(wait).unwrap_or(true) || root.has_departures(wait) {
                return true;
            }
            if until.passed() || wait.look_around().is_err() {
                return false;
            }
            sleep(LOOK);
        }
    }
}

/// One call of dm_recover, or the dm_init of a process that joins a running job.
struct Job<'a> {
    world: &'a Arc<World>,
    /// The root mesh that was passed. A newcomer has none, so it has the mesh that its dm_init asks
    /// for, which belongs to no world and has no communicators.
    before: &'a Arc<RootComms>,
    /// Whether this process is a newcomer.
    is_newcomer: bool,
    /// The number of the dimension of replicas.
    index: usize,
    options: &'a RecoverOptions,
    /// How long the call may take, and what ends it early.
    wait: Wait,
}

impl RootComms {
    /// The mesh of a process that joins a running job, which its dm_init asks for by `spec`: waits
    /// at the door until a recovery lets this process in, and makes the mesh of that epoch together
    /// with the others.
    pub(super) fn come_in(world: &Arc<World>, spec: RootSpec<'_>, wait: Wait) -> Result<Arc<RootComms>> {
        let mut way = world.recovering().lock()?;
        let library = Some(Arc::clone(world.library()?));
        let wanted = RootComms::new(RootSpec { world: None, library, id: "door".to_owned(), ..spec })?;
        let (rank, ranks, text) = (world.rank() as i32, wanted.mesh().root_ranks(), mesh_text(&wanted));
        // A spare that was lost asks for a place beyond the mesh, where nobody lets it in.
        let seat = ranks.iter().position(|known| *known == rank).unwrap_or(ranks.len());
        let options = RecoverOptions::default();
        let job = Job { world, before: &wanted, is_newcomer: true, index: 0, options: &options, wait };
        let make = |recovery: &Recovery| {
            world.end_epoch();
            job.make(recovery)
        };
        let come = world.rendezvous().come_in(&Request { seat, mesh: &text }, make, &job.wait);
        let come = come.and_then(|(recovery, made)| {
            let root = made.map_or_else(|| job.make(&recovery), Ok)?;
            *way = Some(Way { recovery, root: root.id().to_owned() });
            Ok(root)
        });
        job.wait.outcome(come).inspect_err(|_| world.end_epoch())
    }
}

/// What has become of the mesh of an epoch.
enum Entered {
    /// All its ranks have made it.
    Mesh(Arc<RootComms>),
    /// A rank of it was lost meanwhile, so the next turn is due. These are the ranks that its
    /// communicators blame.
    Broken(Vec<i32>),
}

impl Job<'_> {
    /// Ends the meshes of the epoch, and goes from turn to turn until a mesh was made.
    fn go_on(&mut self, way: &mut Way) -> Result<Arc<RootComms>> {
        let recovery = &mut way.recovery;
        let was_in_mesh = recovery.is_in_mesh();
        // The others train on while a rank is not in the mesh, so it has no state by then.
        let mut has_state = recovery.is_stateful() || (was_in_mesh && self.options.has_state);
        // After a recovery that failed this process may be in a later epoch than the mesh. Others hold
        // the places of those then that the communicators of the mesh blame.
        let is_of_past = self.before.is_of_past_epoch();
        let mut blamed = if is_of_past { Vec::new() } else { self.before.lost_in_communicators() };
        let (call, terms) = (self.text(recovery), self.terms());
        self.world.end_epoch();
        loop {
            let (lost, suspects) = self.facts_and_suspicions(&blamed);
            let arrival = Arrival { call: &call, terms: &terms, has_state, lost, suspects };
            recovery.watch_call(self.key_of_call(recovery)?);
            match recovery.come(&arrival, &self.wait)? {
                Outcome::Epoch => {}
                Outcome::Ended => return Err(self.ended()),
                Outcome::Called => {
                    self.answer(&call)?;
                    continue;
                }
            }
            match self.enter(recovery)? {
                Entered::Mesh(root) if was_in_mesh || recovery.is_in_mesh() => {
                    root.id().clone_into(&mut way.root);
                    return Ok(root);
                }
                Entered::Mesh(_) => has_state = false,
                Entered::Broken(ranks) => blamed = ranks,
            }
        }
    }

    /// Enters the epoch to which this rank has come, and makes its mesh together with the others. A
    /// rank that the decision has let in goes on here, too.
    fn enter(&self, recovery: &mut Recovery) -> Result<Entered> {
        self.world.rendezvous().enter_epoch(recovery)?;
        let made = self.make(recovery);
        match recovery.make(made.as_ref().map(|_| ()), &self.wait) {
            Ok(Made::Whole) => made.map(Entered::Mesh),
            Ok(Made::Broken) => {
                let blamed = made.map_or_else(|_| Vec::new(), |root| root.lost_in_communicators());
                self.world.end_epoch();
                Ok(Entered::Broken(blamed))
            }
            Err(error) => {
                self.world.end_epoch();
                Err(error)
            }
        }
    }

    /// The ranks that are lost for certain, and those that may be, of those that communicators
    /// blame. On one host the engine sees that a process has ended. On several hosts it may only be
    /// unable to reach a rank that lives.
    fn facts_and_suspicions<'a>(&self, blamed: &'a [i32]) -> (&'a [i32], &'a [i32]) {
        match self.world.rendezvous().shares_memory() {
            Some(true) => (blamed, &[]),
            _ => (&[], blamed),
        }
    }

    /// What the ranks of the mesh must agree on, beside the terms. The shape is the full one: a
    /// rank that has waited may have the handle of an earlier mesh, and may be in the mesh of an
    /// epoch whose making broke.
    fn text(&self, recovery: &Recovery) -> String {
        let mesh = self.before.mesh();
        let shape: Vec<String> = recovery.epoch().replicas.sizes.iter().map(usize::to_string).collect();
        format!(
            "{CALL}(shape=({}), names=({}), dim={}{})",
            shape.join(", "),
            mesh.dim_names().join(", "),
            mesh.dim_name(self.index),
            MeshOptions::default().dims(self.options.dims.clone()).agreed()
        )
    }

    fn terms(&self) -> Terms {
        let RecoverOptions { replace, silent, min_size, any_state, .. } = *self.options;
        // Recovery does not let a mesh grow yet.
        Terms { ends: false, dim: self.index, replace, silent, min_size, max_size: None, any_state }
    }

    /// The key that says that another rank has made a call of the whole world, which waits for this
    /// one. Only in epoch 0 is a rank needed that is not in the mesh.
    fn key_of_call(&self, recovery: &Recovery) -> Result<Option<String>> {
        let is_needed = recovery.epoch_number() == 0 && !recovery.is_in_mesh();
        Ok(if is_needed { Some(self.world.rendezvous().scope()?.key_of_next_call()) } else { None })
    }

    /// Takes part in the call of the world that another rank has made while this rank waits for a
    /// place: in dm_world_finalize, which ends the job. Any other call fails on its callers, with a
    /// mismatch, and this rank goes on waiting.
    fn answer(&self, call: &str) -> Result<()> {
        let wait = self.world.wait(self.world.rendezvous().timeout());
        if ends_world(self.world, &wait)? {
            return match self.world.end_with_others(&wait) {
                Ok(()) => Err(self.ended()),
                Err(error) => {
                    self.world.alive()?;
                    log::warn!("rank {}: goes on waiting for a place: {}", self.world.rank(), error.message());
                    Ok(())
                }
            };
        }
        let scope = self.world.rendezvous().scope()?;
        if let Err(error) = Call::begin(self.world, None, wait)?.agree(&scope, call) {
            log::warn!("rank {}: goes on waiting for a place: {}", self.world.rank(), error.message());
        }
        self.world.alive()
    }

    /// Ends the world on this rank, because the job has ended.
    fn ended(&self) -> Error {
        self.world.end_alone();
        Error::aborted("the job has ended: its ranks have called dm_world_finalize while this rank waited for a place")
    }

    /// Makes the mesh of the epoch that was entered: its communicators where this rank is in it.
    fn make(&self, recovery: &Recovery) -> Result<Arc<RootComms>> {
        let (epoch, number) = (recovery.epoch(), recovery.epoch_number());
        let mut shape = epoch.replicas.sizes.clone();
        shape[epoch.replicas.dim] -= epoch.without.len();
        let seats = epoch.seats.iter().enumerate();
        let in_mesh = seats.filter(|(seat, _)| !epoch.without.contains(&epoch.replicas.replica_of(*seat)));
        let ranks: Vec<i32> = in_mesh.filter_map(|(_, holder)| Some(holder.as_ref()?.rank)).collect();
        let mesh = self.before.mesh().like(&shape, &ranks, self.world.size().max(epoch.size))?;
        let dims = match self.options.dims.is_empty() {
            true => self.before.options_of_dims().to_vec(),
            false => self.options.dims.clone(),
        };
        let root = RootComms::new(RootSpec {
            world: Some(Arc::clone(self.world)),
            library: self.before.library().cloned(),
            mesh,
            id: format!("recovery{number}"),
            is_lazy: self.before.is_lazy(),
            timeout: self.before.timeout(),
            outer: None,
            options: dims.clone(),
        })?;
        self.world.register(as_weak(&root));
        let known = || self.before.recovered().members.clone();
        let first = || first_epoch(self.world.rendezvous(), self.before.mesh(), self.index);
        let members_before = (!self.is_newcomer).then(|| known().unwrap_or_else(first));
        let before = members_before.as_ref().map(|members| (self.before.mesh(), self.before.epoch(), members));
        root.set_recovered(Recovered::of((number, epoch), root.mesh(), before));
        match root.mesh().is_member() {
            true => self.make_comms(&root, recovery, &dims)?,
            false => root.set_made(self.before.made()),
        }
        Ok(root)
    }

    /// Makes the communicators of the next mesh, and those of the dimensions that were made on the
    /// mesh before. The first ones come from a fresh id, which always works: the mesh before may
    /// have failed, and ranks may be new. A rank that has joined does not know which dimensions
    /// were made, and a rank whose last call was aborted may lack one. So all ranks take the list
    /// of one rank that has not joined.
    fn make_comms(&self, root: &Arc<RootComms>, recovery: &Recovery, dims: &[DimOptions]) -> Result<()> {
        let (mesh, stateless) = (root.mesh(), &recovery.epoch().stateless);
        let ranks = mesh.root_ranks();
        let has_joined = |rank: i32| stateless.iter().any(|process| process.rank == rank);
        let teller = ranks.iter().copied().find(|rank| !has_joined(*rank)).unwrap_or(ranks[0]);
        let shape: Vec<String> = mesh.shape().iter().map(usize::to_string).collect();
        let text = format!(
            "{CALL}(epoch={}, shape=({}), names=({}), ranks={}{})",
            root.epoch(),
            shape.join(", "),
            mesh.dim_names().join(", "),
            ranks_text(&ranks),
            MeshOptions { lazy: root.is_lazy(), ..MeshOptions::default().dims(dims.to_vec()) }.agreed()
        );
        log::warn!("rank {}: goes on in epoch {} with {} ranks: {text}", mesh.rank(), root.epoch(), mesh.size());
        let scope = self.world.rendezvous().scope()?;
        let wanted = WantedDims::all_of(mesh, |index| dims.get(index).cloned().unwrap_or_default());
        let wait = self.wait.with_deadline(recovery.deadline(&self.wait));
        let call = Call::begin(self.world, None, wait.clone())?.agree(&scope, &text)?;
        let own = self.before.made();
        let told = call.run(|work| {
            make_dims(work, root, root, &wanted, &SharedComms::none(&wanted))?;
            let (text, wait) = (to_text(&own), work.peers.wait());
            match work.peers.round().filter(|_| ranks.len() > 1) {
                Some(round) if teller == mesh.rank() => round.publish("made", text.as_bytes(), wait)?,
                Some(round) => return round.fetch("made", teller, wait),
                None => {}
            }
            Ok(text.into_bytes())
        })?;
        let made = from_text(&told, &own, stateless.is_empty())
            .ok_or_else(|| Error::store(format!("rank {teller} has told of its dimensions in an unreadable text")))?;
        let view = View::of_root(Arc::clone(root));
        made.iter().try_for_each(|made| view.make_again(made, wait.deadline.left()))?;
        root.set_made(made);
        Ok(())
    }
}

/// The beginning of a rank's way at this root mesh.
fn beginning(root: &RootComms) -> Beginning<'_> {
    Beginning { id: root.id(), mesh: root.mesh(), text: mesh_text(root) }
}
