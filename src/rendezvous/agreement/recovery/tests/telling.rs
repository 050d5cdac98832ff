//! Refusals, the rank that serves the store, and failures that follow from a loss.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::starved::timed;

fn refusal() -> Error {
    Error::invalid("dim is \"tp\", and the mesh has dp")
}

fn is_refused(error: &Error, number: u64) {
    let message = format!("rank 2 refused its own call in recovery {number}: {}", refusal().message());
    assert_eq!((error.status(), error.message()), (Status::InvalidArgument, message.as_str()));
    assert_eq!(error.ranks(), [2]);
}

#[test]
fn a_refusal_fails_the_recovery_of_those_that_come_and_they_meet_in_the_next() {
    let job = Job::new(3, 3);
    let mut odd = job.rank(2);
    std::thread::scope(|threads| {
        let others = [0, 1].map(|me| {
            let (job, mut rank) = (&job, job.rank(me));
            threads.spawn(move || {
                is_refused(&rank.come(&job.arrival(), &soon()).unwrap_err(), 1);
                recover(&mut rank, &job.arrival(), &soon()).unwrap();
                seats(&rank)
            })
        });
        job.await_here(1, "0");
        odd.refuse(&refusal(), &soon());
        recover(&mut odd, &job.arrival(), &soon()).unwrap();
        assert_eq!(others.map(|other| other.join().unwrap()), [seats(&odd), seats(&odd)]);
        assert_eq!(odd.epoch_number(), 2);
    });
}

#[test]
fn a_refusal_of_a_rank_that_is_behind_reaches_those_that_wait_for_it() {
    let job = Job::new(2, 2);
    let mut waiting = job.rank(0);
    let gives_up = waiting.come(&job.arrival(), &Wait::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(gives_up.status(), Status::Timeout);
    std::thread::scope(|threads| {
        let waiting = threads.spawn(|| waiting.come(&job.arrival(), &soon()).unwrap_err());
        job.await_here(2, "0");
        job.rank(1).refuse(&refusal(), &soon());
        let error = waiting.join().unwrap();
        assert!(error.message().starts_with("rank 1 refused its own call in recovery 2: "), "{error}");
    });
}

#[test]
fn a_rank_that_goes_on_refusing_does_not_fill_the_store() {
    let job = Job::new(2, 2);
    let mut rank = job.rank(0);
    (0..1100).for_each(|_| rank.refuse(&refusal(), &soon()));
    assert_eq!(job.store.keys().len(), 1000);
}

/// Returns rank 0 of a job that needs more replicas than it has. This rank serves the store.
fn serving(job: &Job) -> Recovery {
    let mut rank = job.rank(0);
    (rank.membership.served, rank.membership.serving) = (true, true);
    rank
}

/// Rank 1 comes to turn 1.
fn come(job: &Job) {
    job.store.set("test/turn/1/here/1", b"1", &soon()).unwrap();
    job.store.add("test/turn/1/count", 1, &soon()).unwrap();
}

#[test]
fn the_rank_that_serves_stays_until_the_others_have_read_how_the_recovery_has_ended() {
    let mut job = Job::new(2, 2);
    job.terms.min_size = 3;
    let has_read = AtomicBool::new(false);
    come(&job);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            job.store.get("test/decision/1", &soon()).unwrap();
            // This rank is slow.
            std::thread::sleep(Duration::from_millis(100));
            let mut rank = job.rank(1);
            rank.membership.served = true;
            has_read.store(true, Ordering::SeqCst);
            rank.come(&job.arrival(), &soon()).unwrap_err();
        });
        let (error, took) = timed(|| serving(&job).come(&job.arrival(), &soon()).unwrap_err());
        assert_eq!(error.status(), Status::InvalidState);
        assert!(has_read.load(Ordering::SeqCst), "rank 0 has left: {took:?}");
        assert!(took.own() < Duration::from_secs(1), "{took:?}");
    });
}

#[test]
fn the_rank_that_serves_does_not_wait_for_one_that_is_lost() {
    let mut job = Job::new(2, 2);
    job.terms.min_size = 3;
    come(&job);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            job.store.get("test/decision/1", &soon()).unwrap();
            job.die_first(&[1]);
        });
        let (_, took) = timed(|| serving(&job).come(&job.arrival(), &soon()).unwrap_err());
        assert!(took.own() < Duration::from_secs(1), "{took:?}");
    });
}

/// The communicator library of rank 0 sees rank 2 go before the store does.
#[test]
fn a_failure_that_follows_from_a_loss_begins_the_next_turn() {
    let job = Job::new(3, 3);
    let failed = Error::new(Status::Ccl, "ncclCommShrink failed: remote error");
    let made = std::thread::scope(|threads| {
        let ranks = [0, 1, 2].map(|me| {
            let (job, failed) = (&job, &failed);
            threads.spawn(move || {
                let mut rank = job.rank(me);
                rank.come(&job.arrival(), &soon()).unwrap();
                match me {
                    0 => rank.make(Err(failed), &soon()).unwrap(),
                    1 => rank.make(Ok(()), &soon()).unwrap(),
                    _ => {
                        job.die_first(&[2]);
                        Made::Broken
                    }
                }
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    assert_eq!(made, [Made::Broken; 3]);
}
