//! Processes that wait for a place: they are needed in a call of the world, or the job ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::*;

#[test]
fn a_spare_that_waits_is_called_and_comes_again() {
    let job = &Job::new(4, 3);
    let mut spare = job.rank(3);
    spare.watch_call(vec!["test/world/5/here/0".to_owned()]);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|threads| {
        let spare = threads.spawn(move || {
            assert_eq!(spare.come(&job.arrival(), &soon()).unwrap(), Outcome::Called);
            tell.send(()).unwrap();
            spare.watch_call(Vec::new());
            recover(&mut spare, &job.arrival(), &soon()).unwrap()
        });
        job.await_here(1, "3");
        job.store.set("test/world/5/here/0", b"dm_world_barrier()", &soon()).unwrap();
        // If a rank were lost first, the spare would get its place before it looks for a call.
        told.recv().unwrap();
        job.die_first(&[1]);
        let left = job.recover(&[0, 2]);
        assert_eq!(all_equal(left), "epoch 1: seats=0,3,2 without=");
        assert_eq!(spare.join().unwrap(), Outcome::Epoch);
    });
}

#[test]
fn processes_that_wait_are_told_of_the_end_of_the_job() {
    let mut job = Job::new(4, 4);
    job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    job.die_first(&[1]);
    // Rank 0 has lost its replica, and waits.
    let mut left: Vec<Recovery> = std::thread::scope(|threads| {
        let come = |me: usize| {
            let job = &job;
            threads.spawn(move || {
                let mut rank = job.rank(me);
                assert_eq!(rank.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
                assert_eq!(rank.make(Ok(()), &soon()).unwrap(), Made::Whole);
                rank
            })
        };
        [0, 2, 3].map(come).map(|rank| rank.join().unwrap()).into()
    });
    assert_eq!(left.iter().map(Recovery::is_in_mesh).collect::<Vec<_>>(), [false, true, true]);
    assert!(!left[1].is_due(&soon()).unwrap());
    std::thread::scope(|threads| {
        let [benched, second, third] = &mut left[..] else { unreachable!() };
        let waiting = threads.spawn(|| benched.come(&job.arrival(), &soon()).unwrap());
        job.await_here(2, "0");
        for rank in [second, third] {
            rank.end(&soon()).unwrap();
        }
        assert_eq!(waiting.join().unwrap(), Outcome::Ended);
    });
    assert_eq!(job.store.get("test/decision/2", &soon()).unwrap(), b"end");
}

#[test]
fn the_rank_that_serves_stays_for_spares_that_come_to_wait_when_the_job_has_ended() {
    // Ranks 2 and 3 are spares. Rank 3 is lost.
    let job = Job::new(4, 2);
    job.die_first(&[3]);
    std::thread::scope(|threads| {
        let serves = threads.spawn(|| {
            let mut rank = job.rank(0);
            (rank.membership.served, rank.membership.serving) = (true, true);
            rank.end(&soon()).unwrap();
            job.store.keys()
        });
        job.store.get("test/decision/1", &soon()).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let mut late = job.rank(2);
        late.membership.served = true;
        assert_eq!(late.come(&job.arrival(), &soon()).unwrap(), Outcome::Ended);
        let keys = serves.join().unwrap();
        assert!(keys.iter().any(|key| key == "test/turn/1/decision/read/by/2"), "{keys:?}");
    });
}

/// Rank 0 serves the store, and is benched. Rank 2 has read the decision and is lost. Rank 3 is
/// slow to leave the call that ends the job, and has not read the decision.
#[test]
fn a_benched_rank_that_serves_stays_until_the_mesh_has_left_the_call_that_ends_the_job() {
    let mut job = Job::new(4, 4);
    job.replicas = Replicas { sizes: vec![2, 2], dim: 0 };
    job.die_first(&[1]);
    let mut left: Vec<Recovery> = std::thread::scope(|threads| {
        let come = |me: usize| {
            let mut rank = job.rank(me);
            (rank.membership.served, rank.membership.serving) = (true, me == 0);
            let job = &job;
            threads.spawn(move || {
                assert_eq!(rank.come(&job.arrival(), &soon()).unwrap(), Outcome::Epoch);
                assert_eq!(rank.make(Ok(()), &soon()).unwrap(), Made::Whole);
                rank
            })
        };
        [0, 2, 3].map(come).map(|rank| rank.join().unwrap()).into()
    });
    let (has_ended, job) = (AtomicBool::new(false), &job);
    std::thread::scope(|threads| {
        let [benched, second, third] = &mut left[..] else { unreachable!() };
        let serves = threads.spawn(|| {
            let outcome = benched.come(&job.arrival(), &soon()).unwrap();
            (outcome, has_ended.load(Ordering::SeqCst))
        });
        job.await_here(2, "0");
        second.end(&soon()).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        job.die_first(&[2]);
        has_ended.store(true, Ordering::SeqCst);
        let told = Instant::now();
        third.tell_ended(&soon());
        assert_eq!(serves.join().unwrap(), (Outcome::Ended, true));
        assert!(told.elapsed() < Duration::from_secs(10), "{:?}", told.elapsed());
    });
}

#[test]
fn terms_that_name_no_dimension_of_the_mesh_are_an_error_of_the_store() {
    let job = Job::new(3, 2);
    let options = "0\nends=0 dim=9 replace=0 silent=- min_size=0 max_size=- any_state=0\n0\n\ndm_recover()";
    job.store.set("test/turn/1/options", options.as_bytes(), &soon()).unwrap();
    job.die_first(&[0, 1]);
    let error = job.rank(2).come(&job.arrival(), &soon()).unwrap_err();
    assert_eq!(error.status(), Status::Store);
    assert!(error.message().contains("unreadable options under the key test/turn/1/options"), "{error}");
}
