//! The ranges of a root mesh: root meshes over some of its ranks, which end with it.

use std::sync::{Arc, MutexGuard, PoisonError};

use super::{RootComms, RootSpec};
use crate::error::Result;
use crate::mesh::Mesh;

/// The root's ranges.
impl RootComms {
    /// An earlier range of the same ranks as `range`, if its communicator along dimension `index`
    /// still works as far as this rank knows. The ranks then agree on whether they share that
    /// range. So a range that is made again and again takes no further communicators.
    pub(in crate::comm) fn known_range(&self, range: &Mesh, index: usize) -> Option<Arc<RootComms>> {
        let same = |known: &&Arc<RootComms>| {
            known.mesh.rank_map_key() == range.rank_map_key()
                && known.own_dim(range.dim_name(index), range.dim_layout(index)).is_some_and(|own| own.is_sound())
        };
        // The library may take long to answer, and a failure that it tells is logged. So it is
        // asked without the lock.
        let all = self.ranges().clone();
        all.iter().find(same).cloned()
    }

    /// Adds a range of this root's ranks, which gets communicators of its own in call number
    /// `call`. The range ends with this root.
    pub(in crate::comm) fn add_range(self: &Arc<Self>, range: &Mesh, call: u64) -> Result<Arc<RootComms>> {
        let range = RootComms::new(RootSpec {
            world: self.world.clone(),
            library: self.library.clone(),
            mesh: range.space(),
            id: format!("{}/range{call}", self.id),
            is_lazy: self.is_lazy,
            timeout: self.timeout,
            outer: Some(self),
            options: Vec::new(),
        })?;
        self.ranges().push(Arc::clone(&range));
        Ok(range)
    }

    /// Undoes [`add_range`](RootComms::add_range).
    pub(in crate::comm) fn remove_range(&self, range: &Arc<RootComms>) {
        self.ranges().retain(|known| !Arc::ptr_eq(known, range));
    }

    /// Takes all ranges of this root.
    pub(in crate::comm) fn take_ranges(&self) -> Vec<Arc<RootComms>> {
        std::mem::take(&mut *self.ranges())
    }

    /// Forgets the ranges that no view has and whose communicators have all failed.
    pub(in crate::comm) fn drop_failed_ranges(&self) {
        // The library is asked without the lock on the list, as in `known_range`.
        let all = self.ranges().clone();
        // The list and its copy hold the range, and no view does.
        let is_unused = |range: &Arc<RootComms>| Arc::strong_count(range) == 2;
        let has_failed = |range: &&Arc<RootComms>| {
            is_unused(range) && range.communicators().iter().all(|communicator| communicator.has_failed())
        };
        let failed: Vec<_> = all.iter().filter(has_failed).collect();
        let gone = {
            let mut ranges = self.ranges();
            let is_gone = |range: &Arc<RootComms>| is_unused(range) && failed.iter().any(|one| Arc::ptr_eq(one, range));
            let (gone, kept) = std::mem::take(&mut *ranges).into_iter().partition::<Vec<_>, _>(is_gone);
            *ranges = kept;
            gone
        };
        // Dropping a range takes other locks, so it happens after the lock on the list is given
        // back.
        drop(gone);
    }

    pub(in crate::comm) fn ranges(&self) -> MutexGuard<'_, Vec<Arc<RootComms>>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
