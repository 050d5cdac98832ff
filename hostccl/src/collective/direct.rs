//! Collectives whose ranks read each other's send buffers (module `lending`).
//!
//! The first chunk goes through the slots. Before a rank ends the first step, it lends its send
//! buffer. If all ranks have lent theirs, each rank reads the rest of its data in the next steps,
//! and there is no other chunk. A step has a limited amount of work, so that the ranks that wait
//! see progress before their deadlines.
//!
//! A rank that cannot read says so before it ends its step. After the last step each rank checks
//! whether any rank has said so, and all ranks find the same. If a rank has, all ranks do the whole
//! work again through the slots.

use std::sync::atomic::{Ordering, fence};

use super::call::{Call, Kind};
use crate::comm::Comm;
use crate::copy_cost;
use crate::segment::LINE;

/// The most bytes that a rank reads in one step.
const STEP_BYTES: usize = 32 << 20;

/// A piece of data that a rank reads from the memory of another one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    /// The address in the other rank's memory.
    pub(super) from: u64,
    /// Where the data goes.
    pub(super) to: *mut u8,
    /// The length in bytes.
    pub(super) bytes: usize,
}

/// The state of one rank's reads in a collective, and of the loan of its own buffer.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Direct {
    /// Whether reads may be faster than the slots, as far as this rank knows.
    may_be: bool,
    /// The number of this rank's loan; 0 while it lends nothing.
    loan: u64,
    /// How many steps the reads take; `None` where the data goes through the slots.
    steps: Option<usize>,
    /// Whether this rank could not read something.
    is_refused: bool,
    /// Whether the work has begun again, because some rank could not read.
    is_again: bool,
}

impl Direct {
    /// Returns the state before a call. `block` is the usual length in bytes of what one rank has
    /// for another one, where there is more than one chunk of it.
    #[inline]
    pub(super) fn new(comm: &Comm, call: &Call, block: usize) -> Direct {
        Direct { may_be: may_be_direct(comm, call, block), ..Direct::default() }
    }

    /// Lends this rank's send buffer in the first step. `is_apart` says whether the call leaves it
    /// unchanged.
    #[inline]
    pub(super) fn lend(&mut self, comm: &Comm, call: &Call, is_apart: impl FnOnce() -> bool) {
        self.loan = 0;
        if self.may_be && !self.is_again && is_apart() && comm.lends() && comm.reads_peers() {
            let loan = &comm.segment.seat(comm.rank).loan;
            self.loan = comm.step() + 1;
            loan.at.store(call.send.addr() as u64, Ordering::Relaxed);
            loan.number.store(self.loan, Ordering::Release);
        }
    }

    /// Whether this rank lends its buffer.
    #[inline]
    pub(super) fn is_lending(&self) -> bool {
        self.loan != 0
    }

    /// Whether the ranks have agreed to read.
    #[inline]
    pub(super) fn is_agreed(&self) -> bool {
        self.steps.is_some()
    }

    /// Whether the call has agreed before on what all ranks do, and has begun again.
    #[inline]
    pub(super) fn is_again(&self) -> bool {
        self.is_again
    }

    /// Decides in the second stage whether the ranks read each other's buffers. `most` is the
    /// number of bytes that the rank with the most data reads. All ranks have ended the first
    /// step, and decide the same.
    pub(super) fn decide(&mut self, comm: &Comm, most: usize) {
        let is_lent = |rank| comm.segment.seat(rank).loan.number.load(Ordering::Acquire) == self.loan;
        if self.loan != 0 && most > 0 && (0..comm.nranks).all(is_lent) {
            self.steps = Some(most.div_ceil(STEP_BYTES));
        }
    }

    /// Whether a stage is one in which this rank reads.
    #[inline]
    pub(super) fn reads_in(&self, stage: usize) -> bool {
        self.steps.is_some_and(|steps| stage <= steps)
    }

    /// Reads the data of this stage from each other rank. The stages of reads have the numbers 1, 2
    /// and so on.
    ///
    /// # Safety
    /// `piece_of` gives places that are writable, and nobody else uses them.
    pub(super) unsafe fn read(&mut self, comm: &Comm, stage: usize, piece_of: impl Fn(usize) -> Piece) {
        let (Some(steps), false, n) = (self.steps, self.is_refused, comm.nranks) else { return };
        // Each rank begins with another one, so that the ranks do not all read the same memory.
        for rank in (1..n).map(|k| (comm.rank + k) % n) {
            let piece = piece_of(rank);
            if piece.bytes == 0 {
                continue;
            }
            let each = piece.bytes.div_ceil(steps).next_multiple_of(LINE);
            let start = ((stage - 1) * each).min(piece.bytes);
            let bytes = each.min(piece.bytes - start);
            let (from, to) = (piece.from.wrapping_add(start as u64), piece.to.wrapping_add(start));
            // SAFETY: this function's contract.
            let read = unsafe { comm.read_from(rank, from, to, bytes, |_| comm.check().is_ok()) };
            // No read of the buffer comes after the look at the owner's promise.
            fence(Ordering::SeqCst);
            if read != Ok(true) || comm.segment.seat(rank).loan.number.load(Ordering::SeqCst) != self.loan {
                self.is_refused = true;
                comm.segment.seat(comm.rank).loan.refused.store(self.loan, Ordering::Release);
                return;
            }
        }
    }

    /// Ends the reads, in the stage after them. Returns whether all ranks have read all. Otherwise
    /// the work begins again.
    pub(super) fn finish(&mut self, comm: &Comm) -> bool {
        let is_refused = |rank| comm.segment.seat(rank).loan.refused.load(Ordering::Acquire) == self.loan;
        if !(0..comm.nranks).any(is_refused) {
            return true;
        }
        // No rank reads any more, because all ranks have ended the last step of reads.
        self.take_back(comm);
        (self.steps, self.is_again) = (None, true);
        false
    }

    /// Takes this rank's buffer back, before it may change.
    #[inline]
    pub(super) fn take_back(&mut self, comm: &Comm) {
        let loan = std::mem::take(&mut self.loan);
        if loan != 0 {
            let number = &comm.segment.seat(comm.rank).loan.number;
            let _ = number.compare_exchange(loan, 0, Ordering::SeqCst, Ordering::Relaxed);
            // No later write to the buffer comes before the change above.
            fence(Ordering::SeqCst);
        }
    }
}

/// Whether reads of the other ranks' buffers may be faster than the slots.
fn may_be_direct(comm: &Comm, call: &Call, block: usize) -> bool {
    let may_be = match call.kind {
        // In place, a rank overwrites what the others read.
        Kind::AllToAll => call.send != call.recv.cast_const(),
        Kind::AllToAllV => true,
        _ => false,
    };
    may_be && copy_cost::pays_for_block(block, || comm.is_crowded())
}

/// Returns what this rank reads from `rank` in an all-to-all in which all ranks have one count:
/// all but the first `first` elements of the block.
pub(super) fn piece_of(comm: &Comm, call: &Call, rank: usize, first: usize) -> Piece {
    let (size, at) = (call.dtype.size(), comm.segment.seat(rank).loan.at.load(Ordering::Relaxed));
    Piece {
        from: at.wrapping_add(((comm.rank * call.count + first) * size) as u64),
        to: call.recv.wrapping_add((rank * call.count + first) * size),
        bytes: call.count.saturating_sub(first) * size,
    }
}
