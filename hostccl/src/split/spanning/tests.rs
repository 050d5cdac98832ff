use std::time::{Duration, Instant};

use super::super::Split;
use super::*;
use crate::hosts_of_threads;
use crate::news;
use crate::progress;
use crate::segment::Layout;

/// A random number generator, so that a failing case can be run again.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }
}

/// Performs a split, and returns the new communicator.
fn run(mut split: impl ChildOperation) -> Option<Arc<Comm>> {
    progress::run(&mut split).unwrap();
    split.joined()
}

/// Splits the communicators of all ranks, and returns the new ones.
fn split(ends: &[Option<Arc<Comm>>], given: &[(i32, i32)]) -> Vec<Option<Arc<Comm>>> {
    std::thread::scope(|scope| {
        let one = |end: &Arc<Comm>, given: (i32, i32)| {
            end.set_timeout(60_000);
            let (parent, name) = (end.clone(), "child".to_owned());
            match end.span {
                Some(_) => run(SpanSplit::new(parent, given, name, Arc::default(), Name::NONE).unwrap()),
                None => run(Split::new(parent, given.0, given.1, name, Arc::default(), Name::NONE).unwrap()),
            }
        };
        let threads: Vec<_> = ends
            .iter()
            .zip(given)
            .map(|(end, &given)| scope.spawn(move || end.as_ref().and_then(|end| one(end, given))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_split_has_the_members_and_the_order_that_it_has_on_one_host() {
    let layouts: [&[&[usize]]; 4] =
        [&[&[0, 1, 2], &[3, 4, 5]], &[&[0, 3], &[1], &[2, 4, 5]], &[&[0], &[1], &[2]], &[&[0, 2, 4, 6], &[1, 3], &[5]]];
    let mut random = Random(5);
    for case in 0..24 {
        let hosts = layouts[case % 4];
        let host_of = |rank: usize| hosts.iter().position(|host| host.contains(&rank));
        let (ends, _wires) = hosts_of_threads::communicators(hosts);
        let n = ends.len();
        let given: Vec<(i32, i32)> =
            (0..n).map(|_| (random.next(3) as i32 - i32::from(case > 3), random.next(4) as i32 - 2)).collect();
        let ends: Vec<Option<Arc<Comm>>> = ends.into_iter().map(Some).collect();
        let children = split(&ends, &given);
        let posted = || given.iter().enumerate().map(|(rank, &(color, key))| (ColorAndKey { color, key }, rank));
        for (rank, child) in children.iter().enumerate() {
            let Some(child) = child else {
                assert_eq!(given[rank].0, NCCL_SPLIT_NOCOLOR);
                continue;
            };
            let expected = members(posted(), given[rank].0);
            let me = expected.iter().position(|other| *other == rank).unwrap();
            assert_eq!(child.whole(), (me, expected.len()), "case {case}, rank {rank}: {given:?}");
            let spans = expected.iter().any(|other| host_of(*other) != host_of(rank));
            assert_eq!(child.span.is_some(), spans, "case {case}, rank {rank}: {given:?}");
            if let Some(span) = &child.span {
                let number = children[expected[0]].as_ref().unwrap().span.as_ref().unwrap().comm;
                assert_eq!(span.comm, number);
                for (other, whole) in expected.iter().enumerate() {
                    assert_eq!(span.peers[other].is_none(), host_of(*whole) == host_of(rank));
                }
            }
        }
        // A split of the children: pairs, in reverse order.
        let pairs: Vec<(i32, i32)> = children
            .iter()
            .map(|child| {
                child.as_ref().map_or((-1, 0), |child| ((child.whole().0 / 2) as i32, -(child.whole().0 as i32)))
            })
            .collect();
        for (child, grandchild) in children.iter().zip(split(&children, &pairs)) {
            let Some(child) = child else { continue };
            let ((rank, size), mine) = (child.whole(), grandchild.unwrap().whole());
            let is_last_alone = rank + 1 == size && rank % 2 == 0;
            assert_eq!(mine, if is_last_alone { (0, 1) } else { (1 - rank % 2, 2) });
        }
    }
}

/// A rank may finalize the parent while it waits for the other ranks of its host, because no call
/// of it on the parent is under way then.
#[test]
fn a_parent_that_is_finalized_during_a_split_ends_the_split_for_all() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0, 1], &[2]]);
    ends.iter().for_each(|end| {
        end.set_timeout(60_000);
        news::register(end);
    });
    let begin =
        |end: &Arc<Comm>| SpanSplit::new(end.clone(), (0, 0), "it".to_owned(), Arc::default(), Name::NONE).unwrap();
    let mut splits: Vec<SpanSplit> = ends.iter().map(begin).collect();
    let end = Instant::now() + Duration::from_secs(60);
    let first = (0..3).cycle().find(|&rank| {
        assert!(Instant::now() < end, "no rank joins");
        splits[rank].poll().unwrap();
        matches!(splits[rank].stage, Stage::Joining(_))
    });
    ends[first.unwrap()].finalize().unwrap();
    let mut errors = [None, None, None];
    while errors.iter().any(Option::is_none) {
        assert!(Instant::now() < end, "ranks wait for the one that has finalized: {errors:?}");
        for (split, error) in splits.iter_mut().zip(&mut errors).filter(|(_, error)| error.is_none()) {
            *error = split.poll().err();
        }
    }
    for error in errors.into_iter().flatten() {
        assert!(error.message().contains("is finalized"), "{}", error.message());
    }
}

#[test]
fn a_rank_that_dies_in_a_split_is_named_to_all() {
    let (ends, wires) = hosts_of_threads::communicators(&[&[0, 1], &[2]]);
    ends.iter().for_each(|end| end.set_timeout(60_000));
    let has_begun = std::sync::Barrier::new(3);
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends[..2]
            .iter()
            .map(|end| {
                scope.spawn(|| {
                    let mut split =
                        SpanSplit::new(end.clone(), (0, 0), "it".to_owned(), Arc::default(), Name::NONE).unwrap();
                    let polled = split.poll();
                    has_begun.wait();
                    assert!(polled.is_ok_and(|polled| polled != Poll::Done));
                    progress::run(&mut split).unwrap_err()
                })
            })
            .collect();
        has_begun.wait();
        wires[2].die();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[2][..]), "{}", error.message());
    }
}

