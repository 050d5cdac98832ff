//! What the server keeps: values, queues, barriers, last words, and which clients wait for what. No sockets here.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::frame::{MAGIC, MAX_VALUE, Request, SERVER_KEY, Writer};

#[cfg(test)]
mod tests;

/// A client, by the server's number for it.
pub(super) type Client = u64;

type Key = Vec<u8>;

/// The longest reply to one request, in bytes: a short request can name a large value many times.
pub(super) const MAX_REPLY: usize = 4 * MAX_VALUE;
/// The most bytes of keys and values that are kept, counting [`ENTRY`] for each pair.
pub(super) const MAX_STORED: usize = 1 << 30;
/// What a pair costs beside its bytes, about: also where both are tiny, and while its table grows.
const ENTRY: usize = 256;
/// Why a client is dropped when there is no room for what it asks to keep.
const FULL: &str = "no room";
/// The most last words of one client.
const MAX_WORDS: usize = 16;

/// The state behind the operations.
#[derive(Default)]
pub(super) struct Table {
    values: HashMap<Key, Vec<u8>>,
    queues: HashMap<Key, VecDeque<Vec<u8>>>,
    stored: usize,
    barriers: HashMap<Key, HashSet<Client>>,
    at_barrier: HashMap<Client, Key>,
    waiting: HashMap<Client, Waiting>,
    /// Who waits for a key, first come first.
    waiters: HashMap<Key, BTreeMap<u64, Client>>,
    tickets: u64,
    /// By key and word: how many connections left them. And by client, which it left.
    words: HashMap<(Key, Vec<u8>), usize>,
    words_of: HashMap<Client, Vec<(Key, Vec<u8>)>>,
    /// What was kept when there was no room the last time: the value of [`SERVER_KEY`] while much of it is still there.
    full: Vec<u8>,
}

/// A client in WAIT or WAIT_ANY.
struct Waiting {
    ticket: u64,
    keys: Vec<Key>,
    /// How many of the keys must come still.
    missing: usize,
    any: bool,
    /// What this counts for in [`Table::stored`].
    bytes: usize,
}

/// What to send to whom after a request.
pub(super) struct Reply {
    pub(super) to: Client,
    pub(super) bytes: Vec<u8>,
    /// What follows the bytes, kept once however many wait for it.
    pub(super) value: Option<Arc<[u8]>>,
}

impl Reply {
    fn new(to: Client, bytes: Vec<u8>) -> Reply {
        Reply { to, bytes, value: None }
    }
}

pub(super) type Replies = Vec<Reply>;

impl Table {
    /// Carries out one request. `Err` says why the client is to be dropped.
    ///
    /// What is to be sent goes to `replies`, also beside an error: others may have been woken before it.
    pub(super) fn handle(&mut self, client: Client, request: Request, replies: &mut Replies) -> Result<(), String> {
        let done = self.carry_out(client, request, replies);
        if done.as_ref().is_err_and(|why| why == FULL) {
            self.turn_away(client);
        }
        done
    }

