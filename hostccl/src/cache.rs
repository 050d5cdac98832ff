//! The machine's last-level cache.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// The size that is assumed where the machine reports none.
const UNKNOWN: usize = 32 << 20;

/// An ordinary processor has less than this of the last-level cache for itself. A virtual machine
/// may report the cache of the whole package, which it shares with other machines. So where a cache
/// seems to have more than this for each processor, a call that touches more is taken not to fit.
const MOST_EACH: usize = 64 << 20;

/// A machine's last-level cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LastLevel {
    /// How many bytes the cache holds.
    bytes: usize,
    /// How many of the processors that the kernel lists share it; `None` where the kernel does not
    /// say so.
    processors: Option<usize>,
}

impl LastLevel {
    /// Returns the largest cache of the first processor.
    fn of_this_machine() -> LastLevel {
        static CACHE: OnceLock<LastLevel> = OnceLock::new();
        *CACHE.get_or_init(|| {
            largest(Path::new("/sys/devices/system/cpu/cpu0/cache"))
                .unwrap_or_else(|| LastLevel { bytes: by_libc().unwrap_or(UNKNOWN), processors: None })
        })
    }

    fn is_too_small_for(&self, results: usize, inputs: usize) -> bool {
        let most = self.processors.map_or(usize::MAX, |processors| processors.saturating_mul(MOST_EACH));
        results >= self.bytes || self.bytes > most && results.saturating_add(inputs) > most
    }
}

/// Whether a call writes its results with stores that bypass the caches. It does so where the
/// last-level cache cannot hold the results, or where results and inputs exceed what is most likely
/// this machine's share of the cache. An ordinary store first reads the cache line that it
/// overwrites. Both numbers are the bytes of all ranks together. Inputs that lie where the results
/// are written do not count.
#[inline]
pub(crate) fn is_too_small_for(results: usize, inputs: usize) -> bool {
    LastLevel::of_this_machine().is_too_small_for(results, inputs)
}

/// Returns the largest data cache in a folder of the kernel's description.
fn largest(folder: &Path) -> Option<LastLevel> {
    let read = |cache: &Path, name: &str| fs::read_to_string(cache.join(name)).ok();
    let caches = fs::read_dir(folder).ok()?.flatten().filter_map(|entry| {
        let cache = entry.path();
        let holds_data = read(&cache, "type").is_some_and(|kind| kind.trim() != "Instruction");
        let bytes = holds_data.then(|| read(&cache, "size").and_then(|size| parse(&size))).flatten()?;
        Some(LastLevel { bytes, processors: read(&cache, "shared_cpu_list").and_then(|list| count(&list)) })
    });
    caches.max_by_key(|cache| cache.bytes)
}

/// Counts the processors of a list such as "0-3,8".
fn count(list: &str) -> Option<usize> {
    let counts = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    });
    counts.sum()
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
    fn lists_of_processors_are_counted() {
        let lists =
            [("0-1\n", Some(2)), ("7", Some(1)), ("0-3,8,12-13", Some(7)), ("", None), ("3-1", None), ("0-x", None)];
        for (list, processors) in lists {
            assert_eq!(count(list), processors, "{list:?}");
        }
    }

    #[test]
    fn a_cache_of_a_whole_package_counts_in_part_and_another_one_whole() {
        let (of_own, of_package) =
            (LastLevel { bytes: 32 << 20, processors: Some(2) }, LastLevel { bytes: 480 << 20, processors: Some(2) });
        let cases = [
            // Results and inputs in MiB, and the answers for the two caches.
            (16, 8, false, false),
            (32, 0, true, false),
            (128, 0, true, false),
            (96, 48, true, true),
            (24, 120, false, true),
            (480, 0, true, true),
        ];
        for (results, inputs, own, package) in cases {
            let answers = [of_own, of_package].map(|cache| cache.is_too_small_for(results << 20, inputs << 20));
            assert_eq!(answers, [own, package], "results of {results} MiB, inputs of {inputs} MiB");
        }
        assert!(!LastLevel { bytes: 480 << 20, processors: None }.is_too_small_for(400 << 20, 400 << 20));
    }

    #[test]
    fn the_largest_cache_with_data_counts() {
        let folder = std::env::temp_dir().join(format!("hostccl-cache-{}", std::process::id()));
        for (index, kind, size) in [(0, "Data", "32K"), (1, "Instruction", "999M"), (2, "Unified", "4M")] {
            let cache = folder.join(format!("index{index}"));
            fs::create_dir_all(&cache).unwrap();
            fs::write(cache.join("type"), kind).unwrap();
            fs::write(cache.join("size"), size).unwrap();
            fs::write(cache.join("shared_cpu_list"), format!("0-{index}\n")).unwrap();
        }
        assert_eq!(largest(&folder), Some(LastLevel { bytes: 4 << 20, processors: Some(3) }));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(largest(&folder), None);
        assert!(LastLevel::of_this_machine().bytes >= 64 << 10);
    }
}
