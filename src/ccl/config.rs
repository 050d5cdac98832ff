//! `ncclConfig_t` as bytes: the caller's copied by its own size field, ours built field by field.
//!
//! The struct grows at its tail from release to release and its C tag changes, so it is never declared as a type here. An integer is unset at
//! `INT_MIN`, a pointer at NULL; a library copies the smaller of its own and the given size and takes defaults for what `version` did not
//! know.

use std::ffi::{CStr, c_void};

use crate::digest::Fnv1a;
use crate::error::{Error, Result};

const MAGIC: u32 = 0xcafe_beef;
const UNSET: i32 = i32::MIN;
/// `sizeof(ncclConfig_t)` in 2.27, the first with a communicator name and a layout that every later one extends.
const SIZE: usize = 72;
const VERSION_WITH_NAME: u32 = 22_703;
const VERSION_WITH_SPLIT_SHARE: u32 = 21_800;
/// No release is near this; more means that the size field is garbage.
const MAX_SIZE: usize = 4096;

/// The integers after the head, as nccl.h calls them: where each lies and since which release. tests/nccl/wheel.c holds this beside NVIDIA's headers.
const INTEGERS: [(&str, usize, u32); 10] = [
    ("blocking", 16, 21_400),
    ("cgaClusterSize", 20, 21_700),
    ("minCTAs", 24, 21_700),
    ("maxCTAs", 28, 21_700),
    ("splitShare", 40, 21_800),
    ("trafficClass", 44, 22_600),
    ("collnetEnable", 56, 22_700),
    ("CTAPolicy", 60, 22_700),
    ("shrinkShare", 64, 22_700),
    ("nvlsCTAs", 68, 22_700),
];
/// The pointers.
const POINTERS: [(&str, usize, u32); 2] = [("netName", 32, 21_700), ("commName", 48, 22_700)];

const AT_MAGIC: usize = 8;
const AT_VERSION: usize = 12;
const AT_BLOCKING: usize = INTEGERS[0].1;
const AT_COMM_NAME: usize = POINTERS[1].1;

/// An `ncclConfig_t` to hand to a communicator library.
#[derive(Debug, Clone)]
pub struct CommConfig {
    /// Words, so that the struct is 8-byte aligned as its pointers need.
    words: Vec<u64>,
}

impl CommConfig {
    /// A config in which everything is unset, for a library of that `ncclGetVersion`.
    pub fn unset(library_version: i32) -> CommConfig {
        let mut config = CommConfig { words: vec![0; SIZE / 8] };
        config.put(0, &SIZE.to_ne_bytes());
        config.put(AT_MAGIC, &MAGIC.to_ne_bytes());
        // 2.25 reads a field that other releases do not have at that place: claim the layout before it.
        let version = u32::try_from(library_version).unwrap_or(0).clamp(VERSION_WITH_SPLIT_SHARE, VERSION_WITH_NAME);
        let version = if version < VERSION_WITH_NAME { VERSION_WITH_SPLIT_SHARE } else { version };
        config.put(AT_VERSION, &version.to_ne_bytes());
        for (_, at, _) in INTEGERS {
            config.put(at, &UNSET.to_ne_bytes());
        }
        config
    }

