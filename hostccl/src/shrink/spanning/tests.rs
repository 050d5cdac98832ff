use super::*;
use crate::hosts_of_threads;
use crate::progress;
use crate::remote_message::messages_to_me;
use crate::types::{ncclInvalidUsage, ncclRemoteError, ncclTimeout};
use crate::wire::memory::Memory;

/// Shrinks the communicators of the ranks that are not excluded, each in a thread.
fn shrink(ends: &[Arc<Comm>], callers: &[usize], excluded: &[i32], abort: bool) -> Vec<Result<Arc<Comm>>> {
    std::thread::scope(|scope| {
        let one = |rank: usize| {
            let parent = ends[rank].clone();
            parent.set_timeout(20_000);
            let mut shrink = SpanShrink::new(parent, excluded, abort, "less".to_owned(), Arc::default())?;
            progress::run(&mut shrink)?;
            Ok(shrink.joined().unwrap())
        };
        let threads: Vec<_> = callers.iter().map(|&rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn check(hosts: &[&[usize]], excluded: &[i32], dead: &[usize]) {
    let (ends, wires): (Vec<Arc<Comm>>, Vec<Arc<Memory>>) = hosts_of_threads::communicators(hosts);
    let callers: Vec<usize> = (0..ends.len()).filter(|rank| !excluded.contains(&(*rank as i32))).collect();
    dead.iter().for_each(|rank| wires[*rank].die());
    let host_of = |rank: usize| hosts.iter().position(|host| host.contains(&rank));
    for abort in [!dead.is_empty(), true] {
        let children: Vec<Arc<Comm>> =
            shrink(&ends, &callers, excluded, abort).into_iter().map(Result::unwrap).collect();
        for (rank, child) in children.iter().enumerate() {
            assert_eq!(child.whole(), (rank, callers.len()));
            let spans = callers.iter().any(|other| host_of(*other) != host_of(callers[rank]));
            assert_eq!(child.span.is_some(), spans);
            if let Some(span) = &child.span {
                assert_eq!(Some(span.comm), children[0].span.as_ref().map(|span| span.comm));
            }
            child.check().unwrap();
        }
    }
}

#[test]
fn the_remaining_ranks_of_all_hosts_make_a_communicator() {
    check(&[&[0, 1], &[2, 3]], &[3], &[]);
    check(&[&[0, 2, 4], &[1, 3], &[5]], &[0, 3], &[]);
    check(&[&[0], &[1], &[2]], &[0], &[0]);
    check(&[&[0], &[1, 2, 3]], &[0], &[0]);
    check(&[&[0, 1], &[2], &[3, 4]], &[2, 0], &[2]);
    check(&[&[0, 1], &[2]], &[0, 1], &[]);
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all() {
    let (ends, wires) = hosts_of_threads::communicators(&[&[0, 1], &[2, 3], &[4]]);
    // Rank 3 is excluded, and rank 4 dies instead of calling.
    std::thread::scope(|scope| {
        let wire = &wires[4];
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            wire.die();
        });
        for error in shrink(&ends, &[0, 1, 2], &[3], true) {
            let error = error.unwrap_err();
            assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[4][..]), "{}", error.message());
        }
    });
}

#[test]
fn a_shrink_that_nobody_else_calls_ends_at_its_deadline() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1], &[2]]);
    ends[0].set_timeout(200);
    let mut alone = SpanShrink::new(ends[0].clone(), &[1], true, "less".to_owned(), Arc::default()).unwrap();
    let error = progress::run(&mut alone).unwrap_err();
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclTimeout, &[2][..]), "{}", error.message());
    drop(alone);
    // A second attempt leaves no more behind than the first one.
    let mut again = SpanShrink::new(ends[0].clone(), &[1], true, "less".to_owned(), Arc::default()).unwrap();
    assert_eq!(progress::run(&mut again).unwrap_err().code(), ncclTimeout);
    drop(again);
    assert_eq!(ends[0].span.as_ref().unwrap().kept.lock().unwrap().len(), 1);
    // The next attempt finds what the first attempt left behind.
    let children = shrink(&ends, &[0, 2], &[1], true);
    assert!(children.iter().all(Result::is_ok), "{children:?}");
}

