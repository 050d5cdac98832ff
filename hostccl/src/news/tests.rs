use super::*;
use crate::call_name::Name;
use crate::desk::Desk;
use crate::hosts_of_threads;
use crate::message::Side;
use crate::progress;
use crate::remote_message::RemoteMessage;
use crate::types::DataType;
use crate::wire::memory::Memory;

/// Longer than anything takes that happens at all, also on a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// Returns registered ends of a communicator and their wires.
fn registered(hosts: &[&[usize]]) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
    let (ends, wires) = hosts_of_threads::communicators(hosts);
    ends.iter().for_each(register);
    (ends, wires)
}

/// Waits until the end has failed, as a program that asks for the failure does. Returns the
/// failure.
fn failure(end: &Comm) -> Error {
    let began = Instant::now();
    loop {
        if let Err(error) = end.check_peers(None, &String::new) {
            return error;
        }
        assert!(began.elapsed() < LONG, "rank {} learns nothing", end.whole().0);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Receives one byte from `peer`. Returns the error.
fn receive(end: &Arc<Comm>, peer: usize) -> Result<u8> {
    let mut got = [0_u8];
    let side = Side::Recv(got.as_mut_ptr());
    // SAFETY: the buffer outlives the message.
    let mut message = unsafe { RemoteMessage::new(end.clone(), side, peer, 1, DataType::Uint8, Name::NONE)? };
    progress::run(&mut message)?;
    drop(message);
    Ok(got[0])
}

/// Sends one byte to `peer`.
fn send(end: &Arc<Comm>, peer: usize, byte: u8) -> Result<()> {
    let side = Side::Send(&raw const byte);
    // SAFETY: the byte outlives the message.
    let mut message = unsafe { RemoteMessage::new(end.clone(), side, peer, 1, DataType::Uint8, Name::NONE)? };
    progress::run(&mut message)
}

#[test]
fn a_failure_reaches_every_rank_with_its_code_ranks_and_text() {
    let (ends, _) = registered(&[&[0, 3], &[1], &[2]]);
    ends[3].fail_whole(ncclInvalidUsage, Blame::of([1, 3]), "these differ", "ncclReduce");
    for end in &ends {
        let error = failure(end);
        assert_eq!((error.code(), error.message()), (ncclInvalidUsage, "these differ"));
        assert_eq!(error.blame(), &Blame::of([1, 3]));
        assert_eq!(end.segment.header().failure.call().as_deref(), Some("ncclReduce"));
    }
}

#[test]
fn a_failure_is_passed_on_where_its_finder_has_no_connection() {
    let (ends, wires) = registered(&[&[0], &[1], &[2], &[3]]);
    wires[0].cut(2);
    wires[0].cut(3);
    wires[1].cut(3);
    ends[0].fail_whole(ncclRemoteError, Blame::of([0]), "a chain", "");
    for end in &ends[1..] {
        assert_eq!(failure(end).message(), "a chain");
    }
}

#[test]
fn a_failure_that_a_local_rank_wrote_before_it_died_is_told_by_another_rank_of_its_host() {
    let (ends, _) = registered(&[&[0, 1], &[2]]);
    ends[0].segment.header().fail(ncclRemoteError, &Blame::of_lost([0]), "last words", "");
    ends[1].tick();
    assert_eq!(failure(&ends[2]).message(), "last words");
}

#[test]
fn a_process_that_ends_is_named_by_every_rank_in_a_call_or_not() {
    let (ends, wires) = registered(&[&[0, 2], &[1], &[3, 4]]);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&ends[0], 1).unwrap_err());
        while !ends[0].seat_waits(0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        wires[1].die();
        let error = waiting.join().unwrap();
        assert_eq!((error.code(), error.lost()), (ncclRemoteError, Some(1)), "{}", error.message());
        assert!(error.message().contains("rank 1 has gone"), "{}", error.message());
        for rank in [2, 3, 4] {
            let error = failure(&ends[rank]);
            assert_eq!((error.code(), &error.blame().lost[..]), (ncclRemoteError, &[1][..]), "{}", error.message());
        }
    });
}

#[test]
fn one_dead_process_of_a_host_is_not_taken_for_the_host_and_its_host_tells_more() {
    let (ends, wires) = registered(&[&[0], &[1, 2]]);
    wires[1].die();
    // The other rank of its host finds the end a moment later, while rank 0 waits for such news.
    assert_eq!(ends[0].check_peers(None, &String::new), Ok(()));
    ends[2].fail_dead(&[0], "");
    let error = failure(&ends[0]);
    assert_eq!(error.blame().lost, [1]);
    assert!(error.message().contains("exited or was killed"), "{}", error.message());
}

