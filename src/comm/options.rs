//! What a caller can ask of the communicators of a mesh.

use std::time::Duration;

use crate::ccl::{CommConfig, config_digest};

/// Wishes for one dimension's communicator.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct DimOptions {
    /// Never share it with a communicator over the same ranks.
    pub own: bool,
    /// The caller's `ncclConfig_t`. A communicator with a config of its own is not shared with one made without.
    pub config: Option<CommConfig>,
    /// Its name in the library's logs; `None`: `mesh_<dimension>`.
    pub name: Option<String>,
}

impl DimOptions {
    /// The same, never shared with a communicator over the same ranks.
    #[must_use]
    pub fn own(mut self) -> DimOptions {
        self.own = true;
        self
    }

    /// The same with the caller's `ncclConfig_t`.
    #[must_use]
    pub fn config(mut self, config: CommConfig) -> DimOptions {
        self.config = Some(config);
        self
    }

    /// The same with a name for the library's logs.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> DimOptions {
        self.name = Some(name.into());
        self
    }

    /// Whether the dimension needs a communicator that nothing else uses.
    pub(super) fn is_exclusive(&self) -> bool {
        self.own || self.config.is_some()
    }

    /// What must be equal on all ranks, for the agreement: empty for the defaults.
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

    /// The same with a leading comma, to end a call's text with.
    pub(super) fn agreed_suffix(&self) -> String {
        let agreed = self.agreed();
        if agreed.is_empty() { agreed } else { format!(", {agreed}") }
    }
}

/// Wishes for a whole mesh.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct MeshOptions {
    /// Make each dimension's communicator at its first use.
    pub lazy: bool,
    /// One per dimension, or empty for the defaults.
    pub dims: Vec<DimOptions>,
    /// How long each collective call of the mesh may take; `None`: as long as the world's.
    pub timeout: Option<Duration>,
}

impl MeshOptions {
    /// The same with that time for each collective call of the mesh.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> MeshOptions {
        self.timeout = Some(timeout);
        self
    }

    /// The same with communicators that are made at their first use.
    #[must_use]
    pub fn lazy(mut self) -> MeshOptions {
        self.lazy = true;
        self
    }

    /// The same with these wishes, one for each dimension.
    #[must_use]
    pub fn dims(mut self, dims: Vec<DimOptions>) -> MeshOptions {
        self.dims = dims;
        self
    }

    pub(super) fn dim(&self, index: usize) -> DimOptions {
        self.dims.get(index).cloned().unwrap_or_default()
    }

    /// The part of the agreed call that the options add, with a leading comma; empty for the defaults.
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
