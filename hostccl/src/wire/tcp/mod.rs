//! The wire over TCP.
//!
//! A process has one listener, and one connection for each other process that it exchanges messages
//! with. The connection is made when it is first needed. The files:
//!
//! | file | what it has |
//! |---|---|
//! | `epoll` | the kernel's event queues |
//! | `frame` | headers |
//! | `ledger` | the requests |
//! | `remote`, `incoming`, `ends`, `uses` | the messages to and from one process |
//! | `retired` | ranks that have left their communicators |
//! | `sockets`, `cipher`, `inbox`, `connection` | bytes to and from a socket |
//! | `silence` | hosts from which nothing comes any more |
//! | `state` | what the owners of a wire share with its thread |
//! | `hello` | the proof that a connection belongs to this job |
//! | `stranger` | connections that have not proved themselves |
//! | `keeper` | the wire's thread: new connections, and messages that come while nobody waits |
//! | `options` | what the environment sets |
//!
//! Threads that wait for messages move them themselves. A thread that only waits for messages
//! sleeps in `epoll`. A thread that also waits for words in memory sleeps on a futex, and the
//! wire's thread moves its messages meanwhile.

#[cfg(any(test, fuzzing))]
pub(crate) mod any_bytes;
mod cipher;
mod connection;
mod ends;
mod epoll;
mod frame;
mod hello;
mod inbox;
mod incoming;
mod keeper;
mod ledger;
pub(crate) mod options;
mod remote;
mod retired;
pub(crate) mod silence;
mod sockets;
mod state;
mod stranger;
#[cfg(test)]
mod tests;
mod uses;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::epoll::{Bell, Epoll};
use self::frame::{Header, Kind};
use self::options::Options;
use self::remote::Remote;
use self::state::{BELL, Inner, Link};
use super::{Broken, Contact, Lost, NOTICE_BYTES, Notice, Peer, Request, Tag, Token, Wire};
use crate::error::{Error, Result};
use crate::event::{self, Asleep, Event, Watch};
use crate::wire::address;
use crate::{fork, token};

/// The most bytes of notices that wait for one peer.
const MOST_NOTICES: usize = 4 << 20;

/// For how long after a failed `accept` the function `trouble` gives that failure as its reason.
/// The process that connects tries again every 50 ms.
const LATELY: Duration = Duration::from_secs(1);

/// A wire over TCP. When the last owner drops it, its connections are closed.
#[derive(Debug)]
pub(crate) struct Tcp(Arc<Inner>);

