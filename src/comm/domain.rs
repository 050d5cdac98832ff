//! The communicators of one world: its library, what its meshes share, and whose turn it is to make a collective call.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hostccl::fork;

use super::communicator::{Communicator, State};
use super::groups::refuse_inside;
use super::life::abort_all;
use super::root::RootComms;
use crate::ccl::{self, Device, Library};
use crate::digest::Fnv1a;
use crate::error::{Error, Result};
use crate::layout::Dim;
use crate::mesh::{Mesh, RankMap};
use crate::rendezvous::{Equipment, JoinOptions, World};
use crate::wait::{Cancel, Wait};

/// How a process joins a world.
#[derive(Default)]
#[non_exhaustive]
pub struct DomainOptions {
    /// Where the ranks meet.
    pub join: JoinOptions,
    /// A library with NCCL's C API, instead of the default for the device type. Who sets it has vouched for it.
    pub(crate) library: Option<String>,
}

impl DomainOptions {
    /// Where the ranks meet; the rest is the default.
    pub fn new(join: JoinOptions) -> DomainOptions {
        DomainOptions { join, library: None }
    }

    /// The same with a library that has NCCL's C API, by path or SONAME, instead of the default for the device type. `python` is the wheel of a Python environment.
    ///
    /// # Safety
    /// As for [`ccl::open`].
    #[must_use]
    pub unsafe fn library(mut self, name: impl Into<String>) -> DomainOptions {
        self.library = Some(name.into());
        self
    }
}

/// Which ranks a partition's communicators join: the rank map of the root (or of the range of it) and the dimension's sizes and strides over
/// it. Equal keys on one rank mean equal keys on all, because every rank computes them from the same agreed call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PartitionKey {
    root_size: usize,
    ranks: RankMap,
    pairs: Vec<(usize, usize)>,
    /// Only split from, never handed out (see making.rs).
    to_split: bool,
}

impl PartitionKey {
    pub(super) fn of(mesh: &Mesh, dim: &Dim) -> PartitionKey {
        PartitionKey {
            root_size: mesh.root_size(),
            ranks: mesh.rank_map_key().clone(),
            pairs: dim.pairs().to_vec(),
            to_split: false,
        }
    }

    /// The same ranks' communicator that others are split from, where `library` needs one apart from those that are handed out.
    pub(super) fn for_splits(self, library: &Library) -> PartitionKey {
        PartitionKey { to_split: library.has_streams(), ..self }
    }
}

type Kept = (Vec<String>, Box<dyn Any + Send + Sync>, Box<dyn Any + Send + Sync>);

/// A world with its communicators.
pub struct Domain {
    world: World,
    library: Option<Arc<Library>>,
    /// The device of communicators that are made on threads without one.
    device: Option<Device>,
    shared: Mutex<HashMap<PartitionKey, Arc<Communicator>>>,
    single: Mutex<Option<Arc<Communicator>>>,
    turn: Mutex<bool>,
    turn_over: Condvar,
    /// By ranks: how many meshes over existing communicators of theirs.
    adopted: Mutex<HashMap<Vec<i32>, u64>>,
    /// Raised by [`abort`](Domain::abort); the flags of the root meshes are its children.
    cancel: Cancel,
    /// Whether the other ranks were told.
    announced: AtomicBool,
    roots: Mutex<Vec<Weak<RootComms>>>,
    /// What was made and has not ended, also where no mesh holds it any more: raw pointers may be in use.
    living: Mutex<Vec<Arc<Communicator>>>,
    single_turn: Mutex<()>,
    /// By key: what is handed out, and what it borrows from.
    kept: Mutex<Vec<Kept>>,
}

/// The right to make one collective call of the world; given back when dropped.
pub(super) struct Turn<'a>(&'a Domain);

impl Domain {
    /// Joins the world of `device_type`. **Collective over the world** unless it is offline.
    ///
    /// The library is found and, for cuda, a device chosen before anybody is waited for; a rank that fails in that tells the others.
    pub fn join(device_type: &str, options: &DomainOptions) -> Result<Domain> {
        options.join.cancel.check()?;
        let (world, (library, device)) = World::join_with(device_type, &options.join, |local_rank, world_size| {
            if options.join.offline {
                return Ok(((None, None), None));
            }
            // SAFETY: whoever named it vouches for it.
            let library = unsafe { ccl::named_or_usual(device_type, options.library.as_deref()) }?;
            if library.is_host_engine() {
                return Ok(((Some(library), None), None));
            }
            let device = (!library.is_rccl()).then(|| ccl::select_device(local_rank, world_size)).transpose()?;
            let equipment = Equipment { library: library.release(), device: device.as_ref().and_then(alone_on) };
            Ok(((Some(library), device), Some(equipment)))
        })?;
        Ok(Domain {
            world,
            library,
            device,
            shared: Mutex::default(),
            single: Mutex::default(),
            turn: Mutex::new(false),
            turn_over: Condvar::new(),
            adopted: Mutex::default(),
            cancel: options.join.cancel.clone(),
            announced: AtomicBool::new(false),
            roots: Mutex::default(),
            living: Mutex::default(),
            single_turn: Mutex::default(),
            kept: Mutex::default(),
        })
    }

