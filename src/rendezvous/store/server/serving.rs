//! The server's loop: it accepts connections, reads and carries out requests, and sends replies.
//!
//! A client gets a small turn when it has sent something. Requests that do not fit into the small
//! turn are carried out in larger turns, one client after another. One round of the loop does at
//! most [`ROUND`] of the work in larger turns. Trunks have a round of their own, so that what comes
//! on a trunk does not wait for the larger turns of its clients. So a small request waits for at
//! most three things, whatever the other clients ask for: the small turns of the requests that came
//! with it, the work of one round, and as much work on the lists of waits.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::super::loop_thread::End;
use super::super::table::Client;
use super::clients::{LEAST, Serving};
use super::link::Link;
use super::shared::GREETING;

/// The most work for one client when it has sent something, before the other clients get their
/// turn. One unit of work is about a byte that is read, copied or sent. A key that is looked at
/// counts 256 units.
const SMALL_TURN: usize = 64 << 10;

/// The most work of all small turns after one look at the sockets. When this work is done, each
/// further client gets a turn of [`LEAST`] until the next look, which is enough for a small
/// request. A trunk gets as much for each of its clients.
const SMALL_TURNS: usize = 128 << 10;

/// When the small turns after one look have done this much work, a trunk gets no more than any
/// other client.
const TRUNK_TURNS: usize = 1 << 20;

/// The most work of one larger turn.
const TURN: usize = 64 << 10;

/// The most work of one round, which is the larger turns between two looks at the sockets. A
/// barrier waits for about a dozen rounds, because its requests come one after another.
const ROUND: usize = 64 << 10;

/// The least work of each round that goes into taking ended waits out of the lists. The work that
/// the same round spent on putting waits into the lists is added.
const TIDY: usize = 32 << 10;

/// How many bytes are sent to one client in a larger turn.
const SEND: usize = 128 << 10;

/// How many clients that a request of another client woke are answered after one turn.
const WOKEN_TURN: usize = 16;

/// How many such clients are answered at the end of a round.
const WOKEN_ROUND: usize = 256;

impl Serving {
    pub(super) fn run(mut self, end: &End) {
        let mut ready = Vec::new();
        let mut untidy = false;
        while !end.has_come() {
            let now = Instant::now();
            let left = match self.is_idle() && !untidy {
                true => self.next_moment().map(|moment| moment.saturating_duration_since(now)),
                false => Some(Duration::ZERO),
            };
            self.poll.wait(left, &mut ready);
            let (mut most, mut all) = (0, 0);
            for event in &ready {
                let limit = match all {
                    all if all < SMALL_TURNS => SMALL_TURN,
                    all if all < TRUNK_TURNS => self.least_of(event.token),
                    _ => LEAST,
                };
                let work = self.small_turn(event, limit);
                self.finish_turn(WOKEN_TURN);
                (most, all) = (most.max(work), all + work);
            }
            let of_trunks = self.round(|serving| &mut serving.busy_trunks);
            let round = self.round(|serving| &mut serving.busy);
            // Ended waits are taken out of the lists no slower than waits are put in, so they do
            // not pile up.
            let (mut tidied, most_tidied) = (0, TIDY + self.table.take_listing());
            self.table.take_work();
            untidy = true;
            while untidy && tidied < most_tidied {
                untidy = self.table.tidy();
                tidied += self.table.take_work() + 1;
            }
            self.keep_time();
            self.memory.note(self.table.kept() + self.buffered);
            if self.is_idle() && !untidy {
                self.memory.give_back();
            }
            self.finish_turn(WOKEN_ROUND);
            self.shared.clients.store(self.clients.len(), Ordering::SeqCst);
            self.shared.small_turn.fetch_max(most, Ordering::SeqCst);
            self.shared.round.fetch_max(round.max(of_trunks), Ordering::SeqCst);
            self.shared.look.fetch_max(all + of_trunks + round + tidied, Ordering::SeqCst);
        }
        self.shut_down();
    }

    /// Returns how much work is enough for a small request of a client. For a trunk it is enough
    /// for a request of each of its clients.
    fn least_of(&self, client: Client) -> usize {
        let trunk = self.clients.get(&client).and_then(|connection| connection.trunk.as_ref());
        trunk.map_or(LEAST, |trunk| (LEAST * trunk.channels.len()).clamp(LEAST, SMALL_TURN))
    }

    /// Whether no client waits for a turn or for its replies.
    fn is_idle(&self) -> bool {
        self.busy.is_empty() && self.busy_trunks.is_empty() && self.answered.is_empty() && self.orphans.is_empty()
    }

    /// Gives larger turns to the clients of a queue, one after another, up to the work of a round.
    /// Returns how much work that was.
    fn round(&mut self, queue: impl Fn(&mut Serving) -> &mut VecDeque<Client>) -> usize {
        let mut round = 0;
        while round < ROUND {
            let Some(client) = queue(self).pop_front() else { break };
            if let Some(connection) = self.clients.get_mut(&client) {
                connection.busy = false;
                round += self.flush(client, SEND) + self.turn(client, TURN, false) + LEAST;
                self.finish_turn(WOKEN_TURN);
            }
        }
        round
    }

    /// Ends every socket. Closing the sockets is not enough when a process made by `clone` has
    /// copies of them.
    fn shut_down(&self) {
        for listener in &self.listeners {
            let _ = SockRef::from(&**listener).shutdown(Shutdown::Both);
        }
        for connection in self.clients.values() {
            if let Link::Socket(stream) = &connection.link {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Returns when the loop must look at the time next, or `None` when there is nothing to wait
    /// for.
    fn next_moment(&self) -> Option<Instant> {
        let greeting = self.connections.oldest_stranger().map(|(_, came)| came + GREETING);
        [greeting, self.paused, self.table.next_forgotten(), self.memory.next_return()].into_iter().flatten().min()
    }

    /// Drops clients that have not greeted in time, and ends the pause of the listeners.
    fn keep_time(&mut self) {
        let now = Instant::now();
        while let Some((client, _)) = self.connections.oldest_stranger().filter(|(_, came)| *came + GREETING <= now) {
            self.leave(client);
        }
        self.table.forget_awaited(now);
        if self.paused.is_some_and(|moment| moment <= now) {
            self.paused = None;
            self.listen(true);
        }
    }
}
