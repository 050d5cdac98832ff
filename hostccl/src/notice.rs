//! The notices by which the processes of a communicator over several hosts tell each other news.
//!
//! A notice is one byte for its kind, then its numbers in little endian, then its texts. The
//! receiver drops bytes that do not have this form.

use crate::blame::Blame;
use crate::cut::{MESSAGE_BYTES, cut};
use crate::types::*;
use crate::wire::NOTICE_BYTES;

/// A notice about one communicator. All ranks are those of the whole communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    /// The notice has no news. Sending it makes a connection, which breaks when the sender's
    /// process ends.
    Hello,
    /// The communicator has failed.
    Failed {
        /// NCCL's code.
        code: ncclResult_t,
        /// The ranks to blame.
        blame: Blame,
        /// The message.
        message: String,
        /// The call that met the failure; empty where there was none.
        call: String,
    },
    /// That rank has freed its communicator.
    Left(usize),
    /// The process of `to` is asked what `to` waits for. It answers with [`Said::Waits`] or
    /// [`Said::Left`], and is silent where neither is true.
    Ask {
        /// The rank that is asked.
        to: usize,
    },
    /// That rank is in a call, and waits for another rank.
    Waits {
        /// The rank.
        rank: usize,
        /// How many milliseconds the rank, or a rank for which it waits, will still wait before it
        /// blames another rank.
        millis: u32,
    },
    /// The receiver answers with [`Said::Pong`] at once.
    Ping,
    /// The answer to [`Said::Ping`].
    Pong,
}

/// The kinds, as the first bytes of notices.
const HELLO: u8 = 1;
const FAILED: u8 = 2;
const LEFT: u8 = 3;
const ASK: u8 = 4;
const WAITS: u8 = 5;
const PING: u8 = 6;
const PONG: u8 = 7;

impl Said {
    /// Returns the bytes of the notice, [`NOTICE_BYTES`] at most. Texts that are too long are
    /// cut, and end with an ellipsis.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let with_rank = |kind: u8, rank: usize| [&[kind][..], &(rank as u32).to_le_bytes()].concat();
        match self {
            Said::Hello => vec![HELLO],
            Said::Left(rank) => with_rank(LEFT, *rank),
            Said::Ask { to } => with_rank(ASK, *to),
            Said::Waits { rank, millis } => [&with_rank(WAITS, *rank)[..], &millis.to_le_bytes()].concat(),
            Said::Ping => vec![PING],
            Said::Pong => vec![PONG],
            Said::Failed { code, blame, message, call } => {
                let mut bytes = vec![FAILED];
                bytes.extend(code.to_le_bytes());
                put_ranks(&mut bytes, &blame.ranks);
                put_ranks(&mut bytes, &blame.lost);
                put_text(&mut bytes, message, MESSAGE_BYTES);
                let room = NOTICE_BYTES - bytes.len() - 2;
                put_text(&mut bytes, call, room);
                bytes
            }
        }
    }

    /// Reads a notice about a communicator of `nranks` ranks. Returns `None` where the bytes are no
    /// notice.
    pub(crate) fn decode(bytes: &[u8], nranks: usize) -> Option<Said> {
        let (kind, mut rest) = bytes.split_first()?;
        let said = match *kind {
            HELLO => Said::Hello,
            LEFT => Said::Left(take_rank(&mut rest, nranks)?),
            ASK => Said::Ask { to: take_rank(&mut rest, nranks)? },
            WAITS => Said::Waits { rank: take_rank(&mut rest, nranks)?, millis: take_u32(&mut rest)? },
            PING => Said::Ping,
            PONG => Said::Pong,
            FAILED => {
                let code = i32::from_le_bytes(take(&mut rest, 4)?.try_into().ok()?);
                let ranks = take_ranks(&mut rest, nranks)?;
                let lost = take_ranks(&mut rest, nranks)?;
                let message = take_text(&mut rest)?;
                let call = take_text(&mut rest)?;
                Said::Failed { code: failure_of_another(code), blame: Blame { ranks, lost }, message, call }
            }
            _ => return None,
        };
        rest.is_empty().then_some(said)
    }
}

/// Writes a set of ranks: as a list, or as bits for all ranks up to the last where the bits are
/// shorter. `ranks` ascend, because [`take_ranks`] refuses a list that does not.
fn put_ranks(bytes: &mut Vec<u8>, ranks: &[usize]) {
    let words = ranks.iter().max().map_or(0, |last| last / 8 + 1);
    if 2 * ranks.len() <= words {
        bytes.extend((ranks.len() as u16).to_le_bytes());
        ranks.iter().for_each(|rank| bytes.extend((*rank as u16).to_le_bytes()));
        return;
    }
    let mut bits = vec![0_u8; words];
    ranks.iter().for_each(|rank| bits[rank / 8] |= 1 << (rank % 8));
    bytes.extend((words as u16 | BITS).to_le_bytes());
    bytes.extend(bits);
}