    fn carry_out(&mut self, client: Client, request: Request, replies: &mut Replies) -> Result<(), String> {
        let mut reply = |bytes: Vec<u8>| replies.push(Reply::new(client, bytes));
        match request {
            Request::Validate(MAGIC) => {}
            Request::Validate(word) => return Err(format!("the greeting is {word:#x}, not {MAGIC:#x}")),
            Request::Set(key, value) => return self.put(key, value, replies),
            Request::CompareSet(key, expected, desired) => match self.values.get(&key) {
                None if expected.is_empty() => {
                    reply(string(&desired));
                    self.put(key, desired, replies)?;
                }
                None => reply(string(&expected)),
                Some(value) if *value == expected => {
                    reply(string(&desired));
                    self.put(key, desired, replies)?;
                }
                Some(value) => reply(string(value)),
            },
            Request::Get(key) => reply(string(self.value(&key))),
            Request::Add(key, amount) => {
                let sum = self.integer(&key)?.wrapping_add(amount);
                reply(sum.to_le_bytes().to_vec());
                self.put(key, sum.to_string().into_bytes(), replies)?;
            }
            Request::Check(keys) => reply(vec![u8::from(!keys.iter().all(|key| self.has(key)))]),
            Request::Wait(keys) => {
                let keys: Vec<Key> = keys.into_iter().filter(|key| !self.has(key)).collect();
                match keys.len() {
                    0 => reply(vec![0]),
                    missing => self.wait(client, keys, missing, false)?,
                }
            }
            Request::WaitAny(keys) => match keys.iter().position(|key| self.values.contains_key(key)) {
                Some(index) => reply([&found(index)[..], &string(self.value(&keys[index]))].concat()),
                None => self.wait(client, keys, 1, true)?,
            },
            Request::NumKeys => reply((self.values.len() as i64).to_le_bytes().to_vec()),
            Request::Delete(key) => reply(i64::from(self.remove(&key).is_some()).to_le_bytes().to_vec()),
            Request::Append(key, more) => {
                let Some(value) = self.values.get_mut(&key) else { return self.put(key, more, replies) };
                let len = value.len() + more.len();
                if len > MAX_VALUE {
                    return Err(format!("APPEND makes a value of {len} bytes"));
                }
                self.stored = room(self.stored, more.len())?;
                value.extend(more);
            }
            Request::MultiGet(keys) => {
                let len: usize = keys.iter().map(|key| 8 + self.value(key).len()).sum();
                if len > MAX_REPLY {
                    return Err(format!("MULTI_GET of {len} bytes; at most {MAX_REPLY} are sent"));
                }
                reply(keys.iter().fold(Writer::default(), |writer, key| writer.string(self.value(key))).finish());
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    self.put(key, value, replies)?;
                }
            }
            Request::CancelWait => {
                self.forget_wait(client);
                self.leave_barrier(client);
                reply(vec![1]);
            }
            Request::Ping(nonce) => reply(nonce.to_le_bytes().to_vec()),
            Request::QueuePush(key, value) => {
                self.stored = room(self.stored, cost(&key, &value))?;
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.wake_one(&key, replies);
            }
            // The length as it was, and a value if there is one: clients wait with WAIT.
            Request::QueuePop(key) => {
                let queue = self.queues.get_mut(&key);
                let len = queue.as_ref().map_or(0, |queue| queue.len()) as i64;
                let popped = queue.and_then(VecDeque::pop_front);
                if let Some(value) = &popped {
                    self.stored -= cost(&key, value);
                    if len == 1 {
                        self.queues.remove(&key);
                    }
                }
                reply(len.to_le_bytes().into_iter().chain(popped.iter().flat_map(|value| string(value))).collect());
            }
            Request::QueueLen(key) => {
                reply((self.queues.get(&key).map_or(0, VecDeque::len) as i64).to_le_bytes().to_vec());
            }
            Request::ListKeys => {
                let len: usize = self.values.keys().map(|key| 8 + key.len()).sum();
                if len > MAX_REPLY {
                    return Err(format!("LIST_KEYS of {len} bytes; at most {MAX_REPLY} are sent"));
                }
                let count = (self.values.len() as i64).to_le_bytes();
                reply(count.into_iter().chain(self.values.keys().flat_map(|key| string(key))).collect());
            }
            Request::Barrier(key, world) => {
                // As PyTorch's server: the key counts arrivals, so who comes after the last one passes at once.
                let count = self.integer(&key)?.wrapping_add(1);
                if count >= world {
                    reply(vec![0]);
                    for other in self.barriers.remove(&key).unwrap_or_default() {
                        self.at_barrier.remove(&other);
                        replies.push(Reply::new(other, vec![0]));
                    }
                } else {
                    self.leave_barrier(client);
                    self.barriers.entry(key.clone()).or_default().insert(client);
                    self.at_barrier.insert(client, key.clone());
                }
                self.put(key, count.to_string().into_bytes(), replies)?;
            }
            Request::LastWord(key, word) => {
                if self.words_of.get(&client).map_or(0, Vec::len) == MAX_WORDS {
                    return Err(format!("more than {MAX_WORDS} last words of one client"));
                }
                // They are kept twice.
                self.stored = room(self.stored, 2 * cost(&key, &word))?;
                let words = self.words_of.entry(client).or_default();
                words.push((key.clone(), word.clone()));
                *self.words.entry((key, word)).or_default() += 1;
                reply(vec![0]);
            }
            Request::Challenge(_) | Request::Proof(_) => return Err("a proof in the middle".to_owned()),
        }
        Ok(())
    }

    /// A client is dropped because there is no room. It has not gone by itself, so its last words are not passed on; why it was dropped it finds under [`SERVER_KEY`].
    fn turn_away(&mut self, client: Client) {
        let (stored, keys) = (self.stored, self.values.len());
        self.full = format!("it keeps {stored} bytes in {keys} keys, and at most {MAX_STORED} bytes").into_bytes();
        for of_both in self.words_of.remove(&client).unwrap_or_default() {
            self.stored -= 2 * cost(&of_both.0, &of_both.1);
            if let Some(connections) = self.words.get_mut(&of_both) {
                *connections -= 1;
                if *connections == 0 {
                    self.words.remove(&of_both);
                }
            }
        }
    }

    /// Forgets a client that has gone, and passes on its last words.
    pub(super) fn leave(&mut self, client: Client, replies: &mut Replies) {
        self.forget_wait(client);
        self.leave_barrier(client);
        for (key, word) in self.words_of.remove(&client).unwrap_or_default() {
            self.stored -= 2 * cost(&key, &word);
            let of_both = (key, word);
            let Some(connections) = self.words.get_mut(&of_both) else { continue };
            *connections -= 1;
            if *connections > 0 {
                continue;
            }
            self.words.remove(&of_both);
            let (key, word) = of_both;
            let Ok(count) = self.integer(&key).map(|count| count.wrapping_add(1)) else { continue };
            let numbered = [&key[..], b"/", count.to_string().as_bytes()].concat();
            // The value first: who sees the count finds it. A table that is full has no room for last words either.
            for (key, value) in [(numbered, word), (key, count.to_string().into_bytes())] {
                let _ = self.put(key, value, replies);
            }
        }
    }

    fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key) || key == SERVER_KEY
    }

    fn value(&self, key: &[u8]) -> &[u8] {
        if key == SERVER_KEY && self.stored > MAX_STORED / 2 {
            return &self.full;
        }
        self.values.get(key).map_or(&[], Vec::as_slice)
    }

    /// What a counter holds; 0 when there is none.
    fn integer(&self, key: &[u8]) -> Result<i64, String> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        let value = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned())
    }

    fn put(&mut self, key: Key, value: Vec<u8>, replies: &mut Replies) -> Result<(), String> {
        // Where there is no room, what stood there stays.
        let without = self.stored - self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.stored = room(without, cost(&key, &value))?;
        if self.waiters.contains_key(&key) {
            self.values.insert(key.clone(), value);
            self.wake(&key, replies);
        } else {
            self.values.insert(key, value);
        }
        Ok(())
    }

    fn remove(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let value = self.values.remove(key)?;
        self.stored -= cost(key, &value);
        Some(value)
    }

    fn wait(&mut self, client: Client, keys: Vec<Key>, missing: usize, any: bool) -> Result<(), String> {
        self.forget_wait(client);
        // Each is kept twice.
        let bytes = ENTRY + keys.iter().map(|key| 2 * cost(key, b"")).sum::<usize>();
        self.stored = room(self.stored, bytes)?;
        let ticket = self.tickets;
        self.tickets += 1;
        let mut distinct = 0;
        for key in &keys {
            distinct += usize::from(self.waiters.entry(key.clone()).or_default().insert(ticket, client).is_none());
        }
        let missing = if any { missing } else { distinct };
        self.waiting.insert(client, Waiting { ticket, keys, missing, any, bytes });
        Ok(())
    }

    /// Wakes the clients for which this key was the last missing one.
    fn wake(&mut self, key: &[u8], replies: &mut Replies) {
        let mut value = None;
        for client in self.waiters.remove(key).unwrap_or_default().into_values() {
            replies.extend(self.came(client, key, &mut value));
        }
    }

    /// Wakes one client for which this key was the last missing one: a value in a queue is for one.
    fn wake_one(&mut self, key: &[u8], replies: &mut Replies) {
        while let Some((ticket, client)) = self.waiters.get(key).and_then(BTreeMap::first_key_value) {
            let (ticket, client) = (*ticket, *client);
            self.unlist(key, ticket);
            if let Some(reply) = self.came(client, key, &mut None) {
                replies.push(reply);
                return;
            }
        }
    }

    /// A key came that this client waited for. Its reply, if that was all; `value` is the key's, once somebody needed it.
    fn came(&mut self, client: Client, key: &[u8], value: &mut Option<Arc<[u8]>>) -> Option<Reply> {
        let waiting = self.waiting.get_mut(&client)?;
        waiting.missing -= 1;
        if waiting.missing > 0 {
            return None;
        }
        let (any, index) = (waiting.any, waiting.keys.iter().position(|known| known == key));
        self.forget_wait(client);
        if !any {
            return Some(Reply::new(client, vec![0]));
        }
        let value = Arc::clone(value.get_or_insert_with(|| self.value(key).into()));
        let bytes = [&found(index.unwrap_or(0))[..], &(value.len() as u64).to_le_bytes()].concat();
        Some(Reply { to: client, bytes, value: Some(value) })
    }

    fn forget_wait(&mut self, client: Client) {
        if let Some(waiting) = self.waiting.remove(&client) {
            self.stored -= waiting.bytes;
            for key in &waiting.keys {
                self.unlist(key, waiting.ticket);
            }
        }
    }

    fn unlist(&mut self, key: &[u8], ticket: u64) {
        if let Some(waiters) = self.waiters.get_mut(key) {
            waiters.remove(&ticket);
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
        }
    }

    fn leave_barrier(&mut self, client: Client) {
        let Some(key) = self.at_barrier.remove(&client) else { return };
        if let Some(clients) = self.barriers.get_mut(&key) {
            clients.remove(&client);
            if clients.is_empty() {
                self.barriers.remove(&key);
            }
        }
    }
}

/// What begins the answer to WAIT_ANY; the value follows.
fn found(index: usize) -> Vec<u8> {
    [&[0][..], &(index as i64).to_le_bytes()].concat()
}

/// What a pair counts for.
fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY
}

/// What is stored with this much more, if it may be.
fn room(stored: usize, more: usize) -> Result<usize, String> {
    let stored = stored + more;
    if stored > MAX_STORED { Err(FULL.to_owned()) } else { Ok(stored) }
}

fn string(bytes: &[u8]) -> Vec<u8> {
    Writer::default().string(bytes).finish()
}
