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

/// This side has sent `Close`. Before the other side reads it, it begins a use, sends a message, and
/// ends the use. This side begins a use, too, and must send nothing until the answer comes. The
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
