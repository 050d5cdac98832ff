//! The seat of a rank: what one rank writes, and the others read. The seat consists of atomics,
//! and of the bytes beside them ([`Event::beside`]).

use crate::crowd::Processors;
use crate::event::{Event, LoneEvent};
use crate::process::ProcessId;
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

/// The part of the segment in which one rank tells the others about itself.
#[repr(C, align(64))]
#[derive(Default)]
pub(crate) struct Seat {
    /// 0 while the seat is free, 1 when a process has taken it, 2 when `pid` and `start` can be
    /// read.
    pub(crate) claim: AtomicU32,
    /// The number of the rank's process.
    pub(crate) pid: AtomicU32,
    /// The start time of the rank's process, which tells the process from a later process with the
    /// same number.
    pub(crate) start: AtomicU64,
    /// The processors on which the rank may run. They are set before `claim` becomes 2.
    pub(crate) processors: Processors,
    /// 0 until the rank has freed its communicator. Afterwards the value is 1 if this rank was the
    /// first one to do so, 2 if it was the second one, and so on.
    pub(crate) left: AtomicU32,
    /// A number that is odd while this rank waits for other ranks and has waited for a moment. A
    /// rank that waits changes the number again and again, so that a rank that was stopped inside
    /// a wait does not look as if it still waited. The number is a hint for diagnoses, and only
    /// communicators over several hosts use it.
    pub(crate) waits: AtomicU32,
    /// How many milliseconds this rank, or a rank for which it waits, would still wait before it
    /// blames another rank. The value is from the time when this rank last changed `waits`.
    pub(crate) waits_millis: AtomicU32,
    /// The number, plus one, of the step for which this rank last posted its call. Only seat 0 of
    /// a communicator over several hosts writes this number. Seat 0 ends a step after all other
    /// ranks of its host, so `step` does not tell that seat 0 has begun a call.
    pub(crate) posted: AtomicU32,
    /// Where this rank has put the segment of the communicator to which it shrinks this one.
    pub(crate) offer: Offer,
    /// The tags of the collectives that threads of this rank are inside or wait to enter, where
    /// there are several such collectives; 0 in a free cell.
    pub(crate) wanted: [AtomicU64; 16],
    /// How many steps this rank has ended. The word has a cache line of its own.
    pub(crate) step: Event,
    /// The numbers of the last steps that this rank has ended, in a communicator of two ranks on
    /// one host. One word has the even numbers, and the other word the odd ones. The data that this
    /// rank hands over lies beside the word. The other rank reads the data before that rank ends
    /// its next step. Only afterwards does this rank write again to the word and beside the word.
    ends: [LoneEvent; 2],
}

impl Seat {
    /// Takes the seat for the process `me`, and notes the processors on which the calling thread
    /// may run. Fails with the number of the process that has the seat already, or with 0 while
    /// that process has not yet written its number.
    pub(crate) fn take(&self, me: ProcessId) -> Result<(), u32> {
        if self.claim.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Acquire).is_err() {
            return Err(self.pid.load(Ordering::Relaxed));
        }
        self.pid.store(me.pid, Ordering::Relaxed);
        self.start.store(me.start, Ordering::Relaxed);
        self.processors.set_own();
        self.claim.store(2, Ordering::Release);
        Ok(())
    }

    /// Returns the word to which this rank writes `step` when it has ended that step.
    pub(crate) fn end_of(&self, step: u64) -> &Event {
        &self.ends[(step % 2) as usize]
    }

    /// Returns the process that has taken the seat, or `None` while none has.
    pub(crate) fn process(&self) -> Option<ProcessId> {
        (self.claim.load(Ordering::Acquire) == 2)
            .then(|| ProcessId { pid: self.pid.load(Ordering::Relaxed), start: self.start.load(Ordering::Relaxed) })
    }
}

