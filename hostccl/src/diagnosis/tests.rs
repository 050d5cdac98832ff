use super::*;
use crate::hosts_of_threads::{communicators, on_one_host};

const TIMEOUT: Duration = Duration::from_millis(500);

/// Returns the error of rank 0 of `nranks` when it has ended its step, and the time is up in which
/// it waits for the step of the others. `stopped` are the ranks that were stopped while they ended
/// the step, `done` are the ranks that have ended it.
fn late_step(nranks: usize, stopped: &[usize], done: &[usize]) -> Option<Error> {
    let ends = on_one_host(nranks, nranks);
    ends[0].end_step();
    let blocked = ends[0].step_blocked().expect("the other ranks have not ended the step");
    let crate::poll::Poll::Blocked { seen, blocker } = blocked else { panic!("{blocked:?}") };
    stopped.iter().for_each(|&rank| ends[0].segment.seat(rank).step.store(1));
    done.iter().for_each(|&rank| ends[rank].end_step());
    let error = time_out(&ends[0], (blocker, seen), TIMEOUT, "a call");
    assert_eq!(ends[0].check().err(), error, "the communicator fails with the error alone");
    error
}

#[test]
fn a_rank_that_did_not_come_is_named() {
    for (nranks, stopped, done) in [(2, vec![], vec![]), (3, vec![], vec![2]), (3, vec![2], vec![])] {
        let error = late_step(nranks, &stopped, &done).unwrap();
        assert_eq!(error.message(), "rank 1 did not come within 500 ms");
        assert_eq!(error.blame().ranks, [1]);
    }
}

#[test]
fn the_other_one_of_two_ranks_is_named_when_it_is_stopped_while_it_ends_its_step() {
    let error = late_step(2, &[1], &[]).unwrap();
    assert_eq!(error.message(), "rank 1 did not come within 500 ms");
    assert_eq!(error.blame().ranks, [1]);
}

#[test]
fn a_rank_that_is_stopped_while_it_ends_its_step_is_not_known() {
    for (stopped, done) in [(vec![1, 2], vec![]), (vec![1], vec![2])] {
        let error = late_step(3, &stopped, &done).unwrap();
        let said = "all ranks came, but one of them did not do its part within 500 ms: it may be stopped";
        assert_eq!((error.code(), error.message()), (ncclTimeout, said));
        assert_eq!(error.blame(), &Blame::none());
    }
}

#[test]
fn a_step_that_ends_at_the_last_moment_is_no_timeout() {
    assert_eq!(late_step(2, &[], &[1]), None);
    assert_eq!(late_step(3, &[], &[2, 1]), None);
}

/// Seat 0 of a host waits for the other seats of the host.
#[test]
fn the_seats_of_a_host_that_end_at_the_last_moment_are_no_timeout() {
    for (has_counted, is_late) in [(true, false), (false, true)] {
        let (ends, _) = communicators(&[&[0, 1], &[2]]);
        let header = ends[0].segment.header();
        ends[0].segment.seat(1).step.store(1);
        let blocked = (Blocker::OtherSeats(1), header.steps.count.value());
        if has_counted {
            ends[1].end_step();
        }
        assert_eq!(time_out(&ends[0], blocked, TIMEOUT, "a call").is_some(), is_late);
    }
}
