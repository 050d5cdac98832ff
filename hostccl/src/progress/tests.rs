use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use super::*;
use crate::blame::Blame;
use crate::call_name::{NAME_BYTES, Name};
use crate::collective::{Call, Collective, Kind};
use crate::comm::Comm;
use crate::error::Error;
use crate::hosts_of_threads::on_one_host;
use crate::interrupt::Interrupt;
use crate::places::Place;
use crate::turn::Pass;
use crate::types::{DataType, ncclRemoteError, ncclTimeout};

/// The calls that the operations of a test got, in their order.
type Log = RefCell<Vec<String>>;

/// An operation whose answers are known before.
struct Known<'a> {
    name: &'a str,
    answers: VecDeque<Result<Poll>>,
    /// The answer of `end`.
    end: Result<()>,
    pass: Option<Pass>,
    /// The communicator on which the operation waits.
    comm: Option<Arc<Comm>>,
    timeout: Option<Duration>,
    /// The operation is done when the log has this entry. Until then it repeats its last answer.
    until: Option<&'a str>,
    /// The operation is done from this time on. Until then it repeats its last answer.
    done_from: Option<Instant>,
    log: &'a Log,
}

impl<'a> Known<'a> {
    fn new(name: &'a str, log: &'a Log, answers: impl IntoIterator<Item = Result<Poll>>) -> Option<Known<'a>> {
        let (answers, end) = (answers.into_iter().collect(), Ok(()));
        Some(Known { name, answers, end, pass: None, comm: None, timeout: None, until: None, done_from: None, log })
    }

    /// Returns an operation that waits on a communicator, for these blockers in turn, until the log
    /// has the entry `until`.
    fn waiting(name: &'a str, log: &'a Log, comm: &Arc<Comm>, blockers: &[Blocker], until: &'a str) -> Known<'a> {
        let blocked = |blocker: &Blocker| Ok(Poll::Blocked { seen: comm.event(*blocker).value(), blocker: *blocker });
        let mut known = Known::new(name, log, blockers.iter().map(blocked)).unwrap();
        (known.comm, known.until) = (Some(comm.clone()), Some(until));
        known
    }

    fn note(&self, what: &str) {
        self.log.borrow_mut().push(format!("{} {what}", self.name));
    }
}

impl Operation for Known<'_> {
    fn poll(&mut self) -> Result<Poll> {
        let pass = self.pass.as_ref().map(|pass| pass.name().tag);
        self.note(&pass.map_or("polled".to_owned(), |tag| format!("polled with the turn {tag}")));
        if self.until.is_some() || self.done_from.is_some() {
            let is_done = self.until.is_some_and(|until| self.log.borrow().iter().any(|entry| entry == until))
                || self.done_from.is_some_and(|from| Instant::now() >= from);
            if is_done {
                return Ok(Poll::Done);
            }
            let answer = self.answers.pop_front().expect("there is a last answer");
            if self.answers.is_empty() {
                self.answers.push_back(answer.clone());
            }
            return answer;
        }
        self.answers.pop_front().expect("the operation is not polled after its end")
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.comm.as_ref()
    }

    fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    fn describe(&self) -> String {
        self.name.to_owned()
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        self.pass.as_mut()
    }

    fn end(&mut self) -> Result<()> {
        self.note("ended");
        std::mem::replace(&mut self.end, Ok(()))
    }
}

impl Drop for Known<'_> {
    fn drop(&mut self) {
        self.note("dropped");
    }
}

fn failed() -> Error {
    Error::usage("it failed")
}

/// Runs lanes of these operations. Returns the outcome, and what happened before all of them were
/// dropped.
fn run(log: &Log, mut lanes: Vec<Vec<Option<Known<'_>>>>) -> (Result<()>, Vec<String>) {
    let mut made: Vec<_> = lanes
        .iter_mut()
        .map(|operations| {
            let mut operations = operations.iter_mut();
            let mut lane = Lane::new(operations.next().unwrap());
            operations.for_each(|operation| lane.push(operation));
            lane
        })
        .collect();
    let outcome = run_all(&mut made);
    assert!(made.is_empty());
    (outcome, log.take())
}

