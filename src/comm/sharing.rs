//! The communicators of one world on this rank: which of them a further mesh can share, and which
//! of them have not ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hostccl::fork;

use super::communicator::{Communicator, State};
use super::ending::abort_all;
use crate::ccl::Library;
use crate::layout::Dim;
use crate::mesh::{Mesh, RankMap};

/// Identifies the ranks that the communicators along a dimension join: by the rank map of the root
/// (or of a range of it), and by the dimension's sizes and strides over that root. Keys that are
/// equal on one rank are equal on all ranks, because every rank computes them from the same agreed
/// call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PartitionKey {
    /// The number of ranks of the root.
    root_size: usize,
    /// The world rank at each position of the root.
    ranks: RankMap,
    /// The sizes and strides of the dimension.
    pairs: Vec<(usize, usize)>,
    /// Whether the communicator only serves to split others from it, and is never handed out
    /// (maker.rs).
    is_parent: bool,
}

impl PartitionKey {
    pub(super) fn of(mesh: &Mesh, dim: &Dim) -> PartitionKey {
        PartitionKey {
            root_size: mesh.root_size(),
            ranks: mesh.rank_map_key().clone(),
            pairs: dim.pairs().to_vec(),
            is_parent: false,
        }
    }

    /// The key of the communicator over all ranks of `root` from which others are split. Where the
    /// library has no streams, a communicator that is handed out serves for that as well.
    fn of_parent(root: &Mesh, library: &Library) -> PartitionKey {
        PartitionKey { is_parent: library.has_streams(), ..PartitionKey::of(root, &root.whole()) }
    }
}

/// The communicators of one world on this rank.
#[derive(Default)]
pub(super) struct CommTable {
    /// The communicators that a further dimension over the same ranks can share.
    shared: Mutex<HashMap<PartitionKey, Arc<Communicator>>>,
    /// The communicator that holds this rank alone. This communicator serves every dimension of
    /// size 1.
    single: Mutex<Option<Arc<Communicator>>>,
    /// Every communicator that was made and has not ended. A communicator stays here when no mesh
    /// holds it any more, because its raw pointer may be in use.
    living: Mutex<Vec<Arc<Communicator>>>,
    /// The communicators that may have a scope. They can outlive the world, because the memory of a
    /// freed handle is reclaimed later, and a scope keeps the store of the world.
    with_scopes: Mutex<Vec<Weak<Communicator>>>,
}

impl CommTable {
    /// A communicator that dimension `dim` of a view of `mesh` can share. Such a communicator
    /// joins the ranks of the dimension, and was made for this mesh, or for a mesh of which this
    /// one is a range.
    pub(super) fn find(&self, mesh: &Mesh, dim: &Dim) -> Option<Arc<Communicator>> {
        let known = self.shared().get(&PartitionKey::of(mesh, dim)).cloned();
        known.filter(|known| known.is_sound()).or_else(|| {
            let (outer, dim) = mesh.outer_dim(dim)?;
            self.find(&outer, &dim)
        })
    }

    /// The communicator over all ranks of `root` from which others can be split, if there is one
    /// that works.
    pub(super) fn find_parent(&self, root: &Mesh, library: &Library) -> Option<Arc<Communicator>> {
        let known = match library.has_streams() {
            true => self.last_parent(root, library),
            false => self.find(root, &root.whole()),
        };
        known.filter(|known| known.state() == State::Ready && known.is_sound())
    }

    /// The communicator over all ranks of `root` that was made last for splitting from. It may have
    /// failed, which shrinking allows.
    pub(super) fn last_parent(&self, root: &Mesh, library: &Library) -> Option<Arc<Communicator>> {
        self.shared().get(&PartitionKey::of_parent(root, library)).cloned()
    }

    /// Lets dimensions over the same ranks as dimension `dim` of `mesh` share this communicator.
    pub(super) fn share(&self, mesh: &Mesh, dim: &Dim, communicator: &Arc<Communicator>) {
        self.shared().insert(PartitionKey::of(mesh, dim), Arc::clone(communicator));
    }

    /// Lets root meshes over the same ranks as `root` split from this communicator.
    pub(super) fn share_parent(&self, root: &Mesh, library: &Library, communicator: &Arc<Communicator>) {
        self.shared().insert(PartitionKey::of_parent(root, library), Arc::clone(communicator));
    }

    /// Forgets the communicators that the dimensions of this root mesh could share, and those from
    /// which they could be split.
    pub(super) fn share_no_more(&self, root: &Mesh) {
        let mut shared = self.shared();
        for dim in (0..root.ndim()).map(|index| root.dim_layout(index).clone()).chain([root.whole()]) {
            for is_parent in [false, true] {
                shared.remove(&PartitionKey { is_parent, ..PartitionKey::of(root, &dim) });
            }
        }
    }

