//! The wire over TCP.
//!
//! A process has one listener, and one connection for each other process that it exchanges messages
//! with. The connection is made when it is first needed. The files:
//!
//! | file | what it has |
//! |---|---|
//! | `epoll` | the kernel's event queues |
//! | `frame` | headers |
//! | `remote` | the messages to and from one process |
//! | `connection` | bytes to and from a socket |
//! | `hello` | the proof that a connection belongs to this job |
//! | `keeper` | the wire's thread: new connections, and whatever happens while nobody waits |
//! | `options` | what the environment sets |
//!
//! Threads that wait for messages move them themselves. A thread that only waits for messages
//! sleeps in `epoll`. One that also waits for words in memory sleeps on a futex, and the wire's
//! thread moves its messages meanwhile.

mod connection;
mod epoll;
mod frame;
mod hello;
mod keeper;
pub(crate) mod options;
mod remote;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::connection::{Connection, Done};
use self::epoll::{Bell, Epoll};
use self::frame::{Header, Kind};
use self::options::Options;
use self::remote::{Ledger, Remote};
use super::{Broken, Contact, Lost, Notice, Peer, Request, Tag, Token, Wire};
use crate::event::{self, Event, Watch};
use crate::{fork, token};

/// The number of the bell in the epoll set of the connections.
const BELL: u64 = u64::MAX;
/// How many connections a poll reads without asking epoll which of them are ready.
const FEW: usize = 3;
/// How long a thread sleeps in epoll before it looks at the words that seldom change.
const GLANCE: Duration = Duration::from_millis(10);
/// The most bytes of notices that wait for one peer.
const MOST_NOTICES: usize = 4 << 20;

/// A wire over TCP. When the last owner drops it, its connections are closed.
#[derive(Debug)]
pub(crate) struct Tcp(Arc<Inner>);

/// What the owners of a wire share with its thread.
#[derive(Debug)]
struct Inner {
    /// How other processes reach this wire.
    contact: Contact,
    /// What the environment sets.
    options: Options,
    /// The messages and the connections.
    state: Mutex<State>,
    /// The word that changes when a request ends, a notice comes, or a peer is lost.
    moved: Event,
    /// The connections, by the numbers of their peers, and the bell of the thread that sleeps here.
    connections: Epoll,
    /// Wakes the thread that sleeps in `connections`.
    sleeper: Bell,
    /// Whether a thread sleeps in `connections`, or is about to.
    is_slept_on: AtomicBool,
    /// Whether a thread has the right to sleep in `connections`.
    is_driven: AtomicBool,
    /// How many threads are in `sleep_on_wire`: the one that drives, and those that rely on it.
    drivers: AtomicU32,
    /// How many threads sleep on other words and rely on the wire's thread.
    others: AtomicU32,
    /// Whether the wire's thread looks at `connections` while it sleeps.
    keeper_looks: AtomicBool,
    /// Wakes the wire's thread.
    keeper: Bell,
    /// Whether the last owner has gone.
    is_over: AtomicBool,
}

/// What the lock of a wire guards.
#[derive(Debug, Default)]
struct State {
    /// The other processes, by their numbers.
    remotes: HashMap<u32, Box<Remote>>,
    /// The numbers of the processes, by the numbers of their wires.
    numbers: HashMap<[u8; 16], u32>,
    /// The number that the last process got.
    last: u32,
    /// The requests.
    ledger: Ledger,
    /// The processes with connections.
    connected: Vec<u32>,
    /// The processes to which the wire's thread makes a connection.
    to_connect: Vec<u32>,
    /// Whether the wire's thread has something to do.
    keeper_is_needed: bool,
}

