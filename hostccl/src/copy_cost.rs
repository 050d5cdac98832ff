//! For which data the ranks read each other's memory where the user asks for it.
//!
//! A read by the kernel takes more processor time than two copies through shared memory. But where
//! two ranks run on two processors that share no cache, each byte of a copy passes between the
//! caches of the two processors. The shared memory itself passes back when it is used again. So a
//! read is faster there, up to the size from which on the machine's memory limits both ways.
//! docs/performance.md has measurements.

use crate::cache;
use crate::peer_memory::{self, Policy};

/// The fewest bytes that are read. Below, a read gains nothing anywhere.
const LEAST: usize = 32 << 10;

/// Whether to read a message of that many bytes. `is_crowded` says whether the ranks outnumber the
/// processors.
#[inline]
pub(crate) fn pays_for_message(bytes: usize, is_crowded: impl FnOnce() -> bool) -> bool {
    pays(bytes, is_crowded, cache::last_level() / 16)
}

/// Whether to read blocks of that many bytes in an all-to-all. Blocks have no largest size, because
/// all ranks of an all-to-all copy at the same time.
#[inline]
pub(crate) fn pays_for_block(bytes: usize, is_crowded: impl FnOnce() -> bool) -> bool {
    pays(bytes, is_crowded, usize::MAX)
}

fn pays(bytes: usize, is_crowded: impl FnOnce() -> bool, most: usize) -> bool {
    match peer_memory::policy() {
        Policy::Never => false,
        Policy::Large => (LEAST..=most).contains(&bytes) && !is_crowded(),
        Policy::Always => bytes > 0,
    }
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
            assert_eq!(pays_for_message(bytes, || false), is_in_range(bytes), "{bytes}");
            assert_eq!(pays_for_block(bytes, || false), bytes >= LEAST, "{bytes}");
            assert!(!pays_for_message(bytes, || true) && !pays_for_block(bytes, || true), "{bytes}");
        }
    }
}
