//! The reader of a recording.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::clock::{Clock, Moment};
use crate::layout::{self, call, channel, header, world};
use crate::members::Members;
use crate::operation::{Call, NO_PEER, Operation};

/// The state of a recorded call. The numbers are part of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryState {
    /// The call waits in a group that its thread has begun and not ended.
    Queued = 1,
    /// The call runs.
    Running = 2,
    /// The call was handed to a stream. Nobody records when the stream ends it.
    Issued = 3,
    /// The call has ended well.
    Done = 4,
    /// The call has ended with an error.
    Failed = 5,
}

impl EntryState {
    const ALL: [EntryState; 5] =
        [EntryState::Queued, EntryState::Running, EntryState::Issued, EntryState::Done, EntryState::Failed];
}

/// The state of a channel. The numbers are part of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelState {
    /// Calls are possible.
    Open = 0,
    /// The group has failed.
    Failed = 1,
    /// The group has ended, and its place may be used again.
    Closed = 2,
}

impl ChannelState {
    const ALL: [ChannelState; 3] = [ChannelState::Open, ChannelState::Failed, ChannelState::Closed];
}

/// A copy of a recording at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What the recording says of its process.
    pub process: ProcessFacts,
    /// The worlds of the process, ended ones included.
    pub worlds: Vec<RecordedWorld>,
    /// The groups in which the process makes calls, closed ones included.
    pub channels: Vec<RecordedChannel>,
    /// The last calls of the process, in the order in which they began.
    pub calls: Vec<RecordedCall>,
    /// The numbers of agreements' texts, and the texts.
    pub(crate) texts: Vec<(u64, String)>,
}

/// What a recording says of its process.
#[derive(Debug, Clone)]
pub struct ProcessFacts {
    /// The process number, in the process's own process-id namespace.
    pub pid: u32,
    /// The name of the host.
    pub host: String,
    /// The version of the library.
    pub version: String,
    /// The clock of the ticks.
    pub clock: Clock,
    /// When the recording began.
    pub began: Moment,
    /// A later moment.
    pub later: Moment,
    /// In a copy for another host: the state of the process when it was copied, as the number from
    /// 0 that the copying tool gives this state. Then `later` is the moment of the copy.
    pub copied: Option<u64>,
    /// How many calls the process has begun.
    pub calls_begun: u64,
    /// How many groups are not recorded because all places were taken.
    pub channels_left_out: u64,
}

/// A world of the process.
#[derive(Debug, Clone)]
pub struct RecordedWorld {
    /// The place in the header.
    pub place: u8,
    /// The number, which [`RecordedChannel::world`] names. The process's first world has number 1,
    /// and each later one has a higher number.
    pub number: u64,
    /// Equal on all ranks of the world, and on no rank of another world.
    pub key: u64,
    /// The process's rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The epoch.
    pub epoch: u32,
    /// Whether the world has ended.
    pub has_ended: bool,
    /// The job's id.
    pub job: String,
    /// The address of the store; empty for none.
    pub store: String,
    /// The launcher.
    pub launcher: String,
}

/// A group in which the process makes calls.
#[derive(Debug, Clone)]
pub struct RecordedChannel {
    /// The place, which [`RecordedCall::channel`] names.
    pub place: u16,
    /// 0 for a mesh dimension, 1 for an agreement scope, 2 for a raw communicator.
    pub kind: u8,
    /// The state of the group.
    pub state: ChannelState,
    /// The number of the world; `None` for none.
    pub world: Option<u64>,
    /// Equal on all ranks of the group, and on no rank of another group.
    pub key: u64,
    /// The process's rank in the group.
    pub rank: u32,
    /// The size of the group.
    pub size: u32,
    /// The world ranks of the members. Empty where they are not recorded.
    pub members: Members,
    /// How many collective calls were begun.
    pub calls_begun: u64,
    /// The number of the last collective call that has ended well.
    pub calls_ended: u64,
    /// How many collective calls have ended with an error.
    pub calls_failed: u64,
    /// How many messages and operations of the program's own were begun.
    pub messages_begun: u64,
    /// The number, in the process, of the last collective call that was begun.
    pub last_call: Option<u64>,
    /// The digest of all collective calls that were begun.
    pub digest: u64,
    /// The number, in the process, from which on calls of this place belong to this group.
    pub first_call: u64,
    /// The name: a mesh and its dimension as `mesh/dp`, or a scope.
    pub name: String,
}

