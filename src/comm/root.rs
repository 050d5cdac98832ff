//! A root mesh's communicators: made together with the mesh, extended by flatten and unflatten.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use super::communicator::{Communicator, Held};
use super::dims::{Plan, Shared};
use super::domain::{Domain, Turn};
use super::options::{DimOptions, MeshOptions};
use crate::ccl::{CallName, Library, RawComm};
use crate::digest::Fnv1a;
use crate::error::{Error, Result, Status};
use crate::layout::Dim;
use crate::mesh::Mesh;
use crate::rendezvous::{Round, Scope};
use crate::wait::{Cancel, Deadline, Wait, Watch};

/// How a root mesh's life stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Life {
    Alive = 0,
    Aborted = 1,
    Finalized = 2,
    /// Its ranks go on with another mesh.
    Shrunk = 3,
}

/// A root mesh's [`Life`], shared with everything that must stop when it ends.
pub(super) struct LifeFlag(AtomicU8);

impl LifeFlag {
    fn new() -> Arc<LifeFlag> {
        Arc::new(LifeFlag(AtomicU8::new(Life::Alive as u8)))
    }

    #[inline]
    pub(super) fn is_alive(&self) -> bool {
        self.0.load(Ordering::Acquire) == Life::Alive as u8
    }
}

/// One dimension's communicator, by the dimension's name and layout.
pub(super) struct DimComm {
    pub(super) name: String,
    pub(super) dim: Dim,
    pub(super) communicator: Held,
    /// Under what name calls along it are issued: the same on all its ranks.
    pub(super) call: CallName,
}

/// What a root mesh owns. Its views share it.
pub struct RootComms {
    pub(super) domain: Option<Arc<Domain>>,
    pub(super) library: Option<Arc<Library>>,
    pub(super) root: Mesh,
    /// The root's ranks as a set that makes collective calls; `None` where there is nobody to agree with.
    pub(super) scope: Option<Arc<Scope>>,
    pub(super) cancel: Cancel,
    pub(super) dims: RwLock<Vec<DimComm>>,
    /// The communicator over all ranks of the root, from which dimensions are split; made when first needed.
    pub(super) parent: RwLock<Option<Held>>,
    pub(super) lazy: bool,
    pub(super) timeout: Duration,
    /// What agreement scopes of its own are called, the same on all its ranks.
    pub(super) id: String,
    life: Arc<LifeFlag>,
    /// Of a range: whose ranks it has some of. That outlives it: views hold both.
    upper: Weak<RootComms>,
    /// The ranges of this one's ranks, which end with it.
    pub(super) parts: Mutex<Vec<Arc<RootComms>>>,
    /// How often this rank has asked for what is left of it.
    pub(super) shrinkings: AtomicU64,
}

impl RootComms {
    /// A mesh with its communicators. **Collective over the world** of `domain` (also for ranks outside the mesh).
    pub fn create(domain: &Arc<Domain>, mesh: Mesh, options: &MeshOptions) -> Result<Arc<RootComms>> {
        RootComms::create_by(domain, mesh, options, None)
    }

    /// The same, where part of the call's time may be over: it ends at `deadline`, if there is one.
    pub fn create_by(
        domain: &Arc<Domain>,
        mesh: Mesh,
        options: &MeshOptions,
        deadline: Option<Deadline>,
    ) -> Result<Arc<RootComms>> {
        domain.alive()?;
        let world = domain.world();
        let timeout = options.timeout.unwrap_or(world.timeout());
        let mut root = RootComms {
            domain: Some(Arc::clone(domain)),
            library: None,
            root: mesh,
            scope: None,
            cancel: domain.cancel(),
            dims: RwLock::default(),
            parent: RwLock::default(),
            lazy: options.lazy,
            timeout,
            id: String::new(),
            life: LifeFlag::new(),
            upper: Weak::new(),
            parts: Mutex::default(),
            shrinkings: AtomicU64::new(0),
        };
        if world.is_offline() {
            return Ok(Arc::new(root));
        }
        root.library = Some(Arc::clone(domain.library()?));

        let wait = deadline.map_or_else(|| root.wait(None), |deadline| root.wait(None).with_deadline(deadline));
        let _turn = domain.take_turn(&wait)?;
        let call = format!("dm_init({}{})", call_text(&root.root), options.agreed());
        let wanted: Vec<(usize, DimOptions)> = (0..root.root.ndim()).map(|index| (index, options.dim(index))).collect();
        // Ranks outside the mesh do not know what its ranks share.
        let apart = (root.root.root_size() < world.size()).then(|| call.clone());
        let plan = Plan { view: root.root.clone(), dims: wanted, part: None, apart, shrinking: None };
        let scope = world.scope()?;
        let (round, shared) = wait.outcome(match plan.apart {
            None => root.candidates(&plan).agree(scope, &call, &wait),
            Some(_) => scope.agree(&call, &wait).map(|round| (round, Shared::nothing(&plan))),
        })?;
        root.id = format!("mesh{}", round.number());
        if root.root.is_member() {
            root.scope = Some(root.own_scope(domain)?);
        }
        root.carry_out(&plan, shared, round, &wait)?;
        let root = Arc::new(root);
        domain.register(&root);
        root.alive()?;
        Ok(root)
    }

