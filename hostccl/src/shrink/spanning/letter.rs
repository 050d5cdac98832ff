//! The letters between the root and another leader of a shrink.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::cut::cut;
use crate::error::{Error, Result};
use crate::gathering::span_of;
use crate::types::*;
use crate::wire::request::Transfer;
use crate::wire::{Broken, Peer, Tag, Wire};

/// The longest letter, in bytes.
const LETTER_BYTES: usize = 512;
/// How many ranks a letter about a failure blames at most.
const MOST_BLAMED: usize = 16;
/// How long a letter about a failure may take to go.
const FLUSH_TIME: Duration = Duration::from_millis(50);
/// The stream of a shrink's letters is this number XOR the checksum of the set of excluded ranks.
/// The bit [`Tag::LETTER`] tells letters from other messages.
const STREAM: u64 = 0x7368_7269_6e6b_0000;

/// A letter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Letter {
    /// A leader greets the root. The number is that of the leader's attempt.
    Hello { nonce: u64 },
    /// The root answers the attempt `nonce` of a leader with the new communicator's number.
    Welcome { nonce: u64, number: u64 },
    /// The ranks of the leader's host have joined the communicator of that number.
    Confirm { number: u64 },
    /// All ranks have joined the communicator of that number.
    Go { number: u64 },
    /// The shrink has failed. `attempt` is the number of the leader's attempt.
    Failed { attempt: u64, error: Error },
}

impl Letter {
    fn encode(&self) -> Vec<u8> {
        let (kind, numbers) = match self {
            Letter::Hello { nonce } => (1, [*nonce, 0]),
            Letter::Welcome { nonce, number } => (2, [*nonce, *number]),
            Letter::Confirm { number } => (3, [*number, 0]),
            Letter::Go { number } => (4, [*number, 0]),
            Letter::Failed { attempt, error } => (5, [*attempt, error.code() as u64]),
        };
        let mut out = vec![kind];
        numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        if let Letter::Failed { error, .. } = self {
            for ranks in [&error.blame().ranks, &error.blame().lost] {
                let ranks = &ranks[..ranks.len().min(MOST_BLAMED)];
                out.push(ranks.len() as u8);
                ranks.iter().for_each(|rank| out.extend_from_slice(&(*rank as u32).to_le_bytes()));
            }
            let room = LETTER_BYTES - out.len();
            out.extend_from_slice(cut(error.message(), room).as_bytes());
        }
        out
    }

    /// Reads a letter. Returns `None` for bytes that are no letter. `nranks` is the number of ranks
    /// of the parent.
    fn decode(bytes: &[u8], nranks: usize) -> Option<Letter> {
        let (kind, rest) = bytes.split_first()?;
        let (first, rest) = rest.split_first_chunk::<8>()?;
        let (second, mut rest) = rest.split_first_chunk::<8>()?;
        let (first, second) = (u64::from_le_bytes(*first), u64::from_le_bytes(*second));
        Some(match kind {
            1 => Letter::Hello { nonce: first },
            2 => Letter::Welcome { nonce: first, number: second },
            3 => Letter::Confirm { number: first },
            4 => Letter::Go { number: first },
            5 => {
                let mut ranks = || {
                    let (count, after) = rest.split_first()?;
                    let (list, after) = after.split_at_checked(usize::from(*count) * 4)?;
                    rest = after;
                    let rank = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
                    let ranks: Vec<usize> = list.chunks_exact(4).map(rank).collect();
                    ranks.iter().all(|rank| *rank < nranks).then_some(ranks)
                };
                let blame = Blame { ranks: ranks()?, lost: ranks()? };
                let code = ncclResult_t::try_from(second).ok()?;
                let error = Error::new(failure_of_another(code), String::from_utf8_lossy(rest)).by(blame);
                Letter::Failed { attempt: first, error }
            }
            _ => return None,
        })
    }
}

/// Checks two things for arbitrary bytes in place of a letter. A letter that can be read is not
/// too long when it is written again, and no failure looks like a success.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_letter(bytes: &[u8]) {
    let Some(letter) = Letter::decode(bytes, 9) else { return };
    let again = letter.encode();
    assert!(again.len() <= LETTER_BYTES && Letter::decode(&again, 9).is_some(), "{letter:?}");
    if let Letter::Failed { error, .. } = letter {
        assert_eq!(failure_of_another(error.code()), error.code());
    }
}

