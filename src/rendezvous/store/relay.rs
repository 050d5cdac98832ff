//! Carries the connections of the ranks of one host to the store's server in one connection, a
//! trunk.
//!
//! `devicemesh run` has a relay on each node of a large job. The ranks of the node connect to the
//! relay as they would connect to the server. The relay does not look at what they send: a client
//! and the server greet each other, and encrypt what they say, as without a relay. So the server
//! has one socket for the ranks of a node, and one system call of the server serves several ranks.
//!
//! When the trunk ends, the relay ends all connections of its clients. The ranks take this for the
//! end of the server.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read};
use std::mem;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use hostccl::fork::Private;

use super::TcpStore;
use super::channels::{self, Frame, MOST, Window};
use super::connection::Connection;

use super::frame::Malformed;
use super::loop_thread::{End, LoopThread};
use super::outgoing::Outgoing;
use super::poll::{Interest, Poll, Ready};
use super::secret::Secret;
use super::server::{Connections, accept};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// How many bytes are read in one system call.
const MOST_READ: usize = 64 << 10;
/// About how many bytes are sent to the server, or to one client, before the others get their turn.
const MOST_SENT: usize = 256 << 10;
/// The relay reads nothing from its clients while the trunk has more bytes than this to send.
const HIGH_WATER: usize = 1 << 20;
/// How many connections are accepted before the others get their turn.
const ACCEPT_TURN: usize = 32;
/// How long the relay waits before the next try when it has no descriptor for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The tokens of the events.
const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const TRUNK: u64 = 2;
/// The token of a client is this number plus the number of its channel.
const CLIENTS: u64 = 3;

/// A relay that runs. It ends, with all connections of its clients, when it is dropped.
pub struct Relay {
    /// The value of [`RELAY`](super::RELAY) for the ranks.
    variable: String,
    /// The address at which the relay listens.
    address: SocketAddr,
    /// The thread of the loop.
    _thread: LoopThread,
}

impl Relay {
    /// Connects to the server at `host:port`, and listens on the loopback device for clients of
    /// that server. Returns `None` where the server knows no trunks: it is not of this library, or
    /// it is an older one.
    pub fn start(host: &str, port: u16, secret: Option<Secret>, wait: &Wait) -> Result<Option<Relay>> {
        let store = TcpStore::connect_with_secret(host, port, secret, wait)?;
        let name = super::Store::name(&store).to_owned();
        let Some(trunk) = store.into_trunk(wait)? else { return Ok(None) };
        let broken = |error: &io::Error| Error::store_io("cannot set up the relay of this node", error);
        let listener = super::server::listen((Ipv4Addr::LOCALHOST, 0).into()).map_err(|error| broken(&error))?;
        let address = listener.local_addr().map_err(|error| broken(&error))?;
        let from = trunk.stream.local_addr().map_err(|error| broken(&error))?.ip().to_canonical();
        let poll = Poll::new().map_err(|error| broken(&error))?;
        let end = End::of_loop(&poll, WAKE).map_err(|error| broken(&error))?;
        let adds = poll.add(&*listener, LISTENER).and_then(|()| poll.add(&*trunk.stream, TRUNK));
        adds.map_err(|error| broken(&error))?;
        let relaying = Relaying {
            poll,
            listener,
            trunk,
            frames: Vec::new(),
            outgoing: Outgoing::default(),
            interest: READ,
            clients: HashMap::new(),
            next: 0,
            descriptors: Connections::default(),
            is_paused: false,
            is_backlogged: false,
            buffer: vec![0; MOST_READ],
        };
        let ended = Arc::clone(&end);
        let thread = LoopThread::start("dm-relay", end, move || relaying.run(&ended));
        let thread = thread.map_err(|error| Error::no_thread(&error).within("cannot set up the relay of this node"))?;
        Ok(Some(Relay { variable: format!("{name} {address} {from}"), address, _thread: thread }))
    }

    /// Returns the address at which the relay listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the value of [`RELAY`](super::RELAY) for the ranks of this node.
    pub fn variable(&self) -> &str {
        &self.variable
    }
}

const READ: Interest = Interest { read: true, write: false };

