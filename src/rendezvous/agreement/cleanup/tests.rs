//! Calls leave no more keys in the store than the last call did. The ranks are threads over a
//! store in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::RngCore;
use proptest::test_runner::{RngAlgorithm, TestRng};

use super::super::tests::{short_once_here, soon};
use super::super::{Membership, Scope};
use super::*;
use crate::error::{Error, Status};
use crate::rendezvous::incarnation::Tickets;
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{MemoryStore, Store};
use crate::wait::Wait;

/// One rank of a world over a store in memory. Either rank 0 serves the store, or somebody else
/// does.
struct Rank {
    me: usize,
    store: MemoryStore,
    losses: Arc<Losses>,
    leftovers: Arc<WorldKeys>,
    world: Scope,
    served: bool,
}

impl Rank {
    fn new(store: &MemoryStore, me: usize, size: usize, served: bool) -> Rank {
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let (losses, leftovers) = (Arc::new(Losses::none(shared, "test")), Arc::<WorldKeys>::default());
        let world = scope(store, &losses, &leftovers, Members::All(size), me, served, "test/world");
        Rank { me, store: store.clone(), losses, leftovers, world, served }
    }

    fn set(&self, name: &str, ranks: &[i32]) -> Option<Scope> {
        let members = Members::Listed(ranks.into());
        let position = members.position(self.me as i32)?;
        let prefix = format!("test/{name}");
        Some(scope(&self.store, &self.losses, &self.leftovers, members, position, self.served, &prefix))
    }
}

fn scope(
    store: &MemoryStore,
    losses: &Arc<Losses>,
    leftovers: &Arc<WorldKeys>,
    members: Members,
    me: usize,
    served: bool,
    prefix: &str,
) -> Scope {
    let left = ScopeKeys::new(&members, leftovers, Some(0));
    let serving = served && members.rank(me) == 0;
    let (store, losses, tickets) = (Arc::new(store.clone()), Arc::clone(losses), Tickets::default());
    let membership =
        Membership { store, losses, members, tickets, epoch: 0, me, served, serving, left, record: Default::default() };
    Scope::new(membership, prefix.to_owned())
}

