//! Our own TCPStore server: one thread, one epoll loop, no client can hold up another.
//!
//! What it does for one client before the others get their turn is bounded (server/serving.rs), and what it keeps is: a client that breaks the
//! protocol is dropped, and one that has not greeted within [`GREETING`]. One that does not read its replies is not listened to until it
//! has; values in replies are shared with the table. Half requests, replies, and values that only replies keep take up to [`MAX_BUFFERED`]
//! together: beyond, the client that has most of it is dropped. How many may connect is bounded too (server/room.rs). An idle client costs
//! its socket and about 400 bytes.

mod client;
mod outgoing;
mod room;
mod serving;

use std::io::{self, ErrorKind};
use std::mem;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hostccl::fork::{self, Private};
use hostccl::machine;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::poll::{Poll, event, ring};
use super::secret::Secret;
use crate::error::{Error, Result, Status};
use serving::Serving;

/// How long a new connection has for its greeting.
pub const GREETING: Duration = Duration::from_secs(10);
/// The most bytes of incomplete requests and unread replies, over all clients.
pub const MAX_BUFFERED: usize = 256 << 20;
/// Bytes of replies that the kernel takes for a client beyond what is on its way to it.
const NOT_SENT: libc::c_int = 256 << 10;
/// Connections that the kernel keeps until they are accepted: thousands of ranks connect at once.
const BACKLOG: i32 = 4096;

/// A running server; it stops when dropped.
pub struct Server {
    address: SocketAddr,
    is_local: bool,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    wake: Private<OwnedFd>,
    clients: AtomicUsize,
    /// Whether a connection could not be taken because this process has as many files open as it may.
    starved: AtomicBool,
    /// How many clients may be connected; 0 where nobody has said how many ranks there are.
    room: AtomicUsize,
    /// The most work of one small turn, of one round, and of everything between two looks at the sockets; see server/serving.rs.
    small_turn: AtomicUsize,
    round: AtomicUsize,
    look: AtomicUsize,
}