    /// A copy of the caller's `ncclConfig_t`, by the size in its first field.
    ///
    /// # Safety
    /// `config` points to an initialised `ncclConfig_t` of any release.
    pub unsafe fn copy_of(config: *const c_void) -> Result<CommConfig> {
        // SAFETY: every release begins with size_t size, unsigned magic, unsigned version; the caller vouches for them.
        let (size, magic) = unsafe {
            (config.cast::<usize>().read_unaligned(), config.cast::<u8>().add(AT_MAGIC).cast::<u32>().read_unaligned())
        };
        if magic != MAGIC || !(AT_BLOCKING + 4..=MAX_SIZE).contains(&size) {
            return Err(Error::invalid(format!(
                "nccl_config has size {size} and magic {magic:#x}: it is not an ncclConfig_t; start from NCCL_CONFIG_INITIALIZER"
            )));
        }
        let mut words = vec![0u64; size.div_ceil(8)];
        // SAFETY: `size` bytes are readable by the caller's word, and the vector holds at least as many.
        unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), words.as_mut_ptr().cast::<u8>(), size) };
        Ok(CommConfig { words })
    }

    /// The same config with `blocking` set.
    #[must_use]
    pub fn blocking(mut self, blocking: bool) -> CommConfig {
        self.put(AT_BLOCKING, &i32::from(blocking).to_ne_bytes());
        self
    }

    /// The same config with the communicator's name, where the struct has that field and the caller left it unset. The
    /// library keeps the pointer: `name` must outlive the communicator.
    #[must_use]
    pub(crate) fn named(mut self, name: &'static CStr) -> CommConfig {
        let known = self.version() >= VERSION_WITH_NAME && self.size() >= AT_COMM_NAME + 8;
        if known && self.word(AT_COMM_NAME) == 0 {
            self.put(AT_COMM_NAME, &(name.as_ptr() as usize).to_ne_bytes());
        }
        self
    }

    /// A pointer to pass on; valid while the config lives.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    /// A digest of the fields that must be the same on all ranks: all but the pointers, which differ by process.
    pub(crate) fn digest(&self) -> u64 {
        let bytes = self.words.iter().flat_map(|word| word.to_ne_bytes()).enumerate();
        let is_pointer = |at: usize| POINTERS.iter().any(|(_, first, _)| (*first..first + 8).contains(&at));
        let shared = bytes.filter(|(at, _)| !is_pointer(*at));
        Fnv1a::default().bytes(shared.map(|(_, byte)| byte)).value()
    }

    /// The same config, blocking unless the caller said otherwise.
    #[must_use]
    pub(crate) fn blocking_by_default(self) -> CommConfig {
        let is_set = self.size() >= AT_BLOCKING + 4 && self.int(AT_BLOCKING) != UNSET;
        if is_set { self } else { self.blocking(true) }
    }

    /// Whether calls wait: what is unset does.
    pub(crate) fn is_blocking(&self) -> bool {
        self.int(AT_BLOCKING) != 0
    }

    fn size(&self) -> usize {
        self.words[0] as usize
    }

    fn version(&self) -> u32 {
        self.int(AT_VERSION) as u32
    }

    fn int(&self, at: usize) -> i32 {
        (self.words[at / 8] >> (8 * (at % 8))) as u32 as i32
    }

    fn word(&self, at: usize) -> u64 {
        self.words[at / 8]
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        let mut word = self.words[at / 8].to_ne_bytes();
        word[at % 8..at % 8 + bytes.len()].copy_from_slice(bytes);
        self.words[at / 8] = u64::from_ne_bytes(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unset_config_has_the_layout_of_nccl_h() {
        let config = CommConfig::unset(22_703).blocking(false).named(c"mesh_dp");
        assert_eq!((config.size(), config.int(AT_MAGIC) as u32, config.version()), (72, MAGIC, 22_703));
        assert_eq!((config.int(16), config.int(20), config.int(28), config.int(40)), (0, UNSET, UNSET, UNSET));
        assert_eq!(config.word(32), 0, "netName is a pointer, unset at NULL");
        assert_ne!(config.word(AT_COMM_NAME), 0);
    }

    #[test]
    fn names_and_version_2_25_are_not_sent_to_older_libraries() {
        for version in [21_805, 22_005, 22_501, 22_605] {
            let config = CommConfig::unset(version).named(c"mesh_dp");
            assert_eq!((config.version(), config.word(AT_COMM_NAME)), (21_800, 0), "library {version}");
        }
    }

    #[test]
    fn a_callers_config_is_copied_by_its_own_size() {
        let mut theirs = CommConfig::unset(21_805);
        theirs.words.truncate(6);
        theirs.put(0, &48usize.to_ne_bytes());
        theirs.put(28, &4i32.to_ne_bytes());
        // SAFETY: `theirs` is a config of 48 bytes.
        let ours = unsafe { CommConfig::copy_of(theirs.as_mut_ptr()) }.unwrap();
        assert_eq!((ours.size(), ours.int(28)), (48, 4));
    }

    #[test]
    fn garbage_is_refused_with_its_values() {
        let garbage = [0u64; 16];
        // SAFETY: 128 readable bytes.
        let error = unsafe { CommConfig::copy_of(garbage.as_ptr().cast()) }.unwrap_err();
        assert!(error.message().contains("size 0 and magic 0x0"), "{error}");
    }
}
