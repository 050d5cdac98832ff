//! The ranks that are left agree on who is lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{chance, membership, ranks, short_once_here, soon};
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::suspects::SUSPECTED;
use crate::rendezvous::agreement::{Members, Scope, TakenForLost};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::{Hooked, MemoryStore, Store};
use crate::wait::Wait;

fn lost(scope: &Scope, known: &[i32]) -> Result<Vec<i32>> {
    agree(scope, TakenForLost { lost: known, suspects: &[] }, &soon())
}

fn agree(scope: &Scope, known: TakenForLost<'_>, wait: &Wait) -> Result<Vec<i32>> {
    scope.agree_on_lost("dm_shrink()", known, wait).map(|agreed| agreed.lost)
}

/// Adds this rank to the list of lost ranks, as the server does when a process ends.
fn die(scope: &Scope) {
    scope.membership.losses.announce(Incarnation::first(scope.membership.me as i32));
}

#[test]
fn each_knows_another_loss() {
    let agreed = ranks(6, |me, scope| match me {
        4 | 5 => None,
        0 => Some(lost(&scope, &[4])),
        1 => Some(lost(&scope, &[5])),
        _ => Some(lost(&scope, &[])),
    });
    for agreed in agreed.into_iter().flatten() {
        assert_eq!(agreed.unwrap(), [4, 5]);
    }
}

/// Rank 1 has taken over to tell of the loss of rank 3, and has died before it did so.
#[test]
fn a_loss_is_told_also_when_the_rank_that_was_to_tell_it_is_lost() {
    let agreed = ranks(4, |me, scope| match me {
        1 => {
            scope.membership.store.get("test/world/0/here/0", &soon()).unwrap();
            scope.membership.store.get("test/world/0/here/2", &soon()).unwrap();
            die(&scope);
            None
        }
        3 => None,
        _ => {
            scope.membership.store.set("test/world/0/tells/3", b"1", &soon()).unwrap();
            Some(lost(&scope, &[3]).unwrap())
        }
    });
    assert_eq!(agreed, [Some(vec![1, 3]), None, Some(vec![1, 3]), None]);
}

#[test]
fn nobody_is_lost() {
    for agreed in ranks(3, |_, scope| lost(&scope, &[])) {
        let error = agreed.unwrap_err();
        assert_eq!(error.status(), Status::InvalidState);
        assert!(error.message().contains("no rank is lost"), "{error}");
    }
}

/// After 1,000 refusals in a row a rank tells the others of no further one. A call in which the
/// rank takes part ends the row, also one that agrees on lost ranks.
#[test]
fn a_rank_that_takes_part_tells_of_its_next_refusal() {
    let refusal = || Error::invalid("lost_ranks is wrong");
    let told = ranks(3, |me, scope| {
        if me == 2 {
            die(&scope);
            return None;
        }
        if me == 0 {
            (0..1000).for_each(|_| scope.tell_refusal("probe", &refusal(), &soon()));
        }
        assert_eq!(lost(&scope, &[]).unwrap(), [2]);
        match me {
            0 => scope.tell_refusal("dm_shrink", &refusal(), &soon()),
            _ => {
                let error = lost(&scope, &[]).unwrap_err();
                assert_eq!((error.status(), error.ranks()), (Status::InvalidArgument, &[0][..]), "{error}");
            }
        }
        Some(lost(&scope, &[]).unwrap())
    });
    assert_eq!(told, [Some(vec![2]), Some(vec![2]), None]);
}

#[test]
fn a_rank_that_is_accused_and_lives_is_told_so() {
    let told = ranks(4, |me, scope| lost(&scope, if me == 1 { &[2] } else { &[] }));
    for (me, told) in told.into_iter().enumerate() {
        match (me, told) {
            (2, Err(error)) => {
                assert_eq!((error.status(), error.lost()), (Status::NotMember, &[2][..]), "{error}");
            }
            (2, Ok(lost)) => panic!("rank 2 goes on without {lost:?}"),
            (_, lost) => assert_eq!(lost.unwrap(), [2]),
        }
    }
}

/// The network between ranks 0 and 1 on one side and ranks 2 and 3 on the other is broken, and all
/// of them reach the store. Rank 4 is lost.
#[test]
fn ranks_that_suspect_each_other_and_come_are_not_lost() {
    let all_are_here = Barrier::new(4);
    let agreed = ranks(5, |me, scope| {
        if me == 4 {
            die(&scope);
            return None;
        }
        let suspects = if me < 2 { &[2, 3][..] } else { &[0, 1] };
        // On a busy machine, a rank may come more than the second later for which the others wait.
        scope.membership.store.set(&format!("test/world/0/here/{me}"), b"here", &soon()).unwrap();
        all_are_here.wait();
        Some(agree(&scope, TakenForLost { lost: &[], suspects }, &soon()).unwrap())
    });
    assert_eq!(agreed[..4], vec![Some(vec![4]); 4]);
}

