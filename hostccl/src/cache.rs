//! The size of the machine's last-level cache.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// The size that is assumed where the machine reports none.
const UNKNOWN: usize = 32 << 20;

/// Returns how many bytes the largest cache of the first processor holds. Processors that share a
/// last-level cache share these bytes.
fn last_level() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| largest(Path::new("/sys/devices/system/cpu/cpu0/cache")).or_else(by_libc).unwrap_or(UNKNOWN))
}

/// Whether the last-level cache cannot hold results of this many bytes, counted over all ranks.
/// Such results are written with stores that bypass the caches, because an ordinary store first
/// reads the cache line that it overwrites.
#[inline]
pub(crate) fn is_too_small_for(results: usize) -> bool {
    results >= last_level()
}

/// Returns the size of the largest data cache in a folder of the kernel's description.
fn largest(folder: &Path) -> Option<usize> {
    let read = |cache: &Path, name: &str| fs::read_to_string(cache.join(name)).ok();
    let sizes = fs::read_dir(folder).ok()?.flatten().filter_map(|entry| {
        let cache = entry.path();
        let holds_data = read(&cache, "type").is_some_and(|kind| kind.trim() != "Instruction");
        holds_data.then(|| read(&cache, "size").and_then(|size| parse(&size))).flatten()
    });
    sizes.max()
}

/// Parses a size such as "32768K".
fn parse(text: &str) -> Option<usize> {
    let text = text.trim();
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, 10 * (1 + "KMG".find(&text[digits.len()..])? as u32)),
        None => (text, 0),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << unit).filter(|bytes| *bytes > 0)
}

/// Asks the C library, which asks the processor itself.
#[cfg(target_env = "gnu")]
fn by_libc() -> Option<usize> {
    // SAFETY: the call only asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_LEVEL3_CACHE_SIZE) }).ok().filter(|bytes| *bytes > 0)
}

/// Returns `None`, because this C library does not report the size.
#[cfg(not(target_env = "gnu"))]
fn by_libc() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_kernels_units() {
        let sizes = [
            ("32768K\n", Some(32 << 20)),
            ("512", Some(512)),
            ("2M", Some(2 << 20)),
            ("0K", None),
            ("K", None),
            ("", None),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn the_largest_cache_with_data_counts() {
        let folder = std::env::temp_dir().join(format!("hostccl-cache-{}", std::process::id()));
        for (index, kind, size) in [(0, "Data", "32K"), (1, "Instruction", "999M"), (2, "Unified", "4M")] {
            let cache = folder.join(format!("index{index}"));
            fs::create_dir_all(&cache).unwrap();
            fs::write(cache.join("type"), kind).unwrap();
            fs::write(cache.join("size"), size).unwrap();
        }
        assert_eq!(largest(&folder), Some(4 << 20));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(largest(&folder), None);
        assert!(last_level() >= 64 << 10);
    }
}
