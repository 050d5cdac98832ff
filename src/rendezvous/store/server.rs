//! Our own TCPStore server: one thread, one epoll loop, no client can hold up another.
//!
//! A client that breaks the protocol, sends a frame that is too long, or does not read its replies is dropped. What the server keeps
//! for one client is bounded: one incomplete request ([`MAX_REQUEST`] bytes) and [`MAX_UNSENT`] bytes of replies.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::frame::{MAX_VALUE, decode};
use super::table::{Client, MAX_REPLY, Replies, Table};
use crate::error::{Error, Result};

/// Replies that a client may leave unread before it is dropped, in bytes: a few of the largest values.
const MAX_UNSENT: usize = MAX_REPLY;
/// The longest request, in bytes: the protocol's limits on keys and values alone would let one client fill the memory.
const MAX_REQUEST: usize = 8 * MAX_VALUE;
/// Bytes read from one client before the others get their turn.
const READ_TURN: usize = 256 << 10;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_CLIENT: u64 = 2;

/// A running server; it stops when dropped.
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    wake: OwnedFd,
    clients: AtomicUsize,
}

impl Server {
    /// Listens on `address` alone (port 0: the kernel chooses) and serves from a thread of its own.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<Server> {
        let text = format!("{address:?}");
        let listener = TcpListener::bind(address).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => " (another process listens there: choose another port, or wait for it to end)",
                ErrorKind::AddrNotAvailable => {
                    " (it is not an address of this host: rank 0 must run on the host that is named)"
                }
                _ => "",
            };
            Error::store_io(format!("cannot listen on {text} for the store{hint}"), &error)
        })?;
        let broken = |error: &io::Error| Error::store_io("cannot set up the store's server", error);
        listener.set_nonblocking(true).map_err(|error| broken(&error))?;
        // std listens with a backlog of 128; thousands of ranks connect at once.
        // SAFETY: listen on our own socket.
        unsafe { libc::listen(listener.as_raw_fd(), 4096) };
        let bound = listener.local_addr().map_err(|error| broken(&error))?;
        // SAFETY: no arguments to get wrong; the results are checked.
        let (poll, wake) = unsafe {
            (
                owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)),
                owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)),
            )
        };
        let (poll, wake) = (poll.map_err(|error| broken(&error))?, wake.map_err(|error| broken(&error))?);
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), wake, clients: AtomicUsize::new(0) });
        let poll = Poll(poll);
        poll.add(listener.as_raw_fd(), LISTENER).map_err(|error| broken(&error))?;
        poll.add(shared.wake.as_raw_fd(), STOP).map_err(|error| broken(&error))?;
        let serving = Serving {
            listener,
            poll,
            shared: Arc::clone(&shared),
            table: Table::default(),
            clients: HashMap::new(),
            next: FIRST_CLIENT,
        };
        let thread = std::thread::Builder::new().name("dm-store".to_owned()).spawn(move || serving.run());
        let thread = thread.map_err(|error| broken(&error))?;
        Ok(Server { address: bound, shared, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Clients that are connected now.
    pub fn clients(&self) -> usize {
        self.shared.clients.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes to our own eventfd.
        unsafe { libc::write(self.shared.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    greeted: bool,
    writing: bool,
}

struct Serving {
    listener: TcpListener,
    poll: Poll,
    shared: Arc<Shared>,
    table: Table,
    clients: HashMap<Client, Connection>,
    next: Client,
}

impl Serving {
    fn run(mut self) {
        let mut buffer = vec![0; 64 << 10];
        while !self.shared.stop.load(Ordering::SeqCst) {
            for (token, readable) in self.poll.wait() {
                match token {
                    LISTENER => self.accept(),
                    STOP => {}
                    client if readable => self.receive(client, &mut buffer),
                    client => self.flush(client),
                }
            }
            self.shared.clients.store(self.clients.len(), Ordering::SeqCst);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
                    let client = self.next;
                    self.next += 1;
                    if ready.and_then(|()| self.poll.add(stream.as_raw_fd(), client)).is_ok() {
                        let connection = Connection {
                            stream,
                            received: Vec::new(),
                            unsent: Vec::new(),
                            greeted: false,
                            writing: false,
                        };
                        self.clients.insert(client, connection);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    // Out of descriptors: the waiting connection keeps the listener readable, so pause instead of spinning.
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
                    {
                        std::thread::sleep(Duration::from_millis(10));
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
            match connection.stream.read(buffer) {
                Ok(0) => return self.leave(client),
                Ok(count) => {
                    taken += count;
                    connection.received.extend_from_slice(&buffer[..count]);
                    if self.carry_out(client).is_err() {
                        return self.leave(client);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.leave(client),
            }
        }
    }

    /// Carries out every complete request that has come.
    fn carry_out(&mut self, client: Client) -> std::result::Result<(), String> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let received = std::mem::take(&mut connection.received);
        let (mut greeted, mut at) = (connection.greeted, 0);
        while let Some((request, used)) = decode(&received[at..]).map_err(|malformed| malformed.0)? {
            at += used;
            if !greeted && !matches!(request, super::frame::Request::Validate(_)) {
                return Err("no greeting".to_owned());
            }
            greeted = true;
            let replies = self.table.handle(client, request)?;
            self.send(replies);
            if !self.clients.contains_key(&client) {
                // Dropped while it was answered: what it asked next would wait in the table for nobody.
                return Ok(());
            }
        }
        if received.len() - at > MAX_REQUEST {
            return Err(format!("a request of more than {MAX_REQUEST} bytes"));
        }
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.greeted = greeted;
            connection.received = if at == 0 { received } else { received[at..].to_vec() };
        }
        Ok(())
    }

    fn send(&mut self, replies: Replies) {
        for (client, bytes) in replies {
            if let Some(connection) = self.clients.get_mut(&client) {
                connection.unsent.extend(bytes);
                self.flush(client);
            }
        }
    }

    fn flush(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let mut sent = 0;
        let broken = loop {
            if sent == connection.unsent.len() {
                break false;
            }
            match connection.stream.write(&connection.unsent[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
        };
        connection.unsent.drain(..sent);
        if broken || connection.unsent.len() > MAX_UNSENT {
            return self.leave(client);
        }
        let writing = !connection.unsent.is_empty();
        if writing != connection.writing {
            connection.writing = writing;
            let _ = self.poll.modify(connection.stream.as_raw_fd(), client, writing);
        }
    }

    fn leave(&mut self, client: Client) {
        self.table.leave(client);
        // Closing the socket takes it out of the epoll set.
        self.clients.remove(&client);
    }
}

struct Poll(OwnedFd);

impl Poll {
    fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, false)
    }

    fn modify(&self, fd: RawFd, token: u64, writing: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, writing)
    }

    fn control(&self, action: i32, fd: RawFd, token: u64, writing: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLRDHUP | if writing { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open and the event is valid.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), action, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What is ready: the token, and whether there is something to read (or a hang-up, which reading finds).
    fn wait(&self) -> Vec<(u64, bool)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        // SAFETY: the buffer holds as many events as said. No time limit is needed: dropping the server wakes it.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, -1) };
        let mut ready = Vec::new();
        for event in &events[..usize::try_from(count).unwrap_or(0)] {
            let (flags, token) = (event.events as i32, event.u64);
            if flags & libc::EPOLLOUT != 0 {
                ready.push((token, false));
            }
            if flags & !libc::EPOLLOUT != 0 {
                ready.push((token, true));
            }
        }
        ready
    }
}

/// # Safety
/// `fd` is an open descriptor that nobody else owns, or negative.
unsafe fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's contract.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}