    /// Forgets what further dimensions could share.
    pub(super) fn share_nothing(&self) {
        self.shared().clear();
    }

    /// Notes that the communicator has a scope, which it forgets when the world ends.
    pub(super) fn note_scope(&self, communicator: &Arc<Communicator>) {
        let mut with_scopes = lock(&self.with_scopes);
        let is_other = |known: &Weak<Communicator>| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(communicator));
        with_scopes.retain(|known| is_other(known) && known.upgrade().is_some_and(|known| known.has_scope()));
        with_scopes.push(Arc::downgrade(communicator));
    }

    /// The communicator that holds this rank alone. When there is none, or it has failed, `unmade`
    /// gives a new one. No other rank has a part in it, so this rank decides that by itself.
    pub(super) fn single(&self, unmade: impl FnOnce() -> Communicator) -> Arc<Communicator> {
        // The communicator is asked without the lock, because a failure that is found is logged.
        let known = lock(&self.single).clone();
        if let Some(known) = known.as_ref().filter(|known| known.is_sound()) {
            return Arc::clone(known);
        }
        let mut single = lock(&self.single);
        let failed = |other: &Arc<Communicator>| known.as_ref().is_some_and(|known| Arc::ptr_eq(known, other));
        if let Some(other) = single.as_ref().filter(|other| !failed(other)) {
            // Another thread was first.
            return Arc::clone(other);
        }
        let fresh = Arc::new(unmade());
        // The world counts as a user too, and it is the last user to leave.
        fresh.add_user();
        Arc::clone(single.insert(fresh))
    }

    /// Whether `communicator` holds this rank alone and serves every dimension of size 1.
    pub(super) fn is_single(&self, communicator: &Arc<Communicator>) -> bool {
        lock(&self.single).as_ref().is_some_and(|single| Arc::ptr_eq(single, communicator))
    }

    /// Notes a communicator that was made.
    pub(super) fn add_living(&self, made: &Arc<Communicator>) {
        let mut living = lock(&self.living);
        living.retain(|known| !Arc::ptr_eq(known, made));
        living.push(Arc::clone(made));
    }

    /// Takes all communicators that have not ended; the caller ends them.
    pub(super) fn take_living(&self) -> Vec<Arc<Communicator>> {
        std::mem::take(&mut *lock(&self.living))
    }

    /// Forgets a communicator that has ended, so that nobody shares it any more.
    pub(super) fn forget(&self, ended: &Arc<Communicator>) {
        self.shared().retain(|_, communicator| !Arc::ptr_eq(communicator, ended));
        lock(&self.living).retain(|communicator| !Arc::ptr_eq(communicator, ended));
    }

    /// Whether there is a communicator that no root mesh holds any more. Asks no library.
    pub(super) fn has_unheld(&self) -> bool {
        lock(&self.living).iter().any(|communicator| communicator.is_unheld())
    }

    /// Takes the failed communicators that no root mesh holds any more; the caller ends them. Those
    /// that have not failed stay, because their raw pointers may be in use.
    pub(super) fn take_abandoned(&self) -> Vec<Arc<Communicator>> {
        let known = lock(&self.living).clone();
        let abandoned: Vec<_> = known.into_iter().filter(|communicator| communicator.is_abandoned()).collect();
        abandoned.iter().for_each(|communicator| self.forget(communicator));
        abandoned
    }

    /// Ends the failed communicators that no root mesh holds any more.
    pub(super) fn end_abandoned(&self) {
        // An abort that fails leaves nothing to be done.
        let _ = abort_all(&self.take_abandoned());
    }

    /// Whether others are split from this communicator, and it is never handed out.
    pub(super) fn is_parent(&self, communicator: &Arc<Communicator>) -> bool {
        self.shared().iter().any(|(key, known)| key.is_parent && Arc::ptr_eq(known, communicator))
    }

    fn shared(&self) -> MutexGuard<'_, HashMap<PartitionKey, Arc<Communicator>>> {
        lock(&self.shared)
    }
}

impl Drop for CommTable {
    /// Ends the communicator that holds this rank alone when all meshes that used it were
    /// finalized. Where one of them was only freed, the communicator stays, because its raw pointer
    /// may be in use. Forgets the scopes, because they keep the store of the world.
    fn drop(&mut self) {
        let with_scopes = std::mem::take(self.with_scopes.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !fork::is_child() {
            with_scopes.iter().filter_map(Weak::upgrade).for_each(|known| known.forget_scope());
        }
        let single = self.single.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // In a forked child the communicator belongs to the parent process. On a library with
        // streams, destroying it may wait for the device.
        let ours = single.filter(|single| !fork::is_child() && !single.library().has_streams());
        if let Some(single) = ours.filter(|single| single.drop_user()) {
            let raw = single.take_to_finalize(Duration::ZERO).ok().flatten();
            raw.map(|raw| single.library().destroy(raw));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