/// The exchange of letters with one rank of another host.
pub(super) struct Post {
    /// The rank of the parent.
    pub(super) rank: usize,
    /// The rank's name in messages.
    label: String,
    /// The number of the rank's attempt, once it has greeted. Only the root uses it.
    pub(super) greeted: Option<u64>,
    /// At the root, this says whether the rank has confirmed. At another leader, this says whether
    /// the root has written that all ranks have joined.
    pub(super) confirmed: bool,
    /// The wire of this process.
    wire: Arc<dyn Wire>,
    /// The rank's process.
    peer: Peer,
    /// The tags of letters to the rank and from it.
    tags: [Tag; 2],
    /// The number of ranks of the parent.
    nranks: usize,
    /// The receive of the next letter. It is dropped before its buffer.
    receive: Option<Transfer>,
    /// The buffer of the next letter.
    buffer: Box<[u8; LETTER_BYTES]>,
    /// The letters that may not have gone, with their bytes. Each transfer is dropped before its
    /// bytes.
    sends: Vec<(Transfer, Box<[u8]>)>,
}

impl Post {
    /// Returns the exchange with `rank`, which is on another host, about a shrink of `parent`.
    /// `digest` is the checksum of the set of excluded ranks.
    pub(super) fn new(parent: &Comm, rank: usize, digest: u64) -> Post {
        let (span, stream) = (span_of(parent), STREAM ^ digest);
        Post {
            rank,
            label: parent.labels.rank(rank, None),
            greeted: None,
            confirmed: false,
            wire: span.wire.clone(),
            peer: span.peers[rank].expect("the rank is on another host"),
            tags: [span.to(rank, stream), span.from(rank, stream)]
                .map(|tag| Tag { from: tag.from | Tag::LETTER, ..tag }),
            nranks: span.nranks,
            receive: None,
            buffer: Box::new([0; LETTER_BYTES]),
            sends: Vec::new(),
        }
    }

    /// Begins to send a letter.
    pub(super) fn send(&mut self, letter: Letter) {
        self.has_sent();
        let bytes = letter.encode().into_boxed_slice();
        // SAFETY: the bytes live as long as the transfer, which is dropped before them.
        let send = unsafe { Transfer::send(&self.wire, self.peer, self.tags[0], bytes.as_ptr(), bytes.len()) };
        self.sends.push((send, bytes));
    }

    /// Whether all letters have gone, or cannot go.
    pub(super) fn has_sent(&mut self) -> bool {
        self.sends.retain_mut(|(send, _)| send.test() == Ok(None));
        self.sends.is_empty()
    }

    /// Waits until all letters have gone, for [`FLUSH_TIME`] at most.
    pub(super) fn flush(&mut self) {
        let end = Instant::now() + FLUSH_TIME;
        while !self.has_sent() && Instant::now() < end {
            self.wire.progress();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the next letter, or `None` while none has come. Fails when the rank is lost.
    pub(super) fn read(&mut self) -> Result<Option<Letter>> {
        let (wire, to) = (&self.wire, self.buffer.as_mut_ptr());
        let begin = || {
            // SAFETY: the buffer lives as long as the transfer, and nobody reads it before the
            // transfer has ended.
            unsafe { Transfer::recv(wire, self.peer, self.tags[1], to, LETTER_BYTES) }
        };
        match self.receive.get_or_insert_with(begin).test() {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => {
                self.receive = None;
                let letter = Letter::decode(&self.buffer[..bytes.min(LETTER_BYTES)], self.nranks);
                letter.map(Some).ok_or_else(|| self.garbled())
            }
            Err(Broken::TooLong(_)) => Err(self.garbled()),
            Err(Broken::Lost(lost)) => {
                let message = format!("{} cannot be reached: {}", self.label, lost.why);
                Err(Error::new(ncclRemoteError, message).by(Blame::of_lost([self.rank])))
            }
        }
    }

    fn garbled(&self) -> Error {
        let message =
            format!("{} sent bytes that are not a message of a shrink: do all ranks run the same release?", self.label);
        Error::new(ncclRemoteError, message).by(Blame::of([self.rank]))
    }
}
