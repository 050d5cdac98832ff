//! The state of a wire, which its owners share with its thread.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::connection::{Connection, Done};
use super::epoll::{Bell, Epoll};
use super::frame::{Header, Kind};
use super::ledger::Ledger;
use super::options::Options;
use super::remote::Remote;
use super::sockets;
use crate::event::{Asleep, Event, Watch};
use crate::wire::{Contact, Lost};

/// The number of the bell in the epoll set of the connections.
pub(super) const BELL: u64 = u64::MAX;
/// How many connections a poll reads without asking epoll which of them are ready.
const FEW: usize = 3;
/// The most peers that this process keeps although it has neither a use for them nor a connection.
const MOST_PARKED: usize = 4096;
/// How long a thread sleeps in epoll before it looks at the words that seldom change.
const GLANCE: Duration = Duration::from_millis(10);

/// The state that the owners of a wire share with its thread.
#[derive(Debug)]
pub(super) struct Inner {
    /// How other processes reach this wire.
    pub(super) contact: Contact,
    /// The settings of the environment.
    pub(super) options: Options,
    /// The messages and the connections.
    pub(super) state: Mutex<State>,
    /// The word that changes when a request ends, a notice comes, or a peer is lost.
    pub(super) moved: Event,
    /// The connections, by the numbers of their peers, and the bell of the thread that sleeps here.
    pub(super) connections: Epoll,
    /// Wakes the thread that sleeps in `connections`.
    pub(super) sleeper: Bell,
    /// Whether a thread sleeps in `connections`, or is about to.
    pub(super) asleep: Asleep,
    /// Whether a thread has the right to sleep in `connections`.
    pub(super) is_driven: AtomicBool,
    /// How many threads are in `sleep_on_wire`: the one that drives, and those that rely on it.
    pub(super) drivers: AtomicU32,
    /// How many threads sleep on other words and rely on the wire's thread.
    pub(super) others: AtomicU32,
    /// Whether the wire's thread looks at `connections` while it sleeps.
    pub(super) keeper_looks: AtomicBool,
    /// Wakes the wire's thread.
    pub(super) keeper: Bell,
    /// Whether the last owner has gone.
    pub(super) is_over: AtomicBool,
}

/// Another process, and the connection to it.
#[derive(Debug)]
pub(super) struct Link {
    /// The messages to and from the process.
    pub(super) remote: Remote,
    /// The connection, once both sides have proved themselves.
    pub(super) connection: Option<Box<Connection>>,
    /// Whether the wire's thread is making a connection.
    pub(super) is_connecting: bool,
    /// Why the peer takes no connection of this process now, where it has said so.
    pub(super) trouble: Option<String>,
}

impl Link {
    /// Whether there is neither a use nor a connection.
    fn is_parked(&self) -> bool {
        self.remote.uses == 0 && self.connection.is_none() && !self.is_connecting
    }

    /// Whether everything for the process has been handed to the kernel. With `arrival`, whether
    /// the other host has acknowledged it. `None` where there is no connection.
    pub(super) fn is_flushed(&self, arrival: bool) -> Option<bool> {
        let Link { remote, connection, .. } = self;
        if remote.is_self || remote.lost.is_some() {
            return Some(true);
        }
        connection.as_ref().map(|connection| !remote.has_output() && connection.is_flushed(arrival))
    }
}

/// The state that the lock of a wire guards.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The other processes, by their numbers.
    pub(super) links: HashMap<u32, Box<Link>>,
    /// The numbers of the processes, by the numbers of their wires. A process that was lost and
    /// then met again has several numbers, and this table has the newest one.
    pub(super) numbers: HashMap<[u8; 16], u32>,
    /// The number that the last process got.
    pub(super) last: u32,
    /// The peers that were parked, the oldest first, each of them once. Some of them may have a use
    /// or a connection again, or may be forgotten.
    pub(super) parked: VecDeque<u32>,
    /// The requests.
    pub(super) ledger: Ledger,
    /// The processes with connections.
    pub(super) connected: Vec<u32>,
    /// The processes for which frames wait so that they go together with the next frames. They are
    /// sent before a thread polls or sleeps.
    pub(super) unpushed: Vec<u32>,
    /// The processes to which the wire's thread makes a connection.
    pub(super) to_connect: Vec<u32>,
    /// Why this process could not accept the last connection, and when that was; `None` where it
    /// could.
    pub(super) shut: Option<(String, Instant)>,
    /// Whether the wire's thread has something to do.
    pub(super) keeper_is_needed: bool,
}

