//! Ports of 127.0.0.1 that the kernel chose, as tests/support/ports.py has them.

use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// Returns a port where nobody listens, and that no other process gets before this process ends.
///
/// The port stays bound by a socket that does not listen. A server that sets SO_REUSEADDR, as the
/// store of the library does, can listen there. The kernel gives the port to nobody else.
pub fn free_port() -> u16 {
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    held.set_reuse_address(true).unwrap();
    held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let port = held.local_addr().unwrap().as_socket().unwrap().port();
    std::mem::forget(held);
    port
}
