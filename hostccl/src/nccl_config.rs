//! `ncclConfig_t` as bytes. Only this module knows where its fields lie. The engine reads the
//! configurations of its callers here, and devicemesh makes configurations for NCCL here.
//!
//! NCCL appends fields to the struct from release to release and changes its C tag. So the struct
//! is read by its own fields `size` and `version`. The value `INT_MIN` stands for an integer that
//! is not set, and NULL for a pointer that is not set. NCCL copies the smaller of its own size and
//! the given one, and takes defaults for the fields that the release `version` did not have.

use std::ffi::{CStr, c_char, c_void};
use std::fmt;

use crate::types::{NCCL_CONFIG_MAGIC, NCCL_CONFIG_UNDEF_INT};

/// `sizeof(ncclConfig_t)` in 2.27, the first release with a communicator name. Every later release
/// extends that layout.
const SIZE: usize = 72;
const VERSION_WITH_NAME: u32 = 22_703;
const VERSION_WITH_SPLIT_SHARE: u32 = 21_800;
/// No release is near this size. A larger size means that the size field is garbage.
const MAX_SIZE: usize = 4096;

/// The integers after the head, as nccl.h calls them: the offset of each in bytes, and the release
/// that brought it. tests/test_nccl_wheels.py compares them with NVIDIA's headers.
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
/// The pointers after the head: the name, the offset in bytes, and the release that brought each.
const POINTERS: [(&str, usize, u32); 2] = [("netName", 32, 21_700), ("commName", 48, 22_700)];

/// `sizeof(ncclConfig_t)` in 2.32. All fields behind those of 2.27 are integers.
const SIZE_WITH_NVLS_MODE: usize = 120;
const VERSION_WITH_NVLS_MODE: u32 = 23_200;
const NEWEST_VERSION: u32 = 23_203;
/// The offset of `nvlsHostMode`, and its value `ncclNvlsHostModeDisable`.
const NVLS_HOST_MODE: (usize, i32) = (112, i32::MAX);

const AT_MAGIC: usize = 8;
const AT_VERSION: usize = 12;
const AT_BLOCKING: usize = INTEGERS[0].1;
const AT_COMM_NAME: usize = POINTERS[1].1;

/// The error for bytes that were given as an `ncclConfig_t` but do not hold one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAConfig {
    /// The first field of the bytes, which an `ncclConfig_t` uses for its size.
    size: usize,
    /// The second field, which is [`NCCL_CONFIG_MAGIC`] in an `ncclConfig_t`.
    magic: u32,
}

impl fmt::Display for NotAConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotAConfig { size, magic } = self;
        write!(f, "size {size} and magic {magic:#x}: this is not an ncclConfig_t; start from NCCL_CONFIG_INITIALIZER")
    }
}

impl std::error::Error for NotAConfig {}

/// An `ncclConfig_t` to hand to a communicator library, or a copy of a caller's.
#[derive(Debug, Clone)]
pub struct CommConfig {
    /// The bytes of the struct. They are stored as words, because pointers have to be aligned to 8
    /// bytes.
    words: Vec<u64>,
}

impl CommConfig {
    /// Returns a config in which nothing is set, for the library whose `ncclGetVersion` answered
    /// `library_version`.
    pub fn unset(library_version: i32) -> CommConfig {
        let mut config = CommConfig { words: vec![0; SIZE / 8] };
        config.put(0, &SIZE.to_ne_bytes());
        config.put(AT_MAGIC, &NCCL_CONFIG_MAGIC.to_ne_bytes());
        // NCCL 2.25 reads a field at a place where no other release has one. So for every library
        // before 2.27.3 the config claims the layout of 2.18.
        let version = u32::try_from(library_version).unwrap_or(0).clamp(VERSION_WITH_SPLIT_SHARE, VERSION_WITH_NAME);
        let version = if version < VERSION_WITH_NAME { VERSION_WITH_SPLIT_SHARE } else { version };
        config.put(AT_VERSION, &version.to_ne_bytes());
        for (_, at, _) in INTEGERS {
            config.put(at, &NCCL_CONFIG_UNDEF_INT.to_ne_bytes());
        }
        config
    }

