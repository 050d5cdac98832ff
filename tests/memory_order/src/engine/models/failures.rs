//! Failures: the first one stays, all ranks read the whole of it, and it wakes the sleepers.

use std::sync::Arc;
use std::time::Duration;

use memory_order::check::Model;

use super::spawn;
use crate::blame::Blame;
use crate::event::{Watch, sleep};
use crate::segment::Header;

pub(super) const MODELS: &[Model] = &[
    Model { name: "failure: read whole", preemptions: Some(2), waitv: true, run: read_whole },
    Model { name: "failure: two at once", preemptions: Some(1), waitv: true, run: two_at_once },
    Model { name: "failure: wakes a sleeper", preemptions: Some(1), waitv: true, run: wakes_a_sleeper },
];

#[derive(Default)]
struct State {
    header: Header,
}

impl State {
    fn fail(&self, rank: usize) {
        let blame = Blame::of_lost([rank]);
        self.header.fail(rank as i32 + 1, &blame, ["none lost", "one lost"][rank], ["one call", "two calls"][rank]);
    }

    /// Returns the rank whose failure there is, after a check that it is whole.
    fn failed(&self) -> Option<usize> {
        let error = self.header.failure.error()?;
        assert!((1..=2).contains(&error.code()), "the failure has no code");
        let rank = error.code() as usize - 1;
        assert_eq!(error.message(), ["none lost", "one lost"][rank], "the message is another one");
        assert_eq!(error.blame(), &Blame::of_lost([rank]), "the blame is another one");
        assert_eq!(
            self.header.failure.call().as_deref(),
            Some(["one call", "two calls"][rank]),
            "the call is another one"
        );
        Some(rank)
    }
}

/// A rank looks twice while another one fails.
fn read_whole() {
    let state = Arc::<State>::default();
    let failing = spawn(&state, |state| state.fail(1));
    let first = state.failed();
    let second = state.failed();
    assert!(first.is_none() || second == first, "a failure went away");
    failing.join().unwrap();
}

/// Two ranks fail at the same time.
fn two_at_once() {
    let state = Arc::<State>::default();
    let failing = spawn(&state, |state| state.fail(1));
    state.fail(0);
    let mine = state.failed();
    failing.join().unwrap();
    let last = state.failed();
    assert!(last.is_some() && (mine.is_none() || mine == last), "a failure went away");
}

/// A rank sleeps on the channels of a peer and on the alarm while another rank fails. The rank that
/// sees the alarm also sees the failure.
fn wakes_a_sleeper() {
    let state = Arc::<State>::default();
    let failing = spawn(&state, |state| state.fail(1));
    while state.failed().is_none() {
        let alarm = &state.header.alarm;
        sleep(&[Watch { event: alarm, seen: 0 }], None, Duration::MAX);
        assert!(alarm.value() == 0 || state.failed().is_some(), "the alarm came before the failure");
    }
    failing.join().unwrap();
}
