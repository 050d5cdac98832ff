//! How ranks and communicators are called in messages, in the text of a call, and in the library's
//! logs.

use std::ffi::CString;

use crate::ccl::{CommConfig, Library, lasting};
use crate::digest::Fnv1a;
use crate::mesh::Mesh;

/// The longest list of ranks that a text has in full.
const LONGEST_LIST: usize = 32;

/// A list of ranks as text. A long list is its first ranks, its length and a digest, so that any
/// difference between two lists shows.
pub(super) fn ranks_text(ranks: &[i32]) -> String {
    let list = |ranks: &[i32]| ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() <= LONGEST_LIST {
        return format!("({})", list(ranks));
    }
    let bytes = ranks.iter().flat_map(|rank| rank.to_le_bytes());
    let digest = Fnv1a::default().bytes(bytes).value();
    format!("({}, ... {} ranks, digest {digest:016x})", list(&ranks[..8]), ranks.len())
}

/// The world ranks of a group, in the group's order.
pub(super) fn world_ranks(group: &Mesh) -> String {
    ranks_text(group.ranks().as_slice())
}

/// The configuration of a non-blocking communicator from which others are split, with that name. No
/// operation ever runs on it, so it takes as little of the device as NCCL allows. A child that is
/// split with a configuration of its own inherits nothing of this one. If the environment has
/// `NCCL_COMM_SPLIT_SHARE_RESOURCES`, a child uses its parent's channels, so the parent then gets
/// all of them.
pub(super) fn parent_config(library: &Library, name: Option<&str>) -> CommConfig {
    let shares = std::env::var("NCCL_COMM_SPLIT_SHARE_RESOURCES").is_ok_and(|value| !matches!(value.trim(), "" | "0"));
    let config = match shares {
        true => CommConfig::unset(library.version()),
        false => CommConfig::least(library.version()),
    };
    match name {
        Some(name) => named_config(library, Some(&config.blocking(false)), name),
        None => config.blocking(false),
    }
}

/// The caller's `ncclConfig_t`, or one in which nothing is set, with `name` as the communicator's
/// name.
pub(super) fn named_config(library: &Library, callers: Option<&CommConfig>, name: &str) -> CommConfig {
    let name = CString::new(name.replace('\0', "")).unwrap_or_default();
    callers.cloned().unwrap_or_else(|| CommConfig::unset(library.version())).named(lasting(&name))
}