/// Rank 0 suspects rank 1, which comes while rank 0 waits for it. Rank 2 is lost. This test takes
/// the second for which rank 0 waits.
#[test]
fn a_suspected_rank_that_comes_within_the_second_is_not_lost() {
    let memory = MemoryStore::new();
    let (coming, has_come) = (memory.clone(), AtomicBool::new(false));
    let before = move |operation: &str, _: usize, wait: &Wait| {
        let waits_for_suspects = operation == "wait" && wait.deadline.timeout() <= SUSPECTED;
        if waits_for_suspects && !has_come.swap(true, Ordering::SeqCst) {
            coming.set("test/world/0/here/1", b"here", &soon())?;
            coming.add("test/world/0/count", 1, &soon())?;
        }
        Ok(())
    };
    let store: Arc<dyn Store> = Arc::new(Hooked { store: memory.clone(), before });
    let losses = Arc::new(Losses::none(Arc::clone(&store), "test"));
    let scope = Scope::new(membership(store, losses, Members::All(3), 0), "test/world".to_owned());
    scope.membership.losses.announce(Incarnation::first(2));
    let agreed = agree(&scope, TakenForLost { lost: &[], suspects: &[1] }, &soon()).unwrap();
    assert_eq!(agreed, [2]);
    assert_eq!(memory.try_get("test/world/0/here/1", &soon()).unwrap().as_deref(), Some(&b"here"[..]));
}

/// This test takes the second for which the others wait.
#[test]
fn a_suspected_rank_that_does_not_come_is_lost() {
    let began = Instant::now();
    let agreed = ranks(4, |me, scope| {
        let suspects = if me == 0 { &[1, 3][..] } else { &[] };
        if me != 1 {
            // On a busy machine, rank 1 may come a second later than the others.
            scope.membership.store.get("test/world/0/here/1", &soon()).unwrap();
        }
        (me < 3).then(|| agree(&scope, TakenForLost { lost: &[], suspects }, &soon()).unwrap())
    });
    assert_eq!(agreed[..3], vec![Some(vec![3]); 3]);
    assert!(began.elapsed() > Duration::from_millis(900), "{:?}", began.elapsed());
}

/// A suspicion shortens no wait for a rank that nobody suspects.
#[test]
fn a_rank_that_nobody_suspects_is_waited_for() {
    let told = ranks(3, |me, scope| {
        let known = TakenForLost { lost: &[], suspects: &[1] };
        (me == 0).then(|| agree(&scope, known, &Wait::after(Duration::from_millis(1300))).unwrap_err())
    });
    let error = told.into_iter().flatten().next().unwrap();
    assert_eq!((error.status(), error.ranks()), (Status::Timeout, &[1, 2][..]), "{error}");
}

#[test]
fn a_missing_rank_is_named_and_told_that_it_was_late() {
    let told = ranks(4, |me, scope| {
        let store = &scope.membership.store;
        if me == 3 {
            die(&scope);
            return None;
        }
        let wait = match me {
            // Rank 0 gives the call up, once rank 2 waits in it and rank 3 is known to be lost.
            0 => {
                store.get("test/lost/1", &soon()).unwrap();
                short_once_here(&scope, 0, 2)
            }
            1 => {
                store.get("test/world/0/verdict", &soon()).unwrap();
                soon()
            }
            _ => soon(),
        };
        let first = agree(&scope, TakenForLost::default(), &wait).unwrap_err();
        Some((first, lost(&scope, &[])))
    });
    for (me, (first, second)) in told.into_iter().enumerate().filter_map(|(me, told)| Some((me, told?))) {
        assert_eq!((first.status(), first.ranks()), (Status::Timeout, &[1][..]), "{first}");
        assert_eq!(first.message().contains("came too late"), me == 1, "{first}");
        assert_eq!(second.unwrap(), [3]);
    }
}

/// Ranks die before, in and after the agreement. The others go on until they agree on all of them.
#[test]
fn ranks_that_die_at_any_moment_are_left_out() {
    const SIZE: usize = 7;
    for seed in 0..40_u64 {
        let chance = |me: usize, salt: u64| chance(seed, me, salt);
        let dies = |me: usize| me == seed as usize % SIZE || chance(me, 1) % 3 == 0;
        let all: Vec<i32> = (0..SIZE).filter(|me| dies(*me)).map(|me| me as i32).collect();
        let agreed = ranks(SIZE, |me, scope| {
            sleep(Duration::from_micros(chance(me, 2) % 3000));
            if dies(me) {
                if chance(me, 3) % 2 == 0 {
                    // This rank dies while it waits in the agreement.
                    let _ = agree(&scope, TakenForLost::default(), &Wait::after(Duration::from_millis(2)));
                }
                die(&scope);
                return Ok::<_, Error>(Vec::new());
            }
            let mut calls = Vec::new();
            while calls.last() != Some(&all) {
                match agree(&scope, TakenForLost::default(), &soon()) {
                    Ok(lost) => calls.push(lost),
                    // The rank that dies has given the call up.
                    Err(error) if matches!(error.status(), Status::Timeout | Status::InvalidState) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(calls)
        });
        let mut of_survivors = Vec::new();
        for (me, calls) in agreed.into_iter().enumerate().filter(|(me, _)| !dies(*me)) {
            of_survivors.push(calls.unwrap_or_else(|error| panic!("seed {seed}, rank {me}: {error}")));
        }
        of_survivors.dedup();
        assert!(of_survivors.len() <= 1, "seed {seed}: ranks have agreed on different lists: {of_survivors:?}");
    }
}
