//! The wire's thread. It makes connections and accepts them. Ten times a second it moves what came
//! while nobody waited.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use super::connection::Connection;
use super::epoll::{self, Epoll};
use super::hello::{self, Answer, HELLO, Hello, PROOF, Side};
use super::{Inner, State};
use crate::fork::Private;
use crate::wire::{Lost, Token};
use crate::{thread, token};

/// The time from one look at the connections to the next.
const TICK: Duration = Duration::from_millis(100);
/// How long a process that connects may take to prove itself, and how long it may stay unknown.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long this process tries to reach another one that answers without taking the connection.
const TRIES: Duration = Duration::from_secs(30);
/// The time from one try to the next.
const PAUSE: Duration = Duration::from_millis(50);
/// The most connections that have not proved themselves.
const MOST_STRANGERS: usize = 128;
/// How long the wire goes on after its last owner has gone, until its bytes have been sent.
const LINGER: Duration = Duration::from_secs(2);

/// The number of the listener in the thread's epoll set.
const LISTENER: u64 = u64::MAX;
/// The number of the bell in the thread's epoll set.
const BELL: u64 = u64::MAX - 1;

/// How far a connection is that has not proved itself.
#[derive(Debug)]
enum Stage {
    /// This process connects, and the kernel has not answered.
    Connecting,
    /// This process has sent its hello and waits for the answer and its proof.
    Asked,
    /// The other process has connected and has not said who it is.
    Accepted,
    /// The other process has said who it is, but this one does not know it yet.
    Unknown(Hello),
    /// This process has answered and waits for the proof.
    Answered(Token, [u8; HELLO]),
}

/// A connection that has not proved itself.
#[derive(Debug)]
struct Stranger {
    /// The socket, which does not block.
    socket: Private<Socket>,
    /// The other side's address, for messages.
    address: String,
    /// How far the connection is.
    stage: Stage,
    /// The peer, where it is known.
    peer: Option<u32>,
    /// The hello of the process that connects.
    first: [u8; HELLO],
    /// The token, on the side that connects.
    token: Token,
    /// The bytes that came and are not used.
    came: Vec<u8>,
    /// When the connection began.
    since: Instant,
}

/// A peer to which this process tries to connect.
#[derive(Debug)]
struct Attempt {
    /// When the first try began.
    since: Instant,
    /// When the next try may begin, while there is none.
    next: Instant,
    /// The number of the stranger that is the try under way.
    stranger: Option<u64>,
    /// Why the last try failed.
    why: String,
}

/// What the thread owns.
struct Keeper {
    /// The wire.
    inner: Arc<Inner>,
    /// The listener.
    listener: Private<Socket>,
    /// The listener, the bell, and the strangers by their numbers.
    set: Epoll,
    /// The connections that have not proved themselves.
    strangers: HashMap<u64, Stranger>,
    /// The number of the last stranger.
    last: u64,
    /// The peers to connect to.
    attempts: HashMap<u32, Attempt>,
    /// The function that is called at each tick.
    tick: fn(),
}

/// Starts the thread.
pub(super) fn start(inner: Arc<Inner>, listener: Private<Socket>, tick: fn()) -> io::Result<()> {
    let set = Epoll::new()?;
    set.add(listener.as_raw_fd(), LISTENER, false)?;
    set.add(inner.keeper.as_raw_fd(), BELL, false)?;
    let keeper = Keeper { inner, listener, set, strangers: HashMap::new(), last: 0, attempts: HashMap::new(), tick };
    thread::spawn("dm-wire", move || keeper.run()).map(drop)
}

