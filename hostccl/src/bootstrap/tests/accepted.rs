//! Connections whose other side does not know the id.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::bootstrap::accepted::{Accepted, Meetings, Progress, Step};
use crate::bootstrap::greeting::Hello;
use crate::fork::Closed;

/// Returns a connection, and its other side.
fn connection() -> (UnixStream, Accepted) {
    let (far, near) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let near = TcpStream::from(OwnedFd::from(near));
    (far, Accepted::new(Closed::open(|| Ok(near)).unwrap(), SocketAddr::from((Ipv4Addr::LOCALHOST, 1))))
}

#[test]
fn a_connection_that_names_an_unknown_id_stays_a_stranger_and_its_bytes_are_read() {
    let (mut far, mut stranger) = connection();
    far.write_all(&Hello::write(&[4; 16], false, &[2; 16])).unwrap();
    far.write_all(&[0; 1000]).unwrap();
    let is_readable = |stranger: &Accepted| {
        let mut poll = libc::pollfd { fd: stranger.link.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the structure outlives the call, which returns at once.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    };
    for _ in 0..10 {
        stranger.link.pump();
        while stranger.step(1, &mut Meetings::new()) == Ok(Step::Advanced) {}
    }
    assert!(matches!(stranger.progress, Progress::Farewell(_)), "{stranger:?}");
    assert!(!is_readable(&stranger), "unread bytes keep the thread awake");
    assert!(stranger.is_stranger(), "many such connections would use up the descriptors");
}

#[test]
fn a_rank_that_is_refused_is_no_stranger_until_it_has_the_reason() {
    let (_far, mut rank) = connection();
    rank.progress = Progress::Ready(1, None);
    rank.say_farewell();
    assert!(!rank.is_stranger());
    rank.say_farewell();
    assert!(!rank.is_stranger());
}
