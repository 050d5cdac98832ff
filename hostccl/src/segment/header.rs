//! The parts of a segment that all ranks write to: atomics only.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::call_name::{NAME_BYTES, Name};
use crate::error::Error;
use crate::event::Event;
use crate::types::ncclResult_t;

/// What all ranks of a segment share from the start.
#[repr(C)]
pub(crate) struct Header {
    pub(super) magic: u64,
    pub(super) version: u32,
    /// 0 until the first rank comes.
    pub(crate) nranks: AtomicU32,
    pub(super) token: [u8; 16],
    pub(crate) failure: Failure,
    /// Changes when the segment fails.
    pub(crate) alarm: Event,
    /// The ranks that have mapped the segment.
    pub(crate) arrived: Event,
    /// The ranks that have ended the current step.
    pub(crate) barrier_count: Event,
    /// The steps that all ranks have ended.
    pub(crate) barrier: Event,
    /// Changes when a rank has one more call in its [`Seat::wanted`].
    pub(crate) wants: Event,
    /// The last step in which rank 0 decided whose turn it is.
    pub(crate) verdict: Event,
    /// The tag of the call whose turn it is then; set before `verdict`.
    pub(crate) verdict_tag: AtomicU64,
}

/// The first failure of a segment; the first writer wins.
#[repr(C)]
pub(crate) struct Failure {
    /// 0 none, 1 being written, 2 there.
    state: AtomicU32,
    code: AtomicI32,
    /// The rank found dead, gone or late; -1 none.
    rank: AtomicI32,
    text: Text<64>,
    /// The call that was under way on the rank that wrote the failure down; empty when there was none.
    call: Text<40>,
}

/// A text of at most `8 * WORDS` bytes, written once.
#[repr(C)]
struct Text<const WORDS: usize> {
    /// In bytes.
    length: AtomicU32,
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

/// One rank's place.
#[repr(C, align(64))]
pub(crate) struct Seat {
    /// 0 free, 1 taken, 2 `pid` and `start` are there.
    pub(crate) claim: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) start: AtomicU64,
    /// 1 once the rank has freed its communicator.
    pub(crate) left: AtomicU32,
    /// Where this rank has put the segment of a communicator that it has shrunk this one to.
    pub(crate) offer: Offer,
    /// The tags of the collectives in which this rank's threads are or wait, where several are; 0: free.
    pub(crate) wanted: [AtomicU64; 16],
    /// The steps this rank has ended, on a line of its own.
    pub(crate) step: Event,
}

/// A new segment held open by the rank whose seat this lies in, for those that shrink the communicator with it.
#[repr(C)]
pub(crate) struct Offer {
    pub(crate) fd: AtomicI32,
    /// Of the ranks that are left out; 0 when it is withdrawn.
    pub(crate) digest: AtomicU64,
    pub(crate) token: [AtomicU64; 2],
    /// How many offers there were; set last.
    pub(crate) number: Event,
}

/// The counters of one ordered pair of ranks, in bytes, wrapping.
#[repr(C)]
pub(crate) struct Channel {
    /// Bytes written by the sender.
    pub(crate) head: Event,
    /// Bytes taken by the receiver.
    pub(crate) tail: Event,
    /// The name under which the receiver waits while the next message has another one; tag 0: none.
    pub(crate) expects: Expected,
}

/// A [`Name`] that both sides of a channel can look at.
#[repr(C)]
pub(crate) struct Expected {
    tag: AtomicU64,
    text: [AtomicU64; NAME_BYTES / 8],
}

impl Expected {
    pub(crate) fn set(&self, name: &Name) {
        for (word, bytes) in self.text.iter().zip(name.text.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        self.tag.store(name.tag, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        if self.tag.load(Ordering::Relaxed) != 0 {
            self.tag.store(0, Ordering::Release);
        }
    }

    pub(crate) fn name(&self) -> Option<Name> {
        let tag = self.tag.load(Ordering::Acquire);
        let mut text = [0; NAME_BYTES];
        for (word, bytes) in self.text.iter().zip(text.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        (tag != 0).then_some(Name { tag, text })
    }
}

impl Failure {
    /// Records a failure unless there is one.
    fn set(&self, code: ncclResult_t, rank: Option<u32>, message: &str, call: &str) {
        if !self.begin() {
            return;
        }
        self.text.set(message);
        self.call.set(call);
        self.code.store(code, Ordering::Relaxed);
        self.rank.store(rank.map_or(-1, |rank| rank as i32), Ordering::Relaxed);
        self.state.store(2, Ordering::SeqCst);
    }

    /// Whether the caller is the one to write it down.
    pub(crate) fn begin(&self) -> bool {
        self.state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Whether there is one: one load.
    pub(crate) fn is_set(&self) -> bool {
        self.state.load(Ordering::Acquire) == 2
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.is_set().then(|| {
            let rank = usize::try_from(self.rank.load(Ordering::Relaxed)).ok();
            Error::new(self.code.load(Ordering::Relaxed), self.text.get()).by(rank)
        })
    }

    /// The call that was under way on the rank that wrote the failure down, where there was one.
    pub(crate) fn call(&self) -> Option<String> {
        self.is_set().then(|| self.call.get()).filter(|call| !call.is_empty())
    }
}

impl Header {
    /// Ends the segment for every rank, unless something else has. `call` is what the rank that says so was doing, or empty.
    pub(crate) fn fail(&self, code: ncclResult_t, rank: Option<u32>, message: &str, call: &str) {
        self.failure.set(code, rank, message, call);
        self.alarm.set(1);
        self.arrived.wake();
        self.barrier.wake();
        self.wants.wake();
        self.verdict.wake();
    }
}
