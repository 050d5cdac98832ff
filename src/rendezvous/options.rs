//! [`JoinOptions`]: how to join a world.

use std::sync::Arc;
use std::time::Duration;

use super::store::Store;
use crate::wait::{Cancel, Deadline};

/// How long a wait lasts unless the caller says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// How to join a world.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// Whether there is no rendezvous. Then the world is for layouts and planning only.
    pub offline: bool,
    /// The number of ranks. When it is `None`, size, rank and local rank come from the launcher's
    /// environment.
    pub world_size: Option<usize>,
    /// The rank of this process. It is used only when `world_size` is given.
    pub rank: usize,
    /// The rank of this process in its host. It is used only when `world_size` is given. `None`:
    /// the library finds it from the hosts of the ranks.
    pub local_rank: Option<usize>,
    /// How long each wait lasts; `None` means [`DEFAULT_TIMEOUT`].
    pub timeout: Option<Duration>,
    /// The moment by which the joining itself must be done; `None` means `timeout` from now.
    pub deadline: Option<Deadline>,
    /// `env://`, `tcp://host:port` or `file:///path`; `None` means `env://`.
    pub init_method: Option<String>,
    /// The caller's own store, in place of the one that `init_method` names.
    pub store: Option<Arc<dyn Store>>,
    /// A flag that ends the joining early.
    pub cancel: Cancel,
}

impl JoinOptions {
    /// Makes the options of rank `rank` of `size`. The launcher's environment does not count.
    pub fn ranked(rank: usize, size: usize) -> JoinOptions {
        JoinOptions { world_size: Some(size), rank, ..JoinOptions::default() }
    }

    /// Sets the rank of this process in its host.
    #[must_use]
    pub fn local_rank(mut self, local_rank: usize) -> JoinOptions {
        self.local_rank = Some(local_rank);
        self
    }

    /// Makes a world without a rendezvous, for layouts and planning only.
    #[must_use]
    pub fn offline(mut self) -> JoinOptions {
        self.offline = true;
        self
    }

    /// Sets how long each wait lasts.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> JoinOptions {
        self.timeout = Some(timeout);
        self
    }

    /// Sets where the ranks meet: `env://`, `tcp://host:port` or `file:///path`.
    #[must_use]
    pub fn init_method(mut self, method: impl Into<String>) -> JoinOptions {
        self.init_method = Some(method.into());
        self
    }

    /// Sets the caller's own store as the place where the ranks meet.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> JoinOptions {
        self.store = Some(store);
        self
    }

    /// Sets a flag that ends the joining early.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> JoinOptions {
        self.cancel = cancel;
        self
    }
}
