//! Carries out the requests of clients.

use std::collections::VecDeque;

use super::super::frame::{MAGIC, Request};
use super::super::value::Value;
use super::limits::{MAX_STORED, Refusal, cost};
use super::state::{Client, Key, LOOK, Replies, Reply, Table, string};
use super::task::Task;

impl Table {
    /// Carries out one request, or returns a task that [`Table::advance`] carries out before the
    /// client's next request. `Err` says why the client is to be dropped. The replies go to
    /// `replies`, also beside an error, because other clients may have been woken before the error.
    pub(in crate::rendezvous::store) fn handle(
        &mut self,
        client: Client,
        request: Request,
        replies: &mut Replies,
    ) -> Result<Option<Task>, Refusal> {
        let begun = self.begin(client, request, replies);
        self.done(client, begun)
    }

    /// Does one step of a client's task, and returns whether it was the last one. Small tasks are
    /// done in one step, so nothing comes between their keys.
    pub(in crate::rendezvous::store) fn advance(
        &mut self,
        client: Client,
        task: &mut Task,
        replies: &mut Replies,
    ) -> Result<bool, Refusal> {
        let stepped = self.step(client, task, replies);
        self.done(client, stepped)
    }

    fn begin(&mut self, client: Client, request: Request, replies: &mut Replies) -> Result<Option<Task>, Refusal> {
        self.work += LOOK;
        let mut reply = |bytes: Vec<u8>| replies.push(Reply::new(client, bytes));
        match request {
            Request::Validate(MAGIC) => {}
            Request::Validate(word) => return Err(format!("the greeting is {word:#x}, not {MAGIC:#x}").into()),
            Request::Set(key, value) => self.put(client, key, value, replies)?,
            Request::CompareSet(key, expected, desired) => {
                let stands = self.values.get(&key);
                if stands.map_or(expected.is_empty(), |value| value[..] == expected) {
                    let desired = Value::new(desired, &self.loose);
                    replies.push(Reply::string(client, Vec::new(), &desired));
                    self.put_value(client, key, desired, replies)?;
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
                self.add(client, key, amount, replies)?;
            }
            Request::Count { counter, amount, last, key, value } => {
                let sum = self.add(client, counter, amount, replies)?;
                if sum == last && !self.values.contains_key(&key) {
                    self.put(client, key, value, replies)?;
                }
            }
            Request::Check(keys) => return Ok(Some(Task::Check(keys))),
            Request::Wait(keys) => return self.wait(client, keys, false).map(|()| Some(Task::Wait)),
            Request::WaitAny(keys) => return self.wait(client, keys, true).map(|()| Some(Task::Wait)),
            Request::MultiGet(keys) => return Ok(Some(Task::MultiGet { keys, length: Some(0) })),
            Request::MultiSet(pairs) => return Ok(Some(Task::MultiSet(pairs))),
            Request::ListKeys => return self.list().map(Some),
            Request::NumKeys => reply((self.values.len() as i64).to_le_bytes().to_vec()),
            Request::Delete(key) => reply(i64::from(self.remove(&key)).to_le_bytes().to_vec()),
            Request::Append(key, more) => self.append(client, key, more, replies)?,
            Request::CancelWait => {
                self.forget_wait(client);
                self.leave_barrier(client);
                reply(vec![1]);
            }
            Request::Ping(nonce) => reply(nonce.to_le_bytes().to_vec()),
            Request::QueuePush(key, value) => {
                self.stored = self.room(self.stored, cost(&key, &value), MAX_STORED)?;
                let value = Value::new(value, &self.loose);
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.wake_one(&key, replies);
            }
            // The reply is the length as it was, and a value if there is one. Clients wait with
            // WAIT.
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
                // The key counts arrivals, as in PyTorch's server, so a client that comes after the
                // last one passes at once.
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
                self.put(client, key, count.to_string().into_bytes(), replies)?;
            }
            Request::LastWord(key, word) => {
                self.keep_word(client, key, word)?;
                reply(vec![0]);
            }
            Request::Trunk => reply(vec![0]),
            Request::Handshake(_) => return Err("a handshake in the middle".to_owned().into()),
        }
        Ok(None)
    }

    /// Adds to a counter, replies with the sum, and returns it.
    fn add(&mut self, client: Client, counter: Key, amount: i64, replies: &mut Replies) -> Result<i64, Refusal> {
        let sum = self.integer(&counter)?.wrapping_add(amount);
        replies.push(Reply::new(client, sum.to_le_bytes().to_vec()));
        self.put(client, counter, sum.to_string().into_bytes(), replies)?;
        Ok(sum)
    }
}
