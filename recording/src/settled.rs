//! The digest of a group whose calls are over, for a comparison with those of the other ranks.

use crate::layout::channel;
use crate::recorder::{Channel, Recorder, channel_base};

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
        (begun == ended && failed == 0).then_some(digest)
    }
}
