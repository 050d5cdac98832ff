//! Checks what must hold when a peer sends arbitrary bytes in place of a hello, frames or encrypted
//! records.

use std::io::Write;
use std::os::unix::net::UnixStream;

use socket2::Socket;

use super::cipher::Cipher;
use super::frame::{HEADER, Header, Kind};
use super::hello::{HELLO, Hello};
use super::incoming::Sink;
use super::ledger::Ledger;
use super::remote::{CREDIT, Remote};
use crate::noise::Session;
use crate::wire::{Contact, Tag};

/// Checks that a hello that was read and is written again is read as an equal hello.
pub(crate) fn hello(bytes: &[u8]) {
    if let Ok(hello) = Hello::parse(bytes) {
        let again = hello.to_bytes();
        assert_eq!((again.len(), Hello::parse(&again)), (HELLO, Ok(hello)));
    }
}

/// Checks that a header that can be read is written as the bytes from which it was read.
pub(crate) fn header(bytes: &[u8]) {
    let Some(raw) = bytes.first_chunk::<HEADER>() else { return };
    if let Ok(header) = Header::parse(raw) {
        assert_eq!(&header.to_bytes(), raw);
    }
}

/// How many bytes of an input describe one step of `frames`.
const STEP: usize = 8;

/// Plays a peer that sends arbitrary frames while this side sends, receives, cancels and leaves.
/// Checks that bytes are written only into the buffers of open receives, and that the number of
/// bytes that are kept has a bound.
pub(crate) fn frames(bytes: &[u8]) {
    let contact = Contact { id: [1; 16], address: Vec::new() };
    let (mut remote, mut ledger) = (Remote::new(0, contact, false), Ledger::default());
    let (mut requests, mut buffers) = (Vec::new(), Vec::<(u64, Vec<u8>)>::new());
    // The messages that this side sends have these bytes.
    let source = vec![0_u8; 100 << 10];
    for step in bytes.chunks_exact(STEP) {
        let tag = Tag { comm: u64::from(step[1] & 1), stream: 0, from: u32::from(step[1] >> 1 & 1), to: 0 };
        let length = usize::from(u16::from_le_bytes([step[3], step[4]])) * usize::from(step[5]);
        match step[0] {
            0..200 => {
                let mut raw = Header { tag, index: u64::from(step[2]), ..Header::plain(Kind::Idle, 0) }.to_bytes();
                raw[0] = if step[0] < 196 { step[0] % 14 } else { 14 };
                raw[4..6].copy_from_slice(&step[3..5]);
                raw[40..44].copy_from_slice(&(length as u32).to_le_bytes());
                raw[47] = step[6];
                let Ok(header) = Header::parse(&raw) else { return };
                let Ok(sink) = remote.take_header(header, &mut ledger) else { return };
                let sink = fill(sink, &header, &remote, &buffers);
                remote.finish(sink, &mut ledger);
            }
            200..225 => {
                let mut buffer = vec![0; length.min(1 << 20)];
                let request = remote.receive(tag, buffer.as_mut_ptr() as usize, buffer.len(), &mut ledger);
                requests.push(request);
                buffers.push((request, buffer));
            }
            225..240 => {
                requests.push(remote.send(tag, source.as_ptr() as usize, length.min(source.len()), &mut ledger));
            }
            240..252 => {
                let request = requests.get(usize::from(step[2])).copied().unwrap_or(0);
                if let Some(open) = ledger.open.remove(&request) {
                    remote.cancel(request, open, None, step[5] & 1 == 1 && open.is_send);
                }
            }
            _ => remote.retire(tag.comm, tag.sender(), &mut ledger),
        }
        assert!(remote.kept <= CREDIT, "{} bytes are kept", remote.kept);
    }
}

/// Puts the bytes of a frame where they belong.
fn fill(sink: Sink, header: &Header, remote: &Remote, buffers: &[(u64, Vec<u8>)]) -> Sink {
    match sink {
        Sink::Direct { key, to, total } => {
            let request = remote.posted[&key].request.expect("nobody waits for the bytes of a cancelled receive");
            let (_, buffer) = buffers.iter().find(|(other, _)| *other == request).expect("the receive has a buffer");
            let at = to - buffer.as_ptr() as usize;
            assert!(at + header.bytes <= buffer.len(), "{at} + {} of {}", header.bytes, buffer.len());
            Sink::Direct { key, to, total }
        }
        Sink::Keep { key, .. } => Sink::Keep { key, data: vec![0; header.bytes] },
        Sink::Notice { comm, .. } => Sink::Notice { comm, text: vec![0; header.bytes] },
        Sink::None | Sink::Drop => sink,
    }
}

/// Checks that records that nobody has sealed do not open.
pub(crate) fn records(bytes: &[u8]) {
    let secret = b"a secret";
    let mut session = Session::responder(secret, b"").expect("the host has random bytes");
    let mut first = Vec::new();
    let Some((is_copy, bytes)) = bytes.split_first() else { return };
    let mut initiator = Session::initiator(secret, b"").expect("the host has random bytes");
    initiator.write_message(&[], &mut first).expect("it is the initiator's turn");
    if is_copy % 2 == 0 {
        // Nobody who does not know the secret can begin, or answer.
        assert!(session.read_message(bytes, &mut Vec::new()).is_err());
        assert!(initiator.read_message(bytes, &mut Vec::new()).is_err());
        return;
    }
    session.read_message(&first, &mut Vec::new()).expect("the secrets are equal");
    session.write_message(&[], &mut Vec::new()).expect("it is the responder's turn");
    let (mut far, near) = UnixStream::pair().expect("the process may open two more descriptors");
    let (near, mut cipher) = (Socket::from(near), Cipher::new(session));
    for bytes in bytes.chunks(1 + bytes.len() / 3) {
        far.write_all(bytes).expect("the bytes fit into the socket's buffer");
        cipher.receive(&near).expect("the other side is open");
        match cipher.open() {
            Ok(None) => {}
            Ok(Some(text)) => panic!("{} bytes opened", text.len()),
            Err(_) => return,
        }
    }
}