/// A new segment, which the rank of this seat holds open for the ranks that shrink the
/// communicator together with that rank; or that rank's refusal to shrink it with them.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Offer {
    /// The segment's descriptor in the rank's process. A negative value is a refusal: its absolute
    /// value is the code of the error that keeps the rank from joining a new segment.
    fd: AtomicI32,
    /// The checksum of the set of excluded ranks; 0 when the rank holds the segment open no
    /// longer.
    pub(crate) digest: AtomicU64,
    /// The segment's token. In a refusal, the first word is the number of the refused attempt.
    token: [AtomicU64; 2],
    /// Twice the number of such segments and refusals that this rank has written. The number is odd
    /// while the rank writes the next one.
    pub(crate) number: Event,
}

/// A number that no offer has, because it is odd.
const NOT_TAKEN: u32 = 1;

impl Offer {
    /// Offers a segment. Only the rank of this seat calls this.
    pub(crate) fn write(&self, digest: u64, fd: i32, token: [u8; 16]) {
        let number = self.number.value();
        self.number.store(number.wrapping_add(1));
        // A reader that sees any of the values below sees the odd number, too.
        fence(Ordering::Release);
        self.fd.store(fd, Ordering::Relaxed);
        self.digest.store(digest, Ordering::Relaxed);
        for (word, bytes) in self.token.iter().zip(token.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        self.number.set(number.wrapping_add(2));
    }

    /// Says that the rank of this seat cannot join the other ranks in its attempt of this number,
    /// because of an error with this code. This needs no descriptor. Only the rank of this seat
    /// calls this.
    pub(crate) fn refuse(&self, digest: u64, attempt: u64, code: i32) {
        let mut token = [0; 16];
        token[..8].copy_from_slice(&attempt.to_ne_bytes());
        self.write(digest, -code.max(1), token);
    }

    /// Returns the number of the attempt that the rank of this seat has refused, and the code of
    /// the error. Returns `None` where there is no refusal, and where [`read`](Offer::read) would.
    pub(crate) fn refusal(&self, digest: u64) -> Option<(u64, i32)> {
        let (_, fd, token) = self.read(NOT_TAKEN, digest)?;
        (fd < 0).then(|| (u64::from_ne_bytes(token[..8].try_into().expect("eight bytes")), -fd))
    }

    /// Returns the number, descriptor and token of the offered segment. The descriptor is negative
    /// where the rank refuses. Returns `None` where the offer has the number `taken`, is for
    /// another set of ranks, or changes at this moment.
    pub(crate) fn read(&self, taken: u32, digest: u64) -> Option<(u32, i32, [u8; 16])> {
        let number = self.number.value();
        if number == taken || number % 2 == 1 || self.digest.load(Ordering::Relaxed) != digest {
            return None;
        }
        let mut token = [0; 16];
        for (word, bytes) in self.token.iter().zip(token.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let fd = self.fd.load(Ordering::Relaxed);
        // The values above belong together unless the number has changed meanwhile.
        fence(Ordering::Acquire);
        (self.number.value() == number && self.digest.load(Ordering::Relaxed) == digest).then_some((number, fd, token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_that_changes_while_it_is_read_is_not_taken() {
        const OFFERS: i32 = 300_000;
        let offer = Offer::default();
        std::thread::scope(|scope| {
            // Two of three offers are for the set of ranks that the reader looks for.
            scope.spawn(|| (1..=OFFERS).for_each(|fd| offer.write((fd % 3).min(1) as u64, fd, [fd as u8; 16])));
            let mut last = 0;
            while last != OFFERS - 1 {
                if let Some((number, fd, token)) = offer.read(0, 1) {
                    assert_eq!((number, token), (2 * fd as u32, [fd as u8; 16]), "offer {fd}");
                    assert!(fd >= last && fd % 3 != 0, "offer {fd} after {last}");
                    last = fd;
                }
                if offer.number.value() == 2 * OFFERS as u32 {
                    break;
                }
            }
        });
        assert_eq!(offer.read(2 * OFFERS as u32, 0), None, "the offer is taken");
    }

    #[test]
    fn a_refusal_is_taken_once_and_hides_the_offer_before_it() {
        let offer = Offer::default();
        offer.write(1, 5, [5; 16]);
        assert_eq!(offer.refusal(1), None);
        offer.refuse(1, 7, 2);
        assert_eq!((offer.refusal(1), offer.refusal(2)), (Some((7, 2)), None));
    }
}
