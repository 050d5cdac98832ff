//! Says how much may be stored, and why a client is dropped.
//!
//! The program's own values may fill the store up to [`MAX_STORED`]. Beyond that there is room for
//! small entries of this library alone, so its ranks still agree while the store is full. Beyond
//! that again there is room for verdicts, for notes on who has read them, for notes on lost ranks,
//! and for last words. When a rank was refused, all ranks learn it from these.

/// The most bytes of keys and values that are kept, counting [`ENTRY`] for each pair.
pub(super) const MAX_STORED: usize = 1 << 30;
/// How many bytes more the small entries of this library may fill.
const FOR_AGREEMENT: usize = 64 << 20;
/// How many bytes more are kept for verdicts, notes and last words.
const FOR_VERDICTS: usize = 64 << 20;
/// The most bytes that are kept, whatever they are for.
pub(super) const MOST_STORED: usize = MAX_STORED + FOR_AGREEMENT + FOR_VERDICTS;
/// The bytes with which all keys of this library begin.
const OURS: &[u8] = b"/devicemesh/";
/// The longest key and the longest value of a small entry, in bytes.
const SMALL_KEY: usize = 1 << 10;
const SMALL_VALUE: usize = 4 << 10;
/// The parts of a key that mark verdicts, notes on who has read a verdict, and notes on lost ranks.
const VERDICTS: [&[u8]; 3] = [b"verdict", b"read", b"lost"];
/// About how many bytes a pair costs beside its key and value. It is counted for tiny pairs too.
pub(super) const ENTRY: usize = 256;

/// The most bytes of waits for many keys, beside what is stored. A client that stores something is
/// never refused because of what others wait for.
pub(super) const MAX_WAITS: usize = 256 << 20;

/// A wait of up to this many bytes is always taken.
pub(super) const SMALL_WAIT: usize = 64 << 10;

/// Why a client is dropped.
#[derive(Debug)]
pub(in super::super) enum Refusal {
    /// The client broke the protocol, or asked for more than one request may ask for.
    Protocol(#[allow(dead_code, reason = "for tests and debuggers")] String),
    /// The client asked to keep what would fill the store beyond this many bytes.
    StoreFull(usize),
    /// The client asked to wait for more keys than there is room for.
    WaitsFull,
}

impl From<String> for Refusal {
    fn from(why: String) -> Refusal {
        Refusal::Protocol(why)
    }
}

/// Returns how many bytes may be stored when this key gets a value of that length.
pub(super) fn most_stored(key: &[u8], value: usize) -> usize {
    if !key.starts_with(OURS) || key.len() > SMALL_KEY || value > SMALL_VALUE {
        MAX_STORED
    } else if key.split(|byte| *byte == b'/').any(|part| VERDICTS.contains(&part)) {
        MOST_STORED
    } else {
        MAX_STORED + FOR_AGREEMENT
    }
}

/// Returns how many bytes a pair counts for.
pub(super) fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY
}

/// Returns how many bytes a last word counts for. It is kept twice. It becomes two pairs when it is
/// passed on: the key of one has a slash and a number behind it, and the value of the other is that
/// number.
pub(super) fn cost_of_word(key: &[u8], word: &[u8]) -> usize {
    const DIGITS: usize = 20;
    2 * cost(key, word) + 1 + 2 * DIGITS
}

/// Returns how many bytes are stored with this much more, unless these are more than `most`.
pub(super) fn room(stored: usize, more: usize, most: usize) -> Result<usize, Refusal> {
    let stored = stored + more;
    if stored > most { Err(Refusal::StoreFull(most)) } else { Ok(stored) }
}
