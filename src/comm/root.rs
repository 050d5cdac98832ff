//! A root mesh with its communicators: what it owns, and whether it is alive.

mod communicators;
mod control;
mod departed;
mod epochs;
mod life;
mod ranges;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

pub(super) use self::communicators::Issued;
use self::control::ControlScopes;
pub(super) use self::control::Purpose;
pub(super) use self::life::{Life, LifeFlag};
use super::background::hand_over;
use super::communicator::{Communicator, Held};
use super::ending::abort_all;
use super::names::made_by;
use super::options::DimOptions;
use super::path::MadeDims;
use super::recovered::Recovered;
use super::refusal::tell_if_refused;
use super::world::World;
use crate::ccl::{CallName, Library};
use crate::error::{Error, Result};
use crate::events;
use crate::layout::Dim;
use crate::mesh::Mesh;
use crate::recorder::Group;
use crate::rendezvous::{Departures, Scope};
use crate::wait::{Cancel, Wait};

/// The communicator along one dimension.
pub(super) struct DimComm {
    /// The dimension's name. Dimensions of one layout may have several names.
    name: String,
    /// The dimension's sizes and strides over the positions of the root.
    dim: Dim,
    communicator: Held,
    /// The name under which calls along the dimension are issued, equal on all its ranks.
    call: CallName,
    /// The caller's options of the dimension. A mesh that dm_shrink makes inherits them.
    options: DimOptions,
    /// The dimension's group in the recording of this process. The views share it.
    group: Arc<Group>,
}

impl Drop for DimComm {
    /// No further call is made along the dimension, so another group can get its place in the
    /// recording.
    fn drop(&mut self) {
        self.group.close();
    }
}

/// The parts of a new root mesh.
pub(super) struct RootSpec<'a> {
    /// The world that its collective calls belong to; `None` for a mesh over existing communicators
    /// without a world.
    pub(super) world: Option<Arc<World>>,
    /// The library of its communicators; `None` for an offline mesh.
    pub(super) library: Option<Arc<Library>>,
    pub(super) mesh: Mesh,
    /// The root's part in the names of its scopes and calls. It is equal on all ranks of the root.
    pub(super) id: String,
    /// Whether its communicators are made at their first use.
    pub(super) is_lazy: bool,
    /// How long each collective call of the mesh may take.
    pub(super) timeout: Duration,
    /// The root of which the new one is a range. Both share their life.
    pub(super) outer: Option<&'a Arc<RootComms>>,
    /// The options of its dimensions; empty for the defaults. A mesh that dm_recover makes inherits
    /// them, also on a rank that is not in this mesh.
    pub(super) options: Vec<DimOptions>,
}

/// A root mesh with its communicators. Its views share it.
pub struct RootComms {
    /// The world that its collective calls belong to; `None` for a mesh over existing communicators
    /// without a world.
    world: Option<Arc<World>>,
    /// The library of its communicators; `None` for an offline mesh.
    library: Option<Arc<Library>>,
    mesh: Mesh,
    /// The agreement scope of the root's ranks; `None` where there is nobody to agree with.
    scope: Option<Arc<Scope>>,
    /// Raised when the root is aborted; it ends every wait of the root's calls.
    cancel: Cancel,
    /// The communicators along its dimensions, in the order in which they were made.
    dims: RwLock<Vec<DimComm>>,
    /// The communicator over all ranks of the root, from which others are split. This communicator
    /// is made when it is first needed.
    parent: RwLock<Option<Held>>,
    /// Whether its communicators are made at their first use.
    is_lazy: bool,
    /// Whether the ranks compare each collective before they issue it.
    checks_collectives: bool,
    /// How long each collective call of the mesh may take.
    timeout: Duration,
    /// The root's part in the names of its scopes and calls. It is equal on all ranks of the root.
    id: String,
    /// Whether the root is alive; its ranges and views have the same flag.
    life: Arc<LifeFlag>,
    /// The root of which this one is a range. The views of a range hold both, so the outer root
    /// lives longer.
    outer: Weak<RootComms>,
    /// The ranges of this root, which end with it.
    ranges: Mutex<Vec<Arc<RootComms>>>,
    /// How often this rank has called dm_shrink on the root. Each attempt has an agreement scope
    /// of its own.
    pub(super) shrink_attempts: AtomicU64,
    /// The scopes in which groups along dimensions make calls of the control plane.
    control: ControlScopes,
    /// The scope in which the ranks of the root agree on who is lost. This scope is made when
    /// dm_shrink first needs it.
    survivors: Mutex<Option<Arc<Scope>>>,
    /// The ranks that have ended this root by dm_abort, and on a library with streams also those
    /// that have ended it by dm_recover or dm_shrink. The root's ranges share the list. `None`
    /// where the root has no other ranks with which it agrees.
    departures: Option<Arc<Departures>>,
    /// Watches for ranks that end this root, for the events of this process. A range has no watch.
    departed: OnceLock<Arc<dyn events::Source>>,
    /// The number of the epoch in which the root was made.
    epoch: u64,
    /// The options of its dimensions; empty for the defaults.
    options: Vec<DimOptions>,
    /// The outcome of the recovery that made this root. The value is set before a program sees
    /// the root, or at the first question.
    recovered: OnceLock<Recovered>,
    /// The dimensions that calls have made on the root, in their order, beside the root's own
    /// dimensions. A mesh that dm_recover makes gets these dimensions, too.
    made: Mutex<Vec<MadeDims>>,
}

