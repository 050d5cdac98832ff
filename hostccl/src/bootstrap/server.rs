//! The thread of a process that has made unique ids: it serves the joins by these ids.
//!
//! One thread and one listening socket serve all ids of the process. They end when no id is open
//! any more.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::greeting::{self, ANSWER_BYTES, HELLO_BYTES, Hello, PROOF_BYTES, Status};
use super::link::{End, Link};
use super::meeting::{Connection, Meeting, Outgoing};
use super::shared::{Command, SERVER, Shared, current};
use crate::error::{Error, Result};
use crate::fork::Closed;
use crate::machine;
use crate::noise::{HANDSHAKE_BYTES, Session};
use crate::segment::{LAYOUT_VERSION, Lobby};
use crate::thread;
use crate::token::random_token;
use crate::types::ncclSystemError;
use crate::wire::{Token, here};

/// How long a connection may take from its beginning until the rank has registered.
const GREETING_TIME: Duration = Duration::from_secs(20);
/// How long the last message to a rank may take.
const FAREWELL_TIME: Duration = Duration::from_secs(10);
/// The most connections on which no rank has registered. A newer connection closes the oldest one.
const STRANGERS: usize = 1024;
/// The pause of the listening socket when the process can open no more files.
const NO_FILES_PAUSE: Duration = Duration::from_millis(50);
/// The longest message that a rank sends, in bytes.
const RANK_MESSAGE_BYTES: usize = 16 << 10;
/// How often the thread looks whether an id was used up in its segment: at first, and in the end.
const LOOK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Serves the id of that token, whose segment is open at `fd`. Returns the address to which ranks
/// connect.
pub(crate) fn open(token: Token, fd: &OwnedFd) -> Result<SocketAddr> {
    let lobby = Lobby::of(fd)?;
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    let shared = match current(&mut server) {
        Some(shared) => shared,
        None => {
            let shared = start()?;
            *server = Some(shared.clone());
            shared
        }
    };
    // The thread ends only while nobody holds the lock.
    shared.command(Command::Open(token, lobby));
    Ok(shared.address)
}

/// Stops serving an id. A join that is not over fails.
pub(crate) fn close(token: Token) {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = current(&mut server) {
        shared.command(Command::Close(token));
    }
}

/// Starts the thread.
fn start() -> Result<Arc<Shared>> {
    let own = here::own_address()?;
    let listening = |reason| Error::system(&format!("listening at {own} for the ranks of other hosts"), reason);
    let listener = Closed::open(|| TcpListener::bind(own)).map_err(listening)?;
    let address = listener.set_nonblocking(true).and_then(|()| listener.local_addr()).map_err(listening)?;
    // SAFETY: the call only takes a descriptor that this process owns. The standard library's
    // backlog is too short for a thousand ranks.
    unsafe { libc::listen(listener.as_raw_fd(), 4096) };
    // SAFETY: the result is a new descriptor or -1.
    let event = || match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: nobody else owns the new descriptor.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    };
    let wake = Closed::open(event).map_err(|reason| Error::system("opening an event descriptor", reason))?;
    let commands = Mutex::default();
    let shared = Arc::new(Shared { pid: std::process::id(), address, commands, wake, ended: AtomicBool::new(false) });
    let server = Server {
        shared: shared.clone(),
        listener,
        paused_until: None,
        meetings: HashMap::new(),
        peers: HashMap::new(),
        last: 0,
        look: LOOK.0,
    };
    thread::spawn("dm-join", move || server.run())
        .map_err(|reason| Error::new(ncclSystemError, machine::no_thread(&reason)))?;
    Ok(shared)
}

/// How far a connection is.
#[derive(Debug)]
enum Progress {
    /// The rank's greeting has not come.
    Hello,
    /// The rank's proof has not come.
    Proof(Box<([u8; HELLO_BYTES], [u8; ANSWER_BYTES])>, Hello),
    /// The first message of the Noise handshake has not come.
    Noise(Box<Session>, u64),
    /// The connection belongs to the id of that number. Its rank is known once it has registered.
    Ready(u64, Option<usize>),
    /// The connection is closed when everything is sent.
    Farewell,
}

