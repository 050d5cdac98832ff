//! Tests of the wire over TCP. The wires of a test belong to one process, and are as separate as
//! those of two processes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Tcp;
use super::options::Options;
use crate::wire::address::Interface;
use crate::wire::{Broken, EAGER_BYTES, Lost, Peer, Request, Tag, Wire};

mod processes;
mod strangers;
mod traffic;

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

/// A wire with that secret.
fn secret_wire(secret: &str) -> Arc<Tcp> {
    let secret = Some(secret.as_bytes().to_vec()).filter(|secret| !secret.is_empty());
    Tcp::open(Options { secret, ..options() }, || ()).unwrap()
}

/// Tells two wires of each other. Returns the number that each has for the other.
fn introduce(wires: [&Tcp; 2]) -> [Peer; 2] {
    [wires[0].meet(&wires[1].contact(), &TOKEN), wires[1].meet(&wires[0].contact(), &TOKEN)]
}

/// Two wires that know each other, and the number that each has for the other.
fn pair() -> ([Arc<Tcp>; 2], [Peer; 2]) {
    let wires = [wire(), wire()];
    let peers = introduce([&wires[0], &wires[1]]);
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
    for secret in ["", "a secret"] {
        let wires = [secret_wire(secret), secret_wire(secret)];
        let peers = introduce([&wires[0], &wires[1]]);
        exchange_all_sizes(&wires, peers);
    }
}

fn exchange_all_sizes(wires: &[Arc<Tcp>; 2], peers: [Peer; 2]) {
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

/// Waits until a condition holds.
fn until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_side_without_the_secret_is_refused_with_the_reason() {
    for (one, other) in [("", "s"), ("s", ""), ("s", "t")] {
        let wires = [secret_wire(one), secret_wire(other)];
        let peers = introduce([&wires[0], &wires[1]]);
        let (sent, mut got) = ([1_u8; 4], [0_u8; 4]);
        let requests = [receive(&wires[0], peers[0], tag(0), &mut got), send(&wires[0], peers[0], tag(0), &sent)];
        for request in requests {
            let failed = wait(&wires[0], &request).unwrap_err();
            let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
            assert!(lost.why.contains("DM_STORE_SECRET"), "{}", lost.why);
        }
    }
}

#[test]
fn a_process_with_another_token_does_not_get_in() {
    let wires = [wire(), wire()];
    let there = wires[0].meet(&wires[1].contact(), &[1; 16]);
    let back = wires[1].meet(&wires[0].contact(), &[2; 16]);
    wires[0].notify(there, 5, b"let me in");
    std::thread::sleep(Duration::from_millis(150));
    assert!(wires[1].news().0.is_empty());
    // Once the other process knows the token, the connection that waits is taken.
    wires[1].meet(&wires[0].contact(), &[1; 16]);
    let mut notices = Vec::new();
    let end = Instant::now() + LONG;
    while notices.is_empty() && Instant::now() < end {
        wires[1].sleep_on_wire(wires[1].moved().value(), &[], Duration::from_millis(5));
        notices.extend(wires[1].news().0);
    }
    assert_eq!(notices[0].from, back);
}

#[test]
fn both_sides_may_connect_at_once() {
    for _ in 0..1000 {
        let (wires, peers) = pair();
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for side in 0..2 {
                let (wires, barrier) = (&wires, &barrier);
                scope.spawn(move || {
                    let (wire, peer) = (&wires[side], peers[side]);
                    let (to, from) = (tag(side as u64), tag(1 - side as u64));
                    barrier.wait();
                    let sent = [side as u8; 100];
                    let request = send(wire, peer, to, &sent);
                    let mut got = [9; 100];
                    let answer = receive(wire, peer, from, &mut got);
                    assert_eq!((wait(wire, &request), wait(wire, &answer)), (Ok(100), Ok(100)));
                    assert_eq!(got, [1 - side as u8; 100]);
                });
            }
        });
        assert!(wires[0].lost(peers[0]).is_none() && wires[1].lost(peers[1]).is_none());
        assert_eq!(wires.each_ref().map(|wire| wire.0.lock().connected.len()), [1, 1]);
    }
}

