//! A caller's `ncclConfig_t`, which hostccl reads, as the ranks of a mesh agree on it.

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

pub use hostccl::nccl_config::{CommConfig, NotAConfig};

use crate::digest::Fnv1a;
use crate::error::{Error, Result};

impl From<NotAConfig> for Error {
    fn from(error: NotAConfig) -> Error {
        Error::invalid(format!("nccl_config: {error}"))
    }
}

/// A digest of the fields that must be the same on all ranks.
pub(crate) fn config_digest(config: &CommConfig) -> u64 {
    Fnv1a::default().bytes(config.bytes_of_all_ranks()).value()
}

/// A copy of the caller's `ncclConfig_t` and of its strings. A lazy dimension reads the strings
/// later, and the library keeps some of them for as long as the communicator lives.
///
/// # Safety
/// The conditions of [`CommConfig::copy_of`] and [`CommConfig::keep_strings`] hold.
pub(crate) unsafe fn copied_config(theirs: *const c_void) -> Result<CommConfig> {
    // SAFETY: the caller's contract.
    Ok(unsafe { CommConfig::copy_of(theirs)?.keep_strings(lasting) })
}

/// A C string that lives as long as the process, because communicator libraries keep the pointer
/// and a communicator may outlive every handle. Equal strings are one, so the memory for them is
/// bounded by the number of different strings.
pub(crate) fn lasting(wanted: &CStr) -> &'static CStr {
    static KNOWN: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = known.iter().find(|text| **text == wanted) {
        return text;
    }
    let text: &'static CStr = Box::leak(wanted.to_owned().into_boxed_c_str());
    known.push(text);
    text
}
