//! Records the process's calls, for `devicemesh why`, messages and events.
//!
//! hostccl's module of the same name has the memory, and the crate `recording` writes it. Here are
//! the owners of the places in the recording: a world, a group of ranks, and a call that runs.
//! Nothing here fails: where there is no recording, all of it does nothing.

mod late;
pub(crate) mod launched;
mod ranks;
mod reports;
mod waiting;
mod words;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hostccl::recorder::get;
pub(crate) use recording::Operation;
use recording::{Call, Channel, ChannelFacts, ChannelState, Entry, EntryState, NO_PEER, Recorder, Wait, WorldFacts};

pub(crate) use self::late::{explained, explained_with};
pub(crate) use self::reports::Reports;
pub(crate) use self::waiting::{WaitingCall, behind, describe, running};
use self::words::described;
use crate::digest::Fnv1a;
use crate::error::{Error, Result};

/// Opens the recording of this process, unless it is open or turned off.
pub(crate) fn open() -> Result<()> {
    hostccl::recorder::open().map_err(Error::invalid)
}

/// An operation without its count, element type and stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct What {
    operation: Operation,
    /// The reduction, as an `ncclRedOp_t`; 0 where the operation reduces nothing.
    reduction: u8,
    /// The root or the peer; [`NO_PEER`] for none.
    peer: i32,
    /// The number of elements, where it differs from the number of elements in the operands.
    count: Option<usize>,
}

impl What {
    /// An operation without reduction, root and peer.
    pub(crate) const fn of(operation: Operation) -> What {
        What { operation, reduction: 0, peer: NO_PEER, count: None }
    }

    /// The operation with that reduction. The operators that a program has made have numbers of
    /// their own on each rank, and count as one.
    #[must_use]
    pub(crate) fn reducing(self, op: i32) -> What {
        What { reduction: op.clamp(0, 5) as u8, ..self }
    }

    /// The operation with that root or peer.
    #[must_use]
    pub(crate) fn with(self, peer: i32) -> What {
        What { peer, ..self }
    }

    /// The operation with that number of elements, where the operands do not say it.
    #[must_use]
    pub(crate) fn counting(self, count: usize) -> What {
        What { count: Some(count), ..self }
    }

    /// The name of the operation.
    pub(crate) fn name(self) -> &'static str {
        self.operation.name()
    }

    /// Whether all ranks of a dimension make the operation in one order.
    pub(crate) fn is_compared(self) -> bool {
        self.operation.is_compared()
    }

    /// Whether an operation on `count` elements handles no element on any rank.
    pub(crate) fn is_empty(self, count: usize) -> bool {
        self.count.unwrap_or(count) == 0 && !self.operation.has_own_counts()
    }

    /// The work of an operation on `count` elements of type `dtype`, as far as it is equal on all
    /// ranks: "all-reduce of 8 float32 (sum)".
    pub(crate) fn text(self, count: usize, dtype: i32) -> String {
        described(&self.call(count, dtype, std::ptr::null_mut()))
    }

    /// The call of this operation with `count` elements.
    #[inline]
    pub(crate) fn call(self, count: usize, dtype: i32, stream: *mut c_void) -> Call {
        let What { operation, reduction, peer, .. } = self;
        let count = self.count.unwrap_or(count) as u64;
        Call { operation, dtype: dtype as u8, reduction, count, peer, stream: stream.addr() as u32 }
    }
}

/// A world in the recording. Clones stand for one world. The recording notes its end when the last
/// clone is dropped, or earlier.
#[derive(Debug, Clone, Default)]
pub(crate) struct World(Option<Arc<WorldPlace>>);

/// The place of a world in the recording.
#[derive(Debug)]
struct WorldPlace {
    place: recording::World,
    /// All ranks of the world have this value, and no other world has it.
    key: u64,
    has_ended: AtomicBool,
}

impl World {
    /// Records that this process is rank `rank` of `size` in a world. All ranks of the world give
    /// this `name`, and no other world has it.
    pub(crate) fn open(name: &str, rank: usize, size: usize, [job, store, launcher]: [&str; 3]) -> World {
        let key = Fnv1a::default().text(name).value();
        let place = get().and_then(|it| it.open_world(&WorldFacts { key, rank, size, job, store, launcher }));
        World(place.map(|place| Arc::new(WorldPlace { place, key, has_ended: AtomicBool::new(false) })))
    }

    /// Records that the world has ended on this rank.
    pub(crate) fn end(&self) {
        self.0.iter().for_each(|world| world.end());
    }

    /// Records the epoch of the world.
    pub(crate) fn set_epoch(&self, epoch: u64) {
        let Some(world) = self.0.as_ref().filter(|world| !world.has_ended.load(Ordering::SeqCst)) else { return };
        if let Some(recorder) = get() {
            recorder.set_epoch(world.place, u32::try_from(epoch).unwrap_or(u32::MAX));
        }
    }

    /// A digest of the world's key. The keys of the world's groups are made from it.
    pub(crate) fn digest(&self) -> Fnv1a {
        Fnv1a::default().number(self.0.as_ref().map_or(0, |world| world.key))
    }
}

