//! The ranks that are left agree on who is lost.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{chance, ranks, soon};
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::{Scope, TakenForLost};
use crate::rendezvous::incarnation::Incarnation;
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
    let agreed = ranks(5, |me, scope| {
        if me == 4 {
            die(&scope);
            return None;
        }
        let suspects = if me < 2 { &[2, 3][..] } else { &[0, 1] };
        Some(agree(&scope, TakenForLost { lost: &[], suspects }, &soon()).unwrap())
    });
    assert_eq!(agreed[..4], vec![Some(vec![4]); 4]);
}

/// This test takes the second for which the others wait.
#[test]
fn a_suspected_rank_that_does_not_come_is_lost() {
    let began = Instant::now();
    let agreed = ranks(4, |me, scope| {
        let suspects = if me == 0 { &[1, 3][..] } else { &[] };
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
    let short = Wait::after(Duration::from_millis(300));
    let told = ranks(4, |me, scope| {
        if me == 3 {
            die(&scope);
            return None;
        }
        if me == 1 {
            sleep(Duration::from_millis(800));
        }
        let first = agree(&scope, TakenForLost::default(), &short).unwrap_err();
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
