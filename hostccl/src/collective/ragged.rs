//! Collectives in which each rank has a count of its own: all-to-all-v, all-gather-v and
//! reduce-scatter-v.
//!
//! # Agreement on the counts
//! In the first stage, a rank writes a table to the start of its slot, before its data. For each
//! rank the table has the count that goes there, the count that is expected from there, and where
//! in the slot the data for that rank lies. In the second stage, every rank compares the tables.
//! The count that one rank sends must be the count that the other expects. Every rank adds up the
//! fingerprints of all counts that are sent and of all that are expected. So a difference between
//! any two ranks is found by all ranks, and the communicator ends before any data is used.
//!
//! # Chunks
//! The room of a slot behind the table is shared out in proportion to the counts, so all blocks end
//! in the same chunk or nearly so. The table tells the readers each share. The rank whose data
//! takes the most chunks decides how many stages there are.

#[cfg(test)]
mod tests;

use hostccl_reduce::{Target, reduce, scale};

use super::call::{Call, Kind, Reduction};
use super::copy::{copy_own, copy_result};
use crate::blame::Blame;
use crate::blocks::Block;
use crate::cache;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::segment::{LINE, Layout};
use crate::types::{ReduceOp, ncclInvalidUsage};

/// The counts of one rank's call, and what it learns from the other ranks' tables.
pub(crate) struct Ragged {
    /// For each rank, the block of the send buffer that goes there.
    send: Vec<Block>,
    /// For each rank, the block of the receive buffer that is filled from there. In a
    /// reduce-scatter-v, this is the whole result for every rank.
    recv: Vec<Block>,
    /// For each rank, where this rank's slot holds the data for it.
    shares: Vec<Share>,
    /// For each rank, where that rank's slot holds the data for this rank.
    sources: Vec<Share>,
    /// Whether this rank's results are written with stores that bypass the caches.
    stream: bool,
}

/// A part of the room in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    /// Where the part begins, in bytes from the start of the slot.
    offset: usize,
    /// How many elements of each chunk it holds.
    each: usize,
}

/// The beginning of a table.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Head {
    /// How many chunks this rank's data takes.
    chunks: u64,
    /// The fingerprint of the counts that this rank sends.
    sent: u64,
    /// The fingerprint of the counts that this rank expects.
    expected: u64,
}

/// The part of a table about one rank.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Entry {
    /// How many elements the table's owner sends there.
    sent: u64,
    /// How many elements the table's owner expects from there.
    expected: u64,
    /// [`Share::offset`].
    offset: u64,
    /// [`Share::each`].
    each: u64,
}

/// Where the entries of a table begin.
const ENTRIES: usize = 32;
const _: () = assert!(size_of::<Head>() <= ENTRIES);

/// How many bytes a table has for so many ranks.
fn table_bytes(nranks: usize) -> usize {
    (ENTRIES + nranks * size_of::<Entry>()).next_multiple_of(LINE)
}

