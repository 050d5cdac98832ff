//! Tests with processes that do not keep to the protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use proptest::prelude::*;

use super::*;
use crate::wire::Contact;
use crate::wire::address;
use crate::wire::tcp::frame::{HEADER, Header, Kind};
use crate::wire::tcp::hello::{self, Answer, HELLO, Hello, PROOF, Side};
use crate::wire::tcp::remote::{COST, CREDIT};

fn address_of(wire: &Arc<Tcp>) -> SocketAddr {
    address::parse(&wire.contact().address, 0).unwrap()
}

/// Connects to a wire as the process with that number. Returns the connection and the hello that
/// was sent.
fn greet(wire: &Arc<Tcp>, id: [u8; 16]) -> (TcpStream, [u8; HELLO]) {
    let mut stream = TcpStream::connect(address_of(wire)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let to = wire.contact().id;
    let hello =
        Hello { answer: Answer::Yes, is_secret: false, from: id, to, nonce: [1; 16], token: hello::name(&TOKEN) };
    let first = hello.to_bytes();
    stream.write_all(&first).unwrap();
    (stream, first)
}

/// A process that the test plays itself. The process has named a token that the wire knows, and
/// has not proved it yet.
struct Unproved {
    /// The connection.
    stream: TcpStream,
    /// The wire's number for the process.
    peer: Peer,
    /// The proof that is still to be sent.
    proof: [u8; PROOF],
}

impl Unproved {
    fn connect(wire: &Arc<Tcp>) -> Unproved {
        let id = crate::token::random_token().unwrap();
        let peer = wire.meet(&Contact { id, address: vec![] }, &TOKEN);
        Unproved::connect_as(wire, id, peer)
    }

    /// Connects as the process with that id, which the wire has met.
    fn connect_as(wire: &Arc<Tcp>, id: [u8; 16], peer: Peer) -> Unproved {
        let (stream, first) = greet(wire, id);
        Unproved::answered(stream, &first, peer)
    }

    /// Reads the wire's answer to a hello.
    fn answered(mut stream: TcpStream, first: &[u8; HELLO], peer: Peer) -> Unproved {
        let mut answer = [0; HELLO + PROOF];
        stream.read_exact(&mut answer).unwrap();
        let (second, proof) = answer.split_at(HELLO);
        assert!(hello::is_proof(&TOKEN, Side::Accepts, first, second, proof));
        Unproved { stream, peer, proof: hello::prove(&TOKEN, Side::Connects, first, second) }
    }

    fn prove(mut self, wire: &Tcp) -> (TcpStream, Peer) {
        self.stream.write_all(&self.proof).unwrap();
        until("the connection is not taken", || wire.0.lock().links[&self.peer.0].connection.is_some());
        (self.stream, self.peer)
    }
}

/// A process that the test plays itself, after both sides have proved themselves.
fn raw_peer(wire: &Arc<Tcp>) -> (TcpStream, Peer) {
    Unproved::connect(wire).prove(wire)
}

/// Checks that a wire still serves another one.
fn still_serves(wire: &Arc<Tcp>) {
    let other = self::wire();
    let peers = introduce([wire, &other]);
    let mut got = [0; 5];
    let request = receive(wire, peers[0], tag(1), &mut got);
    let sending = send(&other, peers[1], tag(1), b"works");
    assert_eq!((wait(&other, &sending), wait(wire, &request)), (Ok(5), Ok(5)));
    assert_eq!(&got, b"works");
    wire.close(peers[0], &TOKEN);
}

fn lost(wire: &Arc<Tcp>, peer: Peer) -> Lost {
    until("the peer is not lost", || {
        wire.progress();
        wire.lost(peer).is_some()
    });
    wire.lost(peer).unwrap()
}

/// A wire that loses a host after that many milliseconds of silence.
fn wire_with_silence(millis: u64) -> Arc<Tcp> {
    Tcp::open(Options { silence: Duration::from_millis(millis), ..options() }, || ()).unwrap()
}

/// How many messages of [`EAGER_BYTES`] a wire sends before the peer has taken any. The kernels
/// have no room for all of them.
const MANY: u64 = (CREDIT / (EAGER_BYTES + COST)) as u64;

/// Sends [`MANY`] messages, for which the kernels have no room.
fn send_many(wire: &Arc<Tcp>, peer: Peer, data: &[u8]) -> Vec<Request> {
    (0..MANY).map(|at| send(wire, peer, tag(at), data)).collect()
}

#[test]
fn a_peer_that_reads_nothing_is_alive_while_its_host_answers() {
    let wire = wire_with_silence(2000);
    let (mut stream, peer) = raw_peer(&wire);
    // The kernel of a peer sends these probes, also while its process is stopped.
    let probes = socket2::TcpKeepalive::new().with_time(Duration::from_secs(1)).with_interval(Duration::from_secs(1));
    socket2::SockRef::from(&stream).set_tcp_keepalive(&probes).unwrap();
    let data = vec![1; EAGER_BYTES];
    let requests = send_many(&wire, peer, &data);
    let until = Instant::now() + Duration::from_millis(4500);
    while Instant::now() < until {
        assert_eq!(wire.lost(peer), None);
        std::thread::sleep(Duration::from_millis(10));
    }
    // All messages come once the peer reads.
    let mut got = vec![0; MANY as usize * (HEADER + EAGER_BYTES)];
    stream.read_exact(&mut got).unwrap();
    requests.iter().for_each(|request| assert_eq!(wait(&wire, request), Ok(EAGER_BYTES)));
}

#[test]
fn a_host_that_answers_too_seldom_is_lost_also_where_it_has_no_room() {
    let wire = wire_with_silence(600);
    let (stream, peer) = raw_peer(&wire);
    let data = vec![1; EAGER_BYTES];
    // The peer's kernel sends no probes. This kernel's probes for room, which are answered, are
    // soon more than 600 ms apart.
    let requests = send_many(&wire, peer, &data);
    let loss = lost(&wire, peer);
    assert!(!loss.ended && loss.why.contains("has fallen silent: nothing came for"), "{loss:?}");
    requests.into_iter().for_each(|request| wire.cancel(request));
    drop(stream);
    still_serves(&wire);
}

#[test]
fn a_flood_of_connections_stops_nothing() {
    let wire = wire();
    let address = address_of(&wire);
    let flood: Vec<TcpStream> = (0..500).filter_map(|_| TcpStream::connect(address).ok()).collect();
    still_serves(&wire);
    assert!(flood.len() > 400);
}

#[test]
fn a_flood_does_not_displace_those_that_are_about_to_prove_themselves() {
    let wire = wire();
    let many: Vec<Unproved> = (0..128).map(|_| Unproved::connect(&wire)).collect();
    let flood: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(address_of(&wire)).unwrap()).collect();
    // The wire has looked at the flood once it has closed the last of these connections.
    flood.last().unwrap().set_read_timeout(Some(LONG)).unwrap();
    assert!(matches!(flood.last().unwrap().read(&mut [0]), Ok(0) | Err(_)));
    let proved: Vec<(TcpStream, Peer)> = many.into_iter().map(|one| one.prove(&wire)).collect();
    assert_eq!((proved.len(), wire.0.lock().connected.len()), (128, 128));
    still_serves(&wire);
}

