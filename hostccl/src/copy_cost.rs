//! When it is faster to read another process's memory than to copy data twice, through shared
//! memory.
//!
//! A read by the kernel takes more processor time than two copies that stay in one processor's
//! caches. But where the two ranks run on two processors, each byte of a copy in shared memory
//! passes between their caches, and the shared memory itself passes back when it is used again.
//! Then a read is faster, up to the size from which on both ways wait for the machine's memory,
//! and two copies that take place at one time are faster again. docs/performance.md has the
//! measurements.

use std::sync::OnceLock;

use crate::cache;
use crate::peer_memory::{self, Policy};

/// The fewest bytes that are read. Below, the two ways take equally long.
const LEAST: usize = 32 << 10;

/// Whether to read a message of that many bytes. `ranks` is the number of ranks on this machine.
#[inline]
pub(crate) fn pays_for_message(bytes: usize, ranks: usize) -> bool {
    pays(bytes, ranks, cache::last_level() / 16)
}

/// Whether to read blocks of that many bytes in an all-to-all. All ranks copy at one time there,
/// so reads pay at any size.
#[inline]
pub(crate) fn pays_for_block(bytes: usize, ranks: usize) -> bool {
    pays(bytes, ranks, usize::MAX)
}

fn pays(bytes: usize, ranks: usize, most: usize) -> bool {
    match peer_memory::policy() {
        Policy::Never => false,
        Policy::Large => (LEAST..=most).contains(&bytes) && !is_crowded(ranks),
        Policy::Always => bytes > 0,
    }
}

/// Whether so many ranks on this machine have to share processors. A launcher may bind each rank
/// to one processor, so the processors of the machine count, and not those of this process.
#[inline]
pub(crate) fn is_crowded(ranks: usize) -> bool {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    // SAFETY: the call only asks for a number.
    let ask = || usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1);
    ranks > *PROCESSORS.get_or_init(ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_pay_between_two_sizes_where_each_rank_has_a_processor() {
        if peer_memory::policy() != Policy::Large {
            return;
        }
        let most = cache::last_level() / 16;
        let is_in_range = |bytes| (LEAST..=most).contains(&bytes);
        for bytes in [0, 1, LEAST - 1, LEAST, 100_000, most, most + 1] {
            assert_eq!(pays_for_message(bytes, 1), is_in_range(bytes), "{bytes}");
            assert_eq!(pays_for_block(bytes, 1), bytes >= LEAST, "{bytes}");
            assert!(!pays_for_message(bytes, 1 << 20) && !pays_for_block(bytes, 1 << 20), "{bytes}");
        }
    }
}