    /// Copies the caller's `ncclConfig_t`. Its first field says how many bytes it has. The strings
    /// stay the caller's ([`keep_strings`](CommConfig::keep_strings)).
    ///
    /// # Safety
    /// `config` points to an initialised `ncclConfig_t` of any release, which has as many readable
    /// bytes as its field `size` says.
    pub unsafe fn copy_of(config: *const c_void) -> Result<CommConfig, NotAConfig> {
        // SAFETY: in every release the struct begins with size_t size, unsigned magic and unsigned
        // version, and the caller promises that these are readable.
        let (size, magic) = unsafe {
            (config.cast::<usize>().read_unaligned(), config.cast::<u8>().add(AT_MAGIC).cast::<u32>().read_unaligned())
        };
        if magic != NCCL_CONFIG_MAGIC || !(AT_BLOCKING + 4..=MAX_SIZE).contains(&size) {
            return Err(NotAConfig { size, magic });
        }
        let mut words = vec![0u64; size.div_ceil(8)];
        // SAFETY: the caller promises that `size` bytes are readable, and the vector holds at least
        // as many.
        unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), words.as_mut_ptr().cast::<u8>(), size) };
        Ok(CommConfig { words })
    }

    /// Returns this config with other strings in place of its own: `keep` gives one for each
    /// string. So the caller's strings need not live longer than this call.
    ///
    /// # Safety
    /// Each string of the config is NULL or a NUL-terminated string.
    #[must_use]
    pub unsafe fn keep_strings(mut self, keep: impl Fn(&CStr) -> &'static CStr) -> CommConfig {
        for (_, at, since) in POINTERS {
            let theirs: *const c_char = std::ptr::with_exposed_provenance(match self.has(at, 8, since) {
                true => self.word(at) as usize,
                false => 0,
            });
            if !theirs.is_null() {
                // SAFETY: not NULL, and the caller's contract.
                let ours = keep(unsafe { CStr::from_ptr(theirs) });
                self.put(at, &ours.as_ptr().expose_provenance().to_ne_bytes());
            }
        }
        self
    }

    /// Returns this config with the field `blocking` set.
    #[must_use]
    pub fn blocking(mut self, blocking: bool) -> CommConfig {
        self.put(AT_BLOCKING, &i32::from(blocking).to_ne_bytes());
        self
    }

    /// Returns this config. The field `blocking` is set to 1 where the caller left it unset.
    #[must_use]
    pub fn blocking_by_default(self) -> CommConfig {
        if self.int(AT_BLOCKING) == NCCL_CONFIG_UNDEF_INT { self.blocking(true) } else { self }
    }

    /// Returns a config for a communicator on which no operation ever runs. `library_version` is
    /// the answer of the library's `ncclGetVersion`. The config asks for one channel, and for
    /// neither NVLS nor networks that reduce, as far as the release has fields for that.
    pub fn least(library_version: i32) -> CommConfig {
        let mut config = CommConfig::unset(library_version);
        let version = u32::try_from(library_version).unwrap_or(0);
        if version >= VERSION_WITH_NVLS_MODE {
            config.words.resize(SIZE_WITH_NVLS_MODE / 8, 0);
            config.put(0, &SIZE_WITH_NVLS_MODE.to_ne_bytes());
            config.put(AT_VERSION, &version.min(NEWEST_VERSION).to_ne_bytes());
            for at in (SIZE..NVLS_HOST_MODE.0).step_by(4) {
                config.put(at, &NCCL_CONFIG_UNDEF_INT.to_ne_bytes());
            }
            config.put(NVLS_HOST_MODE.0, &NVLS_HOST_MODE.1.to_ne_bytes());
        }
        for (name, value) in [("minCTAs", 1i32), ("maxCTAs", 1), ("collnetEnable", 0), ("nvlsCTAs", 1)] {
            let field = INTEGERS.iter().find(|(known, ..)| *known == name);
            if let Some((_, at, _)) = field.filter(|(_, at, since)| config.has(*at, 4, *since)) {
                config.put(*at, &value.to_ne_bytes());
            }
        }
        config
    }

    /// Returns this config with the communicator's name, if the struct has that field and the
    /// caller left it unset. The name lives for ever, because the library keeps the pointer.
    #[must_use]
    pub fn named(mut self, name: &'static CStr) -> CommConfig {
        if self.name().is_some_and(<*const c_char>::is_null) {
            self.put(AT_COMM_NAME, &name.as_ptr().expose_provenance().to_ne_bytes());
        }
        self
    }

    /// Returns the pointer to the communicator's name, which is NULL where the caller gave none.
    /// Returns `None` where the struct has no such field.
    pub fn name(&self) -> Option<*const c_char> {
        let (_, at, since) = POINTERS[1];
        self.has(at, 8, since).then(|| std::ptr::with_exposed_provenance(self.word(at) as usize))
    }

    /// Returns the flag that has this name in nccl.h. Returns `None` where the struct has no such
    /// field or the caller left it unset. Fails with the value where it is neither 0 nor 1.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, i32> {
        let field = INTEGERS.iter().find(|(known, ..)| *known == name);
        let Some((_, at, _)) = field.filter(|(_, at, since)| self.has(*at, 4, *since)) else { return Ok(None) };
        match self.int(*at) {
            NCCL_CONFIG_UNDEF_INT => Ok(None),
            value @ (0 | 1) => Ok(Some(value == 1)),
            value => Err(value),
        }
    }

    /// Returns the pointer to pass to the library. It is valid while the config lives.
    pub fn as_mut_ptr(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    /// Returns the bytes that must be equal on all ranks: the head, the integers that the release
    /// of the struct has, and the fields behind those of 2.27. The pointers are left out, because
    /// they differ from process to process. The padding is left out, because nobody writes to it.
    pub fn bytes_of_all_ranks(&self) -> impl Iterator<Item = u8> + '_ {
        // A later release may have a field there.
        let is_padded = self.size() == SIZE_WITH_NVLS_MODE && self.version() <= NEWEST_VERSION;
        let is_padding = move |at: usize| is_padded && (NVLS_HOST_MODE.0 + 4..SIZE_WITH_NVLS_MODE).contains(&at);
        let integers = INTEGERS.iter().filter(|(_, at, since)| self.has(*at, 4, *since));
        let known = (0..AT_BLOCKING).chain(integers.flat_map(|(_, at, _)| *at..at + 4));
        let later = (SIZE..self.size()).filter(move |at| !is_padding(*at));
        known.chain(later).map(|at| self.words[at / 8].to_ne_bytes()[at % 8])
    }

    /// Whether the struct has the field of `bytes` bytes at offset `at`, which the release `since`
    /// brought. The field `blocking` is always there.
    fn has(&self, at: usize, bytes: usize, since: u32) -> bool {
        at == AT_BLOCKING || self.size() >= at + bytes && self.version() >= since
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
    use std::mem::offset_of;

    use super::*;
    use crate::types::ncclConfig_t;

    const UNSET: i32 = NCCL_CONFIG_UNDEF_INT;

    #[test]
    fn unset_config_has_the_layout_of_nccl_h() {
        let config = CommConfig::unset(22_703).blocking(false).named(c"mesh_dp");
        assert_eq!((config.size(), config.int(AT_MAGIC) as u32, config.version()), (72, NCCL_CONFIG_MAGIC, 22_703));
        assert_eq!((config.int(16), config.int(20), config.int(28), config.int(40)), (0, UNSET, UNSET, UNSET));
        assert_eq!(config.word(32), 0, "netName is a pointer, unset at NULL");
        assert_ne!(config.word(AT_COMM_NAME), 0);
    }

    #[test]
    fn the_struct_of_the_c_api_has_its_fields_at_the_same_places() {
        let place =
            |name: &str| INTEGERS.iter().chain(&POINTERS).find(|(known, ..)| *known == name).map(|known| known.1);
        macro_rules! same {
            ($($field:ident),+) => {
                $(assert_eq!(place(stringify!($field)), Some(offset_of!(ncclConfig_t, $field)), stringify!($field));)+
            };
        }
        same!(blocking, cgaClusterSize, minCTAs, maxCTAs, netName, splitShare, trafficClass, commName);
        assert_eq!((offset_of!(ncclConfig_t, magic), offset_of!(ncclConfig_t, version)), (AT_MAGIC, AT_VERSION));
    }

    #[test]
    fn a_communicator_without_operations_takes_the_least() {
        let least = CommConfig::least(22_703);
        assert_eq!([24, 28, 56, 68].map(|at| least.int(at)), [1, 1, 0, 1]);
        assert_eq!([20, 40, 60, 64].map(|at| least.int(at)), [UNSET; 4]);
        let older = CommConfig::least(22_501);
        assert_eq!([24, 28, 56, 68].map(|at| older.int(at)), [1, 1, UNSET, UNSET]);
        for library in [23_200, 23_203, 24_000] {
            let newer = CommConfig::least(library).named(c"mesh_dp");
            assert_eq!((newer.size(), newer.version()), (120, library.min(23_203) as u32));
            assert_eq!([24, 28, 56, 68, 112].map(|at| newer.int(at)), [1, 1, 0, 1, i32::MAX]);
            assert!((72..112).step_by(4).all(|at| newer.int(at) == UNSET) && newer.word(AT_COMM_NAME) != 0);
        }
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
        assert_eq!((ours.name(), ours.flag("splitShare"), ours.flag("nvlsCTAs")), (None, Ok(None), Ok(None)));
    }

    #[test]
    fn only_bytes_of_fields_must_be_equal_on_all_ranks() {
        let config = |size: usize, version: u32| {
            let mut config = CommConfig::unset(22_703);
            config.words.resize(size / 8, 0);
            config.put(0, &size.to_ne_bytes());
            config.put(AT_VERSION, &version.to_ne_bytes());
            config
        };
        let with = |config: &CommConfig, at: usize| {
            let mut other = config.clone();
            other.put(at, &7i32.to_ne_bytes());
            other.bytes_of_all_ranks().collect::<Vec<_>>()
        };
        // The size, the release, the offset of the padding, and that of the last integer.
        for (size, version, padding, last) in
            [(24, 21_400, 20, 16), (48, 21_800, 44, 40), (48, 22_400, 44, 40), (120, 23_200, 116, 112)]
        {
            let ours = config(size, version);
            let bytes: Vec<_> = ours.bytes_of_all_ranks().collect();
            assert_eq!(with(&ours, padding), bytes, "the padding of release {version}");
            assert_ne!(with(&ours, last), bytes, "the last integer of release {version}");
            assert_ne!(with(&ours, AT_VERSION), bytes);
        }
        let ours = config(96, 23_000);
        assert_ne!(with(&ours, 92), ours.bytes_of_all_ranks().collect::<Vec<_>>(), "a field after those of 2.27");
    }

    #[test]
    fn strings_are_replaced_where_the_config_has_them() {
        let mut theirs = CommConfig::unset(22_703).named(c"theirs");
        theirs.put(32, &c"socket".as_ptr().expose_provenance().to_ne_bytes());
        let keep = |text: &CStr| if text == c"socket" { c"our socket" } else { c"ours" };
        // SAFETY: both strings are literals.
        let ours = unsafe { theirs.keep_strings(keep) };
        assert_eq!(ours.word(32) as usize, c"our socket".as_ptr() as usize);
        assert_eq!(ours.word(AT_COMM_NAME) as usize, c"ours".as_ptr() as usize);
        // SAFETY: no string is set.
        let unset = unsafe { CommConfig::unset(22_703).keep_strings(keep) };
        assert_eq!((unset.word(32), unset.word(AT_COMM_NAME)), (0, 0));
    }

    #[test]
    fn garbage_is_refused_with_its_values() {
        let garbage = [0u64; 16];
        // SAFETY: the array has 128 readable bytes.
        let error = unsafe { CommConfig::copy_of(garbage.as_ptr().cast()) }.unwrap_err();
        assert!(error.to_string().contains("size 0 and magic 0x0"), "{error}");
    }
}