impl Tcp {
    /// Opens a wire: a listener at the chosen address, and the wire's thread, which calls `tick` about
    /// ten times a second.
    pub(crate) fn open(options: Options, tick: fn()) -> crate::error::Result<Arc<Tcp>> {
        let system = |what: &'static str| move |reason: io::Error| crate::error::Error::system(what, reason);
        let (listener, address) = options.listen()?;
        let connections = Epoll::new().map_err(system("making an epoll set"))?;
        let (sleeper, keeper) = (Bell::new(), Bell::new());
        let (sleeper, keeper) =
            (sleeper.map_err(system("making an eventfd"))?, keeper.map_err(system("making an eventfd"))?);
        connections.add(sleeper.as_raw_fd(), BELL, false).map_err(system("using epoll"))?;
        let inner = Arc::new(Inner {
            contact: Contact { id: token::random_token()?, address },
            options,
            state: Mutex::default(),
            moved: Event::default(),
            connections,
            sleeper,
            is_slept_on: AtomicBool::new(false),
            is_driven: AtomicBool::new(false),
            drivers: AtomicU32::new(0),
            others: AtomicU32::new(0),
            keeper_looks: AtomicBool::new(false),
            keeper,
            is_over: AtomicBool::new(false),
        });
        keeper::start(inner.clone(), listener, tick).map_err(system("starting the wire's thread"))?;
        Ok(Arc::new(Tcp(inner)))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        if !fork::is_child() {
            self.0.is_over.store(true, Ordering::SeqCst);
            self.0.keeper.ring();
        }
    }
}

impl Inner {
    fn lock(&self) -> Held<'_> {
        Held { inner: self, state: Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Tells the threads that wait that something has changed.
    fn stir(&self) {
        self.moved.change();
        if self.is_slept_on.load(Ordering::SeqCst) {
            self.sleeper.ring();
        }
    }

    /// Sleeps in epoll, as the thread that moves the messages, until `moved` or one of the other
    /// words differs from what was seen.
    fn drive(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let is_quiet = || self.moved.value() == seen && others.iter().all(|watch| watch.event.value() == watch.seen);
        let until = Instant::now() + timeout;
        loop {
            self.is_slept_on.store(true, Ordering::SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if !is_quiet() || left.is_zero() {
                break;
            }
            let glance = if others.is_empty() { left } else { left.min(GLANCE) };
            let ready: Vec<u64> = self.connections.wait(glance).map(|ready| ready.number).collect();
            self.is_slept_on.store(false, Ordering::SeqCst);
            if ready.contains(&BELL) {
                self.sleeper.still();
            }
            if !ready.is_empty() {
                let mut state = self.lock();
                for number in ready {
                    state.serve(self, number);
                }
            }
        }
        self.is_slept_on.store(false, Ordering::SeqCst);
    }
}

/// The lock of a wire. When it is released, the threads are told that wait for what has changed.
struct Held<'a> {
    /// The wire.
    inner: &'a Inner,
    /// The guard; `None` only while this value is dropped.
    state: Option<MutexGuard<'a, State>>,
}

impl std::ops::Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("the guard is there until the drop")
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("the guard is there until the drop")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let changed = std::mem::take(&mut self.ledger.changed);
        let keeper = std::mem::take(&mut self.keeper_is_needed);
        self.state = None;
        if changed {
            self.inner.stir();
        }
        if keeper {
            self.inner.keeper.ring();
        }
    }
}

impl State {
    /// Reads and writes what a connection has. Returns whether bytes have moved.
    fn serve(&mut self, inner: &Inner, number: u64) -> bool {
        let Some(remote) = u32::try_from(number).ok().and_then(|number| self.remotes.get_mut(&number)) else {
            return false;
        };
        let Some(mut connection) = remote.connection.take() else { return false };
        let read = connection.read(remote, &mut self.ledger);
        let written = match read {
            Ok(read) => {
                Self::write(inner, remote, &mut connection, &mut self.ledger).map(|written| read.moved || written.moved)
            }
            Err(lost) => Err(lost),
        };
        self.settle(number as u32, connection, written)
    }

    /// Writes what waits for a peer, and has epoll wait for room if not all of it fits.
    fn write(
        inner: &Inner,
        remote: &mut Remote,
        connection: &mut Connection,
        ledger: &mut Ledger,
    ) -> Result<Done, Lost> {
        let done = connection.write(remote, ledger);
        let done = match done {
            Ok(done) => done,
            Err(lost) => {
                // The peer may have said something before it closed the connection.
                while connection.read(remote, ledger)?.moved {}
                return Err(lost);
            }
        };
        if done.more != connection.waits_for_room {
            connection.waits_for_room = done.more;
            inner.connections.change(connection.socket.as_raw_fd(), u64::from(remote.number), done.more);
        }
        Ok(done)
    }