impl Server {
    /// Listens on every address that `address` names, on no other, and serves from a thread of its own. Port 0: the kernel chooses.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<Server> {
        Server::guarded(address, None)
    }

    /// The same; with a secret only for clients that have it.
    pub fn guarded(address: impl ToSocketAddrs + std::fmt::Debug, secret: Option<Secret>) -> Result<Server> {
        Server::serve(listen_on_all(address).map_err(|not| not.explained(None))?, secret)
    }

    fn serve(listeners: Vec<Private<TcpListener>>, secret: Option<Secret>) -> Result<Server> {
        let broken = |error: &io::Error| Error::store_io("cannot set up the store's server", error);
        let bound = listeners[0].local_addr().map_err(|error| broken(&error))?;
        let is_local = listeners.iter().all(|listener| listener.local_addr().is_ok_and(|at| at.ip().is_loopback()));
        let wake = event().map_err(|error| broken(&error))?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            wake,
            clients: AtomicUsize::new(0),
            starved: AtomicBool::new(false),
            room: AtomicUsize::new(0),
            small_turn: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            look: AtomicUsize::new(0),
        });
        let poll = Poll::new().map_err(|error| broken(&error))?;
        poll.add(shared.wake.as_raw_fd(), serving::WAKE).map_err(|error| broken(&error))?;
        let serving = Serving::new(listeners, poll, Arc::clone(&shared), secret).map_err(|error| broken(&error))?;
        let thread = std::thread::Builder::new().name("dm-store".to_owned()).spawn(move || serving.run());
        let thread = thread.map_err(|error| {
            let message = format!("cannot set up the store's server: {}", machine::no_thread(&error));
            Error::store(message).with_os_error(error.raw_os_error().unwrap_or(0))
        })?;
        Ok(Server { address: bound, is_local, shared, thread: Some(thread) })
    }

    /// The same on every address that `host` has according to this host, and on no other.
    pub fn at(host: &str, port: u16, secret: Option<Secret>) -> Result<Server> {
        Server::try_at(host, port, secret)?.map_err(|not| not.explained(None))
    }

    /// What [`Server::at`] does. The inner error says that the address could not be listened on, and is not put into words yet.
    pub(in crate::rendezvous) fn try_at(
        host: &str,
        port: u16,
        secret: Option<Secret>,
    ) -> Result<std::result::Result<Server, NotListening>> {
        let addresses: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .map_err(|error| {
                Error::store_io(format!("cannot resolve {host}, where the store is to be served"), &error)
            })?
            .collect();
        match listen_on_all(&*addresses) {
            Ok(listeners) => Server::serve(listeners, secret).map(Ok),
            Err(not) => Ok(Err(not)),
        }
    }

    /// Says how many ranks meet here: so many connections as they can need are let in, and no more. Of several worlds the largest counts.
    pub fn expect_ranks(&self, ranks: usize) {
        self.shared.room.fetch_max(room::for_ranks(ranks), Ordering::SeqCst);
    }

    /// Where it listens: the first of its addresses.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The error of a rank that waited for others in vain, with the reason where this server could not take their connections.
    pub fn explain(&self, error: Error) -> Error {
        if !self.shared.starved.load(Ordering::SeqCst) || !matches!(error.status(), Status::Timeout | Status::Store) {
            return error;
        }
        let cause = machine::explained(&io::Error::from_raw_os_error(libc::EMFILE));
        let message =
            format!("{}; the store that this rank serves could not take every connection: {cause}", error.message());
        Error::new(error.status(), message).with_os_error(libc::EMFILE)
    }

    /// Whether it listens on loopback addresses alone: no other host can reach it.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// Returns the most work since the last call of this function: that of one small turn, that of one round of larger turns, and all work
    /// between two looks at the sockets. One unit of work is about a byte that was read, copied or sent. A key that was looked at counts
    /// 256 units.
    #[doc(hidden)]
    pub fn most_work(&self) -> (usize, usize, usize) {
        let take = |most: &AtomicUsize| most.swap(0, Ordering::SeqCst);
        (take(&self.shared.small_turn), take(&self.shared.round), take(&self.shared.look))
    }

    /// Clients that are connected now.
    pub fn clients(&self) -> usize {
        self.shared.clients.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if fork::is_child() {
            // The thread is the parent's, and is not here to be waited for.
            return mem::forget(self.thread.take());
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        ring(&self.shared.wake);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Why a server could not listen.
pub(in crate::rendezvous) struct NotListening {
    /// The addresses, as messages name them.
    addresses: String,
    /// What the system said.
    pub(in crate::rendezvous) cause: io::Error,
}

impl NotListening {
    /// The error in words. `holder` says who holds a port that is in use, where the caller knows more than this server.
    pub(in crate::rendezvous) fn explained(&self, holder: Option<&str>) -> Error {
        let hint = match self.cause.kind() {
            ErrorKind::AddrInUse => format!(
                " ({}: choose another port, MASTER_PORT or init_method, or wait until this one is free)",
                holder.unwrap_or("another process listens there")
            ),
            ErrorKind::AddrNotAvailable => {
                " (it is not an address of this host: rank 0 must run on the host that is named)".to_owned()
            }
            _ => String::new(),
        };
        Error::store_io(format!("cannot listen on {} for the store{hint}", self.addresses), &self.cause)
    }
}

/// At least one listener. An address that this host does not have (IPv6 switched off, say) is left out while there is another.
fn listen_on_all(
    address: impl ToSocketAddrs + std::fmt::Debug,
) -> std::result::Result<Vec<Private<TcpListener>>, NotListening> {
    let text = format!("{address:?}");
    let refused = |cause: io::Error| NotListening { addresses: text.clone(), cause };
    let mut listeners: Vec<Private<TcpListener>> = Vec::new();
    let mut absent = io::Error::new(ErrorKind::AddrNotAvailable, "the name has no address");
    for mut address in address.to_socket_addrs().map_err(refused)? {
        // The first one's port, where the kernel chose it.
        if let Some(Ok(first)) = listeners.first().map(|first| first.local_addr()) {
            address.set_port(first.port());
        }
        match listen(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if is_absent(&error) => absent = error,
            // A name may have the same address twice.
            Err(error) if error.kind() == ErrorKind::AddrInUse && ours(&listeners, address) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    if listeners.is_empty() { Err(refused(absent)) } else { Ok(listeners) }
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

fn ours(listeners: &[Private<TcpListener>], address: SocketAddr) -> bool {
    listeners.iter().any(|known| known.local_addr().is_ok_and(|known| known == address))
}

fn listen(address: SocketAddr) -> io::Result<Private<TcpListener>> {
    let socket = Private::open(|| Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)))?;
    if address.is_ipv6() {
        // IPv4 has a listener of its own, where it is wanted.
        socket.set_only_v6(true)?;
    }
    // A new job on the same port starts at once, while connections of the last one fade.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    // Accepted connections inherit these.
    socket.set_tcp_nodelay(true)?;
    notice_silence(&*socket)?;
    // What a client does not read waits in the shared values, not in copies that the kernel makes. A system that does not know this
    // goes without.
    let most = NOT_SENT;
    // SAFETY: an option of four bytes; the socket is open.
    unsafe {
        let (option, size) = (std::ptr::from_ref(&most).cast(), size_of_val(&most) as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, option, size);
    }
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.map(TcpListener::from))
}

/// A host that vanishes says nothing; with this the kernel finds out within about half a minute, idle or in the middle of sending.
pub(super) fn notice_silence(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let probes = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    socket.set_tcp_keepalive(&probes.with_retries(3))?;
    socket.set_tcp_user_timeout(Some(Duration::from_secs(30)))
}
