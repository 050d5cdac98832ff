//! The state of the server's loop: its clients, the queues in which they stand, and the table.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use hostccl::fork::Private;

use super::super::poll::{Interest, Poll};
use super::super::secret::Secret;
use super::super::table::{Client, Replies, Table};
use super::client::Connection;
use super::connections::Connections;
use super::link::Link;
use super::memory::KeptMemory;
use super::shared::Shared;

/// The least work that a turn counts for. A connection that is accepted or closed counts the same.
pub(super) const LEAST: usize = 4 << 10;

/// Bytes that are read from one client in one system call.
pub(super) const MOST_READ: usize = 64 << 10;

/// How many bytes are sent to one client in a small turn.
pub(super) const SMALL_SEND: usize = 16 << 10;

/// The token of the event that wakes the loop. The listeners' tokens are lower, the clients' tokens
/// are higher.
pub(super) const WAKE: u64 = 1 << 16;

/// Hashes the numbers of clients, which the server gives out one after another.
#[derive(Default)]
pub(super) struct OfNumber(u64);

impl Hasher for OfNumber {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // The product with this odd number differs for all numbers, in its highest bits, too.
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

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
    pub(super) clients: HashMap<Client, Box<Connection>, BuildHasherDefault<OfNumber>>,
    /// The number of the next client.
    pub(super) next: Client,
    /// How many of the connections are channels of trunks. The others have sockets.
    pub(super) channel_count: usize,
    /// The counts of connections by which the server decides who may be connected.
    pub(super) connections: Connections,
    /// When the server listens again, after there was no room for a connection.
    pub(super) paused: Option<Instant>,
    /// How many bytes the buffers of all clients hold.
    pub(super) buffered: usize,
    /// Clients that have asked for more than a small turn's work.
    pub(super) busy: VecDeque<Client>,
    /// Trunks on which more has come than a small turn's work.
    pub(super) busy_trunks: VecDeque<Client>,
    /// Clients that have something new to send, because another client's request woke them.
    pub(super) answered: VecDeque<Client>,
    /// Clients whose sockets failed while other clients were answered.
    pub(super) lost: Vec<Client>,
    /// Clients of trunks that have ended.
    pub(super) orphans: VecDeque<Client>,
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
            clients: HashMap::default(),
            next: WAKE + 1,
            channel_count: 0,
            connections: Connections::default(),
            paused: None,
            buffered: 0,
            busy: VecDeque::new(),
            busy_trunks: VecDeque::new(),
            answered: VecDeque::new(),
            lost: Vec::new(),
            orphans: VecDeque::new(),
            replies: Replies::new(),
            memory: KeptMemory::new(),
            buffer: vec![0; MOST_READ],
        })
    }

    /// Sets the events of a client for which the loop waits.
    pub(super) fn update_interest(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let interest = Interest {
            read: !connection.busy && !connection.is_backlogged() && !connection.ending,
            write: !connection.busy && connection.outgoing.left() > 0,
        };
        let Link::Socket(stream) = &connection.link else { return };
        if interest != connection.interest {
            connection.interest = interest;
            if self.poll.modify(&**stream, client, interest).is_err() {
                self.lost.push(client);
            }
        }
    }

    /// Returns how many connections have sockets.
    pub(super) fn sockets(&self) -> usize {
        self.clients.len() - self.channel_count
    }

    /// Puts the client into the queue for a larger turn.
    pub(super) fn queue_turn(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        if !connection.busy {
            connection.busy = true;
            match &connection.trunk {
                Some(_) => self.busy_trunks.push_back(client),
                None => self.busy.push_back(client),
            }
            self.update_interest(client);
        }
    }
}
