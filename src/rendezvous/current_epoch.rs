//! The epoch in which this process is (docs/recovery.md): the scopes that it opens belong to it.

use std::sync::{Arc, PoisonError, RwLock};

use super::agreement::{Epoch, Scope};
use super::incarnation::Tickets;
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
}

impl CurrentEpoch {
    /// Begins with epoch 0 of the world whose keys begin with `prefix`. `world` are all its ranks.
    pub(super) fn first(prefix: &str, world: Scope) -> CurrentEpoch {
        let (tickets, world) = (Tickets::default(), Some(Arc::new(world)));
        CurrentEpoch(RwLock::new(Arc::new(EpochScopes { number: 0, prefix: prefix.to_owned(), tickets, world })))
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
    /// The epoch of that number in the world whose keys begin with `prefix`, without a scope of the
    /// world yet.
    pub(super) fn of(prefix: &str, number: u64, epoch: &Epoch) -> EpochScopes {
        let tickets = epoch.members().into_iter().collect();
        EpochScopes { number, prefix: prefix_of_epoch(prefix, number), tickets, world: None }
    }
}