/// The state of a relay's thread.
struct Relaying {
    /// The descriptors for which the thread waits.
    poll: Poll,
    /// The socket at which the clients connect.
    listener: Private<TcpListener>,
    /// The connection to the server.
    trunk: Connection,
    /// The beginning of a frame whose end has not come on the trunk yet, decrypted where the store
    /// has a secret.
    frames: Vec<u8>,
    /// The bytes that are still to be sent on the trunk.
    outgoing: Outgoing,
    /// The events of the trunk for which the thread waits.
    interest: Interest,
    /// The clients by the numbers of their channels.
    clients: HashMap<u32, Client>,
    /// The number of the next channel.
    next: u32,
    /// Knows how many clients there may be, so that the process keeps descriptors for itself.
    descriptors: Connections,
    /// Whether the thread accepts no connections for a moment, because there is no descriptor.
    is_paused: bool,
    /// Whether nothing is read from the clients, because the trunk has too much to send.
    is_backlogged: bool,
    /// The buffer for reading.
    buffer: Vec<u8>,
}

/// A client of a relay.
struct Client {
    /// Its socket, which does not block.
    stream: Private<TcpStream>,
    /// The bytes that are still to be sent to the client.
    outgoing: Outgoing,
    /// How much of the channel may be sent on the trunk, and how much has come.
    window: Window,
    /// Whether the server has ended the channel. The client still gets what has come before.
    is_ending: bool,
    /// The events for which the thread waits.
    interest: Interest,
}

impl Client {
    /// Sends what the socket takes. Fails where the client has gone.
    fn flush(&mut self) -> io::Result<()> {
        let sent = self.outgoing.flush(&self.stream, MOST_SENT)?;
        // After its end, a channel has no window.
        if !self.is_ending {
            self.window.took(sent);
        }
        Ok(())
    }

    /// Whether the client has everything that the server sent before it ended the channel.
    fn is_done(&self) -> bool {
        self.is_ending && self.outgoing.left() == 0
    }
}

impl Relaying {
    fn run(mut self, end: &End) {
        let mut ready = Vec::new();
        while !end.has_come() {
            self.poll.wait(self.is_paused.then_some(ACCEPT_PAUSE), &mut ready);
            if mem::take(&mut self.is_paused) {
                let _ = self.poll.modify(&*self.listener, LISTENER, READ);
            }
            for event in &ready {
                match event.token {
                    WAKE => {}
                    LISTENER => self.accept(),
                    TRUNK => {
                        if (event.read || event.over) && self.read_trunk().is_err() {
                            return self.end();
                        }
                    }
                    client => self.serve((client - CLIENTS) as u32, event),
                }
            }
            if self.flush_trunk().is_err() {
                return self.end();
            }
        }
        self.end();
    }

    /// Ends all connections. Closing the sockets is not enough when a process made by `clone` has
    /// copies of them.
    fn end(self) {
        let _ = self.trunk.stream.shutdown(Shutdown::Both);
        for client in self.clients.values() {
            let _ = client.stream.shutdown(Shutdown::Both);
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_TURN {
            if self.descriptors.is_out_of_descriptors(self.clients.len()) {
                return self.pause();
            }
            match accept(&self.listener) {
                Ok((stream, _)) => {
                    self.descriptors.look_at(&stream, self.clients.len());
                    let number = self.next;
                    self.next = self.next.wrapping_add(1);
                    if self.poll.add(&*stream, CLIENTS + u64::from(number)).is_ok() {
                        let outgoing = Outgoing::default();
                        let client =
                            Client { stream, outgoing, window: Window::new(), is_ending: false, interest: READ };
                        self.clients.insert(number, client);
                        // The numbers of the channels that begin must grow. So a channel begins
                        // here, and not with the first bytes of its client.
                        self.outgoing.push(&channels::begin(number));
                        self.watch(number);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    if let Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) = error.raw_os_error() {
                        self.pause();
                    }
                    return;
                }
            }
        }
    }

    /// Accepts no connections for a moment. The listener stays ready, so the thread would not sleep
    /// without the pause.
    fn pause(&mut self) {
        let _ = self.poll.modify(&*self.listener, LISTENER, Interest { read: false, write: false });
        self.is_paused = true;
    }

    /// Does what one event of a client asks for.
    fn serve(&mut self, number: u32, event: &Ready) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if event.write && client.flush().is_err() {
            return self.leave(number);
        }
        let room = client.window.room().min(MOST);
        let may_read = room > 0 && !self.is_backlogged && !client.is_ending;
        if event.read && may_read {
            match client.stream.read(&mut self.buffer[..room]) {
                Ok(0) => return self.leave(number),
                Ok(count) => {
                    client.window.sent(count);
                    let mut frames = Vec::with_capacity(count + channels::HEADER);
                    channels::put_bytes(&mut frames, number, &self.buffer[..count]);
                    self.outgoing.push(&frames);
                }
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(_) => return self.leave(number),
            }
        } else if event.over {
            return self.leave(number);
        }
        self.settle(number);
    }