#[test]
fn operations_of_a_lane_take_place_one_after_another() {
    let log = Log::default();
    let lane = ["a", "b"].map(|name| Known::new(name, &log, [Ok(Poll::Outside), Ok(Poll::Done)]));
    let (outcome, log) = run(&log, vec![lane.into()]);
    assert_eq!(outcome, Ok(()));
    let each = |name| ["polled", "polled", "ended", "dropped"].map(|what| format!("{name} {what}"));
    assert_eq!(log, [each("a"), each("b")].concat());
}

#[test]
fn a_failure_drops_the_rest_of_its_lane_at_once_and_no_other_lane() {
    let log = Log::default();
    let fails = vec![
        Known::new("a", &log, [Ok(Poll::Done)]),
        Known::new("b", &log, [Err(failed())]),
        Known::new("c", &log, []),
    ];
    let other = vec![Known::new("d", &log, [Ok(Poll::Outside), Ok(Poll::Done)])];
    let (outcome, log) = run(&log, vec![fails, other]);
    assert!(outcome.is_err_and(|error| error.message().contains("it failed")));
    let expected = [
        "a polled",
        "a ended",
        "a dropped",
        "b polled",
        "b dropped",
        "c dropped",
        "d polled",
        "d polled",
        "d ended",
        "d dropped",
    ];
    assert_eq!(log, expected);
}

#[test]
fn an_operation_whose_end_fails_ends_its_lane() {
    let log = Log::default();
    let mut first = Known::new("a", &log, [Ok(Poll::Done)]);
    first.as_mut().unwrap().end = Err(failed());
    let (outcome, log) = run(&log, vec![vec![first, Known::new("b", &log, [])]]);
    assert!(outcome.is_err());
    assert_eq!(log, ["a polled", "a ended", "a dropped", "b dropped"]);
}

#[test]
fn an_operation_that_is_done_hands_its_turn_to_the_next_one() {
    let log = Log::default();
    let turn = |tag| Some(Pass::new(Place::Collectives, Name { tag, text: [0; NAME_BYTES] }));
    let mut lane = vec![
        Known::new("a", &log, [Ok(Poll::Done)]),
        Known::new("b", &log, [Ok(Poll::Done)]),
        Known::new("c", &log, [Err(failed())]),
    ];
    lane.iter_mut().flatten().zip(1..).for_each(|(operation, tag)| operation.pass = turn(tag));
    let (outcome, log) = run(&log, vec![lane]);
    assert!(outcome.is_err());
    let polled = ["a polled with the turn 1", "b polled with the turn 1", "c polled with the turn 1"];
    // The turn is not ended, because the last operation failed. It ends when that one is dropped.
    assert_eq!(log, [polled[0], "a dropped", polled[1], "b dropped", polled[2], "c dropped"]);
}

/// Returns rank 0's end of a communicator whose rank 1 does not arrive.
fn alone() -> Arc<Comm> {
    on_one_host(2, 1).swap_remove(0)
}

#[test]
fn a_failure_in_a_wait_ends_no_lane_that_can_go_on() {
    let (log, failed, parent) = (Log::default(), alone(), alone());
    for comm in [&failed, &parent] {
        comm.fail(ncclRemoteError, Blame::of([1]), "rank 1 is lost");
    }
    let dropped = "collective dropped";
    let shrink = Known::waiting("shrink", &log, &parent, &[Blocker::NewSegment(1)], dropped);
    let collective = Known::waiting("collective", &log, &failed, &[Blocker::Arrivals], "never");
    let mut join = Known::new("join", &log, [Ok(Poll::Outside)]).unwrap();
    join.until = Some(dropped);
    let (outcome, log) = run(&log, vec![vec![Some(shrink)], vec![Some(collective)], vec![Some(join)]]);
    let error = outcome.unwrap_err();
    assert!(error.message().starts_with("collective: "), "{}", error.message());
    let ended: Vec<_> = log.iter().filter(|entry| entry.ends_with(" ended")).collect();
    assert_eq!(ended, ["shrink ended", "join ended"]);
}

