//! All transitions: the operations of the processes, and what happens to them.

use std::fmt::{self, Display, Formatter};

use crate::checker::Model;
use crate::job::Job;
use crate::properties::Property;
use crate::protocol::Rank;
use crate::state::{At, Process, State, one};

/// A run of a job, as the checker sees it.
pub(crate) struct Run<'a> {
    /// The job.
    pub(crate) job: &'a Job,
    /// The properties that are checked.
    pub(crate) properties: &'a [Property],
}

/// A transition: an event, and the process to which it happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Action {
    what: What,
    process: u8,
    /// Where the process stands afterwards.
    then: At,
}

/// The event of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// The process makes its next operation.
    Step,
    /// The store notices that the process has died.
    Notice,
    /// The process dies.
    Dies,
    /// The store takes the process for lost, though it lives.
    TakenForLost,
    /// The deadline of the process passes while it waits.
    Deadline,
    /// The process starts and knocks.
    Knocks,
    /// The process calls dm_recover for a reason of its own.
    Calls,
    /// The process asks for the end of the job.
    AsksEnd,
    /// The process gets the state of the training from a rank of its mesh.
    GetsState,
}

impl Display for Action {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let Action { what, process, then } = self;
        match what {
            What::Step => write!(out, "process {process}: its next operation; then it is {then:?}"),
            What::Notice => write!(out, "the store notices that process {process} has died"),
            What::Dies => write!(out, "process {process} dies"),
            What::TakenForLost => write!(out, "the store takes process {process} for lost, though it lives"),
            What::Deadline => write!(out, "the deadline of process {process} passes; then it is {then:?}"),
            What::Knocks => write!(out, "process {process} starts and knocks"),
            What::Calls => write!(out, "process {process} calls dm_recover"),
            What::AsksEnd => write!(out, "process {process} asks for the end of the job"),
            What::GetsState => write!(out, "process {process} gets the state"),
        }
    }
}

impl Run<'_> {
    fn rank(&self, number: u8) -> Rank<'_> {
        Rank { job: self.job, number }
    }

    /// Whether the process is alive and has not left.
    fn takes_part(state: &State, number: u8) -> bool {
        !matches!(state.process(number).at, At::Out | At::Dead | At::Fenced | At::Refused | At::Ended)
    }

    /// Whether the process's mesh is in use by all of its ranks, and a rank with the same position
    /// in another replica has the state.
    fn can_get_state(&self, state: &State, number: u8) -> bool {
        let mine = state.process(number);
        let in_mesh = mine.plan.used;
        let is_in = |other: &u8| in_mesh & one(*other) != 0;
        let uses = |other: u8| state.process(other).at == At::Training && state.process(other).epoch == mine.epoch;
        let place = |process: u8| mine.plan.seat(process).map(|seat| seat % usize::from(self.job.replica));
        let gives = |other: u8| state.process(other).has_state && place(other) == place(number);
        let mut others = (0..self.job.processes()).filter(is_in);
        others.clone().all(uses) && others.any(gives)
    }

    /// Whether `what` needs a closer look. This saves most copies of the state.
    fn may_happen(&self, state: &State, what: What, number: u8) -> bool {
        let (at, left) = (state.process(number).at, &state.left);
        match what {
            What::Step => !matches!(at, At::Out | At::Failed(..) | At::Fenced | At::Refused | At::Ended | At::Dead),
            What::Notice => at == At::Dead,
            What::Dies => left.losses > 0,
            What::TakenForLost => left.false_losses > 0,
            What::Deadline => left.deadlines > 0 && matches!(at, At::Looking(_) | At::Awaiting),
            What::Knocks => at == At::Out,
            What::Calls => left.calls > 0 && matches!(at, At::Training | At::Failed(..)),
            What::AsksEnd => left.ends > 0 && at == At::Training,
            What::GetsState => at == At::Training && !state.process(number).has_state,
        }
    }

    /// Changes the state as `what` says. Returns `false` when that cannot happen now.
    fn happens(&self, state: &mut State, what: What, number: u8) -> bool {
        let rank = self.rank(number);
        let name = one(rank.name());
        match what {
            What::Step => rank.step(state),
            What::Notice => {
                let is_new = rank.is_unnoticed(state);
                state.store.lost |= if is_new { name } else { 0 };
                is_new
            }
            What::Dies => {
                let dies = Self::takes_part(state, number) && take_one(&mut state.left.losses);
                if dies {
                    state.process_mut(number).at = At::Dead;
                }
                dies
            }
            What::TakenForLost => {
                let is_new = Self::takes_part(state, number) && state.store.lost & name == 0;
                let happens = is_new && take_one(&mut state.left.false_losses);
                state.store.lost |= if happens { name } else { 0 };
                happens
            }
            What::Deadline => rank.pass_deadline(state) && take_one(&mut state.left.deadlines),
            What::Knocks => {
                state.store.door |= name;
                state.process_mut(number).at = At::Door(1);
                true
            }
            What::Calls => {
                state.process_mut(number).asks_end = false;
                rank.call(state);
                take_one(&mut state.left.calls)
            }
            What::AsksEnd => {
                state.process_mut(number).asks_end = true;
                rank.call(state);
                take_one(&mut state.left.ends)
            }
            What::GetsState => {
                let gets = self.can_get_state(state, number);
                state.process_mut(number).has_state |= gets;
                gets
            }
        }
    }
}