    /// Puts a connection back after its use, or gives it up if it has broken. Returns whether
    /// something has moved.
    fn settle(&mut self, number: u32, connection: Box<Connection>, used: Result<bool, Lost>) -> bool {
        let Some(remote) = self.remotes.get_mut(&number) else { return true };
        match used {
            Ok(moved) => {
                remote.connection = Some(connection);
                if remote.may_close() {
                    self.keeper_is_needed = true;
                }
                moved
            }
            Err(lost) => {
                drop(connection);
                self.connected.retain(|other| *other != number);
                self.lose(number, lost);
                true
            }
        }
    }

    /// Notes that a peer is lost.
    fn lose(&mut self, number: u32, lost: Lost) {
        let Some(remote) = self.remotes.get_mut(&number) else { return };
        log::debug!("the wire lost a peer: {}", lost.why);
        remote.lose(lost, &mut self.ledger);
        self.connected.retain(|other| *other != number);
        if remote.uses == 0 {
            self.forget(number);
        }
    }

    /// Removes a peer without uses.
    fn forget(&mut self, number: u32) {
        if let Some(remote) = self.remotes.remove(&number) {
            self.numbers.remove(&remote.contact.id);
        }
        self.connected.retain(|other| *other != number);
    }

    /// Sends what a peer has to be sent: over its connection, or by making one.
    fn push(&mut self, inner: &Inner, number: u32) {
        let Some(remote) = self.remotes.get_mut(&number) else { return };
        if remote.is_self || remote.lost.is_some() || !remote.has_output() {
            return;
        }
        match remote.connection.take() {
            Some(connection) if connection.waits_for_room => remote.connection = Some(connection),
            Some(mut connection) => {
                let written = Self::write(inner, remote, &mut connection, &mut self.ledger);
                self.settle(number, connection, written.map(|done| done.moved));
            }
            None if remote.is_connecting => {}
            None => {
                remote.is_connecting = true;
                self.to_connect.push(number);
                self.keeper_is_needed = true;
            }
        }
    }

    /// Moves what can be moved over all connections.
    fn pass(&mut self, inner: &Inner) -> bool {
        let is_simple = self.connected.len() <= FEW
            && self.connected.iter().all(|number| {
                let connection = self.remotes.get(number).and_then(|remote| remote.connection.as_ref());
                connection.is_some_and(|connection| !connection.waits_for_room)
            });
        if !is_simple {
            let ready: Vec<u64> = inner.connections.wait(Duration::ZERO).map(|ready| ready.number).collect();
            return ready.into_iter().fold(false, |moved, number| self.serve(inner, number) || moved);
        }
        let mut moved = false;
        let mut at = 0;
        while let Some(number) = self.connected.get(at).copied() {
            moved |= self.serve(inner, u64::from(number));
            at += 1;
        }
        moved
    }
}

/// The reason for which a request fails whose peer has no use any more.
fn unknown() -> Lost {
    Lost { ended: true, why: "this process has closed its connection to the peer".to_owned() }
}

impl Wire for Tcp {
    fn contact(&self) -> Contact {
        self.0.contact.clone()
    }

    fn meet(&self, contact: &Contact, token: &Token) -> Peer {
        let mut state = self.0.lock();
        let number = match state.numbers.get(&contact.id) {
            Some(number) => *number,
            None => {
                state.last += 1;
                let number = state.last;
                state.numbers.insert(contact.id, number);
                let is_self = contact.id == self.0.contact.id;
                state.remotes.insert(number, Box::new(Remote::new(number, contact.clone(), is_self)));
                number
            }
        };
        if let Some(remote) = state.remotes.get_mut(&number) {
            remote.uses += 1;
            if !remote.tokens.contains(token) {
                remote.tokens.push(*token);
            }
            if remote.is_idle_here {
                (remote.is_idle_here, remote.is_closing) = (false, remote.is_closing);
                remote.say(Header::plain(Kind::Busy, 0), &[]);
            }
        }
        // A connection of that peer may wait until this process knows the peer.
        state.keeper_is_needed = true;
        state.push(&self.0, number);
        Peer(number)
    }

