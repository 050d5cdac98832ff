//! [`JoinOptions`]: how to join a world.

use std::sync::Arc;
use std::time::Duration;

use super::store::Store;
use crate::wait::{Cancel, Deadline};

/// How long a wait lasts where nobody says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// How to join a world.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// No rendezvous: for layouts and planning only.
    pub offline: bool,
    /// Number of ranks; `None`: size, rank and local rank come from the launcher's environment.
    pub world_size: Option<usize>,
    /// This process's rank, when the size is given.
    pub rank: usize,
    /// This process's device index in its host, when the size is given.
    pub local_rank: usize,
    /// How long each wait lasts; `None`: [`DEFAULT_TIMEOUT`].
    pub timeout: Option<Duration>,
    /// When the joining itself must be done; `None`: after `timeout`.
    pub deadline: Option<Deadline>,
    /// `env://`, `tcp://host:port` or `file:///path`; `None` is `env://`.
    pub init_method: Option<String>,
    /// The caller's store instead.
    pub store: Option<Arc<dyn Store>>,
    /// Ends the joining early.
    pub cancel: Cancel,
}

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