#[test]
fn a_flood_does_not_displace_those_that_have_said_who_they_are() {
    let wire = wire();
    let id = crate::token::random_token().unwrap();
    let peer = wire.meet(&Contact { id, address: vec![] }, &TOKEN);
    // While the test holds the lock, the wire's thread accepts nothing.
    let held = wire.0.lock();
    std::thread::sleep(Duration::from_millis(300));
    let (stream, first) = greet(&wire, id);
    let flood: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address_of(&wire)).unwrap()).collect();
    drop(held);
    let (_stream, _) = Unproved::answered(stream, &first, peer).prove(&wire);
    assert_eq!(flood.len(), 200);
}

/// The other side gives up a connection on which it waits too long for the proof of a process that
/// is stopped.
#[test]
fn a_process_that_was_stopped_while_it_connected_tries_again() {
    let tries = Duration::from_secs(3);
    let wire = Tcp::open(Options { tries, ..options() }, || ()).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (id, address) = ([9; 16], address::to_bytes(&listener.local_addr().unwrap()));
    let peer = wire.meet(&Contact { id, address }, &TOKEN);
    let request = send(&wire, peer, tag(0), b"hello");
    listener.set_nonblocking(true).unwrap();
    let accept = || {
        let mut accepted = None;
        until("the process does not connect", || {
            assert_eq!(wire.lost(peer), None);
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let mut stream = accepted.unwrap().0;
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut first = [0; HELLO];
        stream.read_exact(&mut first).unwrap();
        let hello = Hello { from: id, to: wire.contact().id, ..Hello::parse(&first).unwrap() };
        let second = hello.to_bytes();
        let answer = [&second[..], &hello::prove(&TOKEN, Side::Accepts, &first, &second)].concat();
        (stream, answer)
    };
    let (mut stream, answer) = accept();
    // While the test holds the lock, the wire's thread stands still, as if it were stopped.
    let held = wire.0.lock();
    std::thread::sleep(Duration::from_millis(300));
    stream.write_all(&answer).unwrap();
    drop(stream);
    std::thread::sleep(tries + Duration::from_millis(300));
    drop(held);
    let (mut stream, answer) = accept();
    stream.write_all(&answer).unwrap();
    let mut proof = [0; PROOF];
    stream.read_exact(&mut proof).unwrap();
    assert_eq!((wait(&wire, &request), wire.lost(peer)), (Ok(5), None));
}

/// Whether somebody waits at a listener that does not block.
fn is_called(listener: &TcpListener) -> bool {
    match listener.accept() {
        Ok(_) => true,
        Err(reason) => {
            assert_eq!(reason.kind(), std::io::ErrorKind::WouldBlock);
            false
        }
    }
}

/// If both processes went on, each of them could take another one of the two connections.
#[test]
fn a_process_leaves_the_connection_to_the_one_with_the_smaller_id() {
    let wire = wire();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = address::to_bytes(&listener.local_addr().unwrap());
    // The first process gives up before it proves itself, and the second one goes on.
    let id = [0; 16];
    let peer = wire.meet(&Contact { id, address }, &TOKEN);
    let first = Unproved::connect_as(&wire, id, peer);
    // From now on the wire has something to send, and would connect by itself.
    let request = send(&wire, peer, tag(0), b"hello");
    // It would try every 50 ms.
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        assert!(!is_called(&listener), "the wire connects although the other process is about to prove itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(first);
    until("the wire does not connect after the other process has given up", || is_called(&listener));
    let (_stream, _) = Unproved::connect_as(&wire, id, peer).prove(&wire);
    assert_eq!((wait(&wire, &request), wire.lost(peer)), (Ok(5), None));
}

/// Plays a process that comes within `tries`, and takes longer than that to prove itself. Returns
/// whether this thread itself was too late, so that the process was lost before it came.
fn comes_too_late(tries: Duration) -> bool {
    let wire = Tcp::open(Options { tries, ..options() }, || ()).unwrap();
    // The process accepts no connection, so this one tries again and again.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (id, address) = ([0; 16], address::to_bytes(&listener.local_addr().unwrap()));
    let peer = wire.meet(&Contact { id, address }, &TOKEN);
    let request = send(&wire, peer, tag(0), b"hello");
    until("the process does not connect", || is_called(&listener));
    if wire.lost(peer).is_some() {
        return true;
    }
    let unproved = Unproved::connect_as(&wire, id, peer);
    if wire.lost(peer).is_some() {
        return true;
    }
    let end = Instant::now() + 2 * tries;
    while Instant::now() < end {
        assert_eq!(wire.lost(peer), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (_stream, _) = unproved.prove(&wire);
    assert_eq!((wait(&wire, &request), wire.lost(peer)), (Ok(5), None));
    false
}

#[test]
fn a_process_that_is_about_to_prove_itself_is_not_lost_for_the_tries_before() {
    let was_in_time = [300, 1200, 4800].iter().any(|millis| !comes_too_late(Duration::from_millis(*millis)));
    assert!(was_in_time, "the process is lost before it comes");
}

/// The process was stopped when the proof came, and for longer than the proof may take.
#[test]
fn a_proof_that_came_while_this_process_was_stopped_is_taken() {
    // The wire does not count a pause, except for its first second.
    let patience = Duration::from_secs(3);
    let wire = Tcp::open(Options { patience, ..options() }, || ()).unwrap();
    let mut unproved = Unproved::connect(&wire);
    // While the test holds the lock, the wire's thread stands still, as if it were stopped.
    let held = wire.0.lock();
    std::thread::sleep(Duration::from_millis(300));
    unproved.stream.write_all(&unproved.proof).unwrap();
    std::thread::sleep(patience + Duration::from_millis(300));
    drop(held);
    until("the connection is not taken", || {
        unproved.stream.set_nonblocking(true).unwrap();
        let read = unproved.stream.read(&mut [0]);
        assert!(read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "the connection is closed");
        wire.0.lock().links[&unproved.peer.0].connection.is_some()
    });
}

#[test]
fn a_process_that_proves_itself_after_the_last_use_here_is_connected() {
    let wire = wire();
    let id = [0; 16];
    let contact = Contact { id, address: vec![] };
    let first = wire.meet(&contact, &TOKEN);
    let unproved = Unproved::connect_as(&wire, id, first);
    wire.close(first, &TOKEN);
    // The other process knows the first token alone.
    assert_eq!(wire.meet(&contact, &[2; 16]), first);
    let (_stream, peer) = unproved.prove(&wire);
    assert_eq!(wire.lost(peer), None);
}

#[test]
fn any_token_that_both_processes_know_connects_them() {
    let wires = [wire(), wire()];
    let there = [[1; 16], [2; 16], [3; 16]].map(|token| wires[0].meet(&wires[1].contact(), &token))[0];
    let back = wires[1].meet(&wires[0].contact(), &[1; 16]);
    let mut got = [0; 5];
    let request = send(&wires[0], there, tag(1), b"hello");
    let answer = receive(&wires[1], back, tag(1), &mut got);
    assert_eq!((wait(&wires[0], &request), wait(&wires[1], &answer)), (Ok(5), Ok(5)));
}

#[test]
fn frames_that_lie_end_their_connection_alone() {
    let wire = wire();
    let header = |kind, extra| Header { tag: tag(3), ..Header::plain(kind, extra) };
    let lies: [(&str, Vec<u8>); 7] = [
        ("unknown kind", vec![99; HEADER]),
        ("more than was used", header(Kind::Credit, 1 << 40).to_bytes().to_vec()),
        ("not asked for", header(Kind::Data, 5).to_bytes().to_vec()),
        ("no question", header(Kind::TooLong, 5).to_bytes().to_vec()),
        ("no question", header(Kind::Closed, 0).to_bytes().to_vec()),
        ("no question", header(Kind::Open, 0).to_bytes().to_vec()),
        ("with 131329 bytes", Header { bytes: EAGER_BYTES + 1, ..header(Kind::Eager, 0) }.to_bytes().to_vec()),
    ];
    for (why, bytes) in lies {
        let (mut stream, peer) = raw_peer(&wire);
        stream.write_all(&bytes).unwrap();
        let loss = lost(&wire, peer);
        assert!(!loss.ended && loss.why.contains(why), "{why}: {loss:?}");
        wire.close(peer, &TOKEN);
    }
    // The peer sends more than the credit allows, which the wire must not keep.
    let (mut stream, peer) = raw_peer(&wire);
    let frame: Vec<u8> = Header { bytes: EAGER_BYTES, ..header(Kind::Eager, 0) }
        .to_bytes()
        .into_iter()
        .chain([0; EAGER_BYTES])
        .collect();
    for index in 0..200_u64 {
        let mut frame = frame.clone();
        frame[32..40].copy_from_slice(&index.to_le_bytes());
        if stream.write_all(&frame).is_err() {
            break;
        }
    }
    assert!(lost(&wire, peer).why.contains("nobody asked for"));
    still_serves(&wire);
}

#[test]
fn garbage_harms_nothing() {
    let wire = wire();
    let address = address_of(&wire);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    // Before the proof, the test sends random bytes, hellos that are cut off, and hellos with one
    // byte changed.
    let strategy = (proptest::collection::vec(any::<u8>(), 0..300), 0..3, any::<prop::sample::Index>());
    runner
        .run(&strategy, |(bytes, kind, at)| {
            let hello = Hello {
                answer: Answer::Yes,
                is_secret: false,
                from: [3; 16],
                to: wire.contact().id,
                nonce: [1; 16],
                token: [9; 32],
            };
            let mut whole = hello.to_bytes();
            let sent = match kind {
                0 => bytes,
                1 => whole[..at.index(HELLO)].to_vec(),
                _ => {
                    whole[at.index(HELLO)] ^= 0x41;
                    whole.to_vec()
                }
            };
            let _ = TcpStream::connect(address).unwrap().write_all(&sent);
            Ok(())
        })
        .unwrap();
    // After the proof, the test sends random frames.
    let kinds = 0_u8..14;
    let frame = (kinds, 0_u32..2000, 0_u64..3, 0_u64..4, prop_oneof![0_u64..3000, any::<u64>()]);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&proptest::collection::vec(frame, 1..20), |frames| {
            let (mut stream, peer) = raw_peer(&wire);
            let mut buffers = [[0_u8; 1000]; 3];
            let requests: Vec<Request> = buffers
                .iter_mut()
                .enumerate()
                .map(|(at, buffer)| receive(&wire, peer, tag(at as u64), buffer))
                .collect();
            for (kind, bytes, stream_of, index, extra) in frames {
                let mut raw = Header { tag: tag(stream_of), index, ..Header::plain(Kind::Notice, extra) }.to_bytes();
                raw[0] = kind;
                raw[4..8].copy_from_slice(&bytes.to_le_bytes());
                if stream.write_all(&raw).and_then(|()| stream.write_all(&vec![7; bytes as usize])).is_err() {
                    break;
                }
            }
            drop(stream);
            lost(&wire, peer);
            requests.into_iter().for_each(|request| wire.cancel(request));
            wire.close(peer, &TOKEN);
            wire.news();
            Ok(())
        })
        .unwrap();
    still_serves(&wire);
}
