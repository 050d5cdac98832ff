//! The server's loop: accepts, reads, carries out, answers.
//!
//! A client gets a small turn when something comes from it. What the client asks for beyond that is done in larger turns, one client after
//! another. One round of the loop does at most [`ROUND`] of the work in larger turns. So a small request waits for the small turns of the
//! requests that came with it and for the work of one round, however much other clients have asked for.

mod accepting;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hostccl::fork::Private;

use super::super::poll::{Interest, Poll, Ready};
use super::super::secret::Secret;
use super::super::table::{Client, Refusal, Replies, Table};
use super::client::{Admission, Came, Connection};
use super::room::Room;
use super::{GREETING, MAX_BUFFERED, Shared};

/// Work for one client when something comes from it, before the other clients get their turn. One unit of work is about a byte that is
/// read, copied or sent. A key that is looked at counts 256 units.
const SMALL_TURN: usize = 64 << 10;
/// Work of the small turns after one look at the sockets. When it is done, each further client gets a turn of [`LEAST`] before the next
/// look, which is enough for a small request.
const SMALL_TURNS: usize = 256 << 10;
/// Work for one client that has asked for more.
const TURN: usize = 64 << 10;
/// Work of one round of the loop for all clients that have asked for more.
const ROUND: usize = 128 << 10;
/// Work of one round for taking waits that are over out of the lists, beside as much as was put into the lists in the same round.
const TIDY: usize = 32 << 10;
/// The least work that a turn counts for. A connection that is accepted or closed counts as much.
const LEAST: usize = 4 << 10;
/// Bytes that are read from one client in one system call.
const MOST_READ: usize = 64 << 10;
/// Bytes that are sent to one client in a small turn, and in a larger one.
const SMALL_SEND: usize = 16 << 10;
const SEND: usize = 128 << 10;
/// How many clients that other clients' requests woke are answered after one client's turn, and how many at the end of a round.
const WOKEN_TURN: usize = 16;
const WOKEN_ROUND: usize = 256;
/// The token of the event that wakes the loop. The listeners' tokens are lower, the clients' tokens are higher.
pub(super) const WAKE: u64 = 1 << 16;

pub(super) struct Serving {
    listeners: Vec<Private<TcpListener>>,
    poll: Poll,
    shared: Arc<Shared>,
    secret: Option<Secret>,
    table: Table,
    clients: HashMap<Client, Connection>,
    next: Client,
    room: Room,
    /// When the server listens again after there was no room.
    paused: Option<Instant>,
    /// How many bytes the buffers of all clients hold.
    buffered: usize,
    /// Clients that have asked for more than a small turn's work.
    busy: VecDeque<Client>,
    /// Clients that have something new to send, because another client's request woke them.
    answered: VecDeque<Client>,
    /// Clients whose sockets failed while other clients were answered.
    lost: Vec<Client>,
    replies: Replies,
    buffer: Vec<u8>,
}

impl Serving {
    pub(super) fn new(
        listeners: Vec<Private<TcpListener>>,
        poll: Poll,
        shared: Arc<Shared>,
        secret: Option<Secret>,
    ) -> io::Result<Serving> {
        for (token, listener) in (0..).zip(&listeners) {
            poll.add(listener.as_raw_fd(), token)?;
        }
        Ok(Serving {
            listeners,
            poll,
            shared,
            secret,
            table: Table::default(),
            clients: HashMap::new(),
            next: WAKE + 1,
            room: Room::default(),
            paused: None,
            buffered: 0,
            busy: VecDeque::new(),
            answered: VecDeque::new(),
            lost: Vec::new(),
            replies: Replies::new(),
            buffer: vec![0; MOST_READ],
        })
    }

    pub(super) fn run(mut self) {
        let mut ready = Vec::new();
        let mut untidy = false;
        while !self.shared.stop.load(Ordering::SeqCst) {
            let now = Instant::now();
            let left = match self.busy.is_empty() && self.answered.is_empty() && !untidy {
                true => self.next_moment().map(|moment| moment.saturating_duration_since(now)),
                false => Some(Duration::ZERO),
            };
            self.poll.wait(left, &mut ready);
            let (mut most, mut all) = (0, 0);
            for event in &ready {
                let work = self.small_turn(event, if all < SMALL_TURNS { SMALL_TURN } else { LEAST });
                self.settle(WOKEN_TURN);
                (most, all) = (most.max(work), all + work);
            }
            let mut round = 0;
            while round < ROUND {
                let Some(client) = self.busy.pop_front() else { break };
                if let Some(connection) = self.clients.get_mut(&client) {
                    connection.busy = false;
                    round += self.flush(client, SEND) + self.turn(client, TURN, false) + LEAST;
                    self.settle(WOKEN_TURN);
                }
            }
            // Waits are taken out of the lists no slower than they are put in, so what is over does not pile up.
            let (mut tidied, most_tidied) = (0, TIDY + self.table.take_listing());
            self.table.take_work();
            untidy = true;
            while untidy && tidied < most_tidied {
                untidy = self.table.tidy();
                tidied += self.table.take_work() + 1;
            }
            self.keep_time();
            self.settle(WOKEN_ROUND);
            self.shared.clients.store(self.clients.len(), Ordering::SeqCst);
            self.shared.small_turn.fetch_max(most, Ordering::SeqCst);
            self.shared.round.fetch_max(round, Ordering::SeqCst);
            self.shared.look.fetch_max(all + round + tidied, Ordering::SeqCst);
        }
        self.shut_down();
    }

