//! The layout of a segment: where its parts lie.

use super::header::{Channel, Seat};

/// How many staging slots each rank has. The module [`crate::collective`] says why five are enough.
pub(crate) const SLOTS: usize = 5;
/// The most ranks that a communicator may have.
pub(crate) const MAX_RANKS: u32 = 1024;
/// The size of a cache line in bytes.
pub(crate) const LINE: usize = 64;
pub(super) const HEADER_BYTES: usize = 4096;
const PAGE: usize = 4096;
/// The bytes that all slots of a communicator take together, unless this makes the slots too small
/// or too large.
const SLOT_BUDGET: usize = 12 << 20;
/// The bytes that all rings of a communicator take together, unless this makes the rings too small
/// or too large. Only rings through which messages flow take memory.
const RING_BUDGET: usize = 256 << 20;

/// Where the parts of a segment lie, in bytes from its start. The number of ranks alone decides
/// the layout.
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
    pub(crate) fn new(nranks: u32) -> Layout {
        let nranks = nranks as usize;
        // The slots of all ranks stay in a last-level cache of common size. A slot is large enough
        // that copying it takes much longer than waking a thread.
        let slot_bytes = (SLOT_BUDGET / (SLOTS * nranks) / PAGE * PAGE).clamp(64 << 10, 1 << 20);
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
        for nranks in [1, 2, 3, 7, 8, 64, 100, 1024] {
            let layout = Layout::new(nranks);
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
}