/// Returns a shrink of that rank's communicator that has not begun.
fn begun(ends: &[Arc<Comm>], rank: usize, excluded: &[i32]) -> SpanShrink {
    SpanShrink::new(ends[rank].clone(), excluded, true, "less".to_owned(), Arc::default()).unwrap()
}

/// Polls until a condition holds.
fn until(mut is_over: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_over() {
        assert!(Instant::now() < end, "the shrinks stand still");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Polls these shrinks in turn until all have failed. Returns their errors.
fn failures_of<const N: usize>(shrinks: [&mut SpanShrink; N]) -> [Error; N] {
    let mut errors = [const { None }; N];
    let mut shrinks = shrinks;
    until(|| {
        for (shrink, error) in shrinks.iter_mut().zip(&mut errors) {
            if error.is_none() {
                *error = shrink.poll().err();
            }
        }
        errors.iter().all(Option::is_some)
    });
    errors.map(Option::unwrap)
}

fn failure_of(shrink: &mut SpanShrink) -> Error {
    let [error] = failures_of([shrink]);
    error
}

/// A receive that was cancelled takes the message of its number on the wire over TCP. So a leader
/// of a second attempt may miss the first letters of the root.
#[test]
fn a_shrink_that_was_given_up_over_tcp_can_be_called_again() {
    let ends = hosts_of_threads::communicators_over_tcp(&[&[0, 1], &[2, 3]]);
    ends.iter().for_each(|end| end.set_timeout(20_000));
    // Rank 1 does not come. Rank 2 has read its welcome, and waits for the next letter of the root.
    let (mut root, mut leader) = (begun(&ends, 0, &[3]), begun(&ends, 2, &[3]));
    until(|| {
        assert!(root.poll().is_ok() && leader.poll().is_ok());
        leader.stage == Stage::Confirming
    });
    assert_eq!(root.stage, Stage::Joining);
    // No letter about the end takes the number of the receive that is cancelled.
    (root.is_awaited, leader.is_awaited) = (false, false);
    drop((root, leader));
    // Rank 2 is early, and its greeting is there when the root begins.
    let mut leader = begun(&ends, 2, &[3]);
    leader.poll().unwrap();
    let children = std::thread::scope(|scope| {
        let leader = scope.spawn(move || progress::run(&mut leader));
        let children = shrink(&ends, &[0, 1], &[3], true);
        leader.join().unwrap().unwrap();
        children
    });
    assert!(children.iter().all(Result::is_ok), "{children:?}");
}

#[test]
fn a_follower_reads_the_failure_of_its_leader_in_the_attempt_to_which_it_belongs() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1, 2]]);
    ends.iter().for_each(|end| end.set_timeout(50));
    // The root is late. The follower has begun before its leader.
    let (mut follower, mut leader) = (begun(&ends, 2, &[]), begun(&ends, 1, &[]));
    let errors = failures_of([&mut follower, &mut leader]);
    for error in errors {
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclTimeout, &[0][..]), "{}", error.message());
    }
    // A follower that has not read the failure does not read it in the next attempt. Nor does the
    // root, which is still late.
    let mut leader = begun(&ends, 1, &[]);
    until(|| leader.poll().is_err());
    ends.iter().for_each(|end| end.set_timeout(20_000));
    let (mut leader, mut follower) = (begun(&ends, 1, &[]), begun(&ends, 2, &[]));
    assert!(follower.poll().is_ok() && leader.poll().is_ok());
    let mut root = begun(&ends, 0, &[]);
    let mut shrinks = [&mut root, &mut leader, &mut follower];
    until(|| {
        let polled = shrinks.each_mut().map(|shrink| shrink.poll().unwrap());
        polled.iter().all(|poll| *poll == Poll::Done)
    });
}

#[test]
fn a_letter_is_no_message_of_a_send() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1]]);
    let mut leader = begun(&ends, 1, &[]);
    leader.poll().unwrap();
    let span = ends[0].span.as_ref().unwrap();
    assert_eq!(span.wire.waiting(span.peers[1].unwrap(), span.comm).len(), 1, "the letter has come");
    assert_eq!(messages_to_me(span, 1), []);
}

