//! The log of the changes that a collective call has made on this rank, so that they can be undone.

use std::sync::Arc;
use std::time::Duration;

use super::communicator::Communicator;
use super::options::DimOptions;
use super::polling::millis;
use super::root::RootComms;
use super::world::World;
use crate::ccl::RawComm;
use crate::error::Result;
use crate::layout::Dim;
use crate::mesh::Mesh;

/// The changes of a call on this rank, in order. They are undone when the call fails on any rank.
#[derive(Default)]
pub(super) struct Log {
    changes: Vec<Change>,
}

enum Change {
    /// `root` has got `range`.
    Range { root: Arc<RootComms>, range: Arc<RootComms> },
    /// `root` splits from another communicator than before.
    Parent { root: Arc<RootComms> },
    /// A dimension of `root` has got `communicator`.
    Dim { root: Arc<RootComms>, communicator: Arc<Communicator> },
    /// The library has made `communicator`. `raw` is NULL where only other ranks have a part in
    /// it. Calls on it wait at most `timeout` for their peers. `is_published` says whether other
    /// threads can use it by now.
    Made { communicator: Arc<Communicator>, raw: RawComm, timeout: Duration, is_published: bool },
}

impl Log {
    /// Adds a range of some ranks of `root`, which gets its communicators in call number `call`.
    pub(super) fn add_range(&mut self, root: &Arc<RootComms>, range: &Mesh, call: u64) -> Result<Arc<RootComms>> {
        let range = root.add_range(range, call)?;
        self.changes.push(Change::Range { root: Arc::clone(root), range: Arc::clone(&range) });
        Ok(range)
    }

    /// Makes `parent` the communicator from which `root` splits others.
    pub(super) fn set_parent(&mut self, root: &Arc<RootComms>, parent: &Arc<Communicator>) {
        if root.set_parent(parent) {
            self.changes.push(Change::Parent { root: Arc::clone(root) });
        }
    }

    /// Gives a dimension of `root` its communicator, made or still to be made.
    pub(super) fn add_dim(
        &mut self,
        root: &Arc<RootComms>,
        name: &str,
        dim: &Dim,
        communicator: &Arc<Communicator>,
        options: &DimOptions,
    ) {
        root.add_dim(name, dim, communicator, options);
        self.changes.push(Change::Dim { root: Arc::clone(root), communicator: Arc::clone(communicator) });
    }

    /// Notes that the library has made `communicator`; `raw` is NULL where only other ranks have a
    /// part in it. When the call is kept, everybody can use the communicator, and calls on it wait
    /// for their peers for at most `timeout`.
    pub(super) fn made(&mut self, communicator: &Arc<Communicator>, raw: RawComm, timeout: Duration) {
        let communicator = Arc::clone(communicator);
        self.changes.push(Change::Made { communicator, raw, timeout, is_published: false });
    }

    /// Ends the log of a call. Keeps the changes when `outcome` is a success and nobody has ended
    /// the mesh. Otherwise undoes them.
    pub(super) fn keep_or_undo<T>(
        mut self,
        outcome: Result<T>,
        world: &World,
        alive: impl FnOnce() -> Result<()>,
    ) -> Result<T> {
        let outcome = outcome.and_then(|value| {
            if !self.changes.is_empty() {
                self.publish(world)?;
                // An abort that came after the last wait has not found what was made. So this rank
                // looks once more.
                alive()?;
            }
            Ok(value)
        });
        match &outcome {
            Ok(_) => self.drop_replaced(),
            Err(_) => self.undo(),
        }
        world.comms().end_abandoned();
        outcome
    }

    /// Lets everybody use the communicators that were made.
    fn publish(&mut self, world: &World) -> Result<()> {
        for change in &mut self.changes {
            let Change::Made { communicator, raw, timeout, is_published } = change else { continue };
            if !raw.is_null() {
                communicator.set_default_timeout(*raw, millis(*timeout))?;
            }
            *is_published = true;
            if raw.is_null() {
                communicator.set_absent();
                continue;
            }
            communicator.set_ready(*raw)?;
            world.comms().add_living(communicator);
            communicator.end_with_recovery(world.rendezvous());
        }
        Ok(())
    }

    fn drop_replaced(&self) {
        // A call may have made thousands of dimensions, but it concerns few roots.
        let mut roots: Vec<&Arc<RootComms>> = Vec::new();
        for change in &self.changes {
            let Change::Dim { root, .. } = change else { continue };
            if !roots.iter().any(|known| Arc::ptr_eq(known, root)) {
                roots.push(root);
            }
        }
        let unused: Vec<_> = roots.iter().flat_map(|root| root.drop_replaced()).collect();
        Communicator::end_all_soon(&unused);
    }

    /// Undoes the changes, the last one first. The communicators end at the same time, so that
    /// their waits do not add up.
    fn undo(&mut self) {
        let mut unused: Vec<Arc<Communicator>> = Vec::new();
        for change in self.changes.drain(..).rev() {
            match change {
                Change::Range { root, range } => root.remove_range(&range),
                Change::Parent { root } => unused.extend(root.remove_parent()),
                // When no other mesh uses the communicator, it ends. Otherwise it stays planned.
                Change::Dim { root, communicator } => unused.extend(root.remove_dim(&communicator)),
                Change::Made { communicator, is_published: true, .. } => {
                    communicator.unmake();
                    unused.push(communicator);
                }
                Change::Made { communicator, raw, .. } if !raw.is_null() => {
                    communicator.take_over(raw);
                    unused.push(communicator);
                }
                Change::Made { .. } => {}
            }
        }
        Communicator::end_all_soon(&unused);
    }
}
