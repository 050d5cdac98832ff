//! What the server keeps: values, queues, barriers, last words, and which clients wait for what. No sockets here.
//!
//! One call does a bounded amount of work, whatever a client asks for: a request that lists keys becomes a [`Task`], which is carried out in
//! steps; values are handed out by reference; what hostile clients can make large is a BTreeMap, which never stops to copy all of itself.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::frame::{MAGIC, MAX_KEY, MAX_VALUE, Request, SERVER_KEY, Writer};
use super::value::{Loose, Value};

mod task;
#[cfg(test)]
mod tests;
mod waits;

pub(super) use task::Task;
use waits::{Over, Waiting};

/// A client, by the server's number for it.
pub(super) type Client = u64;

type Key = Vec<u8>;

/// The longest reply to one request, in bytes: a short request can name a large value many times.
const MAX_REPLY: usize = 4 * MAX_VALUE;
/// The most bytes of keys and values that are kept, counting [`ENTRY`] for each pair.
pub(super) const MAX_STORED: usize = 1 << 30;
/// What a pair costs beside its bytes, about: also where both are tiny, and while its table grows.
const ENTRY: usize = 256;
/// Why a client is dropped when there is no room for what it asks to keep, and when there is none for its wait.
const FULL: &str = "no room";
const WAITS_FULL: &str = "no room for waits";
/// The most bytes of waits for many keys, beside what is stored: nobody who stores something is refused for what others wait for.
const MAX_WAITS: usize = 256 << 20;
/// A wait of up to so many bytes is always taken.
const SMALL_WAIT: usize = 64 << 10;
/// The most last words of one client, and the bytes of each.
const MAX_WORDS: usize = 16;
const MAX_WORD: usize = MAX_KEY;
/// The longest text of an integer, with the white space around it.
const MAX_INTEGER: usize = 256;
/// What looking for a key counts for, beside its bytes, in the unit of [`Table::take_work`].
const LOOK: usize = 256;

/// The state behind the operations.
#[derive(Default)]
pub(super) struct Table {
    values: BTreeMap<Key, Value>,
    queues: BTreeMap<Key, VecDeque<Value>>,
    stored: usize,
    /// Bytes of the answer to LIST_KEYS, beside its count.
    listed: usize,
    loose: Loose,
    /// What was done since [`Table::take_work`] asked the last time.
    work: usize,
    barriers: BTreeMap<Key, HashSet<Client>>,
    at_barrier: HashMap<Client, Key>,
    waiting: HashMap<Client, Waiting>,
    /// What the waits take, in bytes, also those that are over and not yet tidied up.
    waits: usize,
    /// Who waits for a key, by ticket, so the first to come is first: the client, and which of the wait's keys it is. Tickets of waits that are
    /// over may still stand here, see `over`.
    waiters: BTreeMap<Key, BTreeMap<u64, (Client, usize)>>,
    tickets: u64,
    /// Waits that are over and whose tickets are still to be taken out of `waiters`.
    over: VecDeque<Over>,
    /// By key and word: how many connections left them. And by client, which it left.
    words: BTreeMap<(Key, Vec<u8>), usize>,
    words_of: HashMap<Client, Vec<(Key, Vec<u8>)>>,
    /// What there was when there was no room the last time, under [`FULL`] or [`WAITS_FULL`], the newest last: the value of [`SERVER_KEY`] while much
    /// of it is still there.
    full: Vec<(&'static str, Value)>,
}

/// What to send to whom after a request.
pub(super) struct Reply {
    pub(super) to: Client,
    pub(super) bytes: Vec<u8>,
    /// What follows the bytes, kept once however many wait for it.
    pub(super) value: Option<Value>,
}

impl Reply {
    fn new(to: Client, bytes: Vec<u8>) -> Reply {
        Reply { to, bytes, value: None }
    }

    /// Those bytes, and the value as a string: its length comes before it.
    fn string(to: Client, mut bytes: Vec<u8>, value: &Value) -> Reply {
        bytes.extend((value.len() as u64).to_le_bytes());
        Reply { to, bytes, value: Some(value.clone()) }
    }
}

pub(super) type Replies = Vec<Reply>;

impl Table {
    /// Carries out one request, or gives back what is to be carried out by [`Table::advance`] before the client's next request. `Err` says why
    /// the client is to be dropped.
    ///
    /// What is to be sent goes to `replies`, also beside an error: others may have been woken before it.
    pub(super) fn handle(
        &mut self,
        client: Client,
        request: Request,
        replies: &mut Replies,
    ) -> Result<Option<Task>, String> {
        let begun = self.begin(client, request, replies);
        self.done(client, begun)
    }

