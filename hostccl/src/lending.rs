//! Lent buffers: a rank of this host reads another rank's send buffer where it lies, so the data
//! is copied once and not twice.
//!
//! # When
//! Ranks lend where `DM_HOSTCCL_SINGLE_COPY` asks for it (module `peer_memory`). Each rank tries
//! once, before its first read, whether it can read the mark of every other rank of the host. A rank
//! that cannot read one of them, or whose environment forbids reads, says so in the header of the
//! segment. From then on no rank of the communicator lends, and the data goes through shared memory.
//!
//! # Safety of the reads
//! - The owner of a buffer publishes its address together with a promise: the buffer stays
//!   unchanged until the readers are done. The promise is a word in shared memory ([`Lent`] for a
//!   message, [`Loan`] for a collective).
//! - An owner that gives up, because of a deadline or an abort, takes the word back before its
//!   call returns. A reader checks the word after the read. So a reader never uses data that may
//!   have changed.
//! - An owner that dies takes nothing back. A read of its memory then fails, because the kernel
//!   frees the memory of a process before the process number. A reader also checks after the read
//!   whether the process still lives.
//! - A reader that cannot read the buffer says so. Then the data goes through shared memory, and
//!   a failure of the owner gives the same error as without loans.
//!
//! [`Lent`]: crate::segment::Channel::lent
//! [`Loan`]: crate::segment::Seat::loan

use std::sync::atomic::Ordering;

use crate::comm::Comm;
use crate::peer_memory::{self, Policy, Refusal, Source};
use crate::process::Process;

/// The most bytes of one read. Between two reads the reader looks whether its communicator has
/// failed.
const PIECE: usize = 512 << 10;

impl Comm {
    /// Whether this rank lends its buffers: no rank of this host has said that it cannot read
    /// them.
    pub(crate) fn lends(&self) -> bool {
        peer_memory::policy() != Policy::Never && self.segment.header().unreadable.load(Ordering::Acquire) == 0
    }

    /// Whether this rank can read the memory of every other rank of this host. The first call
    /// tries it, after all ranks have taken their seats.
    pub(crate) fn reads_peers(&self) -> bool {
        *self.reads_peers.get_or_init(|| {
            let mut others = (0..self.nranks).filter(|rank| *rank != self.rank);
            let can = peer_memory::policy() != Policy::Never && others.all(|rank| self.source(rank).can_be_read());
            if !can {
                self.forbid_loans();
            }
            can
        })
    }

    /// Tells all ranks of this host to lend nothing any more.
    fn forbid_loans(&self) {
        self.segment.header().unreadable.store(1, Ordering::Release);
    }

    /// The memory of the rank with that seat.
    fn source(&self, seat: usize) -> Source {
        let seat = self.segment.seat(seat);
        Source {
            pid: seat.pid.load(Ordering::Relaxed),
            mark_at: seat.mark_at.load(Ordering::Relaxed),
            mark: seat.mark.load(Ordering::Relaxed),
        }
    }

    /// Copies `bytes` bytes at the address `from` of the rank with the seat `owner` to `to`, in
    /// pieces. Between two pieces it calls `go_on` with the number of bytes that are there, and
    /// stops when `go_on` returns false. Returns whether all bytes were read. Fails where the
    /// memory cannot be read, and where the owner has ended. The caller still has to check whether
    /// the owner's promise holds.
    ///
    /// # Safety
    /// `to` is writable for `bytes` bytes, and nobody else uses them.
    pub(crate) unsafe fn read_from(
        &self,
        owner: usize,
        from: u64,
        to: *mut u8,
        bytes: usize,
        mut go_on: impl FnMut(usize) -> bool,
    ) -> Result<bool, Refusal> {
        let source = self.source(owner);
        let mut done = 0;
        while done < bytes {
            let piece = PIECE.min(bytes - done);
            // SAFETY: this function's contract.
            let read = unsafe { source.read(from.wrapping_add(done as u64), to.add(done), piece) };
            if let Err(refusal) = read {
                if refusal == Refusal::Forbidden {
                    self.forbid_loans();
                }
                return Err(refusal);
            }
            done += piece;
            if done < bytes && !go_on(done) {
                return Ok(false);
            }
        }
        match self.has_ended(owner) {
            true => Err(Refusal::Gone),
            false => Ok(true),
        }
    }

    /// Whether the process of the rank with that seat has ended.
    fn has_ended(&self, seat: usize) -> bool {
        let Some(id) = self.segment.process(seat).filter(|id| id.pid != self.own_process.pid) else { return false };
        let process = self.peer_processes[seat].get_or_init(|| Process::watch(id));
        Process::first_dead(std::slice::from_ref(process)).is_some()
    }
}
