//! The properties that must hold in every state, and in every state in which nothing more happens.

use crate::job::{Job, Mistake};
use crate::protocol::Rank;
use crate::state::{At, DECISIONS, Decision, NOBODY, Plan, State, Verdict, Why, one};

/// A situation that a run can reach. The tests check that some run does, because a property says
/// nothing if it holds only in states that the model never reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// A newcomer uses the mesh, in the seat that it asked for.
    NewcomerTrains,
    /// A newcomer waits as a spare, because a spare has the seat that it asked for.
    NewcomerIsSpare,
    /// A newcomer uses the mesh, in another seat than the one that it asked for.
    NewcomerTrainsElsewhere,
    /// A newcomer is refused.
    NewcomerRefused,
    /// A spare uses the mesh.
    SpareTrains,
    /// The mesh is used with more seats than at the start.
    Grown,
    /// The mesh is used in its first size, after a loss.
    Whole,
    /// A living rank waits because its replica is not whole.
    Benched,
    /// A rank is told that the job has ended.
    Ended,
    /// A living rank is told that the others go on without it.
    Fenced,
    /// A rank was lost between a decision and the verdict.
    Broken,
    /// A recovery has failed because a rank did not come.
    Timeout,
    /// A recovery has failed because options differ.
    Mismatch,
    /// A recovery has failed because too few ranks are left.
    TooFew,
    /// A recovery has failed because no rank that is left has the state.
    NoState,
}

/// A property that must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Property {
    /// No two ranks act on two different decisions of one number, or on two different verdicts on
    /// one epoch.
    OneOutcome,
    /// No two halves go on: at most one mesh is in use by all of its ranks.
    OneHalf,
    /// A seat of an epoch has one holder.
    OneHolder,
    /// A rank is in an epoch only if the decision has let it in, also when it was slow and comes
    /// back.
    LetIn,
    /// A mesh has only ranks that have come to its decision, and newcomers that have knocked.
    Asked,
    /// A process that an epoch has left out is in no later epoch. It may be hung.
    OutForGood,
    /// A spare gets a seat only in a replica that is whole then.
    SparesUsed,
    /// Each position inside the replicas of a mesh has a rank with the state of the training.
    StateKept,
    /// Where nobody is left out for being silent, and nobody is taken for lost who lives, no rank
    /// that lives loses its place: neither to a decision without it nor to a newcomer.
    NobodyExpelled,
    /// Ranks with different options are in no epoch together.
    OptionsAgreed,
    /// A newcomer that asks for another mesh is in no epoch.
    Fits,
    /// When nothing more happens, no rank waits, except for a rank that is hung or does not call
    /// again. This holds also while any one process is hung.
    Progress,
    /// When nothing more happens, either all living members of a mesh use it, or none does. This
    /// holds also while any one process is hung.
    OneEnd,
    /// The goal is never reached. This is no property of the protocol: a test that looks for a way
    /// to the goal expects it to break.
    Never(Goal),
}

impl Property {
    /// All properties of the protocol.
    pub const ALL: [Property; 13] = [
        Property::OneOutcome,
        Property::OneHalf,
        Property::OneHolder,
        Property::LetIn,
        Property::Asked,
        Property::OutForGood,
        Property::SparesUsed,
        Property::StateKept,
        Property::NobodyExpelled,
        Property::OptionsAgreed,
        Property::Fits,
        Property::Progress,
        Property::OneEnd,
    ];

    /// Returns how the state breaks the property, if it does.
    pub(crate) fn broken(self, job: &Job, state: &State) -> Option<String> {
        match self {
            Property::OneOutcome => one_outcome(job, state),
            Property::OneHalf => one_half(job, state),
            Property::OneHolder => one_holder(job, state),
            Property::LetIn => let_in(job, state),
            Property::Asked => asked(job, state),
            Property::OutForGood => out_for_good(job, state),
            Property::SparesUsed => spares_used(job, state),
            Property::StateKept => state_kept(job, state),
            Property::NobodyExpelled => nobody_expelled(job, state),
            Property::OptionsAgreed => options_agreed(job, state),
            Property::Fits => fits(job, state),
            Property::Progress => in_the_end(job, state, waits_for_ever),
            Property::OneEnd => in_the_end(job, state, ends_apart),
            Property::Never(goal) => goal.is_reached(job, state).then(|| "it is reached".to_owned()),
        }
    }
}

