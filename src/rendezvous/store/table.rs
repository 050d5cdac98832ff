//! What the server keeps: values, queues, barriers, and which clients wait for what. No sockets here.

use std::collections::{HashMap, HashSet, VecDeque};

use super::frame::{MAGIC, MAX_VALUE, Request, Writer};

/// A client, by the server's number for it.
pub(super) type Client = u64;

type Key = Vec<u8>;

/// The longest reply to one request, in bytes: a short request can name a large value many times.
pub(super) const MAX_REPLY: usize = 4 * MAX_VALUE;

/// The state behind the operations.
#[derive(Default)]
pub(super) struct Table {
    values: HashMap<Key, Vec<u8>>,
    queues: HashMap<Key, VecDeque<Vec<u8>>>,
    barriers: HashMap<Key, Vec<Client>>,
    /// Clients in WAIT, with the keys that are still missing.
    waiting: HashMap<Client, HashSet<Key>>,
    /// The same by key.
    waiters: HashMap<Key, Vec<Client>>,
}

/// What to send to whom after a request.
pub(super) type Replies = Vec<(Client, Vec<u8>)>;

impl Table {
    /// Carries out one request. `Err` says why the client is to be dropped.
    pub(super) fn handle(&mut self, client: Client, request: Request) -> Result<Replies, String> {
        let mut replies = Vec::new();
        let mut reply = |bytes: Vec<u8>| replies.push((client, bytes));
        match request {
            Request::Validate(MAGIC) => {}
            Request::Validate(word) => return Err(format!("the greeting is {word:#x}, not {MAGIC:#x}")),
            Request::Set(key, value) => return Ok(self.put(key, value)),
            Request::CompareSet(key, expected, desired) => match self.values.get(&key) {
                None if expected.is_empty() => {
                    reply(string(&desired));
                    replies.extend(self.put(key, desired));
                }
                None => reply(string(&expected)),
                Some(value) if *value == expected => {
                    reply(string(&desired));
                    replies.extend(self.put(key, desired));
                }
                Some(value) => reply(string(value)),
            },
            Request::Get(key) => reply(string(self.values.get(&key).map_or(&[], Vec::as_slice))),
            Request::Add(key, amount) => {
                let sum = self.integer(&key)?.wrapping_add(amount);
                reply(sum.to_le_bytes().to_vec());
                replies.extend(self.put(key, sum.to_string().into_bytes()));
            }
            Request::Check(keys) => {
                let all = keys.iter().all(|key| self.has(key));
                reply(vec![u8::from(!all)]);
            }
            Request::Wait(keys) => {
                let missing: HashSet<Key> = keys.into_iter().filter(|key| !self.has(key)).collect();
                if missing.is_empty() {
                    reply(vec![0]);
                } else {
                    self.forget_wait(client);
                    for key in &missing {
                        self.waiters.entry(key.clone()).or_default().push(client);
                    }
                    self.waiting.insert(client, missing);
                }
            }
            Request::NumKeys => reply((self.values.len() as i64).to_le_bytes().to_vec()),
            Request::Delete(key) => {
                let gone = self.values.remove(&key).is_some();
                reply(i64::from(gone).to_le_bytes().to_vec());
            }
            Request::Append(key, more) => {
                let mut value = self.values.remove(&key).unwrap_or_default();
                if value.len() + more.len() > MAX_VALUE {
                    return Err(format!("APPEND makes a value of {} bytes", value.len() + more.len()));
                }
                value.extend(more);
                return Ok(self.put(key, value));
            }
            Request::MultiGet(keys) => {
                let len: usize = keys.iter().map(|key| 8 + self.values.get(key).map_or(0, Vec::len)).sum();
                if len > MAX_REPLY {
                    return Err(format!("MULTI_GET of {len} bytes; at most {MAX_REPLY} are sent"));
                }
                reply(keys.iter().flat_map(|key| string(self.values.get(key).map_or(&[], Vec::as_slice))).collect());
            }
            Request::MultiSet(pairs) => {
                return Ok(pairs.into_iter().flat_map(|(key, value)| self.put(key, value)).collect());
            }
            Request::CancelWait => {
                self.leave(client);
                reply(vec![1]);
            }
            Request::Ping(nonce) => reply(nonce.to_le_bytes().to_vec()),
            Request::QueuePush(key, value) => {
                self.queues.entry(key.clone()).or_default().push_back(value);
                return Ok(self.wake_one(&key));
            }
            // The length as it was, and a value if there is one: clients wait with WAIT.
            Request::QueuePop(key) => {
                let queue = self.queues.get_mut(&key);
                let mut answer = (queue.as_ref().map_or(0, |queue| queue.len()) as i64).to_le_bytes().to_vec();
                answer.extend(queue.and_then(VecDeque::pop_front).iter().flat_map(|value| string(value)));
                reply(answer);
            }
            Request::QueueLen(key) => {
                reply((self.queues.get(&key).map_or(0, VecDeque::len) as i64).to_le_bytes().to_vec());
            }
            Request::ListKeys => {
                let count = (self.values.len() as i64).to_le_bytes();
                reply(count.into_iter().chain(self.values.keys().flat_map(|key| string(key))).collect());
            }
            Request::Barrier(key, world) => {
                // As PyTorch's server: the key counts arrivals, so who comes after the last one passes at once.
                let count = self.integer(&key)?.wrapping_add(1);
                if count >= world {
                    reply(vec![0]);
                    let others = self.barriers.remove(&key).unwrap_or_default();
                    replies.extend(others.into_iter().map(|client| (client, vec![0])));
                } else {
                    self.barriers.entry(key.clone()).or_default().push(client);
                }
                replies.extend(self.put(key, count.to_string().into_bytes()));
            }
        }
        Ok(replies)
    }