impl RootComms {
    /// Returns a root mesh without communicators.
    pub(super) fn new(spec: RootSpec<'_>) -> Result<Arc<RootComms>> {
        let RootSpec { world, library, mesh, id, is_lazy, timeout, outer, options } = spec;
        let epoch = world.as_ref().map_or(0, |world| world.rendezvous().epoch());
        let has_peers = world.as_ref().filter(|world| !world.rendezvous().is_offline() && mesh.is_member());
        let departures = match (outer, has_peers) {
            (Some(outer), _) => outer.departures.clone(),
            (None, Some(world)) => Some(Arc::new(world.rendezvous().departures(&id)?)),
            (None, None) => None,
        };
        let scope = has_peers.zip(departures.as_ref());
        let scope = scope.map(|(world, departures)| own_scope(world, &mesh, &id, departures)).transpose()?;
        let fresh_cancel = || world.as_ref().map_or_else(Cancel::new, |world| world.cancel());
        let checks_collectives = has_peers.is_some_and(|world| world.rendezvous().checks_collectives());
        Ok(Arc::new(RootComms {
            scope,
            checks_collectives,
            cancel: outer.map_or_else(fresh_cancel, |outer| outer.cancel.clone()),
            world,
            library,
            mesh,
            dims: RwLock::default(),
            parent: RwLock::default(),
            is_lazy,
            timeout,
            id,
            life: outer.map_or_else(LifeFlag::new, |outer| Arc::clone(&outer.life)),
            outer: outer.map_or_else(Weak::new, Arc::downgrade),
            ranges: Mutex::default(),
            shrink_attempts: AtomicU64::new(0),
            control: ControlScopes::default(),
            survivors: Mutex::default(),
            departures,
            departed: OnceLock::new(),
            epoch,
            options,
            recovered: OnceLock::new(),
            made: Mutex::default(),
        }))
    }

    /// The root mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Whether the mesh is offline, so that it has no communicators.
    pub fn is_offline(&self) -> bool {
        self.library.is_none()
    }

    pub(super) fn world(&self) -> Option<&Arc<World>> {
        self.world.as_ref()
    }

    pub(super) fn library(&self) -> Option<&Arc<Library>> {
        self.library.as_ref()
    }

    pub(super) fn scope(&self) -> Option<&Arc<Scope>> {
        self.scope.as_ref()
    }

    /// The scope in which the ranks of the root agree on who is lost.
    pub(super) fn survivors_scope(&self, world: &World) -> Result<Arc<Scope>> {
        let mut scope = self.survivors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scope) = &*scope {
            return Ok(Arc::clone(scope));
        }
        let position = self.mesh.root_position().unwrap_or(0);
        let ranks = self.mesh.root_ranks().into();
        let made = Arc::new(world.rendezvous().subscope(&format!("{}/survivors", self.id), ranks, position)?);
        *scope = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Returns `scope` for calls on this root. A wait of such a call ends when a rank of the scope
    /// has noted in the store that it has ended the root.
    pub(super) fn of_this_mesh(&self, scope: Scope) -> Scope {
        match &self.departures {
            Some(departures) => scope.of_mesh(departures),
            None => scope,
        }
    }

