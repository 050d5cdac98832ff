//! The facts of a call that the writer keeps while the call runs.

use crate::layout;

/// A call that was begun.
// It has two words, because a struct of two words is passed in registers.
#[must_use = "the call looks unfinished until `end` is called"]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The number of the call in the process; `u64::MAX` for a call that is not recorded.
    pub(super) number: u64,
    /// The place of the channel (bits 0 to 7), whether the call is counted among the collective
    /// calls of the channel (bit 8), whether the clock was not read when the call began, because
    /// the call is brief (bit 9), and the number of the call in its channel (the other 54 bits).
    rest: u64,
}

const _: () = assert!(layout::CHANNEL_COUNT <= 1 << 8);

impl Entry {
    /// A call that is not recorded.
    pub const NONE: Entry = Entry { number: u64::MAX, rest: 0 };

    #[inline]
    pub(super) fn new(number: u64, in_channel: u64, place: u16, is_collective: bool, is_brief: bool) -> Entry {
        let rest = u64::from(place) | u64::from(is_collective) << 8 | u64::from(is_brief) << 9 | in_channel << 10;
        Entry { number, rest }
    }

    /// Whether the call is not recorded.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.number == u64::MAX
    }

    /// The place of the call's channel.
    #[inline]
    pub(super) fn place(&self) -> usize {
        usize::from(self.rest as u8)
    }

    /// Whether the call is counted among the collective calls of its channel.
    #[inline]
    pub(super) fn is_collective(&self) -> bool {
        self.rest >> 8 & 1 != 0
    }

    /// The number of the call in its channel.
    #[inline]
    pub(super) fn in_channel(&self) -> u64 {
        self.rest >> 10
    }

    /// The number of the call in the process; `u64::MAX` for a call that is not recorded.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether the clock was not read when the call began.
    #[inline]
    pub fn is_brief(&self) -> bool {
        self.rest >> 9 & 1 != 0
    }
}