    /// One step of a client's task; whether that was the last one. Small tasks are done in one step, so nothing comes between their keys.
    pub(super) fn advance(&mut self, client: Client, task: &mut Task, replies: &mut Replies) -> Result<bool, String> {
        let stepped = self.step(client, task, replies);
        self.done(client, stepped)
    }

    /// What came of a request or a step. A client that there is no room for is turned away here.
    fn done<T>(&mut self, client: Client, done: Result<T, String>) -> Result<T, String> {
        if let Err(why) = &done {
            match why.as_str() {
                FULL => self.turn_away(client, FULL),
                WAITS_FULL => self.turn_away(client, WAITS_FULL),
                _ => {}
            }
        }
        done
    }

    fn begin(&mut self, client: Client, request: Request, replies: &mut Replies) -> Result<Option<Task>, String> {
        self.work += LOOK;
        let mut reply = |bytes: Vec<u8>| replies.push(Reply::new(client, bytes));
        match request {
            Request::Validate(MAGIC) => {}
            Request::Validate(word) => return Err(format!("the greeting is {word:#x}, not {MAGIC:#x}")),
            Request::Set(key, value) => self.put(key, value, replies)?,
            Request::CompareSet(key, expected, desired) => {
                let stands = self.values.get(&key);
                if stands.map_or(expected.is_empty(), |value| value[..] == expected) {
                    let desired = Value::new(desired, &self.loose);
                    replies.push(Reply::string(client, Vec::new(), &desired));
                    self.put_value(key, desired, replies)?;
                } else {
                    replies.push(match stands {
                        Some(value) => Reply::string(client, Vec::new(), value),
                        None => Reply::new(client, string(&expected)),
                    });
                }
            }
            Request::Get(key) => replies.push(match self.value(&key) {
                Some(value) => Reply::string(client, Vec::new(), value),
                None => Reply::new(client, string(&[])),
            }),
            Request::Add(key, amount) => {
                let sum = self.integer(&key)?.wrapping_add(amount);
                reply(sum.to_le_bytes().to_vec());
                self.put(key, sum.to_string().into_bytes(), replies)?;
            }
            Request::Check(keys) => return Ok(Some(Task::Check(keys))),
            Request::Wait(keys) => return self.wait(client, keys, false).map(Some),
            Request::WaitAny(keys) => return self.wait(client, keys, true).map(Some),
            Request::MultiGet(keys) => return Ok(Some(Task::MultiGet { keys, length: Some(0) })),
            Request::MultiSet(pairs) => return Ok(Some(Task::MultiSet(pairs))),
            Request::ListKeys => return self.list().map(Some),
            Request::NumKeys => reply((self.values.len() as i64).to_le_bytes().to_vec()),
            Request::Delete(key) => reply(i64::from(self.remove(&key)).to_le_bytes().to_vec()),
            Request::Append(key, more) => self.append(key, more, replies)?,
            Request::CancelWait => {
                self.forget_wait(client);
                self.leave_barrier(client);
                reply(vec![1]);
            }
            Request::Ping(nonce) => reply(nonce.to_le_bytes().to_vec()),
            Request::QueuePush(key, value) => {
                self.stored = room(self.stored, cost(&key, &value))?;
                let value = Value::new(value, &self.loose);
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.wake_one(&key, replies);
            }
            // The length as it was, and a value if there is one: clients wait with WAIT.
            Request::QueuePop(key) => {
                let queue = self.queues.get_mut(&key);
                let len = queue.as_ref().map_or(0, |queue| queue.len()) as i64;
                let popped = queue.and_then(VecDeque::pop_front);
                let len_bytes = len.to_le_bytes().to_vec();
                let Some(value) = popped else {
                    reply(len_bytes);
                    return Ok(None);
                };
                self.stored -= cost(&key, &value);
                if len == 1 {
                    self.queues.remove(&key);
                }
                replies.push(Reply::string(client, len_bytes, &value));
                value.let_go();
            }
            Request::QueueLen(key) => {
                reply((self.queues.get(&key).map_or(0, VecDeque::len) as i64).to_le_bytes().to_vec());
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
                if word.len() > MAX_WORD {
                    return Err(format!("a last word of {} bytes; at most {MAX_WORD} are taken", word.len()));
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
        Ok(None)
    }

    /// How much was done since this was asked the last time: about one for each byte that was looked at or written, and [`LOOK`] for each key.
    pub(super) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Adds what was done for the table elsewhere.
    pub(super) fn count_work(&mut self, work: usize) {
        self.work += work;
    }

    /// Bytes of values that are here no longer, but that unread replies keep.
    pub(super) fn loose(&self) -> usize {
        self.loose.bytes()
    }

    /// Whether this client waits for something, or has left a word for the time when it has gone.
    pub(super) fn has_stake(&self, client: Client) -> bool {
        self.waiting.contains_key(&client)
            || self.at_barrier.contains_key(&client)
            || self.words_of.contains_key(&client)
    }

    /// A client is dropped because there is no room. It has not gone by itself, so its last words are not passed on; why it was dropped, and what
    /// to do, it finds under [`SERVER_KEY`].
    fn turn_away(&mut self, client: Client, why: &'static str) {
        let said = if why == WAITS_FULL {
            let waits = self.waits;
            format!(
                "the keys that its clients wait for take {waits} bytes, and at most {MAX_WAITS} bytes; wait for fewer keys at a time"
            )
        } else {
            let (stored, keys) = (self.stored, self.values.len());
            format!(
                "it keeps {stored} bytes in {keys} keys, and at most {MAX_STORED} bytes; remove keys that the program has put there itself"
            )
        };
        self.full.retain(|(known, _)| *known != why);
        self.full.push((why, Value::new(said.into_bytes(), &self.loose)));
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

    fn value(&self, key: &[u8]) -> Option<&Value> {
        if key == SERVER_KEY {
            let is_so = |why| if why == WAITS_FULL { self.waits > MAX_WAITS / 2 } else { self.stored > MAX_STORED / 2 };
            if let Some((_, said)) = self.full.iter().rev().find(|(why, _)| is_so(*why)) {
                return Some(said);
            }
        }
        self.values.get(key)
    }

    /// What a counter holds; 0 when there is none.
    fn integer(&self, key: &[u8]) -> Result<i64, String> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        // Longer ones are no number, and looking for one in megabytes would take long.
        let value = value.get(..).filter(|value| value.len() <= MAX_INTEGER);
        let value = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned())
    }

    fn put(&mut self, key: Key, value: Vec<u8>, replies: &mut Replies) -> Result<(), String> {
        let value = Value::new(value, &self.loose);
        self.put_value(key, value, replies)
    }

    fn put_value(&mut self, key: Key, value: Value, replies: &mut Replies) -> Result<(), String> {
        self.work += LOOK + key.len();
        // Where there is no room, what stood there stays.
        let without = self.stored - self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.stored = room(without, cost(&key, &value))?;
        let wakes = self.waiters.contains_key(&key).then(|| (key.clone(), value.clone()));
        let len = listed(&key);
        match self.values.insert(key, value) {
            Some(old) => old.let_go(),
            None => self.listed += len,
        }
        if let Some((key, value)) = wakes {
            self.wake(&key, &value, replies);
        }
        Ok(())
    }

    fn append(&mut self, key: Key, more: Vec<u8>, replies: &mut Replies) -> Result<(), String> {
        let Some(value) = self.values.get_mut(&key) else { return self.put(key, more, replies) };
        let len = value.len() + more.len();
        if len > MAX_VALUE {
            return Err(format!("APPEND makes a value of {len} bytes"));
        }
        self.stored = room(self.stored, more.len())?;
        match value.alone() {
            Some(bytes) => bytes.extend(more),
            // Replies hold the value as it was.
            None => {
                self.work += len;
                let longer = Value::new([&value[..], &more].concat(), &self.loose);
                std::mem::replace(value, longer).let_go();
            }
        }
        Ok(())
    }

    /// Whether there was one.
    fn remove(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else { return false };
        self.stored -= cost(key, &value);
        self.listed -= listed(key);
        value.let_go();
        true
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

/// What a key adds to the answer to LIST_KEYS.
fn listed(key: &[u8]) -> usize {
    8 + key.len()
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
