//! The server's loop: accepts, reads, carries out, answers.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hostccl::fork::Private;

use super::super::frame::Request;
use super::super::poll::{Interest, Poll};
use super::super::secret::Secret;
use super::super::table::{Client, Replies, Table};
use super::client::{Came, Connection};
use super::{GREETING, MAX_BUFFERED, Shared};

/// Bytes read from one client before the others get their turn.
const READ_TURN: usize = 256 << 10;
/// Bytes of requests carried out and of replies made for one client before the others get theirs: few bytes can ask for much.
const WORK_TURN: usize = 1 << 20;
/// Replies of more bytes are sent as they come, not with the rest of a batch.
const LARGE: usize = 64 << 10;
/// Connections without a greeting that are kept at a time; beyond, the oldest goes. Far more than a start of all ranks at once has under way.
const MAX_STRANGERS: usize = 1 << 16;
/// When descriptors run out, who has not greeted for so long makes room.
const HESITANT: Duration = Duration::from_secs(1);
/// Without a descriptor for another connection, how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The token of the event that wakes the loop; listeners come before it, clients after.
pub(super) const WAKE: u64 = 1 << 16;

pub(super) struct Serving {
    listeners: Vec<Private<TcpListener>>,
    poll: Poll,
    shared: Arc<Shared>,
    secret: Option<Secret>,
    table: Table,
    clients: HashMap<Client, Connection>,
    next: Client,
    /// Connections without a greeting, oldest first, and when they came.
    strangers: BTreeMap<Client, Instant>,
    /// When to listen again, after descriptors had run out.
    paused: Option<Instant>,
    /// Bytes of all clients' buffers.
    buffered: usize,
    /// Clients that have read their replies, or had their turn, and whose requests are still to be carried out.
    resumed: Vec<Client>,
    /// Clients whose sockets gave up while others were answered.
    lost: Vec<Client>,
    replies: Replies,
    /// Clients with something new to send.
    answered: Vec<Client>,
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
            strangers: BTreeMap::new(),
            paused: None,
            buffered: 0,
            resumed: Vec::new(),
            lost: Vec::new(),
            replies: Replies::new(),
            answered: Vec::new(),
        })
    }

    pub(super) fn run(mut self) {
        let mut buffer = vec![0; 64 << 10];
        let mut ready = Vec::new();
        while !self.shared.stop.load(Ordering::SeqCst) {
            let now = Instant::now();
            let left = match self.resumed.is_empty() {
                true => self.next_moment().map(|moment| moment.saturating_duration_since(now)),
                false => Some(Duration::ZERO),
            };
            self.poll.wait(left, &mut ready);
            for event in &ready {
                match event.token {
                    WAKE => {}
                    listener if listener < WAKE => self.accept(listener as usize),
                    client => {
                        if event.write {
                            self.flush(client);
                        }
                        if event.read {
                            self.receive(client, &mut buffer);
                        } else if event.over {
                            self.leave(client);
                        }
                    }
                }
                self.settle();
            }
            for client in std::mem::take(&mut self.resumed) {
                if let Some(connection) = self.clients.get_mut(&client) {
                    connection.resuming = false;
                    self.carry_out(client, &[]);
                    self.settle();
                }
            }
            self.keep_time();
            self.settle();
            self.shared.clients.store(self.clients.len(), Ordering::SeqCst);
        }
        self.shut_down();
    }

    /// Ends every socket. Closing them is not enough where a process made by `clone` has copies.
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
        let greeting = self.strangers.first_key_value().map(|(_, came)| *came + GREETING);
        [greeting, self.paused].into_iter().flatten().min()
    }

    fn keep_time(&mut self) {
        if self.strangers.is_empty() && self.paused.is_none() {
            return;
        }
        let now = Instant::now();
        while let Some((client, came)) = self.strangers.first_key_value().map(|(client, came)| (*client, *came)) {
            if came + GREETING > now && self.strangers.len() <= MAX_STRANGERS {
                break;
            }
            self.leave(client);
        }
        if self.paused.is_some_and(|moment| moment <= now) {
            self.paused = None;
            self.listen(true);
        }
    }

    fn listen(&self, read: bool) {
        for (token, listener) in (0..).zip(&self.listeners) {
            let _ = self.poll.modify(listener.as_raw_fd(), token, Interest { read, write: false });
        }
    }

    fn accept(&mut self, listener: usize) {
        // A bound, so that a flood of connections does not keep those that are there waiting.
        for _ in 0..256 {
            match accept(&self.listeners[listener]) {
                Ok(stream) => {
                    let client = self.next;
                    self.next += 1;
                    if self.poll.add(stream.as_raw_fd(), client).is_ok() {
                        self.clients.insert(client, Connection::new(stream));
                        self.strangers.insert(client, Instant::now());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    if error.raw_os_error() == Some(libc::EMFILE) && raise_descriptor_limit() {
                        continue;
                    }
                    // Out of descriptors: strangers make room, and until something changes there is no point in looking again.
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
                    {
                        let oldest = self.strangers.first_key_value().map(|(client, came)| (*client, came.elapsed()));
                        if let Some((oldest, _)) = oldest.filter(|(_, age)| *age > HESITANT) {
                            self.leave(oldest);
                            continue;
                        }
                        self.shared.starved.store(true, Ordering::SeqCst);
                        self.listen(false);
                        self.paused = Some(Instant::now() + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    fn receive(&mut self, client: Client, buffer: &mut [u8]) {
        let mut taken = 0;
        while taken < READ_TURN {
            let Some(connection) = self.clients.get_mut(&client) else { return };
            if connection.is_deaf() || connection.ending || connection.resuming {
                return;
            }
            match connection.read(buffer) {
                Came::Bytes(count) => {
                    taken += count;
                    self.carry_out(client, &buffer[..count]);
                    if count < buffer.len() {
                        return;
                    }
                }
                Came::Nothing => return,
                Came::End => return self.leave(client),
            }
        }
    }

    /// Carries out every complete request that has come, until the client's replies pile up or its turn is over.
    fn carry_out(&mut self, client: Client, new: &[u8]) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let pending = connection.pending(new);
        let (mut at, mut work) = (0, 0);
        loop {
            if self.clients.get(&client).is_some_and(Connection::is_deaf) {
                self.flush(client);
            }
            let Some(connection) = self.clients.get_mut(&client) else { return };
            if connection.is_deaf() || connection.ending {
                break;
            }
            if work > WORK_TURN && at < pending.len() {
                self.resume(client);
                break;
            }
            let handled = match connection.next(&pending[at..]) {
                Ok(Some((request, length))) => {
                    at += length;
                    work += length;
                    self.admit_and_handle(client, request)
                }
                Ok(None) => break,
                Err(malformed) => Err(malformed.0),
            };
            if handled.is_err() {
                self.answer();
                return self.leave(client);
            }
            work += self.answer();
        }
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.keep(pending, at);
            self.answered.push(client);
        }
        while let Some(client) = self.answered.pop() {
            self.flush(client);
        }
    }

    fn admit_and_handle(&mut self, client: Client, request: Request) -> Result<(), String> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let was_admitted = connection.is_admitted();
        let request = connection.admit(request, self.secret.as_ref())?;
        if !was_admitted && connection.is_admitted() {
            self.strangers.remove(&client);
        }
        request.map_or(Ok(()), |request| self.table.handle(client, request, &mut self.replies))
    }

    /// Hands out what the table has to say; it is sent when the batch is done, or where it is much at once. How many bytes it was.
    fn answer(&mut self) -> usize {
        let mut replies = std::mem::take(&mut self.replies);
        let mut handed = 0;
        for reply in replies.drain(..) {
            let Some(connection) = self.clients.get_mut(&reply.to).filter(|connection| !connection.ending) else {
                continue;
            };
            if !connection.has_unsent() {
                self.answered.push(reply.to);
            }
            let before = connection.unsent();
            connection.queue(&reply.bytes);
            connection.queue(reply.value.as_deref().unwrap_or_default());
            handed += connection.unsent() - before;
            if connection.unsent() > LARGE {
                self.flush(reply.to);
            }
        }
        self.replies = replies;
        handed
    }

    /// What this client has sent is carried out in its next turn.
    fn resume(&mut self, client: Client) {
        if let Some(connection) = self.clients.get_mut(&client).filter(|connection| !connection.resuming) {
            connection.resuming = true;
            self.resumed.push(client);
        }
    }

    fn flush(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let was_deaf = connection.is_deaf();
        let flushed = connection.flush();
        if flushed.is_err() || (connection.ending && !connection.has_unsent()) {
            return self.lost.push(client);
        }
        let deaf = connection.is_deaf();
        let resumes = was_deaf && !deaf && connection.has_received();
        let interest = Interest { read: !deaf && !connection.ending, write: connection.has_unsent() };
        if interest != connection.interest {
            connection.interest = interest;
            if self.poll.modify(connection.stream.as_raw_fd(), client, interest).is_err() {
                return self.lost.push(client);
            }
        }
        self.account(client);
        if resumes {
            self.resume(client);
        }
    }

    /// Counts what a client makes the server keep. When all of it is too much, who has most is dropped, and before anybody else who has not
    /// even greeted.
    fn account(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let now = connection.buffered();
        self.buffered = self.buffered + now - connection.counted;
        connection.counted = now;
        while self.buffered > MAX_BUFFERED {
            let weight =
                |connection: &Connection| (connection.counted > 0 && !connection.is_admitted(), connection.counted);
            let Some((most, connection)) = self.clients.iter_mut().max_by_key(|(_, connection)| weight(connection))
            else {
                return;
            };
            self.buffered -= connection.counted;
            connection.give_up();
            self.lost.push(*most);
        }
    }

    /// What other clients' turns left to be done.
    fn settle(&mut self) {
        loop {
            if let Some(client) = self.answered.pop() {
                self.flush(client);
            } else if let Some(client) = self.lost.pop() {
                self.leave(client);
            } else {
                return;
            }
        }
    }

    fn leave(&mut self, client: Client) {
        let Some(connection) = self.clients.remove(&client) else { return };
        // Closing the socket does both, unless a process made by `clone` has a copy of it.
        self.poll.remove(connection.stream.as_raw_fd());
        let _ = connection.stream.shutdown(Shutdown::Both);
        self.buffered -= connection.counted;
        self.strangers.remove(&client);
        self.table.leave(client, &mut self.replies);
        self.answer();
    }
}

/// A new connection, which does not block; its other options are the listener's. One system call, where the standard library needs two.
fn accept(listener: &TcpListener) -> io::Result<Private<TcpStream>> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    Private::open(|| {
        // SAFETY: no address is asked for; the result is checked.
        let fd = unsafe { libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        // SAFETY: a new socket that nobody else owns.
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { TcpStream::from_raw_fd(fd) }) }
    })
}

/// Every rank needs a descriptor here, and the usual soft limit is 1024. Within the hard limit the process may raise it, so a job of
/// thousands need not fail for it. Whether it was raised.
fn raise_descriptor_limit() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= limit.rlim_max {
        return false;
    }
    limit.rlim_cur = limit.rlim_cur.saturating_mul(4).min(limit.rlim_max);
    // SAFETY: a valid structure.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0 }
}