    /// Ends every socket. Closing the sockets is not enough when a process made by `clone` has copies of them.
    fn shut_down(&self) {
        for listener in &self.listeners {
            // SAFETY: an open socket.
            unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
        }
        for connection in self.clients.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }

    fn next_moment(&self) -> Option<Instant> {
        let greeting = self.room.oldest_stranger().map(|(_, came)| came + GREETING);
        [greeting, self.paused].into_iter().flatten().min()
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        while let Some((client, _)) = self.room.oldest_stranger().filter(|(_, came)| *came + GREETING <= now) {
            self.leave(client);
        }
        if self.paused.is_some_and(|moment| moment <= now) {
            self.paused = None;
            self.listen(true);
        }
    }

    /// Does what one event asks for, up to that much work. Returns how much work that was.
    fn small_turn(&mut self, event: &Ready, limit: usize) -> usize {
        match event.token {
            WAKE => 0,
            listener if listener < WAKE => {
                let before = self.next;
                self.accept(listener as usize);
                (self.next - before) as usize * LEAST
            }
            client => {
                if event.write {
                    // A client with more replies than a small turn sends gets the rest in larger turns.
                    self.put_off(client);
                } else if event.read {
                    return self.turn(client, limit, true);
                } else if event.over {
                    self.leave(client);
                }
                0
            }
        }
    }

    /// Carries out what a client has asked for, and reads more if there may be more, until its replies pile up or its turn is over.
    /// Only a turn that is not small begins with a request of any length. Returns how much work that was.
    fn turn(&mut self, client: Client, limit: usize, is_small: bool) -> usize {
        let (mut work, mut readable) = (0, true);
        loop {
            let Some(connection) = self.clients.get_mut(&client) else { return work };
            if connection.ending {
                break;
            }
            if connection.is_deaf() {
                break;
            }
            if work >= limit {
                if readable || connection.has_more() {
                    self.put_off(client);
                }
                break;
            }
            let done = if connection.task.is_some() {
                self.advance(client)
            } else {
                match connection.measure() {
                    // The request is too long for the rest of this turn.
                    Ok(Some(length)) if (work > 0 || is_small) && work + length > limit => {
                        self.put_off(client);
                        break;
                    }
                    Ok(Some(length)) => self.request(client, length),
                    Ok(None) if !readable => break,
                    Ok(None) => match connection.read(&mut self.buffer[..limit.min(MOST_READ)]) {
                        Came::Bytes(count) => {
                            connection.receive(&self.buffer[..count]);
                            work += count;
                            readable = count == limit.min(MOST_READ);
                            Ok(())
                        }
                        Came::Nothing => break,
                        Came::End => {
                            self.leave(client);
                            return work;
                        }
                    },
                    Err(malformed) => Err(Refusal::Protocol(malformed.0)),
                }
            };
            work += self.table.take_work() + self.answer(client);
            if done.is_err() {
                self.leave(client);
                return work;
            }
        }
        work + self.flush(client, SMALL_SEND)
    }