#[test]
fn the_time_of_one_call_ends_no_other_call() {
    let (log, short, long) = (Log::default(), alone(), alone());
    let mut late = Known::waiting("late", &log, &short, &[Blocker::Arrivals], "never");
    late.timeout = Some(Duration::from_millis(10));
    let patient = Known::waiting("patient", &log, &long, &[Blocker::Arrivals], "late dropped");
    let (outcome, log) = run(&log, vec![vec![Some(late)], vec![Some(patient)]]);
    let error = outcome.unwrap_err();
    assert_eq!(error.code(), ncclTimeout);
    assert!(error.message().starts_with("late: "), "{}", error.message());
    assert!(log.contains(&"patient ended".to_owned()), "{log:?}");
    assert_eq!((short.check().is_ok(), long.check()), (false, Ok(())));
}

#[test]
fn a_call_that_first_waits_for_its_turn_has_the_time_of_its_communicator() {
    let (log, without, with) = (Log::default(), alone(), alone());
    with.set_timeout(10);
    let patient = Known::waiting("patient", &log, &without, &[Blocker::Arrivals], "late dropped");
    let late = Known::waiting("late", &log, &with, &[Blocker::Turn, Blocker::Arrivals], "never");
    let (outcome, log) = run(&log, vec![vec![Some(patient)], vec![Some(late)]]);
    assert_eq!(outcome.unwrap_err().code(), ncclTimeout);
    assert!(log.contains(&"patient ended".to_owned()), "{log:?}");
}

/// The first call of a lane waits for its turn for longer than the timeout, and is done at the poll
/// after that. The call behind it has its whole time.
#[test]
fn a_call_behind_one_that_waited_long_for_its_turn_has_its_whole_time() {
    let (log, comm, timeout) = (Log::default(), alone(), Duration::from_millis(500));
    let done_from = Instant::now() + Duration::from_millis(600);
    let mut first = Known::waiting("first", &log, &comm, &[Blocker::Turn], "never");
    first.done_from = Some(done_from);
    let mut second = Known::waiting("second", &log, &comm, &[Blocker::Arrivals], "never");
    second.timeout = Some(timeout);
    let (outcome, _) = run(&log, vec![vec![Some(first), Some(second)]]);
    let error = outcome.unwrap_err();
    assert_eq!(error.code(), ncclTimeout);
    assert!(error.message().starts_with("second: "), "{}", error.message());
    assert!(done_from.elapsed() >= timeout, "the second call had only {:?}", done_from.elapsed());
}

/// In a lane that goes on after a failure, the call behind one that has used up its time has its
/// whole time.
#[test]
fn a_call_behind_one_that_has_failed_has_its_whole_time() {
    let (log, comm, other, timeout) = (Log::default(), alone(), alone(), Duration::from_millis(200));
    let began = Instant::now();
    let calls = [("first", &comm), ("second", &other)].map(|(name, comm)| {
        let mut call = Known::waiting(name, &log, comm, &[Blocker::Arrivals], "never");
        call.timeout = Some(timeout);
        Some(call)
    });
    let [mut first, mut second] = calls;
    let mut lane = Lane::new(&mut first).going_on_after_failure();
    lane.push(&mut second);
    let error = run_all(&mut vec![lane]).unwrap_err();
    assert!(error.message().starts_with("first: "), "{}", error.message());
    assert!(began.elapsed() >= 2 * timeout, "both calls together had only {:?}", began.elapsed());
}

