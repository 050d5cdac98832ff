//! The state behind the operations, and questions to it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::super::frame::{MAX_VALUE, REFUSED_KEY, SERVER_KEY, Strings, Writer};
use super::super::value::{DetachedBytes, Value};
use super::limits::{MAX_STORED, MAX_WAITS, Refusal};

/// A client, by the server's number for it.
pub(in crate::rendezvous::store) type Client = u64;

pub(super) type Key = Vec<u8>;

/// The longest reply to one request, in bytes: a short request can name a large value many times.
pub(super) const MAX_REPLY: usize = 4 * MAX_VALUE;

/// The longest text of an integer, with the white space around it.
const MAX_INTEGER: usize = 256;

/// What looking for a key counts for, beside its bytes, in the unit of [`Table::take_work`].
pub(super) const LOOK: usize = 256;

/// The most keys that one step looks at.
pub(super) const STEP_KEYS: usize = 256;

/// The state behind the operations.
#[derive(Default)]
pub(in crate::rendezvous::store) struct Table {
    pub(super) values: BTreeMap<Key, Value>,
    pub(super) queues: BTreeMap<Key, VecDeque<Value>>,
    pub(super) stored: usize,
    /// Bytes of the answer to LIST_KEYS, beside its count.
    pub(super) listed: usize,
    pub(super) loose: DetachedBytes,
    /// What was done since [`Table::take_work`] asked the last time.
    pub(super) work: usize,
    /// The part of the work that listed clients for keys they wait for, since [`Table::take_listing`] asked the last time.
    pub(super) listing: usize,
    pub(super) barriers: BTreeMap<Key, HashSet<Client>>,
    pub(super) at_barrier: HashMap<Client, Key>,
    pub(super) waiting: HashMap<Client, Waiting>,
    /// What the waits take, in bytes, also those that are over and not yet tidied up.
    pub(super) waits: usize,
    /// Who waits for a key, by ticket, so the first to come is first: the client, and which of the wait's keys it is. Tickets of waits that are
    /// over may still stand here, see `over`.
    pub(super) waiters: BTreeMap<Key, BTreeMap<u64, (Client, usize)>>,
    pub(super) tickets: u64,
    /// Waits that are over and whose tickets are still to be taken out of `waiters`.
    pub(super) over: VecDeque<EndedWait>,
    /// By key and word: how many connections left them. And by client, which it left.
    pub(super) words: BTreeMap<(Key, Vec<u8>), usize>,
    pub(super) words_of: HashMap<Client, Vec<(Key, Vec<u8>)>>,
    /// What clients that were refused for lack of room are told under [`SERVER_KEY`], while much of what filled the room is still there. Each
    /// kind of room has one entry at most. The newest entry is the last one.
    pub(super) full: Vec<(Kind, Value)>,
    /// How many connections had the wrong secret or none, and what [`REFUSED_KEY`] says of them.
    pub(super) refused: (u64, Option<Value>),
}

/// What there can be no room for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Stored,
    Waits,
}

/// A client in WAIT or WAIT_ANY.
pub(super) struct Waiting {
    pub(super) ticket: u64,
    /// What it waits for. It is listed for those that were taken.
    pub(super) keys: Strings,
    /// How many of the keys for which it is listed must come still.
    pub(super) missing: usize,
    pub(super) any: bool,
    /// What this counts for in [`Table::waits`].
    pub(super) bytes: usize,
}

/// A wait that is over.
pub(super) struct EndedWait {
    pub(super) ticket: u64,
    /// The keys for which its ticket may be listed still are those that are to be taken.
    pub(super) keys: Strings,
    pub(super) bytes: usize,
}

/// What to send to whom after a request.
pub(in crate::rendezvous::store) struct Reply {
    pub(in crate::rendezvous::store) to: Client,
    pub(in crate::rendezvous::store) bytes: Vec<u8>,
    /// What follows the bytes, kept once however many wait for it.
    pub(in crate::rendezvous::store) value: Option<Value>,
}

impl Reply {
    pub(super) fn new(to: Client, bytes: Vec<u8>) -> Reply {
        Reply { to, bytes, value: None }
    }

    /// Those bytes, and the value as a string: its length comes before it.
    pub(super) fn string(to: Client, mut bytes: Vec<u8>, value: &Value) -> Reply {
        bytes.extend((value.len() as u64).to_le_bytes());
        Reply { to, bytes, value: Some(value.clone()) }
    }
}

pub(in crate::rendezvous::store) type Replies = Vec<Reply>;

impl Table {
    /// How much was done since this was asked the last time: about one for each byte that was looked at or written, and [`LOOK`] for each key.
    pub(in crate::rendezvous::store) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// How much work went into listing clients for keys since this was asked the last time. Taking them out of the lists again is as much.
    pub(in crate::rendezvous::store) fn take_listing(&mut self) -> usize {
        std::mem::take(&mut self.listing)
    }

    /// Adds what was done for the table elsewhere.
    pub(in crate::rendezvous::store) fn count_work(&mut self, work: usize) {
        self.work += work;
    }

    /// Bytes of values that are here no longer, but that unread replies keep.
    pub(in crate::rendezvous::store) fn loose(&self) -> usize {
        self.loose.bytes()
    }

    /// Whether this client waits for something, or has left a word for the time when it has gone.
    pub(in crate::rendezvous::store) fn has_stake(&self, client: Client) -> bool {
        self.waiting.contains_key(&client)
            || self.at_barrier.contains_key(&client)
            || self.words_of.contains_key(&client)
    }

    pub(super) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
            || self.queues.contains_key(key)
            || key == SERVER_KEY
            || key == REFUSED_KEY && self.refused.1.is_some()
    }

    pub(super) fn value(&self, key: &[u8]) -> Option<&Value> {
        if key == SERVER_KEY {
            let is_so = |kind: Kind| match kind {
                Kind::Waits => self.waits > MAX_WAITS / 2,
                Kind::Stored => self.stored > MAX_STORED / 2,
            };
            if let Some((_, said)) = self.full.iter().rev().find(|(kind, _)| is_so(*kind)) {
                return Some(said);
            }
        }
        if key == REFUSED_KEY {
            return self.refused.1.as_ref();
        }
        self.values.get(key)
    }

    /// What a counter holds; 0 when there is none.
    pub(super) fn integer(&self, key: &[u8]) -> Result<i64, Refusal> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        // Longer ones are no number, and looking for one in megabytes would take long.
        let value = value.get(..).filter(|value| value.len() <= MAX_INTEGER);
        let value = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned().into())
    }
}

pub(super) fn string(bytes: &[u8]) -> Vec<u8> {
    Writer::default().string(bytes).finish()
}