impl WorldPlace {
    fn end(&self) {
        // The place of a world that has ended may be another world's by now.
        if !self.has_ended.swap(true, Ordering::SeqCst) {
            get().into_iter().for_each(|recorder| recorder.close_world(self.place));
        }
    }
}

impl Drop for WorldPlace {
    fn drop(&mut self) {
        self.end();
    }
}

/// The kind of calls that a group of ranks makes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Operations along a dimension of a mesh.
    Dimension = 0,
    /// Agreements, and other calls through the store.
    Scope = 1,
}

/// A group of ranks in the recording. Another group can get the place when this group is closed or
/// dropped.
#[derive(Debug)]
pub(crate) struct Group {
    channel: Channel,
    kind: Kind,
    /// All ranks of the group have this value, and no other group of this kind has it.
    key: u64,
    /// This process's rank in the group.
    rank: u32,
    /// The name in messages: a mesh and its dimension as `mesh/dp`, or a scope.
    name: Box<str>,
    is_closed: AtomicBool,
    /// Whether NCCL's events record the calls of the group (ccl/profiler.rs), and this library does
    /// not.
    is_told_by_nccl: AtomicBool,
    /// Whether a call of the group was not recorded here, because NCCL's events record it
    /// elsewhere.
    lacks_calls: AtomicBool,
}

/// The most members whose ranks are listed. An offline world may state any size.
const MOST_MEMBERS: usize = recording::layout::MEMBER_WORDS * 2;

/// The ranks of a group of `size` ranks for the recording. They are not listed where they do not
/// fit.
pub(crate) fn members(size: usize, rank_at: impl Fn(usize) -> i32) -> Vec<u32> {
    let listed = if size > MOST_MEMBERS { 0 } else { size };
    (0..listed).map(|position| rank_at(position) as u32).collect()
}

impl Group {
    /// Records a group of `size` ranks in which this process is `rank`. All ranks of the group give
    /// this `key`, and no other group has it. `members` are the world ranks of the group, in the
    /// order of the group, as [`members`] gives them.
    pub(crate) fn open(
        kind: Kind,
        world: &World,
        key: Fnv1a,
        (rank, size): (usize, usize),
        members: &[u32],
        name: &str,
    ) -> Group {
        let world = world.0.as_ref().map(|world| world.place);
        let facts = ChannelFacts { kind: kind as u8, key: key.value(), world, rank, members, size, name };
        let channel = get().map_or(Channel::NONE, |recorder| recorder.open_channel(&facts));
        let (rank, name) = (rank as u32, name.into());
        let [is_closed, is_told_by_nccl, lacks_calls] = [const { AtomicBool::new(false) }; 3];
        Group { channel, kind, key: key.value(), rank, name, is_closed, is_told_by_nccl, lacks_calls }
    }

    /// The name in messages: a mesh and its dimension as `mesh/dp`, or a scope.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A number that all ranks of the group have, and no other group has.
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// The digest of the collective calls that this rank has made in the group, and who has
    /// recorded the calls: "nccl", or "own" for this library. NCCL tells no reduction and counts in
    /// its own way, so only digests of calls that the same one has recorded can be compared. `None`
    /// where the recording does not tell the digest, or the digests of ranks with equal calls may
    /// differ, because a call runs, has failed or is recorded elsewhere.
    pub(crate) fn digest(&self) -> Option<(&'static str, u64)> {
        if self.lacks_calls.load(Ordering::Relaxed) {
            return None;
        }
        let by = if self.is_told_by_nccl.load(Ordering::Relaxed) { "nccl" } else { "own" };
        Some((by, get()?.settled_digest(self.channel())?))
    }

    /// Notes that NCCL's events record the calls of the group.
    pub(crate) fn leave_to_nccl(&self) {
        self.is_told_by_nccl.store(true, Ordering::Relaxed);
    }

