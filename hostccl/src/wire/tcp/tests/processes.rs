//! Tests with a wire in another process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::wire::Contact;

/// The variable that has the contact of the process that started this one.
const PARENT: &str = "DM_TEST_WIRE";

fn to_text(contact: &Contact) -> String {
    contact.id.iter().chain(&contact.address).map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> Contact {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
    Contact { id: bytes[..16].try_into().unwrap(), address: bytes[16..].to_vec() }
}

/// Starts another process that plays `peer`, and returns its contact.
fn start(wire: &Tcp) -> (Child, Contact) {
    let name = "wire::tcp::tests::processes::peer";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(PARENT, to_text(&wire.contact()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let contact = lines.find_map(|line| line.unwrap().strip_prefix("contact ").map(from_text)).unwrap();
    (child, contact)
}

/// The other process of these tests: it sends one message, and then more than anybody takes.
#[test]
#[ignore = "other tests start it"]
fn peer() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let wire = wire();
    let peer = wire.meet(&from_text(parent.to_str().unwrap()), &TOKEN);
    println!("\ncontact {}", to_text(&wire.contact()));
    let long = pattern(1, 256 << 20);
    let ready = send(&wire, peer, tag(0), b"ready");
    wait(&wire, &ready).unwrap();
    // The parent kills this process in the middle of the long message.
    let _ = wait(&wire, &send(&wire, peer, tag(1), &long));
}

#[test]
fn a_killed_process_is_lost_at_once() {
    let wire = wire();
    let (mut child, contact) = start(&wire);
    let peer = wire.meet(&contact, &TOKEN);
    let mut ready = [0; 5];
    let request = receive(&wire, peer, tag(0), &mut ready);
    assert_eq!((wait(&wire, &request), &ready), (Ok(5), b"ready"));
    let mut long = vec![0; 256 << 20];
    let request = receive(&wire, peer, tag(1), &mut long);
    until("nothing comes", || {
        wire.progress();
        wire.0.lock().links[&peer.0].remote.posted.values().any(|receive| receive.got > 1 << 20)
    });
    child.kill().unwrap();
    let since = Instant::now();
    let failed = wait(&wire, &request).unwrap_err();
    let took = since.elapsed();
    assert!(matches!(&failed, Broken::Lost(Lost { ended: true, .. })), "{failed:?}");
    child.wait().unwrap();
    // It takes 100 ms at most on a machine that is not busy.
    assert!(took < Duration::from_secs(2), "{took:?}");
    // A new connection to its address is refused.
    wire.close(peer);
    let again = wire.meet(&contact, &TOKEN);
    let failed = wait(&wire, &receive(&wire, again, tag(2), &mut long)).unwrap_err();
    let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
    assert!(lost.ended && lost.why.contains("refuses connections"), "{lost:?}");
}
