//! The state of the server's loop: its clients, the queues in which they stand, and the table.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;
use std::time::Instant;

use hostccl::fork::Private;

use super::super::poll::{Interest, Poll};
use super::super::secret::Secret;
use super::super::table::{Client, Replies, Table};
use super::client::Connection;
use super::connections::Connections;
use super::memory::KeptMemory;
use super::shared::{MAX_BUFFERED, Shared};

/// The least work that a turn counts for. A connection that is accepted or closed counts the same.
pub(super) const LEAST: usize = 4 << 10;

/// Bytes that are read from one client in one system call.
pub(super) const MOST_READ: usize = 64 << 10;

/// How many bytes are sent to one client in a small turn.
pub(super) const SMALL_SEND: usize = 16 << 10;

/// The token of the event that wakes the loop. The listeners' tokens are lower, the clients' tokens
/// are higher.
pub(super) const WAKE: u64 = 1 << 16;

/// The state of the server's loop.
pub(super) struct Serving {
    /// The sockets on which the server listens.
    pub(super) listeners: Vec<Private<TcpListener>>,
    /// The descriptors for which the loop waits.
    pub(super) poll: Poll,
    /// The state that the loop shares with the server's handle.
    pub(super) shared: Arc<Shared>,
    /// The secret that clients must prove, if there is one.
    pub(super) secret: Option<Secret>,
    /// The values, and which clients wait for what.
    pub(super) table: Table,
    /// The connections by number. A hash table has many empty places, so it holds pointers only.
    pub(super) clients: HashMap<Client, Box<Connection>>,
    /// The number of the next client.
    pub(super) next: Client,
    /// The counts of connections by which the server decides who may be connected.
    pub(super) connections: Connections,
    /// When the server listens again, after there was no room for a connection.
    pub(super) paused: Option<Instant>,
    /// How many bytes the buffers of all clients hold.
    pub(super) buffered: usize,
    /// Clients that have asked for more than a small turn's work.
    pub(super) busy: VecDeque<Client>,
    /// Clients that have something new to send, because another client's request woke them.
    pub(super) answered: VecDeque<Client>,
    /// Clients whose sockets failed while other clients were answered.
    pub(super) lost: Vec<Client>,
    /// The replies of the table that are not handed out yet.
    pub(super) replies: Replies,
    /// How much memory the server has kept.
    pub(super) memory: KeptMemory,
    /// The buffer for reading, which all clients use in turn.
    pub(super) buffer: Vec<u8>,
}

impl Serving {
    pub(super) fn new(
        listeners: Vec<Private<TcpListener>>,
        poll: Poll,
        shared: Arc<Shared>,
        secret: Option<Secret>,
    ) -> io::Result<Serving> {
        for (token, listener) in (0..).zip(&listeners) {
            poll.add(&**listener, token)?;
        }
        Ok(Serving {
            listeners,
            poll,
            shared,
            secret,
            table: Table::default(),
            clients: HashMap::new(),
            next: WAKE + 1,
            connections: Connections::default(),
            paused: None,
            buffered: 0,
            busy: VecDeque::new(),
            answered: VecDeque::new(),
            lost: Vec::new(),
            replies: Replies::new(),
            memory: KeptMemory::new(),
            buffer: vec![0; MOST_READ],
        })
    }

    /// Sets the events of a client for which the loop waits.
    fn update_interest(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let interest = Interest {
            read: !connection.busy && !connection.is_backlogged() && !connection.ending,
            write: !connection.busy && connection.outgoing.left() > 0,
        };
        if interest != connection.interest {
            connection.interest = interest;
            if self.poll.modify(&*connection.stream, client, interest).is_err() {
                self.lost.push(client);
            }
        }
    }

    /// Puts the client into the queue for a larger turn.
    pub(super) fn queue_turn(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        if !connection.busy {
            connection.busy = true;
            self.busy.push_back(client);
            self.update_interest(client);
        }
    }

    /// Sends what the socket takes, up to `limit` bytes, and returns how many. Nothing is sent to a
    /// client in the queue for a larger turn.
    pub(super) fn flush(&mut self, client: Client, limit: usize) -> usize {
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
        self.update_interest(client);
        self.account_memory(client);
        sent
    }

    /// Counts the memory that a client makes the server keep. When the memory for all clients, with
    /// the values that only unread replies keep, is too much, clients are dropped until it is not.
    /// A client that is not admitted goes first, then one that does not read, then the client that
    /// keeps the most memory.
    fn account_memory(&mut self, client: Client) {
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
            connection.release();
            self.lost.push(*most);
        }
    }

    /// Hands out the table's replies. The replies to `asking` are sent at the end of the turn,
    /// those to other clients soon after. Returns how much work that was.
    pub(super) fn answer(&mut self, asking: Client) -> usize {
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

    /// Finishes the turn of a client: sends replies to the other clients that the turn woke, at
    /// most `woken` of them now, and drops the clients whose sockets have failed.
    pub(super) fn finish_turn(&mut self, woken: usize) {
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

    /// Ends a connection, and forgets its client.
    pub(super) fn leave(&mut self, client: Client) {
        let Some(connection) = self.clients.remove(&client) else { return };
        if connection.is_silent() {
            self.table.note_silent(client);
        }
        // Closing the socket takes it out of the poll and shuts it down, unless a process made by
        // `clone` has a copy of the socket.
        self.poll.remove(&*connection.stream);
        let _ = connection.stream.shutdown(Shutdown::Both);
        self.buffered -= connection.counted;
        self.connections.left(client, connection.address, self.clients.len());
        self.table.leave(client, &mut self.replies);
        self.answer(client);
    }
}