    /// Whether another rank has noted that it has ended this root, as far as the store knows by
    /// now.
    pub(super) fn has_departures(&self, wait: &Wait) -> bool {
        self.departures.as_ref().is_some_and(|departures| departures.are_any(wait).unwrap_or(false))
    }

    /// Tells the other ranks of the root that this rank has ended the root. Does not wait for the
    /// other ranks. The thread that is returned writes the note.
    pub(super) fn tell_departure(&self) -> Option<JoinHandle<()>> {
        self.departures.as_ref().filter(|_| self.mesh.root_size() > 1).and_then(Departures::tell)
    }

    /// The list of the ranks that have noted that they have ended this mesh; `None` for a mesh
    /// without a world.
    pub(super) fn departures(&self) -> Option<&Departures> {
        self.departures.as_deref()
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The scopes in which groups along the root's dimensions make calls of the control plane.
    pub(super) fn control_scopes(&self) -> &ControlScopes {
        &self.control
    }

    /// Returns words by which a message distinguishes this mesh from other meshes with the same
    /// dimension names.
    pub(super) fn apart(&self) -> String {
        let shape: Vec<String> = self.mesh.shape().iter().map(usize::to_string).collect();
        format!("on the mesh of shape ({}) {}", shape.join(", "), made_by(&self.id))
    }

    pub(super) fn is_lazy(&self) -> bool {
        self.is_lazy
    }

    /// Whether the ranks compare each collective before they issue it.
    #[inline]
    pub(super) fn checks_collectives(&self) -> bool {
        self.checks_collectives
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// The world and the scope in which the root's ranks make the collective call `call`. Fails
    /// where this rank cannot take part.
    pub(super) fn participants(&self, call: &str) -> Result<(&Arc<World>, &Arc<Scope>)> {
        self.alive()?;
        if !self.mesh.is_member() {
            return Err(Error::not_member(format!(
                "{call}: rank {} is not in {}, so it takes no part in its collective calls",
                self.mesh.rank(),
                self.mesh.describe()
            )));
        }
        self.world.as_ref().zip(self.scope.as_ref()).ok_or_else(|| {
            Error::unsupported(format!(
                "{call} is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                self.mesh.describe()
            ))
        })
    }

    /// Runs `call`, which is a call of `function` that is collective over this root. If this rank
    /// refuses the call, the other ranks are told.
    pub(super) fn tell_if_refused<T>(&self, function: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let takes_part = self.world.is_some() && self.mesh.is_member() && self.alive().is_ok();
        let scope = self.scope.as_deref().filter(|_| takes_part);
        tell_if_refused(scope, self.cancel.clone(), function, call)
    }

    /// A wait of at most `timeout` (`None`: the mesh's own), which the root's abort ends.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Wait {
        Wait { cancel: self.cancel.clone(), ..Wait::after(timeout.unwrap_or(self.timeout)) }
    }
}

/// The root's life.
impl RootComms {
    pub(super) fn life(&self) -> Life {
        self.life.life()
    }

    pub(super) fn life_flag(&self) -> Arc<LifeFlag> {
        Arc::clone(&self.life)
    }

    /// Ends the root in the way that `life` says. Returns whether this call ended it. Only the
    /// first end counts: a finalized root cannot be aborted, and an aborted root cannot be
    /// finalized.
    pub(super) fn end(&self, life: Life) -> bool {
        let ends = self.life.end(life);
        if let Some(world) = self.world.as_ref().filter(|_| ends && life == Life::Finalized) {
            world.note_finalized();
        }
        ends
    }