/// A call of the process.
#[derive(Debug, Clone, Copy)]
pub struct RecordedCall {
    /// The number of the call in the process, from 0.
    pub number: u64,
    /// The place of the call's channel.
    pub channel: u16,
    /// The number of the call in its channel, from 1. Collective calls and other calls are counted
    /// apart.
    pub in_channel: u64,
    /// What the call does. For an agreement, `count` is the number of the text.
    pub call: Call,
    /// The state of the call.
    pub state: EntryState,
    /// When the call was begun, in ticks. While the call is queued: when it was queued.
    pub begun: u64,
    /// When the call ended, in ticks. `None` while it runs.
    pub ended: Option<u64>,
    /// The digest of the channel after this call.
    pub digest: u64,
}

impl Snapshot {
    /// Reads a recording. Fails where the file is none, or one of another layout.
    pub fn of_file(file: &File) -> io::Result<Snapshot> {
        Snapshot::with_memory(file).map(|(snapshot, _)| snapshot)
    }

    /// Reads a recording as [`of_file`](Snapshot::of_file) does. Returns the copy of its memory,
    /// too.
    pub fn with_memory(file: &File) -> io::Result<(Snapshot, Vec<u8>)> {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; layout::WORDS * 8];
            match file.read_exact_at(&mut bytes, 0) {
                // `of_bytes` says that the file is too short.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Vec::new()),
                read => read.map(|()| bytes),
            }
        };
        let (before, copy, after) = (read()?, read()?, read()?);
        Ok((Snapshot::of_bytes(&before, &copy, &after)?, copy))
    }

    /// Reads a recording from three copies of its memory, which were made one after the other. The
    /// values come from the second copy. The first and the third show which slots nobody has
    /// changed meanwhile. The copies of a dead process's memory may be the same.
    pub fn of_bytes(before: &[u8], copy: &[u8], after: &[u8]) -> io::Result<Snapshot> {
        let words = Words { before: to_words(before), copy: to_words(copy), after: to_words(after) };
        let invalid = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidData, reason.to_owned()));
        if [&words.before, &words.copy, &words.after].iter().any(|copy| copy.len() < layout::WORDS) {
            return invalid("the file is too short for a recording");
        }
        if words.get(header::MAGIC) != layout::MAGIC {
            return invalid("the file is no recording of this version of the library");
        }
        let Some(clock) = Clock::from_number(words.get(header::CLOCK)) else {
            return invalid("the recording has an unknown clock");
        };
        let process = ProcessFacts {
            pid: words.get(header::PID) as u32,
            host: words.text(header::HOST, header::HOST_WORDS),
            version: words.text(header::VERSION, header::VERSION_WORDS),
            clock,
            began: words.moment(header::BEGAN),
            // Where the process was killed while it wrote the later moment, the first one is taken.
            later: words.moment(words.steady(header::LATER_STAMP).map_or(header::BEGAN, |_| header::LATER)),
            copied: words.get(header::COPIED).checked_sub(1),
            calls_begun: words.get(header::NEXT_CALL),
            channels_left_out: words.get(header::CHANNELS_LEFT_OUT),
        };
        Ok(Snapshot {
            process,
            worlds: (0..header::WORLD_COUNT).filter_map(|place| words.world(place)).collect(),
            channels: words.channels(),
            calls: words.calls(),
            texts: words.texts(),
        })
    }

    /// The text of an agreement. `None` for another call, or where later texts have taken its
    /// place.
    pub fn text(&self, call: &RecordedCall) -> Option<&str> {
        let is_agreement = call.call.operation.is_agreement();
        let known = self.texts.iter().find(|(number, _)| is_agreement && *number == call.call.count);
        known.map(|(_, text)| text.as_str())
    }

    /// The calls of a channel, in the order in which they began.
    pub fn calls_of(&self, channel: &RecordedChannel) -> impl DoubleEndedIterator<Item = &RecordedCall> {
        let (place, first) = (channel.place, channel.first_call);
        self.calls.iter().filter(move |call| call.channel == place && call.number >= first)
    }

    /// The world of a channel. `None` for a channel of no world, and where a later world has taken
    /// the place of a world that has ended.
    pub fn world_of(&self, channel: &RecordedChannel) -> Option<&RecordedWorld> {
        self.worlds.iter().find(|world| Some(world.number) == channel.world)
    }

    /// The nanoseconds of a tick. `now` is the present moment on the clock of the process's host,
    /// where the reader is on that host.
    pub fn nanoseconds_per_tick(&self, now: Option<Moment>) -> Option<f64> {
        let ProcessFacts { clock, began, later, .. } = &self.process;
        match clock {
            Clock::Monotonic => Some(1.0),
            Clock::Counter => began.nanoseconds_per_tick(&now.unwrap_or(*later)),
        }
    }
}