/// A call of two steps.
struct TwoSteps<'a>(&'a Arc<Comm>);

impl Operation for TwoSteps<'_> {
    fn poll(&mut self) -> Result<Poll> {
        loop {
            match (self.0.step_blocked(), self.0.step()) {
                (Some(blocked), _) => return Ok(blocked),
                (None, 2) => return Ok(Poll::Done),
                (None, _) => self.0.end_step(),
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(self.0)
    }

    fn describe(&self) -> String {
        "two steps".to_owned()
    }
}

/// The other rank ends the first step when this rank has already seen that its time is up: the
/// thread asks the interrupt just before it fails.
#[test]
fn a_call_that_continues_at_the_last_moment_has_its_whole_time_again() {
    let [comm, other] = <[_; 2]>::try_from(on_one_host(2, 2)).unwrap();
    let timeout = Duration::from_millis(250);
    comm.set_timeout(250);
    let continued = Arc::new(OnceLock::new());
    let first_asked = continued.clone();
    comm.set_interrupt(Interrupt::new(Arc::new(move || {
        first_asked.get_or_init(|| {
            other.end_step();
            Instant::now()
        });
        None
    })));
    let error = super::run(&mut TwoSteps(&comm)).unwrap_err();
    assert_eq!(error.code(), ncclTimeout);
    assert!(error.message().ends_with("rank 1 did not come within 250 ms"), "{}", error.message());
    let had = continued.get().expect("the thread asks").elapsed();
    assert!(had >= timeout, "the second step had only {had:?}");
}

/// A call under another name has the turn for more than twice the timeout. Afterwards the ranks
/// come one after the other. The timeout is much longer than the time between the two ranks. On a
/// busy machine, the second rank may come later than that. Then the ranks get more time.
#[test]
fn a_call_behind_a_long_one_under_another_name_has_its_time_afterwards() {
    let mut ended = Vec::new();
    for millis in [1000, 4000, 16_000] {
        ended = call_behind_a_long_one(millis);
        if !ended.iter().any(|ended| ended.as_ref().is_err_and(|error| error.code() == ncclTimeout)) {
            break;
        }
    }
    assert_eq!(ended, [Ok(()), Ok(())]);
}

/// Returns how the calls of two ranks end, which have a time of so many milliseconds.
fn call_behind_a_long_one(millis: u64) -> Vec<Result<()>> {
    let ends = on_one_host(2, 2);
    let long = |ends: &[Arc<Comm>]| -> Vec<Pass> {
        let name = Name { tag: 2, text: [b'b'; NAME_BYTES] };
        ends.iter()
            .map(|end| {
                let mut pass = Pass::new(Place::Collectives, name);
                assert_eq!(pass.enter(end, String::new), Ok(None));
                pass
            })
            .collect()
    };
    let mut held = long(&ends);
    std::thread::scope(|scope| {
        let waiting: Vec<_> = ends
            .iter()
            .map(|end| {
                end.set_timeout(millis);
                scope.spawn(move || {
                    let (mut data, count, root) = ([1_u8; 4], 4, Some(0));
                    let (send, recv) = (data.as_ptr().cast_mut(), data.as_mut_ptr());
                    let (kind, dtype, reduction) = (Kind::Broadcast, DataType::Uint8, None);
                    let call = Call { kind, send, recv, count, dtype, reduction, root };
                    let name = Name { tag: 1, text: [b'a'; NAME_BYTES] };
                    // SAFETY: the buffer outlives the operation.
                    let mut call = unsafe { Collective::new(end.clone(), call, None, name) };
                    super::run(&mut call)
                })
            })
            .collect();
        for (end, pass) in ends.iter().zip(&mut held) {
            std::thread::sleep(Duration::from_millis(if end.rank == 0 { 5 * millis / 2 } else { 150 }));
            pass.leave(end).unwrap();
        }
        waiting.into_iter().map(|call| call.join().unwrap()).collect()
    })
}
