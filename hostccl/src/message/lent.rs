//! Messages that the receiver reads from the sender's memory.
//!
//! The sender writes the header, which has the address of its buffer, and waits. The receiver
//! reads the message piece by piece, then answers in the channel's word `lent`, and takes the
//! header out of the ring. If the receiver cannot read, the sender sends the message through the
//! ring.

use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::copy_cost;
use crate::error::Result;
use crate::peer_memory::{self, Refusal};
use crate::segment::Fate;
use crate::types::ncclInvalidArgument;

/// How often a receiver tells the waiting sender that the read makes progress. Each time, the
/// sender's deadline begins anew.
const TOLD: Duration = Duration::from_millis(10);

/// Lends the buffer of a message of `bytes` bytes to the receiver, if the receiver should read it
/// there. Returns whether it is lent.
#[inline]
pub(super) fn lend(comm: &Comm, receiver: usize, bytes: usize) -> bool {
    let is_lent = copy_cost::pays_for_message(bytes, || comm.is_crowded()) && comm.lends();
    if is_lent {
        comm.segment.channel(comm.rank, receiver).lent.lend();
    }
    is_lent
}

/// Takes the receiver's answer, once the receiver has taken the header out of the ring. Returns
/// whether the receiver has the message. Otherwise the message has to go through the ring. Fails
/// when the receiver could not read memory at the address `from`, and this rank cannot either.
#[cold]
pub(super) fn hear(comm: &Comm, receiver: usize, from: *const u8, bytes: usize) -> Result<bool> {
    let at = from.addr() as u64;
    match comm.segment.channel(comm.rank, receiver).lent.fate() {
        Fate::Taken => Ok(true),
        Fate::Unreadable if !peer_memory::is_readable(at, bytes) => {
            let message = format!(
                "{} sends {bytes} bytes from address {at:#x} to {}, where not all of this memory can be read: it is not mapped, or its protection forbids it",
                comm.label(comm.rank),
                comm.label(receiver)
            );
            Err(comm.fail(ncclInvalidArgument, Blame::of([comm.rank]), &message))
        }
        _ => Ok(false),
    }
}

/// Reads a message of `bytes` bytes at the address `at` of the sender's memory, and answers.
/// Returns how many bytes of the message are there: all, or none where the message comes through
/// the ring. Returns `None` when the sender has given up, and fails when the communicator has
/// failed.
///
/// # Safety
/// `to` is writable for `bytes` bytes, and nobody else uses them.
#[cold]
pub(super) unsafe fn take(comm: &Comm, sender: usize, at: u64, to: *mut u8, bytes: usize) -> Result<Option<usize>> {
    let channel = comm.segment.channel(sender, comm.rank);
    if channel.lent.fate() != Fate::Open {
        return Ok(None);
    }
    let mut told = Instant::now();
    let go_on = |_| {
        if told.elapsed() >= TOLD {
            told = Instant::now();
            channel.order.change();
        }
        comm.check().is_ok()
    };
    let read = match comm.lends() && comm.reads_peers() {
        // SAFETY: this function's contract.
        true => unsafe { comm.read_from(sender, at, to, bytes, go_on) },
        false => Err(Refusal::Forbidden),
    };
    let (fate, done) = match read {
        Ok(true) => (Fate::Taken, bytes),
        Ok(false) => return comm.check().map(|()| None),
        Err(Refusal::Unreadable) => (Fate::Unreadable, 0),
        Err(Refusal::Forbidden | Refusal::Gone) => (Fate::Refused, 0),
    };
    Ok(channel.lent.settle(fate).then_some(done))
}
