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
        self.ranges().iter().find(same).cloned()
    }

    /// Adds a range of this root's ranks, which gets communicators of its own in call number
    /// `call`. It ends with this root.
    pub(in crate::comm) fn add_range(self: &Arc<Self>, range: &Mesh, call: u64) -> Result<Arc<RootComms>> {
        let range = RootComms::new(RootSpec {
            world: self.world.clone(),
            library: self.library.clone(),
            mesh: range.space(),
            id: format!("{}/range{call}", self.id),
            is_lazy: self.is_lazy,
            timeout: self.timeout,
            outer: Some(self),
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
        let has_failed = |range: &Arc<RootComms>| {
            Arc::strong_count(range) == 1 && range.communicators().iter().all(|communicator| communicator.has_failed())
        };
        let gone = {
            let mut ranges = self.ranges();
            let (gone, kept) = std::mem::take(&mut *ranges).into_iter().partition::<Vec<_>, _>(has_failed);
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