#[test]
fn a_host_that_falls_silent_is_named_with_all_its_ranks() {
    let (ends, wires) = registered(&[&[0], &[1, 2, 3], &[4]]);
    // Only one of its processes had a connection.
    for rank in [1, 2, 3] {
        wires[0].cut(rank);
        wires[4].cut(rank);
    }
    wires[3].fall_silent(&[0]);
    for rank in [0, 4] {
        let error = failure(&ends[rank]);
        assert_eq!((error.code(), &error.blame().lost[..]), (ncclRemoteError, &[1, 2, 3][..]));
        assert!(error.message().contains("ranks 1, 2, 3: no answer"), "{}", error.message());
    }
}

#[test]
fn a_silent_process_on_a_host_that_answers_is_named_alone() {
    let (ends, wires) = registered(&[&[0], &[1, 2]]);
    wires[1].fall_silent(&[0]);
    // Rank 0 asks, and rank 2 answers.
    ends[0].check().unwrap();
    ends[2].check().unwrap();
    let error = failure(&ends[0]);
    assert_eq!(error.blame().lost, [1], "{}", error.message());
    assert_eq!(failure(&ends[2]).blame().lost, [1]);
}

#[test]
fn each_host_that_loses_a_process_is_asked_and_has_its_own_time() {
    // After the longer pause the time of the first host is over when the second host's begins.
    for pause in [Duration::ZERO, OTHERS_ANSWER] {
        let (ends, wires) = registered(&[&[0], &[1, 4], &[2, 3]]);
        wires[1].fall_silent(&[0]);
        ends[0].check().unwrap();
        std::thread::sleep(pause);
        wires[2].fall_silent(&[0]);
        let early = ends[0].check_peers(None, &String::new);
        // Rank 3 answers, rank 4 does not.
        ends[3].check().unwrap();
        let error = early.err().unwrap_or_else(|| failure(&ends[0]));
        // On a machine that stands still for a moment, the first host alone may be blamed.
        assert!([&[1, 4][..], &[1, 2, 4]].contains(&&error.blame().lost[..]), "{}", error.message());
    }
}

#[test]
fn a_silence_after_an_end_on_the_same_host_is_asked_about() {
    let (ends, wires) = registered(&[&[0], &[1, 2, 3]]);
    wires[1].die();
    ends[0].check().unwrap();
    wires[2].fall_silent(&[0]);
    ends[0].check().unwrap();
    ends[3].check().unwrap();
    let error = failure(&ends[0]);
    assert!(!error.blame().lost.contains(&3), "{}", error.message());
}

#[test]
fn both_sides_of_a_partition_know_of_it() {
    let (ends, wires) = registered(&[&[0], &[1], &[2], &[3]]);
    for (here, there) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
        wires[here].cut(there);
    }
    wires[0].fall_silent(&[3]);
    wires[3].fall_silent(&[0]);
    assert_eq!([0, 1].map(|rank| failure(&ends[rank]).lost()), [Some(3); 2]);
    assert_eq!([3, 2].map(|rank| failure(&ends[rank]).lost()), [Some(0); 2]);
}

#[test]
fn an_abort_names_its_rank_and_wakes_a_call_on_another_host_at_once() {
    let (ends, _) = registered(&[&[0], &[1], &[2]]);
    std::thread::scope(|scope| {
        let waiting = [0, 2].map(|rank| {
            let end = &ends[rank];
            scope.spawn(move || receive(end, 1).unwrap_err())
        });
        while [0, 2].iter().any(|rank| !ends[*rank].seat_waits(0)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        ends[1].abort();
        for waiting in waiting {
            let error = waiting.join().unwrap();
            assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[1][..]));
            assert!(error.message().contains("aborted its communicator"), "{}", error.message());
        }
    });
}

#[test]
fn a_rank_that_leaves_after_its_part_harms_nobody_and_later_calls_fail() {
    let (ends, _) = registered(&[&[0], &[1]]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            send(&ends[1], 0, 9).unwrap();
            ends[1].leave();
        });
        assert_eq!(receive(&ends[0], 1), Ok(9));
    });
    assert_eq!(ends[0].check_peers(None, &String::new), Ok(()));
    let error = receive(&ends[0], 1).unwrap_err();
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[1][..]));
    assert!(error.message().contains("rank 1 has destroyed its communicator"), "{}", error.message());
    assert!(error.blame().lost.is_empty());
}

#[test]
fn a_rank_that_left_without_a_connection_is_asked_also_when_it_has_freed_everything() {
    let (mut ends, wires) = registered(&[&[0], &[1]]);
    wires[1].cut(0);
    let left = ends.remove(1);
    left.leave();
    // The process has other communicators, and they keep its desk.
    let desk = Desk::of(&left.span.as_ref().unwrap().wire);
    drop(left);
    // Thousands of them end afterwards.
    (0..10_000).for_each(|comm| desk.note_left(1_000 + comm, 0));
    wires[1].heal(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receive(&ends[0], 1).unwrap_err());
        while !waiting.is_finished() {
            desk.take();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(waiting.join().unwrap().message().contains("has destroyed its communicator"));
    });
}