/// A connection.
#[derive(Debug)]
struct Remote {
    /// The connection.
    link: Link,
    /// The address of the other side.
    from: SocketAddr,
    /// How far the connection is.
    progress: Progress,
    /// When the connection is closed; `None` once its rank has registered, because then the rank's
    /// own deadline counts.
    until: Option<Instant>,
}

/// The state of the thread.
struct Server {
    /// The state that the thread shares with others.
    shared: Arc<Shared>,
    /// The listening socket.
    listener: Closed<TcpListener>,
    /// Until when no connection is accepted, because the process can open no more files.
    paused_until: Option<Instant>,
    /// The joins, with the tokens of their ids, by the ids' numbers.
    meetings: HashMap<u64, (Token, Meeting)>,
    /// The connections.
    peers: HashMap<Connection, Remote>,
    /// The number of the last connection.
    last: Connection,
    /// How long the thread sleeps while nobody has registered.
    look: Duration,
}

impl Server {
    fn run(mut self) {
        loop {
            self.do_commands();
            let now = Instant::now();
            let due = self.tick(now);
            if self.meetings.is_empty() && self.peers.is_empty() && self.shared.end() {
                return;
            }
            self.wait(due.saturating_duration_since(now));
        }
    }

    fn do_commands(&mut self) {
        let commands = std::mem::take(&mut *self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            self.look = LOOK.0;
            match command {
                Command::Open(token, lobby) => {
                    let comm = random_token().map_or(greeting::number(&token), |random| {
                        u64::from_le_bytes(*random.first_chunk().expect("a token has 16 bytes"))
                    });
                    self.meetings.insert(greeting::number(&token), (token, Meeting::new(lobby, comm)));
                }
                Command::Close(token) => {
                    let number = greeting::number(&token);
                    if let Some((_, meeting)) = self.meetings.get_mut(&number).filter(|(_, it)| it.is_busy()) {
                        meeting.fail(Error::usage("the unique id was closed before all ranks had joined"));
                    }
                    self.send_of(number);
                    self.meetings.remove(&number);
                }
            }
        }
    }

    /// Does what is due, and returns when something is due again.
    fn tick(&mut self, now: Instant) -> Instant {
        let numbers: Vec<u64> = self.meetings.keys().copied().collect();
        let mut due = now + self.look;
        for number in numbers {
            let Some((_, meeting)) = self.meetings.get_mut(&number) else { continue };
            due = due.min(meeting.tick(now).unwrap_or(due));
            self.send_of(number);
            // A join that has failed stays for the ranks that come later, until its id is closed.
            self.meetings.retain(|_, (_, meeting)| !meeting.is_over() && !meeting.is_spent());
        }
        self.peers.retain(|_, peer| peer.until.is_none_or(|until| now < until));
        due = self.peers.values().filter_map(|peer| peer.until).fold(due, Instant::min);
        let busy = self.meetings.values().any(|(_, meeting)| meeting.is_busy());
        self.look = if busy { LOOK.0 } else { (self.look * 2).min(LOOK.1) };
        due.min(self.paused_until.filter(|until| *until > now).unwrap_or(due))
    }

    /// Sends the messages of a join.
    fn send_of(&mut self, number: u64) {
        let Some((_, meeting)) = self.meetings.get_mut(&number) else { return };
        for Outgoing { to, frame, last } in meeting.outgoing() {
            for connection in to {
                let Some(peer) = self.peers.get_mut(&connection) else { continue };
                let sent = peer.link.put_frame(&frame).is_ok() && peer.link.push().is_ok();
                if last {
                    peer.progress = Progress::Farewell;
                    peer.until = Some(Instant::now() + FAREWELL_TIME);
                }
                if !sent {
                    self.drop_peer(connection);
                }
            }
        }
    }

