//! The communicators of one world: its library, what its meshes share, and whose turn it is to make a collective call.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;

use super::communicator::Communicator;
use crate::ccl::{self, Library};
use crate::error::{Error, Result};
use crate::layout::Dim;
use crate::mesh::Mesh;
use crate::rendezvous::{JoinOptions, World};
use crate::wait::Wait;

/// How a process joins a world.
#[derive(Default)]
pub struct DomainOptions {
    /// Where the ranks meet.
    pub join: JoinOptions,
    /// A library with NCCL's C API, instead of the default for the device type.
    pub library: Option<String>,
}

/// Which ranks a partition's communicators join: the root's rank map and the dimension's sizes and strides over it. Equal keys
/// on one rank mean equal keys on all, because every rank computes them from the same agreed call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PartitionKey {
    root_size: usize,
    rank_map: Option<Vec<i32>>,
    pairs: Vec<(usize, usize)>,
}

impl PartitionKey {
    pub(super) fn of(mesh: &Mesh, dim: &Dim) -> PartitionKey {
        PartitionKey {
            root_size: mesh.root_size(),
            rank_map: mesh.rank_map().map(|ranks| ranks.to_vec()),
            pairs: dim.pairs().to_vec(),
        }
    }
}

/// A world with its communicators.
pub struct Domain {
    world: World,
    library: Option<Arc<Library>>,
    shared: Mutex<HashMap<PartitionKey, Arc<Communicator>>>,
    single: OnceCell<Arc<Communicator>>,
    turn: Mutex<bool>,
    turn_over: Condvar,
    adopted: AtomicU64,
}

/// The right to make one collective call of the world; given back when dropped.
pub(super) struct Turn<'a>(&'a Domain);

impl Domain {
    /// Joins the world of `device_type`. **Collective over the world** unless it is offline.
    ///
    /// The library is found and, for cuda, a device chosen before anybody is waited for.
    pub fn join(device_type: &str, options: &DomainOptions) -> Result<Domain> {
        let library =
            if options.join.offline { None } else { Some(ccl::for_device(device_type, options.library.as_deref())?) };
        let world = World::join(device_type, &options.join)?;
        let on_device = device_type != "cpu" && library.as_ref().is_some_and(|library| !library.is_host_engine());
        if on_device {
            ccl::select_device(world.local_rank())?;
        }
        Ok(Domain {
            world,
            library,
            shared: Mutex::default(),
            single: OnceCell::new(),
            turn: Mutex::new(false),
            turn_over: Condvar::new(),
            adopted: AtomicU64::new(0),
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

    /// Returns when every rank of the world has called it. **Collective over the world**.
    pub fn barrier(&self, timeout: Option<Duration>) -> Result<()> {
        let wait = Wait::after(timeout.unwrap_or(self.world.timeout()));
        let _turn = self.take_turn(&wait)?;
        self.world.barrier_by(&wait)
    }

    /// Waits for this thread's turn to make a collective call: calls of one world happen one after another.
    pub(super) fn take_turn(&self, wait: &Wait) -> Result<Turn<'_>> {
        let mut taken = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// The number of the next mesh over existing communicators.
    pub(super) fn next_adopted(&self) -> u64 {
        self.adopted.fetch_add(1, Ordering::SeqCst)
    }

    /// The communicator of this rank alone, which serves every dimension of size 1.
    pub(super) fn single(&self, unmade: impl FnOnce() -> Communicator) -> Arc<Communicator> {
        Arc::clone(self.single.get_or_init(|| {
            let single = Arc::new(unmade());
            // One user that never leaves: it lasts as long as the world.
            single.add_user();
            single
        }))
    }

    pub(super) fn shared(&self) -> MutexGuard<'_, HashMap<PartitionKey, Arc<Communicator>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a communicator that has ended, so that nobody shares it any more.
    pub(super) fn forget(&self, ended: &Arc<Communicator>) {
        self.shared().retain(|_, communicator| !Arc::ptr_eq(communicator, ended));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.turn.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.turn_over.notify_one();
    }
}