/// Polls both shrinks until the condition holds. Neither may fail before.
fn both_until(pair: &mut [SpanShrink; 2], is_over: impl Fn(&[SpanShrink; 2]) -> bool) {
    until(|| {
        assert!(pair.iter_mut().all(|shrink| shrink.poll().is_ok()));
        is_over(pair)
    });
}

#[test]
fn the_last_letter_of_a_rank_counts_more_than_its_end() {
    // Rank 2 does not come, and the root ends right after it has told why the shrink has failed.
    let (ends, wires) = hosts_of_threads::communicators(&[&[0], &[1], &[2]]);
    ends[0].set_timeout(200);
    ends[1].set_timeout(20_000);
    let (mut root, mut leader) = (begun(&ends, 0, &[]), begun(&ends, 1, &[]));
    until(|| {
        leader.poll().unwrap();
        root.poll().is_err()
    });
    wires[0].die();
    let error = leader.poll().unwrap_err();
    assert_eq!((error.code(), &error.blame().ranks[..]), (ncclTimeout, &[2][..]), "{}", error.message());

    // The root ends right after it has told that all ranks have joined.
    let (ends, wires) = hosts_of_threads::communicators(&[&[0], &[1]]);
    let mut pair = [begun(&ends, 0, &[]), begun(&ends, 1, &[])];
    both_until(&mut pair, |pair| pair[1].stage == Stage::Confirming);
    let [root, leader] = &mut pair;
    until(|| root.poll().unwrap() == Poll::Done);
    wires[0].die();
    assert_eq!(leader.poll(), Ok(Poll::Done));
}

#[test]
fn an_abort_of_the_parent_ends_the_shrink_in_each_stage() {
    for last in [Stage::Meeting, Stage::Joining, Stage::Confirming] {
        // Rank 1 shares the host of the root. In the last stage the root waits for rank 2 alone.
        let (ends, _wires) = hosts_of_threads::communicators(&[&[0, 1], &[2]]);
        let mut shrinks = [0, 1, 2].map(|rank| begun(&ends, rank, &[]));
        let [root, follower, leader] = &mut shrinks;
        until(|| {
            let _ = root.poll().unwrap();
            if last != Stage::Meeting && root.stage == Stage::Meeting {
                let _ = leader.poll().unwrap();
            }
            if last == Stage::Confirming {
                let _ = follower.poll().unwrap();
            }
            root.stage == last
        });
        assert!(root.poll().unwrap() != Poll::Done);
        ends[0].raise_abort();
        let error = root.poll().unwrap_err();
        assert!(error.message().contains("was aborted by ncclCommAbort"), "{last:?}: {}", error.message());
        ends[0].abort();
        drop(shrinks);
    }
}

/// An abort drops a shrink that no thread drives, so the shrink gets no poll after the abort.
#[test]
fn a_shrink_that_is_dropped_after_an_abort_tells_the_other_ranks() {
    for rank in 0..4 {
        let (ends, _wires) = hosts_of_threads::communicators(&[&[0, 1], &[2, 3]]);
        let mut shrinks = [0, 1, 2, 3].map(|rank| Some(begun(&ends, rank, &[])));
        // The second host joins only when the first one waits for it.
        for (polled, done) in [(0..3, 0..2), (2..4, 2..4)] {
            until(|| {
                let is_done = |shrink: &SpanShrink| shrink.stage == Stage::Confirming;
                for shrink in shrinks[polled.clone()].iter_mut().flatten().filter(|shrink| !is_done(shrink)) {
                    let _ = shrink.poll().unwrap();
                }
                shrinks[done.clone()].iter().flatten().all(is_done)
            });
        }
        ends[rank].raise_abort();
        ends[rank].abort();
        shrinks[rank] = None;
        for shrink in shrinks.iter_mut().flatten() {
            let mut error = None;
            until(|| {
                let polled = shrink.poll();
                error = polled.as_ref().err().cloned();
                matches!(polled, Ok(Poll::Done) | Err(_))
            });
            // A shrink that ends well has made a communicator that has failed.
            let error = error.unwrap_or_else(|| shrink.joined().unwrap().check().unwrap_err());
            assert!(error.message().contains("aborted its communicator"), "{}", error.message());
            assert_eq!((error.code(), &error.blame().ranks[..]), (ncclRemoteError, &[rank][..]));
        }
    }
}