    /// Forgets what a client waits for: it has gone, or waits no more.
    pub(super) fn leave(&mut self, client: Client) {
        self.forget_wait(client);
        self.barriers.retain(|_, clients| {
            clients.retain(|known| *known != client);
            !clients.is_empty()
        });
    }

    fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    /// What a counter holds; 0 when there is none.
    fn integer(&self, key: &[u8]) -> Result<i64, String> {
        let Some(value) = self.values.get(key) else { return Ok(0) };
        let value = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok());
        value.ok_or_else(|| "a counter was expected where a value stands that is no integer".to_owned())
    }

    fn put(&mut self, key: Key, value: Vec<u8>) -> Replies {
        let replies = self.wake(&key);
        self.values.insert(key, value);
        replies
    }

    /// The clients for which this key was the last missing one.
    fn wake(&mut self, key: &[u8]) -> Replies {
        let mut replies = Vec::new();
        for client in self.waiters.remove(key).unwrap_or_default() {
            let Some(missing) = self.waiting.get_mut(&client) else { continue };
            missing.remove(key);
            if missing.is_empty() {
                self.waiting.remove(&client);
                replies.push((client, vec![0]));
            }
        }
        replies
    }

    fn forget_wait(&mut self, client: Client) {
        for key in self.waiting.remove(&client).unwrap_or_default() {
            if let Some(clients) = self.waiters.get_mut(&key) {
                clients.retain(|known| *known != client);
                if clients.is_empty() {
                    self.waiters.remove(&key);
                }
            }
        }
    }

    /// One client for which this key was the last missing one: a value in a queue is for one.
    fn wake_one(&mut self, key: &[u8]) -> Replies {
        let only_this = |client: &Client| self.waiting.get(client).is_some_and(|missing| missing.len() == 1);
        let Some(client) = self.waiters.get(key).and_then(|clients| clients.iter().copied().find(only_this)) else {
            return Vec::new();
        };
        self.forget_wait(client);
        vec![(client, vec![0])]
    }
}

fn string(bytes: &[u8]) -> Vec<u8> {
    Writer::default().string(bytes).finish()
}
