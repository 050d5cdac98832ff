use super::*;
use crate::labels::GlobalRanks;
use crate::segment;

fn of_two_ranks() -> Comm {
    let fd = segment::create([3; 16]).unwrap();
    let segment = Segment::map(&fd, 2, 0, &Labels::default()).unwrap();
    let labels = Labels { comm_name: "it".to_owned(), global_ranks: GlobalRanks::default(), seats: Box::default() };
    Comm::new(segment, 0, Crowd::default(), labels, Arc::default(), ProcessId::current(), None)
}

#[test]
fn a_failure_does_not_end_a_wait_whose_word_has_changed() {
    let comm = of_two_ranks();
    let blocked = |seen| Poll::Blocked { seen, blocker: Blocker::Step(1) };
    // The other rank ends the step, so its call is done, and it then ends the communicator.
    comm.segment.seat(1).end_of(1).set(1);
    comm.segment.header().fail(ncclRemoteError, &Blame::of([1]), "rank 1 aborted its communicator", "");
    assert_eq!(comm.check_waiting(blocked(0)), Ok(blocked(0)), "the call is polled again");
    assert_eq!(comm.check_waiting(blocked(1)).unwrap_err().message(), "rank 1 aborted its communicator");
    comm.raise_abort();
    assert_eq!(comm.check_waiting(blocked(0)), Err(Error::aborted()));
}

#[test]
fn a_failure_stands_while_another_rank_is_still_writing_its_own() {
    let comm = of_two_ranks();
    assert!(comm.segment.header().failure.begin(), "as the other rank does");
    assert!(comm.check().is_ok());
    assert_eq!(comm.fail(ncclInvalidUsage, Blame::none(), "one").message(), "one");
    assert_eq!(comm.check().unwrap_err().message(), "one");
    assert_eq!(comm.fail(ncclRemoteError, Blame::of([1]), "two").message(), "one", "the first failure stays");
}
