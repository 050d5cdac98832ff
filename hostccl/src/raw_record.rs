//! Writes the calls of programs that use the engine's C functions themselves to the recording of
//! this process.
//!
//! A call of a mesh has a name ([`Name`]), and the mesh records it. A call without a name is
//! recorded here, in a group of the recording that belongs to the communicator. The first such call
//! opens the group, and the end of the communicator closes it.

use recording::{Call, ChannelFacts, Entry, EntryState, NO_PEER, Operation, Wait};

use crate::call_name::Name;
use crate::comm::Comm;
use crate::recorder;
use crate::types::{DataType, ncclRedOp_t};

/// The kind, in the recording, of the groups of calls without a name.
const RAW: u8 = 2;

/// What a call does, for the recording.
#[derive(Debug, Clone, Copy)]
pub(crate) struct What {
    /// The operation.
    pub(crate) operation: Operation,
    /// The number of elements.
    pub(crate) count: usize,
    /// The type of the elements.
    pub(crate) dtype: DataType,
    /// The reduction as the caller passed it; `None` for a call that reduces nothing.
    pub(crate) reduction: Option<ncclRedOp_t>,
    /// The root or the peer, as a rank of the whole communicator.
    pub(crate) peer: Option<usize>,
}

/// A call in the recording. Dropping it records that it has failed.
#[derive(Debug)]
pub(crate) struct RawRecord(Entry);

impl RawRecord {
    /// Records that a call begins. With `is_queued` the call waits for the end of the thread's
    /// group. Returns `None` for a call that is not recorded here: a call with a name, and a call
    /// where the process has no recording, or the recording has no room for the call.
    #[inline]
    pub(crate) fn begin(comm: &Comm, name: &Name, is_queued: bool, what: impl FnOnce() -> What) -> Option<RawRecord> {
        if name.is_none() { RawRecord::of(comm, is_queued, what()) } else { None }
    }

    /// Records that a call without a name begins.
    // Calls with a name are quicker without this code in them.
    #[inline(never)]
    fn of(comm: &Comm, is_queued: bool, what: What) -> Option<RawRecord> {
        let recorder = recorder::get()?;
        let channel = comm.raw_group.get_or_open(|| {
            let (rank, size) = comm.whole();
            let global = comm.labels.global_ranks.get();
            let members: Vec<u32> = global.iter().flat_map(|ranks| ranks.iter()).map(|rank| *rank as u32).collect();
            let facts = ChannelFacts {
                kind: RAW,
                key: comm.key(),
                world: None,
                rank,
                members: &members,
                size,
                name: comm.name(),
            };
            recorder.open_channel(&facts)
        });
        // The number of an operator that the program has made differs from rank to rank, so the
        // recording has one number for all such operators.
        let reduction = what.reduction.map_or(0, |op| op.clamp(0, 5) as u8);
        let peer = what.peer.map_or(NO_PEER, |peer| peer as i32);
        let dtype = what.dtype as u8;
        let call = Call { operation: what.operation, dtype, reduction, count: what.count as u64, peer, stream: 0 };
        let entry = match is_queued {
            true => recorder.queue(channel, &call),
            false => recorder::begin(recorder, channel, &call),
        };
        (!entry.is_none()).then(|| RawRecord(entry))
    }

    /// Records that queued calls run now.
    pub(crate) fn start_all(queued: &[RawRecord]) {
        recorder::get().into_iter().for_each(|recorder| recorder.start(queued.iter().map(|queued| queued.0)));
    }

    /// Records that the call has succeeded, after it has waited as `wait` says.
    pub(crate) fn done(self, wait: Wait) {
        let entry = self.0;
        std::mem::forget(self);
        if let Some(recorder) = recorder::get() {
            recorder.end_after(entry, EntryState::Done, wait);
        }
    }
}

impl Drop for RawRecord {
    fn drop(&mut self) {
        recorder::get().into_iter().for_each(|recorder| recorder.end(self.0, EntryState::Failed));
    }
}
