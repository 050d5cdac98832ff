//! The first page of a segment, to which all ranks write. The parts that change are made of atomics
//! only.

use super::steps::Steps;
use crate::blame::Blame;
use crate::cut::{MESSAGE_BYTES, cut};
use crate::error::Error;
use crate::event::{BELLS, Event};
use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use crate::types::ncclResult_t;

/// The first page of a segment, which all ranks share.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Header {
    /// The mark of a segment.
    pub(super) magic: u64,
    /// The version of the layout.
    pub(super) version: u32,
    /// The number of ranks; 0 until the first rank has mapped the segment.
    nranks: AtomicU32,
    /// The ranks whose calls name this number of ranks, as bits.
    pub(super) came: RankBits,
    /// The ranks whose calls name another number of ranks, as bits.
    pub(super) differ: RankBits,
    /// The random number that tells this segment from others.
    pub(super) token: [u8; 16],
    /// In a segment made by a split: the number `among` of [`Layout::split`](super::Layout::split).
    /// 0 in other segments.
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
    /// The steps of the collectives.
    pub(crate) steps: Steps,
    /// Changes when a rank has one more call in its [`Seat::wanted`].
    pub(crate) wants: Event,
    /// The last step in which seat 0 of this host has decided which name goes first.
    pub(crate) verdict: Event,
    /// The tag of the name that seat 0 has decided on. This tag is set before `verdict`.
    pub(crate) verdict_tag: AtomicU64,
    /// How many ranks have freed their communicators.
    pub(crate) departures: AtomicU32,
    /// The doorbells of the ranks.
    pub(crate) bells: [Event; BELLS],
}

/// The first failure of a segment. Later failures are not written.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Failure {
    /// 0 when there is no failure, 1 while a rank writes it, 2 when it can be read.
    state: AtomicU32,
    /// NCCL's code.
    code: AtomicI32,
    /// The ranks to blame, as bits.
    ranks: RankBits,
    /// The ranks to blame whose processes have ended, as bits.
    lost: RankBits,
    /// The message. It is cut where it has more than [`MESSAGE_BYTES`] bytes.
    text: Text<{ MESSAGE_BYTES / 8 }>,
    /// The call that was under way on the rank that wrote the failure down; empty when there was
    /// none.
    call: Text<40>,
}

/// A set of ranks: bit r of the words stands for rank r.
#[repr(C)]
#[derive(Default)]
pub(crate) struct RankBits([AtomicU64; RankBits::RANKS / 64]);

impl RankBits {
    /// How many ranks a set has room for.
    pub(super) const RANKS: usize = 1024;

    /// Adds ranks.
    pub(super) fn set(&self, ranks: &[usize]) {
        for rank in ranks.iter().filter(|rank| **rank < RankBits::RANKS) {
            self.0[rank / 64].fetch_or(1 << (rank % 64), Ordering::Relaxed);
        }
    }

    /// Returns the ranks in ascending order.
    pub(super) fn get(&self) -> Vec<usize> {
        let is_in = |rank: &usize| self.0[rank / 64].load(Ordering::Relaxed) >> (rank % 64) & 1 == 1;
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

impl<const WORDS: usize> Default for Text<WORDS> {
    fn default() -> Text<WORDS> {
        Text { length: AtomicU32::default(), words: std::array::from_fn(|_| AtomicU64::default()) }
    }
}

impl<const WORDS: usize> Text<WORDS> {
    /// Keeps as much of `text` as there is room for. A text that is cut ends with an ellipsis.
    fn set(&self, text: &str) {
        let kept = cut(text, WORDS * 8);
        for (word, bytes) in self.words.iter().zip(kept.as_bytes().chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
        }
        self.length.store(kept.len() as u32, Ordering::Relaxed);
    }

    fn get(&self) -> String {
        let length = (self.length.load(Ordering::Relaxed) as usize).min(WORDS * 8);
        let mut bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Failure {
    /// Records a failure unless there is one. Returns whether it has recorded this failure.
    fn set(&self, code: ncclResult_t, blame: &Blame, message: &str, call: &str) -> bool {
        if !self.begin() {
            return false;
        }
        self.text.set(message);
        self.call.set(call);
        self.code.store(code, Ordering::Relaxed);
        self.ranks.set(&blame.ranks);
        self.lost.set(&blame.lost);
        self.state.store(2, Ordering::Release);
        true
    }

    /// Claims the right to write the failure. Returns whether the caller has the right; otherwise
    /// another rank has it.
    pub(crate) fn begin(&self) -> bool {
        self.state.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
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
    /// Decides the number of ranks. Returns the number in `Err` if another rank has decided it
    /// before, even if that number equals `nranks`.
    pub(super) fn agree(&self, nranks: u32) -> Result<(), u32> {
        self.nranks.compare_exchange(0, nranks, Ordering::Relaxed, Ordering::Relaxed).map(|_| ())
    }

    /// Returns the number of ranks once all of them have arrived.
    pub(super) fn started(&self) -> Option<u32> {
        // Each rank has set or read `nranks` before it counts itself in `arrived`. A thread that
        // sees that all ranks have arrived sees what each of them has written.
        let arrived = self.arrived.value();
        let nranks = self.nranks.load(Ordering::Relaxed);
        (nranks != 0 && arrived == nranks).then_some(nranks)
    }

    /// Counts in a rank that has taken its seat. `nranks` is the number of ranks. Wakes the ranks
    /// that wait for the others, if this rank is the last one.
    pub(crate) fn arrive(&self, nranks: usize) {
        if self.arrived.count() as usize == nranks {
            self.arrived.wake();
        }
    }

    /// Ends the segment for every rank, unless an earlier failure has ended it. `call` describes
    /// the call in which this rank met the failure; it is empty outside of a call. Returns whether
    /// this failure has ended the segment. The other ranks then read its message, which may be cut.
    pub(crate) fn fail(&self, code: ncclResult_t, blame: &Blame, message: &str, call: &str) -> bool {
        let is_first = self.failure.set(code, blame, message, call);
        self.alarm.set(1);
        self.arrived.wake();
        self.steps.ended.wake();
        self.wants.wake();
        self.verdict.wake();
        is_first
    }
}