fn run<T: Send>(store: &MemoryStore, size: usize, served: bool, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|threads| {
        let run = &run;
        let start = |me| threads.spawn(move || run(Rank::new(store, me, size, served)));
        let handles: Vec<_> = (0..size).map(start).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

/// Returns the part of the message that all ranks get. A rank that came too late gets a longer
/// message.
fn said_to_all(error: &Error) -> String {
    let message = error.message();
    message.split_once("who were told: ").map_or(message, |(_, told)| told).to_owned()
}

/// Makes a whole call, in which each rank publishes a value.
fn call(scope: &Scope, me: usize) {
    let round = scope.agree("call()", &soon()).unwrap();
    round.publish(&format!("of/{me}"), b"value", &soon()).unwrap();
    round.finish(&soon()).unwrap();
}

#[test]
fn calls_leave_no_more_than_the_last_one_did() {
    for served in [false, true] {
        let store = MemoryStore::new();
        run(&store, 3, served, |rank| (0..300).for_each(|_| call(&rank.world, rank.me)));
        let keys = store.keys();
        assert!(keys.iter().all(|key| key.starts_with("test/world/299/")), "{keys:?}");
        assert!(keys.len() < 30, "{keys:?}");
    }
}

#[test]
fn what_a_dropped_scope_left_goes_with_the_next_call_of_all_its_ranks() {
    let store = MemoryStore::new();
    let most = AtomicUsize::new(0);
    run(&store, 4, true, |rank| {
        for round in 0..100 {
            // The sets overlap. Each set is used once or twice, and is then dropped.
            for (name, ranks) in [("odd", &[1, 3][..]), ("all but one", &[2, 0, 1])] {
                if let Some(set) = rank.set(&format!("{name}{round}"), ranks) {
                    (0..=round % 2).for_each(|_| call(&set, rank.me));
                }
            }
            call(&rank.world, rank.me);
            most.fetch_max(rank.store.keys().len(), Ordering::SeqCst);
        }
    });
    let most = most.load(Ordering::SeqCst);
    assert!(most < 150, "{most} keys at a time");
    assert!(store.keys().iter().all(|key| key.starts_with("test/world/99/")), "{:?}", store.keys());
}

#[test]
fn a_set_cleans_up_after_smaller_ones_where_the_world_never_meets_again() {
    let store = MemoryStore::new();
    run(&store, 3, false, |rank| {
        let Some(set) = rank.set("set", &[0, 2]) else { return };
        for round in 0..50 {
            rank.set(&format!("part{round}"), &[2, 0]).iter().for_each(|part| call(part, rank.me));
            call(&set, rank.me);
        }
    });
    assert!(store.keys().iter().all(|key| key.starts_with("test/set/49/")), "{:?}", store.keys());
}

#[test]
fn a_failed_call_is_kept_for_late_ranks_until_a_later_one_is_agreed() {
    let store = MemoryStore::new();
    let messages = run(&store, 3, false, |rank| {
        if rank.me == 2 {
            // This rank comes when the others are two calls ahead.
            store.get("test/world/1/verdict", &soon()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        // Rank 0 gives the calls up, each once rank 1 waits in it.
        let wait = |number: u64| match rank.me {
            0 => short_once_here(&rank.world, number, 1),
            _ => soon(),
        };
        let call = |number| rank.world.agree("call()", &wait(number)).map(drop);
        // The late rank is told of the first failed call, and passes over the second one.
        let told = if rank.me == 2 { 1 } else { 2 };
        let failed: Vec<_> = (0..told).map(|number| call(number).unwrap_err()).collect();
        assert!(failed.iter().all(|error| error.status() == Status::Timeout), "{failed:?}");
        let messages: Vec<String> = failed.iter().map(said_to_all).collect();
        rank.world.agree("call()", &soon()).unwrap();
        rank.world.agree("call()", &soon()).unwrap();
        messages
    });
    assert_eq!(messages[2], messages[0][..1]);
    assert_eq!(messages[1], messages[0]);
    assert!(store.keys().iter().all(|key| key.starts_with("test/world/3/")), "{:?}", store.keys());
}

#[test]
fn calls_without_a_lost_rank_leave_nothing_however_many_they_are() {
    let store = MemoryStore::new();
    run(&store, 2, false, |rank| {
        call(&rank.world, rank.me);
        if rank.me == 1 {
            store.add("test/lost", 1, &soon()).unwrap();
            store.set("test/lost/1", b"1", &soon()).unwrap();
            return;
        }
        for number in 1..200 {
            let error = rank.world.agree("call()", &soon()).map(drop).unwrap_err();
            assert_eq!(error.status(), Status::PeerLost);
            let words = format!("rank 1 was lost before it called call() as call {number}");
            assert!(error.message().starts_with(&words), "{error}");
        }
    });
    assert!(store.keys().len() < 30, "{:?}", store.keys());
}

/// Ranks come at random moments, and the deadlines of some ranks pass before the others come.
/// Whatever the interleaving of verdicts, late ranks and removals is, all ranks get one verdict
/// for each call, and only the keys of the last calls are left in the end.
#[test]
fn late_ranks_and_removals_in_any_order_change_no_verdict() {
    // A rank makes at most one random call whose number is RANDOM or more. It reaches such a number
    // only if each number from RANDOM up to it was given up, and each of these was given up in the
    // random call of another rank. So 4 ranks make no random call with a number above RANDOM + 3,
    // and the calls from RANDOM + 4 on are agreed.
    const RANDOM: u64 = 40;
    const ALL: u64 = RANDOM + 6;
    for seed in 0..6u8 {
        let store = MemoryStore::new();
        let heard = run(&store, 4, seed % 2 == 0, |rank| {
            let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed * 8 + rank.me as u8; 32]);
            let mut heard = BTreeMap::new();
            let mut call = |name: &str, wait: &Wait| {
                let round = rank.world.agree(name, wait);
                let outcome = round.and_then(|round| {
                    round.publish(&format!("of/{}", rank.me), b"value", &soon())?;
                    round.finish(&soon())
                });
                let number = rank.world.calls_begun() - 1;
                // The number tells the calls apart, because all of them have one name.
                heard.insert(number, outcome.map_err(|error| (error.status(), said_to_all(&error))));
            };
            // A rank that was late passes over calls that the others gave up, so it needs fewer
            // calls of its own to reach a number.
            while rank.world.calls_begun() < RANDOM {
                let dice = random.next_u32();
                let pause = if dice % 16 == 0 { 30_000 } else { u64::from(dice % 400) };
                std::thread::sleep(Duration::from_micros(pause));
                let wait = Wait::after(Duration::from_millis(if dice / 16 % 8 == 0 { 4 } else { 20_000 }));
                call(if dice / 128 % 32 == 0 { "other()" } else { "call()" }, &wait);
            }
            // The last random call of a rank may have passed over some numbers, and may have made
            // one of these calls fail. No rank passes over a call that was not given up.
            while rank.world.calls_begun() < ALL {
                call("call()", &soon());
            }
            assert!(heard.range(ALL - 2..).all(|(_, outcome)| outcome.is_ok()), "{heard:?}");
            heard
        });
        for rank in 1..4 {
            for (number, outcome) in &heard[rank] {
                let first = heard[0].get(number).unwrap_or(outcome);
                assert_eq!(outcome, first, "seed {seed}, rank {rank}, call {number}");
            }
        }
        let keys = store.keys();
        assert!(
            keys.iter().all(|key| key.starts_with(&format!("test/world/{}/", ALL - 1)) || key.starts_with("test/at/")),
            "{keys:?}"
        );
    }
}