    /// Tells the server how much a client has taken, waits for the events that matter now, and ends
    /// the connection of a client whose channel has ended.
    fn settle(&mut self, number: u32) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if client.is_done() {
            return self.leave(number);
        }
        if let Some(taken) = client.window.take_untold().filter(|_| !client.is_ending) {
            self.outgoing.push(&channels::taken(number, taken));
        }
        self.watch(number);
    }

    /// Sets the events of a client for which the thread waits.
    fn watch(&mut self, number: u32) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let interest = Interest {
            read: client.window.room() > 0 && !self.is_backlogged && !client.is_ending,
            write: client.outgoing.left() > 0,
        };
        if interest != client.interest {
            client.interest = interest;
            if self.poll.modify(&*client.stream, CLIENTS + u64::from(number), interest).is_err() {
                self.leave(number);
            }
        }
    }

    /// Ends the connection of a client, and the client's channel.
    fn leave(&mut self, number: u32) {
        let Some(client) = self.clients.remove(&number) else { return };
        self.poll.remove(&*client.stream);
        let _ = client.stream.shutdown(Shutdown::Both);
        if !client.is_ending {
            self.outgoing.push(&channels::end(number));
        }
    }

    /// Reads what has come on the trunk, and hands it out. Fails when the trunk has ended.
    fn read_trunk(&mut self) -> io::Result<()> {
        let count = match self.trunk.stream.read(&mut self.buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => return Ok(()),
            Err(error) => return Err(error),
        };
        match self.trunk.parts().1 {
            Some(records) => records.open(&self.buffer[..count], &mut self.frames).map_err(io::Error::other)?,
            None => self.frames.extend_from_slice(&self.buffer[..count]),
        }
        let frames = mem::take(&mut self.frames);
        let mut at = 0;
        while let Some(length) = channels::length(&frames[at..]).map_err(malformed)? {
            if let Some((number, frame)) = channels::frame(&frames[at..at + length]) {
                self.carry_out(number, frame).map_err(malformed)?;
            }
            at += length;
        }
        self.frames = frames;
        self.frames.drain(..at);
        Ok(())
    }

    /// Does what a frame says. The client may have gone meanwhile.
    fn carry_out(&mut self, number: u32, frame: Frame<'_>) -> std::result::Result<(), Malformed> {
        let Some(client) = self.clients.get_mut(&number) else { return Ok(()) };
        match frame {
            Frame::Bytes(bytes) => {
                client.window.came(bytes.len())?;
                client.outgoing.push(bytes);
                if client.flush().is_err() {
                    self.leave(number);
                    return Ok(());
                }
            }
            Frame::Begins => return Err(Malformed("the server begins a channel".to_owned())),
            Frame::Taken(count) => client.window.widen(count)?,
            Frame::End => client.is_ending = true,
        }
        self.settle(number);
        Ok(())
    }

    /// Sends what the trunk has to send. Fails when the trunk has ended.
    fn flush_trunk(&mut self) -> io::Result<()> {
        let outgoing = &mut self.outgoing;
        match self.trunk.parts() {
            (stream, None) => outgoing.flush(stream, MOST_SENT)?,
            (stream, Some(records)) => outgoing.flush_sealed(records, stream, MOST_SENT)?,
        };
        let interest = Interest { read: true, write: outgoing.left() > 0 };
        if interest != self.interest {
            self.interest = interest;
            self.poll.modify(&*self.trunk.stream, TRUNK, interest)?;
        }
        let is_backlogged = self.outgoing.left() > HIGH_WATER;
        if mem::replace(&mut self.is_backlogged, is_backlogged) != is_backlogged {
            let numbers: Vec<u32> = self.clients.keys().copied().collect();
            numbers.into_iter().for_each(|number| self.watch(number));
        }
        Ok(())
    }
}

fn malformed(why: Malformed) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.0)
}
