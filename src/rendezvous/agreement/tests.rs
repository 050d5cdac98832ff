//! Ranks as threads over a store in memory.

mod bytes;
mod departures;
mod failures;
mod level;
mod order;
mod serving;
mod survivors;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Members, Membership, Scope, ScopeKeys};
use crate::error::Status;
use crate::rendezvous::incarnation::Tickets;
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::starved::timed;
use crate::wait::Wait;

pub(super) fn scope(store: &MemoryStore, me: usize, size: usize) -> Scope {
    let store: Arc<dyn Store> = Arc::new(store.clone());
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    let membership = membership(store, losses, Members::All(size), me);
    Scope::new(membership, "test/world".to_owned())
}

pub(super) fn membership(store: Arc<dyn Store>, losses: Arc<Losses>, members: Members, me: usize) -> Membership {
    let left = ScopeKeys::new(&members, &Arc::default(), Some(0));
    Membership {
        store,
        losses,
        members,
        tickets: Tickets::default(),
        epoch: 0,
        me,
        served: false,
        serving: false,
        left,
        record: Default::default(),
    }
}

/// Returns what each of `size` ranks gets from `run(rank, scope)`.
pub(super) fn ranks<T: Send>(size: usize, run: impl Fn(usize, Scope) -> T + Sync) -> Vec<T> {
    let store = MemoryStore::new();
    std::thread::scope(|threads| {
        let handles: Vec<_> = (0..size)
            .map(|me| {
                let (scope, run) = (scope(&store, me, size), &run);
                threads.spawn(move || run(me, scope))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

pub(super) fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// The timeout of a rank that gives a call up.
pub(super) const SHORT: Duration = Duration::from_millis(200);

/// Waits until the rank at `position` has come to that call, and returns the wait of a rank that
/// gives the call up. So a rank that comes late on a busy machine is not missed.
pub(super) fn short_once_here(scope: &Scope, number: u64, position: usize) -> Wait {
    let here = format!("test/world/{number}/here/{position}");
    scope.membership.store.get(&here, &soon()).unwrap();
    Wait::after(SHORT)
}

/// Returns a number below 2^24, which looks random. Each `salt` gives a rank another number.
pub(super) fn chance(seed: u64, me: usize, salt: u64) -> u64 {
    let mixed = (seed * 31 + me as u64 * 7 + salt + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40
}

#[test]
fn equal_calls_agree_and_exchange_data() {
    let sums = ranks(4, |me, scope| {
        let mut sum = 0;
        for call in 0..3 {
            let round = scope.agree(&format!("call {call}"), &soon()).unwrap();
            if me == 2 {
                round.publish("id", &[10 + call], &soon()).unwrap();
            }
            sum += round.fetch("id", 2, &soon()).unwrap()[0];
            round.finish(&soon()).unwrap();
        }
        sum
    });
    assert_eq!(sums, [33, 33, 33, 33]);
}

#[test]
fn a_different_call_is_named_on_every_rank() {
    let began = Instant::now();
    let errors = ranks(4, |me, scope| {
        scope.agree("first()", &soon()).unwrap();
        let call = if me == 3 { "dm_init(shape=(4, 2))" } else { "dm_init(shape=(2, 4))" };
        scope.agree(call, &soon()).map(drop).unwrap_err()
    });
    assert!(began.elapsed() < Duration::from_secs(5), "long before the deadline");
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        assert_eq!(
            error.message(),
            "rank 3 called dm_init(shape=(4, 2)) as call 1, rank 0 called dm_init(shape=(2, 4))"
        );
    }
}

#[test]
fn several_that_differ_are_named_together_and_counted() {
    let began = Instant::now();
    let errors = ranks(8, |me, scope| {
        let call = match me {
            0 => "dm_init(shape=(2, 4))",
            1 | 2 | 3 | 6 => "dm_init(shape=(4, 2))",
            5 => "dm_world_barrier()",
            _ => "dm_init(shape=(2, 4))",
        };
        scope.agree(call, &soon()).map(drop).unwrap_err()
    });
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        assert_eq!(
            error.message(),
            "ranks 1-3, 6 called dm_init(shape=(4, 2)) as call 0, rank 5 called dm_world_barrier(), rank 0 called dm_init(shape=(2, 4))"
        );
    }
}

#[test]
fn many_different_calls_are_told_by_the_first_few_and_their_number() {
    let errors = ranks(9, |me, scope| scope.agree(&format!("call of {me}"), &soon()).map(drop).unwrap_err());
    for error in &errors {
        assert_eq!(error.status(), Status::Mismatch);
        let message = error.message();
        assert!(message.ends_with("rank 0 called call of 0; 8 ranks in all differ from rank 0"), "{message}");
        assert_eq!(message.matches(" called ").count(), 4, "{message}");
        assert_eq!(message, errors[0].message());
    }
}

#[test]
fn equal_calls_that_differ_in_detail_say_the_detail() {
    let errors = ranks(2, |me, scope| {
        let detail = format!("with rank {me}'s options");
        scope.agree_in_detail("dm_init()", &detail, &soon()).map(drop).unwrap_err()
    });
    for error in errors {
        assert_eq!(
            error.message(),
            "rank 1 called dm_init() with rank 1's options as call 0, rank 0 called it with rank 0's options"
        );
    }
}

#[test]
fn absent_ranks_are_named_at_the_deadline_and_late_ones_learn_at_once() {
    let errors = ranks(5, |me, scope| {
        if me == 1 || me == 4 {
            return None;
        }
        // The time of rank 3 begins when the two others are here, who learn of its deadline.
        let (wait, bound) = match me {
            3 => ([0, 2].map(|other| short_once_here(&scope, 0, other))[1].clone(), SHORT),
            _ => (soon(), Duration::from_secs(10)),
        };
        let (error, took) = timed(|| scope.agree("dm_init()", &wait).map(drop).unwrap_err());
        assert!(took.keeps_to(bound), "rank {me}: {took:?}");
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status(), Status::Timeout);
        assert_eq!(error.message(), "ranks 1, 4 never called dm_init() as call 0 within 200 ms");
        assert_eq!(error.ranks(), [1, 4]);
    }
}

#[test]
fn a_late_rank_gets_the_verdict_that_stands() {
    let store = MemoryStore::new();
    let first = scope(&store, 0, 2).agree("dm_init()", &Wait::after(Duration::from_millis(100))).map(drop).unwrap_err();
    let began = Instant::now();
    let late = scope(&store, 1, 2).agree("dm_init()", &soon()).map(drop).unwrap_err();
    assert_eq!(first.message(), "rank 1 never called dm_init() as call 0 within 100 ms");
    let told = format!(
        "rank 1, which is this process, came too late with dm_init(): rank 0 had waited 100 ms in call 0, and gave it up; the next call of this process meets the next one of the others, who were told: {}",
        first.message()
    );
    assert_eq!((late.status(), late.message()), (Status::Timeout, told.as_str()));
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_whose_time_ran_out_before_the_call_does_not_blame_the_store() {
    let store = MemoryStore::new();
    let spent = Wait::after(Duration::ZERO);
    std::thread::sleep(Duration::from_millis(250));
    let error = scope(&store, 1, 2).agree("dm_init()", &spent).map(drop).unwrap_err();
    assert_eq!(
        (error.status(), error.message()),
        (Status::Timeout, "rank 0 never called dm_init() as call 0 within 0 ms")
    );
}

#[test]
fn connections_that_the_store_refused_are_told_to_all_ranks_of_the_first_call() {
    let errors = ranks(3, |me, scope| {
        let store = &scope.membership.store;
        store.set("devicemesh/refused", b"the store refused 1 connection", &soon()).unwrap();
        // Rank 2 gives the calls up, each once rank 0 waits in it.
        let call = |number| {
            let wait = if me == 2 { short_once_here(&scope, number, 0) } else { soon() };
            scope.agree("dm_world_init()", &wait).map(drop).unwrap_err()
        };
        (me != 1).then(|| [call(0), call(1)])
    });
    for [first, second] in errors.into_iter().flatten() {
        let expected = "rank 1 never called dm_world_init() as call 0 within 200 ms; the store refused 1 connection";
        assert_eq!(first.message(), expected);
        assert!(!second.message().contains("refused"), "{second}");
    }
}

#[test]
fn a_mismatch_is_told_also_when_a_rank_is_missing_and_the_deadline_is_near() {
    let errors = ranks(3, |me, scope| {
        // The deadline of rank 1 is nearer than the time for which a rank waits for others that
        // differ, too.
        let wait = || if me == 1 { short_once_here(&scope, 0, 0) } else { soon() };
        (me < 2).then(|| scope.agree(&format!("call of {me}"), &wait()).map(drop).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        // Nobody knows the call of rank 2, so either of the others may be wrong.
        assert_eq!(error.ranks(), [0, 1], "{error}");
    }
}

/// Returns the ranks that are blamed where ranks have called these in this order. `calls` has a
/// rank and its call. Rank 0 called "A".
fn blamed(size: usize, calls: impl IntoIterator<Item = (usize, &'static str)>) -> Vec<i32> {
    let (store, mut number) = (MemoryStore::new(), 0);
    let key = |name: &str| format!("test/world/0/{name}");
    store.set(&key("here/0"), b"A", &soon()).unwrap();
    store.add(&key("count"), 1, &soon()).unwrap();
    for (rank, call) in calls {
        let differs = call != "A";
        store.set(&key(&format!("here/{rank}")), call.as_bytes(), &soon()).unwrap();
        store.add(&key("count"), if differs { (1 << 32) + 1 } else { 1 }, &soon()).unwrap();
        if differs {
            number += 1;
            store.set(&key(&format!("differs/{number}")), rank.to_string().as_bytes(), &soon()).unwrap();
        }
    }
    let verdict = scope(&store, 1, size).join_next("B").late_dissent("", &soon()).unwrap();
    verdict.ranks().to_vec()
}

#[test]
fn a_call_is_right_where_more_than_half_of_all_ranks_are_known_to_make_it() {
    let of = |range: std::ops::Range<usize>, call| range.map(move |rank| (rank, call));
    assert_eq!(blamed(32, of(1..32, "B")), [0]);
    assert_eq!(blamed(32, of(1..18, "B")), [0], "the others have not come");
    let both: Vec<i32> = (0..17).collect();
    assert_eq!(blamed(32, of(1..17, "B")), both, "16 of 32 are no majority");
    assert_eq!(blamed(40, of(1..11, "A").chain(of(11..27, "B")).chain(of(27..40, "C"))).len(), 17, "nobody has one");
    assert_eq!(blamed(4, [(1, "A"), (2, "A"), (3, "B")]), [3]);
}

#[test]
fn the_first_that_differs_may_be_lost_before_it_speaks() {
    // Rank 3 takes the world to be larger than the others do, so they do not miss it.
    let errors = ranks(4, |me, scope| {
        let store = &scope.membership.store;
        if me == 3 {
            store.set("test/world/0/here/3", b"call of 3", &soon()).unwrap();
            store.add("test/world/0/count", (1 << 32) + 1, &soon()).unwrap();
            store.set("lost", b"1", &soon()).unwrap();
            return None;
        }
        store.get("lost", &soon()).unwrap();
        let (call, wait) = match me {
            0 => ("call of 0", soon()),
            1 => {
                store.get("test/world/0/differs/2", &soon()).unwrap();
                ("call of 0", Wait::after(SHORT))
            }
            _ => ("call of 2", soon()),
        };
        Some(scope.agree(call, &wait).map(drop).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.message().contains("rank 2 called call of 2"), "{error}");
    }
}

#[test]
fn what_one_rank_does_not_have_is_shared_by_none() {
    let offers = [["a", "b", "c", "", "e"], ["a", "", "c", "d", "e"], ["a", "b", "x", "d", "e"]];
    let shared = ranks(3, |me, scope| {
        let mine: Vec<Option<String>> =
            offers[me].iter().map(|name| (!name.is_empty()).then(|| (*name).to_owned())).collect();
        let (first, shared) = scope.agree_to_share("dm_init()", "", &mine, &soon()).unwrap();
        first.finish(&soon()).unwrap();
        let (second, nothing) = scope.agree_to_share("dm_init()", "", &[None, None], &soon()).unwrap();
        second.finish(&soon()).unwrap();
        assert_eq!(nothing, [false, false]);
        shared
    });
    assert_eq!(shared, vec![vec![true, false, false, false, true]; 3]);
}

#[test]
fn calls_that_share_are_compared_without_what_they_share() {
    let errors = ranks(3, |me, scope| {
        let call = if me == 2 { "dm_init(other)" } else { "dm_init()" };
        let offers = [Some(format!("of rank {me}").replace(' ', "-"))];
        scope.agree_to_share(call, "", &offers, &soon()).map(drop).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch);
        assert_eq!(error.message(), "rank 2 called dm_init(other) as call 0, rank 0 called dm_init()");
    }
}