impl Keeper {
    fn run(mut self) {
        let mut next_tick = Instant::now() + TICK;
        while !self.inner.is_over.load(Ordering::SeqCst) {
            let is_relied_on = self.is_relied_on();
            let mut wake = next_tick;
            if let Some(first) =
                self.attempts.values().filter(|attempt| attempt.stranger.is_none()).map(|a| a.next).min()
            {
                wake = wake.min(first);
            }
            let timeout = wake.saturating_duration_since(Instant::now());
            let all = [self.set.as_raw_fd(), self.inner.connections.as_raw_fd()];
            epoll::wait_for(if is_relied_on { &all } else { &all[..1] }, timeout);
            let ready: Vec<u64> = self.set.wait(Duration::ZERO).map(|ready| ready.number).collect();
            for number in ready {
                match number {
                    LISTENER => self.accept(),
                    BELL => self.inner.keeper.still(),
                    number => self.go_on(number),
                }
            }
            self.look();
            let is_tick = Instant::now() >= next_tick;
            if is_relied_on || is_tick {
                let mut state = self.inner.lock();
                state.pass(&self.inner);
            }
            if is_tick {
                next_tick = Instant::now() + TICK;
                self.expire();
                (self.tick)();
            }
        }
        self.end();
    }

    /// Whether threads that sleep rely on this one to move their messages.
    fn is_relied_on(&self) -> bool {
        let looks = &self.inner.keeper_looks;
        looks.store(true, Ordering::SeqCst);
        if self.inner.others.load(Ordering::SeqCst) > 0 {
            return true;
        }
        looks.store(false, Ordering::SeqCst);
        let is = self.inner.others.load(Ordering::SeqCst) > 0;
        looks.store(is, Ordering::SeqCst);
        is
    }

    /// Accepts what waits at the listener.
    fn accept(&mut self) {
        for _ in 0..MOST_STRANGERS {
            let mut address = None;
            let accepted = Private::open(|| {
                let (socket, from) = self.listener.accept()?;
                address = from.as_socket();
                Ok(socket)
            });
            let Ok(socket) = accepted else { return };
            if socket.set_nonblocking(true).is_err() || self.inner.options.prepare(&socket).is_err() {
                continue;
            }
            if self.strangers.len() >= MOST_STRANGERS {
                self.make_room();
            }
            let address = address.map_or_else(|| "a stranger".to_owned(), |address| address.to_string());
            self.enter(socket, address, Stage::Accepted, None, [0; HELLO], [0; 16]);
        }
    }

    /// Closes the oldest accepted connection that has said the least.
    fn make_room(&mut self) {
        let rank = |stranger: &Stranger| match stranger.stage {
            Stage::Accepted => Some(0),
            Stage::Unknown(_) => Some(1),
            Stage::Answered(..) => Some(2),
            Stage::Connecting | Stage::Asked => None,
        };
        let oldest =
            self.strangers.iter().filter_map(|(number, stranger)| Some((rank(stranger)?, stranger.since, *number)));
        if let Some((_, _, number)) = oldest.min() {
            self.drop_stranger(number);
        }
    }

    fn enter(
        &mut self,
        socket: Private<Socket>,
        address: String,
        stage: Stage,
        peer: Option<u32>,
        first: [u8; HELLO],
        token: Token,
    ) -> Option<u64> {
        self.last += 1;
        let writes = matches!(stage, Stage::Connecting);
        self.set.add(socket.as_raw_fd(), self.last, writes).ok()?;
        let stranger = Stranger { socket, address, stage, peer, first, token, came: Vec::new(), since: Instant::now() };
        self.strangers.insert(self.last, stranger);
        Some(self.last)
    }

    fn drop_stranger(&mut self, number: u64) -> Option<Stranger> {
        let stranger = self.strangers.remove(&number)?;
        self.set.remove(stranger.socket.as_raw_fd());
        Some(stranger)
    }

