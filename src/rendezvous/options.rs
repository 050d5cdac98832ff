//! [`JoinOptions`], made step by step.

use std::sync::Arc;
use std::time::Duration;

use super::store::Store;
use super::world::JoinOptions;
use crate::wait::Cancel;

impl JoinOptions {
    /// Rank `rank` of `size`, on the device of that number, whatever the launcher's environment says.
    pub fn ranked(rank: usize, size: usize) -> JoinOptions {
        JoinOptions { world_size: Some(size), rank, local_rank: rank, ..JoinOptions::default() }
    }

    /// The same with another device in this process's host.
    #[must_use]
    pub fn local_rank(mut self, local_rank: usize) -> JoinOptions {
        self.local_rank = local_rank;
        self
    }

    /// The same without a rendezvous: for layouts and planning only.
    #[must_use]
    pub fn offline(mut self) -> JoinOptions {
        self.offline = true;
        self
    }

    /// The same with that time for each wait.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> JoinOptions {
        self.timeout = Some(timeout);
        self
    }

    /// The same with `env://`, `tcp://host:port` or `file:///path` for where the ranks meet.
    #[must_use]
    pub fn init_method(mut self, method: impl Into<String>) -> JoinOptions {
        self.init_method = Some(method.into());
        self
    }

    /// The same with the caller's store for where the ranks meet.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> JoinOptions {
        self.store = Some(store);
        self
    }

    /// The same with a flag that ends the joining early.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> JoinOptions {
        self.cancel = cancel;
        self
    }
}
