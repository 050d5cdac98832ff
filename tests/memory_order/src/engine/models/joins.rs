//! Joins: one process takes a seat, the others read which one, and whoever sees that all ranks have
//! arrived sees what each has written.

use std::sync::Arc;
use std::time::Duration;

use memory_order::check::Model;

use super::{Plain, spawn};
use crate::crowd::{Crowd, Processors};
use crate::event::{Watch, sleep};
use crate::process::ProcessId;
use crate::segment::{self, Header, Seat};

pub(super) const MODELS: &[Model] = &[
    Model { name: "join: one process takes the seat", preemptions: Some(3), waitv: true, run: one_takes },
    Model { name: "join: all have arrived", preemptions: Some(2), waitv: true, run: all_arrive },
    Model { name: "join: seen from outside", preemptions: Some(3), waitv: true, run: seen_from_outside },
];

struct State {
    header: Header,
    seats: [Seat; 2],
    /// A value for each rank. The rank writes it before it counts itself in.
    plain: [Plain<u32>; 2],
}

impl State {
    fn new() -> Arc<State> {
        let plain = [Plain::new(0), Plain::new(0)];
        Arc::new(State { header: Header::default(), seats: Default::default(), plain })
    }
}

fn process(number: u32) -> ProcessId {
    ProcessId { pid: 100 + number, start: 1000 + u64::from(number) }
}

/// Two processes want one seat, and a third thread looks who has it.
fn one_takes() {
    let state = State::new();
    let wanting = [0, 1].map(|number| {
        spawn(&state, move |state| {
            let has_taken = state.seats[0].take(process(number)).is_ok();
            let of_mine = state.seats[0].process() == Some(process(number));
            assert_eq!(has_taken, of_mine, "the seat belongs to another process");
        })
    });
    let seen = state.seats[0].process();
    assert!(
        seen.is_none() || seen == Some(process(0)) || seen == Some(process(1)),
        "the process is made of two: {seen:?}"
    );
    wanting.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Two ranks join. Each waits until both have arrived.
fn all_arrive() {
    let state = State::new();
    let join = |state: &State, rank: usize| {
        state.seats[rank].take(process(rank as u32)).unwrap();
        state.plain[rank].set(7);
        state.header.arrive(2);
        loop {
            let seen = state.header.arrived.value();
            if seen == 2 {
                break;
            }
            sleep(&[Watch { event: &state.header.arrived, seen }], None, Duration::MAX);
        }
        assert_eq!(state.plain.each_ref().map(Plain::get), [7, 7]);
        assert_eq!([0, 1].map(|rank| state.seats[rank].process()), [Some(process(0)), Some(process(1))]);
        let sets: [&Processors; 2] = [0, 1].map(|rank| &state.seats[rank].processors);
        let crowd = Crowd { ranks: 2, processors: 0 };
        assert_ne!(crowd.with_processors(sets.into_iter()), crowd, "the processors of a rank are missing");
    };
    let other = spawn(&state, move |state| join(state, 1));
    join(&state, 0);
    other.join().unwrap();
}

/// Two ranks join, and both name 2 ranks. The maker of the id looks whether they have started.
fn seen_from_outside() {
    let state = State::new();
    let ranks = [0, 1].map(|rank| {
        spawn(&state, move |state| {
            assert!(segment::agree(&state.header, 2).is_none_or(|agreed| agreed == 2));
            state.plain[rank].set(7);
            state.header.arrive(2);
        })
    });
    if let Some(nranks) = segment::started(&state.header) {
        assert_eq!(nranks, 2);
        assert_eq!(state.plain.each_ref().map(Plain::get), [7, 7]);
    }
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
    assert_eq!(segment::started(&state.header), Some(2));
}
