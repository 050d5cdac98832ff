//! [`JoinOptions`]: how to join a world.

use std::sync::Arc;
use std::time::Duration;

use super::init_method::Method;
use super::launcher::{Place, detect, given};
use super::store::Store;
use crate::error::{Error, Result};
use crate::wait::{Cancel, Deadline};

/// The variable that says whether a process joins a running job.
const JOIN_VARIABLE: &str = "DM_JOIN";

/// The variable that asks for a comparison of each collective before it is issued.
const CHECK_VARIABLE: &str = "DM_CHECK_COLLECTIVES";

/// How long a wait lasts unless the caller says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Whether a process joins a job that runs already, in place of a rank that was lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Join {
    /// The variable `DM_JOIN` decides: `new`, `running`, or `auto`, which is the default. With
    /// `auto` the process joins a running job where the store's server knows that the process that
    /// held this rank is lost, and a new world otherwise.
    #[default]
    Auto,
    /// The process takes part in the join of a new world.
    New,
    /// The process joins the running job. Where no job has run yet, it takes part in the join of a
    /// new world. Where the job has ended, the join fails with `DM_STATUS_INVALID_STATE`.
    Running,
}

impl Join {
    /// Returns this choice, or the choice of the environment where this one leaves it open.
    pub(super) fn or_environment(self) -> Result<Join> {
        if self != Join::Auto {
            return Ok(self);
        }
        let value = std::env::var_os(JOIN_VARIABLE).unwrap_or_default();
        match value.to_string_lossy().trim() {
            "" | "auto" => Ok(Join::Auto),
            "new" => Ok(Join::New),
            "running" => Ok(Join::Running),
            other => Err(Error::invalid(format!("{JOIN_VARIABLE} is {other:?}: it must be auto, new or running"))),
        }
    }
}

/// Whether the ranks compare each collective before they issue it.
pub(super) fn checks_collectives() -> Result<bool> {
    let value = std::env::var_os(CHECK_VARIABLE).unwrap_or_default();
    match value.to_string_lossy().trim() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        other => Err(Error::invalid(format!("{CHECK_VARIABLE} is {other:?}: it must be 1 or 0 (the default)"))),
    }
}

/// How to join a world.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// Whether there is no rendezvous. Then the world is for layouts and planning only.
    pub offline: bool,
    /// The number of ranks. When it is `None`, size, rank and local rank come from the launcher's
    /// environment.
    pub world_size: Option<usize>,
    /// The rank of this process. The field is used only when `world_size` is given.
    pub rank: usize,
    /// The rank of this process in its host. The field is used only when `world_size` is given.
    /// `None` means that the library finds this rank from the hosts of the ranks.
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
    /// Whether this process joins a running job.
    pub join: Join,
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

    /// Sets whether this process joins a running job.
    #[must_use]
    pub fn join(mut self, join: Join) -> JoinOptions {
        self.join = join;
        self
    }

    /// Sets a flag that ends the joining early.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> JoinOptions {
        self.cancel = cancel;
        self
    }
}

/// Returns which rank this process is, and where the ranks meet.
pub(super) fn place(options: &JoinOptions, method: &Method) -> Result<Place> {
    let env = |name: &str| std::env::var(name).ok();
    let mut place = match options.world_size {
        None => detect(&env)?,
        // An address is needed only when the ranks meet at the environment's address.
        Some(size) if size > 1 && matches!(method, Method::Env) && options.store.is_none() && !options.offline => {
            given(&env, options.rank, size, options.local_rank)?
        }
        Some(size) => Place::new("dm_world_options", options.rank, size, options.local_rank),
    };
    if let Method::Tcp(host, port) = method {
        place.address = Some((host.clone(), *port));
        place.agent = false;
    }
    if !matches!(method, Method::Env) || options.store.is_some() {
        // The caller has chosen the port or the store, so no other job is there.
        place.job = 0;
    }
    if place.size > i32::MAX as usize || place.rank >= place.size {
        return Err(Error::invalid(format!("rank {} is not in a world of {} ranks", place.rank, place.size)));
    }
    Ok(place)
}
