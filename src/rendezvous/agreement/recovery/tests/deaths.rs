//! Processes that die at any moment of a recovery. The others come to one mesh without them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use super::{Job, recover, seats};
use crate::error::{Error, Status};
use crate::rendezvous::agreement::recovery::Recovery;
use crate::rendezvous::agreement::tests::{chance, soon};
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::{Hooked, MemoryStore, Store};
use crate::wait::Wait;

/// Returns a store for one process that dies after `operations` operations: all later ones fail.
pub(super) fn dying(store: MemoryStore, operations: usize) -> Arc<dyn Store> {
    let left = AtomicUsize::new(operations);
    let before = move |_: &str, _: usize, _: &Wait| {
        let count = |left: usize| left.checked_sub(1);
        match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::store("this process is dead")),
        }
    };
    Arc::new(Hooked { store, before })
}

/// Runs a job of four seats and a spare, which is process 4. `operations` says how many operations
/// each process has before it dies. Checks that all processes that live come to one mesh.
fn dies_at(operations: [usize; 5]) {
    let (job, at_end) = (&Job::new(5, 4), &soon());
    let run = |me: usize| {
        let store = dying(job.store.clone(), operations[me]);
        let mut rank = job.process_over(store, Incarnation::first(me as i32));
        let wait = if me == 4 { at_end.clone() } else { soon() };
        match recover(&mut rank, &job.arrival(), &wait) {
            Ok(_) => Some(rank),
            Err(error) if error.message() == "this process is dead" => {
                job.die_first(&[me as i32]);
                None
            }
            Err(error) if me == 4 && error.status() == Status::Aborted => None,
            Err(error) => panic!("{operations:?}: rank {me}: {error}"),
        }
    };
    std::thread::scope(|threads| {
        let spare = threads.spawn(move || run(4));
        let others: Vec<_> = (0..4).map(|me| threads.spawn(move || run(me))).collect();
        let mut ends: Vec<Recovery> = others.into_iter().filter_map(|rank| rank.join().unwrap()).collect();
        if ends.iter().all(|rank| !rank.epoch().in_mesh().contains(&Incarnation::first(4))) {
            // Nobody needs the spare, which would wait for ever.
            at_end.cancel.raise();
        }
        ends.extend(spare.join().unwrap());
        let ends: BTreeSet<String> =
            ends.iter().map(|rank| format!("{}: {}", rank.epoch_number(), seats(rank))).collect();
        assert_eq!(ends.len(), 1, "{operations:?}: {ends:?}");
    });
}

/// One process dies at its n-th operation on the store, or two processes do, for each n.
#[test]
fn a_death_at_any_operation_leaves_one_mesh() {
    const NEVER: usize = usize::MAX;
    let one = |victim: usize, at: usize| std::array::from_fn(|me| if me == victim { at } else { NEVER });
    let mut jobs: Vec<[usize; 5]> = (0..40).flat_map(|at| [0, 3, 4].map(|victim| one(victim, at))).collect();
    for number in 0..60_usize {
        let (first, second) = (number % 5, (number % 5 + 1 + number / 5 % 4) % 5);
        let mut both = one(first, number * 7 % 31);
        both[second] = number * 13 % 37;
        jobs.push(both);
    }
    for some in jobs.chunks(12) {
        std::thread::scope(|threads| some.iter().for_each(|job| drop(threads.spawn(|| dies_at(*job)))));
    }
}

/// Ranks die before, in and after turns. All others end in one mesh, which has all of them.
#[test]
fn ranks_that_die_at_any_moment_are_left_out() {
    const SIZE: usize = 6;
    for seed in 0..30_u64 {
        let chance = |me: usize, salt: u64| chance(seed, me, salt);
        let dies = |me: usize| me > 0 && (me == 1 + seed as usize % (SIZE - 1) || chance(me, 1) % 3 == 0);
        let job = Job::new(SIZE, SIZE);
        let left: Vec<i32> = (0..SIZE).filter(|me| !dies(*me)).map(|me| me as i32).collect();
        let run = |me: usize| {
            let mut rank = job.rank(me);
            sleep(Duration::from_micros(chance(me, 2) % 3000));
            if dies(me) {
                // Some ranks die while they wait in a turn, and some after its decision.
                if chance(me, 3) % 3 > 0 {
                    let came = rank.come(&job.arrival(), &Wait::after(Duration::from_millis(2)));
                    if came.is_ok() && chance(me, 4) % 2 == 0 {
                        let _ = rank.make(Ok(()), &Wait::after(Duration::from_millis(1)));
                    }
                }
                job.die_first(&[me as i32]);
                return None;
            }
            loop {
                match recover(&mut rank, &job.arrival(), &soon()) {
                    Ok(_) if rank.epoch().in_mesh().len() == left.len() => {
                        return Some((rank.epoch_number(), seats(&rank)));
                    }
                    // A rank that dies later is in the mesh, or has given the turn up.
                    Ok(_) => {}
                    Err(error) if error.status() == Status::Timeout => {}
                    Err(error) => panic!("seed {seed}, rank {me}: {error}"),
                }
            }
        };
        let ends: Vec<_> = std::thread::scope(|threads| {
            let all: Vec<_> = (0..SIZE).map(|me| threads.spawn(move || run(me))).collect();
            all.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(ends.len(), left.len());
        assert!(ends.iter().all(|end| *end == ends[0]), "seed {seed}: {ends:?}");
    }
}
