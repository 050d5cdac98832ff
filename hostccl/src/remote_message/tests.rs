use std::time::{Duration, Instant};

use super::*;
use crate::call_name::NAME_BYTES;
use crate::error::{Error, Result};
use crate::hosts_of_threads;
use crate::news;
use crate::progress::{self, Lane};
use crate::types::*;

fn registered(hosts: &[&[usize]]) -> Vec<Arc<Comm>> {
    let (ends, _) = hosts_of_threads::communicators(hosts);
    ends.iter().for_each(news::register);
    ends
}

fn name(tag: u64, text: &str) -> Name {
    let mut name = Name { tag, text: [0; NAME_BYTES] };
    name.text[..text.len()].copy_from_slice(text.as_bytes());
    name
}

fn message(end: &Arc<Comm>, side: Side, peer: usize, count: usize, name: Name) -> RemoteMessage {
    // SAFETY: the callers' buffers outlive the messages.
    unsafe { RemoteMessage::new(end.clone(), side, peer, count, DataType::Uint8, name) }.unwrap()
}

fn send(end: &Arc<Comm>, peer: usize, data: &[u8], name: Name) -> Result<()> {
    progress::run(&mut message(end, Side::Send(data.as_ptr()), peer, data.len(), name))
}

fn recv(end: &Arc<Comm>, peer: usize, count: usize, name: Name) -> Result<Vec<u8>> {
    let mut data = vec![0; count];
    progress::run(&mut message(end, Side::Recv(data.as_mut_ptr()), peer, count, name))?;
    Ok(data)
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + seed * 13 + at / 251) as u8).collect()
}

#[test]
fn messages_of_all_sizes_arrive_in_order() {
    let ends = registered(&[&[0], &[1]]);
    let sizes = [0, 1, 3, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 65_536, 300_000, 0, 2];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (seed, bytes) in sizes.into_iter().enumerate() {
                send(&ends[0], 1, &pattern(bytes, seed), Name::NONE).unwrap();
            }
        });
        for (seed, bytes) in sizes.into_iter().enumerate() {
            assert!(recv(&ends[1], 0, bytes, Name::NONE).unwrap() == pattern(bytes, seed), "{bytes} bytes");
        }
    });
    assert!(!ends[0].remote.as_ref().unwrap().is_busy() && !ends[1].remote.as_ref().unwrap().is_busy());
}

/// This test takes 3 s, and up to 5 s on a busy machine. Two ranks that wait for each other wait
/// one second longer than their timeout, because each rank tells the other one that it waits. If
/// answers are late, the ranks wait for twice the timeout and one second at most.
#[test]
fn two_ranks_that_receive_from_each_other_fail_within_a_bound() {
    let timeout = Duration::from_secs(2);
    let ends = registered(&[&[0], &[1]]);
    ends.iter().for_each(|end| end.set_timeout(timeout.as_millis() as u64));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (me, end) in ends.iter().enumerate() {
            scope.spawn(move || {
                let error = recv(end, 1 - me, 3, Name::NONE).unwrap_err();
                assert_eq!(error.code(), ncclTimeout, "{}", error.message());
                let took = began.elapsed();
                assert!(took < 2 * timeout + Duration::from_millis(1600), "{took:?}: {}", error.message());
            });
        }
    });
}

#[test]
fn every_rank_of_a_group_exchanges_with_every_other_one_both_ways() {
    let ends = registered(&[&[0], &[1], &[2], &[3]]);
    let size = |from: usize, to: usize| 1 << (2 * from + to);
    std::thread::scope(|scope| {
        for (me, end) in ends.iter().enumerate() {
            scope.spawn(move || {
                let others: Vec<usize> = (0..4).filter(|other| *other != me).collect();
                let sent: Vec<Vec<u8>> = others.iter().map(|to| pattern(size(me, *to) * 100, me)).collect();
                let mut got: Vec<Vec<u8>> = others.iter().map(|from| vec![0; size(*from, me) * 100]).collect();
                let mut messages = Vec::new();
                for ((other, sent), got) in others.iter().zip(&sent).zip(&mut got) {
                    let (from, to) = (Side::Send(sent.as_ptr()), Side::Recv(got.as_mut_ptr()));
                    messages.push(Some(message(end, from, *other, sent.len(), Name::NONE)));
                    messages.push(Some(message(end, to, *other, got.len(), Name::NONE)));
                }
                progress::run_all(&mut messages.iter_mut().map(Lane::new).collect()).unwrap();
                for (from, got) in others.iter().zip(got) {
                    assert!(got == pattern(size(*from, me) * 100, *from), "from {from} to {me}");
                }
            });
        }
    });
}

#[test]
fn messages_of_different_names_do_not_wait_for_each_other() {
    let ends = registered(&[&[0], &[1]]);
    let (tp, pp) = (name(5, "tp"), name(6, "pp"));
    std::thread::scope(|scope| {
        // Messages under both names are sent at once, and are received in the opposite order.
        scope.spawn(|| send(&ends[0], 1, &[1], tp).unwrap());
        scope.spawn(|| send(&ends[0], 1, &[2], pp).unwrap());
        assert_eq!(recv(&ends[1], 0, 1, pp).unwrap(), [2]);
        assert_eq!(recv(&ends[1], 0, 1, tp).unwrap(), [1]);
    });
}