#[test]
fn a_connection_without_uses_is_closed_and_a_new_use_makes_another() {
    let wires = [wire(), wire()];
    for round in 0..20_u8 {
        let peers = introduce([&wires[0], &wires[1]]);
        let (sent, mut got) = ([round; 10], [0; 10]);
        let request = send(&wires[0], peers[0], tag(u64::from(round)), &sent);
        let answer = receive(&wires[1], peers[1], tag(u64::from(round)), &mut got);
        assert_eq!((wait(&wires[0], &request), wait(&wires[1], &answer)), (Ok(10), Ok(10)));
        assert_eq!(got, sent);
        wires[usize::from(round) % 2].close(peers[usize::from(round) % 2]);
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
        wires[1 - usize::from(round) % 2].close(peers[1 - usize::from(round) % 2]);
        if round % 4 == 0 {
            until("the connection stays open", || wires.iter().all(|wire| wire.0.lock().links.is_empty()));
        }
    }
}

#[test]
fn a_cancelled_message_harms_no_other() {
    let (wires, peers) = pair();
    let long = pattern(1, 16 << 20);
    let mut dropped = vec![0; 16 << 20];
    // The receiver cancels in the middle, and its buffer does not change afterwards.
    let sending = send(&wires[0], peers[0], tag(1), &long);
    let receiving = receive(&wires[1], peers[1], tag(1), &mut dropped);
    until("nothing comes", || {
        wires[0].progress();
        wires[1].progress();
        wires[1].0.lock().links[&peers[1].0].remote.posted.values().any(|receive| receive.got > 1 << 20)
    });
    wires[1].cancel(receiving);
    dropped.fill(77);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(wait(&wires[0], &sending), Ok(16 << 20)));
        let mut got = [0; 5];
        let next = receive(&wires[1], peers[1], tag(2), &mut got);
        scope.spawn(|| send(&wires[0], peers[0], tag(2), b"after"));
        assert_eq!((wait(&wires[1], &next), &got), (Ok(5), b"after"));
    });
    assert!(dropped.iter().all(|byte| *byte == 77));
    // The sender cancels in the middle, and may change its buffer at once.
    let mut long = long;
    let sending = send(&wires[0], peers[0], tag(3), &long);
    let receiving = receive(&wires[1], peers[1], tag(3), &mut dropped);
    until("nothing comes", || {
        wires[0].progress();
        wires[1].progress();
        wires[1].0.lock().links[&peers[1].0].remote.posted.values().any(|receive| receive.got > 1 << 20)
    });
    wires[0].cancel(sending);
    long.fill(0);
    let mut got = [0; 5];
    let next = receive(&wires[1], peers[1], tag(4), &mut got);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let request = send(&wires[0], peers[0], tag(4), b"after");
            wait(&wires[0], &request)
        });
        assert_eq!((wait(&wires[1], &next), &got), (Ok(5), b"after"));
    });
    assert_eq!(wires[1].test(&receiving), Ok(None));
    wires[1].cancel(receiving);
    assert!(wires[0].lost(peers[0]).is_none() && wires[1].lost(peers[1]).is_none());
}

#[test]
fn a_wire_without_owners_leaves_nothing() {
    let (wires, peers) = pair();
    wires[0].notify(peers[0], 5, b"hello");
    until("no connection", || wires.iter().all(|wire| wire.0.lock().connected.len() == 1));
    let left = wires.each_ref().map(|wire| Arc::downgrade(&wire.0));
    drop(wires);
    until("the thread goes on", || left.iter().all(|inner| inner.strong_count() == 0));
}

#[test]
fn short_messages_that_nobody_takes_are_bounded_and_all_arrive() {
    const COUNT: usize = 9000;
    let (wires, peers) = pair();
    let sent: Vec<[u8; 1024]> = (0..COUNT).map(|at| [(at % 251) as u8; 1024]).collect();
    let requests: Vec<Request> = sent.iter().map(|data| send(&wires[0], peers[0], tag(0), data)).collect();
    until("the credit is not used up", || {
        wires[0].progress();
        wires[1].progress();
        let kept = wires[1].0.lock().links[&peers[1].0].remote.kept;
        assert!(kept <= super::remote::CREDIT);
        kept + 2048 > super::remote::CREDIT
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for request in &requests {
                assert_eq!(wait(&wires[0], request), Ok(1024));
            }
        });
        for (at, sent) in sent.iter().enumerate() {
            let mut got = [0; 1024];
            let request = receive(&wires[1], peers[1], tag(0), &mut got);
            assert_eq!(wait(&wires[1], &request), Ok(1024), "message {at}");
            assert!(got == *sent, "message {at}");
        }
    });
    assert_eq!(wires[1].0.lock().links[&peers[1].0].remote.kept, 0);
}

