//! Carries bytes between the ranks of an agreed call: all-gather and broadcast.
//!
//! The first rank of an all-gather collects what the others publish, and publishes all of it
//! together. So `n` ranks need about `3n` store operations. If each rank asked each other rank,
//! they would need `n * n`. Bytes travel in pieces, each of which is one value of the store. The
//! first piece begins with the length of all bytes.

use super::exchange::AT_ONCE;
use super::round::Round;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// The most bytes that one rank may give to a call.
pub(crate) const MOST_OF_ONE: usize = 8 << 20;

/// The most bytes that all ranks together may give to an all-gather. The store holds these bytes
/// twice while the call lasts.
const MOST_TOGETHER: usize = 64 << 20;

/// The most bytes of one value in the store. A store behind callbacks may refuse longer values.
const PIECE: usize = 1 << 20;

/// The size of an encoded length, in bytes.
const LENGTH: usize = size_of::<u64>();

impl Round {
    /// Returns the bytes that each rank gives, by position. Every rank of the call calls this
    /// once.
    pub fn all_gather(&self, mine: &[u8], wait: &Wait) -> Result<Vec<Vec<u8>>> {
        check_len(mine.len())?;
        let (me, size) = (self.membership.me, self.membership.members.len());
        if size < 2 {
            return Ok(vec![mine.to_vec()]);
        }
        let of_rank = |position: usize| format!("bytes/{position}");
        if me > 0 {
            self.publish_bytes(&of_rank(me), mine, wait)?;
            let most = MOST_TOGETHER + size * LENGTH;
            return self.unpack(&self.fetch_bytes("all", 0, most, wait)?);
        }
        let (mut all, mut total) = (vec![mine.to_vec()], mine.len());
        for positions in (1..size).collect::<Vec<_>>().chunks(AT_ONCE) {
            let first =
                |position: &usize| (format!("{}/0", of_rank(*position)), self.membership.members.rank(*position));
            let from: Vec<(String, i32)> = positions.iter().map(first).collect();
            for (position, first) in positions.iter().zip(self.fetch_each(&from, wait)?) {
                let theirs = self.fetch_rest(first, &of_rank(*position), *position, MOST_OF_ONE, wait)?;
                total += theirs.len();
                if total > MOST_TOGETHER {
                    return Err(Error::invalid(format!(
                        "{}: the first {} ranks give {total} bytes; all {size} ranks together may give {MOST_TOGETHER}",
                        self.call,
                        position + 1
                    )));
                }
                all.push(theirs);
            }
        }
        self.publish_bytes("all", &pack(&all, total), wait)?;
        Ok(all)
    }

    /// Returns the bytes that the rank at position `root` gives. Every rank of the call calls this
    /// once. `data` is used on that rank only.
    pub fn broadcast(&self, data: &[u8], root: usize, wait: &Wait) -> Result<Vec<u8>> {
        if self.membership.me != root {
            return self.fetch_bytes("bytes", root, MOST_OF_ONE, wait);
        }
        check_len(data.len())?;
        if self.membership.members.len() > 1 {
            self.publish_bytes("bytes", data, wait)?;
        }
        Ok(data.to_vec())
    }

    /// Publishes bytes in pieces.
    fn publish_bytes(&self, key: &str, bytes: &[u8], wait: &Wait) -> Result<()> {
        let (first, rest) = bytes.split_at(bytes.len().min(PIECE - LENGTH));
        let first = [&(bytes.len() as u64).to_le_bytes(), first].concat();
        self.publish(&format!("{key}/0"), &first, wait)?;
        rest.chunks(PIECE)
            .enumerate()
            .try_for_each(|(index, piece)| self.publish(&format!("{key}/{}", index + 1), piece, wait))
    }

    /// Returns the bytes, at most `most` of them, that the rank at position `from` publishes.
    fn fetch_bytes(&self, key: &str, from: usize, most: usize, wait: &Wait) -> Result<Vec<u8>> {
        let first = self.fetch(&format!("{key}/0"), self.membership.members.rank(from), wait)?;
        self.fetch_rest(first, key, from, most, wait)
    }

    /// Returns the bytes that the rank at position `from` publishes, of which `first` is the first
    /// piece.
    fn fetch_rest(&self, first: Vec<u8>, key: &str, from: usize, most: usize, wait: &Wait) -> Result<Vec<u8>> {
        let rank = self.membership.members.rank(from);
        let wrong = |what: &str| Error::store(format!("{}: the store has {what} for {key} of rank {rank}", self.call));
        let (len, start) = first.split_first_chunk::<LENGTH>().ok_or_else(|| wrong("no length"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        if len > most {
            return Err(wrong(&format!("a length of {len} bytes, more than {most},")));
        }
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(start);
        for index in 1.. {
            if bytes.len() >= len {
                break;
            }
            let piece = self.fetch(&format!("{key}/{index}"), rank, wait)?;
            if piece.is_empty() {
                return Err(wrong("an empty piece"));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() == len { Ok(bytes) } else { Err(wrong(&format!("{} bytes in place of {len}", bytes.len()))) }
    }

    /// Returns the values that [`pack`] has put together.
    fn unpack(&self, packed: &[u8]) -> Result<Vec<Vec<u8>>> {
        let size = self.membership.members.len();
        let wrong = || Error::store(format!("{}: the store has no whole list of {size} values", self.call));
        let (lengths, mut bytes) = packed.split_at_checked(size * LENGTH).ok_or_else(wrong)?;
        let mut all = Vec::with_capacity(size);
        for length in lengths.chunks_exact(LENGTH) {
            let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
            let (value, rest) = bytes.split_at_checked(length as usize).ok_or_else(wrong)?;
            all.push(value.to_vec());
            bytes = rest;
        }
        if bytes.is_empty() { Ok(all) } else { Err(wrong()) }
    }
}

/// Puts the values of all ranks together: the length of each, then the bytes of each.
fn pack(all: &[Vec<u8>], total: usize) -> Vec<u8> {
    let mut packed = Vec::with_capacity(total + all.len() * LENGTH);
    all.iter().for_each(|value| packed.extend_from_slice(&(value.len() as u64).to_le_bytes()));
    all.iter().for_each(|value| packed.extend_from_slice(value));
    packed
}

/// Fails when a rank gives more bytes than a call takes.
pub(crate) fn check_len(len: usize) -> Result<()> {
    match len > MOST_OF_ONE {
        false => Ok(()),
        true => Err(Error::invalid(format!(
            "len is {len}, but the store carries at most {MOST_OF_ONE} bytes of a rank: put them in a file and send its name"
        ))),
    }
}
