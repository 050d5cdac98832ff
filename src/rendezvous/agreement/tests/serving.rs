//! The rank that serves the store stays until the others have read a verdict.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{membership, soon};
use crate::error::{Error, Status};
use crate::rendezvous::agreement::{Members, Membership, Round, Scope};
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::wait::{Cancel, Wait};

/// Ends a call as a slow rank does: the rank is counted, not as the last one, and has not read the
/// verdict.
fn come_to_the_end(store: &MemoryStore) {
    store.add("test/world/0/end/count", 1, &soon()).unwrap();
    store.set("counted", b"1", &soon()).unwrap();
}

fn end(store: &MemoryStore, round: Round, wait: &Wait) {
    store.get("counted", &soon()).unwrap();
    round.finish(wait).unwrap();
}

fn serving(store: &MemoryStore, me: usize, size: usize) -> Scope {
    let store: Arc<dyn Store> = Arc::new(store.clone());
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    let membership = Membership { served: true, serving: me == 0, ..membership(store, losses, Members::All(size), me) };
    Scope::new(membership, "test/world".to_owned())
}

#[test]
fn the_rank_that_serves_does_not_wait_for_one_that_died_while_it_said_that_it_had_read() {
    let store = MemoryStore::new();
    let began = Instant::now();
    std::thread::scope(|threads| {
        for me in 0..3 {
            let (scope, store) = (serving(&store, me, 3), &store);
            threads.spawn(move || {
                let round = scope.agree("call", &soon()).unwrap();
                if me == 1 {
                    come_to_the_end(store);
                    store.get("test/world/0/end/verdict", &soon()).unwrap();
                    store.set("test/world/0/end/read/by/1", b"1", &soon()).unwrap();
                    store.set("test/lost/1", b"1", &soon()).unwrap();
                } else {
                    end(store, round, &soon());
                }
            });
        }
    });
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
}

#[test]
fn the_rank_that_serves_stays_for_the_slow_ones_when_a_fast_one_has_left() {
    let store = MemoryStore::new();
    let stayed = std::thread::scope(|threads| {
        let handles: Vec<_> = (0..3)
            .map(|me| {
                let scope = serving(&store, me, 3);
                let store = &store;
                threads.spawn(move || {
                    let round = scope.agree("call", &soon()).unwrap();
                    let began = Instant::now();
                    match me {
                        2 => come_to_the_end(store),
                        _ => end(store, round, &soon()),
                    }
                    if me == 1 {
                        store.set("test/lost/1", b"1", &soon()).unwrap();
                    }
                    began.elapsed()
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(stayed[0] > Duration::from_secs(1), "{stayed:?}");
}

#[test]
fn staying_for_slow_ranks_ends_at_the_deadline_and_when_aborted() {
    for abort in [false, true] {
        let store = MemoryStore::new();
        let timeout = Duration::from_millis(if abort { 20_000 } else { 300 });
        let cancel = Cancel::new();
        let began = Instant::now();
        std::thread::scope(|threads| {
            let (scope, raised) = (serving(&store, 1, 2), cancel.clone());
            let store = &store;
            threads.spawn(move || {
                scope.agree("call", &soon()).unwrap();
                come_to_the_end(store);
                store.get("test/world/0/end/verdict", &soon()).unwrap();
                std::thread::sleep(Duration::from_millis(200));
                if abort {
                    raised.raise();
                }
            });
            let round = serving(store, 0, 2).agree("call", &soon()).unwrap();
            store.get("counted", &soon()).unwrap();
            round.finish(&Wait { cancel, ..Wait::after(timeout) }).unwrap();
        });
        // The rank does not stay for the 10 s for which it would stay without the abort or the
        // deadline.
        assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    }
}

#[test]
fn the_rank_that_serves_stays_until_the_others_have_read_that_its_own_work_failed() {
    let store = MemoryStore::new();
    std::thread::scope(|threads| {
        let scope = serving(&store, 1, 2);
        threads.spawn(move || {
            let round = scope.agree("call", &soon()).unwrap();
            let value = round.fetch("value", 0, &soon());
            assert_eq!(round.end(value, &soon()).unwrap_err().status(), Status::InvalidArgument);
        });
        let round = serving(&store, 0, 2).agree("call", &soon()).unwrap();
        let failed = round.end(Err::<(), _>(Error::invalid("too many bytes")), &soon());
        assert!(store.try_get("test/world/0/end/read/by/1", &soon()).unwrap().is_some(), "rank 0 left before");
        assert_eq!(failed.unwrap_err().status(), Status::InvalidArgument);
    });
}
