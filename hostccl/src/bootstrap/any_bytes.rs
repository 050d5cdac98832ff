//! Any bytes in place of a greeting, a message or a whole connection of a join.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::greeting::{HELLO_BYTES, Hello, Status};
use super::link::{Link, LinkState};
use super::message::Message;
use crate::fork::Closed;
use crate::noise::{HANDSHAKE_BYTES, Session};

/// A message that was read can be written and read again. A greeting that can be read has the
/// mark.
pub(crate) fn message(bytes: &[u8]) {
    if let Some(message) = Message::decode(bytes) {
        let again = Message::decode(&message.encode());
        // A text that is no UTF-8 gets longer when it is read, so it may be cut when it is
        // written.
        let is_failure = matches!((&message, &again), (Message::Failed(_), Some(Message::Failed(_))));
        assert!(is_failure || again.as_ref() == Some(&message), "{message:?} {again:?}");
    }
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        assert!(Hello::read(hello).is_none() || bytes.starts_with(b"hccljoin"));
    }
    let _ = bytes.first().map(|byte| Status::of(*byte));
}

/// The bytes arrive on a connection, in pieces. The link keeps a bounded number of them, and never
/// returns a message that is longer than allowed.
pub(crate) fn connection(bytes: &[u8]) {
    const LONGEST: usize = 300;
    let Some(([kind, piece], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let (mut far, near) = UnixStream::pair().expect("the process may open two more descriptors");
    near.set_nonblocking(true).expect("a socket can be made non-blocking");
    let near = TcpStream::from(OwnedFd::from(near));
    let mut link = Link::new(Closed::open(|| Ok(near)).expect("the socket is open"));
    if kind % 2 == 1 {
        let secret = b"a secret";
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let mut here = Session::responder(secret, b"").expect("the host has random bytes");
        let mut there = Session::initiator(secret, b"").expect("the host has random bytes");
        there.write_message(&[], &mut first).expect("it is the initiator's turn");
        here.read_message(&first, &mut Vec::new()).expect("the secrets are equal");
        here.write_message(&[], &mut second).expect("it is the responder's turn");
        assert_eq!((first.len(), second.len()), (HANDSHAKE_BYTES, HANDSHAKE_BYTES));
        link.seal(here);
    }
    link.allow_messages(LONGEST);
    for bytes in bytes.chunks(1 + usize::from(*piece)) {
        far.write_all(bytes).expect("the bytes fit into the socket's buffer");
        assert_eq!(link.pump(), LinkState::Open);
        loop {
            match link.message() {
                // Nobody has sealed these bytes.
                Ok(Some(message)) => assert!(kind % 2 == 0, "{message:?}"),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
    drop(far);
    assert_eq!(link.pump(), LinkState::Closed);
}