/// Takes one of what is left. Returns `false` when nothing is left.
fn take_one(left: &mut u8) -> bool {
    let is_there = *left > 0;
    *left -= u8::from(is_there);
    is_there
}

impl Model for Run<'_> {
    type State = State;
    type Action = Action;

    fn initial(&self) -> State {
        State::at_start(self.job)
    }

    fn transitions(&self, state: &State) -> Vec<(Action, State)> {
        const ALL: [What; 9] = [
            What::Step,
            What::Notice,
            What::Dies,
            What::TakenForLost,
            What::Deadline,
            What::Knocks,
            What::Calls,
            What::AsksEnd,
            What::GetsState,
        ];
        let mut found = Vec::new();
        for process in 0..self.job.processes() {
            for what in ALL.into_iter().filter(|what| self.may_happen(state, *what, process)) {
                let mut next = state.clone();
                if self.happens(&mut next, what, process) {
                    found.push((Action { what, process, then: next.process(process).at }, next));
                }
            }
        }
        found
    }

    fn age(&self, state: &State) -> u32 {
        let of_process = |process: &Process| {
            let (number, stage) = match process.at {
                At::Out => (0, 0),
                At::Door(number) => (number, 1),
                At::Doubting(number) | At::Comparing(number) => (number, 2),
                At::Telling(number) => (number, 3),
                At::Coming(number) => (number, 4),
                At::Looking(number) => (number, 5),
                At::Proposing(number, _) => (number, 6),
                At::Writing(number, _) | At::Reading(number) => (number, 7),
                At::Meeting => (process.epoch, 8),
                At::Awaiting => (process.epoch, 9),
                At::Settling(_) => (process.epoch, 10),
                At::Training => (process.epoch, 11),
                At::Failed(number, _) => (number, 13),
                At::Fenced | At::Refused | At::Ended => (50, 0),
                At::Dead => (60, 0),
            };
            16 * u32::from(number) + stage + u32::from(process.has_state && stage == 11)
        };
        let told = state.store.told.iter().filter(|told| **told).count() as u32;
        state.processes.iter().map(of_process).sum::<u32>() + state.store.lost.count_ones() + told
    }

    fn wrong(&self, state: &State) -> Option<String> {
        let broken = |property: &Property| property.broken(self.job, state).map(|how| format!("{property:?}: {how}"));
        self.properties.iter().find_map(broken)
    }
}
