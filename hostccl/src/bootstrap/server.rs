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

use super::accepted::{Accepted, Meetings, Progress, Step};
use super::greeting;
use super::link::{LOOK, LinkState};
use super::meeting::{ConnectionId, Meeting, Outgoing};
use super::shared::{Command, SERVER, Shared, current};
use crate::error::{Error, Result};
use crate::fork::Closed;
use crate::machine;
use crate::segment::Lobby;
use crate::thread;
use crate::token::random_token;
use crate::types::ncclSystemError;
use crate::wire::{Token, here};

/// The most connections on which no rank has registered. A newer connection closes the oldest one.
const STRANGERS: usize = 1024;
/// The part of the files that this process may open which such connections may take: one in
/// `PART`. The rest is for the ranks and for the program.
const PART: usize = 4;
/// How long the thread accepts no connection after the process could open no more files.
const NO_FILES_PAUSE: Duration = Duration::from_millis(50);
/// How long the process may be unable to open files for new connections. After that, the joins that
/// wait for more ranks fail. Otherwise their ranks would time out, and the error would not give the
/// reason.
const NO_FILES_LIMIT: Duration = Duration::from_secs(2);
/// The shortest and the longest pause of the thread while nobody has registered. After each pause
/// the thread checks whether the ranks of this host have used an id up in the id's segment. Each
/// pause is twice as long as the one before.
const IDLE_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Serves the id with this token, whose segment is open at `fd`. Returns the address to which ranks
/// connect.
pub(crate) fn open(token: Token, fd: &OwnedFd) -> Result<SocketAddr> {
    let lobby = Lobby::of(fd)?;
    let mut server = SERVER.lock();
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

/// Stops serving an id. A join that is still under way fails. `why` is the reason, if a rank of
/// this process has given the join up. It is passed here because the rank's own message may reach
/// the thread after this command.
pub(crate) fn close(token: Token, why: Option<Error>) {
    let mut server = SERVER.lock();
    if let Some(shared) = current(&mut server) {
        shared.command(Command::Close(token, why.map(Box::new)));
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
        no_files_since: None,
        meetings: HashMap::new(),
        peers: HashMap::new(),
        last: 0,
        idle_pause: IDLE_PAUSE.0,
    };
    thread::spawn("dm-join", move || server.run())
        .map_err(|reason| Error::new(ncclSystemError, machine::no_thread(&reason)))?;
    Ok(shared)
}

/// Returns the most connections on which no rank has registered, in a process that may open `files`
/// files; `None` where there is no limit.
fn most_strangers(files: Option<u64>) -> usize {
    let part = files.map_or(STRANGERS, |files| usize::try_from(files).unwrap_or(usize::MAX) / PART);
    part.clamp(1, STRANGERS)
}

/// The state of the thread.
struct Server {
    /// The state that the thread shares with others.
    shared: Arc<Shared>,
    /// The listening socket.
    listener: Closed<TcpListener>,
    /// Until when no connection is accepted, because the process can open no more files.
    paused_until: Option<Instant>,
    /// Since when the process has had no file for a new connection. `None` while it has one.
    no_files_since: Option<Instant>,
    /// The joins, with the tokens of their ids, by the ids' numbers.
    meetings: Meetings,
    /// The connections.
    peers: HashMap<ConnectionId, Accepted>,
    /// The number of the last connection.
    last: ConnectionId,
    /// The present pause of the thread while nobody has registered.
    idle_pause: Duration,
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
            self.idle_pause = IDLE_PAUSE.0;
            match command {
                Command::Open(token, lobby) => {
                    let comm = random_token().map_or(greeting::number(&token), |random| {
                        u64::from_le_bytes(*random.first_chunk().expect("a token has 16 bytes"))
                    });
                    self.meetings.insert(greeting::number(&token), (token, Meeting::new(lobby, comm)));
                }
                Command::Close(token, why) => {
                    let number = greeting::number(&token);
                    if let Some((_, meeting)) = self.meetings.get_mut(&number) {
                        meeting.close(why.map(|why| *why));
                    }
                    self.send_messages(number);
                    self.meetings.remove(&number);
                }
            }
        }
    }

    /// Does the work that is due. Returns when the next work is due.
    fn tick(&mut self, now: Instant) -> Instant {
        let silent =
            self.peers.iter_mut().filter_map(|(connection, peer)| peer.link.is_silent().then_some(*connection));
        silent.collect::<Vec<_>>().into_iter().for_each(|connection| self.drop_peer(connection));
        let numbers: Vec<u64> = self.meetings.keys().copied().collect();
        let mut due = now + self.idle_pause;
        for number in numbers {
            let Some((_, meeting)) = self.meetings.get_mut(&number) else { continue };
            due = due.min(meeting.tick(now).unwrap_or(due));
            self.send_messages(number);
            // A join that has failed is kept until its id is closed, because ranks that connect
            // later read the reason.
            self.meetings.retain(|_, (_, meeting)| !meeting.is_over() && !meeting.is_spent());
        }
        self.peers.retain(|_, peer| peer.until.is_none_or(|until| now < until));
        if !self.peers.is_empty() {
            due = due.min(now + LOOK);
        }
        due = self.peers.values().filter_map(|peer| peer.until).fold(due, Instant::min);
        let busy = self.meetings.values().any(|(_, meeting)| meeting.is_busy());
        self.idle_pause = if busy { IDLE_PAUSE.0 } else { (self.idle_pause * 2).min(IDLE_PAUSE.1) };
        due.min(self.paused_until.filter(|until| *until > now).unwrap_or(due))
    }

    /// Sends the messages that the join by the id with this number has made.
    fn send_messages(&mut self, number: u64) {
        let Some((_, meeting)) = self.meetings.get_mut(&number) else { return };
        for Outgoing { to, frame, last } in meeting.outgoing() {
            for connection in to {
                let Some(peer) = self.peers.get_mut(&connection) else { continue };
                let sent = peer.link.put_frame(&frame).is_ok() && peer.link.push().is_ok();
                if last {
                    peer.say_farewell();
                }
                if !sent {
                    self.drop_peer(connection);
                }
            }
        }
    }

    /// Closes a connection. A rank that has registered on it counts as gone.
    fn drop_peer(&mut self, connection: ConnectionId) {
        let Some(peer) = self.peers.remove(&connection) else { return };
        if let Progress::Ready(number, Some(rank)) = peer.progress {
            if let Some((_, meeting)) = self.meetings.get_mut(&number) {
                meeting.lose(rank);
            }
        }
    }

    /// Waits until bytes, a connection or a command arrives, or the time is up. Then serves the
    /// connections.
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
        // After so many new connections, the thread serves the older ones before it accepts more.
        for _ in 0..64 {
            let mut from = None;
            let accepted = Closed::open(|| {
                let (socket, address) = self.listener.accept()?;
                from = Some(address);
                Ok(socket)
            });
            match (accepted, from) {
                (Ok(socket), Some(from)) => {
                    self.no_files_since = None;
                    if socket.set_nonblocking(true).is_err() {
                        continue;
                    }
                    super::link::tune(&socket);
                    self.make_room();
                    self.last += 1;
                    self.peers.insert(self.last, Accepted::new(socket, from));
                }
                (Err(error), _) if error.kind() == ErrorKind::WouldBlock => return,
                (Err(error), _) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    self.run_short(&error);
                    return;
                }
                // The connection has ended before it was accepted.
                _ => {}
            }
        }
    }

    /// Accepts no connection for [`NO_FILES_PAUSE`], because the process can open no more files.
    /// After [`NO_FILES_LIMIT`] without files, fails the joins that wait for more ranks.
    fn run_short(&mut self, error: &io::Error) {
        let now = Instant::now();
        let why = machine::explained(error);
        // A connection that waited during an earlier shortage may have gone before it was accepted.
        // Then that shortage is over, although no accept has cleared `no_files_since`.
        if self.paused_until.is_some_and(|until| now > until + NO_FILES_LIMIT) {
            self.no_files_since = None;
        }
        let since = *self.no_files_since.get_or_insert_with(|| {
            log::warn!("a connection to join a communicator waits: {why}");
            now
        });
        self.drop_oldest_stranger();
        self.paused_until = Some(now + NO_FILES_PAUSE);
        if now - since < NO_FILES_LIMIT {
            return;
        }
        self.no_files_since = None;
        let pid = std::process::id();
        let message =
            format!("the maker of the unique id (pid {pid}) cannot accept connections of further ranks: {why}");
        // The next tick, which follows at once, tells the ranks.
        for (_, meeting) in self.meetings.values_mut().filter(|(_, meeting)| meeting.is_open()) {
            meeting.fail(Error::new(ncclSystemError, message.clone()));
        }
    }

    /// Closes the oldest connection on which no rank has registered, where there are too many of
    /// them.
    fn make_room(&mut self) {
        let most = most_strangers(machine::files());
        if self.peers.len() >= most && self.peers.values().filter(|peer| peer.is_stranger()).count() >= most {
            self.drop_oldest_stranger();
        }
    }

    fn drop_oldest_stranger(&mut self) {
        let strangers = self.peers.iter().filter(|(_, peer)| peer.is_stranger());
        if let Some(oldest) = strangers.map(|(connection, _)| *connection).min() {
            self.drop_peer(oldest);
        }
    }

    /// Reads the bytes that have come on a connection, and answers them.
    fn serve(&mut self, connection: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let state = peer.link.pump();
        let answered = self.answer(connection);
        if let Err(why) = &answered {
            let from = self.peers.get(&connection).map_or_else(String::new, |peer| peer.from.to_string());
            log::warn!("a connection from {from} to join a communicator is closed: {why}");
        }
        let pushed = self.peers.get_mut(&connection).is_some_and(|peer| peer.link.push().is_ok());
        if answered.is_err() || state == LinkState::Closed || !pushed {
            self.drop_peer(connection);
        }
    }

    /// Handles the bytes that a connection has received, up to the last complete message. Fails
    /// where the connection must be closed.
    fn answer(&mut self, connection: ConnectionId) -> std::result::Result<(), String> {
        while let Some(peer) = self.peers.get_mut(&connection) {
            match peer.step(connection, &mut self.meetings)? {
                Step::Wait => return Ok(()),
                Step::Advanced => {}
                Step::Handled(number) => self.send_messages(number),
            }
        }
        Ok(())
    }
}

#[test]
fn strangers_take_a_quarter_of_the_files_at_most() {
    assert_eq!([Some(1024), Some(1 << 20), Some(2), None].map(most_strangers), [256, 1024, 1, 1024]);
}
