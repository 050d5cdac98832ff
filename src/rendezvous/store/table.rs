//! What the server keeps: values, queues, barriers, last words, and which clients wait for what. No sockets here.
//!
//! One call does a bounded amount of work, whatever a client asks for: a request that lists keys becomes a [`Task`], which is carried out in
//! steps; values are handed out by reference; what hostile clients can make large is a BTreeMap, which never stops to copy all of itself.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::IpAddr;

use super::frame::{MAGIC, MAX_KEY, MAX_VALUE, REFUSED_KEY, Request, SERVER_KEY, Writer};
use super::value::{Loose, Value};

mod limits;
mod task;
#[cfg(test)]
mod tests;
mod waits;

pub(super) use limits::Refusal;
use limits::{MAX_STORED, MOST_STORED, cost, cost_of_word, most_stored, room};
pub(super) use task::Task;
use waits::{Over, Waiting};

/// A client, by the server's number for it.
pub(super) type Client = u64;

type Key = Vec<u8>;

/// The longest reply to one request, in bytes: a short request can name a large value many times.
const MAX_REPLY: usize = 4 * MAX_VALUE;
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
    /// The part of the work that listed clients for keys they wait for, since [`Table::take_listing`] asked the last time.
    listing: usize,
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
    /// What clients that were refused for lack of room are told under [`SERVER_KEY`], while much of what filled the room is still there. Each
    /// kind of room has one entry at most. The newest entry is the last one.
    full: Vec<(Kind, Value)>,
    /// How many connections had the wrong secret or none, and what [`REFUSED_KEY`] says of them.
    refused: (u64, Option<Value>),
}

/// What there can be no room for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stored,
    Waits,
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
    ) -> Result<Option<Task>, Refusal> {
        let begun = self.begin(client, request, replies);
        self.done(client, begun)
    }

    /// One step of a client's task; whether that was the last one. Small tasks are done in one step, so nothing comes between their keys.
    pub(super) fn advance(&mut self, client: Client, task: &mut Task, replies: &mut Replies) -> Result<bool, Refusal> {
        let stepped = self.step(client, task, replies);
        self.done(client, stepped)
    }

    /// What came of a request or a step. A client that there is no room for is turned away here.
    fn done<T>(&mut self, client: Client, done: Result<T, Refusal>) -> Result<T, Refusal> {
        match &done {
            Err(Refusal::StoreFull(most)) => {
                let (stored, keys) = (self.stored, self.values.len());
                let said = format!(
                    "it keeps {stored} bytes in {keys} keys, and at most {most} bytes; remove keys that the program has put there itself"
                );
                self.turn_away(client, Kind::Stored, said);
            }
            Err(Refusal::WaitsFull) => {
                let waits = self.waits;
                let said = format!(
                    "the keys that its clients wait for take {waits} bytes, and at most {MAX_WAITS} bytes; wait for fewer keys at a time"
                );
                self.turn_away(client, Kind::Waits, said);
            }
            Err(Refusal::Protocol(_)) | Ok(_) => {}
        }
        done
    }

    fn begin(&mut self, client: Client, request: Request, replies: &mut Replies) -> Result<Option<Task>, Refusal> {
        self.work += LOOK;
        let mut reply = |bytes: Vec<u8>| replies.push(Reply::new(client, bytes));
        match request {
            Request::Validate(MAGIC) => {}
            Request::Validate(word) => return Err(format!("the greeting is {word:#x}, not {MAGIC:#x}").into()),
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
                self.stored = room(self.stored, cost(&key, &value), MAX_STORED)?;
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
                    return Err(format!("more than {MAX_WORDS} last words of one client").into());
                }
                if word.len() > MAX_WORD {
                    let len = word.len();
                    return Err(format!("a last word of {len} bytes; at most {MAX_WORD} are taken").into());
                }
                // A client that was refused for lack of room leaves its word again when it connects again.
                self.stored = room(self.stored, cost_of_word(&key, &word), MOST_STORED)?;
                let words = self.words_of.entry(client).or_default();
                words.push((key.clone(), word.clone()));
                *self.words.entry((key, word)).or_default() += 1;
                reply(vec![0]);
            }
            Request::Challenge(_) | Request::Proof(_) => return Err("a proof in the middle".to_owned().into()),
        }
        Ok(None)
    }

    /// How much was done since this was asked the last time: about one for each byte that was looked at or written, and [`LOOK`] for each key.
    pub(super) fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// How much work went into listing clients for keys since this was asked the last time. Taking them out of the lists again is as much.
    pub(super) fn take_listing(&mut self) -> usize {
        std::mem::take(&mut self.listing)
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
    fn turn_away(&mut self, client: Client, kind: Kind, said: String) {
        self.full.retain(|(known, _)| *known != kind);
        self.full.push((kind, Value::new(said.into_bytes(), &self.loose)));
        for of_both in self.words_of.remove(&client).unwrap_or_default() {
            self.stored -= cost_of_word(&of_both.0, &of_both.1);
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
            self.stored -= cost_of_word(&key, &word);
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
            // The value first: who sees the count finds it. There is room for both, because the room that the word took is free now.
            for (key, value) in [(numbered, word), (key, count.to_string().into_bytes())] {
                let value = Value::new(value, &self.loose);
                let _ = self.put_up_to(MOST_STORED, key, value, replies);
            }
        }
    }

    /// Notes that a connection from that address was refused, because it had the wrong secret or none. `why` ends the sentence "N connections ...".
    pub(super) fn note_refused(&mut self, from: IpAddr, why: &str) {
        self.refused.0 += 1;
        let number = self.refused.0;
        let noun = if number == 1 { "connection" } else { "connections" };
        let said = format!("the store refused {number} {noun}, the last one from {from}, {why}");
        self.refused.1 = Some(Value::new(said.into_bytes(), &self.loose));
    }

    fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
            || self.queues.contains_key(key)
            || key == SERVER_KEY
            || key == REFUSED_KEY && self.refused.1.is_some()
    }

    fn value(&self, key: &[u8]) -> Option<&Value> {
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
    fn integer(&self, key: &[u8]) -> Result<i64, Refusal> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        // Longer ones are no number, and looking for one in megabytes would take long.
        let value = value.get(..).filter(|value| value.len() <= MAX_INTEGER);
        let value = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned().into())
    }

    fn put(&mut self, key: Key, value: Vec<u8>, replies: &mut Replies) -> Result<(), Refusal> {
        let value = Value::new(value, &self.loose);
        self.put_value(key, value, replies)
    }

    fn put_value(&mut self, key: Key, value: Value, replies: &mut Replies) -> Result<(), Refusal> {
        self.put_up_to(most_stored(&key, value.len()), key, value, replies)
    }

    /// Stores the pair if no more than `most` bytes are stored then.
    fn put_up_to(&mut self, most: usize, key: Key, value: Value, replies: &mut Replies) -> Result<(), Refusal> {
        self.work += LOOK + key.len();
        // Where there is no room, what stood there stays.
        let without = self.stored - self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.stored = room(without, cost(&key, &value), most)?;
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

    fn append(&mut self, key: Key, more: Vec<u8>, replies: &mut Replies) -> Result<(), Refusal> {
        let Some(value) = self.values.get_mut(&key) else { return self.put(key, more, replies) };
        let len = value.len() + more.len();
        if len > MAX_VALUE {
            return Err(format!("APPEND makes a value of {len} bytes").into());
        }
        self.stored = room(self.stored, more.len(), most_stored(&key, len))?;
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

fn string(bytes: &[u8]) -> Vec<u8> {
    Writer::default().string(bytes).finish()
}
