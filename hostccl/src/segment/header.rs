//! The parts of a segment to which several ranks write. These parts are made of atomics only.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

use crate::blame::Blame;
use crate::call_name::{NAME_BYTES, Name};
use crate::crowd::Processors;
use crate::error::Error;
use crate::event::{BELLS, Event};
use crate::types::ncclResult_t;

/// The first page of a segment, which all ranks share.
#[repr(C)]
pub(crate) struct Header {
    /// The mark of a segment.
    pub(super) magic: u64,
    /// The version of the layout.
    pub(super) version: u32,
    /// The number of ranks; 0 until the first rank has mapped the segment.
    pub(crate) nranks: AtomicU32,
    /// The ranks whose calls name this number of ranks, as bits.
    pub(super) came: RankBits,
    /// The ranks whose calls name another number of ranks, as bits.
    pub(super) differ: RankBits,
    /// The random number that tells this segment from others.
    pub(super) token: [u8; 16],
    /// How many ranks of this machine belong to the communicator from whose split this segment
    /// comes, and 0 where it comes from no split. See [`Layout::split`](super::Layout::split).
    pub(super) among: u32,
    /// In the segment of a unique id, 1 means that the ranks have to leave the segment and
    /// register with the id's maker, and 2 means that the communicator which they made in this way
    /// has been started. In the segment of a communicator that a shrink over several hosts makes,
    /// 3 means that all ranks of all hosts have joined. The value is 0 otherwise.
    pub(super) moved: AtomicU32,
    /// The number of the communicator, if a shrink over several hosts makes the communicator.
    pub(super) comm: AtomicU64,
    /// The failure that ended the segment.
    pub(crate) failure: Failure,
    /// Changes when the segment fails.
    pub(crate) alarm: Event,
    /// How many ranks have mapped the segment.
    pub(crate) arrived: Event,
    /// How many ranks have ended the current step.
    pub(crate) barrier_count: Event,
    /// How many steps all ranks have ended.
    pub(crate) barrier: Event,
    /// Changes when a rank has one more call in its [`Seat::wanted`].
    pub(crate) wants: Event,
    /// The last step in which rank 0 has decided which name goes first.
    pub(crate) verdict: Event,
    /// The tag of the name that rank 0 has decided on. This tag is set before `verdict`.
    pub(crate) verdict_tag: AtomicU64,
    /// The doorbells of the ranks.
    pub(crate) bells: [Event; BELLS],
}

/// The first failure of a segment. Later failures are not written.
#[repr(C)]
pub(crate) struct Failure {
    /// 0 when there is no failure, 1 while a rank writes it, 2 when it can be read.
    state: AtomicU32,
    /// NCCL's code.
    code: AtomicI32,
    /// The ranks to blame, as bits.
    ranks: RankBits,
    /// The ranks to blame whose processes have ended, as bits.
    lost: RankBits,
    /// The message.
    text: Text<64>,
    /// The call that was under way on the rank that wrote the failure down; empty when there was
    /// none.
    call: Text<40>,
}

/// A set of ranks: bit r of the words stands for rank r.
#[repr(C)]
pub(crate) struct RankBits([AtomicU64; RankBits::RANKS / 64]);

impl RankBits {
    /// How many ranks a set has room for.
    pub(super) const RANKS: usize = 1024;

    /// Adds ranks.
    pub(super) fn set(&self, ranks: &[usize]) {
        for rank in ranks.iter().filter(|rank| **rank < RankBits::RANKS) {
            self.0[rank / 64].fetch_or(1 << (rank % 64), Ordering::AcqRel);
        }
    }

    /// Returns the ranks in ascending order.
    pub(super) fn get(&self) -> Vec<usize> {
        let is_in = |rank: &usize| self.0[rank / 64].load(Ordering::Acquire) >> (rank % 64) & 1 == 1;
        (0..RankBits::RANKS).filter(is_in).collect()
    }
}

