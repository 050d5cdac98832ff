//! Tests with a wire in another process.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

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

/// Starts this program again with one of its ignored tests.
fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("wire::tcp::tests::processes::{test}"), "--ignored", "--nocapture"]);
    command
}

/// Starts another process that plays the ignored test `test`. Returns its contact, and what it
/// prints afterwards.
fn start(wire: &Arc<Tcp>, test: &str) -> (Child, Contact, Lines<BufReader<ChildStdout>>) {
    let mut command = again(test);
    command.env(PARENT, to_text(&wire.contact())).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let contact = lines.find_map(|line| line.unwrap().strip_prefix("contact ").map(from_text)).unwrap();
    (child, contact, lines)
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
    let (mut child, contact, _lines) = start(&wire, "peer");
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
    wire.close(peer, &TOKEN);
    let again = wire.meet(&contact, &TOKEN);
    let failed = wait(&wire, &receive(&wire, again, tag(2), &mut long)).unwrap_err();
    let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
    assert!(lost.ended && lost.why.contains("refuses connections"), "{lost:?}");
}

/// Sets how many files this process may have open, and returns how many it could have before.
fn limit_files(count: libc::rlim_t) -> libc::rlim_t {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes and reads the limits.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits), 0);
        let before = std::mem::replace(&mut limits.rlim_cur, count);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits), 0);
        before
    }
}

/// Lets this process open no more files. Returns how many it could have open before.
fn close_files() -> libc::rlim_t {
    let next = std::fs::File::open("/dev/null").unwrap();
    limit_files(std::os::fd::AsRawFd::as_raw_fd(&next) as libc::rlim_t)
}

/// The process that the next test starts. This process can open no more files when it makes its
/// first connection to a peer.
#[test]
#[ignore = "the next test starts it"]
fn short_of_files() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let wire = wire();
    let peer = wire.meet(&from_text(parent.to_str().unwrap()), &TOKEN);
    let before = close_files();
    println!("\ncontact {}", to_text(&wire.contact()));
    let request = send(&wire, peer, tag(0), b"hello");
    until("the try does not fail", || wire.trouble(peer).is_some() || wire.lost(peer).is_some());
    assert_eq!(wire.lost(peer), None);
    let why = wire.trouble(peer).unwrap();
    assert!(why.contains("connecting to ") && why.contains("raise `ulimit -n`"), "{why}");
    limit_files(before);
    assert_eq!((wait(&wire, &request), wire.trouble(peer)), (Ok(5), None));
    until("the message does not arrive", || wire.has_all_arrived());
}

#[test]
fn a_process_that_can_open_no_more_files_for_a_moment_loses_nobody() {
    let wire = wire();
    let (mut child, contact, _lines) = start(&wire, "short_of_files");
    let peer = wire.meet(&contact, &TOKEN);
    let mut got = [0; 5];
    let request = receive(&wire, peer, tag(0), &mut got);
    assert_eq!((wait(&wire, &request), &got), (Ok(5), b"hello"));
    assert!(child.wait().unwrap().success());
}

/// The process that the next test starts. This process can open no more files, until it reads a
/// line.
#[test]
#[ignore = "the next test starts it"]
fn full_peer() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let wire = wire();
    let peer = wire.meet(&from_text(parent.to_str().unwrap()), &TOKEN);
    let mut got = [0; 5];
    let request = receive(&wire, peer, tag(0), &mut got);
    let before = close_files();
    println!("\ncontact {}", to_text(&wire.contact()));
    until("a connection waits", || wire.trouble(peer).is_some());
    println!("\ntrouble {}", wire.trouble(peer).unwrap());
    std::io::stdin().read_line(&mut String::new()).unwrap();
    limit_files(before);
    assert_eq!((wait(&wire, &request), &got), (Ok(5), b"hello"));
}

