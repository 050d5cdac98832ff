use super::*;
use crate::hosts_of_threads::{communicators, on_one_host};
use crate::labels::GlobalRanks;
use crate::news;
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

#[test]
fn a_rank_keeps_the_whole_message_of_its_own_failure_and_the_others_a_part() {
    let long = format!("the name {} is long", "n".repeat(600));
    let [first, second] = <[_; 2]>::try_from(on_one_host(2, 2)).unwrap();
    assert_eq!(first.fail(ncclRemoteError, Blame::of([1]), &long).message(), long);
    assert_eq!(first.check().unwrap_err().message(), long);
    let told = second.check().unwrap_err();
    assert_eq!(told.message(), format!("{}…", &long[..509]));
    assert_eq!(second.fail(ncclInvalidUsage, Blame::none(), "later"), told, "the first failure stays");
    assert_eq!(first.fail(ncclInvalidUsage, Blame::none(), "later").message(), long);
}

#[test]
fn a_rank_of_another_host_reads_that_a_message_was_cut() {
    let (ends, _) = communicators(&[&[0], &[1]]);
    ends.iter().for_each(news::register);
    let long = "é".repeat(600);
    assert_eq!(ends[0].fail(ncclRemoteError, Blame::of([0]), &long).message(), long);
    ends[1].catch_up();
    assert_eq!(ends[1].check().unwrap_err().message(), "é".repeat(254) + "…");
}
