//! Sets that wait for each other, with ranks as threads over a store in memory.

use std::sync::Arc;
use std::time::Instant;

use super::super::tests::{membership, ranks, scope, soon};
use super::super::{Membership, Scope};
use super::*;
use crate::error::Status;
use crate::rendezvous::store::{MemoryStore, Store};

/// Returns a set of these ranks as rank `rank` sees it, beside the scope of the world.
fn set(world: &Scope, name: &str, ranks: &[i32], rank: usize) -> Scope {
    let members = Members::Listed(ranks.into());
    let me = members.position(rank as i32).unwrap();
    let Membership { store, losses, .. } = &*world.membership;
    Scope::new(membership(Arc::clone(store), Arc::clone(losses), members, me), format!("test/{name}"))
}

/// Each rank calls in one of these sets, after the number of milliseconds that is given beside the
/// set. All ranks must be told within 3 s after the last of them has called.
fn wait_for_each_other(calls: &[(&[i32], &str, u64)]) {
    let last = calls.iter().map(|call| call.2).max().unwrap();
    let began = Instant::now();
    let errors = ranks(calls.len(), |me, world| {
        let (members, name, after) = calls[me];
        std::thread::sleep(Duration::from_millis(after));
        set(&world, name, members, me).agree(&format!("call_of_{name}()"), &soon()).map(drop).unwrap_err()
    });
    let waited = began.elapsed() - Duration::from_millis(last);
    for error in &errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.message().contains("same order"), "{error}");
    }
    assert!(waited < Duration::from_secs(3), "{waited:?}");
}

#[test]
fn a_wait_for_each_other_is_found_when_the_first_ranks_are_late() {
    let (all, some): (&[i32], &[i32]) = (&[0, 1, 2, 3], &[2, 1, 3]);
    wait_for_each_other(&[(all, "all", 400), (some, "some", 0), (some, "some", 400), (all, "all", 0)]);
}

#[test]
fn a_wait_for_each_other_is_found_by_ranks_of_one_set_alone() {
    let (left, right): (&[i32], &[i32]) = (&[0, 1, 3], &[1, 2, 3]);
    wait_for_each_other(&[(left, "left", 0), (right, "right", 100), (right, "right", 0), (left, "left", 100)]);
}

/// The ranks that wait look around in the order that the test chooses, and not when a clock says
/// so. If no further rank came, the next search after look 7 would be at look 15.
#[test]
fn a_wait_for_each_other_is_found_at_the_next_look_after_the_last_rank_has_come() {
    let (left, right): (&[i32], &[i32]) = (&[0, 1, 3], &[1, 2, 3]);
    let store = MemoryStore::new();
    let world = scope(&store, 0, 4);
    let come = |members: &[i32], name: &str, rank: usize| {
        let round = set(&world, name, members, rank).join_next(&format!("call_of_{name}()"));
        store.set(&round.here("", round.membership.me), b"here", &soon()).unwrap();
        DeadlockSearch::of(&round)
    };
    let early = [come(left, "left", 0), come(right, "right", 2), come(left, "left", 3)];
    for _ in 0..10 {
        early.iter().for_each(|search| search.look(&soon()));
    }
    let verdicts = ["left", "right"].map(|name| format!("test/{name}/0/verdict"));
    assert_eq!(store.present(&verdicts, &soon()).unwrap(), [false, false]);
    let last = come(right, "right", 1);
    last.look(&soon());
    early.iter().for_each(|search| search.look(&soon()));
    assert_eq!(store.present(&verdicts, &soon()).unwrap(), [true, true]);
}

#[test]
fn a_wait_in_a_ring_is_found() {
    let (a, b, c): (&[i32], &[i32], &[i32]) = (&[0, 1], &[1, 2], &[2, 0]);
    wait_for_each_other(&[(a, "a", 0), (b, "b", 0), (c, "c", 50)]);
}

#[test]
fn the_verdicts_of_other_sets_stay_when_the_rank_that_wrote_them_goes_on() {
    let sets: [(&[i32], &str); 3] = [(&[0, 1], "a"), (&[1, 2], "b"), (&[2, 0], "c")];
    // Each rank calls first in its own set, and all of them learn of the ring. Then ranks 0 and 1
    // agree on a call of set a, and rank 1 calls in set b before rank 2 has read that verdict.
    let stay = ranks(3, |me, world| {
        let (members, name) = sets[me];
        let mine = set(&world, name, members, me);
        assert_eq!(mine.agree("first()", &soon()).map(drop).unwrap_err().status(), Status::Mismatch);
        if me < 2 {
            let a = if me == 0 { mine } else { set(&world, "a", &[0, 1], me) };
            // Rank 1 was not in the first call of set a, which ended with the ring. Rank 1 has
            // heard of the ring, so its next call meets that of rank 0.
            a.agree("second()", &soon()).unwrap();
        }
        world.agree("both are through", &soon()).unwrap();
        let keys = ["a", "b", "c"].map(|name| format!("test/{name}/0/verdict"));
        world.membership.store.present(&keys[1..], &soon()).unwrap()
    });
    assert_eq!(stay, vec![vec![true, true]; 3]);
}

#[test]
fn calls_of_different_sets_in_different_orders_are_a_mismatch_and_not_a_wait() {
    // In the set {3, 1}, rank 1 calls first in the set and rank 3 first in the world.
    let began = Instant::now();
    let errors = ranks(4, |me, world| {
        let inside = || {
            let members = Members::Listed([3, 1].into());
            let Membership { store, losses, .. } = &*world.membership;
            let membership = membership(Arc::clone(store), Arc::clone(losses), members, 1);
            Scope::new(membership, "test/set".to_owned())
        };
        match me {
            1 => inside().agree("dm_flatten(dp, cp)", &soon()).map(drop).unwrap_err(),
            _ => world.agree("dm_world_barrier()", &soon()).map(drop).unwrap_err(),
        }
    });
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        let words = ["rank 1", "rank 3", "dm_flatten(dp, cp) as call 0", "dm_world_barrier() as call 0", "same order"];
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }
}

#[test]
fn a_rank_that_is_late_because_of_another_set_is_waited_for() {
    // Rank 1 waits in the set for rank 3, which has work to do; meanwhile the world waits for both.
    let outcomes = ranks(4, |me, world| {
        if me == 1 || me == 3 {
            let members = Members::Listed([3, 1].into());
            let Membership { store, losses, .. } = &*world.membership;
            let position = usize::from(me == 1);
            let membership = membership(Arc::clone(store), Arc::clone(losses), members, position);
            let set = Scope::new(membership, "test/set".to_owned());
            std::thread::sleep(Duration::from_millis(if me == 3 { 1500 } else { 0 }));
            set.agree("dm_flatten(dp, cp)", &soon())?;
        }
        world.agree("dm_world_barrier()", &soon()).map(drop)
    });
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(()), Ok(())]);
}