    /// Notes a call that this library does not record, because NCCL's events do. NCCL's events
    /// record the call under another group, unless it is known which communicator of NCCL belongs
    /// to this group.
    #[inline]
    pub(crate) fn note_unrecorded(&self) {
        if !self.is_told_by_nccl.load(Ordering::Relaxed) {
            self.lacks_calls.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the group makes no more calls, so that another group can get its place.
    pub(crate) fn close(&self) {
        // The place of a closed group may be another group's by now.
        if !self.is_closed.swap(true, Ordering::SeqCst) {
            get().into_iter().for_each(|recorder| recorder.set_channel_state(self.channel, ChannelState::Closed));
        }
    }

    /// Records that the group has failed.
    pub(crate) fn fail(&self) {
        if !self.is_closed.load(Ordering::SeqCst) {
            get().into_iter().for_each(|recorder| recorder.set_channel_state(self.channel, ChannelState::Failed));
        }
    }

    /// The place of the group in the recording, for whoever records its calls.
    #[inline]
    pub(crate) fn channel(&self) -> Channel {
        if self.is_closed.load(Ordering::Relaxed) { Channel::NONE } else { self.channel }
    }

    /// Records that a call begins.
    #[inline]
    pub(crate) fn begin(&self, call: &Call) -> Recorded {
        Recorded(get().map_or(Entry::NONE, |recorder| recorder.begin(self.channel(), call)))
    }

    /// Records that a call begins in the embedded host engine, which says when a brief call waits.
    #[inline]
    pub(crate) fn begin_embedded(&self, call: &Call) -> Recorded {
        let begin = |recorder| hostccl::recorder::begin(recorder, self.channel(), call);
        Recorded(get().map_or(Entry::NONE, begin))
    }

    /// Records a call that waits for the end of the thread's group.
    #[inline]
    pub(crate) fn queue(&self, call: &Call) -> Recorded {
        Recorded(get().map_or(Entry::NONE, |recorder| recorder.queue(self.channel(), call)))
    }

    /// Records that the ranks begin to agree on the call `text`.
    pub(crate) fn begin_agreement(&self, operation: Operation, text: &str) -> RecordedAgreement {
        let begin = |recorder: &Recorder| recorder.begin_agreement(self.channel(), operation, text);
        RecordedAgreement::of(Recorded(get().map_or(Entry::NONE, begin)))
    }
}

impl Default for Group {
    /// A group that is not recorded.
    fn default() -> Group {
        let (channel, name, is_closed) = (Channel::NONE, Box::default(), AtomicBool::new(true));
        let [is_told_by_nccl, lacks_calls] = [const { AtomicBool::new(false) }; 2];
        Group { channel, kind: Kind::Dimension, key: 0, rank: 0, name, is_closed, is_told_by_nccl, lacks_calls }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
    }
}

/// A call that has begun. Dropping it records that it has failed.
#[derive(Debug)]
#[must_use = "dropping it records that the call has failed"]
pub(crate) struct Recorded(Entry);

impl Recorded {
    /// A call that is not recorded.
    #[inline]
    pub(crate) fn none() -> Recorded {
        Recorded(Entry::NONE)
    }

    /// Records that queued calls run now.
    pub(crate) fn start_all(queued: &[Recorded]) {
        if let Some(recorder) = get() {
            recorder.start(queued.iter().map(|queued| queued.0));
        }
    }

    /// Records that the call has ended well, after it has waited for other ranks as `wait` says.
    #[inline]
    pub(crate) fn done(self, wait: Wait) {
        self.end(EntryState::Done, wait);
    }

    /// Records that the call was handed to a stream.
    #[inline]
    pub(crate) fn issued(self) {
        self.end(EntryState::Issued, Wait::Unknown);
    }

    #[inline]
    fn end(self, state: EntryState, wait: Wait) {
        let entry = self.0;
        std::mem::forget(self);
        if let Some(recorder) = get() {
            recorder.end_after(entry, state, wait);
        }
    }
}

impl Drop for Recorded {
    #[inline]
    fn drop(&mut self) {
        if !self.0.is_none() {
            get().into_iter().for_each(|recorder| recorder.end(self.0, EntryState::Failed));
        }
    }
}

/// A call on which the ranks agree. Dropping it records that it has failed, unless
/// [`set_ends_well`](RecordedAgreement::set_ends_well) says otherwise.
#[derive(Debug)]
#[must_use = "dropping it records that the call has failed"]
pub(crate) struct RecordedAgreement {
    recorded: Recorded,
    /// Whether the call has ended well when it is dropped.
    ends_well: AtomicBool,
}

impl RecordedAgreement {
    fn of(recorded: Recorded) -> RecordedAgreement {
        RecordedAgreement { recorded, ends_well: AtomicBool::new(false) }
    }

    /// A call that is not recorded.
    pub(crate) fn none() -> RecordedAgreement {
        RecordedAgreement::of(Recorded::none())
    }

    /// Notes whether dropping the call means that it has ended well. The ranks have agreed on such
    /// a call, and it has no other work.
    pub(crate) fn set_ends_well(&self, ends_well: bool) {
        self.ends_well.store(ends_well, Ordering::Relaxed);
    }

    /// Records that the call has gone on to another part of its work.
    pub(crate) fn set_operation(&self, operation: Operation) {
        if let Some(recorder) = get() {
            recorder.set_operation(self.recorded.0, operation);
        }
    }
}

impl Drop for RecordedAgreement {
    fn drop(&mut self) {
        if *self.ends_well.get_mut() {
            std::mem::replace(&mut self.recorded, Recorded::none()).done(Wait::Unknown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_whose_calls_are_recorded_elsewhere_has_no_digest() {
        open().unwrap();
        let [own, nccl] = ["own", "nccl"].map(|name| {
            let key = Fnv1a::default().text("a test of digests").text(name);
            Group::open(Kind::Dimension, &World::default(), key, (0, 2), &[], name)
        });
        nccl.leave_to_nccl();
        assert_eq!((own.digest(), nccl.digest()), (Some(("own", 0)), Some(("nccl", 0))));
        [&own, &nccl].into_iter().for_each(Group::note_unrecorded);
        assert_eq!((own.digest(), nccl.digest()), (None, Some(("nccl", 0))));
    }
}
