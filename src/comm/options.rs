//! The options of a mesh and of its dimensions' communicators.

use std::time::Duration;

use crate::ccl::{CommConfig, config_digest};
use crate::error::{Error, Result};

/// The options of one dimension's communicator.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct DimOptions {
    /// Whether the dimension gets a communicator of its own, also where another one joins the same
    /// ranks.
    pub own: bool,
    /// The caller's `ncclConfig_t`. A communicator that was made with a config is shared with no
    /// other dimension.
    pub config: Option<CommConfig>,
    /// The communicator's name in the library's logs; `None` stands for `mesh_<dimension>`.
    pub name: Option<String>,
}

impl DimOptions {
    /// Gives the dimension a communicator of its own, also where another one joins the same ranks.
    #[must_use]
    pub fn own(mut self) -> DimOptions {
        self.own = true;
        self
    }

    /// Sets the caller's `ncclConfig_t`.
    #[must_use]
    pub fn config(mut self, config: CommConfig) -> DimOptions {
        self.config = Some(config);
        self
    }

    /// Sets the communicator's name in the library's logs.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DimOptions {
        self.name = Some(name.into());
        self
    }

    /// Whether the dimension needs a communicator that nothing else uses.
    pub(super) fn is_exclusive(&self) -> bool {
        self.own || self.config.is_some()
    }

    /// The part of these options that must be equal on all ranks, as text for the agreement. This
    /// text is empty for the defaults.
    pub(super) fn agreed(&self) -> String {
        let mut parts = Vec::new();
        if self.own {
            parts.push("own_comm".to_owned());
        }
        if let Some(config) = &self.config {
            parts.push(format!("config={:016x}", config_digest(config)));
        }
        parts.join(" ")
    }

    /// Returns what [`agreed`](DimOptions::agreed) returns, with a leading comma for the end of a
    /// call's text.
    pub(super) fn agreed_suffix(&self) -> String {
        let agreed = self.agreed();
        if agreed.is_empty() { agreed } else { format!(", {agreed}") }
    }
}

/// The options of a collective call that gives a mesh new dimensions, or ends it.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CallOptions {
    /// The options of each new dimension; empty for the defaults.
    pub dims: Vec<DimOptions>,
    /// How long the call may take; `None` stands for the mesh's timeout.
    pub timeout: Option<Duration>,
}

impl CallOptions {
    /// Sets how long the call may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> CallOptions {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the options of the new dimensions, one element for each.
    #[must_use]
    pub fn dims(mut self, dims: Vec<DimOptions>) -> CallOptions {
        self.dims = dims;
        self
    }

    /// Fails unless these options are for `count` dimensions, or for none.
    pub(super) fn check_dims(&self, count: usize) -> Result<()> {
        check_count(&self.dims, count, "this call makes")
    }

    /// The options of the new dimension with this index.
    pub(super) fn dim(&self, index: usize) -> DimOptions {
        self.dims.get(index).cloned().unwrap_or_default()
    }
}

/// The options of a whole mesh.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct MeshOptions {
    /// Whether each dimension's communicator is made at its first use.
    pub lazy: bool,
    /// The options of each dimension; empty for the defaults.
    pub dims: Vec<DimOptions>,
    /// How long each collective call of the mesh may take; `None` stands for the world's timeout.
    pub timeout: Option<Duration>,
}

impl MeshOptions {
    /// Sets how long each collective call of the mesh may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> MeshOptions {
        self.timeout = Some(timeout);
        self
    }

    /// Makes each communicator at its first use.
    #[must_use]
    pub fn lazy(mut self) -> MeshOptions {
        self.lazy = true;
        self
    }

    /// Sets the options of the dimensions, one element for each dimension.
    #[must_use]
    pub fn dims(mut self, dims: Vec<DimOptions>) -> MeshOptions {
        self.dims = dims;
        self
    }

    pub(super) fn dim(&self, index: usize) -> DimOptions {
        self.dims.get(index).cloned().unwrap_or_default()
    }

    /// Fails unless these options are for `count` dimensions, or for none.
    pub(super) fn check_dims(&self, count: usize) -> Result<()> {
        check_count(&self.dims, count, "the mesh has")
    }

    /// The part of the call's text that the options add, with a leading comma. This text is empty
    /// for the defaults.
    pub(super) fn agreed(&self) -> String {
        let mut text = String::new();
        if self.lazy {
            text.push_str(", lazy");
        }
        for (index, dim) in self.dims.iter().enumerate() {
            let agreed = dim.agreed();
            if !agreed.is_empty() {
                text.push_str(&format!(", dim {index}: {agreed}"));
            }
        }
        text
    }
}

