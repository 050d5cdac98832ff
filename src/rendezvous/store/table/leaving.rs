//! Ends what the server keeps for a client that has gone, or that is dropped because there is no
//! room for its request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::frame::{MAX_KEY, REFUSED_KEY};
use super::super::value::Value;
use super::super::{GAP, LOOKED_BACK, SILENT};
use super::limits::{ALLOWANCE, MAX_PROMISED, MAX_WAITS, MOST_STORED, Refusal, cost_of_word, is_verdict};
use super::state::{Client, Key, Replies, Table};

/// The most last words of one client.
const MAX_WORDS: usize = 16;
/// The most bytes of a last word.
const MAX_WORD: usize = MAX_KEY;
/// How long a client that was turned away may take to leave its last word again. A client of this
/// library does so at once.
const RETURN: Duration = Duration::from_secs(10);
/// The most clients that find out why they were turned away. These are the last ones.
const MOST_TURNED_AWAY: usize = 8 << 10;

impl Table {
    /// Passes on the result of a request or a step. If there was no room for the request, its
    /// client is turned away here.
    pub(super) fn done<T>(&mut self, client: Client, done: Result<T, Refusal>) -> Result<T, Refusal> {
        match &done {
            Err(Refusal::StoreFull(most)) => {
                let (stored, keys) = (self.stored, self.values.len());
                let said = format!(
                    "it keeps {stored} bytes in {keys} keys, and at most {most} bytes; remove keys that the program has put there itself"
                );
                return Err(self.turn_away(client, said));
            }
            Err(Refusal::WaitsFull) => {
                let waits = self.waits;
                let said = format!(
                    "the keys that its clients wait for take {waits} bytes, and at most {MAX_WAITS} bytes; wait for fewer keys at a time"
                );
                return Err(self.turn_away(client, said));
            }
            Err(Refusal::Protocol(_) | Refusal::TurnedAway(_)) | Ok(_) => {}
        }
        done
    }

    /// Forgets a client because there is no room for its request. The client has not gone by
    /// itself, so its last words are not passed on. These words, and the room that the client was
    /// promised, are kept until the client connects again.
    fn turn_away(&mut self, client: Client, said: String) -> Refusal {
        let mut speaker = self.words_of.remove(&client).unwrap_or_default();
        for word in speaker.words {
            let Some(speakers) = self.words.get_mut(&word) else { continue };
            speakers.connections -= 1;
            speakers.allowance += std::mem::take(&mut speaker.allowance);
            if speakers.connections == 0 {
                self.awaited.push_back((Instant::now() + RETURN, word));
            }
        }
        Refusal::TurnedAway(said)
    }

    /// Notes why a client was turned away. The client finds the text under
    /// [`SERVER_KEY`](super::super::frame::SERVER_KEY), a slash, and the nonce of its greeting.
    pub(in crate::rendezvous::store) fn note_turned_away(&mut self, nonce: u32, said: String) {
        if self.turned_away.len() == MOST_TURNED_AWAY {
            self.turned_away.pop_front();
        }
        self.turned_away.push_back((nonce, Value::new(said.into_bytes(), &self.loose)));
    }

    /// Returns when the next awaited word is to be forgotten.
    pub(in crate::rendezvous::store) fn next_forgotten(&self) -> Option<Instant> {
        self.awaited.front().map(|(moment, _)| *moment)
    }

    /// Forgets words whose clients were turned away and did not come back in time. Looks at a
    /// bounded number of words.
    pub(in crate::rendezvous::store) fn forget_awaited(&mut self, now: Instant) {
        for _ in 0..MAX_WORDS * MAX_WORDS {
            if self.next_forgotten().is_none_or(|moment| moment > now) {
                return;
            }
            let Some((_, word)) = self.awaited.pop_front() else { return };
            if self.words.get(&word).is_some_and(|speakers| speakers.connections == 0) {
                self.free_word(&word);
            }
        }
    }

    /// Forgets a word, and frees the room that it takes and that was promised with it.
    fn free_word(&mut self, word: &(Key, Vec<u8>)) {
        if let Some(speakers) = self.words.remove(word) {
            self.stored -= cost_of_word(&word.0, &word.1);
            self.promised -= speakers.allowance;
        }
    }

    /// Keeps a last word of a client. A client that leaves a word on a rank or a node is promised
    /// room of its own.
    pub(super) fn keep_word(&mut self, client: Client, key: Key, word: Vec<u8>) -> Result<(), Refusal> {
        if self.words_of.get(&client).map_or(0, |speaker| speaker.words.len()) == MAX_WORDS {
            return Err(format!("more than {MAX_WORDS} last words of one client").into());
        }
        if word.len() > MAX_WORD {
            let len = word.len();
            return Err(format!("a last word of {len} bytes; at most {MAX_WORD} are taken").into());
        }
        let mut word = Arc::new((key, word));
        match self.words.get_key_value(&word) {
            Some((known, _)) => word = Arc::clone(known),
            None => self.stored = self.room(self.stored, cost_of_word(&word.0, &word.1), MOST_STORED)?,
        }
        let speakers = self.words.entry(Arc::clone(&word)).or_default();
        speakers.connections += 1;
        let speaker = self.words_of.entry(client).or_default();
        // The client takes over the room that was promised to a connection that was turned away.
        let kept = speakers.allowance.min(ALLOWANCE.saturating_sub(speaker.allowance));
        speakers.allowance -= kept;
        speaker.allowance += kept;
        speaker.words.push(word);
        self.promise(client);
        Ok(())
    }