impl Goal {
    fn is_reached(self, job: &Job, state: &State) -> bool {
        let at = |process: u8| state.process(process).at;
        let trains = |process: &u8| at(*process) == At::Training;
        let size = |process: u8| state.process(process).plan.used.count_ones();
        let is_benched = |process: &u8| {
            let mine = state.process(*process);
            let is_out = mine.plan.seat(*process).is_some() && mine.plan.used & one(*process) == 0;
            is_out && at(*process) == At::Looking(mine.epoch + 1)
        };
        let failed = |why: Why| all(job).any(|process| matches!(at(process), At::Failed(_, found) if found == why));
        let newcomers = job.seats + job.spares..job.processes();
        match self {
            Goal::NewcomerTrains => newcomers.clone().any(|process| {
                trains(&process) && state.process(process).plan.seat(process) == job.claim(process).map(usize::from)
            }),
            Goal::NewcomerIsSpare => newcomers.clone().any(|process| {
                let mine = state.process(process);
                let is_member = mine.plan.members & one(process) != 0;
                is_member && mine.plan.seat(process).is_none() && at(process) == At::Looking(mine.epoch + 1)
            }),
            Goal::NewcomerTrainsElsewhere => newcomers.clone().any(|process| {
                trains(&process) && state.process(process).plan.seat(process) != job.claim(process).map(usize::from)
            }),
            Goal::NewcomerRefused => newcomers.clone().any(|process| at(process) == At::Refused),
            Goal::SpareTrains => (job.seats..job.seats + job.spares).any(|process| trains(&process)),
            Goal::Grown => all(job).filter(trains).any(|process| size(process) > u32::from(job.seats)),
            Goal::Whole => (0..job.seats).filter(trains).any(|process| {
                state.store.lost != 0 && size(process) == u32::from(job.seats) && state.process(process).epoch > 0
            }),
            Goal::Benched => all(job).any(|process| is_benched(&process)),
            Goal::Ended => all(job).any(|process| at(process) == At::Ended),
            Goal::Fenced => all(job).any(|process| at(process) == At::Fenced),
            Goal::Broken => state.store.verdicts.contains(&Some(Verdict::Broken)),
            Goal::Timeout => failed(Why::Timeout),
            Goal::Mismatch => failed(Why::Mismatch),
            Goal::TooFew => failed(Why::TooFew),
            Goal::NoState => failed(Why::NoState),
        }
    }
}

fn rank(job: &Job, number: u8) -> Rank<'_> {
    Rank { job, number }
}

/// Returns the processes that the job has.
fn all(job: &Job) -> std::ops::Range<u8> {
    0..job.processes()
}

fn is_alive(state: &State, process: u8) -> bool {
    !matches!(state.process(process).at, At::Out | At::Dead)
}

/// Whether the process has entered its epoch by a decision, and has not left it.
fn is_inside(state: &State, process: u8) -> bool {
    let mine = state.process(process);
    mine.epoch > 0 && matches!(mine.at, At::Meeting | At::Awaiting | At::Settling(_) | At::Training)
}

/// Returns every decided epoch, with its number and with the epoch before it.
fn epochs(job: &Job, state: &State) -> Vec<(u8, Plan, Plan)> {
    let mut before = Plan::at_start(job);
    let mut found = Vec::new();
    for number in 1..DECISIONS {
        if let Some(Decision::Epoch(plan)) = state.store.decisions[number] {
            found.push((number as u8, plan, before));
            before = plan;
        }
    }
    found
}

fn one_outcome(job: &Job, state: &State) -> Option<String> {
    let decision = |process: u8| {
        let mine = state.process(process);
        match mine.at {
            At::Failed(number, why) if number != mine.epoch => Some((number, Decision::Failure(why))),
            _ if is_inside(state, process) => Some((mine.epoch, Decision::Epoch(mine.plan))),
            _ => None,
        }
    };
    let verdict = |process: u8| {
        let mine = state.process(process);
        match mine.at {
            At::Failed(number, _) if number == mine.epoch => Some((number, Verdict::Late)),
            At::Training => Some((mine.epoch, Verdict::Made)),
            _ => None,
        }
    };
    for (one, other) in pairs(job) {
        if differ(decision(one), decision(other)) {
            return Some(format!("processes {one} and {other} act on two decisions of one number"));
        }
        if differ(verdict(one), verdict(other)) {
            return Some(format!("processes {one} and {other} act on two verdicts on one epoch"));
        }
    }
    None
}

/// Whether two processes have acted on different things under one number.
fn differ<T: PartialEq>(one: Option<(u8, T)>, other: Option<(u8, T)>) -> bool {
    one.zip(other).is_some_and(|((first, mine), (second, theirs))| first == second && mine != theirs)
}

