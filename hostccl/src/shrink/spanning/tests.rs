use super::*;
use crate::hosts_of_threads;
use crate::progress;
use crate::types::{ncclRemoteError, ncclTimeout};
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
    // The next attempt finds what the first attempt left behind.
    let children = shrink(&ends, &[0, 2], &[1], true);
    assert!(children.iter().all(Result::is_ok), "{children:?}");
}