impl Inner {
    pub(super) fn lock(&self) -> Held<'_> {
        Held { inner: self, state: Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)) }
    }

    /// Returns the lock where no other thread holds it.
    pub(super) fn try_lock(&self) -> Option<Held<'_>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Held { inner: self, state: Some(state) })
    }

    /// Tells the waiting threads that something has changed.
    fn stir(&self) {
        self.moved.change();
        if self.asleep.is() {
            self.sleeper.ring();
        }
    }

    /// Sleeps in epoll, as the thread that moves the messages, until `moved` or one of the other
    /// words differs from what was seen.
    pub(super) fn drive(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let is_quiet = || self.moved.value() == seen && others.iter().all(|watch| watch.event.value() == watch.seen);
        let until = Instant::now() + timeout;
        loop {
            self.asleep.begin();
            let left = until.saturating_duration_since(Instant::now());
            if !is_quiet() || left.is_zero() {
                break;
            }
            let glance = if others.is_empty() { left } else { left.min(GLANCE) };
            let ready: Vec<u64> = self.connections.wait(glance).map(|ready| ready.number).collect();
            self.asleep.end();
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
        self.asleep.end();
    }
}

/// The lock of a wire. Its release wakes the threads that wait, if something has changed.
pub(super) struct Held<'a> {
    /// The wire.
    inner: &'a Inner,
    /// The guard; `None` only while this value is dropped.
    pub(super) state: Option<MutexGuard<'a, State>>,
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
    /// Reads what has come over a connection, and writes what waits for the connection. Returns
    /// whether bytes have moved.
    pub(super) fn serve(&mut self, inner: &Inner, number: u64) -> bool {
        let Some(link) = u32::try_from(number).ok().and_then(|number| self.links.get_mut(&number)) else {
            return false;
        };
        let Link { remote, connection: Some(connection), .. } = &mut **link else { return false };
        let served = connection.read(remote, &mut self.ledger).and_then(|read| {
            if std::mem::take(&mut remote.has_notice) {
                sockets::acknowledge(&connection.socket);
            }
            if !remote.has_output() && !connection.is_writing() && !connection.waits_for_room {
                return Ok(read.moved);
            }
            let written = write(inner, remote, connection, &mut self.ledger)?;
            Ok(read.moved || written.moved)
        });
        self.handle_outcome(inner, number as u32, served)
    }

    /// Loses the peer or closes the connection if the outcome of a read or write calls for that.
    /// Returns whether something has moved.
    fn handle_outcome(&mut self, inner: &Inner, number: u32, used: Result<bool, Lost>) -> bool {
        let Some(link) = self.links.get_mut(&number) else { return true };
        let moved = match used {
            Ok(moved) => moved,
            Err(lost) => {
                if !link.remote.is_closed {
                    self.lose(number, lost);
                } else {
                    self.close(inner, number);
                }
                return true;
            }
        };
        if link.remote.is_closed {
            let is_written = link.connection.as_ref().is_none_or(|connection| !connection.is_writing());
            if is_written && !link.remote.has_output() || link.remote.is_closing {
                self.close(inner, number);
            }
        } else if link.remote.may_close() && inner.contact.id < link.remote.contact.id {
            link.remote.begin_to_close();
            let Link { remote, connection: Some(connection), .. } = &mut **link else { return moved };
            let written = write(inner, remote, connection, &mut self.ledger);
            if let Err(lost) = written {
                self.lose(number, lost);
            }
        }
        moved
    }

    /// Closes a connection that both sides have agreed to close. A peer that was met again
    /// meanwhile stays, and gets another connection.
    fn close(&mut self, inner: &Inner, number: u32) {
        self.connected.retain(|other| *other != number);
        let Some(link) = self.links.get_mut(&number) else { return };
        link.connection = None;
        if link.remote.uses == 0 {
            return self.forget(number);
        }
        link.remote.is_closed = false;
        link.remote.restart();
        self.push(inner, number);
    }

    /// Notes as lost the peers from whose hosts nothing has come for `longest`. `since` is the time
    /// since the last look.
    pub(super) fn look_for_silence(&mut self, since: Duration, longest: Duration) {
        for number in self.connected.clone() {
            let Some(connection) = self.links.get_mut(&number).and_then(|link| link.connection.as_mut()) else {
                continue;
            };
            let lasts = connection.silence.look(&connection.socket, since);
            if lasts >= longest {
                let why =
                    format!("{} has fallen silent: nothing came for {} ms", connection.address, lasts.as_millis());
                self.lose(number, Lost { ended: false, why });
            }
        }
    }

    /// Notes that a peer is lost.
    pub(super) fn lose(&mut self, number: u32, lost: Lost) {
        let Some(link) = self.links.get_mut(&number) else { return };
        log::debug!("the wire lost a peer: {}", lost.why);
        (link.connection, link.is_connecting) = (None, false);
        link.remote.lose(lost, &mut self.ledger);
        self.connected.retain(|other| *other != number);
        if link.remote.uses == 0 {
            self.forget(number);
        }
    }

    /// Keeps a peer that has neither a use nor a connection. The peer may still have a use, and
    /// connect. It may ask whether this rank has left, or be about to prove itself. Without an
    /// answer, the peer would count this process as lost.
    pub(super) fn park(&mut self, number: u32) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let tokens = std::mem::take(&mut link.remote.tokens);
        link.remote = Remote { tokens, ..Remote::new(number, link.remote.contact.clone(), false) };
        self.parked.retain(|other| *other != number);
        self.parked.push_back(number);
        if self.parked.len() > MOST_PARKED {
            let oldest =
                self.parked.pop_front().filter(|oldest| self.links.get(oldest).is_some_and(|link| link.is_parked()));
            oldest.into_iter().for_each(|oldest| self.forget(oldest));
        }
    }

    /// Removes a peer without uses.
    pub(super) fn forget(&mut self, number: u32) {
        if let Some(link) = self.links.remove(&number) {
            let id = link.remote.contact.id;
            if self.numbers.get(&id) == Some(&number) {
                self.numbers.remove(&id);
            }
        }
        self.connected.retain(|other| *other != number);
    }

    /// Sends what waits for a peer. If there is no connection, asks the wire's thread to make one.
    pub(super) fn push(&mut self, inner: &Inner, number: u32) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let Link { remote, connection, is_connecting, .. } = &mut **link;
        if remote.is_self || remote.lost.is_some() || !remote.has_output() {
            return;
        }
        match connection {
            Some(connection) if connection.waits_for_room => {}
            Some(connection) => {
                let written = write(inner, remote, connection, &mut self.ledger);
                self.handle_outcome(inner, number, written.map(|done| done.moved));
            }
            None if *is_connecting => {}
            None => {
                *is_connecting = true;
                self.to_connect.push(number);
                self.keeper_is_needed = true;
            }
        }
    }

    /// Keeps what waits for a peer until the next send, so that both go together. Each thread sends
    /// what was kept before that thread polls or sleeps, at the latest.
    pub(super) fn push_soon(&mut self, number: u32) {
        let has_output = self.links.get(&number).is_some_and(|link| link.remote.has_output());
        if has_output && !self.unpushed.contains(&number) {
            self.unpushed.push(number);
        }
    }

    /// Sends what [`push_soon`](State::push_soon) has left.
    pub(super) fn push_all(&mut self, inner: &Inner) {
        while let Some(number) = self.unpushed.pop() {
            self.push(inner, number);
        }
    }

    /// Sends an `Alive` frame to each peer to which nothing is on the way. The kernel sends the
    /// frame again when its packet is lost, and the peer's kernel acknowledges it. So both hosts
    /// hear of each other more often than by the kernel's probes alone.
    pub(super) fn beat(&mut self, inner: &Inner) {
        for number in self.connected.clone() {
            let Some(link) = self.links.get_mut(&number) else { continue };
            let is_idle = link.is_flushed(true) == Some(true);
            let remote = &mut link.remote;
            let is_ending = remote.uses == 0 || remote.is_closing || remote.is_closed;
            if is_idle && !is_ending {
                remote.say(Header::plain(Kind::Alive, 0), &[]);
                self.push(inner, number);
            }
        }
    }

    /// Moves what can be moved over all connections.
    pub(super) fn pass(&mut self, inner: &Inner) -> bool {
        self.push_all(inner);
        let is_simple = self.connected.len() <= FEW
            && self.connected.iter().all(|number| {
                let connection = self.links.get(number).and_then(|link| link.connection.as_ref());
                connection.is_some_and(|connection| !connection.waits_for_room)
            });
        if !is_simple {
            let ready: Vec<u64> = inner.connections.wait(Duration::ZERO).map(|ready| ready.number).collect();
            let mut moved = false;
            for number in ready {
                moved |= self.serve(inner, number);
            }
            return moved;
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

/// Writes what waits for a peer, and has epoll wait for room if not all of it fits.
fn write(inner: &Inner, remote: &mut Remote, connection: &mut Connection, ledger: &mut Ledger) -> Result<Done, Lost> {
    let done = match connection.write(remote, ledger) {
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