    /// Does the next step of the client's request.
    fn advance(&mut self, client: Client) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let Some(mut task) = connection.task.take() else { return Ok(()) };
        let is_done = self.table.advance(client, &mut task, &mut self.replies)?;
        connection.task = Some(task).filter(|_| !is_done);
        Ok(())
    }

    /// Begins the client's next request, which has that length.
    fn request(&mut self, client: Client, length: usize) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let Some(request) = connection.take_request() else { return Ok(()) };
        // A list stays where it is, and counts when its keys are looked at.
        self.table.count_work(if request.is_list() { length.min(LEAST) } else { length });
        let was_admitted = connection.is_admitted();
        let admission = connection.admit(request, self.secret.as_ref())?;
        if !was_admitted && connection.is_admitted() {
            self.room.admitted(client);
        }
        let request = match admission {
            Admission::CarryOut(request) => request,
            Admission::Answered => return Ok(()),
            Admission::Refused(why) => {
                self.table.note_refused(connection.address, why);
                return Ok(());
            }
        };
        if !connection.asked && !request.is_greeting() {
            connection.asked = true;
            self.room.asked(client);
        }
        if let Some(mut task) = self.table.handle(client, request, &mut self.replies)? {
            // Most requests are done in one step.
            let is_done = self.table.advance(client, &mut task, &mut self.replies)?;
            connection.task = (!is_done).then(|| Box::new(task));
        }
        Ok(())
    }

    /// Hands out the table's replies. The replies to `asking` are sent at the end of the turn, those to other clients soon after. Returns
    /// how much work that was.
    fn answer(&mut self, asking: Client) -> usize {
        let mut replies = std::mem::take(&mut self.replies);
        let mut handed = 0;
        for reply in replies.drain(..) {
            let Some(connection) = self.clients.get_mut(&reply.to).filter(|connection| !connection.ending) else {
                continue;
            };
            if connection.outgoing.left() == 0 {
                connection.active = Instant::now();
            }
            connection.outgoing.push(&reply.bytes);
            handed += reply.bytes.len();
            if let Some(value) = reply.value {
                handed += value.len().min(LEAST);
                connection.outgoing.push_value(value);
            }
            if reply.to != asking && !connection.answered {
                connection.answered = true;
                self.answered.push_back(reply.to);
            }
        }
        self.replies = replies;
        handed
    }

    /// Lets the client continue in its next turn.
    fn put_off(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        if !connection.busy {
            connection.busy = true;
            self.busy.push_back(client);
            self.look_out(client);
        }
    }

    /// Sends what the socket takes, up to `limit` bytes; returns how many. A client in the queue for a larger turn waits for that turn.
    fn flush(&mut self, client: Client, limit: usize) -> usize {
        let Some(connection) = self.clients.get_mut(&client) else { return 0 };
        let flushed = if connection.busy { Ok(0) } else { connection.flush(limit) };
        let Ok(sent) = flushed else {
            self.lost.push(client);
            return 0;
        };
        if connection.ending && connection.outgoing.left() == 0 {
            self.lost.push(client);
            return sent;
        }
        self.look_out(client);
        self.account(client);
        sent
    }

    /// Has the loop wait for the events that may come from a client now.
    fn look_out(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let interest = Interest {
            read: !connection.busy && !connection.is_deaf() && !connection.ending,
            write: !connection.busy && connection.outgoing.left() > 0,
        };
        if interest != connection.interest {
            connection.interest = interest;
            if self.poll.modify(connection.stream.as_raw_fd(), client, interest).is_err() {
                self.lost.push(client);
            }
        }
    }

    /// Counts the memory that a client makes the server keep. When the memory for all clients, with the values that only unread replies
    /// keep, is too much, one client is dropped: first one that has not even greeted, then one that does not read, then the one that has
    /// most.
    fn account(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let now = connection.buffered();
        self.buffered = self.buffered + now - connection.counted;
        connection.counted = now;
        while self.buffered + self.table.loose() > MAX_BUFFERED {
            let weight = |connection: &Connection| {
                let kept = connection.counted + connection.outgoing.left();
                (kept > 0 && !connection.is_admitted(), kept > 0 && connection.is_stalled(), kept)
            };
            let most = self.clients.iter_mut().filter(|(_, connection)| !connection.ending);
            let Some((most, connection)) = most.max_by_key(|(_, connection)| weight(connection)) else { return };
            self.buffered -= connection.counted;
            connection.give_up();
            self.lost.push(*most);
        }
    }

    /// Does what other clients' turns left to be done. Of the clients that these turns woke, at most `woken` are answered now.
    fn settle(&mut self, woken: usize) {
        for _ in 0..woken {
            let Some(client) = self.answered.pop_front() else { break };
            let Some(connection) = self.clients.get_mut(&client) else { continue };
            connection.answered = false;
            self.flush(client, SMALL_SEND);
        }
        while let Some(client) = self.lost.pop() {
            self.leave(client);
        }
    }

    fn leave(&mut self, client: Client) {
        let Some(connection) = self.clients.remove(&client) else { return };
        // Closing the socket does both, unless a process made by `clone` has a copy of it.
        self.poll.remove(connection.stream.as_raw_fd());
        let _ = connection.stream.shutdown(Shutdown::Both);
        self.buffered -= connection.counted;
        self.room.left(client, connection.address, self.clients.len());
        self.table.leave(client, &mut self.replies);
        self.answer(client);
    }
}
