//! The state behind the operations, and questions to it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::super::frame::{COUNT_KEY, MAX_VALUE, REFUSED_KEY, SERVER_KEY, Strings, TRUNK_KEY, Writer};
use super::super::value::{DetachedBytes, Value};
use super::limits::Refusal;

/// The number that the server has given to a client.
pub(in crate::rendezvous::store) type Client = u64;

pub(super) type Key = Vec<u8>;

/// The longest reply to one request, in bytes. A short request can name a large value many times.
pub(super) const MAX_REPLY: usize = 4 * MAX_VALUE;

/// The longest text of an integer, with the white space around it.
const MAX_INTEGER: usize = 256;

/// How much work a look at a key counts for, beside its bytes, in the unit of [`Table::take_work`].
pub(super) const LOOK: usize = 256;

/// The state behind the operations.
#[derive(Default)]
pub(in crate::rendezvous::store) struct Table {
    /// The values by key.
    pub(super) values: BTreeMap<Key, Value>,
    /// The queues by key.
    pub(super) queues: BTreeMap<Key, VecDeque<Value>>,
    /// How many bytes are stored, as limits.rs counts them.
    pub(super) stored: usize,
    /// How many bytes the answer to LIST_KEYS has, beside its count.
    pub(super) listed: usize,
    /// Counts the values that only unread replies keep.
    pub(super) loose: DetachedBytes,
    /// How much work was done since the last call of [`Table::take_work`].
    pub(super) work: usize,
    /// How much of the work put clients into the lists of keys, since the last call of
    /// [`Table::take_listing`].
    pub(super) listing: usize,
    /// The clients that wait at each barrier.
    pub(super) barriers: BTreeMap<Key, HashSet<Client>>,
    /// The barrier at which a client waits.
    pub(super) at_barrier: BTreeMap<Client, Key>,
    /// The keys for which a client waits.
    pub(super) waiting: BTreeMap<Client, Waiting>,
    /// How many bytes the waits take. Waits that are over count until they are out of the lists.
    pub(super) waits: usize,
    /// The waits for each key, by ticket, so the first wait is the first one in the list: the
    /// client, and which of the wait's keys it is. Tickets of waits that are over may still stand
    /// here, see `over`.
    pub(super) waiters: BTreeMap<Key, BTreeMap<u64, (Client, usize)>>,
    /// The ticket of the next wait.
    pub(super) tickets: u64,
    /// Waits that are over, and whose tickets are still to be taken out of `waiters`.
    pub(super) over: VecDeque<EndedWait>,
    /// The last words, each with the connections that have left it. A word is kept once, however
    /// many connections leave it.
    pub(super) words: BTreeMap<Arc<LastWord>, Speakers>,
    /// The last words of each client that has left some, and the room that it is promised.
    pub(super) words_of: BTreeMap<Client, Speaker>,
    /// The words whose last connection was turned away, and when each is forgotten if no connection
    /// leaves it again. The oldest one is the first.
    pub(super) awaited: VecDeque<(Instant, Arc<LastWord>)>,
    /// How many bytes of the last reserve are promised to connections and not used yet.
    pub(super) promised: usize,
    /// Why clients were turned away, by the nonces of their greetings. The newest entry is the last
    /// one.
    pub(super) turned_away: VecDeque<(u32, Value)>,
    /// How many connections were refused because they had the wrong secret or none, and the value
    /// of [`REFUSED_KEY`].
    pub(super) refused: (u64, Option<Value>),
}

/// A key, and the word that is stored for it when the last connection that left the two has gone.
pub(super) type LastWord = (Key, Vec<u8>);

/// The connections that have left a last word.
#[derive(Default)]
pub(super) struct Speakers {
    /// How many of them are still there.
    pub(super) connections: usize,
    /// How many bytes were promised to those that were turned away. The next connection that leaves
    /// this word is promised these bytes.
    pub(super) allowance: usize,
}

/// A client that has left last words.
#[derive(Default)]
pub(super) struct Speaker {
    /// The words.
    pub(super) words: Vec<Arc<LastWord>>,
    /// How many bytes of the last reserve are promised to this client alone.
    pub(super) allowance: usize,
    /// Whether its connection has failed because nothing came from its host any more.
    pub(super) is_silent: bool,
}