    fn close(&self, peer: Peer) {
        let mut state = self.0.lock();
        let Some(remote) = state.remotes.get_mut(&peer.0) else { return };
        remote.uses = remote.uses.saturating_sub(1);
        if remote.uses > 0 {
            return;
        }
        if remote.is_self || remote.lost.is_some() || (remote.connection.is_none() && !remote.is_connecting) {
            return state.forget(peer.0);
        }
        remote.is_idle_here = true;
        remote.say(Header::plain(Kind::Idle, 0), &[]);
        state.push(&self.0, peer.0);
    }

    unsafe fn isend(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let Some(remote) = state.remotes.get_mut(&peer.0) else {
            return Request(state.ledger.begin_ended(Err(Broken::Lost(unknown()))));
        };
        let request = remote.send(tag, from as usize, bytes, &mut state.ledger);
        state.push(&self.0, peer.0);
        Request(request)
    }

    unsafe fn irecv(&self, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Request {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let Some(remote) = state.remotes.get_mut(&peer.0) else {
            return Request(state.ledger.begin_ended(Err(Broken::Lost(unknown()))));
        };
        let request = remote.receive(tag, to as usize, bytes, &mut state.ledger);
        state.push(&self.0, peer.0);
        Request(request)
    }

    fn test(&self, request: &Request) -> Result<Option<usize>, Broken> {
        let mut state = self.0.lock();
        state.ledger.ended.remove(&request.0).transpose()
    }

    fn cancel(&self, request: Request) {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        state.ledger.ended.remove(&request.0);
        let Some(open) = state.ledger.open.remove(&request.0) else { return };
        if let Some(remote) = state.remotes.get_mut(&open.peer) {
            remote.cancel(request.0, open);
        }
    }

    fn notify(&self, peer: Peer, comm: u64, text: &[u8]) {
        let mut state = self.0.lock();
        let Some(remote) = state.remotes.get_mut(&peer.0) else { return };
        let text = &text[..text.len().min(super::NOTICE_BYTES)];
        if remote.is_self {
            let notice = Notice { from: peer, comm, text: text.to_vec() };
            state.ledger.notices.push(notice);
            state.ledger.changed = true;
        } else if remote.lost.is_none() && remote.control.len() < MOST_NOTICES {
            let tag = Tag { comm, stream: 0, from: 0, to: 0 };
            remote.say(Header { tag, ..Header::plain(Kind::Notice, 0) }, text);
            state.push(&self.0, peer.0);
        }
    }

    fn news(&self) -> (Vec<Notice>, Vec<(Peer, Lost)>) {
        let mut state = self.0.lock();
        (std::mem::take(&mut state.ledger.notices), std::mem::take(&mut state.ledger.losses))
    }

    fn lost(&self, peer: Peer) -> Option<Lost> {
        let state = self.0.lock();
        state.remotes.get(&peer.0).map_or_else(|| Some(unknown()), |remote| remote.lost.clone())
    }

    fn waiting(&self, peer: Peer, comm: u64) -> Vec<Tag> {
        self.0.lock().remotes.get(&peer.0).map(|remote| remote.waiting(comm)).unwrap_or_default()
    }

    fn progress(&self) -> bool {
        // Another thread that holds the lock moves the messages.
        let Ok(state) = self.0.state.try_lock() else { return false };
        Held { inner: &self.0, state: Some(state) }.pass(&self.0)
    }

    fn moved(&self) -> &Event {
        &self.0.moved
    }

    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        let inner = &*self.0;
        inner.others.fetch_add(1, Ordering::SeqCst);
        if !inner.keeper_looks.load(Ordering::SeqCst) {
            inner.keeper.ring();
        }
        event::sleep(watches, timeout);
        inner.others.fetch_sub(1, Ordering::SeqCst);
    }

    fn sleep_on_wire(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let inner = &*self.0;
        inner.drivers.fetch_add(1, Ordering::SeqCst);
        if inner.is_driven.swap(true, Ordering::SeqCst) {
            let moved = Watch { event: &inner.moved, seen };
            let watches: Vec<Watch<'_>> = std::iter::once(moved).chain(others.iter().copied()).collect();
            event::sleep(&watches, timeout);
            inner.drivers.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        inner.drive(seen, others, timeout);
        inner.is_driven.store(false, Ordering::SeqCst);
        // Another thread may sleep because this one moved the messages. It takes over.
        if inner.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            inner.moved.change();
        }
    }
}
