//! How ranks and communicators are called in messages, in the text of a call, and in the library's
//! logs.

use std::ffi::{CStr, CString};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::ccl::{CommConfig, Library};
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

/// The caller's `ncclConfig_t`, or one in which nothing is set, with `name` as the communicator's
/// name.
pub(super) fn named_config(library: &Library, callers: Option<&CommConfig>, name: &str) -> CommConfig {
    callers.cloned().unwrap_or_else(|| CommConfig::unset(library.version())).named(lasting_name(name))
}

/// A C string that lives as long as the process, because communicator libraries keep the pointer
/// and a communicator may outlive every handle. Equal names are one string, so the memory for them
/// is bounded by the number of different names.
fn lasting_name(name: &str) -> &'static CStr {
    static NAMES: OnceLock<Mutex<Vec<&'static CStr>>> = OnceLock::new();
    let wanted = CString::new(name.replace('\0', "")).unwrap_or_default();
    let mut names = NAMES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.iter().find(|known| ***known == *wanted) {
        return known;
    }
    let name: &'static CStr = Box::leak(wanted.into_boxed_c_str());
    names.push(name);
    name
}
