//! The writer of a recording.

mod ends;
mod entry;
mod own;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::sync::{Mutex, PoisonError};

use crate::clock::Clock;
use crate::layout::{self, call, channel, header, world};
use crate::operation::{Call, Operation};
use crate::snapshot::{ChannelState, EntryState};

pub use self::ends::Wait;
pub use self::entry::Entry;
pub use self::own::RunningCall;

/// The second moment of the clock is renewed with the first call that comes more than this number
/// of ticks after it: 50 ms on a counter of 2.6 GHz, and 134 ms on the monotonic clock.
const RENEW_AFTER: u64 = 1 << 27;
/// The time at which a call began, as long as nobody has read the clock for it.
const NOT_LOOKED: u64 = 0;

/// Writes the recording of this process. All threads may use it at the same time.
pub struct Recorder {
    words: &'static [AtomicU64; layout::WORDS],
    clock: Clock,
    /// Held while a world or a channel is opened, changed or closed, and while the second moment of
    /// the clock is renewed.
    opening: Mutex<()>,
}

/// What is recorded of a world.
#[derive(Debug, Clone, Copy)]
pub struct WorldFacts<'a> {
    /// Equal on all ranks of the world, and on no rank of another world.
    pub key: u64,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The job's id.
    pub job: &'a str,
    /// The address of the store; empty for none.
    pub store: &'a str,
    /// The launcher.
    pub launcher: &'a str,
}

/// What is recorded of a group of ranks that make calls together.
#[derive(Debug, Clone, Copy)]
pub struct ChannelFacts<'a> {
    /// 0 for a mesh dimension, 1 for an agreement scope, 2 for a raw communicator.
    pub kind: u8,
    /// Equal on all ranks of the group, and on no rank of another group.
    pub key: u64,
    /// The world to which the group belongs, as [`Recorder::open_world`] gave it.
    pub world: Option<World>,
    /// This process's rank in the group.
    pub rank: usize,
    /// The world rank of each member, in the order of the group. Empty where nobody knows them.
    pub members: &'a [u32],
    /// The number of members.
    pub size: usize,
    /// The name in messages: a mesh and its dimension as `mesh/dp`, or a scope.
    pub name: &'a str,
}

/// A world in the recording: its place in the header, which may be copied and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    place: u8,
    /// The number of the world. A later world in the place has another number.
    number: u64,
}

/// A group of ranks in the recording: the place of a channel, which may be copied and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channel {
    pub(crate) place: u16,
    /// The stamp that the place had when the group was opened. A later group in the place has
    /// another stamp.
    pub(crate) stamp: u64,
}

impl Channel {
    /// A group that is not recorded, because all places were taken. Its calls are not recorded.
    pub const NONE: Channel = Channel { place: u16::MAX, stamp: 0 };
}

impl Recorder {
    /// Begins a recording in `words`, which are [`layout::WORDS`] words of zeros. `pid` is this
    /// process, and `version` that of the library.
    pub fn new(words: &'static [AtomicU64], pid: u32, host: &str, version: &str) -> Recorder {
        let Some(words) = words.first_chunk() else {
            panic!("a recording needs {} words, not {}", layout::WORDS, words.len())
        };
        let clock = Clock::of_this_machine();
        let recorder = Recorder { words, clock, opening: Mutex::new(()) };
        recorder.set(header::CLOCK, clock as u64);
        recorder.set(header::PID, pid.into());
        recorder.set_text(header::HOST, header::HOST_WORDS, host);
        recorder.set_text(header::VERSION, header::VERSION_WORDS, version);
        recorder.set_moment(header::BEGAN);
        recorder.renew_moment();
        words[header::MAGIC].store(layout::MAGIC, Release);
        recorder
    }