    /// A root mesh over communicators that exist. Local.
    ///
    /// # Safety
    /// `comms` are live communicators of `library`, one for each dimension. They stay live until the mesh is finalized or aborted; with `owned` nobody else
    /// destroys or aborts them, without it nobody does so while a call of this mesh is under way.
    pub unsafe fn adopt(
        domain: Option<Arc<Domain>>,
        library: Arc<Library>,
        mesh: Mesh,
        comms: &[RawComm],
        owned: bool,
        timeout: Duration,
    ) -> Result<Arc<RootComms>> {
        if let Some(domain) = &domain {
            domain.alive()?;
        }
        let mut dims: Vec<DimComm> = Vec::new();
        for (index, raw) in comms.iter().enumerate() {
            let (size, rank) = library.size_and_rank(*raw)?;
            let (name, wanted) = (mesh.dim_name(index), mesh.dim_size(index));
            let coordinate = mesh.local_rank(index)?;
            if (size, rank) != (wanted, coordinate) {
                return Err(Error::invalid(format!(
                    "the communicator of dimension {name} has {size} ranks and is rank {rank} here, but the dimension has {wanted} ranks and coordinate {coordinate} here"
                )));
            }
            // One that is given for several dimensions (of size 1) ends once.
            let known = dims.iter().find(|known| known.communicator.raw() == *raw);
            let communicator = match known {
                Some(known) => Arc::clone(&known.communicator),
                None => Arc::new(Communicator::adopted(Arc::clone(&library), mesh.slice(&[name])?, *raw, owned)?),
            };
            communicator.add_user();
            let (dim, call) = (mesh.dim_layout(index).clone(), CallName::default());
            dims.push(DimComm { name: name.to_owned(), dim, communicator: Held::new(communicator), call });
        }
        // Adopting is local: the id is the same on all ranks of the mesh where they adopt those of these ranks in the same order.
        let id = domain.as_ref().map(|domain| domain.next_adopted(&mesh.root_ranks())).unwrap_or_default();
        for (index, known) in dims.iter_mut().enumerate() {
            known.call = CallName::new(&id, &known.name, known.dim.pairs());
            if !id.is_empty() {
                known.communicator.set_origin(format!("{id}/{index}"));
            }
        }
        let cancel = domain.as_ref().map_or_else(Cancel::new, |domain| domain.cancel());
        let mut root = RootComms {
            domain,
            library: Some(library),
            root: mesh,
            scope: None,
            cancel,
            dims: RwLock::new(dims),
            parent: RwLock::default(),
            lazy: false,
            timeout,
            id,
            life: LifeFlag::new(),
            upper: Weak::new(),
            parts: Mutex::default(),
            shrinkings: AtomicU64::new(0),
        };
        if let Some(domain) = root.domain.clone().filter(|domain| !domain.world().is_offline()) {
            root.scope = Some(root.own_scope(&domain)?);
        }
        let root = Arc::new(root);
        if let Some(domain) = &root.domain {
            domain.register(&root);
            root.alive()?;
        }
        Ok(root)
    }

    /// The range of the same ranks that was made before, if its communicator along dimension `index` is still of use as far as this rank knows: the
    /// ranks agree on whether they share it. So a range made over and over takes no more than one.
    pub(super) fn part_like(&self, range: &Mesh, index: usize) -> Option<Arc<RootComms>> {
        let same = |part: &&Arc<RootComms>| {
            part.root.rank_map_key() == range.rank_map_key()
                && part.own_dim(range.dim_name(index), range.dim_layout(index)).is_some_and(|own| own.is_sound())
        };
        self.parts().iter().find(same).cloned()
    }

