//! Tests of the wire over UCX. They run where UCX's library is found: Debian's libucx0, or the one
//! that `DM_UCX_LIBRARY` names. Elsewhere they say that they are skipped.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::wire::contract;

/// How long a test waits for what must happen.
const LONG: Duration = Duration::from_secs(60);

/// Runs a test where UCX is there.
fn with_ucx(test: impl Fn(contract::Make<'_>)) {
    let make = || open(Duration::from_secs(5), || ());
    match make() {
        Ok(_) => test(&|| -> Arc<dyn Wire> { make().unwrap() }),
        Err(error) => println!("skipped: {}", error.message()),
    }
}

#[test]
fn messages_of_all_sizes_arrive_whichever_side_is_early() {
    with_ucx(contract::all_sizes);
}

#[test]
fn messages_of_one_tag_keep_their_order() {
    with_ucx(contract::order);
}

#[test]
fn a_process_reaches_itself() {
    with_ucx(contract::itself);
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_alone() {
    with_ucx(contract::too_long);
}

#[test]
fn a_wire_that_goes_is_lost() {
    with_ucx(contract::loss);
}

#[test]
fn a_process_with_another_token_does_not_get_in() {
    with_ucx(contract::stranger);
}

#[test]
fn a_process_may_send_before_the_other_has_met_it() {
    with_ucx(contract::early);
}

#[test]
fn both_sides_may_connect_at_once() {
    with_ucx(|make| contract::at_once(make, 10));
}

#[test]
fn peers_may_be_closed_and_met_again() {
    with_ucx(contract::again);
}

#[test]
fn a_cancelled_message_harms_no_other() {
    with_ucx(contract::cancelled);
}

#[test]
fn a_cancelled_send_leaves_no_gap() {
    with_ucx(contract::withdrawn);
}

#[test]
#[ignore = "it measures"]
fn how_fast() {
    with_ucx(|make| contract::speed("UCX", make));
}

#[test]
fn a_peer_that_says_nothing_is_lost_in_time() {
    with_ucx(|_| {
        let wires = [Ucx::new(Duration::from_millis(300), || ()).unwrap(), Ucx::new(LONG, || ()).unwrap()];
        let peers = [wires[0].meet(&wires[1].contact(), &[7; 16]), wires[1].meet(&wires[0].contact(), &[7; 16])];
        wires[1].notify(peers[1], 1, b"hello");
        let end = Instant::now() + LONG;
        while wires[0].news().0.is_empty() {
            assert!(Instant::now() < end, "no notice comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The second wire sends a sign of life only every 12 s, and nothing else.
        while wires[0].lost(peers[0]).is_none() {
            assert!(Instant::now() < end, "the silence is not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let lost = wires[0].lost(peers[0]).unwrap();
        assert!(!lost.ended && lost.why.contains("has been silent for 300 ms"), "{}", lost.why);
    });
}

#[test]
fn a_forked_child_leaves_the_worker_alone() {
    with_ucx(|make| {
        let (wires, peers) = contract::pair(make);
        let (mut got, tag) = ([0; 5], contract::tag(1));
        let request = contract::send(&wires[0], peers[0], tag, b"hello");
        assert!(contract::wait(&wires[0], &request).is_ok());
        // SAFETY: the child calls functions that refuse their work, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let moved = wires.iter().any(|wire| wire.progress());
            wires[0].notify(peers[0], 1, b"from the child");
            wires[0].close(peers[0], &[7; 16]);
            drop(wires);
            // SAFETY: the call does not return.
            unsafe { libc::_exit(i32::from(moved)) };
        }
        let mut status = 0;
        // SAFETY: the call writes the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        let request = contract::receive(&wires[1], peers[1], tag, &mut got);
        assert_eq!((contract::wait(&wires[1], &request), &got), (Ok(5), b"hello"));
        assert!(wires[1].news().0.is_empty());
    });
}

#[test]
fn an_address_of_another_wire_is_refused_with_the_reason() {
    with_ucx(|make| {
        let wire = make();
        let peer = wire.meet(&Contact { id: [3; 16], address: b"no address of UCX".to_vec() }, &[7; 16]);
        let mut got = [0; 5];
        let request = contract::receive(&wire, peer, contract::tag(1), &mut got);
        let failed = contract::wait(&wire, &request).unwrap_err();
        assert!(matches!(&failed, Broken::Lost(lost) if lost.why.contains("DM_WIRE")), "{failed:?}");
    });
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// Reads lines until one is a contact.
fn read_contact(lines: impl BufRead) -> Contact {
    let lines = lines.lines().map_while(std::result::Result::ok);
    let line = lines.filter_map(|line| line.split_once("contact ").map(|(_, rest)| rest.to_owned())).next().unwrap();
    let (id, address) = line.split_once(' ').unwrap();
    Contact { id: unhex(id).try_into().unwrap(), address: unhex(address) }
}

/// The other process of the next test, which kills it.
#[test]
#[ignore = "the next test starts it"]
fn the_other_process() {
    let wire = open(LONG, || ()).unwrap();
    let me = wire.contact();
    println!("contact {} {}", hex(&me.id), hex(&me.address));
    let peer = wire.meet(&read_contact(std::io::stdin().lock()), &[7; 16]);
    wire.notify(peer, 1, b"ready");
    std::thread::sleep(LONG);
}

#[test]
fn a_killed_process_is_lost_at_once() {
    with_ucx(|make| {
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["wire::ucx::tests::the_other_process", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (wire, mut input) = (make(), other.stdin.take().unwrap());
        let me = wire.contact();
        writeln!(input, "contact {} {}", hex(&me.id), hex(&me.address)).unwrap();
        let peer = wire.meet(&read_contact(BufReader::new(other.stdout.take().unwrap())), &[7; 16]);
        let end = Instant::now() + LONG;
        while wire.news().0.is_empty() {
            assert!(Instant::now() < end, "no notice comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut got = vec![0; 5];
        let request = contract::receive(&wire, peer, contract::tag(1), &mut got);
        let killed = Instant::now();
        other.kill().unwrap();
        other.wait().unwrap();
        let failed = contract::wait(&wire, &request).unwrap_err();
        let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
        println!("lost after {:?}: {}", killed.elapsed(), lost.why);
        assert!(lost.ended && lost.why.contains(&format!("process {}", other.id())), "{lost:?}");
        // The silence would be noticed after 5 s.
        assert!(killed.elapsed() < Duration::from_secs(4), "{:?}", killed.elapsed());
    });
}
