//! This library's own TCPStore server. The server has one thread and one epoll loop, in which no
//! client can hold up another.
//!
//! The work for one client before the others get their turn is bounded (server/turns.rs). The
//! server drops a client that breaks the protocol or has not greeted within `GREETING`. The server
//! does not read from a client that does not read its replies. Replies and the table share values
//! and do not copy them, except on trunks (server/link.rs). Incomplete requests, replies, and
//! values that only replies keep take up to `MAX_BUFFERED` bytes together. Beyond that, the server
//! drops a client (`Serving::account_memory`). The number of connections is bounded too
//! (server/connections.rs). An idle client costs its socket and about 400 bytes, and as much again
//! where it is encrypted.

mod accepting;
mod client;
mod clients;
mod connections;
mod link;
mod listen;
mod memory;
mod replies;
mod serving;
mod shared;
mod turns;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hostccl::fork::Private;
use hostccl::machine;

use super::loop_thread::{End, LoopThread};
use super::names;
use super::poll::Poll;
use super::secret::Secret;
use crate::error::{Error, Result, Status};
use clients::Serving;
pub(super) use connections::{Connections, accept};
pub(in crate::rendezvous) use listen::NotListening;
use listen::listen_on_all;
pub(super) use listen::{listen, notice_silence};
use shared::Shared;

/// A running server; it stops when dropped.
pub struct Server {
    /// The first address on which it listens.
    address: SocketAddr,
    /// The first address on which other hosts can reach it; `None` where it listens on loopback
    /// addresses alone, or on all addresses of this host.
    for_others: Option<IpAddr>,
    /// Whether it listens on loopback addresses alone.
    is_local: bool,
    /// The state that the server shares with its thread.
    shared: Arc<Shared>,
    /// The thread of the loop.
    _thread: LoopThread,
}

impl Server {
    /// Listens on every address that `address` names, on no other, and serves from a thread of its
    /// own. For port 0 the kernel chooses a port.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<Server> {
        Server::guarded(address, None)
    }

    /// Does what [`Server::bind`] does. With a secret it serves only clients that have the secret.
    pub fn guarded(address: impl ToSocketAddrs + std::fmt::Debug, secret: Option<Secret>) -> Result<Server> {
        Server::serve(listen_on_all(address).map_err(|not| not.explained(None))?, secret)
    }

    fn serve(listeners: Vec<Private<TcpListener>>, secret: Option<Secret>) -> Result<Server> {
        let broken = |error: &io::Error| Error::store_io("cannot set up the store's server", error);
        let bound = listeners[0].local_addr().map_err(|error| broken(&error))?;
        let is_local = listeners.iter().all(|listener| listener.local_addr().is_ok_and(|at| at.ip().is_loopback()));
        let mut addresses = listeners.iter().filter_map(|listener| Some(listener.local_addr().ok()?.ip()));
        let for_others = addresses.find(|address| !address.is_loopback() && !address.is_unspecified());
        let shared = Arc::new(Shared {
            clients: AtomicUsize::new(0),
            starved: AtomicBool::new(false),
            room: AtomicUsize::new(0),
            small_turn: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            look: AtomicUsize::new(0),
        });
        let poll = Poll::new().map_err(|error| broken(&error))?;
        let end = End::of_loop(&poll, clients::WAKE).map_err(|error| broken(&error))?;
        let serving = Serving::new(listeners, poll, Arc::clone(&shared), secret).map_err(|error| broken(&error))?;
        let ended = Arc::clone(&end);
        let thread = LoopThread::start("dm-store", end, move || serving.run(&ended));
        let thread = thread.map_err(|error| Error::no_thread(&error).within("cannot set up the store's server"))?;
        Ok(Server { address: bound, for_others, is_local, shared, _thread: thread })
    }

    /// Listens on every address that `host` has according to this host, and on no other. This
    /// function may take as long as the system's resolver does.
    pub fn at(host: &str, port: u16, secret: Option<Secret>) -> Result<Server> {
        let addresses = names::resolve(host, port).map_err(|error| not_resolved(host, &error))?;
        Server::try_on(&addresses, secret)?.map_err(|not| not.explained(None))
    }

    /// Listens on these addresses. The inner error says why the server could not listen. The
    /// message of that error is still to be made, because the caller may know more than this
    /// server.
    pub(in crate::rendezvous) fn try_on(
        addresses: &[SocketAddr],
        secret: Option<Secret>,
    ) -> Result<std::result::Result<Server, NotListening>> {
        match listen_on_all(addresses) {
            Ok(listeners) => Server::serve(listeners, secret).map(Ok),
            Err(not) => Ok(Err(not)),
        }
    }

    /// Tells the server how many ranks meet here. The server then lets in as many connections as
    /// that many ranks can need, and no more. With several worlds the largest one counts.
    pub fn expect_ranks(&self, ranks: usize) {
        self.shared.room.fetch_max(connections::for_ranks(ranks), Ordering::SeqCst);
    }

    /// Returns the first address on which it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns the first address on which other hosts can reach it; `None` where it listens on
    /// loopback addresses alone, or on all addresses of this host.
    pub(in crate::rendezvous) fn address_for_others(&self) -> Option<IpAddr> {
        self.for_others
    }

    /// Returns the error of a rank that waited for others in vain. If this server could not take
    /// all connections, the message says so.
    pub fn explain(&self, error: Error) -> Error {
        if !self.shared.starved.load(Ordering::SeqCst) || !matches!(error.status(), Status::Timeout | Status::Store) {
            return error;
        }
        let cause = machine::explained(&io::Error::from_raw_os_error(libc::EMFILE));
        let message =
            format!("{}; the store that this rank serves could not take every connection: {cause}", error.message());
        Error::new(error.status(), message).with_os_error(libc::EMFILE).with_facts_of(&error)
    }

    /// Whether it listens on loopback addresses alone, so that no other host can reach it.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// Returns three maxima since the last call of this function: the work of one small turn, the
    /// work of one round of larger turns, and all work between two looks at the sockets. One unit
    /// of work is about a byte that was read, copied or sent. A key that was looked at counts 256
    /// units.
    #[doc(hidden)]
    pub fn most_work(&self) -> (usize, usize, usize) {
        let take = |most: &AtomicUsize| most.swap(0, Ordering::SeqCst);
        (take(&self.shared.small_turn), take(&self.shared.round), take(&self.shared.look))
    }

    /// Returns how many clients are connected now.
    pub fn clients(&self) -> usize {
        self.shared.clients.load(Ordering::SeqCst)
    }
}

/// Returns the error of a host that has no address, so that no server can listen there.
pub(in crate::rendezvous) fn not_resolved(host: &str, cause: &io::Error) -> Error {
    Error::store_io(format!("cannot resolve {host}, where the store is to be served"), cause)
}