    /// Begins what the wire has asked for: connections, and another look at processes that were not
    /// known.
    fn look(&mut self) {
        let wanted = std::mem::take(&mut self.inner.lock().to_connect);
        let now = Instant::now();
        for peer in wanted {
            self.attempts.entry(peer).or_insert(Attempt { since: now, next: now, stranger: None, why: String::new() });
        }
        let due: Vec<u32> = self
            .attempts
            .iter()
            .filter(|(_, attempt)| attempt.stranger.is_none() && attempt.next <= now)
            .map(|(peer, _)| *peer)
            .collect();
        for peer in due {
            self.connect(peer);
        }
        let unknown: Vec<u64> = self
            .strangers
            .iter()
            .filter(|(_, stranger)| matches!(stranger.stage, Stage::Unknown(_)))
            .map(|(number, _)| *number)
            .collect();
        for number in unknown {
            let Some(stranger) = self.strangers.get_mut(&number) else { continue };
            if let Stage::Unknown(hello) = std::mem::replace(&mut stranger.stage, Stage::Accepted) {
                self.answer(number, hello);
            }
        }
    }

    /// Gives up a peer.
    fn fail(&mut self, peer: u32, ended: bool, why: String) {
        self.attempts.remove(&peer);
        let mut state = self.inner.lock();
        if state.remotes.get(&peer).is_some_and(|remote| remote.connection.is_none()) {
            state.lose(peer, Lost { ended, why });
        }
    }

    /// Ends a try. The peer is tried again until the time is up.
    fn try_again(&mut self, peer: u32, why: String) {
        let Some(attempt) = self.attempts.get_mut(&peer) else { return };
        (attempt.stranger, attempt.next, attempt.why) = (None, Instant::now() + PAUSE, why);
    }

    /// Begins a try to connect to a peer.
    fn connect(&mut self, peer: u32) {
        let (contact, token) = {
            let state = self.inner.lock();
            let known = state.remotes.get(&peer).filter(|remote| remote.connection.is_none() && remote.lost.is_none());
            let Some(remote) = known else {
                drop(state);
                self.attempts.remove(&peer);
                return;
            };
            (remote.contact.clone(), remote.tokens.last().copied().unwrap_or_default())
        };
        let Some(address) = self.inner.options.address(&contact.address) else {
            return self.fail(
                peer,
                false,
                "its contact has no address of the TCP wire: set DM_WIRE alike on all hosts".to_owned(),
            );
        };
        let nonce = match token::random_token() {
            Ok(nonce) => nonce,
            Err(error) => return self.fail(peer, false, error.message().to_owned()),
        };
        let hello = Hello {
            answer: Answer::Yes,
            is_secret: self.inner.options.secret.is_some(),
            from: self.inner.contact.id,
            to: contact.id,
            nonce,
            token: hello::name(&token),
        };
        match self.begin(&address) {
            Ok(socket) => {
                let number =
                    self.enter(socket, address.to_string(), Stage::Connecting, Some(peer), hello.to_bytes(), token);
                if let Some(attempt) = self.attempts.get_mut(&peer) {
                    attempt.stranger = number;
                    attempt.next = Instant::now() + PAUSE;
                }
            }
            Err(reason) => self.refused(peer, &address.to_string(), &reason),
        }
    }

    /// Opens a socket that connects.
    fn begin(&self, address: &SocketAddr) -> io::Result<Private<Socket>> {
        let socket = Private::open(|| super::Options::socket(address))?;
        self.inner.options.prepare(&socket)?;
        match socket.connect(&SockAddr::from(*address)) {
            Err(reason) if reason.raw_os_error() != Some(libc::EINPROGRESS) => Err(reason),
            _ => Ok(socket),
        }
    }

