//! A caller's `ncclConfig_t`, which hostccl reads, as the ranks of a mesh agree on it.

pub use hostccl::nccl_config::{CommConfig, NotAConfig};

use crate::digest::Fnv1a;
use crate::error::Error;

impl From<NotAConfig> for Error {
    fn from(error: NotAConfig) -> Error {
        Error::invalid(format!("nccl_config: {error}"))
    }
}

/// A digest of the fields that must be the same on all ranks.
pub(crate) fn config_digest(config: &CommConfig) -> u64 {
    Fnv1a::default().bytes(config.bytes_of_all_ranks()).value()
}
