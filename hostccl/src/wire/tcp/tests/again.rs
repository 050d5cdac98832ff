//! Tests of processes that are met again after they were lost.

use super::*;

/// The tokens of the communicators in these tests.
const TOKENS: [[u8; 16]; 2] = [[1; 16], [2; 16]];

/// Sends a message from the first wire to the second one.
fn exchange(wires: &[Arc<Tcp>; 2], peers: [Peer; 2]) {
    let mut got = [0; 5];
    let answer = receive(&wires[1], peers[1], tag(1), &mut got);
    let request = send(&wires[0], peers[0], tag(1), b"hello");
    assert_eq!((wait(&wires[0], &request), wait(&wires[1], &answer)), (Ok(5), Ok(5)));
    assert_eq!(&got, b"hello");
}

/// Two wires that have lost each other, as after a partition. A communicator still uses the lost
/// peers.
fn parted() -> ([Arc<Tcp>; 2], [Peer; 2]) {
    let wires = [wire(), wire()];
    let peers = [0, 1].map(|at| wires[at].meet(&wires[1 - at].contact(), &TOKENS[0]));
    exchange(&wires, peers);
    for (wire, peer) in wires.iter().zip(peers) {
        wire.0.lock().lose(peer.0, Lost { ended: false, why: "it has fallen silent".to_owned() });
    }
    (wires, peers)
}

#[test]
fn a_peer_that_was_lost_is_met_again_although_old_uses_are_left() {
    let (wires, old) = parted();
    // The second process meets the first one after the first one has begun to connect.
    let there = wires[0].meet(&wires[1].contact(), &TOKENS[1]);
    let request = send(&wires[0], there, tag(1), b"hello");
    std::thread::sleep(Duration::from_millis(100));
    let back = wires[1].meet(&wires[0].contact(), &TOKENS[1]);
    let mut got = [0; 5];
    let answer = receive(&wires[1], back, tag(1), &mut got);
    assert_eq!((wait(&wires[0], &request), wait(&wires[1], &answer)), (Ok(5), Ok(5)));
    // A further communicator uses the same connection.
    assert_eq!(wires[0].meet(&wires[1].contact(), &[3; 16]), there);
    wires[0].close(there, &[3; 16]);
    // The loss stays for the old uses, whose end does not concern the new one.
    for (wire, peer) in wires.iter().zip(old) {
        assert!(wire.lost(peer).is_some() && wire.test(&send(wire, peer, tag(2), b"old")).is_err());
        wire.close(peer, &TOKENS[0]);
    }
    exchange(&wires, [there, back]);
    for (wire, peer) in wires.iter().zip([there, back]) {
        wire.close(peer, &TOKENS[1]);
    }
    until("the peers stay", || wires.iter().all(|wire| wire.0.lock().links.is_empty()));
    assert!(wires.iter().all(|wire| wire.0.lock().numbers.is_empty()));
}

#[test]
fn a_peer_is_lost_that_names_a_communicator_in_which_it_was_lost_there() {
    let wires = [wire(), wire()];
    let peers = [0, 1].map(|at| wires[at].meet(&wires[1 - at].contact(), &TOKENS[0]));
    wires[1].0.lock().lose(peers[1].0, Lost { ended: false, why: "it has fallen silent".to_owned() });
    let failed = wait(&wires[0], &send(&wires[0], peers[0], tag(1), b"hello")).unwrap_err();
    let Broken::Lost(lost) = failed else { panic!("{failed:?}") };
    assert!(lost.why.contains("has lost its connection to this process"), "{lost:?}");
}

#[test]
fn a_peer_that_has_closed_its_connection_is_met_again_before_anybody_has_read_that() {
    let wires = [wire(), wire()];
    let old = [0, 1].map(|at| wires[at].meet(&wires[1 - at].contact(), &TOKENS[0]));
    exchange(&wires, old);
    // The second wire's thread reads the end of the connection at its next tick at the latest.
    wires[0].0.lock().lose(old[0].0, Lost { ended: false, why: "it has fallen silent".to_owned() });
    let peers = [1, 0].map(|at| wires[at].meet(&wires[1 - at].contact(), &TOKENS[1]));
    exchange(&wires, [peers[1], peers[0]]);
}