    /// Promises a client as much room as it may have, if it has left a word on a rank or a node and
    /// there is room. A client that comes later cannot use room that is promised already.
    pub(super) fn promise(&mut self, client: Client) {
        let Some(speaker) = self.words_of.get_mut(&client) else { return };
        let more = ALLOWANCE.saturating_sub(speaker.allowance);
        let is_rank = speaker.words.iter().any(|word| is_verdict(&word.0, word.1.len()));
        if is_rank && self.promised + more <= MAX_PROMISED && self.stored + self.promised + more <= MOST_STORED {
            speaker.allowance += more;
            self.promised += more;
        }
    }

    /// Returns how many bytes are stored when `more` bytes are added to `stored` bytes. Fails when
    /// the sum is more than `most`, or when the rest is promised to connections.
    pub(super) fn room(&self, stored: usize, more: usize, most: usize) -> Result<usize, Refusal> {
        let stored = stored + more;
        if stored > most || stored + self.promised > MOST_STORED { Err(Refusal::StoreFull(most)) } else { Ok(stored) }
    }

    /// Does what [`Table::room`] does for an entry that a client stores. When there is no room for
    /// it and connections are promised room for such entries, it takes from what this client is
    /// promised.
    pub(super) fn room_for(
        &mut self,
        client: Client,
        stored: usize,
        more: usize,
        most: usize,
    ) -> Result<usize, Refusal> {
        if most != MOST_STORED {
            return self.room(stored, more, most);
        }
        let lacking = (stored + more + self.promised).saturating_sub(MOST_STORED);
        if lacking == 0 {
            return Ok(stored + more);
        }
        match self.words_of.get_mut(&client).filter(|speaker| speaker.allowance >= lacking) {
            Some(speaker) => {
                speaker.allowance -= lacking;
                self.promised -= lacking;
                Ok(stored + more)
            }
            None => Err(Refusal::StoreFull(most)),
        }
    }

    /// Notes that the connection of a client has failed because nothing came from its host any
    /// more.
    pub(in crate::rendezvous::store) fn note_silent(&mut self, client: Client) {
        if let Some(speaker) = self.words_of.get_mut(&client) {
            speaker.is_silent = true;
        }
    }

    /// Forgets a client that has gone, and passes on its last words.
    pub(in crate::rendezvous::store) fn leave(&mut self, client: Client, replies: &mut Replies) {
        self.forget_wait(client);
        self.leave_barrier(client);
        let speaker = self.words_of.remove(&client).unwrap_or_default();
        self.promised -= speaker.allowance;
        for word in speaker.words {
            let Some(speakers) = self.words.get_mut(&word) else { continue };
            speakers.connections -= 1;
            if speakers.connections > 0 {
                continue;
            }
            self.free_word(&word);
            let (key, word) = Arc::unwrap_or_clone(word);
            let Ok(count) = self.integer(&key).map(|count| count.wrapping_add(1)) else { continue };
            let word = if speaker.is_silent { [&word[..], SILENT].concat() } else { word };
            let numbered = [&key[..], b"/", count.to_string().as_bytes()].concat();
            // The value comes first, so whoever sees the count finds it. There is room for both,
            // because the room that the word took is free now.
            for (key, value) in [(numbered, word), (key.clone(), count.to_string().into_bytes())] {
                let value = Value::new(value, &self.loose);
                let _ = self.put_up_to(MOST_STORED, client, key, value, replies);
            }
            // Clients add such words, too (agreement/notes.rs). A client that takes a number and
            // ends before it has written the word leaves a gap, and nobody would read this word.
            for number in count.saturating_sub(LOOKED_BACK).max(1)..count {
                let earlier = [&key[..], b"/", number.to_string().as_bytes()].concat();
                if !self.values.contains_key(&earlier) {
                    let value = Value::new(GAP.to_vec(), &self.loose);
                    let _ = self.put_up_to(MOST_STORED, client, earlier, value, replies);
                }
            }
        }
    }

    /// Notes that a connection from that address was refused, because it had the wrong secret or
    /// none. `why` ends the sentence "N connections ...". Wakes the clients that wait for the first
    /// such connection.
    pub(in crate::rendezvous::store) fn note_refused(&mut self, from: IpAddr, why: &str, replies: &mut Replies) {
        self.refused.0 += 1;
        let number = self.refused.0;
        let noun = if number == 1 { "connection" } else { "connections" };
        let said = format!("the store refused {number} {noun}, the last one from {from}, {why}");
        let value = Value::new(said.into_bytes(), &self.loose);
        self.wake(REFUSED_KEY, &value, replies);
        self.refused.1 = Some(value);
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
