//! Tests: nothing is left of cancelled messages and of communicators that have ended.

use super::*;

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

/// Waits for a request of one of two wires. Both wires make progress meanwhile.
fn wait_on_both(wires: &[Arc<Tcp>; 2], side: usize, request: &Request) -> usize {
    let until = Instant::now() + LONG;
    loop {
        wires.iter().for_each(|wire| _ = wire.progress());
        if let Some(bytes) = wires[side].test(request).unwrap() {
            return bytes;
        }
        assert!(Instant::now() < until, "a request does not end");
    }
}

/// How many entries the tables of a wire have.
fn entries(wire: &Tcp) -> Vec<usize> {
    let state = wire.0.lock();
    let mut counts = vec![state.links.len(), state.numbers.len(), state.ledger.open.len(), state.ledger.ended.len()];
    for link in state.links.values() {
        counts.extend(link.remote.entries());
        counts.extend([link.remote.kept, link.remote.tokens.len()]);
    }
    counts
}

#[test]
fn the_tables_do_not_grow_with_the_communicators() {
    let (wires, peers) = pair();
    let long = pattern(1, 200_000);
    let mut first = Vec::new();
    for comm in 0..300_u64 {
        let token = comm.to_le_bytes().repeat(2).try_into().unwrap();
        wires[0].meet(&wires[1].contact(), &token);
        wires[1].meet(&wires[0].contact(), &token);
        let [to, from, unused] = [(0, 1), (1, 0), (2, 1)].map(|(from, to)| Tag { comm, stream: 3, from, to });
        let (mut got, mut back, mut never) = (vec![0; long.len()], [0; 5], vec![0; long.len()]);
        let requests = [
            receive(&wires[1], peers[1], to, &mut got),
            send(&wires[0], peers[0], to, &long),
            receive(&wires[0], peers[0], from, &mut back),
            send(&wires[1], peers[1], from, b"short"),
        ];
        requests.iter().zip([1, 0, 0, 1]).for_each(|(request, side)| _ = wait_on_both(&wires, side, request));
        // A message that was asked for and never sent, one that was cancelled, and one that nobody
        // takes.
        let request = receive(&wires[1], peers[1], unused, &mut never);
        wires[1].progress();
        wires[1].cancel(request);
        let request = send(&wires[0], peers[0], Tag { stream: 4, ..to }, &long);
        wires[0].progress();
        wires[0].cancel(request);
        let request = send(&wires[0], peers[0], Tag { stream: 5, ..to }, b"nobody takes it");
        wait_on_both(&wires, 0, &request);
        // A question of a receiver that nobody answers.
        let question = Tag { from: to.from | Tag::QUESTION, stream: 6, ..to };
        let request = send(&wires[0], peers[0], question, b"how many?");
        wait_on_both(&wires, 0, &request);
        // In every other round the receiver ends first.
        for side in if comm % 2 == 0 { [0, 1] } else { [1, 0] } {
            for rank in if side == 0 { vec![0, 2] } else { vec![1] } {
                wires[side].retire(peers[side], comm, rank);
            }
            wires[side].close(peers[side], &token);
        }
        if comm == 0 || comm == 299 {
            // Once a message of another communicator has come, everything that was on its way has
            // come, too.
            let other = Tag { comm: 1000, ..tag(0) };
            for (one, two) in [(0, 1), (1, 0)] {
                let answer = receive(&wires[two], peers[two], other, &mut back);
                let request = send(&wires[one], peers[one], other, b"other");
                wait_on_both(&wires, two, &answer);
                wait_on_both(&wires, one, &request);
            }
            let counts = wires.each_ref().map(|wire| entries(wire));
            if comm == 0 { first = counts.to_vec() } else { assert_eq!(counts.to_vec(), first) }
        }
    }
    // Three ranks have left each communicator, two of them on the first side.
    assert_eq!(wires.each_ref().map(|wire| wire.0.lock().ledger.retired.len()), [600, 300]);
}

#[test]
fn a_wire_remembers_the_last_ranks_that_have_left() {
    let (wires, peers) = pair();
    (0..10_000).for_each(|comm| wires[0].retire(peers[0], comm, 0));
    assert_eq!(wires[0].0.lock().ledger.retired.len(), 4096);
}

#[test]
fn a_rank_that_has_left_does_not_take_messages_along_that_it_sent_within_its_process() {
    let wire = wire();
    let me = wire.meet(&wire.contact(), &TOKEN);
    let request = send(&wire, me, tag(1), b"first");
    assert_eq!(wait(&wire, &request), Ok(5));
    // The sender is rank 0.
    wire.retire(me, 5, 0);
    let mut got = [0; 5];
    let request = receive(&wire, me, tag(1), &mut got);
    assert_eq!((wait(&wire, &request), &got), (Ok(5), b"first"));
    // Nobody takes a message for a rank that has left, so it is not kept.
    wire.retire(me, 5, 1);
    let request = send(&wire, me, tag(1), b"later");
    assert_eq!(wait(&wire, &request), Ok(5));
    assert_eq!(wire.waiting(me, 5), []);
}