    /// Closes a connection. A rank that has registered on it counts as gone.
    fn drop_peer(&mut self, connection: Connection) {
        let Some(peer) = self.peers.remove(&connection) else { return };
        if let Progress::Ready(number, Some(rank)) = peer.progress {
            if let Some((_, meeting)) = self.meetings.get_mut(&number) {
                meeting.lose(rank);
            }
        }
    }

    /// Waits until something has come or the time is up, and serves the connections.
    fn wait(&mut self, longest: Duration) {
        let listening = self.paused_until.is_none_or(|until| Instant::now() >= until);
        let poll = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut polls = vec![
            poll(self.shared.wake.as_raw_fd(), libc::POLLIN),
            poll(if listening { self.listener.as_raw_fd() } else { -1 }, libc::POLLIN),
        ];
        let mut connections = Vec::with_capacity(self.peers.len());
        for (connection, peer) in &self.peers {
            connections.push(*connection);
            let events = if peer.link.has_to_send() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
            polls.push(poll(peer.link.fd(), events));
        }
        let millis = longest.as_millis().min(60_000) as libc::c_int + 1;
        // SAFETY: the array is valid for its length.
        if unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, millis) } <= 0 {
            return;
        }
        if polls[0].revents != 0 {
            let mut counter = [0_u8; 8];
            // SAFETY: the buffer has eight bytes.
            unsafe { libc::read(polls[0].fd, counter.as_mut_ptr().cast(), counter.len()) };
        }
        for (connection, _) in connections.iter().zip(&polls[2..]).filter(|(_, poll)| poll.revents != 0) {
            self.serve(*connection);
        }
        if polls[1].revents != 0 {
            self.accept();
        }
    }

    fn accept(&mut self) {
        // After so many new connections, the others have their turn.
        for _ in 0..64 {
            let mut from = None;
            let accepted = Closed::open(|| {
                let (socket, address) = self.listener.accept()?;
                from = Some(address);
                Ok(socket)
            });
            match (accepted, from) {
                (Ok(socket), Some(from)) => {
                    if socket.set_nonblocking(true).is_err() {
                        continue;
                    }
                    super::link::tune(&socket);
                    self.make_room();
                    self.last += 1;
                    let until = Some(Instant::now() + GREETING_TIME);
                    let peer = Remote { link: Link::new(socket), from, progress: Progress::Hello, until };
                    self.peers.insert(self.last, peer);
                }
                (Err(error), _) if error.kind() == ErrorKind::WouldBlock => return,
                (Err(error), _) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    log::warn!("a connection to join a communicator waits: {}", machine::explained(&error));
                    self.drop_oldest_stranger();
                    self.paused_until = Some(Instant::now() + NO_FILES_PAUSE);
                    return;
                }
                // The connection has ended before it was accepted.
                _ => {}
            }
        }
    }

    /// Closes the oldest connection without a rank if there are too many.
    fn make_room(&mut self) {
        if self.peers.len() >= STRANGERS && self.peers.values().filter(|peer| is_stranger(peer)).count() >= STRANGERS {
            self.drop_oldest_stranger();
        }
    }

    fn drop_oldest_stranger(&mut self) {
        let strangers = self.peers.iter().filter(|(_, peer)| is_stranger(peer));
        if let Some(oldest) = strangers.map(|(connection, _)| *connection).min() {
            self.drop_peer(oldest);
        }
    }

    /// Reads and answers what has come on a connection.
    fn serve(&mut self, connection: Connection) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let end = peer.link.pump();
        if matches!(peer.progress, Progress::Farewell) {
            // The rank closes the connection when it has read everything.
            if end == End::Closed {
                self.drop_peer(connection);
            }
            return;
        }
        let answered = self.answer(connection);
        if let Err(why) = &answered {
            let from = self.peers.get(&connection).map_or_else(String::new, |peer| peer.from.to_string());
            log::warn!("a connection from {from} to join a communicator is closed: {why}");
        }
        let pushed = self.peers.get_mut(&connection).is_some_and(|peer| peer.link.push().is_ok());
        if answered.is_err() || end == End::Closed || !pushed {
            self.drop_peer(connection);
        }
    }

    /// Takes one step after another of a connection. Fails when the connection is to be closed.
    fn answer(&mut self, connection: Connection) -> std::result::Result<(), String> {
        while let Some(peer) = self.peers.get_mut(&connection) {
            match &mut peer.progress {
                Progress::Hello => {
                    let Some(bytes) = peer.link.take::<HELLO_BYTES>() else { return Ok(()) };
                    let hello = Hello::read(&bytes).ok_or("a stranger greets")?;
                    let token = self.meetings.get(&hello.number).map(|(token, _)| *token);
                    let status = status(&hello, token.is_some());
                    let nonce = random_token().map_err(|error| error.message().to_owned())?;
                    let answer = greeting::answer(status, token.as_ref(), &bytes, &nonce);
                    peer.link.put(&answer);
                    match status {
                        Status::Welcome => peer.progress = Progress::Proof(Box::new((bytes, answer)), hello),
                        _ => {
                            peer.progress = Progress::Farewell;
                            peer.until = Some(Instant::now() + FAREWELL_TIME);
                        }
                    }
                }
                Progress::Proof(said, hello) => {
                    let Some(proof) = peer.link.take::<PROOF_BYTES>() else { return Ok(()) };
                    let (token, _) = self.meetings.get(&hello.number).ok_or("its id has been closed")?;
                    if !greeting::is_proof(token, &said.0, &said.1, &proof) {
                        return Err("it does not know the id's token".to_owned());
                    }
                    let number = hello.number;
                    match here::own_secret() {
                        None => {
                            peer.link.expect(RANK_MESSAGE_BYTES);
                            peer.progress = Progress::Ready(number, None);
                        }
                        Some(secret) => {
                            let session = Session::responder(&secret, &super::prologue(&said.0, &said.1));
                            let session = session.map_err(|broken| broken.to_string())?;
                            peer.progress = Progress::Noise(Box::new(session), number);
                        }
                    }
                }
                Progress::Noise(session, number) => {
                    let Some(message) = peer.link.take::<HANDSHAKE_BYTES>() else { return Ok(()) };
                    let (number, mut reply) = (*number, Vec::new());
                    session.read_message(&message, &mut Vec::new()).map_err(|broken| broken.to_string())?;
                    session.write_message(&[], &mut reply).map_err(|broken| broken.to_string())?;
                    peer.link.put(&reply);
                    let progress = std::mem::replace(&mut peer.progress, Progress::Ready(number, None));
                    if let Progress::Noise(session, _) = progress {
                        peer.link.seal(*session);
                    }
                    peer.link.expect(RANK_MESSAGE_BYTES);
                }
                Progress::Ready(number, rank) => {
                    let Some(message) = peer.link.message()? else { return Ok(()) };
                    let (number, rank, from) = (*number, *rank, peer.from.ip());
                    let (_, meeting) = self.meetings.get_mut(&number).ok_or("its id has been closed")?;
                    let now = meeting.take(connection, rank, from, message)?;
                    if now.is_some() {
                        peer.until = None;
                    }
                    peer.progress = Progress::Ready(number, now);
                    self.send_of(number);
                }
                Progress::Farewell => return Ok(()),
            }
        }
        Ok(())
    }
}

/// Whether nobody has registered on the connection.
fn is_stranger(peer: &Remote) -> bool {
    matches!(peer.progress, Progress::Hello | Progress::Proof(..) | Progress::Noise(..) | Progress::Ready(_, None))
}

/// Returns what to say to a greeting.
fn status(hello: &Hello, is_known: bool) -> Status {
    match (hello.sealed, here::own_secret().is_some()) {
        _ if !is_known => Status::UnknownId,
        _ if hello.version != LAYOUT_VERSION => Status::OtherVersion,
        (false, true) => Status::RankHasNoSecret,
        (true, false) => Status::MakerHasNoSecret,
        _ => Status::Welcome,
    }
}
