//! Says how much may be stored, and why a client is dropped.
//!
//! The program's own values may fill the store up to [`MAX_STORED`]. Beyond that there is room for
//! small entries of this library alone, so its ranks still agree while the store is full. Beyond
//! that again there is room for verdicts and decisions, for notes on who has read them, for notes
//! on lost ranks, for the end of a job of `devicemesh run`, and for last words. When a rank was
//! refused, all ranks learn it from these.
//!
//! A stranger without a secret can write such keys too. So each connection that leaves a last word
//! on its rank is promised room of its own, [`ALLOWANCE`], within the last reserve. Nobody else can
//! fill that room, whatever keys and however many connections a stranger takes.

use super::super::SILENT;

/// The most bytes of keys and values that are kept, counting [`ENTRY`] for each pair.
pub(super) const MAX_STORED: usize = 1 << 30;
/// How many bytes more the small entries of this library may fill.
const FOR_AGREEMENT: usize = 64 << 20;
/// How many bytes more are kept for verdicts, notes and last words.
const FOR_VERDICTS: usize = 128 << 20;
/// How many of these bytes may be promised to connections.
pub(super) const MAX_PROMISED: usize = 96 << 20;
/// How many bytes one connection is promised. A verdict and the notes on who has read it fit in.
pub(super) const ALLOWANCE: usize = 8 << 10;
/// The most bytes that are kept, whatever they are for.
pub(super) const MOST_STORED: usize = MAX_STORED + FOR_AGREEMENT + FOR_VERDICTS;
/// The bytes with which all keys of this library and of `devicemesh run` begin.
const OURS: &[u8] = b"/devicemesh/";
/// The longest key and the longest value of a small entry, in bytes.
const SMALL_KEY: usize = 1 << 10;
const SMALL_VALUE: usize = 4 << 10;
/// The parts of a key that mark verdicts, decisions on the next epoch, notes on who has read a
/// verdict, notes on lost ranks, and the notes of `devicemesh run` on the end of its job and on
/// lost nodes.
const VERDICTS: [&[u8]; 6] = [b"verdict", b"decision", b"read", b"lost", b"over", b"gone"];
/// About how many bytes a pair costs beside its key and value. This cost is counted for tiny pairs
/// too.
pub(super) const ENTRY: usize = 256;

/// The most bytes of waits for many keys, beside what is stored. A client that stores something is
/// never refused because of what others wait for.
pub(super) const MAX_WAITS: usize = 256 << 20;

/// A wait of up to this many bytes is always taken.
pub(super) const SMALL_WAIT: usize = 64 << 10;

/// The most keys that one step looks at.
const STEP_KEYS: usize = 256;
/// A step ends after about this many bytes of keys and values.
pub(super) const STEP_BYTES: usize = 64 << 10;

/// Why a client is dropped.
#[derive(Debug)]
pub(in super::super) enum Refusal {
    /// The client broke the protocol, or asked for more than one request may ask for.
    Protocol(#[allow(dead_code, reason = "for tests and debuggers")] String),
    /// The client asked to keep what would fill the store beyond this many bytes.
    StoreFull(usize),
    /// The client asked to wait for more keys than there is room for.
    WaitsFull,
    /// There was no room for the client's request. The text is for the client, and says what takes
    /// the room and what to do.
    TurnedAway(String),
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

/// Whether a pair is one for which connections are promised room.
pub(super) fn is_verdict(key: &[u8], value: usize) -> bool {
    most_stored(key, value) == MOST_STORED
}

/// Returns how many bytes a pair counts for.
pub(super) fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY
}

/// Returns how many bytes a last word counts for. A last word is kept twice. The word becomes two
/// pairs when it is passed on: the key of one has a slash and a number behind it, and the value of
/// the other is that number. The value of the former may have [`SILENT`] behind it.
pub(super) fn cost_of_word(key: &[u8], word: &[u8]) -> usize {
    const DIGITS: usize = 20;
    2 * cost(key, word) + 1 + 2 * DIGITS + SILENT.len()
}

/// Bounds one step of a request that lists keys: it ends after [`STEP_KEYS`] keys, or after about
/// [`STEP_BYTES`] bytes of keys and values.
#[derive(Default)]
pub(super) struct Step {
    /// How many keys were looked at.
    keys: usize,
    /// How many bytes these keys and their values have.
    bytes: usize,
}

impl Step {
    /// Whether the step may look at one more key.
    pub(super) fn goes_on(&self) -> bool {
        self.keys < STEP_KEYS && self.bytes < STEP_BYTES
    }

    /// Counts a key, with as many bytes of the key or of its value.
    pub(super) fn key(&mut self, bytes: usize) {
        self.keys += 1;
        self.bytes += bytes;
    }

    /// Counts more bytes of the last key's value.
    pub(super) fn value(&mut self, bytes: usize) {
        self.bytes += bytes;
    }
}
