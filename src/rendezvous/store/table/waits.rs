//! Carries out WAIT and WAIT_ANY. A client may wait for many keys, so it is put into the lists of
//! these keys, and taken out again, step by step.

use std::collections::BTreeMap;

use super::super::frame::Strings;
use super::super::value::Value;
use super::limits::{ENTRY, MAX_WAITS, Refusal, SMALL_WAIT, Step, cost};
use super::state::{Client, EndedWait, LOOK, Replies, Reply, Table, Waiting};

/// A wait for no more keys than this is taken out of the lists at once.
const FEW: usize = 64;

impl Table {
    /// Begins a wait. [`Table::list_waits`] puts the client into the lists of the keys.
    pub(super) fn wait(&mut self, client: Client, keys: Strings, any: bool) -> Result<(), Refusal> {
        self.forget_wait(client);
        // The bytes of the keys stay as long as the wait.
        let bytes = ENTRY + keys.memory();
        if bytes > SMALL_WAIT && self.waits + bytes > MAX_WAITS {
            return Err(Refusal::WaitsFull);
        }
        self.waits += bytes;
        let ticket = self.tickets;
        self.tickets += 1;
        self.waiting.insert(client, Waiting { ticket, keys, missing: 0, any, bytes });
        Ok(())
    }

    /// Puts a client into the lists of some more of the keys that it waits for. Returns whether
    /// these were the last ones, or it waits no longer.
    pub(super) fn list_waits(&mut self, client: Client, replies: &mut Replies) -> Result<bool, Refusal> {
        let Some(mut waiting) = self.waiting.remove(&client) else { return Ok(true) };
        let mut step = Step::default();
        while step.goes_on() {
            let (index, any, ticket) = (waiting.keys.taken(), waiting.any, waiting.ticket);
            let Some(key) = waiting.keys.take() else {
                match waiting.missing {
                    0 if !any => {
                        replies.push(Reply::new(client, vec![0]));
                        self.end_wait(waiting);
                    }
                    _ => drop(self.waiting.insert(client, waiting)),
                }
                return Ok(true);
            };
            step.key(key.len());
            self.work += LOOK + key.len();
            self.listing += LOOK + key.len();
            if any {
                if let Some(value) = self.value(key) {
                    replies.push(found(client, index, value));
                    self.end_wait(waiting);
                    return Ok(true);
                }
            } else if self.has(key) {
                continue;
            }
            let bytes = cost(key, b"");
            if waiting.bytes + bytes > SMALL_WAIT && self.waits + bytes > MAX_WAITS {
                self.end_wait(waiting);
                return Err(Refusal::WaitsFull);
            }
            self.waits += bytes;
            let listed = self.waiters.entry(key.to_vec()).or_default();
            let before = listed.len();
            listed.entry(ticket).or_insert((client, index));
            waiting.missing += listed.len() - before;
            waiting.bytes += bytes;
        }
        self.waiting.insert(client, waiting);
        Ok(false)
    }

    /// Wakes the clients for which this key was the last missing one; `value` is the key's value.
    pub(super) fn wake(&mut self, key: &[u8], value: &Value, replies: &mut Replies) {
        for (ticket, (client, index)) in self.waiters.remove(key).unwrap_or_default() {
            replies.extend(self.key_arrived(client, ticket, index, Some(value)));
        }
    }

    /// Wakes one client for which this key was the last missing one, because a value in a queue is
    /// for one client.
    pub(super) fn wake_one(&mut self, key: &[u8], replies: &mut Replies) {
        while let Some((ticket, (client, index))) = self.waiters.get(key).and_then(BTreeMap::first_key_value) {
            let (ticket, client, index) = (*ticket, *client, *index);
            self.unlist(key, ticket);
            if let Some(reply) = self.key_arrived(client, ticket, index, None) {
                replies.push(reply);
                return;
            }
        }
    }

    /// Notes that a key has come for which this client waits under that ticket. Returns the
    /// client's reply, if that was the last key.
    fn key_arrived(&mut self, client: Client, ticket: u64, index: usize, value: Option<&Value>) -> Option<Reply> {
        self.work += LOOK;
        let waiting = self.waiting.get_mut(&client).filter(|waiting| waiting.ticket == ticket)?;
        waiting.missing -= 1;
        let any = waiting.any;
        // A client that is not in the lists of all its keys yet is answered when it is.
        let listed = waiting.keys.taken() == waiting.keys.count();
        if !any && (waiting.missing > 0 || !listed) {
            return None;
        }
        self.forget_wait(client);
        match value {
            _ if !any => Some(Reply::new(client, vec![0])),
            Some(value) => Some(found(client, index, value)),
            None => Some(Reply::new(client, [&found_at(index)[..], &0u64.to_le_bytes()].concat())),
        }
    }

    /// Ends the wait of a client without a reply.
    pub(super) fn forget_wait(&mut self, client: Client) {
        if let Some(waiting) = self.waiting.remove(&client) {
            self.end_wait(waiting);
        }
    }

    /// Takes the ticket of a wait that is over out of the lists: at once when the wait has few
    /// keys, and step by step otherwise.
    fn end_wait(&mut self, waiting: Waiting) {
        let Waiting { ticket, keys, bytes, .. } = waiting;
        self.over.push_back(EndedWait { ticket, keys: keys.again(), bytes });
        if self.over.back().is_some_and(|over| over.keys.count() <= FEW) {
            let last = self.over.pop_back();
            last.into_iter().for_each(|mut over| self.unlist_some(&mut over));
        }
    }

    /// Takes some tickets of waits that are over out of the lists. Returns whether there are more.
    pub(in super::super) fn tidy(&mut self) -> bool {
        if let Some(mut over) = self.over.pop_front() {
            self.unlist_some(&mut over);
            if over.keys.taken() < over.keys.count() {
                self.over.push_front(over);
            }
        }
        !self.over.is_empty()
    }

    fn unlist_some(&mut self, over: &mut EndedWait) {
        let mut step = Step::default();
        while step.goes_on() {
            let Some(key) = over.keys.take() else { break };
            step.key(key.len());
            self.work += LOOK + key.len();
            unlist(&mut self.waiters, key, over.ticket);
        }
        if over.keys.taken() == over.keys.count() {
            self.waits -= std::mem::take(&mut over.bytes);
        }
    }

    fn unlist(&mut self, key: &[u8], ticket: u64) {
        unlist(&mut self.waiters, key, ticket);
    }
}

fn unlist(waiters: &mut BTreeMap<Vec<u8>, BTreeMap<u64, (Client, usize)>>, key: &[u8], ticket: u64) {
    if let Some(tickets) = waiters.get_mut(key) {
        tickets.remove(&ticket);
        if tickets.is_empty() {
            waiters.remove(key);
        }
    }
}

/// Makes the answer to WAIT_ANY.
fn found(client: Client, index: usize, value: &Value) -> Reply {
    Reply::string(client, found_at(index), value)
}

/// Returns how the answer begins. The value follows.
fn found_at(index: usize) -> Vec<u8> {
    [&[0][..], &(index as i64).to_le_bytes()].concat()
}