    /// Fails with `DM_STATUS_ABORTED` when the root has ended. The message names the call that
    /// ended it.
    pub(super) fn alive(&self) -> Result<()> {
        match self.life() {
            Life::Alive => self.cancel.check(),
            Life::Aborted if self.is_of_past_epoch() && !self.cancel.is_raised_above() => Err(self.ended_by_recovery()),
            Life::Aborted => {
                let by = if self.cancel.is_raised_above() { "dm_world_abort" } else { "dm_abort" };
                Err(Error::aborted(format!("{} was aborted by {by}", self.mesh.describe())))
            }
            Life::Finalized => Err(Error::aborted(format!(
                "{} was finalized by dm_finalize or dm_world_finalize",
                self.mesh.describe()
            ))),
            Life::Shrunk => Err(Error::aborted(format!(
                "{} was ended by dm_shrink: use the mesh that dm_shrink gave",
                self.mesh.describe()
            ))),
            Life::Recovered => Err(self.ended_by_recovery()),
        }
    }
}

impl RootComms {
    /// The error of calls on this root after dm_recover has ended it.
    pub(super) fn ended_by_recovery(&self) -> Error {
        let (mesh, mine) = (self.mesh.describe(), self.epoch);
        let now = self.world.as_ref().map_or(mine, |world| world.rendezvous().epoch());
        Error::aborted(match self.is_of_past_epoch() {
            true => format!(
                "{mesh} belongs to epoch {mine}, and the job is in epoch {now}: use the mesh that dm_recover gave"
            ),
            false => {
                format!("{mesh} was ended by dm_recover, which has not given another mesh yet: call dm_recover again")
            }
        })
    }

    /// Whether the job has gone on to a later epoch than that of the root.
    pub(super) fn is_of_past_epoch(&self) -> bool {
        self.world.as_ref().is_some_and(|world| world.rendezvous().epoch() > self.epoch)
    }
}

impl Drop for RootComms {
    /// A failed communicator ends with the last root mesh that has it. Communicators that have not
    /// failed stay, because raw pointers to them may be in use.
    fn drop(&mut self) {
        let dims = std::mem::take(self.dims.get_mut().unwrap_or_else(PoisonError::into_inner));
        let parent = self.parent.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(world) = self.world.take() else { return };
        // The scopes use the store of the world, so they are dropped first.
        let survivors = self.survivors.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        drop((dims, parent, self.scope.take(), std::mem::take(&mut self.control), survivors, self.departures.take()));
        self.departed.take().iter().for_each(|watch| watch.release());
        // On a library with streams the question whether a communicator has failed may last for
        // seconds, and dropping a root must not block.
        let has_streams = self.library.as_ref().is_some_and(|library| library.has_streams());
        if has_streams && world.comms().has_unheld() {
            return hand_over(Unasked(world));
        }
        let abandoned = world.comms().take_abandoned();
        // Exactly one owner of a world gets it here, however many threads drop their hold on it.
        let last = Arc::into_inner(world);
        if last.is_some() || !abandoned.is_empty() {
            hand_over(Leftovers { abandoned, _world: last });
        }
    }
}

/// The parts of a dropped root mesh that take time to end.
struct Leftovers {
    /// Failed communicators that no root mesh holds any more.
    abandoned: Vec<Arc<Communicator>>,
    /// The world, where nobody else had it.
    _world: Option<World>,
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        // An abort that fails leaves nothing to be done.
        let _ = abort_all(&self.abandoned);
    }
}

/// The world of a dropped root mesh, whose communicators were not asked yet whether they have
/// failed.
struct Unasked(Arc<World>);

impl Drop for Unasked {
    fn drop(&mut self) {
        self.0.comms().end_abandoned();
    }
}

/// Returns the id of the root mesh that call number `call` of the world's scope makes in `epoch`.
/// The numbers begin anew in each epoch.
pub(super) fn mesh_id(epoch: u64, call: u64) -> String {
    match epoch {
        0 => format!("mesh{call}"),
        epoch => format!("mesh{epoch}.{call}"),
    }
}

/// Returns the scope in which the ranks of a root mesh agree. A root that has all ranks of the
/// world (after a recovery: of the mesh that it gave) uses the world's scope. So when ranks make
/// calls on different meshes in different orders, that is a mismatch and not a wait. Any other root
/// has a scope of its own.
fn own_scope(world: &World, mesh: &Mesh, id: &str, departures: &Arc<Departures>) -> Result<Arc<Scope>> {
    let rendezvous = world.rendezvous();
    let of_world = rendezvous.scope()?;
    if mesh.root_size() == of_world.num_ranks() {
        return Ok(Arc::new(of_world.of_mesh(departures)));
    }
    let position = mesh.root_position().unwrap_or(0);
    rendezvous.subscope(id, mesh.root_ranks().into(), position).map(|scope| Arc::new(scope.of_mesh(departures)))
}