#[test]
fn a_process_that_can_open_no_more_files_says_so_to_those_that_connect() {
    let wire = wire();
    let (mut child, contact, mut lines) = start(&wire, "full_peer");
    let peer = wire.meet(&contact, &TOKEN);
    let request = send(&wire, peer, tag(0), b"hello");
    let there = lines.find_map(|line| line.unwrap().strip_prefix("trouble ").map(str::to_owned)).unwrap();
    assert!(there.starts_with("this process accepts no connection: ") && there.contains("`ulimit -n`"), "{there}");
    until("the peer does not say why", || wire.trouble(peer).is_some());
    let here = wire.trouble(peer).unwrap();
    assert!(here.contains("has reached its limit of open files: raise `ulimit -n` there"), "{here}");
    // The connection is made once the peer can open a file.
    drop(child.stdin.take());
    assert_eq!((wait(&wire, &request), wire.trouble(peer)), (Ok(5), None));
    assert!(child.wait().unwrap().success());
}

#[test]
fn an_idle_connection_does_not_hold_the_last_descriptor_of_a_process() {
    let wire = wire();
    let (mut child, contact, mut lines) = start(&wire, "full_peer");
    let peer = wire.meet(&contact, &TOKEN);
    // This connection says nothing, and takes the one descriptor that is left for answers.
    let address = crate::wire::address::parse(&contact.address, 0).unwrap();
    let (_idle, since) = (std::net::TcpStream::connect(address).unwrap(), Instant::now());
    assert!(lines.any(|line| line.unwrap().starts_with("trouble ")));
    let request = send(&wire, peer, tag(0), b"hello");
    until("the peer does not answer", || wire.trouble(peer).is_some() || wire.connected(peer));
    // A process with files gives an idle connection 10 s.
    assert!(since.elapsed() < Duration::from_secs(6), "{:?}", since.elapsed());
    drop(child.stdin.take());
    assert_eq!((wait(&wire, &request), wire.trouble(peer)), (Ok(5), None));
    assert!(child.wait().unwrap().success());
}

/// The process that the test after this one starts. This process can open no more files, and a
/// connection that it cannot accept waits at its listener.
#[test]
#[ignore = "the next test starts it"]
fn without_files() {
    let (wires, peers) = pair();
    let turn = |at: u64| {
        let mut got = [0; 5];
        let answer = receive(&wires[1], peers[1], tag(at), &mut got);
        let request = send(&wires[0], peers[0], tag(at), b"hello");
        let until = Instant::now() + LONG;
        let mut is_over = false;
        while !is_over {
            assert!(Instant::now() < until, "message {at} does not come");
            let seen = wires[1].moved().value();
            is_over = wires[1].test(&answer).unwrap().is_some();
            if !is_over {
                // The wire's thread moves the messages, because this one sleeps on a word.
                let watch = crate::event::Watch { event: wires[1].moved(), seen };
                wires[1].sleep(&[watch], Duration::from_secs(1));
            }
        }
        assert_eq!(wait(&wires[0], &request), Ok(5));
    };
    turn(0);
    let stranger = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let next = std::fs::File::open("/dev/null").unwrap();
    let limit = libc::rlimit { rlim_cur: std::os::fd::AsRawFd::as_raw_fd(&next) as libc::rlim_t, rlim_max: 4096 };
    drop(next);
    // SAFETY: the kernel reads the limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let address = crate::wire::address::parse(&wires[1].contact().address, 0).unwrap();
    stranger.connect(&address.into()).unwrap();
    let since = Instant::now();
    (1..=100).for_each(turn);
    println!("\ntook {}", since.elapsed().as_millis());
}

#[test]
fn a_process_that_can_open_no_more_files_still_serves_its_connections() {
    let output = again("without_files").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let took = text.lines().find_map(|line| line.strip_prefix("took ")).unwrap_or_else(|| panic!("{text}"));
    // With a pause of 50 ms before each message, the messages would take 5 s.
    assert!(took.parse::<u64>().unwrap() < 4000, "{took} ms");
}