fn pairs(job: &Job) -> impl Iterator<Item = (u8, u8)> {
    let count = job.processes();
    (0..count).flat_map(move |one| (one + 1..count).map(move |other| (one, other)))
}

fn one_half(job: &Job, state: &State) -> Option<String> {
    let uses = |process: u8, epoch: u8, plan: &Plan| {
        let other = state.process(process);
        other.at == At::Training && other.epoch == epoch && other.plan == *plan
    };
    let is_whole = |process: u8| {
        let mine = state.process(process);
        let in_mesh = mine.plan.used;
        let mut others = all(job).filter(|other| in_mesh & one(*other) != 0);
        mine.at == At::Training && others.all(|other| uses(other, mine.epoch, &mine.plan))
    };
    for (one, other) in pairs(job) {
        let (first, second) = (state.process(one), state.process(other));
        if (first.epoch, first.plan) != (second.epoch, second.plan) && is_whole(one) && is_whole(other) {
            return Some(format!(
                "process {one} goes on in epoch {} and process {other} in another mesh of epoch {}",
                first.epoch, second.epoch
            ));
        }
    }
    None
}

fn one_holder(job: &Job, state: &State) -> Option<String> {
    let seat = |process: u8| {
        let mine = state.process(process);
        let asked = job.claim(process).map(usize::from).filter(|_| job.has(Mistake::NoTickets));
        (mine.at == At::Training).then(|| (mine.epoch, asked.or(mine.plan.seat(process))))
    };
    for (one, other) in pairs(job) {
        if let (Some((first, Some(mine))), Some((second, Some(theirs)))) = (seat(one), seat(other)) {
            if first == second && mine == theirs {
                return Some(format!("processes {one} and {other} hold seat {mine} of epoch {first}"));
            }
        }
    }
    None
}

fn let_in(job: &Job, state: &State) -> Option<String> {
    let outside = |process: &u8| {
        let mine = state.process(*process);
        is_inside(state, *process) && !job.has(Mistake::NoTickets) && mine.plan.members & one(*process) == 0
    };
    let process = all(job).find(outside)?;
    let epoch = state.process(process).epoch;
    Some(format!("process {process} is in epoch {epoch}, which does not list it"))
}

fn asked(job: &Job, state: &State) -> Option<String> {
    if job.has(Mistake::NoTickets) {
        return None;
    }
    for (number, plan, before) in epochs(job, state) {
        let is_right = |process: u8| match before.members & one(process) != 0 {
            true => plan.used & one(process) == 0 || state.process(process).came >= number,
            false => state.store.door & one(process) != 0,
        };
        if let Some(process) = all(job).find(|process| plan.members & one(*process) != 0 && !is_right(*process)) {
            return Some(format!("decision {number} lists process {process}, which has not come to it"));
        }
    }
    None
}

fn out_for_good(job: &Job, state: &State) -> Option<String> {
    if job.has(Mistake::NoTickets) {
        return None;
    }
    let mut out = 0;
    for (number, plan, before) in epochs(job, state) {
        out |= before.members & !plan.members;
        if let Some(process) = all(job).find(|process| out & plan.members & one(*process) != 0) {
            return Some(format!("epoch {number} has process {process}, which an earlier epoch has left out"));
        }
    }
    None
}

fn spares_used(job: &Job, state: &State) -> Option<String> {
    for (number, plan, before) in epochs(job, state) {
        let is_seated = |spare: &u8| before.seat(*spare).is_none() && plan.seat(*spare).is_some();
        let mut spares = (job.seats..job.seats + job.spares).filter(is_seated);
        if let Some(spare) = spares.find(|spare| plan.used & one(*spare) == 0) {
            return Some(format!("epoch {number} gives spare {spare} a seat in a replica that is not whole"));
        }
    }
    None
}

fn state_kept(job: &Job, state: &State) -> Option<String> {
    let with_state = all(job).filter(|process| state.process(*process).has_state);
    let stateful = with_state.fold(0, |set, process| set | one(process));
    // A rank that is benched by a later epoch has no state any more.
    let (number, plan, _) = epochs(job, state).pop()?;
    let is_kept = job.has(Mistake::NoTickets) || plan.keeps_state(job, stateful);
    (!is_kept).then(|| format!("some position of epoch {number} has no rank with the state"))
}

