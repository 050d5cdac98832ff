//! Tests: both sides agree on the end of a connection, whatever crosses on the way.

use super::super::frame::{HEADER, Header, Kind};
use super::super::incoming::Sink;
use super::super::ledger::Ledger;
use super::super::remote::Remote;
use super::*;

fn remote() -> Remote {
    let mut remote = Remote::new(0, Contact { id: [1; 16], address: Vec::new() }, false);
    remote.is_idle_there = true;
    remote
}

/// Hands these frames to the other side.
fn hand(frames: Vec<u8>, to: &mut Remote) {
    for raw in frames.chunks_exact(HEADER) {
        let header = Header::parse(raw.first_chunk().unwrap()).unwrap();
        to.take_header(header, &mut Ledger::default()).unwrap();
    }
}

/// This side has sent `Close`. Before the other side reads it, it begins a use, sends a message,
/// and ends the use. This side begins a use, too, and must send nothing until the answer comes. The
/// connection stays, because this side has not received the message yet.
#[test]
fn a_short_use_that_crosses_a_close_keeps_the_connection_and_its_messages() {
    let [mut here, mut there] = [remote(), remote()];
    here.begin_to_close();
    let close = std::mem::take(&mut here.last_frames);
    there.say(Header::plain(Kind::Busy, 0), &[]);
    there.say_idle();
    let key = (Tag { comm: 2, stream: 0, from: 1, to: 0 }, 0);
    here.finish(Sink::Keep { key, data: vec![7] }, &mut Ledger::default());
    hand(std::mem::take(&mut there.control), &mut here);
    here.begin_use(&TOKEN);
    assert!(here.is_closing, "a message would get lost now");
    hand(close, &mut there);
    hand(std::mem::take(&mut there.control), &mut here);
    assert!(!there.is_closed && !here.is_closed && !here.is_closing);
    assert!(here.arrived.contains_key(&key));
    // The next `Close` counts that use.
    here.end_use(&TOKEN);
    assert!(here.may_close());
    here.begin_to_close();
    hand(std::mem::take(&mut here.last_frames), &mut there);
    hand(std::mem::take(&mut there.control), &mut here);
    assert!(there.is_closed && here.is_closed);
}

#[test]
fn the_next_connection_begins_without_the_frames_about_the_closed_one() {
    let mut here = remote();
    here.begin_to_close();
    here.begin_use(&TOKEN);
    for kind in [Kind::Busy, Kind::Credit, Kind::Want, Kind::Idle] {
        here.say(Header::plain(kind, 1), &[]);
    }
    here.say(Header::plain(Kind::Notice, 0), b"news");
    let expected = [Header::plain(Kind::Want, 1), Header { bytes: 4, ..Header::plain(Kind::Notice, 0) }];
    here.restart();
    assert_eq!(here.control, [&expected[0].to_bytes()[..], &expected[1].to_bytes(), b"news"].concat());
}

#[test]
fn a_side_that_uses_the_connection_again_keeps_it_open() {
    let [mut here, mut there] = [remote(), remote()];
    here.begin_to_close();
    there.begin_use(&TOKEN);
    there.say(Header::plain(Kind::Busy, 0), &[]);
    hand(std::mem::take(&mut here.last_frames), &mut there);
    hand(std::mem::take(&mut there.control), &mut here);
    assert!(!here.is_closing && !here.is_closed && !there.is_closed);
    assert!(!here.is_idle_there && !here.may_close(), "the other side has a use");
}

#[test]
fn a_process_without_a_use_still_takes_a_connection_and_what_comes_over_it() {
    let (wires, peers) = pair();
    wires[1].close(peers[1], &TOKEN);
    wires[0].notify(peers[0], 5, b"have you left?");
    until("the notice does not arrive", || {
        assert_eq!(wires[0].lost(peers[0]), None);
        wires[1].news().0.iter().any(|notice| notice.text == b"have you left?")
    });
    wires[0].close(peers[0], &TOKEN);
    until("the connection stays", || wires.iter().all(|wire| wire.0.lock().links.is_empty()));
}

#[test]
fn a_process_that_is_met_again_makes_no_connection_before_it_is_needed() {
    let (wires, peers) = pair();
    wires[0].close(peers[0], &TOKEN);
    assert_eq!(wires[0].meet(&wires[1].contact(), &TOKEN), peers[0]);
    let state = wires[0].0.lock();
    let link = &state.links[&peers[0].0];
    assert!(!link.is_connecting && !link.remote.has_output());
}

#[test]
fn the_peers_without_a_use_and_a_connection_are_bounded() {
    let wire = wire();
    // The first peer comes again and again, and takes one place.
    for number in (0..3000_u128).flat_map(|number| [number, 0]).chain(3000..5000) {
        let peer = wire.meet(&Contact { id: number.to_le_bytes(), address: vec![] }, &TOKEN);
        wire.close(peer, &TOKEN);
    }
    let state = wire.0.lock();
    assert_eq!((state.links.len(), state.numbers.len()), (4096, 4096));
    for newest in [0, 2999, 4999_u128] {
        assert!(state.numbers.contains_key(&newest.to_le_bytes()), "peer {newest} is forgotten");
    }
}

/// Both processes have something to say when they end their last use.
#[test]
fn two_processes_that_connect_without_a_use_do_not_wait_for_each_other() {
    let (wires, peers) = pair();
    let mut held = [0, 1].map(|at| wires[at].0.lock());
    for at in [0, 1] {
        let state = &mut *held[at];
        let Some(link) = state.links.get_mut(&peers[at].0) else { panic!("the peer is not known") };
        link.remote.end_use(&TOKEN);
        link.remote.say_idle();
        state.push(&wires[at].0, peers[at].0);
    }
    drop(held);
    let began = Instant::now();
    until("the connection stays", || wires.iter().all(|wire| wire.0.lock().links.is_empty()));
    // It takes milliseconds. Processes that do not know each other try for 30 s.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}