    /// Records that the process has joined a world. `None` where all places are taken by worlds
    /// that have not ended.
    pub fn open_world(&self, facts: &WorldFacts) -> Option<World> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let is_used = |place: usize| self.get(world_base(place) + world::STAMP) != 0;
        let has_ended = |place: &usize| self.get(world_base(*place) + world::EPOCH) >> 32 != 0;
        // A world that has ended stays recorded as long as there is another place.
        let unused = (0..header::WORLD_COUNT).find(|place| !is_used(*place));
        let ended = (0..header::WORLD_COUNT).filter(has_ended);
        let place = unused.or_else(|| ended.min_by_key(|place| self.get(world_base(*place) + world::NUMBER)))?;
        let base = world_base(place);
        let number = self.get(header::WORLDS_JOINED) + 1;
        self.set(header::WORLDS_JOINED, number);
        self.rewrite(base + world::STAMP, || {
            self.set(base + world::NUMBER, number);
            self.set(base + world::KEY, facts.key);
            self.set(base + world::RANK, pair(facts.rank, facts.size));
            self.set(base + world::EPOCH, 0);
            self.set_text(base + world::JOB, world::JOB_WORDS, facts.job);
            self.set_text(base + world::STORE, world::STORE_WORDS, facts.store);
            self.set_text(base + world::LAUNCHER, world::LAUNCHER_WORDS, facts.launcher);
        });
        Some(World { place: place as u8, number })
    }

    /// Records the epoch of a world. Does nothing for a world that has ended.
    pub fn set_epoch(&self, world: World, epoch: u32) {
        self.change_world(world, |_| epoch.into());
    }

    /// Records that a world has ended. Its place may be used again.
    pub fn close_world(&self, world: World) {
        self.change_world(world, |epoch| epoch | 1 << 32);
        self.renew_moment();
    }

    fn change_world(&self, world: World, change: impl FnOnce(u64) -> u64) {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let base = world_base(world.place.into());
        let epoch = self.get(base + world::EPOCH);
        // The place of a world that has ended may be another world's by now.
        if self.get(base + world::NUMBER) == world.number && epoch >> 32 == 0 {
            self.set(base + world::EPOCH, change(epoch));
        }
    }

    /// Records a group. Where all places are taken by groups that are open, returns
    /// [`Channel::NONE`], and counts the group in the header.
    pub fn open_channel(&self, facts: &ChannelFacts) -> Channel {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = self.get(header::CHANNELS_OPENED);
        let fresh = (opened < layout::CHANNEL_COUNT as u64).then_some(opened as usize);
        let place = fresh.or_else(|| (0..layout::CHANNEL_COUNT).find(|place| self.is_closed(*place)));
        let Some(place) = place else {
            self.set(header::CHANNELS_LEFT_OUT, self.get(header::CHANNELS_LEFT_OUT) + 1);
            return Channel::NONE;
        };
        let base = channel_base(place);
        let members = self.write_members(facts.members);
        self.rewrite(base + channel::STAMP, || {
            let world = facts.world.map_or(0, |world| world.number);
            self.set(base + channel::KIND, u64::from(facts.kind) | world << 16);
            self.set(base + channel::KEY, facts.key);
            self.set(base + channel::RANK, pair(facts.rank, facts.size));
            self.set(base + channel::MEMBERS, members);
            for word in channel::CALLS_BEGUN..=channel::DIGEST {
                self.set(base + word, 0);
            }
            self.set(base + channel::CALLS_FAILED, 0);
            self.set_text(base + channel::NAME, channel::NAME_WORDS, facts.name);
            self.set(base + channel::FIRST_CALL, self.get(header::NEXT_CALL));
        });
        self.set(header::CHANNELS_OPENED, opened + 1);
        Channel { place: place as u16, stamp: self.get(base + channel::STAMP) }
    }

    /// Records that a group has failed or was closed. A group that has failed keeps its place until
    /// it is closed.
    pub fn set_channel_state(&self, channel: Channel, state: ChannelState) {
        if channel == Channel::NONE {
            return;
        }
        let base = channel_base(channel.place.into());
        let opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        // The place of a group that was closed may be another group's by now.
        if self.get(base + channel::STAMP) == channel.stamp && !self.is_closed(channel.place.into()) {
            let kind = self.get(base + channel::KIND);
            self.set(base + channel::KIND, kind & !(0xff << 8) | (state as u64) << 8);
        }
        drop(opening);
        self.renew_moment();
    }

    /// Records that a call begins. The [collective](Operation::is_compared) calls of one channel
    /// begin one after the other, because their order is recorded.
    #[inline]
    pub fn begin(&self, channel: Channel, call: &Call) -> Entry {
        self.begin_as(channel, call, EntryState::Running, self.clock.ticks())
    }

    /// Records that a call begins, without a look at the clock where the call is
    /// [brief](Call::is_brief). The other ranks wait until this rank is in the call, and the look
    /// would take most of the time of this function. [`set_begun`](Recorder::set_begun) adds the
    /// time if it is called while the call runs. Otherwise the end of the call adds it.
    #[inline]
    pub fn begin_untimed(&self, channel: Channel, call: &Call) -> Entry {
        let ticks = if call.is_brief() { NOT_LOOKED } else { self.clock.ticks() };
        self.begin_as(channel, call, EntryState::Running, ticks)
    }

    /// Records that a call was put into a group of calls that has not begun to run.
    #[inline]
    pub fn queue(&self, channel: Channel, call: &Call) -> Entry {
        self.begin_as(channel, call, EntryState::Queued, self.clock.ticks())
    }

    /// Records that the ranks begin to agree on a call, which is described by `text`. The digest of
    /// the channel includes the text and not the text's number, because the number may differ
    /// between the ranks.
    pub fn begin_agreement(&self, channel: Channel, operation: Operation, text: &str) -> Entry {
        if channel == Channel::NONE {
            return Entry::NONE;
        }
        let call = |count| Call { operation, dtype: 0, reduction: 0, count, peer: crate::NO_PEER, stream: 0 };
        let digest = call(fnv1a(text)).digest(self.get(channel_base(channel.place.into()) + channel::DIGEST));
        self.write_call(channel, &call(self.write_text(text)), EntryState::Running, digest, self.clock.ticks())
    }

    /// Records that an agreed call has gone on to another part of its work, for example to the
    /// making of communicators.
    pub fn set_operation(&self, entry: Entry, operation: Operation) {
        let slot = slot_base(entry.number);
        if self.stands(entry) {
            let what = self.get(slot + call::WHAT);
            self.set(slot + call::WHAT, what & !(0xff << 16) | u64::from(operation as u8) << 16);
        }
    }

    #[inline(always)]
    fn begin_as(&self, channel: Channel, call: &Call, state: EntryState, ticks: u64) -> Entry {
        if channel == Channel::NONE {
            return Entry::NONE;
        }
        let digest = self.get(channel_base(channel.place.into()) + channel::DIGEST);
        let digest = call.digest(digest);
        self.write_call(channel, call, state, digest, ticks)
    }

    /// Writes a call that begins at `ticks` into the ring. `digest` is the channel's digest after
    /// the call.
    #[inline(always)]
    fn write_call(&self, channel: Channel, call: &Call, state: EntryState, digest: u64, ticks: u64) -> Entry {
        let base = channel_base(channel.place.into());
        let is_collective = call.operation.is_compared();
        let number = self.words[header::NEXT_CALL].fetch_add(1, Relaxed);
        let in_channel = match is_collective {
            // The collective calls of one channel begin one after the other. An atomic addition
            // would take 5 ns more on an Intel Xeon.
            true => {
                let begun = self.get(base + channel::CALLS_BEGUN) + 1;
                self.set(base + channel::CALLS_BEGUN, begun);
                begun
            }
            // Several threads may begin messages at the same time.
            false => self.words[base + channel::MESSAGES_BEGUN].fetch_add(1, Relaxed) + 1,
        };
        let slot = slot_base(number);
        let stamp = (number + 1) * 2;
        self.set(slot + call::STAMP, stamp - 1);
        fence(Release);
        let what = u64::from(channel.place)
            | u64::from(call.operation as u8) << 16
            | u64::from(call.dtype) << 24
            | u64::from(call.reduction) << 32
            | (state as u64) << 40;
        self.set(slot + call::WHAT, what);
        self.set(slot + call::NUMBER, in_channel);
        self.set(slot + call::COUNT, call.count);
        self.set(slot + call::PEER, u64::from(call.peer as u32) | u64::from(call.stream) << 32);
        self.set(slot + call::BEGUN, ticks);
        self.set(slot + call::ENDED, 0);
        self.set(slot + call::DIGEST, digest);
        self.words[slot + call::STAMP].store(stamp, Release);
        if is_collective {
            self.set(base + channel::DIGEST, digest);
            self.set(base + channel::LAST_CALL, number + 1);
        }
        self.renew_after(ticks);
        Entry::new(number, in_channel, channel.place, is_collective, ticks == NOT_LOOKED)
    }

    /// Records that queued calls run now. All of them begin at this moment, because the program had
    /// other work while they were queued.
    pub fn start(&self, queued: impl IntoIterator<Item = Entry>) {
        let mut begun = None;
        for entry in queued.into_iter().filter(|entry| self.stands(*entry)) {
            let ticks = *begun.get_or_insert_with(|| self.clock.ticks());
            self.set(slot_base(entry.number) + call::BEGUN, ticks);
            // A reader that sees that the call runs also sees when it began.
            fence(Release);
            self.change(entry, EntryState::Running, None);
        }
    }

    #[inline]
    fn change(&self, entry: Entry, state: EntryState, ended: Option<u64>) {
        let slot = slot_base(entry.number);
        if !self.stands(entry) {
            return;
        }
        if let Some(ticks) = ended {
            if self.get(slot + call::BEGUN) == NOT_LOOKED {
                self.set(slot + call::BEGUN, ticks);
            }
            self.set(slot + call::ENDED, ticks);
        }
        let what = self.get(slot + call::WHAT);
        self.set(slot + call::WHAT, what & !(0xff << 40) | (state as u64) << 40);
    }

    /// Whether a call still has its place in the ring. Later calls take the place of a call that
    /// runs for long.
    #[inline]
    fn stands(&self, entry: Entry) -> bool {
        self.stands_at(entry.number)
    }

    /// Whether the call with that number in the process still has its place in the ring.
    #[inline]
    fn stands_at(&self, number: u64) -> bool {
        number != Entry::NONE.number && self.get(slot_base(number) + call::STAMP) == (number + 1) * 2
    }

    /// Renews the second moment of the clock where it is old at `ticks`.
    #[inline]
    fn renew_after(&self, ticks: u64) {
        if ticks.saturating_sub(self.get(header::LATER)) > RENEW_AFTER {
            self.renew_moment();
        }
    }

    /// Renews the second moment of the clock, unless another thread changes the header.
    #[cold]
    fn renew_moment(&self) {
        if let Ok(_opening) = self.opening.try_lock() {
            self.rewrite(header::LATER_STAMP, || self.set_moment(header::LATER));
        }
    }

    pub(crate) fn is_closed(&self, place: usize) -> bool {
        self.get(channel_base(place) + channel::KIND) >> 8 & 0xff == ChannelState::Closed as u64
    }

    /// Writes the world ranks of a group's members behind those of other groups. Returns where
    /// they stand. Members that stand there already are not written again.
    fn write_members(&self, members: &[u32]) -> u64 {
        let used = self.get(header::MEMBERS_USED) as usize;
        let needed = members.len().div_ceil(2);
        let packed = |at: usize| {
            let first = u64::from(members[at * 2]);
            first | u64::from(members.get(at * 2 + 1).copied().unwrap_or(u32::MAX)) << 32
        };
        let stands_at = |start: &usize| (0..needed).all(|at| self.get(layout::MEMBERS + start + at) == packed(at));
        if members.is_empty() {
            return channel::NO_MEMBERS;
        }
        if let Some(start) = (0..(used + 1).saturating_sub(needed)).find(stands_at) {
            return start as u64 * 2;
        }
        let Some(used) = self.room_for_members(used, needed) else { return channel::NO_MEMBERS };
        (0..needed).for_each(|at| self.set(layout::MEMBERS + used + at, packed(at)));
        self.set(header::MEMBERS_USED, (used + needed) as u64);
        used as u64 * 2
    }

    /// Where that many words of members fit behind the `used` ones. If the table is full, this
    /// function drops the members of closed groups that stand behind the members of every open
    /// group. `None` where there is no room even then.
    fn room_for_members(&self, used: usize, needed: usize) -> Option<usize> {
        let fits = |start: &usize| start + needed <= layout::MEMBER_WORDS;
        if fits(&used) {
            return Some(used);
        }
        let end = |place: &usize| {
            let base = channel_base(*place);
            let (start, size) = (self.get(base + channel::MEMBERS), self.get(base + channel::RANK) >> 32);
            if start == channel::NO_MEMBERS { 0 } else { (start + size).div_ceil(2) as usize }
        };
        let (closed, open): (Vec<usize>, Vec<usize>) =
            (0..layout::CHANNEL_COUNT).partition(|place| self.is_closed(*place));
        let start = Some(open.iter().map(end).max().unwrap_or(0)).filter(fits)?;
        for place in closed.iter().filter(|place| end(place) > start) {
            let base = channel_base(*place);
            // The stamp tells a reader that copies the table meanwhile that the group has changed.
            self.rewrite(base + channel::STAMP, || self.set(base + channel::MEMBERS, channel::NO_MEMBERS));
        }
        Some(start)
    }

    /// Writes a text, and returns its number.
    fn write_text(&self, text: &str) -> u64 {
        let number = self.words[header::NEXT_TEXT].fetch_add(1, Relaxed);
        let base = layout::TEXTS + number as usize % layout::TEXT_COUNT * layout::TEXT_WORDS;
        let stamp = (number + 1) * 2;
        self.set(base, stamp - 1);
        fence(Release);
        self.set_text(base + 1, layout::TEXT_WORDS - 1, text);
        self.words[base].store(stamp, Release);
        number
    }

    /// Runs `write` between the two stamps of a slot.
    fn rewrite(&self, stamp: usize, write: impl FnOnce()) {
        let before = self.get(stamp);
        self.set(stamp, before + 1);
        fence(Release);
        write();
        self.words[stamp].store(before + 2, Release);
    }

    fn set_moment(&self, at: usize) {
        let moment = self.clock.moment();
        self.set(at, moment.ticks);
        self.set(at + 1, moment.monotonic);
        self.set(at + 2, moment.real);
    }

    /// Writes as much of a text as fits, and zeros behind it. A character is never cut in half.
    fn set_text(&self, at: usize, words: usize, text: &str) {
        let mut end = text.len().min(words * 8);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let bytes = &text.as_bytes()[..end];
        for word in 0..words {
            let mut value = [0; 8];
            let rest = &bytes[(word * 8).min(end)..((word + 1) * 8).min(end)];
            value[..rest.len()].copy_from_slice(rest);
            self.set(at + word, u64::from_ne_bytes(value));
        }
    }

    #[inline]
    pub(crate) fn get(&self, word: usize) -> u64 {
        self.words[word].load(Acquire)
    }

    #[inline]
    fn set(&self, word: usize, value: u64) {
        self.words[word].store(value, Relaxed);
    }
}

/// The FNV-1a digest of a text (Fowler, Noll, Vo).
fn fnv1a(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Packs two numbers below 2^32 into one word: `low` in the low half, `high` in the high half.
fn pair(low: usize, high: usize) -> u64 {
    low as u64 & 0xffff_ffff | (high as u64) << 32
}

fn world_base(place: usize) -> usize {
    header::WORLDS + place * header::WORLD_WORDS
}

/// The first word of a channel. The remainder lets the compiler see that the word is in the
/// recording. Each place is below the number of channels anyway. [`Channel::NONE`] has a higher
/// place, but its calls are not recorded.
#[inline]
pub(crate) fn channel_base(place: usize) -> usize {
    layout::CHANNELS + place % layout::CHANNEL_COUNT * layout::CHANNEL_WORDS
}

#[inline]
pub(crate) fn slot_base(number: u64) -> usize {
    layout::RING + number as usize % layout::CALL_COUNT * layout::CALL_WORDS
}