/// Three copies of a recording's words.
struct Words {
    before: Vec<u64>,
    copy: Vec<u64>,
    after: Vec<u64>,
}

impl Words {
    fn get(&self, word: usize) -> u64 {
        self.copy[word]
    }

    /// The stamp of a slot that nobody has changed while the second copy was made.
    fn steady(&self, stamp: usize) -> Option<u64> {
        let value = self.before[stamp];
        (value != 0 && value % 2 == 0 && value == self.after[stamp]).then_some(value)
    }

    fn moment(&self, at: usize) -> Moment {
        Moment { ticks: self.get(at), monotonic: self.get(at + 1), real: self.get(at + 2) }
    }

    /// The text up to its first zero byte.
    fn text(&self, at: usize, words: usize) -> String {
        let bytes: Vec<u8> = self.copy[at..at + words].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    fn world(&self, place: usize) -> Option<RecordedWorld> {
        let base = header::WORLDS + place * header::WORLD_WORDS;
        self.steady(base + world::STAMP)?;
        let (rank, epoch) = (self.get(base + world::RANK), self.get(base + world::EPOCH));
        Some(RecordedWorld {
            place: place as u8,
            number: self.get(base + world::NUMBER),
            key: self.get(base + world::KEY),
            rank: rank as u32,
            size: (rank >> 32) as u32,
            epoch: epoch as u32,
            has_ended: epoch >> 32 != 0,
            job: self.text(base + world::JOB, world::JOB_WORDS),
            store: self.text(base + world::STORE, world::STORE_WORDS),
            launcher: self.text(base + world::LAUNCHER, world::LAUNCHER_WORDS),
        })
    }

    fn channels(&self) -> Vec<RecordedChannel> {
        let parts = (0..layout::CHANNEL_COUNT).filter_map(|place| self.members(place));
        let end = parts.map(|part| part.end).max().unwrap_or(0);
        let member = |at: usize| (self.get(layout::MEMBERS + at / 2) >> (at % 2 * 32)) as u32;
        let table: Arc<[u32]> = (0..end).map(member).collect();
        (0..layout::CHANNEL_COUNT).filter_map(|place| self.channel(place, &table)).collect()
    }

    fn channel(&self, place: usize, table: &Arc<[u32]>) -> Option<RecordedChannel> {
        let base = layout::CHANNELS + place * layout::CHANNEL_WORDS;
        self.steady(base + channel::STAMP)?;
        let (kind, rank) = (self.get(base + channel::KIND), self.get(base + channel::RANK));
        Some(RecordedChannel {
            place: place as u16,
            kind: kind as u8,
            state: *ChannelState::ALL.iter().find(|state| **state as u64 == kind >> 8 & 0xff)?,
            world: Some(kind >> 16).filter(|world| *world != 0),
            key: self.get(base + channel::KEY),
            rank: rank as u32,
            size: (rank >> 32) as u32,
            members: Members::new(table, self.members(place).unwrap_or(0..0)),
            calls_begun: self.get(base + channel::CALLS_BEGUN),
            calls_ended: self.get(base + channel::CALLS_ENDED),
            calls_failed: self.get(base + channel::CALLS_FAILED),
            messages_begun: self.get(base + channel::MESSAGES_BEGUN),
            last_call: self.get(base + channel::LAST_CALL).checked_sub(1),
            digest: self.get(base + channel::DIGEST),
            first_call: self.get(base + channel::FIRST_CALL),
            name: self.text(base + channel::NAME, channel::NAME_WORDS),
        })
    }

    /// The part of the table of members that a channel names. `None` where it names none.
    fn members(&self, place: usize) -> Option<Range<usize>> {
        let base = layout::CHANNELS + place * layout::CHANNEL_WORDS;
        let (start, size) = (self.get(base + channel::MEMBERS), self.get(base + channel::RANK) >> 32);
        let most = layout::MEMBER_WORDS as u64 * 2;
        let end = start.checked_add(size).filter(|end| *end <= most)?;
        Some(start as usize..end as usize)
    }

    fn calls(&self) -> Vec<RecordedCall> {
        let mut calls: Vec<RecordedCall> = (0..layout::CALL_COUNT).filter_map(|place| self.call(place)).collect();
        calls.sort_by_key(|call| call.number);
        // A call that began just now may have no time yet. It began after everything else.
        let latest = calls.iter().map(|call| call.ended.unwrap_or(call.begun)).max().unwrap_or(0);
        for call in calls.iter_mut().filter(|call| call.begun == 0) {
            call.begun = call.ended.unwrap_or(latest.max(self.get(header::BEGAN)));
        }
        calls
    }

    fn call(&self, place: usize) -> Option<RecordedCall> {
        let base = layout::RING + place * layout::CALL_WORDS;
        let stamp = self.steady(base + call::STAMP)?;
        let (what, peer) = (self.get(base + call::WHAT), self.get(base + call::PEER));
        let byte = |at: u32| (what >> at) as u8;
        let ended = Some(self.get(base + call::ENDED)).filter(|ended| *ended != 0);
        // The writer sets the end and then the state, and leaves the stamp as it is. A copy that
        // has the state without the end was made meanwhile.
        let state = match *EntryState::ALL.iter().find(|state| **state as u8 == byte(40))? {
            EntryState::Queued => EntryState::Queued,
            state if ended.is_some() => state,
            _ => EntryState::Running,
        };
        Some(RecordedCall {
            number: stamp / 2 - 1,
            channel: what as u16,
            in_channel: self.get(base + call::NUMBER),
            call: Call {
                operation: Operation::from_number(byte(16))?,
                dtype: byte(24),
                reduction: byte(32),
                count: self.get(base + call::COUNT),
                peer: if peer as u32 == NO_PEER as u32 { NO_PEER } else { peer as u32 as i32 },
                stream: (peer >> 32) as u32,
            },
            state,
            begun: self.get(base + call::BEGUN),
            ended,
            digest: self.get(base + call::DIGEST),
        })
    }

    fn texts(&self) -> Vec<(u64, String)> {
        let text = |place: usize| {
            let base = layout::TEXTS + place * layout::TEXT_WORDS;
            let stamp = self.steady(base)?;
            Some((stamp / 2 - 1, self.text(base + 1, layout::TEXT_WORDS - 1)))
        };
        (0..layout::TEXT_COUNT).filter_map(text).collect()
    }
}

fn to_words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes"))).collect()
}