/// Returns a number that depends on all bits of a count and on the two ranks between which it goes.
fn fingerprint(from: usize, to: usize, count: usize) -> u64 {
    let mut state = (count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((from as u64) << 32 | to as u64);
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

/// Shares out the room of a slot behind the table to blocks of `counts` elements. Returns the
/// shares and the number of chunks.
fn share_out(counts: impl Iterator<Item = usize> + Clone, size: usize, layout: &Layout) -> (Vec<Share>, usize) {
    // Shares on cache lines are faster. For many ranks there is not a line for each.
    let grain = if layout.nranks <= 256 { LINE } else { 8 };
    let table = table_bytes(layout.nranks);
    let room = (layout.slot_bytes - table) / grain;
    let grains = |count: usize| (count * size).div_ceil(grain);
    let total: u128 = counts.clone().map(|count| grains(count) as u128).sum();
    let spare = room - counts.clone().filter(|count| *count > 0).count();
    let (mut offset, mut chunks) = (table, 1);
    let shares = counts.map(|count| {
        let each = match grains(count) {
            0 => 0,
            needed if total <= room as u128 => needed,
            needed => 1 + (spare as u128 * needed as u128 / total) as usize,
        };
        let share = Share { offset, each: each * grain / size };
        chunks = chunks.max(count.div_ceil(share.each.max(1)));
        offset += each * grain;
        share
    });
    (shares.collect(), chunks)
}

impl Ragged {
    /// Returns the counts of a call that has not begun.
    pub(crate) fn new(send: Vec<Block>, recv: Vec<Block>) -> Ragged {
        Ragged { send, recv, shares: Vec::new(), sources: Vec::new(), stream: false }
    }

    /// For each rank, the block of the send buffer that goes there and the block of the receive
    /// buffer that is filled from there.
    pub(crate) fn blocks(&self) -> (&[Block], &[Block]) {
        (&self.send, &self.recv)
    }

    /// Returns the fingerprints of the counts that rank `me` sends, and of those that it expects.
    pub(crate) fn fingerprints(&self, me: usize) -> [u64; 2] {
        let add = |blocks: &[Block], of: &dyn Fn(usize, usize) -> u64| {
            blocks.iter().enumerate().fold(0_u64, |sum, (rank, block)| sum.wrapping_add(of(rank, block.count)))
        };
        [
            add(&self.send, &|rank, count| fingerprint(me, rank, count)),
            add(&self.recv, &|rank, count| fingerprint(rank, me, count)),
        ]
    }

    /// Writes this rank's table to its slot, and decides where its data lies.
    ///
    /// # Safety
    /// The slot belongs to this rank in this step.
    pub(super) unsafe fn post(&mut self, comm: &Comm, call: &Call, slot: *mut u8) {
        let (me, layout) = (comm.rank, comm.segment.layout());
        let counts = self.send.iter().map(|block| block.count).enumerate();
        // In an all-gather-v all ranks read one block. In an all-to-all-v this rank's own block
        // does not go through the slot. In a reduce-scatter-v all ranks need equal shares.
        let staged = counts.map(|(rank, count)| match call.kind {
            Kind::AllGatherV if rank != 0 => 0,
            Kind::AllToAllV if rank == me => 0,
            _ => count,
        });
        // This rank does not know how much data the others have. It takes them to have as much as
        // itself, and a wrong guess only costs time.
        let sum = |blocks: &[Block]| blocks.iter().fold(0, |sum: usize, block| sum.saturating_add(block.count));
        let of_all = |count: usize| count.saturating_mul(call.dtype.size() * comm.nranks);
        let (inputs, results) = match call.kind {
            Kind::ReduceScatterV => (sum(&self.send), self.recv[me].count),
            Kind::AllGatherV => (self.send[me].count, sum(&self.recv)),
            _ => (sum(&self.send), sum(&self.recv)),
        };
        self.stream = cache::is_too_small_for(of_all(results), of_all(inputs));
        let (mut shares, chunks) = share_out(staged, call.dtype.size(), layout);
        if call.kind == Kind::AllGatherV {
            let whole = shares[0];
            shares.fill(whole);
        }
        self.shares = shares;
        let mut head = Head { chunks: chunks as u64, sent: 0, expected: 0 };
        for rank in 0..comm.nranks {
            let (sent, expected) = (self.send[rank].count, self.recv[rank].count);
            head.sent = head.sent.wrapping_add(fingerprint(me, rank, sent));
            head.expected = head.expected.wrapping_add(fingerprint(rank, me, expected));
            let Share { offset, each } = self.shares[rank];
            let entry =
                Entry { sent: sent as u64, expected: expected as u64, offset: offset as u64, each: each as u64 };
            // SAFETY: the table fits the slot, which is aligned to a line and belongs to this rank.
            unsafe { slot.add(ENTRIES).cast::<Entry>().add(rank).write(entry) };
        }
        // SAFETY: as above.
        unsafe { slot.cast::<Head>().write(head) };
    }

    /// Compares the tables of all ranks, and notes where the data for this rank lies. `slot` gives
    /// the address of a rank's slot. Returns the number of chunks, which is the same on every rank.
    /// Ends the communicator when counts differ.
    ///
    /// # Safety
    /// All ranks have ended the step in which they wrote their tables.
    pub(super) unsafe fn agree(&mut self, comm: &Comm, call: &Call, slot: impl Fn(usize) -> *mut u8) -> Result<usize> {
        let me = comm.rank;
        // SAFETY: this function's contract; the table is aligned and initialised.
        let head = |rank: usize| unsafe { slot(rank).cast::<Head>().read() };
        // SAFETY: as above.
        let entry = |of: usize, rank: usize| unsafe { slot(of).add(ENTRIES).cast::<Entry>().add(rank).read() };
        let (mut chunks, mut sent, mut expected, mut is_same) = (1, 0_u64, 0_u64, true);
        self.sources.clear();
        for rank in 0..comm.nranks {
            let Head { chunks: theirs, sent: out, expected: into } = head(rank);
            chunks = chunks.max(theirs as usize);
            (sent, expected) = (sent.wrapping_add(out), expected.wrapping_add(into));
            let Entry { sent: out, expected: into, offset, each } = entry(rank, me);
            is_same &= out == self.recv[rank].count as u64 && into == self.send[rank].count as u64;
            self.sources.push(Share { offset: offset as usize, each: each as usize });
        }
        if is_same && sent == expected {
            return Ok(chunks);
        }
        let pairs = (0..comm.nranks).flat_map(|from| (0..comm.nranks).map(move |to| (from, to)));
        let differing = pairs.map(|(from, to)| (from, to, entry(from, to).sent, entry(to, from).expected));
        let first = differing.into_iter().find(|(_, _, sent, expected)| sent != expected);
        let (from, to, sent, expected) = first.unwrap_or((me, me, 0, 0));
        Err(fail_different_counts(comm, call, (from, sent), (to, expected)))
    }

    /// For a communicator of one rank: fails when this rank does not expect as many elements as it
    /// sends to itself.
    pub(crate) fn check_alone(&self, comm: &Comm, call: &Call) -> Result<()> {
        let (sent, expected) = (self.send[0].count as u64, self.recv[0].count as u64);
        match sent == expected {
            true => Ok(()),
            false => Err(fail_different_counts(comm, call, (0, sent), (0, expected))),
        }
    }

    /// Returns a place in the receive buffer as a target.
    fn result(&self, at: *mut u8) -> Target {
        Target { at, stream: self.stream }
    }

    /// Copies or scales this rank's block for itself from the send buffer to the receive buffer.
    ///
    /// # Safety
    /// The buffers hold the blocks.
    unsafe fn copy_own(&self, me: usize, call: &Call) {
        let size = call.dtype.size();
        let (from, to, count) = (self.send[me].start * size, self.recv[me].start * size, self.send[me].count);
        // SAFETY: the caller's contract; the block is one memory in both buffers, or apart.
        unsafe {
            let (from, to) = (call.send.add(from), call.recv.add(to));
            match call.reduction {
                Some(Reduction::PreMulSum(scalar)) => scale(call.dtype, scalar, from, to, count),
                _ => copy_own(from, self.result(to), count * size),
            }
        }
    }

    /// Does the whole work of a call in a communicator of one rank.
    ///
    /// # Safety
    /// The buffers hold the blocks.
    pub(super) unsafe fn copy_alone(&self, call: &Call) {
        // SAFETY: the caller's contract.
        unsafe { self.copy_own(0, call) }
    }

    /// Copies a chunk of this rank's data to its slot.
    ///
    /// # Safety
    /// The slot belongs to this rank in this step, and the send buffer holds the blocks.
    pub(super) unsafe fn stage(&self, comm: &Comm, call: &Call, chunk: usize, slot: *mut u8) {
        let (me, size) = (comm.rank, call.dtype.size());
        // All ranks read one block of an all-gather-v.
        let ranks = if call.kind == Kind::AllGatherV { 1 } else { comm.nranks };
        for rank in 0..ranks {
            let is_kept = match call.kind {
                Kind::AllToAllV => rank == me,
                Kind::ReduceScatterV => rank == me && !is_scaled(call),
                _ => false,
            };
            let (first, len) = self.shares[rank].chunk(chunk, self.send[rank].count);
            if is_kept || len == 0 {
                continue;
            }
            // SAFETY: the elements lie in the block, and the share has room for them.
            unsafe {
                let from = call.send.add((self.send[rank].start + first) * size);
                let to = slot.add(self.shares[rank].offset);
                match call.reduction {
                    Some(Reduction::PreMulSum(scalar)) => scale(call.dtype, scalar, from, to, len),
                    _ => std::ptr::copy_nonoverlapping(from, to, len * size),
                }
            }
        }
    }

    /// Copies or reduces a chunk of the other ranks' data from their slots. `slot` returns the
    /// address of a rank's slot.
    ///
    /// # Safety
    /// All ranks have ended the step in which they wrote the chunk, and the buffers hold the
    /// blocks.
    pub(super) unsafe fn take(
        &self,
        comm: &Comm,
        call: &Call,
        chunk: usize,
        slot: impl Fn(usize) -> *mut u8,
        inputs: &mut Vec<*const u8>,
    ) {
        let (me, n, size) = (comm.rank, comm.nranks, call.dtype.size());
        // SAFETY: the shares are those of the tables, which all ranks have compared. The chunks lie
        // in the blocks.
        unsafe {
            if call.kind == Kind::ReduceScatterV {
                let (first, len) = self.sources[me].chunk(chunk, self.recv[me].count);
                if len == 0 {
                    return;
                }
                inputs.clear();
                for rank in 0..n {
                    inputs.push(match rank == me && !is_scaled(call) {
                        true => call.send.add((self.send[me].start + first) * size),
                        false => slot(rank).add(self.sources[rank].offset),
                    });
                }
                let op = match call.reduction {
                    Some(Reduction::Plain(op)) => op,
                    _ => ReduceOp::Sum,
                };
                let target = self.result(call.recv.add(first * size));
                return reduce(call.dtype, op, inputs, &[target], len);
            }
            if chunk == 0 {
                self.copy_own(me, call);
            }
            for rank in (1..n).map(|k| (me + k) % n) {
                let (first, len) = self.sources[rank].chunk(chunk, self.recv[rank].count);
                let to = call.recv.add((self.recv[rank].start + first) * size);
                copy_result(slot(rank).add(self.sources[rank].offset), self.result(to), len * size);
            }
        }
    }
}

impl Share {
    /// Returns the first element and the length of a chunk of a block of `count` elements.
    fn chunk(self, chunk: usize, count: usize) -> (usize, usize) {
        let first = chunk.saturating_mul(self.each).min(count);
        (first, self.each.min(count - first))
    }
}

/// Whether each rank multiplies its elements by a scalar, so that its own elements go through its
/// slot, too.
fn is_scaled(call: &Call) -> bool {
    matches!(call.reduction, Some(Reduction::PreMulSum(_)))
}

/// Ends the communicator because `from` sends another count than `to` expects. Both are ranks of
/// the whole communicator.
pub(crate) fn fail_different_counts(
    comm: &Comm,
    call: &Call,
    (from, sent): (usize, u64),
    (to, expected): (usize, u64),
) -> Error {
    let (call, dtype) = (call.kind.function(), call.dtype.name());
    let message = format!(
        "the ranks give different counts to {call}: {} has {sent} x {dtype} for {}, which expects {expected} x {dtype} from it",
        comm.labels.rank(from, None),
        comm.labels.rank(to, None)
    );
    comm.fail_whole(ncclInvalidUsage, Blame::of([from, to]), &message, "")
}