    /// A range of this root's ranks, to be given communicators of its own in call number `call`. It ends with this root.
    pub(super) fn add_part(self: &Arc<Self>, range: &Mesh, call: u64) -> Result<Arc<RootComms>> {
        let mut part = RootComms {
            domain: self.domain.clone(),
            library: self.library.clone(),
            root: range.space(),
            scope: None,
            cancel: self.cancel.clone(),
            dims: RwLock::default(),
            parent: RwLock::default(),
            lazy: self.lazy,
            timeout: self.timeout,
            id: format!("{}/range{call}", self.id),
            life: Arc::clone(&self.life),
            upper: Arc::downgrade(self),
            parts: Mutex::default(),
            shrinkings: AtomicU64::new(0),
        };
        if let Some(domain) = self.domain.as_ref().filter(|_| part.root.is_member()) {
            part.scope = Some(part.own_scope(domain)?);
        }
        let part = Arc::new(part);
        self.parts().push(Arc::clone(&part));
        Ok(part)
    }

    /// What goes on after `other` with some of its ranks, without communicators yet.
    pub(super) fn shrunk_from(
        other: &RootComms,
        domain: &Arc<Domain>,
        mesh: Mesh,
        id: String,
    ) -> Result<Arc<RootComms>> {
        let mut root = RootComms {
            domain: Some(Arc::clone(domain)),
            library: other.library.clone(),
            root: mesh,
            scope: None,
            cancel: domain.cancel(),
            dims: RwLock::default(),
            parent: RwLock::default(),
            lazy: other.lazy,
            timeout: other.timeout,
            id,
            life: LifeFlag::new(),
            upper: Weak::new(),
            parts: Mutex::default(),
            shrinkings: AtomicU64::new(0),
        };
        if root.root.is_member() {
            root.scope = Some(root.own_scope(domain)?);
        }
        Ok(Arc::new(root))
    }

    /// Forgets a range whose making failed.
    pub(super) fn drop_part(&self, part: &Arc<RootComms>) {
        self.parts().retain(|known| !Arc::ptr_eq(known, part));
    }

    /// Forgets the ranges that no view has and whose communicators have all failed.
    pub(super) fn drop_failed_parts(&self) {
        let failed = |part: &Arc<RootComms>| {
            Arc::strong_count(part) == 1 && part.communicators().iter().all(|communicator| communicator.has_failed())
        };
        let (gone, kept) = std::mem::take(&mut *self.parts()).into_iter().partition::<Vec<_>, _>(failed);
        self.parts().splice(0..0, kept);
        // What they hold is dropped without the lock.
        drop(gone);
    }

