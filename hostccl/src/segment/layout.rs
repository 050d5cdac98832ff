//! The layout of a segment: where its parts lie.

use super::channel::Channel;
use super::seat::Seat;

/// How many staging slots each rank has. The module [`crate::collective`] says why five are enough.
pub(crate) const SLOTS: usize = 5;
/// The most ranks that a communicator may have.
pub(crate) const MAX_RANKS: u32 = 1024;
/// The size of a cache line in bytes.
pub(crate) const LINE: usize = 64;
pub(super) const HEADER_BYTES: usize = 4096;
const PAGE: usize = 4096;
/// The bytes that all slots of a communicator take together, unless this makes the slots too small
/// or too large. Where a split makes several communicators of one parent, this is the limit for all
/// of them together.
const SLOT_BUDGET: usize = 12 << 20;
/// The smallest slot in bytes, unless the ranks' parts need more.
const SMALLEST_SLOT: usize = 64 << 10;
/// The smallest slot in a communicator of a split. It is smaller than [`SMALLEST_SLOT`], because
/// there may be many such communicators.
const SMALLEST_SPLIT_SLOT: usize = 48 << 10;
/// The largest slot in bytes.
const LARGEST_SLOT: usize = 1 << 20;
/// The bytes that all rings of a communicator take together, unless this makes the rings too small
/// or too large. Only rings through which messages flow take memory.
const RING_BUDGET: usize = 256 << 20;

/// Where the parts of a segment lie, in bytes from its start. Two numbers decide the layout: the
/// number of ranks, and the number of ranks of the communicator that was split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The number of ranks.
    pub(crate) nranks: usize,
    /// How many bytes of data a slot holds.
    pub(crate) slot_bytes: usize,
    /// How many bytes a ring holds: a power of two.
    pub(crate) ring_bytes: usize,
    /// Where the descriptors begin.
    pub(super) descriptors: usize,
    /// Where the slots begin.
    pub(super) slots: usize,
    /// The distance from slot to slot in bytes. The distance is a cache line more than the data,
    /// so that equal offsets in all slots do not fall into one set of the cache.
    pub(super) slot_pitch: usize,
    /// Where the channels begin.
    pub(super) channels: usize,
    /// Where the rings begin.
    pub(super) rings: usize,
    /// The size of the segment.
    pub(super) total: usize,
}

impl Layout {
    /// Returns the layout for a communicator of `nranks` ranks, which was not split from another
    /// one.
    #[cfg(test)]
    pub(crate) fn new(nranks: u32) -> Layout {
        Layout::split(nranks, 0)
    }

    /// Returns the layout for a communicator of `nranks` ranks. `among` is the largest number of
    /// ranks that the parent, or a communicator from which the parent was made, has on one host. It
    /// is 0 where there is no parent.
    ///
    /// All parts of a split may be in use at the same time, and they share the processors' cache.
    /// So the slots of all parts together take about as much memory as the slots of their parent.
    /// Without this limit, a mesh of 64 ranks in three dimensions of 4 would take 190 MB for each
    /// dimension.
    pub(crate) fn split(nranks: u32, among: u32) -> Layout {
        let (nranks, sharing) = (nranks as usize, nranks.max(among) as usize);
        // The slots of all ranks stay in a last-level cache of common size. A slot is large enough
        // that copying it takes much longer than waking a thread.
        let smallest = if sharing > nranks { SMALLEST_SPLIT_SLOT } else { SMALLEST_SLOT };
        // The part of each rank in a slot has a cache line of its own.
        let smallest = smallest.max((nranks * LINE).next_multiple_of(PAGE));
        let slot_bytes = (SLOT_BUDGET / (SLOTS * sharing) / PAGE * PAGE).clamp(smallest, LARGEST_SLOT);
        let ring_bytes = prev_power_of_two(RING_BUDGET / (nranks * nranks)).clamp(4 << 10, 256 << 10);
        let slot_pitch = slot_bytes + LINE;
        let descriptors = HEADER_BYTES + (nranks * size_of::<Seat>()).next_multiple_of(PAGE);
        let slots = descriptors + (SLOTS * nranks * LINE).next_multiple_of(PAGE);
        let channels = (slots + SLOTS * nranks * slot_pitch).next_multiple_of(PAGE);
        let rings = (channels + nranks * nranks * size_of::<Channel>()).next_multiple_of(PAGE);
        let total = rings + nranks * nranks * ring_bytes;
        Layout { nranks, slot_bytes, ring_bytes, descriptors, slots, slot_pitch, channels, rings, total }
    }
}

fn prev_power_of_two(value: usize) -> usize {
    if value == 0 { 0 } else { 1 << value.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::*;

    #[test]
    fn areas_follow_each_other_for_any_number_of_ranks() {
        for (nranks, among) in
            [1, 2, 3, 7, 8, 64, 100, 1024].map(|nranks| [(nranks, 0), (nranks, 64), (nranks, 4096)]).concat()
        {
            let layout = Layout::split(nranks, among);
            let n = nranks as usize;
            assert!(layout.descriptors >= HEADER_BYTES + n * size_of::<Seat>());
            assert!(layout.slots >= layout.descriptors + SLOTS * n * LINE);
            assert!(layout.channels >= layout.slots + SLOTS * n * layout.slot_pitch);
            assert!(layout.rings >= layout.channels + n * n * size_of::<Channel>());
            assert!(layout.ring_bytes.is_power_of_two() && layout.slot_bytes % 64 == 0);
            assert!(layout.total < 8 << 30, "{nranks} ranks take {} bytes of address space", layout.total);
        }
        assert!(size_of::<Header>() <= HEADER_BYTES);
    }

    #[test]
    fn the_parts_of_a_split_share_the_memory_of_a_parent() {
        for (nranks, among) in [(2_u32, 8_u32), (4, 8), (4, 16), (8, 64), (4, 64), (2, 64)] {
            let (alone, part) = (Layout::new(nranks), Layout::split(nranks, among));
            assert!(part.slot_bytes <= alone.slot_bytes, "{nranks} of {among}");
            let all = SLOTS * among as usize * part.slot_bytes;
            assert!(all <= SLOT_BUDGET.max(16 << 20), "the {nranks}s of {among} take {all} bytes together");
        }
        assert_eq!(Layout::split(8, 8), Layout::new(8), "a copy of a communicator is as fast as the communicator");
    }
}