#[test]
fn both_sides_learn_of_sizes_that_disagree() {
    for (sent, received) in [(3, 4), (4, 3), (10_000, 3), (3, 10_000), (0, 1)] {
        let ends = registered(&[&[0], &[1]]);
        let errors = std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&ends[0], 1, &pattern(sent, 0), Name::NONE).unwrap_err());
            [recv(&ends[1], 0, received, Name::NONE).unwrap_err(), sender.join().unwrap()]
        });
        for error in errors {
            let expected = format!("rank 0 sends {sent} x uint8 where rank 1 receives {received} x uint8");
            assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[0, 1][..]));
            assert!(error.message().ends_with(&expected), "{}", error.message());
        }
    }
}

#[test]
fn a_send_of_any_size_waits_for_the_call_of_its_receiver() {
    for bytes in [0, 4, INLINE_BYTES + 1, 300_000] {
        let ends = registered(&[&[0], &[1]]);
        let data = pattern(bytes, 1);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&ends[0], 1, &data, Name::NONE).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!sender.is_finished(), "{bytes} bytes");
            assert!(recv(&ends[1], 0, bytes, Name::NONE).unwrap() == data, "{bytes} bytes");
        });
    }
}

#[test]
fn a_receiver_that_waits_for_another_size_has_both_sides_told() {
    let ends = registered(&[&[0], &[1]]);
    let errors = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| recv(&ends[1], 0, 10_000, Name::NONE).unwrap_err());
        // The question of the receiver is there before the sender calls.
        let span = ends[0].span.as_ref().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(messages_to_me(span, 1), [], "a question is no message");
        [send(&ends[0], 1, &[1; 3], Name::NONE).unwrap_err(), receiver.join().unwrap()]
    });
    for error in errors {
        let expected = "rank 0 sends 3 x uint8 where rank 1 receives 10000 x uint8";
        assert!(error.message().ends_with(expected), "{}", error.message());
    }
}

/// Returns the errors of two ranks at their deadline, and its milliseconds. On a busy machine, a
/// rank may come later than that. The other one says so, and the ranks get more time.
fn errors_at_the_deadline(call: impl Fn(&Arc<Comm>, usize) -> Error + Sync) -> (u64, [Error; 2]) {
    let mut millis = 1500;
    loop {
        let ends = registered(&[&[0], &[1]]);
        ends.iter().for_each(|end| end.set_timeout(millis));
        let errors = std::thread::scope(|scope| {
            let (call, ends) = (&call, &ends);
            [0, 1].map(|me| scope.spawn(move || call(&ends[me], me))).map(|thread| thread.join().unwrap())
        });
        if millis > 20_000 || !errors.iter().any(|error| error.message().contains(" did not come within ")) {
            return (millis, errors);
        }
        millis *= 4;
    }
}

#[test]
fn two_ranks_that_both_send_are_told_so() {
    for bytes in [3, 100_000] {
        let sends = |end: &Arc<Comm>, me: usize| send(end, 1 - me, &pattern(bytes, 0), Name::NONE).unwrap_err();
        let (millis, errors) = errors_at_the_deadline(sends);
        for error in errors {
            assert_eq!(error.code(), ncclInvalidUsage, "{}", error.message());
            let expected = format!("have both been sending to each other for {millis} ms, and neither receives");
            assert!(error.message().contains(&expected), "{}", error.message());
        }
    }
}

#[test]
fn a_message_under_another_name_is_named_on_both_sides() {
    let (_, errors) = errors_at_the_deadline(|end, me| match me {
        0 => send(end, 1, &[1], name(6, "pp")).unwrap_err(),
        _ => recv(end, 0, 1, name(7, "tp")).unwrap_err(),
    });
    for error in errors {
        assert_eq!(error.code(), ncclInvalidUsage, "{}", error.message());
        let expected = "rank 0 sends to rank 1 along pp, where rank 1 receives along tp";
        assert!(error.message().contains(expected), "{}", error.message());
    }
}

#[test]
fn two_messages_of_one_name_at_one_time_are_refused() {
    let ends = registered(&[&[0], &[1]]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| recv(&ends[0], 1, 1, Name::NONE).unwrap_err());
        while !ends[0].remote.as_ref().unwrap().is_busy() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let second = recv(&ends[0], 1, 1, Name::NONE).unwrap_err();
        for error in [second, first.join().unwrap()] {
            assert_eq!(error.code(), ncclInvalidUsage);
            assert!(error.message().contains("two threads of rank 0 call at the same time"), "{}", error.message());
        }
    });
}

#[test]
fn bytes_that_are_no_message_end_the_communicator_and_blame_their_sender() {
    let ends = registered(&[&[0], &[1]]);
    let span = ends[0].span.as_ref().unwrap();
    let (peer, tag, bytes) = (span.peers[1].unwrap(), span.to(1, Name::NONE.tag), [1_u8; 5]);
    // SAFETY: the bytes outlive the transfer.
    let _sent = unsafe { Transfer::send(&span.wire, peer, tag, bytes.as_ptr(), bytes.len()) };
    let error = recv(&ends[1], 0, 3, Name::NONE).unwrap_err();
    assert!(error.message().contains("sent 5 bytes where 44 belong"), "{error:?}");
    assert_eq!(error.blame().ranks, [0], "{error:?}");
    assert!(ends[1].check_open().is_err(), "the communicator has ended");
}