/// A rank may finish its split while another one still waits for the last confirmations.
#[test]
fn a_split_that_fails_after_it_was_confirmed_ends_the_new_communicator_for_all() {
    for is_aborted in [true, false] {
        let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1], &[2]]);
        ends.iter().for_each(|end| end.set_timeout(60_000));
        // Rank 1 has no part in the new communicator, in which rank 2 has the number 1.
        let begin = |end: &Arc<Comm>, color: i32| {
            SpanSplit::new(end.clone(), (color, 0), "it".to_owned(), Arc::default(), Name::NONE).unwrap()
        };
        let mut splits = [begin(&ends[0], 0), begin(&ends[1], NCCL_SPLIT_NOCOLOR), begin(&ends[2], 0)];
        let end = Instant::now() + Duration::from_secs(60);
        let is_confirming = |split: &SpanSplit| matches!(split.stage, Stage::Confirming(..));
        let mut done = [false; 3];
        while !(done[0] && done[1]) {
            assert!(Instant::now() < end, "the splits stand still");
            for (rank, split) in splits.iter_mut().enumerate() {
                // Rank 2 only sends its confirmation.
                if !done[rank] && (rank < 2 || !is_confirming(split)) {
                    done[rank] = split.poll().unwrap() == Poll::Done;
                }
            }
        }
        let [first, _, last] = splits;
        assert!(is_confirming(&last));
        let child = first.joined().unwrap();
        child.check().unwrap();
        if is_aborted {
            ends[2].raise_abort();
        }
        // The abort drops the call. Without an abort, another call of the group has failed.
        drop(last);
        let error = loop {
            assert!(Instant::now() < end, "the new communicator of rank 0 lives on");
            match child.check() {
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => break error,
            }
        };
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[1][..]), "{}", error.message());
        let why = if is_aborted { "aborted its communicator" } else { "gave up a split" };
        assert!(error.message().contains(why), "{}", error.message());
    }
}

#[test]
fn the_parts_of_a_split_have_small_slots_on_all_hosts() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0, 1, 2, 3, 4, 5, 6, 7], &[8, 9]]);
    // Ranks 0, 1, 8 and 9 are on two hosts, and the others are pairs of one host.
    let colors = [4, 4, 1, 1, 2, 2, 3, 3, 4, 4];
    let ends: Vec<Option<Arc<Comm>>> = ends.into_iter().map(Some).collect();
    let children = split(&ends, &colors.map(|color| (color, 0)));
    let check = |comms: &[Option<Arc<Comm>>]| {
        for comm in comms.iter().flatten() {
            let expected = Layout::split(comm.nranks as u32, 8);
            assert_eq!(comm.segment.layout(), &expected, "{:?}", comm.whole());
            assert!(expected.slot_bytes < Layout::new(comm.nranks as u32).slot_bytes);
        }
    };
    check(&children);
    check(&split(&children, &[(0, 0), (1, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (1, 0)]));
}