fn nobody_expelled(job: &Job, state: &State) -> Option<String> {
    if !job.is_strict() {
        return None;
    }
    if let Some(process) = all(job).find(|process| state.process(*process).at == At::Fenced) {
        return Some(format!("process {process} lives, and the others go on without it"));
    }
    for (number, plan, before) in epochs(job, state) {
        let is_gone = |holder: u8| holder == NOBODY || !is_alive(state, holder);
        let taken = (0..plan.mesh.len()).find(|seat| {
            let (holder, former) = (plan.mesh[*seat], before.mesh[*seat]);
            holder != former && !is_gone(former)
        });
        if let Some(seat) = taken {
            return Some(format!("epoch {number} gives seat {seat} away, whose rank lives"));
        }
    }
    None
}

fn options_agreed(job: &Job, state: &State) -> Option<String> {
    let odd = job.odd?;
    let decided = epochs(job, state).into_iter();
    let mut mixed = decided.filter(|(_, plan, _)| plan.seat(odd).is_some() && plan.holders() != one(odd));
    // A newcomer has no options yet when it is let in.
    let (number, ..) = mixed.find(|(_, plan, before)| plan.holders() & before.holders() & !one(odd) != 0)?;
    Some(format!("epoch {number} has process {odd} and others, whose options differ"))
}

fn fits(job: &Job, state: &State) -> Option<String> {
    let misfit = job.misfit?;
    let mut decided = epochs(job, state).into_iter();
    let (number, ..) = decided.find(|(_, plan, _)| plan.members & one(misfit) != 0)?;
    Some(format!("epoch {number} has process {misfit}, which asks for another mesh"))
}

/// Looks at a state in which nothing more happens, or in which all but one process wait. `wrong`
/// gets the process that is hung: it makes no operation, and nobody knows that.
fn in_the_end(job: &Job, state: &State, wrong: impl Fn(&Job, &State, Option<u8>) -> Option<String>) -> Option<String> {
    if all(job).any(|process| rank(job, process).is_unnoticed(state)) {
        return None;
    }
    let goes_on = |process: &u8| rank(job, *process).step(&mut state.clone());
    let mut busy = all(job).filter(goes_on);
    match (busy.next(), busy.next()) {
        (None, _) => {
            let living = all(job).filter(|process| is_alive(state, *process));
            [None].into_iter().chain(living.map(Some)).find_map(|hung| wrong(job, state, hung))
        }
        // All others wait for this process, or have ended. It may be hung as well.
        (hung, None) => wrong(job, state, hung),
        _ => None,
    }
}

/// Returns the living processes that are not hung.
fn well<'a>(job: &Job, state: &'a State, hung: Option<u8>) -> impl Iterator<Item = u8> + 'a {
    all(job).filter(move |process| Some(*process) != hung && is_alive(state, *process))
}

fn in_this_case(hung: Option<u8>) -> String {
    match hung {
        Some(hung) => format!("while process {hung} is hung"),
        None => "though nobody is hung".to_owned(),
    }
}

fn waits_for_ever(job: &Job, state: &State, hung: Option<u8>) -> Option<String> {
    // A rank may wait, until its deadline, for a rank that is hung or does not call again.
    let never_comes = |process: u8| {
        Some(process) == hung || matches!(state.process(process).at, At::Failed(..) | At::Fenced | At::Ended)
    };
    let has_reason = |absent: u8| all(job).any(|process| absent & one(process) != 0 && never_comes(process));
    let waits = |process: &u8| {
        let (waiting, mine) = (rank(job, *process), state.process(*process));
        match mine.at {
            At::Looking(number) | At::Reading(number) => {
                waiting.is_in_mesh(state) && !has_reason(waiting.absent(state, number) & mine.plan.used)
            }
            At::Awaiting => !has_reason(mine.plan.used & !state.store.met[usize::from(mine.epoch)]),
            At::Door(number) => waiting.waits_in_vain(state, number),
            At::Doubting(number) => match state.store.decisions[usize::from(number)] {
                Some(Decision::Epoch(plan)) => !has_reason(plan.used),
                _ => true,
            },
            _ => false,
        }
    };
    let process = well(job, state, hung).find(waits)?;
    Some(format!("process {process} waits for ever at {:?} {}", state.process(process).at, in_this_case(hung)))
}

fn ends_apart(job: &Job, state: &State, hung: Option<u8>) -> Option<String> {
    for process in well(job, state, hung).filter(|process| state.process(*process).at == At::Training) {
        let mine = state.process(process);
        let is_apart = |other: &u8| {
            let theirs = state.process(*other);
            mine.plan.used & one(*other) != 0 && (theirs.at != At::Training || theirs.epoch != mine.epoch)
        };
        if let Some(other) = well(job, state, hung).find(is_apart) {
            return Some(format!(
                "process {process} uses the mesh of epoch {}, and process {other} of that mesh does not, {}",
                mine.epoch,
                in_this_case(hung)
            ));
        }
    }
    None
}
