//! Tests of what only the wire over TCP does. The tests of what every wire promises are in
//! `promises`. The wires of a test belong to one process, and are as separate as those of two
//! processes.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Tcp;
use super::options::Options;
use crate::wire::address;
use crate::wire::contract::{LONG, TOKEN, introduce, pattern, receive, send, tag, until, wait};
use crate::wire::{Broken, Contact, EAGER_BYTES, Lost, Peer, Request, Tag, Wire};

mod again;
mod closing;
mod ends;
mod processes;
mod promises;
mod strangers;
mod traffic;

fn options() -> Options {
    Options::of_test()
}

fn wire() -> Arc<Tcp> {
    Tcp::open(options(), || ()).unwrap()
}

/// A wire with that secret.
fn secret_wire(secret: &str) -> Arc<Tcp> {
    let secret = Some(secret.as_bytes().to_vec()).filter(|secret| !secret.is_empty());
    Tcp::open(Options { secret, ..options() }, || ()).unwrap()
}

/// Two wires that know each other, and the number that each has for the other.
fn pair() -> ([Arc<Tcp>; 2], [Peer; 2]) {
    let wires = [wire(), wire()];
    let peers = introduce([&wires[0], &wires[1]]);
    (wires, peers)
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
fn a_connection_that_is_being_made_keeps_back_only_the_arrival_of_everything() {
    let (wires, peers) = pair();
    wires[0].notify(peers[0], 5, b"hello");
    until("the notice does not arrive", || wires[0].has_all_arrived());
    // A process that is stopped answers as this listener does: the kernel takes the connection, and
    // nobody reads from it.
    let stopped = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let contact = Contact { id: [9; 16], address: address::to_bytes(&stopped.local_addr().unwrap()) };
    let silent = wires[0].meet(&contact, &TOKEN);
    wires[0].notify(silent, 6, b"bye");
    // The peer of one communicator says nothing about what another one has sent.
    assert!([peers[0], silent].iter().all(|peer| wires[0].is_flushed(*peer)));
    assert!(!wires[0].has_all_arrived());
    drop(stopped);
    until("a lost peer counts", || wires[0].has_all_arrived());
}

#[test]
fn a_process_that_is_stopped_when_the_first_connection_to_it_is_made_is_not_lost() {
    const TRIES: Duration = Duration::from_millis(400);
    let wire = Tcp::open(Options { tries: TRIES, ..options() }, || ()).unwrap();
    // A process that is stopped answers as this listener does.
    let stopped = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let contact = Contact { id: [9; 16], address: address::to_bytes(&stopped.local_addr().unwrap()) };
    let peer = wire.meet(&contact, &TOKEN);
    let began = Instant::now();
    let request = send(&wire, peer, tag(0), b"hello");
    while began.elapsed() < 2 * TRIES {
        assert_eq!((wire.lost(peer), wire.test(&request)), (None, Ok(None)));
        std::thread::sleep(Duration::from_millis(5));
    }
    // The end of the process is noticed all the same.
    drop(stopped);
    assert!(matches!(wait(&wire, &request), Err(Broken::Lost(_))));
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
        wires[usize::from(round) % 2].close(peers[usize::from(round) % 2], &TOKEN);
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
        wires[1 - usize::from(round) % 2].close(peers[1 - usize::from(round) % 2], &TOKEN);
        if round % 4 == 0 {
            until("the connection stays open", || wires.iter().all(|wire| wire.0.lock().links.is_empty()));
        }
    }
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
fn a_congestion_control_that_the_kernel_lacks_is_refused_with_its_name() {
    let error = Tcp::open(Options { congestion: Some("nosuch".to_owned()), ..options() }, || ()).unwrap_err();
    assert!(error.message().contains("DM_SOCKET_CONGESTION is \"nosuch\""), "{}", error.message());
    drop(Tcp::open(Options { congestion: Some("reno".to_owned()), ..options() }, || ()).unwrap());
}

/// Sends a long message and then a short one. Returns whether the short one came first.
fn short_message_comes_first() -> bool {
    let (wires, peers) = pair();
    let long = vec![3; 64 << 20];
    let mut got_long = vec![0; 64 << 20];
    let mut got = [0; 4];
    let receiving = receive(&wires[1], peers[1], tag(1), &mut got_long);
    let short = receive(&wires[1], peers[1], tag(2), &mut got);
    let comes_first = std::thread::scope(|scope| {
        scope.spawn(|| {
            let sending = send(&wires[0], peers[0], tag(1), &long);
            let last = send(&wires[0], peers[0], tag(2), b"last");
            assert_eq!((wait(&wires[0], &last), wait(&wires[0], &sending)), (Ok(4), Ok(64 << 20)));
        });
        assert_eq!(wait(&wires[1], &short), Ok(4));
        let is_long_done = wires[1].test(&receiving).unwrap().is_some();
        assert!(is_long_done || wait(&wires[1], &receiving) == Ok(64 << 20));
        !is_long_done
    });
    assert!(got_long == long);
    comes_first
}

/// On a busy machine, the long message may be done before the sender's thread sends the short one,
/// or before this thread looks. A wire that keeps the short message back does so each time.
#[test]
fn a_long_message_does_not_delay_a_short_one() {
    assert!((0..4).any(|_| short_message_comes_first()), "the long message always came first");
}
