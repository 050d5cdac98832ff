//! Steps: each rank reads what the others wrote in the step that all have ended, and five slots are
//! enough.

use std::sync::Arc;
use std::time::Duration;

use memory_order::check::Model;

use super::{Plain, spawn};
use crate::event::{Watch, sleep};
use crate::segment::{Seat, Steps};

pub(super) const MODELS: &[Model] = &[
    Model { name: "steps: two ranks", preemptions: Some(3), waitv: true, run: two_ranks },
    Model { name: "steps: three ranks", preemptions: Some(2), waitv: true, run: three_ranks },
    Model { name: "steps: seat 0 is last", preemptions: Some(2), waitv: true, run: seat_0_is_last },
    Model { name: "steps: slots in turn", preemptions: Some(2), waitv: true, run: slots_in_turn },
    Model { name: "steps: slots in turn, counted", preemptions: Some(2), waitv: true, run: counted_slots_in_turn },
    Model { name: "steps: a peer's description", preemptions: Some(3), waitv: true, run: description },
];

/// The slots of a rank, as in the engine's layout.
const SLOTS: usize = 5;

struct State {
    steps: Steps,
    seats: Vec<Seat>,
    /// Whether the ranks are on several hosts. If they are, even two ranks use the counter.
    spans: bool,
    /// The values that each of two ranks hands over with the ends of its steps.
    beside: Vec<[Plain<u32>; 2]>,
    /// The slots of each rank.
    slots: Vec<[Plain<u32>; SLOTS]>,
}

impl State {
    fn new(nranks: usize, spans: bool) -> Arc<State> {
        let slots = (0..nranks).map(|_| std::array::from_fn(|_| Plain::new(0))).collect();
        let seats = (0..nranks).map(|_| Seat::default()).collect();
        let beside = (0..nranks).map(|_| std::array::from_fn(|_| Plain::new(0))).collect();
        Arc::new(State { steps: Steps::default(), seats, spans, beside, slots })
    }

    /// Whether each of two ranks waits for the other one's word.
    fn has_words(&self) -> bool {
        self.seats.len() == 2 && !self.spans
    }

    /// Ends a step, as `Comm::end_step` does.
    fn end(&self, rank: usize, step: u32) {
        let seat = &self.seats[rank];
        seat.step.store(step);
        if self.has_words() {
            self.beside[rank][step as usize % 2].set(step);
            seat.end_of(step.into()).set(step);
            return;
        }
        self.steps.end(step, self.seats.len(), self.spans);
    }

    /// Sleeps until all ranks have ended the step, as `Comm::step_blocked` does.
    fn wait(&self, rank: usize, step: u32) {
        let other = self.has_words().then(|| self.seats[1 - rank].end_of(step.into()));
        let event = other.unwrap_or(&self.steps.ended);
        loop {
            let seen = event.value();
            if seen == step {
                break;
            }
            sleep(&[Watch { event, seen }], None, Duration::MAX);
        }
        if self.has_words() {
            assert_eq!(self.beside[1 - rank][step as usize % 2].get(), step);
        }
    }

    fn write(&self, rank: usize, step: u32) {
        self.slots[rank][step as usize % SLOTS].set(step);
    }

    /// Reads what each rank wrote in a step.
    fn read(&self, step: u32) {
        self.slots.iter().for_each(|slots| assert_eq!(slots[step as usize % SLOTS].get(), step));
    }
}

/// The ranks write in a step, and read in the next one, as in a small reduction.
fn small_reductions(state: &State, rank: usize, calls: u32) {
    for step in 1..=calls {
        state.write(rank, step);
        state.end(rank, step);
        state.wait(rank, step);
        state.read(step);
    }
}

fn two_ranks() {
    let state = State::new(2, false);
    let other = spawn(&state, |state| small_reductions(state, 1, 2));
    small_reductions(&state, 0, 2);
    other.join().unwrap();
}

fn three_ranks() {
    let state = State::new(3, false);
    let others = [1, 2].map(|rank| spawn(&state, move |state| small_reductions(state, rank, 1)));
    small_reductions(&state, 0, 1);
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Seat 0 reads what the others have written before it ends the step, as in a communicator over
/// several hosts.
fn seat_0_is_last() {
    let state = State::new(2, true);
    let run = |state: &State, seat: usize| {
        for step in 1..=2 {
            state.write(seat, step);
            if seat == 0 {
                loop {
                    let seen = state.steps.count.value();
                    if seen as usize + 1 == state.seats.len() {
                        break;
                    }
                    sleep(&[Watch { event: &state.steps.count, seen }], None, Duration::MAX);
                }
                state.read(step);
            }
            state.end(seat, step);
            state.wait(seat, step);
            state.read(step);
        }
    };
    let other = spawn(&state, move |state| run(state, 1));
    run(&state, 0);
    other.join().unwrap();
}

/// The pipeline's rule, as the module `collective` states it: the owner writes a slot of step `s`
/// after all ranks have ended step `s - 2`, and the others read it until they end step `s + 3`.
fn take_slots_in_turn(state: Arc<State>) {
    let run = |state: &State, rank: usize| {
        const LAST: u32 = 7;
        state.write(rank, 1);
        for step in 1..=LAST {
            // The overlapped work before the wait for this step: the slot of the next step, and a
            // last look at an old one.
            state.end(rank, step);
            if step > 2 {
                state.read(step - 2);
            }
            if step < LAST {
                state.write(rank, step + 1);
            }
            state.wait(rank, step);
            state.read(step);
        }
    };
    let other = spawn(&state, move |state| run(state, 1));
    run(&state, 0);
    other.join().unwrap();
}

fn slots_in_turn() {
    take_slots_in_turn(State::new(2, false));
}

fn counted_slots_in_turn() {
    take_slots_in_turn(State::new(2, true));
}

/// A rank that is outside of collectives reads the description of a peer's call when the peer has
/// ended a step, as `diagnosis::peer_in_collective` does.
fn description() {
    let state = Arc::new((Seat::default(), Plain::new(0)));
    let peer = spawn(&state, |(seat, description)| {
        description.set(7);
        seat.step.store(1);
    });
    let (seat, description) = &*state;
    if seat.step.value() == 1 {
        assert_eq!(description.get(), 7);
    }
    peer.join().unwrap();
}