#[test]
fn messages_for_a_communicator_that_has_ended_are_dropped() {
    let (wires, peers) = pair();
    let kept = || wires[1].0.lock().links[&peers[1].0].remote.kept;
    let sent = [1; 1000];
    let first = send(&wires[0], peers[0], tag(0), &sent);
    assert_eq!(wait(&wires[0], &first), Ok(1000));
    until("the message does not come", || {
        wires[1].progress();
        kept() > 0
    });
    assert_eq!(wires[1].waiting(peers[1], 5), [tag(0)]);
    wires[1].retire(peers[1], 5, 1);
    let second = send(&wires[0], peers[0], tag(0), &sent);
    let other = Tag { comm: 6, ..tag(0) };
    let third = send(&wires[0], peers[0], other, &sent);
    assert_eq!((wait(&wires[0], &second), wait(&wires[0], &third)), (Ok(1000), Ok(1000)));
    let mut got = [0; 1000];
    let request = receive(&wires[1], peers[1], other, &mut got);
    assert_eq!((wait(&wires[1], &request), kept()), (Ok(1000), 0));
    assert!(wires[1].waiting(peers[1], 5).is_empty());
}

#[test]
fn a_long_message_that_was_asked_for_and_comes_after_the_end_harms_no_other_communicator() {
    for round in 0..20 {
        let (wires, peers) = pair();
        let (sent, mut got) = (vec![1; 1 << 20], vec![0; 1 << 20]);
        let other = Tag { comm: 6, ..tag(0) };
        // The connection is there before the long message.
        let (early, request) =
            (send(&wires[0], peers[0], other, &sent[..8]), receive(&wires[1], peers[1], other, &mut got[..8]));
        assert_eq!((wait(&wires[1], &request), wait(&wires[0], &early)), (Ok(8), Ok(8)));
        let wanted = receive(&wires[1], peers[1], tag(0), &mut got);
        wires[1].progress();
        let first = send(&wires[0], peers[0], tag(0), &sent);
        // The sender is in the middle of the message in some rounds.
        for _ in 0..round {
            wires[0].progress();
        }
        wires[1].cancel(wanted);
        wires[1].retire(peers[1], 5, 1);
        let second = send(&wires[0], peers[0], other, &sent[..1000]);
        let request = receive(&wires[1], peers[1], other, &mut got[..1000]);
        assert_eq!((wait(&wires[1], &request), wait(&wires[0], &second)), (Ok(1000), Ok(1000)), "round {round}");
        assert_eq!(wait(&wires[0], &first), Ok(1 << 20), "round {round}");
        assert_eq!((wires[0].lost(peers[0]), wires[1].lost(peers[1])), (None, None), "round {round}");
    }
}

#[test]
fn a_congestion_control_that_the_kernel_lacks_is_refused_with_its_name() {
    let error = Tcp::open(Options { congestion: Some("nosuch".to_owned()), ..options() }, || ()).unwrap_err();
    assert!(error.message().contains("DM_SOCKET_CONGESTION is \"nosuch\""), "{}", error.message());
    drop(Tcp::open(Options { congestion: Some("reno".to_owned()), ..options() }, || ()).unwrap());
}

#[test]
fn a_long_message_does_not_delay_a_short_one() {
    let (wires, peers) = pair();
    let long = vec![3; 64 << 20];
    let mut got_long = vec![0; 64 << 20];
    let mut got = [0; 4];
    let receiving = receive(&wires[1], peers[1], tag(1), &mut got_long);
    let short = receive(&wires[1], peers[1], tag(2), &mut got);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sending = send(&wires[0], peers[0], tag(1), &long);
            let last = send(&wires[0], peers[0], tag(2), b"last");
            assert_eq!((wait(&wires[0], &last), wait(&wires[0], &sending)), (Ok(4), Ok(64 << 20)));
        });
        assert_eq!(wait(&wires[1], &short), Ok(4));
        assert_eq!(wires[1].test(&receiving), Ok(None), "the long message came first");
        assert_eq!(wait(&wires[1], &receiving), Ok(64 << 20));
    });
    assert!(got_long == long);
}
