//! The functions by which a process reads its own recording.

use std::io;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use super::{Entry, NOT_LOOKED, Recorder};
use crate::clock::Moment;
use crate::layout::{self, call, channel, header};
use crate::snapshot::{ChannelState, EntryState, Snapshot};

/// A call of this process that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningCall {
    /// The number of the call in the process, from 0.
    pub number: u64,
    /// The place of the call's group. No two groups that are open have one place.
    pub group: u16,
    /// How long the call has run.
    pub time: Duration,
}

impl Recorder {
    /// The calls of this process that run now in groups that are not closed, in no order. A call of
    /// `launched` also counts while its state is [`EntryState::Issued`]: the caller knows that its
    /// stream has not ended it. In the first millisecond of a recording the list is empty, because
    /// the length of a tick is not known before.
    pub fn running(&self, launched: &[Entry]) -> Vec<RunningCall> {
        let now = self.clock.moment();
        let Some(length) = self.began().nanoseconds_per_tick(&now) else { return Vec::new() };
        let is_launched = |number: u64| launched.iter().any(|entry| entry.number == number);
        let running = |place: usize| {
            let slot = layout::RING + place * layout::CALL_WORDS;
            let stamp = self.get(slot + call::STAMP);
            let number = (stamp / 2).checked_sub(1).filter(|_| stamp % 2 == 0)?;
            let (what, begun) = (self.get(slot + call::WHAT), self.get(slot + call::BEGUN));
            let (state, group) = (what >> 40 & 0xff, what as u16);
            let base = layout::CHANNELS + usize::from(group) * layout::CHANNEL_WORDS;
            // A call of an earlier group in this place may look as if it still ran.
            let is_of_group = number >= self.get(base + channel::FIRST_CALL);
            let is_closed = self.get(base + channel::KIND) >> 8 & 0xff == ChannelState::Closed as u64;
            let is_issued = || state == EntryState::Issued as u64 && is_launched(number);
            let runs = state == EntryState::Running as u64 || is_issued();
            // A later call may have taken the place while the words were read.
            let is_same = self.get(slot + call::STAMP) == stamp;
            // A call that began just now may have no time yet.
            let begun = if begun == NOT_LOOKED { now.ticks } else { begun };
            let time = Duration::from_nanos((now.ticks.saturating_sub(begun) as f64 * length) as u64);
            (runs && is_same && is_of_group && !is_closed).then_some(RunningCall { number, group, time })
        };
        (0..layout::CALL_COUNT).filter_map(running).collect()
    }

    /// Reads this recording as another process does.
    pub fn snapshot(&self) -> io::Result<Snapshot> {
        self.with_memory().map(|(snapshot, _)| snapshot)
    }

    /// Reads this recording as [`snapshot`](Recorder::snapshot) does. Returns the copy of its
    /// memory, too.
    pub fn with_memory(&self) -> io::Result<(Snapshot, Vec<u8>)> {
        let (before, copy, after) = (self.copy(), self.copy(), self.copy());
        Ok((Snapshot::of_bytes(&before, &copy, &after)?, copy))
    }

    fn copy(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Acquire).to_ne_bytes()).collect()
    }

    /// The moment at which the recording began.
    fn began(&self) -> Moment {
        let at = header::BEGAN;
        Moment { ticks: self.get(at), monotonic: self.get(at + 1), real: self.get(at + 2) }
    }
}