    pub(super) fn parts(&self) -> MutexGuard<'_, Vec<Arc<RootComms>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The root mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.root
    }

    /// Whether there are no communicators by design.
    pub fn is_offline(&self) -> bool {
        self.library.is_none()
    }

    pub(super) fn life(&self) -> Life {
        match self.life.0.load(Ordering::SeqCst) {
            0 => Life::Alive,
            1 => Life::Aborted,
            2 => Life::Finalized,
            _ => Life::Shrunk,
        }
    }

    pub(super) fn life_flag(&self) -> Arc<LifeFlag> {
        Arc::clone(&self.life)
    }

    /// Whether this is its end. The first one stands: what was finalized is not aborted any more, nor the other way round.
    pub(super) fn end(&self, life: Life) -> bool {
        self.life.0.compare_exchange(Life::Alive as u8, life as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(super) fn alive(&self) -> Result<()> {
        match self.life() {
            Life::Alive => self.cancel.check(),
            Life::Aborted => Err(Error::aborted(format!("{} was aborted by dm_abort", self.root.describe()))),
            Life::Finalized => Err(Error::aborted(format!("{} was finalized by dm_finalize", self.root.describe()))),
            Life::Shrunk => Err(Error::aborted(format!(
                "{} was ended by dm_shrink: go on with the mesh that it gave",
                self.root.describe()
            ))),
        }
    }

    pub(super) fn wait(&self, timeout: Option<Duration>) -> Wait {
        Wait { cancel: self.cancel.clone(), ..Wait::after(timeout.unwrap_or(self.timeout)) }
    }

    /// A wait for this root's other ranks, which is pointless once a communicator has failed because a rank has died or aborted: that one does not
    /// come any more. After other failures they do.
    fn wait_for_peers(&self) -> Wait {
        let communicators = self.communicators();
        let watch: Watch = Arc::new(move || {
            let made = communicators.iter().filter(|communicator| !communicator.raw().is_null());
            let failures = made.filter_map(|communicator| communicator.poll().err());
            let mut ends = failures.filter(|error| !matches!(error.status(), Status::Mismatch | Status::Timeout));
            ends.next().map_or(Ok(()), Err)
        });
        Wait { watch: Some(watch), ..self.wait(None) }
    }

    /// The communicator of a dimension; `None` where none was ever planned.
    pub(super) fn communicator(&self, name: &str, dim: &Dim) -> Option<Arc<Communicator>> {
        self.issued(name, dim).map(|issued| issued.0)
    }

    /// The same, with the name under which calls along the dimension are issued.
    pub(super) fn issued(&self, name: &str, dim: &Dim) -> Option<(Arc<Communicator>, CallName)> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &&DimComm| known.dim.pairs() == dim.pairs();
        // The last one stands: it is made anew when an earlier one has failed.
        let of_name = |known: &&DimComm| same(known) && known.name == name;
        let found = dims.iter().rev().find(of_name).or_else(|| dims.iter().rev().find(same));
        found.map(|known| (Arc::clone(&known.communicator), known.call)).or_else(|| {
            let (_, dim) = self.root.outer_dim(dim)?;
            self.upper.upgrade()?.issued(name, &dim)
        })
    }

    /// The communicator of a dimension of that layout under that very name, the last one if there were several.
    pub(super) fn own_dim(&self, name: &str, dim: &Dim) -> Option<Arc<Communicator>> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let own = dims.iter().rev().find(|known| known.name == name && known.dim.pairs() == dim.pairs());
        own.map(|known| Arc::clone(&known.communicator))
    }

    /// Begins one collective call of this root: takes the turn and agrees on `call` with the root's other ranks by `agree`, waiting for them by
    /// `wait`.
    pub(super) fn begin<T>(
        &self,
        call: &str,
        wait: impl FnOnce(&RootComms) -> Wait,
        agree: impl FnOnce(&Scope, &Wait) -> Result<T>,
    ) -> Result<(Turn<'_>, T, Wait)> {
        self.alive()?;
        if !self.root.is_member() {
            return Err(Error::not_member(format!(
                "{call}: rank {} is not in {}, so it takes no part in its collective calls",
                self.root.rank(),
                self.root.describe()
            )));
        }
        let (Some(domain), Some(scope)) = (&self.domain, &self.scope) else {
            return Err(Error::unsupported(format!(
                "{call} is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                self.root.describe()
            )));
        };
        let wait = wait(self);
        let turn = domain.take_turn(&wait)?;
        // Another thread's call, which had the turn before, may have ended it.
        self.alive()?;
        let agreed = wait.outcome(agree(scope, &wait))?;
        Ok((turn, agreed, wait))
    }

    /// Begins the call that carries out a plan, with what its dimensions share.
    pub(super) fn begin_plan(&self, call: &str, plan: &Plan) -> Result<(Turn<'_>, Round, Shared, Wait)> {
        let agree = |scope: &Scope, wait: &Wait| self.candidates(plan).agree(scope, call, wait);
        let (turn, (round, shared), wait) = self.begin(call, RootComms::wait_for_peers, agree)?;
        Ok((turn, round, shared, wait))
    }

    /// Who takes part in this root's collective calls: the world's own scope where that is everybody, so that calls on different meshes in different
    /// orders are a mismatch and not a wait; else a set of its own.
    fn own_scope(&self, domain: &Domain) -> Result<Arc<Scope>> {
        let world = domain.world();
        if self.root.root_size() == world.size() {
            return world.scope().map(Arc::clone);
        }
        let position = self.root.root_position().unwrap_or(0);
        world.subscope(&self.id, self.root.root_ranks().into(), position).map(Arc::new)
    }
}

impl Drop for RootComms {
    /// A failed communicator ends with the last root mesh that has it. The others stay: raw pointers to them may be in use.
    fn drop(&mut self) {
        let dims = std::mem::take(self.dims.get_mut().unwrap_or_else(PoisonError::into_inner));
        let parent = self.parent.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        drop((dims, parent));
        if let Some(domain) = &self.domain {
            domain.bury();
        }
    }
}

/// What rank `dm_init` was asked, as all ranks must say it.
fn call_text(mesh: &Mesh) -> String {
    let shape: Vec<String> = mesh.shape().iter().map(usize::to_string).collect();
    let mut text = format!("shape=({}), names=({})", shape.join(", "), mesh.dim_names().join(", "));
    if let Some(ranks) = mesh.rank_map() {
        text.push_str(&format!(", ranks={}", ranks_text(ranks.as_slice().unwrap_or_default())));
    }
    text
}

/// Short lists in full; long ones by their first ranks, their number and a digest, so that any difference shows.
pub(super) fn ranks_text(ranks: &[i32]) -> String {
    let list = |ranks: &[i32]| ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() <= 32 {
        return format!("({})", list(ranks));
    }
    let bytes = ranks.iter().flat_map(|rank| rank.to_le_bytes());
    let digest = Fnv1a::default().bytes(bytes).value();
    format!("({}, ... {} ranks, digest {digest:016x})", list(&ranks[..8]), ranks.len())
}
