//! Ends what the server keeps for a client that has gone, or that is dropped because there is no
//! room for its request.

use std::net::IpAddr;

use super::super::frame::why_key;
use super::super::value::Value;
use super::limits::{MAX_WAITS, MOST_STORED, Refusal, cost_of_word};
use super::state::{Client, Replies, Table};

/// For how many clients that were dropped for lack of room the reason is kept. A client asks for it
/// at once.
const MOST_TURNED_AWAY: usize = 1024;

impl Table {
    /// Passes on the result of a request or a step. If there was no room for the request, its
    /// client is turned away here.
    pub(super) fn done<T>(&mut self, client: Client, done: Result<T, Refusal>) -> Result<T, Refusal> {
        match &done {
            Err(Refusal::StoreFull(most)) => {
                let (stored, keys) = (self.stored, self.values.len());
                let said = format!(
                    "it keeps {stored} bytes in {keys} keys, and at most {most} bytes; the program itself has put most of them there and must remove what it needs no longer"
                );
                self.turn_away(client, said);
            }
            Err(Refusal::WaitsFull) => {
                let waits = self.waits;
                let said = format!(
                    "the keys that its clients wait for take {waits} bytes, and at most {MAX_WAITS} bytes; wait for fewer keys at a time"
                );
                self.turn_away(client, said);
            }
            Err(Refusal::Protocol(_)) | Ok(_) => {}
        }
        done
    }

    /// Drops a client because there is no room for its request. The client has not gone by itself,
    /// so its last words are not passed on. It finds under a key of its own why it was dropped, and
    /// what to do. A client that was dropped for another reason must not find this text.
    fn turn_away(&mut self, client: Client, said: String) {
        if let Some(greeting) = self.greetings.get(&client) {
            if self.turned_away.len() >= MOST_TURNED_AWAY {
                self.turned_away.pop_front();
            }
            self.turned_away.push_back((why_key(*greeting), Value::new(said.into_bytes(), &self.loose)));
        }
        for pair in self.words_of.remove(&client).unwrap_or_default() {
            self.stored -= cost_of_word(&pair.0, &pair.1);
            if let Some(connections) = self.words.get_mut(&pair) {
                *connections -= 1;
                if *connections == 0 {
                    self.words.remove(&pair);
                }
            }
        }
    }

    /// Notes the number of a client's greeting. The first number counts.
    pub(in crate::rendezvous::store) fn greeted(&mut self, client: Client, greeting: u64) {
        self.greetings.entry(client).or_insert(greeting);
    }

    /// Forgets a client that has gone, and passes on its last words.
    pub(in crate::rendezvous::store) fn leave(&mut self, client: Client, replies: &mut Replies) {
        self.greetings.remove(&client);
        self.forget_wait(client);
        self.leave_barrier(client);
        for (key, word) in self.words_of.remove(&client).unwrap_or_default() {
            self.stored -= cost_of_word(&key, &word);
            let pair = (key, word);
            let Some(connections) = self.words.get_mut(&pair) else { continue };
            *connections -= 1;
            if *connections > 0 {
                continue;
            }
            self.words.remove(&pair);
            let (key, word) = pair;
            let Ok(count) = self.integer(&key).map(|count| count.wrapping_add(1)) else { continue };
            let numbered = [&key[..], b"/", count.to_string().as_bytes()].concat();
            // The value comes first, so whoever sees the count finds it. There is room for both,
            // because the room that the word took is free now.
            for (key, value) in [(numbered, word), (key, count.to_string().into_bytes())] {
                let value = Value::new(value, &self.loose);
                let _ = self.put_up_to(MOST_STORED, key, value, replies);
            }
        }
    }

    /// Notes that a connection from that address was refused, because it had the wrong secret or
    /// none. `why` ends the sentence "N connections ...".
    pub(in crate::rendezvous::store) fn note_refused(&mut self, from: IpAddr, why: &str) {
        self.refused.0 += 1;
        let number = self.refused.0;
        let noun = if number == 1 { "connection" } else { "connections" };
        let said = format!("the store refused {number} {noun}, the last one from {from}, {why}");
        self.refused.1 = Some(Value::new(said.into_bytes(), &self.loose));
    }

    pub(super) fn leave_barrier(&mut self, client: Client) {
        let Some(key) = self.at_barrier.remove(&client) else { return };
        if let Some(clients) = self.barriers.get_mut(&key) {
            clients.remove(&client);
            if clients.is_empty() {
                self.barriers.remove(&key);
            }
        }
    }
}