    /// The world itself.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The library that makes this world's communicators; an offline world has none.
    pub fn library(&self) -> Result<&Arc<Library>> {
        self.library.as_ref().ok_or_else(|| {
            Error::unsupported(
                "this world was joined with DM_WORLD_OFFLINE: it has layouts and ranks, but no communicators",
            )
        })
    }

    /// Makes this world's device the calling thread's, where that has none.
    pub(super) fn select_device(&self) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), Device::select_unless_chosen)
    }

    /// Returns when every rank of the world has called it. **Collective over the world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        self.alive()?;
        refuse_inside("dm_world_barrier", self.library.as_ref())?;
        let timeout = timeout.unwrap_or(self.world.timeout());
        let wait = Wait { cancel: self.cancel.clone(), ..Wait::after(timeout) };
        let _turn = self.take_turn(&wait)?;
        wait.outcome(self.world.barrier_by(&wait))
    }

    /// Where every rank is, by rank. **Collective over the world**.
    pub fn locations(&self, mine: Option<&str>) -> Result<Vec<String>> {
        self.alive()?;
        refuse_inside("dm_world_locations", self.library.as_ref())?;
        let wait = Wait { cancel: self.cancel.clone(), ..Wait::after(self.world.timeout()) };
        let _turn = self.take_turn(&wait)?;
        wait.outcome(self.world.locations(mine, &wait))
    }

    /// What is kept for as long as the world under that key, and is made by `make` the first time: the same thing every time, so that calls that are
    /// repeated keep no more.
    pub(crate) fn keep_once<T>(&self, key: &[String], make: impl FnOnce() -> (T, Box<dyn Any + Send + Sync>)) -> T
    where
        T: Clone + Any + Send + Sync,
    {
        let mut kept = lock(&self.kept);
        let known = kept.iter().find(|known| known.0 == key).and_then(|known| known.1.downcast_ref::<T>());
        if let Some(known) = known {
            return known.clone();
        }
        let (thing, owner) = make();
        kept.push((key.to_vec(), Box::new(thing.clone()), owner));
        thing
    }

    /// Ends this rank's part in the world: every call that is blocked in it, its root meshes, all communicators. Local, from any thread; takes no lock
    /// that a blocked call holds. The other ranks learn of it when they wait for this one.
    pub fn abort(&self) -> Result<()> {
        self.cancel.raise();
        let roots: Vec<_> = lock(&self.roots).iter().filter_map(Weak::upgrade).collect();
        let mut ended: Vec<_> = roots.iter().flat_map(|root| root.give_up()).collect();
        for made in std::mem::take(&mut *lock(&self.living)) {
            if !ended.iter().any(|known| Arc::ptr_eq(known, &made)) {
                ended.push(made);
            }
        }
        let outcome = abort_all(&ended);
        self.shared().clear();
        if !self.announced.swap(true, Ordering::SeqCst) {
            self.world.leave();
        }
        outcome
    }

    /// `DM_STATUS_ABORTED` after [`abort`](Domain::abort).
    pub(super) fn alive(&self) -> Result<()> {
        self.cancel.check()
    }

    /// A flag for a root mesh, raised with the world's.
    pub(super) fn cancel(&self) -> Cancel {
        self.cancel.child()
    }

    /// Notes a root mesh, so that aborting the world ends it too.
    pub(super) fn register(&self, root: &Arc<RootComms>) {
        let mut roots = lock(&self.roots);
        roots.retain(|known| known.strong_count() > 0);
        roots.push(Arc::downgrade(root));
    }

    /// Notes a communicator that was made.
    pub(super) fn keep(&self, made: &Arc<Communicator>) {
        let mut living = lock(&self.living);
        living.retain(|known| !Arc::ptr_eq(known, made));
        living.push(Arc::clone(made));
    }

    /// Waits for this thread's turn to make a collective call: calls of one world happen one after another.
    pub(super) fn take_turn(&self, wait: &Wait) -> Result<Turn<'_>> {
        let mut taken = lock(&self.turn);
        while *taken {
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(Error::timeout(format!(
                    "another thread of rank {} was inside a collective call of this world for {} ms",
                    self.world.rank(),
                    wait.deadline.timeout().as_millis()
                )));
            }
            taken = self.turn_over.wait_timeout(taken, wait.deadline.slice()).unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken = true;
        Ok(Turn(self))
    }

    /// What the next mesh over existing communicators of these ranks is called, on all of them; no mesh of other ranks is called so.
    pub(super) fn next_adopted(&self, ranks: &[i32]) -> String {
        let mut adopted = lock(&self.adopted);
        let count = adopted.entry(ranks.to_vec()).or_default();
        *count += 1;
        let digest = Fnv1a::default().bytes(ranks.iter().flat_map(|rank| rank.to_le_bytes())).value();
        format!("adopted{count}-{}-{digest:016x}", ranks.len())
    }

    /// The communicator of this rank alone, which serves every dimension of size 1.
    pub(super) fn single(&self, unmade: impl FnOnce() -> Communicator) -> Arc<Communicator> {
        let mut single = lock(&self.single);
        // No other rank has a part in it, so this rank alone decides that one which has failed is made anew.
        if let Some(known) = single.as_ref().filter(|known| known.is_sound()) {
            return Arc::clone(known);
        }
        let fresh = Arc::new(unmade());
        // One user that leaves last, which is the world.
        fresh.add_user();
        Arc::clone(single.insert(fresh))
    }

    /// Held while a communicator of this rank alone is made. It waits for nobody, so it needs no turn behind calls that do.
    pub(super) fn single_turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.single_turn)
    }

    /// Whether it is the one that serves every dimension of size 1.
    pub(super) fn is_single(&self, communicator: &Arc<Communicator>) -> bool {
        lock(&self.single).as_ref().is_some_and(|single| Arc::ptr_eq(single, communicator))
    }

    /// What dimension `dim` of a view of `mesh` can share: a communicator over the same ranks, of the same range or of what it was taken from.
    pub(super) fn find_shared(&self, mesh: &Mesh, dim: &Dim) -> Option<Arc<Communicator>> {
        let known = self.shared().get(&PartitionKey::of(mesh, dim)).cloned();
        known.filter(|known| known.is_sound()).or_else(|| {
            let (outer, dim) = mesh.outer_dim(dim)?;
            self.find_shared(&outer, &dim)
        })
    }

    /// The communicator over all ranks of `root` that others can be split from, if there is one that works.
    pub(super) fn find_parent(&self, root: &Mesh, library: &Library) -> Option<Arc<Communicator>> {
        let known = match library.has_streams() {
            true => self.last_parent(root, library),
            false => self.find_shared(root, &root.whole()),
        };
        known.filter(|known| known.state() == State::Ready && known.is_sound())
    }

    /// The one that was made last, which may have failed: what is shrunk may have.
    pub(super) fn last_parent(&self, root: &Mesh, library: &Library) -> Option<Arc<Communicator>> {
        self.shared().get(&PartitionKey::of(root, &root.whole()).for_splits(library)).cloned()
    }

    /// From now on nothing that was made before is shared by the dimensions of this root mesh, nor by what they are split from.
    pub(super) fn share_no_more(&self, root: &Mesh) {
        let mut shared = self.shared();
        for dim in (0..root.ndim()).map(|index| root.dim_layout(index).clone()).chain([root.whole()]) {
            for to_split in [false, true] {
                shared.remove(&PartitionKey { to_split, ..PartitionKey::of(root, &dim) });
            }
        }
    }

    pub(super) fn shared(&self) -> MutexGuard<'_, HashMap<PartitionKey, Arc<Communicator>>> {
        lock(&self.shared)
    }

    /// Ends the failed communicators that no root mesh has any more. Those that have not failed stay, because their raw pointers may be in use.
    pub(super) fn bury(&self) {
        let known = lock(&self.living).clone();
        let abandoned: Vec<_> = known.into_iter().filter(|communicator| communicator.is_abandoned()).collect();
        // An abort that fails leaves nothing to be done.
        let _ = abort_all(&abandoned);
        abandoned.iter().for_each(|communicator| self.forget(communicator));
    }

    /// Forgets a communicator that has ended, so that nobody shares it any more.
    pub(super) fn forget(&self, ended: &Arc<Communicator>) {
        self.shared().retain(|_, communicator| !Arc::ptr_eq(communicator, ended));
        lock(&self.living).retain(|communicator| !Arc::ptr_eq(communicator, ended));
    }
}

/// What no other rank may have as its device, and what to call it; `None` where they may.
fn alone_on(device: &Device) -> Option<(String, String)> {
    let name = format!("device {} of {} on this host", device.number, device.count);
    device.uuid.clone().filter(|_| !may_share_devices()).map(|uuid| (uuid, name))
}

/// Whether the environment lets NCCL put several ranks on one device.
fn may_share_devices() -> bool {
    let is_set = |name: &str| std::env::var(name).is_ok_and(|value| !value.is_empty() && value != "0");
    is_set("NCCL_MULTI_RANK_GPU_ENABLE") || is_set("NCCL_HOSTID")
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(&self.0.turn) = false;
        self.0.turn_over.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Domain {
    /// Ends the communicator of this rank alone when all meshes that had it were finalized. Where one was only freed it stays, like all others,
    /// because its raw pointer may be in use.
    fn drop(&mut self) {
        let single = self.single.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // A forked child leaves it to its parent. With streams, destroying may wait.
        let ours = single.filter(|single| !fork::is_child() && !single.library().has_streams());
        if let Some(single) = ours.filter(|single| single.drop_user()) {
            single.retire().map(|raw| single.library().destroy(raw));
        }
    }
}