#[test]
fn a_rank_that_cannot_join_its_leader_is_named_to_all() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1, 2, 3]]);
    ends.iter().for_each(|end| end.set_timeout(60_000));
    let mut shrinks = [0, 1, 2, 3].map(|rank| begun(&ends, rank, &[]));
    let [root, leader, follower, failing] = &mut shrinks;
    until(|| {
        assert!(root.poll().is_ok() && leader.poll().is_ok() && follower.poll().is_ok());
        follower.stage == Stage::Joining && follower.joined().is_some()
    });
    leader.remaining.spoil_segment();
    let error = failing.poll().unwrap_err();
    assert!(error.message().contains("another version"), "{}", error.message());
    for shrink in [leader, follower, root] {
        let error = failure_of(shrink);
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[3][..]), "{}", error.message());
        assert!(error.message().contains("could not join"), "{}", error.message());
    }
    drop(shrinks);
    // The refusal ends no later attempt, also where the rank that has refused is the last to begin.
    let mut again = [0, 1, 2].map(|rank| begun(&ends, rank, &[]));
    until(|| {
        assert!(again.iter_mut().all(|shrink| shrink.poll().is_ok()));
        again[2].joined().is_some()
    });
    let mut last = begun(&ends, 3, &[]);
    until(|| {
        let polled = [last.poll()].into_iter().chain(again.iter_mut().map(SpanShrink::poll));
        polled.filter(|polled| *polled.as_ref().unwrap() != Poll::Done).count() == 0
    });
}

#[test]
fn a_follower_that_is_late_ends_no_later_attempt() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0], &[1, 2]]);
    ends.iter().for_each(|end| end.set_timeout(50));
    // Rank 2 does not come.
    let (mut root, mut leader) = (begun(&ends, 0, &[]), begun(&ends, 1, &[]));
    failures_of([&mut root, &mut leader]);
    drop((root, leader));
    // It reads that the others did not wait for it, if the reason is still there.
    ends.iter().for_each(|end| end.set_timeout(20_000));
    let mut late = begun(&ends, 2, &[]);
    let _ = late.poll();
    let blamed = Error::new(ncclTimeout, "rank 2 did not come").by(crate::blame::Blame::of([2]));
    late.tell(&blamed);
    late.is_awaited = false;
    drop(late);
    // The others begin before it does.
    let (mut root, mut leader) = (begun(&ends, 0, &[]), begun(&ends, 1, &[]));
    until(|| {
        assert!(root.poll().is_ok() && leader.poll().is_ok());
        leader.joined().is_some()
    });
    assert!(leader.poll().is_ok() && root.poll().is_ok());
    let mut follower = begun(&ends, 2, &[]);
    let mut shrinks = [&mut root, &mut leader, &mut follower];
    until(|| {
        let polled = shrinks.each_mut().map(|shrink| shrink.poll().unwrap());
        polled.iter().all(|poll| *poll == Poll::Done)
    });
}

#[test]
fn a_leader_that_cannot_join_its_own_segment_is_named_to_all() {
    let (ends, _wires) = hosts_of_threads::communicators(&[&[0, 1], &[2, 3]]);
    ends.iter().for_each(|end| end.set_timeout(60_000));
    let mut shrinks = [0, 1, 2, 3].map(|rank| begun(&ends, rank, &[]));
    let [root, follower, leader, last] = &mut shrinks;
    until(|| {
        assert!(root.poll().is_ok() && follower.poll().is_ok() && last.poll().is_ok());
        leader.poll().unwrap();
        root.stage == Stage::Joining
    });
    // The leader makes its segment, cannot join it, and can offer no other one.
    leader.make_segment(5).unwrap();
    assert!(last.find_segment().unwrap(), "one rank finds the segment before the refusal");
    leader.tell(&Error::usage("no more files"));
    leader.is_awaited = false;
    for shrink in [last, root, follower] {
        let error = failure_of(shrink);
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInvalidUsage, &[2][..]), "{}", error.message());
    }
}
