//! The requests of a wire, and the news that its users have not taken.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::retired::Retired;
use crate::wire::{Broken, Lost, Notice, Peer, Tag};

/// The tag and the number of a message.
pub(super) type Key = (Tag, u64);

/// A quick hash for the keys of messages, which are small numbers. A peer that chose its tags to
/// make them collide would only delay itself.
#[derive(Debug, Default, Clone)]
pub(super) struct KeyHasher(u64);

impl KeyHasher {
    fn mix(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(23) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.mix(u64::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.mix(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.mix(number);
    }

    fn finish(&self) -> u64 {
        // The table uses the highest and the lowest bits.
        self.0 ^ (self.0 >> 32)
    }
}

/// A table that uses [`KeyHasher`].
pub(super) type Table<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

/// A request under way: the peer, and the message that it sends or receives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    /// The peer's number.
    pub(super) peer: u32,
    /// The message.
    pub(super) key: Key,
    /// Whether the request is a send.
    pub(super) is_send: bool,
}

/// The requests of a wire, and the news that its users have not taken.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The number of the last request.
    pub(super) last: u64,
    /// The requests under way.
    pub(super) open: Table<u64, Open>,
    /// The outcomes that nobody has taken.
    pub(super) ended: Table<u64, Result<usize, Broken>>,
    /// The notices that nobody has taken.
    pub(super) notices: Vec<Notice>,
    /// The losses that nobody has taken.
    pub(super) losses: Vec<(Peer, Lost)>,
    /// The ranks of this process that have left their communicators.
    pub(super) retired: Retired,
    /// Whether something has changed for which a thread may wait.
    pub(super) changed: bool,
}

impl Ledger {
    /// Begins a request that has no outcome yet.
    pub(super) fn begin(&mut self, open: Open) -> u64 {
        self.last += 1;
        self.open.insert(self.last, open);
        self.last
    }

    /// Begins a request whose outcome is known.
    pub(super) fn begin_ended(&mut self, outcome: Result<usize, Broken>) -> u64 {
        self.last += 1;
        self.ended.insert(self.last, outcome);
        self.last
    }

    /// Ends a request.
    pub(super) fn end(&mut self, request: u64, outcome: Result<usize, Broken>) {
        if self.open.remove(&request).is_some() {
            self.ended.insert(request, outcome);
            self.changed = true;
        }
    }
}