/// The mark of a set that is written as bits, in the word with its length.
const BITS: u16 = 1 << 15;

/// Writes a text, of which it keeps at most `most` bytes, with its length.
fn put_text(bytes: &mut Vec<u8>, text: &str, most: usize) {
    let kept = cut(text, most);
    bytes.extend((kept.len() as u16).to_le_bytes());
    bytes.extend(kept.as_bytes());
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(count)?;
    *rest = left;
    Some(taken)
}

fn take_u16(rest: &mut &[u8]) -> Option<u16> {
    Some(u16::from_le_bytes(take(rest, 2)?.try_into().ok()?))
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(take(rest, 4)?.try_into().ok()?))
}

fn take_rank(rest: &mut &[u8], nranks: usize) -> Option<usize> {
    let rank = take_u32(rest)? as usize;
    (rank < nranks).then_some(rank)
}

fn take_ranks(rest: &mut &[u8], nranks: usize) -> Option<Vec<usize>> {
    let count = take_u16(rest)?;
    let ranks: Vec<usize> = match count & BITS {
        0 => take(rest, 2 * count as usize)?
            .chunks_exact(2)
            .map(|pair| usize::from(u16::from_le_bytes([pair[0], pair[1]])))
            .collect(),
        _ => {
            let bits = take(rest, (count & !BITS) as usize)?;
            (0..bits.len() * 8).filter(|rank| bits[rank / 8] >> (rank % 8) & 1 == 1).collect()
        }
    };
    let is_set = ranks.windows(2).all(|pair| pair[0] < pair[1]) && ranks.iter().all(|rank| *rank < nranks);
    is_set.then_some(ranks)
}

fn take_text(rest: &mut &[u8]) -> Option<String> {
    let length = take_u16(rest)?;
    Some(String::from_utf8_lossy(take(rest, length as usize)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(ranks: Vec<usize>, lost: Vec<usize>, message: &str, call: &str) -> Said {
        let blame = Blame { ranks, lost };
        Said::Failed { code: ncclTimeout, blame, message: message.to_owned(), call: call.to_owned() }
    }

    #[test]
    fn a_notice_is_read_as_it_was_written() {
        for said in [
            Said::Hello,
            Said::Left(3),
            Said::Ask { to: 1023 },
            Said::Waits { rank: 0, millis: 70_000 },
            Said::Ping,
            Said::Pong,
            failed(vec![], vec![], "", ""),
            failed(vec![5], vec![5], "rank 5 has gone", "ncclAllReduce"),
            failed((0..1024).collect(), (1..1024).collect(), "all", ""),
            failed(vec![0, 900, 1023], vec![1023], "ö", "ncclSend"),
        ] {
            let bytes = said.encode();
            assert!(bytes.len() <= NOTICE_BYTES);
            assert_eq!(Said::decode(&bytes, 1024), Some(said.clone()));
            for cut in 0..bytes.len() {
                assert_eq!(Said::decode(&bytes[..cut], 1024), None, "{cut} bytes of {said:?}");
            }
            assert_eq!(Said::decode(&[&bytes[..], &[0]].concat(), 1024), None);
        }
    }

    #[test]
    fn long_texts_are_cut_and_the_notice_fits() {
        let all: Vec<usize> = (0..1024).collect();
        let bytes = failed(all.clone(), all.clone(), &"ö".repeat(4000), &"x".repeat(4000)).encode();
        assert!(bytes.len() <= NOTICE_BYTES, "{}", bytes.len());
        let Some(Said::Failed { blame, message, .. }) = Said::decode(&bytes, 1024) else { panic!() };
        assert_eq!((blame.ranks, blame.lost), (all.clone(), all));
        assert_eq!(message, "ö".repeat(254) + "…");
    }

    #[test]
    fn garbage_and_ranks_that_do_not_exist_are_refused() {
        assert_eq!(Said::decode(&[], 4), None);
        assert_eq!(Said::decode(&Said::Left(4).encode(), 4), None);
        assert_eq!(Said::decode(&failed(vec![1, 4], vec![], "", "").encode(), 4), None);
        let unsorted = [&[FAILED, 6, 0, 0, 0, 2, 0, 2, 0, 1, 0][..], &[0; 6]].concat();
        assert_eq!(Said::decode(&unsorted, 1000), None);
        let mut state = 1_u64;
        for _ in 0..20_000 {
            let mut next = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            };
            let bytes: Vec<u8> = (0..next() % 40).map(|at| if at == 0 { next() % 9 } else { next() % 5 }).collect();
            if let Some(Said::Failed { code, blame, .. }) = Said::decode(&bytes, 6) {
                assert!(code > 0 && code != ncclInProgress && blame.ranks.iter().all(|rank| *rank < 6));
            }
        }
    }
}
