//! The digest of a group whose calls are over, for a comparison with those of the other ranks.

use crate::layout::{self, call, channel, header};
use crate::operation::Operation;
use crate::recorder::{Channel, Recorder, channel_base, slot_base};
use crate::snapshot::EntryState;

impl Recorder {
    /// The digest of all collective calls of a group, where all of them have ended well. `None`
    /// for a group that is not recorded or was closed, and where a call runs or has failed: a
    /// failed call may have been made again, so ranks with equal calls may have different digests.
    pub fn settled_digest(&self, channel: Channel) -> Option<u64> {
        let base = channel_base(channel.place.into());
        let is_own = channel != Channel::NONE && self.get(base + channel::STAMP) == channel.stamp;
        if !is_own || self.is_closed(channel.place.into()) {
            return None;
        }
        let [begun, ended, failed, digest] =
            [channel::CALLS_BEGUN, channel::CALLS_ENDED, channel::CALLS_FAILED, channel::DIGEST]
                .map(|word| self.get(base + word));
        (begun == ended && failed == 0 && !self.has_unended(channel)).then_some(digest)
    }

    /// Whether a collective call of the group runs or is queued. The counters hide such a call when
    /// a later call of the group has ended. A call that newer calls have overwritten in the ring is
    /// not found.
    fn has_unended(&self, channel: Channel) -> bool {
        let next = self.get(header::NEXT_CALL);
        let first = self.get(channel_base(channel.place.into()) + channel::FIRST_CALL);
        (first.max(next.saturating_sub(layout::CALL_COUNT as u64))..next).any(|number| {
            let what = self.get(slot_base(number) + call::WHAT);
            let state = (what >> 40) as u8;
            let is_collective = Operation::from_number((what >> 16) as u8).is_some_and(|it| it.is_compared());
            let is_open = state == EntryState::Running as u8 || state == EntryState::Queued as u8;
            what as u16 == channel.place && is_open && is_collective
        })
    }
}
