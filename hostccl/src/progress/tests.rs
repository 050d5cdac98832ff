use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use super::*;
use crate::call_name::{NAME_BYTES, Name};
use crate::comm::Comm;
use crate::error::Error;
use crate::places::Place;
use crate::turn::Pass;

/// The calls that the operations of a test got, in their order.
type Log = RefCell<Vec<String>>;

/// An operation whose answers are known before.
struct Known<'a> {
    name: &'a str,
    answers: VecDeque<Result<Poll>>,
    /// The answer of `end`.
    end: Result<()>,
    pass: Option<Pass>,
    log: &'a Log,
}

impl<'a> Known<'a> {
    fn new(name: &'a str, log: &'a Log, answers: impl IntoIterator<Item = Result<Poll>>) -> Option<Known<'a>> {
        Some(Known { name, answers: answers.into_iter().collect(), end: Ok(()), pass: None, log })
    }

    fn note(&self, what: &str) {
        self.log.borrow_mut().push(format!("{} {what}", self.name));
    }
}

impl Operation for Known<'_> {
    fn poll(&mut self) -> Result<Poll> {
        let pass = self.pass.as_ref().map(|pass| pass.name().tag);
        self.note(&pass.map_or("polled".to_owned(), |tag| format!("polled with the turn {tag}")));
        self.answers.pop_front().expect("the operation is not polled after its end")
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        None
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