#[test]
fn an_end_that_has_left_does_not_count_as_live() {
    let (ends, _) = registered(&[&[0], &[1]]);
    let desk = Desk::of(&ends[0].span.as_ref().unwrap().wire);
    assert!(desk.has_live_members());
    // The end still exists, as that of another thread that is about to free it.
    ends[0].leave();
    assert!(!desk.has_live_members());
}

#[test]
fn the_rank_that_leaves_the_last_communicator_waits_until_everything_has_arrived() {
    const PAUSE: Duration = Duration::from_millis(100);
    let (ends, wires) = registered(&[&[0], &[1]]);
    wires[0].confirm(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(PAUSE);
            wires[0].confirm(true);
        });
        ends[0].leave();
        assert!(began.elapsed() >= PAUSE);
    });
}

#[test]
fn a_rank_that_leaves_a_failed_communicator_hardly_waits() {
    let (ends, wires) = registered(&[&[0, 1], &[2]]);
    // Another rank of the host has written the failure.
    ends[0].segment.header().fail(ncclRemoteError, &Blame::of_lost([2]), "no answer", "");
    wires[1].confirm(false);
    let began = Instant::now();
    ends[1].leave();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}, as long as a rank waits without a failure");
}

#[test]
fn a_process_that_leaves_and_then_ends_is_not_lost() {
    let (ends, wires) = registered(&[&[0], &[1], &[2]]);
    ends[1].leave();
    wires[1].die();
    let began = Instant::now();
    while began.elapsed() < 3 * OTHERS_TELL {
        assert_eq!(ends[0].check_peers(None, &String::new), Ok(()));
        ends[2].tick();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(ends[2].check(), Ok(()));
}

#[test]
fn a_failure_that_comes_before_the_join_is_over_is_kept() {
    let (ends, _) = hosts_of_threads::communicators(&[&[0], &[1]]);
    register(&ends[1]);
    ends[1].fail_whole(ncclRemoteError, Blame::of([1]), "too early", "");
    ends[0].check().unwrap();
    register(&ends[0]);
    assert_eq!(failure(&ends[0]).message(), "too early");
}

#[test]
fn notices_that_are_garbage_or_from_strangers_change_nothing() {
    let (ends, _) = registered(&[&[0], &[1]]);
    let failed = Said::Failed { code: 6, blame: Blame::of([1]), message: "lie".to_owned(), call: String::new() };
    for (from, text) in [(1, vec![]), (1, vec![2, 1, 1]), (1, vec![99; 1024]), (7, failed.encode())] {
        ends[0].hear(&Notice { from: Peer(from), comm: 7, text });
    }
    // A rank speaks for itself only.
    ends[0].hear(&Notice { from: Peer(1), comm: 7, text: Said::Left(0).encode() });
    assert_eq!(ends[0].check_peers(None, &String::new), Ok(()));
    assert!(!ends[0].remote.as_ref().unwrap().has_left(0));
}

#[test]
fn a_chain_of_waiting_ranks_blames_the_one_that_does_not_come() {
    // On a busy machine, another rank may come later than the deadline, and is named. Then the
    // ranks get more time.
    for millis in [2_000, 8_000, 32_000] {
        let (ends, _) = registered(&[&[0], &[1], &[2], &[3]]);
        ends.iter().for_each(|end| end.set_timeout(millis));
        let errors = std::thread::scope(|scope| {
            // Rank 3 waits for 2, which waits for 1, which waits for 0, which makes no call.
            let waiting = [3, 2, 1].map(|rank| {
                let end = &ends[rank];
                scope.spawn(move || receive(end, rank - 1).unwrap_err())
            });
            waiting.map(|waiting| waiting.join().unwrap())
        });
        let is_late =
            |error: &Error| [1, 2].iter().any(|rank| error.message().contains(&format!("rank {rank} did not come")));
        if millis < 32_000 && errors.iter().any(is_late) {
            continue;
        }
        for error in errors {
            assert_eq!((error.code(), error.blame().ranks.contains(&0)), (ncclTimeout, true), "{}", error.message());
            let expected = format!("rank 0 did not come within {millis} ms");
            assert!(error.message().contains(&expected), "{}", error.message());
        }
        return;
    }
}

#[test]
fn a_rank_that_refuses_its_call_ends_the_collective_of_another_host() {
    let (ends, _) = registered(&[&[0], &[1]]);
    assert_eq!(crate::diagnosis::end_if_peer_waits(&ends[0], "dm_init"), Ok(()));
    let span = ends[1].span.as_ref().unwrap();
    // SAFETY: the byte outlives the request, which is done at once.
    let sent = unsafe { span.wire.isend(span.peers[0].unwrap(), span.to(0, 0), [1_u8].as_ptr(), 1) };
    assert_eq!(span.wire.test(&sent), Ok(Some(1)));
    let error = crate::diagnosis::end_if_peer_waits(&ends[0], "dm_init").unwrap_err();
    assert_eq!(error.message(), "rank 1 is in a collective, which rank 0 does not call: rank 0 is in dm_init");
    assert_eq!(failure(&ends[1]).blame(), &Blame::of([0, 1]));
}