/// A client that waits in WAIT or WAIT_ANY.
pub(super) struct Waiting {
    /// The place of the wait among all waits.
    pub(super) ticket: u64,
    /// The keys for which the client waits. The keys that were taken already have the client in
    /// their lists.
    pub(super) keys: Strings,
    /// For how many of these keys the client still waits.
    pub(super) missing: usize,
    /// Whether one key is enough (WAIT_ANY).
    pub(super) any: bool,
    /// How many bytes the wait counts for in [`Table::waits`].
    pub(super) bytes: usize,
}

/// A wait that is over.
pub(super) struct EndedWait {
    /// The place of the wait among all waits.
    pub(super) ticket: u64,
    /// The keys of the wait. The ticket may still be in the lists of the keys that are not taken
    /// yet.
    pub(super) keys: Strings,
    /// How many bytes the wait counts for in [`Table::waits`].
    pub(super) bytes: usize,
}

/// The bytes and the value that are to be sent to a client.
pub(in crate::rendezvous::store) struct Reply {
    /// The client.
    pub(in crate::rendezvous::store) to: Client,
    /// The bytes that are sent first.
    pub(in crate::rendezvous::store) bytes: Vec<u8>,
    /// The value that follows the bytes. There is one copy of the value, however many clients wait
    /// for it.
    pub(in crate::rendezvous::store) value: Option<Value>,
}

impl Reply {
    pub(super) fn new(to: Client, bytes: Vec<u8>) -> Reply {
        Reply { to, bytes, value: None }
    }

    /// Makes a reply of these bytes and the value as a string, whose length comes before it.
    pub(super) fn string(to: Client, mut bytes: Vec<u8>, value: &Value) -> Reply {
        bytes.extend((value.len() as u64).to_le_bytes());
        Reply { to, bytes, value: Some(value.clone()) }
    }
}

pub(in crate::rendezvous::store) type Replies = Vec<Reply>;

impl Table {
    /// Returns how much work was done since the last call. About one unit is counted for each byte
    /// that was looked at or written, and [`LOOK`] for each key.
    pub(in crate::rendezvous::store) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Returns how much work has put clients into the lists of keys since the last call. Taking
    /// them out of the lists costs as much.
    pub(in crate::rendezvous::store) fn take_listing(&mut self) -> usize {
        std::mem::take(&mut self.listing)
    }

    /// Returns how many bytes are kept: what is stored, the waits, and the values that only unread
    /// replies keep.
    pub(in crate::rendezvous::store) fn kept(&self) -> usize {
        self.stored + self.waits + self.loose()
    }

    /// Adds work that was done for the table elsewhere.
    pub(in crate::rendezvous::store) fn count_work(&mut self, work: usize) {
        self.work += work;
    }

    /// Returns how many bytes of values only unread replies keep.
    pub(in crate::rendezvous::store) fn loose(&self) -> usize {
        self.loose.bytes()
    }

    /// Whether this client waits for something, or has left a last word.
    pub(in crate::rendezvous::store) fn has_stake(&self, client: Client) -> bool {
        self.waiting.contains_key(&client)
            || self.at_barrier.contains_key(&client)
            || self.words_of.contains_key(&client)
    }

    /// Whether a client finds a value or a queue under this key.
    pub(super) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
            || self.queues.contains_key(key)
            || key == SERVER_KEY
            || key == COUNT_KEY
            || key == TRUNK_KEY
            || key == REFUSED_KEY && self.refused.1.is_some()
    }

    /// Returns the value that a client finds under this key.
    pub(super) fn value(&self, key: &[u8]) -> Option<&Value> {
        if key == REFUSED_KEY {
            return self.refused.1.as_ref();
        }
        let nonce = key.strip_prefix(SERVER_KEY).and_then(|rest| rest.strip_prefix(b"/"));
        nonce.and_then(|nonce| self.why_turned_away(nonce)).or_else(|| self.values.get(key))
    }

    /// Returns why the client whose greeting had this nonce was turned away, if it was.
    fn why_turned_away(&self, nonce: &[u8]) -> Option<&Value> {
        let nonce = u32::from_str_radix(std::str::from_utf8(nonce).ok()?, 16).ok()?;
        self.turned_away.iter().rev().find(|(known, _)| *known == nonce).map(|(_, said)| said)
    }

    /// Returns what a counter holds; 0 when there is none.
    pub(super) fn integer(&self, key: &[u8]) -> Result<i64, Refusal> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        // A longer text is no number, and looking for one in megabytes would take long.
        let value = value.get(..).filter(|value| value.len() <= MAX_INTEGER);
        let value = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned().into())
    }
}

pub(super) fn string(bytes: &[u8]) -> Vec<u8> {
    Writer::default().string(bytes).finish()
}