/// The options of [`View::recover`](super::View::recover). All but `has_state` and `timeout` must
/// be equal on all ranks that call.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RecoverOptions {
    /// The dimension of replicas; `None` for the outermost one. An index of it that cannot be
    /// filled is left out with all its ranks.
    pub dim: Option<String>,
    /// How long the call may take; `None` stands for the mesh's timeout. A rank that is not in the
    /// mesh waits without a limit.
    pub timeout: Option<Duration>,
    /// How long to wait for processes that can take the places of lost ranks, once all living ranks
    /// are here.
    pub replace: Duration,
    /// How long to wait for ranks that are not known to be lost and have not called. These ranks
    /// are left out after this time. `None` means that they are never left out. This option needs
    /// `min_size`.
    pub silent: Option<Duration>,
    /// The least size of `dim` with which the job goes on; 0 stands for 1.
    pub min_size: usize,
    /// Whether this rank, which has joined, has received the state of the training.
    pub has_state: bool,
    /// Whether the job goes on also where no rank that is left has the state of some part.
    pub any_state: bool,
    /// The greatest size to which the outermost dimension may grow by newcomers that fill further
    /// indices; `None` where it must not grow.
    pub max_size: Option<usize>,
    /// The options of the dimensions; empty for those that the dimensions had.
    pub dims: Vec<DimOptions>,
}

impl RecoverOptions {
    /// Sets the dimension of replicas.
    #[must_use]
    pub fn dim(mut self, dim: impl Into<String>) -> RecoverOptions {
        self.dim = Some(dim.into());
        self
    }

    /// Sets how long the call may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> RecoverOptions {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long to wait for processes that can take the places of lost ranks.
    #[must_use]
    pub fn replace(mut self, replace: Duration) -> RecoverOptions {
        self.replace = replace;
        self
    }

    /// Leaves out silent ranks after `silent`, as long as `min_size` indices are left.
    #[must_use]
    pub fn silent(mut self, silent: Duration, min_size: usize) -> RecoverOptions {
        (self.silent, self.min_size) = (Some(silent), min_size);
        self
    }

    /// Sets the least size of the dimension of replicas.
    #[must_use]
    pub fn min_size(mut self, min_size: usize) -> RecoverOptions {
        self.min_size = min_size;
        self
    }

    /// Says whether this rank, which has joined, has received the state of the training.
    #[must_use]
    pub fn has_state(mut self, has_state: bool) -> RecoverOptions {
        self.has_state = has_state;
        self
    }

    /// Lets the job go on where no rank has the state of some part.
    #[must_use]
    pub fn any_state(mut self) -> RecoverOptions {
        self.any_state = true;
        self
    }

    /// Lets the outermost dimension grow up to `max_size` indices, by newcomers that fill further
    /// ones.
    #[must_use]
    pub fn grow(mut self, max_size: usize) -> RecoverOptions {
        self.max_size = Some(max_size);
        self
    }

    /// Sets the options of the dimensions, one element for each dimension.
    #[must_use]
    pub fn dims(mut self, dims: Vec<DimOptions>) -> RecoverOptions {
        self.dims = dims;
        self
    }

    /// Fails unless the options of the dimensions are for `count` dimensions, or for none.
    pub(super) fn check_dims(&self, count: usize) -> Result<()> {
        check_count(&self.dims, count, "the mesh has")
    }
}

/// Fails for options of another number of dimensions than `owner` has.
fn check_count(dims: &[DimOptions], count: usize, owner: &str) -> Result<()> {
    if dims.is_empty() || dims.len() == count {
        return Ok(());
    }
    Err(Error::invalid(format!("there are options for {} dimensions, but {owner} {count}", dims.len())))
}
