//! Listens on every address that a name has, and on no other.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::Duration;

use hostccl::fork::Private;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::error::Error;

/// How many bytes of replies that are not sent yet the kernel keeps for a client.
const NOT_SENT: u32 = 256 << 10;

/// How many connections the kernel keeps until they are accepted. Thousands of ranks connect at
/// once.
const BACKLOG: i32 = 4096;

/// Why a server could not listen.
pub(in crate::rendezvous) struct NotListening {
    /// The addresses, as messages name them.
    addresses: String,
    /// The error of the system.
    pub(in crate::rendezvous) cause: io::Error,
}

impl NotListening {
    /// Returns the error in words. `holder` says who holds a port that is in use, where the caller
    /// knows more than this server.
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

/// Returns at least one listener. An address that this host does not have, because IPv6 is switched
/// off, for example, is left out while there is another.
pub(super) fn listen_on_all(
    address: impl ToSocketAddrs + std::fmt::Debug,
) -> std::result::Result<Vec<Private<TcpListener>>, NotListening> {
    let text = format!("{address:?}");
    let refused = |cause: io::Error| NotListening { addresses: text.clone(), cause };
    let mut listeners: Vec<Private<TcpListener>> = Vec::new();
    let mut absent = io::Error::new(ErrorKind::AddrNotAvailable, "the name has no address");
    for mut address in address.to_socket_addrs().map_err(refused)? {
        // Where the kernel chose the port, all listeners get the port of the first one.
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

pub(super) fn ours(listeners: &[Private<TcpListener>], address: SocketAddr) -> bool {
    listeners.iter().any(|known| known.local_addr().is_ok_and(|known| known == address))
}

pub(in crate::rendezvous::store) fn listen(address: SocketAddr) -> io::Result<Private<TcpListener>> {
    let socket = Private::open(|| Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)))?;
    if address.is_ipv6() {
        // IPv4 has a listener of its own, where it is wanted.
        socket.set_only_v6(true)?;
    }
    // With this option a new job can start on the same port at once, while the connections of the
    // last job are still closing.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    // Accepted connections inherit these options.
    socket.set_tcp_nodelay(true)?;
    notice_silence(&*socket)?;
    // Bytes that a client does not read wait in the shared values, not in copies that the kernel
    // makes. The error of a system that does not know this option does not matter.
    let _ = socket.set_tcp_notsent_lowat(NOT_SENT);
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.map(TcpListener::from))
}

/// Sets the probes by which the kernel finds out, within about half a minute, that a host has
/// vanished. The probes work on an idle connection and in the middle of sending.
pub(in crate::rendezvous::store) fn notice_silence(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let probes = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    socket.set_tcp_keepalive(&probes.with_retries(3))?;
    socket.set_tcp_user_timeout(Some(Duration::from_secs(30)))
}