/// A text of at most `8 * WORDS` bytes, written once.
#[repr(C)]
struct Text<const WORDS: usize> {
    /// The length in bytes.
    length: AtomicU32,
    /// The bytes, padded with zeros.
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Text<WORDS> {
    /// Keeps as much of `text` as there is room for.
    fn set(&self, text: &str) {
        let mut end = text.len().min(WORDS * 8);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for (word, bytes) in self.words.iter().zip(text.as_bytes()[..end].chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
        }
        self.length.store(end as u32, Ordering::Relaxed);
    }

    fn get(&self) -> String {
        let length = (self.length.load(Ordering::Relaxed) as usize).min(WORDS * 8);
        let mut bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The part of the segment in which one rank tells the others about itself.
#[repr(C, align(64))]
pub(crate) struct Seat {
    /// 0 while the seat is free, 1 when a process has taken it, 2 when `pid` and `start` can be
    /// read.
    pub(crate) claim: AtomicU32,
    /// The number of the rank's process.
    pub(crate) pid: AtomicU32,
    /// The start time of the rank's process, which tells it from a later one of that number.
    pub(crate) start: AtomicU64,
    /// The processors on which the rank may run. They are set before `claim` becomes 2.
    pub(crate) processors: Processors,
    /// 1 once the rank has freed its communicator.
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
}

/// A new segment, which the rank of this seat holds open for the ranks that shrink the
/// communicator together with that rank.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Offer {
    /// The segment's descriptor in the rank's process.
    fd: AtomicI32,
    /// The checksum of the set of excluded ranks; 0 when the rank holds the segment open no
    /// longer.
    pub(crate) digest: AtomicU64,
    /// The segment's token.
    token: [AtomicU64; 2],
    /// Twice the number of such segments that this rank has made. The number is odd while the rank
    /// writes the next offer.
    pub(crate) number: Event,
}

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

    /// Returns the number, descriptor and token of the offered segment. Returns `None` where the
    /// offer has the number `taken`, is for another set of ranks, or changes at this moment.
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

/// The state of the messages from one rank to another. The counters are in bytes and wrap.
#[repr(C)]
pub(crate) struct Channel {
    /// How many bytes the sender has written.
    pub(crate) head: Event,
    /// How many bytes the receiver has taken.
    pub(crate) tail: Event,
    /// Changes when one more call of either side waits for its turn at this channel, when the
    /// receiver has written `expects`, and when the sender has taken back its message.
    pub(crate) order: Event,
    /// The messages for which the receiver waits, while the message in the ring is for none of its
    /// calls.
    pub(crate) expects: Expected,
}

/// The names of the receives that wait at a channel whose message has another name.
///
/// The word `state` also says who may touch the message in the ring. While it is 0, the receiver
/// may read the message, and the sender may not take it back. While it holds a tag, the receiver
/// leaves the message alone, and the sender may take it back. While it is [`TAKING_BACK`], the
/// sender takes its message back, and the receiver waits.
#[repr(C)]
pub(crate) struct Expected {
    /// 0, the tag of the receive that is inside the place, or [`TAKING_BACK`].
    state: AtomicU64,
    /// The text of the name of the receive that is inside the place, for messages.
    text: [AtomicU64; NAME_BYTES / 8],
    /// The tags of the receives that wait behind the receive that is inside the place, as many as
    /// there is room for; 0 in a free cell.
    waiting: [AtomicU64; 15],
}

/// The state of [`Expected`] while the sender takes back its message. No name has this tag.
const TAKING_BACK: u64 = u64::MAX;

impl Expected {
    /// Tells the sender the names under which the receiver waits, and lets the sender take back
    /// its message. The receiver calls this.
    pub(crate) fn publish(&self, name: &Name, waiting: impl Iterator<Item = u64>) {
        for (word, bytes) in self.text.iter().zip(name.text.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        for (cell, tag) in self.waiting.iter().zip(waiting.chain(std::iter::repeat(0))) {
            cell.store(tag, Ordering::Relaxed);
        }
        self.state.store(name.tag, Ordering::Release);
    }

    /// Whether a receive has told the sender what it waits for, or the sender takes its message
    /// back. This check costs one load.
    #[inline]
    pub(crate) fn is_in_use(&self) -> bool {
        self.state.load(Ordering::Acquire) != 0
    }

    /// Forbids the sender to take back its message. Returns whether the receiver may touch the
    /// message now; it may not while the sender is just taking the message back. The receiver
    /// calls this.
    #[inline]
    pub(crate) fn withdraw(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state == 0 || state != TAKING_BACK && self.exchange(state, 0)
    }

    /// Begins to take back the message if the receiver waits under a name for whose tag `has_call`
    /// returns true. Returns that name's tag. The sender calls this, and
    /// [`took_back`](Expected::took_back) afterwards.
    pub(crate) fn take_back(&self, has_call: impl Fn(u64) -> bool) -> Option<u64> {
        let state = self.state.load(Ordering::Acquire);
        if state == 0 {
            return None;
        }
        // The receiver may change the cells meanwhile. A name under which nobody waits any more
        // does no harm: the receiver then only finds once more that the message has another name.
        let waiting = self.waiting.iter().map(|cell| cell.load(Ordering::Relaxed)).filter(|tag| *tag != 0);
        let tag = std::iter::once(state).chain(waiting).find(|tag| has_call(*tag))?;
        self.exchange(state, TAKING_BACK).then_some(tag)
    }

    /// Ends what [`take_back`](Expected::take_back) began: the receiver may look at the ring
    /// again.
    pub(crate) fn took_back(&self) {
        self.state.store(0, Ordering::Release);
    }

    fn exchange(&self, from: u64, to: u64) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns the name of the receive that is inside, while the message in the ring has another
    /// name.
    pub(crate) fn name(&self) -> Option<Name> {
        let tag = self.state.load(Ordering::Acquire);
        let mut text = [0; NAME_BYTES];
        for (word, bytes) in self.text.iter().zip(text.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        (tag != 0 && tag != TAKING_BACK).then_some(Name { tag, text })
    }
}

impl Failure {
    /// Records a failure unless there is one.
    fn set(&self, code: ncclResult_t, blame: &Blame, message: &str, call: &str) {
        if !self.begin() {
            return;
        }
        self.text.set(message);
        self.call.set(call);
        self.code.store(code, Ordering::Relaxed);
        self.ranks.set(&blame.ranks);
        self.lost.set(&blame.lost);
        self.state.store(2, Ordering::SeqCst);
    }

    /// Claims the right to write the failure. Returns whether the caller has the right; otherwise
    /// another rank has it.
    pub(crate) fn begin(&self) -> bool {
        self.state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Whether the segment has failed. This check costs one load.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.state.load(Ordering::Acquire) == 2
    }

    /// Returns the failure, or `None` when there is none.
    pub(crate) fn error(&self) -> Option<Error> {
        self.is_set().then(|| {
            let blame = Blame { ranks: self.ranks.get(), lost: self.lost.get() };
            Error::new(self.code.load(Ordering::Relaxed), self.text.get()).by(blame)
        })
    }

    /// The call that was under way on the rank that wrote the failure down, where there was one.
    pub(crate) fn call(&self) -> Option<String> {
        self.is_set().then(|| self.call.get()).filter(|call| !call.is_empty())
    }
}

impl Header {
    /// Ends the segment for every rank, unless an earlier failure has ended it. `call` describes
    /// the call in which this rank met the failure; it is empty outside of a call.
    pub(crate) fn fail(&self, code: ncclResult_t, blame: &Blame, message: &str, call: &str) {
        self.failure.set(code, blame, message, call);
        self.alarm.set(1);
        self.arrived.wake();
        self.barrier.wake();
        self.wants.wake();
        self.verdict.wake();
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
}