    /// Notes that the kernel could not connect.
    fn refused(&mut self, peer: u32, address: &str, reason: &io::Error) {
        match reason.kind() {
            ErrorKind::ConnectionRefused => {
                self.fail(peer, true, format!("{address} refuses connections: its process has ended"));
            }
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                self.try_again(peer, format!("{address} closed the connection before its answer"));
            }
            ErrorKind::TimedOut => self.fail(peer, false, format!("{address} does not answer: {reason}")),
            _ => self.fail(peer, false, format!("connecting to {address}: {}", crate::machine::explained(reason))),
        }
    }

    /// Takes the next step of a stranger.
    fn go_on(&mut self, number: u64) {
        let Some(stranger) = self.strangers.get_mut(&number) else { return };
        if matches!(stranger.stage, Stage::Connecting) {
            let error = stranger.socket.take_error().unwrap_or_else(Some);
            let sent = match error {
                Some(reason) => Err(reason),
                None => send_all(&stranger.socket, &stranger.first),
            };
            match sent {
                Ok(()) => {
                    stranger.stage = Stage::Asked;
                    let fd = stranger.socket.as_raw_fd();
                    self.set.change(fd, number, false);
                }
                Err(reason) => self.broke(number, Some(&reason)),
            }
            return;
        }
        let need = match stranger.stage {
            Stage::Asked => HELLO + PROOF,
            Stage::Accepted => HELLO,
            Stage::Answered(..) => PROOF,
            Stage::Connecting | Stage::Unknown(_) => 0,
        };
        let mut room = [0; HELLO + PROOF];
        // A process that is not known yet must not say more. One byte tells that it has gone.
        let wanted = need.saturating_sub(stranger.came.len()).max(1);
        match (&*stranger.socket).read(&mut room[..wanted]) {
            Ok(got) if got > 0 && need > 0 => stranger.came.extend_from_slice(&room[..got]),
            Err(reason) if matches!(reason.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
            Err(reason) => return self.broke(number, Some(&reason)),
            Ok(_) => return self.broke(number, None),
        }
        if stranger.came.len() < need {
            // A refusal has no proof. The side that refuses closes the connection after it.
            return;
        }
        let came = std::mem::take(&mut stranger.came);
        match stranger.stage {
            Stage::Asked => self.take_answer(number, &came),
            Stage::Accepted => self.take_hello(number, &came),
            Stage::Answered(..) => self.take_proof(number, &came),
            Stage::Connecting | Stage::Unknown(_) => {}
        }
    }

    /// Gives up a stranger whose connection has ended.
    fn broke(&mut self, number: u64, reason: Option<&io::Error>) {
        let Some(stranger) = self.drop_stranger(number) else { return };
        if let (Some(peer), Stage::Connecting | Stage::Asked) = (stranger.peer, &stranger.stage) {
            let closed = io::Error::from(ErrorKind::ConnectionReset);
            self.refused(peer, &stranger.address, reason.unwrap_or(&closed));
        } else if let Some(attempt) = stranger.peer.and_then(|peer| self.attempts.get_mut(&peer)) {
            // This process gave up its own try for that connection.
            attempt.next = Instant::now();
        }
    }

    /// Takes the hello of a process that has connected.
    fn take_hello(&mut self, number: u64, came: &[u8]) {
        let Some(stranger) = self.strangers.get_mut(&number) else { return };
        let Some(raw) = came.first_chunk::<HELLO>() else { return };
        stranger.first = *raw;
        match Hello::parse(raw) {
            Ok(hello) => self.answer(number, hello),
            Err(why) => {
                log::debug!("the wire refuses {}: {why}", stranger.address);
                self.drop_stranger(number);
            }
        }
    }

    /// Answers a process that has said who it is.
    fn answer(&mut self, number: u64, hello: Hello) {
        let inner = self.inner.clone();
        let Some(stranger) = self.strangers.get_mut(&number) else { return };
        let is_secret = inner.options.secret.is_some();
        let (verdict, token) = {
            let state = inner.lock();
            if hello.to != inner.contact.id {
                (Answer::Stranger, None)
            } else if hello.is_secret != is_secret {
                (Answer::Secret, None)
            } else {
                let remote = state.numbers.get(&hello.from).and_then(|number| state.remotes.get(number));
                let token = remote
                    .and_then(|remote| remote.tokens.iter().find(|token| hello::name(token) == hello.token).copied());
                stranger.peer = remote.map(|remote| remote.number);
                match (remote, token) {
                    (Some(remote), _) if remote.lost.is_some() => (Answer::Lost, None),
                    (Some(remote), Some(_)) if remote.connection.is_some() => (Answer::Twice, None),
                    (Some(_), Some(token)) => (Answer::Yes, Some(token)),
                    _ => (Answer::Unknown, None),
                }
            }
        };
        if verdict == Answer::Unknown {
            stranger.stage = Stage::Unknown(hello);
            return;
        }
        let nonce = token::random_token().unwrap_or_default();
        let mine =
            Hello { answer: verdict, is_secret, from: inner.contact.id, to: hello.from, nonce, token: hello.token };
        let second = mine.to_bytes();
        let proof = token.map(|token| hello::prove(&token, Side::Accepts, &stranger.first, &second));
        let mut bytes = second.to_vec();
        bytes.extend_from_slice(&proof.unwrap_or_default());
        let sent = send_all(&stranger.socket, &bytes);
        let (Some(token), Ok(())) = (token, sent) else {
            if verdict == Answer::Secret {
                let (with, without) = if is_secret { ("this", "the other") } else { ("the other", "this") };
                log::warn!(
                    "the wire refuses {}: {with} process has a secret and {without} one has none: set DM_STORE_SECRET alike on all hosts",
                    stranger.address
                );
            }
            self.drop_stranger(number);
            return;
        };
        stranger.stage = Stage::Answered(token, second);
        // Both processes connect at once. The connection of the one with the smaller number stays,
        // unless the other one has proved itself already.
        if hello.from < inner.contact.id {
            if let Some(mine) = stranger.peer.and_then(|peer| self.attempts.get_mut(&peer)) {
                if let Some(number) = mine.stranger.take() {
                    mine.next = Instant::now() + PATIENCE;
                    self.drop_stranger(number);
                }
            }
        }
    }

    /// Takes the answer of the process to which this one connects, and proves itself.
    fn take_answer(&mut self, number: u64, came: &[u8]) {
        let Some(stranger) = self.strangers.get(&number) else { return };
        let Some(peer) = stranger.peer else { return };
        let address = stranger.address.clone();
        let (Some(second), proof) = (came.first_chunk::<HELLO>(), &came[HELLO..]) else { return };
        let hello = match Hello::parse(second) {
            Ok(hello) => hello,
            Err(why) => {
                self.drop_stranger(number);
                return self.fail(peer, false, format!("{address} refuses the connection: {why}"));
            }
        };
        if hello.answer != Answer::Yes {
            self.drop_stranger(number);
            return match hello.answer {
                Answer::Stranger => self.fail(peer, true, format!("another process answers at {address}: the peer has ended")),
                Answer::Lost => self.fail(peer, false, format!("{address} has lost its connection to this process")),
                Answer::Secret => self.fail(peer, false, format!("{address} refuses the connection, because only one of the two processes has a secret: set DM_STORE_SECRET alike on all hosts")),
                _ => self.try_again(peer, format!("{address} has answered {:?}", hello.answer)),
            };
        }
        let right = hello.to == self.inner.contact.id
            && hello.is_secret == self.inner.options.secret.is_some()
            && hello::is_proof(&stranger.token, Side::Accepts, &stranger.first, second, proof);
        if !right {
            self.drop_stranger(number);
            return self.fail(peer, false, format!("{address} could not prove that it belongs to this job"));
        }
        let mine = hello::prove(&stranger.token, Side::Connects, &stranger.first, second);
        match send_all(&stranger.socket, &mine) {
            Ok(()) => self.settle(number, peer),
            Err(reason) => self.broke(number, Some(&reason)),
        }
    }

    /// Takes the proof of a process that has connected.
    fn take_proof(&mut self, number: u64, came: &[u8]) {
        let Some(stranger) = self.strangers.get(&number) else { return };
        let (Stage::Answered(token, second), Some(peer)) = (&stranger.stage, stranger.peer) else { return };
        if hello::is_proof(token, Side::Connects, &stranger.first, second, came) {
            self.settle(number, peer);
        } else {
            log::warn!("the wire refuses {}: it could not prove that it belongs to this job", stranger.address);
            self.drop_stranger(number);
        }
    }

    /// Makes a stranger the connection of its peer.
    fn settle(&mut self, number: u64, peer: u32) {
        let Some(stranger) = self.drop_stranger(number) else { return };
        if let Some(other) = self.attempts.remove(&peer).and_then(|attempt| attempt.stranger) {
            self.drop_stranger(other);
        }
        let inner = self.inner.clone();
        let mut guard = inner.lock();
        let state: &mut State = &mut guard;
        let Some(remote) = state.remotes.get_mut(&peer) else { return };
        if remote.connection.is_some() || remote.lost.is_some() {
            return;
        }
        let fd = stranger.socket.as_raw_fd();
        if let Err(reason) = inner.connections.add(fd, u64::from(peer), false) {
            let why = format!("using the connection to {}: {reason}", stranger.address);
            return state.lose(peer, Lost { ended: false, why });
        }
        remote.connection = Some(Box::new(Connection::new(stranger.socket, stranger.address)));
        remote.is_connecting = false;
        state.connected.push(peer);
        state.push(&inner, peer);
        // A thread that sleeps may wait for bytes that the proof's reader has not read.
        state.ledger.changed = true;
    }

    /// Closes what takes too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let old: Vec<u64> = self
            .strangers
            .iter()
            .filter(|(_, stranger)| {
                stranger.peer.is_none() || !matches!(stranger.stage, Stage::Connecting | Stage::Asked)
            })
            .filter(|(_, stranger)| now.duration_since(stranger.since) > PATIENCE)
            .map(|(number, _)| *number)
            .collect();
        for number in old {
            self.drop_stranger(number);
        }
        let late: Vec<u32> = self
            .attempts
            .iter()
            .filter(|(_, attempt)| now.duration_since(attempt.since) > TRIES)
            .map(|(peer, _)| *peer)
            .collect();
        for peer in late {
            let Some(attempt) = self.attempts.remove(&peer) else { continue };
            let stranger = attempt.stranger.and_then(|number| self.drop_stranger(number));
            let address = stranger.map_or(attempt.why, |stranger| format!("{} does not answer", stranger.address));
            self.fail(peer, false, format!("{address}: no connection within {} s", TRIES.as_secs()));
        }
    }

    /// Ends the wire: what was written is sent, and the connections are closed.
    fn end(self) {
        let Keeper { inner, listener, strangers, set, .. } = self;
        drop((listener, strangers, set));
        let until = Instant::now() + LINGER;
        loop {
            let mut guard = inner.lock();
            let state: &mut State = &mut guard;
            let numbers: Vec<u32> = state.connected.clone();
            let mut left = 0;
            for number in numbers {
                state.serve(&inner, u64::from(number));
                let connection = state
                    .remotes
                    .get(&number)
                    .and_then(|remote| Some((remote.has_output(), remote.connection.as_ref()?)));
                let Some((has_output, connection)) = connection else { continue };
                let is_written = !has_output && !connection.is_writing();
                if is_written && is_sent(&connection.socket) {
                    state.forget(number);
                } else {
                    left += 1;
                }
            }
            if left == 0 || Instant::now() >= until {
                state.remotes.clear();
                state.connected.clear();
                return;
            }
            drop(guard);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Whether the other host has everything that was written to a socket.
fn is_sent(socket: &Socket) -> bool {
    let mut left: libc::c_int = 0;
    // SAFETY: the kernel writes the number of bytes that are not acknowledged.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
    answer != 0 || left == 0
}

/// Writes a few bytes to a new connection, which always has room for them.
fn send_all(socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    let mut socket = socket;
    match socket.write(bytes) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(ErrorKind::WriteZero.into()),
        Err(reason) => Err(reason),
    }
}
