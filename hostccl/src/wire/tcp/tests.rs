//! Tests of the wire over TCP. The wires of a test belong to one process, and are as separate as
//! those of two processes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Tcp;
use super::options::Options;
use crate::wire::address::Interface;
use crate::wire::{Broken, EAGER_BYTES, Lost, Peer, Request, Tag, Wire};

const TOKEN: [u8; 16] = [7; 16];
/// How long a test waits for what must happen.
const LONG: Duration = Duration::from_secs(60);

fn options() -> Options {
    let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let interface = Interface { name: "lo".to_owned(), address, scope: 0, is_loopback: true };
    Options { interface, silence: Duration::from_secs(5), congestion: None, secret: None }
}

fn wire() -> Arc<Tcp> {
    Tcp::open(options(), || ()).unwrap()
}

/// Two wires that know each other, and the number that each has for the other.
fn pair() -> ([Arc<Tcp>; 2], [Peer; 2]) {
    let wires = [wire(), wire()];
    let peers = [wires[0].meet(&wires[1].contact(), &TOKEN), wires[1].meet(&wires[0].contact(), &TOKEN)];
    (wires, peers)
}

fn tag(stream: u64) -> Tag {
    Tag { comm: 5, stream, from: 0, to: 1 }
}

/// Waits for a request, and returns its outcome.
fn wait(wire: &Tcp, request: &Request) -> Result<usize, Broken> {
    let until = Instant::now() + LONG;
    loop {
        let seen = wire.moved().value();
        if let Some(bytes) = wire.test(request)? {
            return Ok(bytes);
        }
        assert!(Instant::now() < until, "a request does not end");
        if !wire.progress() {
            wire.sleep_on_wire(seen, &[], Duration::from_millis(100));
        }
    }
}

fn send(wire: &Tcp, peer: Peer, tag: Tag, data: &[u8]) -> Request {
    // SAFETY: the tests keep their buffers until the request is over.
    unsafe { wire.isend(peer, tag, data.as_ptr(), data.len()) }
}

fn receive(wire: &Tcp, peer: Peer, tag: Tag, data: &mut [u8]) -> Request {
    // SAFETY: the tests keep their buffers until the request is over.
    unsafe { wire.irecv(peer, tag, data.as_mut_ptr(), data.len()) }
}

/// Returns bytes that depend on `seed` and the place.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(31).wrapping_add(seed * 7) >> 3) as u8 ^ seed as u8).collect()
}

#[test]
fn messages_of_all_sizes_arrive_whichever_side_is_early() {
    let (wires, peers) = pair();
    for (stream, bytes) in
        [0, 1, 4, 47, 48, 49, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 1 << 20, 5 << 20].into_iter().enumerate()
    {
        for early in [true, false] {
            let (tag, sent) = (tag(stream as u64), pattern(stream as u64, bytes));
            let mut got = vec![0; bytes];
            std::thread::scope(|scope| {
                let sender = || {
                    let request = send(&wires[0], peers[0], tag, &sent);
                    assert_eq!(wait(&wires[0], &request), Ok(bytes));
                };
                if early {
                    let handle = scope.spawn(sender);
                    std::thread::sleep(Duration::from_millis(5));
                    let request = receive(&wires[1], peers[1], tag, &mut got);
                    assert_eq!(wait(&wires[1], &request), Ok(bytes));
                    handle.join().unwrap();
                } else {
                    let request = receive(&wires[1], peers[1], tag, &mut got);
                    wires[1].progress();
                    scope.spawn(sender);
                    assert_eq!(wait(&wires[1], &request), Ok(bytes));
                }
            });
            assert!(got == sent, "{bytes} bytes");
        }
    }
}

#[test]
fn a_process_reaches_itself() {
    let wire = wire();
    let me = wire.meet(&wire.contact(), &TOKEN);
    for bytes in [0, 5, EAGER_BYTES, EAGER_BYTES + 1] {
        let (sent, mut got) = (pattern(3, bytes), vec![0; bytes]);
        let one = send(&wire, me, tag(1), &sent);
        let two = receive(&wire, me, tag(1), &mut got);
        assert_eq!((wait(&wire, &two), wait(&wire, &one)), (Ok(bytes), Ok(bytes)));
        assert!(got == sent);
        got.fill(0);
        let two = receive(&wire, me, tag(1), &mut got);
        let one = send(&wire, me, tag(1), &sent);
        assert_eq!((wait(&wire, &one), wait(&wire, &two)), (Ok(bytes), Ok(bytes)));
        assert!(got == sent);
    }
    wire.notify(me, 5, b"hello");
    assert_eq!(wire.news().0[0].text, b"hello");
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_alone() {
    let (wires, peers) = pair();
    for bytes in [8, EAGER_BYTES, 1 << 20] {
        for early in [true, false] {
            let (sent, mut got) = (pattern(3, bytes), vec![0; 4]);
            let (mut one, mut two) = (None, None);
            for turn in [early, !early] {
                match turn {
                    true => one = Some(send(&wires[0], peers[0], tag(1), &sent)),
                    false => two = Some(receive(&wires[1], peers[1], tag(1), &mut got)),
                }
            }
            std::thread::scope(|scope| {
                scope.spawn(|| assert_eq!(wait(&wires[0], &one.unwrap()), Ok(bytes)));
                assert_eq!(wait(&wires[1], &two.unwrap()), Err(Broken::TooLong(bytes)));
            });
            let one = send(&wires[0], peers[0], tag(1), &sent[..4]);
            let two = receive(&wires[1], peers[1], tag(1), &mut got);
            assert_eq!((wait(&wires[0], &one), wait(&wires[1], &two)), (Ok(4), Ok(4)));
            assert_eq!(got, sent[..4]);
        }
    }
}

#[test]
fn a_notice_comes_and_a_wire_that_goes_is_lost() {
    let ([first, second], peers) = pair();
    first.notify(peers[0], 9, b"left");
    let (mut notices, mut lost) = (Vec::new(), Vec::new());
    let until = Instant::now() + LONG;
    let mut got = [0; 8];
    let request = receive(&second, peers[1], tag(0), &mut got);
    while notices.is_empty() && Instant::now() < until {
        second.sleep_on_wire(second.moved().value(), &[], Duration::from_millis(1));
        notices.extend(second.news().0);
    }
    assert_eq!((notices[0].from, notices[0].comm, &notices[0].text[..]), (peers[1], 9, &b"left"[..]));
    drop(first);
    let failed = wait(&second, &request).unwrap_err();
    assert!(matches!(&failed, Broken::Lost(Lost { ended: true, .. })), "{failed:?}");
    lost.extend(second.news().1);
    assert_eq!(lost[0].0, peers[1]);
    assert!(second.lost(peers[1]).unwrap().ended);
}
