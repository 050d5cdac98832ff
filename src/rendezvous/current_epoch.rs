//! The epoch in which this process is (docs/recovery.md): the scopes that it opens belong to it.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

use super::agreement::{Epoch, Scope};
use super::incarnation::{Incarnation, Tickets};
use super::turns::prefix_of_epoch;

/// The epoch of a process, which a recovery replaces.
pub(super) struct CurrentEpoch(RwLock<Arc<EpochScopes>>);

/// The facts that all scopes of one epoch share.
pub(super) struct EpochScopes {
    /// The number of the epoch.
    pub(super) number: u64,
    /// The keys of the epoch begin with this prefix.
    pub(super) prefix: String,
    /// Which process holds each rank.
    pub(super) tickets: Tickets,
    /// The ranks that make the collective calls of the world: all ranks in epoch 0, and later the
    /// ranks of the mesh, because the others wait for a seat. `None` where this process is one of
    /// these others.
    pub(super) world: Option<Arc<Scope>>,
    /// How many notes of the door were read for the decision that made the epoch. The newcomers of
    /// these notes are no reason for another recovery.
    pub(super) door: usize,
    /// The processes in the mesh. In epoch 0 it is empty, because nobody of the world has knocked.
    pub(super) in_mesh: BTreeSet<Incarnation>,
    /// The number of ranks of the world. The number grows when the rank of a newcomer is not below
    /// it.
    pub(super) size: usize,
    /// The number of seats of the mesh in its full shape. In epoch 0 the world may have several
    /// meshes, so this is the number of ranks then, and src/comm says the seats of its meshes.
    pub(super) seats: usize,
    /// Whether this process is a newcomer that was not let in yet. Such a newcomer makes no
    /// collective call.
    pub(super) is_at_door: bool,
}

impl CurrentEpoch {
    /// Begins with epoch 0 of the world whose keys begin with `prefix`. `world` is the scope of
    /// all its ranks.
    pub(super) fn first(prefix: &str, world: Scope) -> CurrentEpoch {
        let empty = EpochScopes::empty(prefix.to_owned(), world.num_ranks());
        CurrentEpoch::of(EpochScopes { world: Some(Arc::new(world)), ..empty })
    }

    /// Begins at the door of a running job, as a process that takes the world for one of `size`
    /// ranks. The keys of the world begin with `prefix`.
    pub(super) fn at_door(prefix: &str, size: usize) -> CurrentEpoch {
        CurrentEpoch::of(EpochScopes { is_at_door: true, ..EpochScopes::empty(prefix.to_owned(), size) })
    }

    fn of(scopes: EpochScopes) -> CurrentEpoch {
        CurrentEpoch(RwLock::new(Arc::new(scopes)))
    }

    /// Returns the epoch in which this process is now.
    pub(super) fn get(&self) -> Arc<EpochScopes> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Goes on to another epoch.
    pub(super) fn replace(&self, next: EpochScopes) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
    }
}

impl EpochScopes {
    /// Returns epoch `number` of the world whose keys begin with `prefix`, without a scope of the
    /// world yet.
    pub(super) fn of(prefix: &str, number: u64, epoch: &Epoch) -> EpochScopes {
        EpochScopes {
            number,
            tickets: epoch.members().into_iter().collect(),
            door: epoch.door,
            in_mesh: epoch.in_mesh(),
            seats: epoch.seats.len(),
            ..EpochScopes::empty(prefix_of_epoch(prefix, number), epoch.size)
        }
    }

    /// Returns epoch 0 of `size` ranks, with keys that begin with `prefix`.
    fn empty(prefix: String, size: usize) -> EpochScopes {
        let tickets = Tickets::default();
        EpochScopes {
            number: 0,
            prefix,
            tickets,
            world: None,
            door: 0,
            in_mesh: BTreeSet::new(),
            size,
            seats: size,
            is_at_door: false,
        }
    }
}