impl Tcp {
    /// Opens a wire: a listener at the chosen address, and the wire's thread, which calls `tick`
    /// about ten times a second.
    pub(crate) fn open(options: Options, tick: fn()) -> Result<Arc<Tcp>> {
        let system = |what: &'static str| move |reason: io::Error| Error::system(what, reason);
        let (listener, address) = options.listen()?;
        let connections = Epoll::new().map_err(system("making an epoll set"))?;
        let (sleeper, keeper) = (Bell::new(), Bell::new());
        let (sleeper, keeper) =
            (sleeper.map_err(system("making an eventfd"))?, keeper.map_err(system("making an eventfd"))?);
        connections.add(sleeper.as_raw_fd(), BELL, false).map_err(system("using epoll"))?;
        let inner = Arc::new(Inner {
            contact: Contact {
                id: token::random_token()?,
                address: address::with_name(address, &address::host_name()),
            },
            options,
            state: Mutex::default(),
            moved: Event::default(),
            connections,
            sleeper,
            asleep: Asleep::default(),
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

/// The reason why a request fails after this process has called `close` for the peer as often as
/// `meet`.
fn unknown() -> Lost {
    Lost { ended: true, why: "this process has closed its connection to the peer".to_owned() }
}

impl Wire for Tcp {
    fn contact(&self) -> Contact {
        self.0.contact.clone()
    }

    fn meet(&self, contact: &Contact, token: &Token) -> Peer {
        let mut state = self.0.lock();
        // The peer may have closed the connection, and nobody has read that yet.
        if let Some(number) = state.numbers.get(&contact.id).copied() {
            state.serve(&self.0, u64::from(number));
        }
        // A lost peer stays lost for its old uses. The network may work again, so a new use gets a
        // link of its own.
        let is_lost = |number: &u32| state.links.get(number).is_some_and(|link| link.remote.lost.is_some());
        let known = state.numbers.get(&contact.id).copied().filter(|number| !is_lost(number));
        let number = match known {
            Some(number) => number,
            None => {
                state.last += 1;
                let number = state.last;
                state.numbers.insert(contact.id, number);
                let is_self = contact.id == self.0.contact.id;
                let remote = Remote::new(number, contact.clone(), is_self);
                state
                    .links
                    .insert(number, Box::new(Link { remote, connection: None, is_connecting: false, trouble: None }));
                number
            }
        };
        if let Some(Link { remote, .. }) = state.links.get_mut(&number).map(|link| &mut **link) {
            remote.begin_use(token);
            if remote.is_idle_here {
                remote.is_idle_here = false;
                remote.say(Header::plain(Kind::Busy, 0), &[]);
            }
        }
        // A connection of that peer may wait until this process knows the peer.
        state.keeper_is_needed = true;
        state.push(&self.0, number);
        Peer(number)
    }

    fn close(&self, peer: Peer, token: &Token) {
        let mut state = self.0.lock();
        let Some(Link { remote, connection, is_connecting, .. }) = state.links.get_mut(&peer.0).map(|link| &mut **link)
        else {
            return;
        };
        remote.end_use(token);
        if remote.uses > 0 {
            return;
        }
        if remote.is_self || remote.lost.is_some() {
            return state.forget(peer.0);
        }
        if connection.is_none() && !*is_connecting {
            return state.park(peer.0);
        }
        remote.say_idle();
        state.push(&self.0, peer.0);
    }

    unsafe fn isend(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let Some(Link { remote, .. }) = state.links.get_mut(&peer.0).map(|link| &mut **link) else {
            return Request(state.ledger.begin_ended(Err(Broken::Lost(unknown()))));
        };
        let request = remote.send(tag, from as usize, bytes, &mut state.ledger);
        state.push(&self.0, peer.0);
        Request(request)
    }

    unsafe fn isend_soon(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let Some(Link { remote, .. }) = state.links.get_mut(&peer.0).map(|link| &mut **link) else {
            return Request(state.ledger.begin_ended(Err(Broken::Lost(unknown()))));
        };
        let request = remote.send(tag, from as usize, bytes, &mut state.ledger);
        state.push_soon(peer.0);
        Request(request)
    }

    unsafe fn irecv(&self, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Request {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let Some(Link { remote, .. }) = state.links.get_mut(&peer.0).map(|link| &mut **link) else {
            return Request(state.ledger.begin_ended(Err(Broken::Lost(unknown()))));
        };
        let request = remote.receive(tag, to as usize, bytes, &mut state.ledger);
        // The question for a long message goes together with what is sent next.
        state.push_soon(peer.0);
        Request(request)
    }

    fn test(&self, request: &Request) -> std::result::Result<Option<usize>, Broken> {
        let mut state = self.0.lock();
        state.ledger.ended.remove(&request.0).transpose()
    }

    fn cancel(&self, request: Request) {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        state.ledger.ended.remove(&request.0);
        let Some(open) = state.ledger.open.remove(&request.0) else { return };
        let Some(Link { remote, connection, .. }) = state.links.get_mut(&open.peer).map(|link| &mut **link) else {
            return;
        };
        let (mut reading, mut is_cut) = (None, false);
        if let Some(connection) = connection {
            is_cut = connection.detach(request.0);
            reading = if open.is_send { None } else { connection.forget(open.key) };
        }
        remote.cancel(request.0, open, reading, is_cut);
        state.push(&self.0, open.peer);
    }

    fn notify(&self, peer: Peer, comm: u64, text: &[u8]) {
        let mut state = self.0.lock();
        let Some(Link { remote, .. }) = state.links.get_mut(&peer.0).map(|link| &mut **link) else { return };
        let text = &text[..text.len().min(NOTICE_BYTES)];
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

    fn connected(&self, peer: Peer) -> bool {
        self.0.lock().links.get(&peer.0).is_some_and(|link| link.connection.is_some())
    }

    fn is_flushed(&self, peer: Peer) -> bool {
        let state = self.0.lock();
        state.links.get(&peer.0).and_then(|link| link.is_flushed(false)).unwrap_or(true)
    }

    fn has_all_arrived(&self) -> bool {
        // The wire's thread makes a connection only when there is something to send.
        let has_arrived = |link: &Link| link.is_flushed(true).unwrap_or(!link.is_connecting);
        self.0.lock().links.values().all(|link| has_arrived(link))
    }

    fn moved_bytes(&self, peer: Peer, comm: u64) -> u64 {
        self.0.lock().links.get(&peer.0).map_or(0, |link| link.remote.moved(comm))
    }

    fn lost(&self, peer: Peer) -> Option<Lost> {
        let state = self.0.lock();
        state.links.get(&peer.0).map_or_else(|| Some(unknown()), |link| link.remote.lost.clone())
    }

    fn trouble(&self, peer: Peer) -> Option<String> {
        let state = self.0.lock();
        let link = state.links.get(&peer.0).filter(|link| link.connection.is_none() && !link.remote.is_self)?;
        let shut = || state.shut.as_ref().filter(|(_, since)| since.elapsed() < LATELY);
        let shut = || shut().map(|(why, _)| format!("this process accepts no connection: {why}"));
        link.trouble.clone().or_else(shut)
    }

    fn waiting(&self, peer: Peer, comm: u64) -> Vec<Tag> {
        self.0.lock().links.get(&peer.0).map(|link| link.remote.waiting(comm)).unwrap_or_default()
    }

    fn retire(&self, peer: Peer, comm: u64, rank: u32) {
        let mut guard = self.0.lock();
        let state = &mut *guard;
        if let Some(link) = state.links.get_mut(&peer.0) {
            link.remote.retire(comm, rank, &mut state.ledger);
            state.push(&self.0, peer.0);
        }
    }

    fn progress(&self) -> bool {
        // Another thread that holds the lock moves the messages.
        self.0.try_lock().is_some_and(|mut state| state.pass(&self.0))
    }

    fn moved(&self) -> &Event {
        &self.0.moved
    }

    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        let inner = &*self.0;
        inner.lock().push_all(inner);
        inner.others.fetch_add(1, Ordering::SeqCst);
        if !inner.keeper_looks.load(Ordering::SeqCst) {
            inner.keeper.ring();
        }
        event::sleep(watches, None, timeout);
        inner.others.fetch_sub(1, Ordering::SeqCst);
    }

    fn sleep_on_wire(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let inner = &*self.0;
        inner.lock().push_all(inner);
        inner.drivers.fetch_add(1, Ordering::SeqCst);
        if inner.is_driven.swap(true, Ordering::SeqCst) {
            let moved = Watch { event: &inner.moved, seen };
            let watches: Vec<Watch<'_>> = std::iter::once(moved).chain(others.iter().copied()).collect();
            event::sleep(&watches, None, timeout);
            inner.drivers.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        inner.drive(seen, others, timeout);
        inner.is_driven.store(false, Ordering::SeqCst);
        // Another thread may sleep because this one moved the messages. That thread takes over.
        if inner.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            inner.moved.change();
        }
    }
}
