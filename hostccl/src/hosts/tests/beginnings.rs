//! Ranks that wait for the ranks of their own host: what others see of them, and how their waits
//! end.

use std::sync::Barrier;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::data::{case, random_hosts};
use super::results::{check, perform, random_args};
use super::{Args, Random, Ranks, sum};
use crate::call_name::Name;
use crate::types::*;

/// Whether all other ranks of this host have begun this rank's current step.
fn have_begun(comm: &crate::comm::Comm) -> bool {
    (0..comm.nranks).all(|seat| seat == comm.rank || comm.has_begun(seat, comm.step()))
}

/// In each call, one rank of each host comes when it has seen that all others of its host are in
/// the call. Between two calls, no rank is seen in a call.
#[test]
fn a_rank_is_seen_in_a_collective_if_and_only_if_it_is_in_one() {
    for seed in 0..8 {
        let mut random = Random(seed * 31 + 7);
        let hosts = random_hosts(&mut random);
        let lists: Vec<&[usize]> = hosts.iter().map(Vec::as_slice).collect();
        let ranks = Ranks::new(&lists);
        let n = ranks.ends.len();
        let calls: Vec<(Args, usize)> = (0..12).map(|_| (random_args(&mut random, n), random.next(4))).collect();
        let all = Barrier::new(n);
        ranks.run(|me, comm| {
            for (number, (args, late)) in calls.iter().enumerate() {
                let what = format!("seed {seed}, {hosts:?}, call {number} {args:?}, rank {me}");
                let case = case(args, me, n);
                all.wait();
                let seen = (0..comm.nranks).filter(|seat| *seat != comm.rank && comm.has_begun(*seat, comm.step()));
                assert_eq!(seen.collect::<Vec<_>>(), [], "{what}: seats that have not begun");
                all.wait();
                let began = Instant::now();
                while late % comm.nranks == comm.rank && !have_begun(comm) {
                    assert!(began.elapsed() < Duration::from_secs(20), "{what}: a seat is not seen to have begun");
                    std::thread::yield_now();
                }
                check(args, &case, &perform(comm, args, &case, false), false, &what);
            }
        });
    }
}

/// The ranks come to their calls at random times. Seat 0 of a host is early, late, or far ahead.
#[test]
fn ranks_that_come_at_random_times_have_the_results_of_a_plain_loop() {
    for seed in 0..8 {
        let mut random = Random(seed * 131 + 9);
        let hosts = random_hosts(&mut random);
        let lists: Vec<&[usize]> = hosts.iter().map(Vec::as_slice).collect();
        let ranks = Ranks::new(&lists);
        let n = ranks.ends.len();
        let calls: Vec<Args> = (0..24).map(|_| random_args(&mut random, n)).collect();
        ranks.run(|me, comm| {
            let mut random = Random(seed * 1009 + me as u64);
            for (number, args) in calls.iter().enumerate() {
                let case = case(args, me, n);
                match random.next(4) {
                    0 => sleep(Duration::from_micros(random.next(800) as u64)),
                    1 => (0..random.next(40)).for_each(|_| std::thread::yield_now()),
                    _ => {}
                }
                let what = format!("seed {seed}, {hosts:?}, call {number} {args:?}, rank {me}");
                check(args, &case, &perform(comm, args, &case, false), false, &what);
            }
        });
    }
}

/// This test takes 3 s, because a rank that waits for a waiting rank waits one second longer than
/// its timeout.
#[test]
fn whichever_rank_is_missing_is_blamed_by_all() {
    const HOSTS: [&[usize]; 3] = [&[0, 2, 4], &[1, 3], &[5]];
    std::thread::scope(|scope| {
        for missing in 0..6 {
            scope.spawn(move || {
                super::only_the_missing_rank_is_blamed(missing, Duration::from_secs(2), |timeout| {
                    let ranks = Ranks::new(&HOSTS);
                    assert_eq!(ranks.run(|_, comm| sum(comm, 1, Name::NONE)), [const { Ok(6) }; 6]);
                    ranks.ends.iter().for_each(|end| end.set_timeout(timeout.as_millis() as u64));
                    let began = Instant::now();
                    let errors = ranks.run(|me, comm| (me != missing).then(|| sum(comm, 1, Name::NONE).unwrap_err()));
                    assert!(began.elapsed() < timeout + Duration::from_secs(20), "{:?}", began.elapsed());
                    errors.into_iter().flatten().collect()
                });
            });
        }
    });
}

/// Rank 0 waits for rank 2 on its host, which never comes, and all others wait for rank 0.
#[test]
fn a_rank_that_waits_for_its_host_is_aborted_at_once() {
    for aborter in [0, 1, 3] {
        let ranks = Ranks::new(&[&[0, 2, 3], &[1, 4]]);
        let errors = ranks.run(|me, comm| {
            if me == 2 {
                while [0, 1, 3, 4].iter().any(|other| !ranks.ends[*other].seat_waits(ranks.ends[*other].rank)) {
                    sleep(Duration::from_millis(1));
                }
                ranks.ends[aborter].raise_abort();
                ranks.ends[aborter].abort();
                return (Instant::now(), None);
            }
            let error = sum(comm, 1, Name::NONE).unwrap_err();
            (Instant::now(), Some(error))
        });
        let (aborted, _) = errors[2];
        for (me, (ended, error)) in errors.into_iter().enumerate() {
            let Some(error) = error else { continue };
            let took = ended.saturating_duration_since(aborted);
            assert!(took < Duration::from_secs(2), "rank {me} took {took:?}: {}", error.message());
            let expected = if me == aborter { ncclInternalError } else { ncclRemoteError };
            assert_eq!(error.code(), expected, "rank {me}: {}", error.message());
        }
    }
}
