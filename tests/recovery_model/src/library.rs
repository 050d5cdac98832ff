//! Compares the model's proposals with those of the library (src/rendezvous/agreement/proposal.rs).
//!
//! The library's rules are pure, and see what the model's see. So the checker asks both in every
//! state in which a process proposes, and what it proves of the model's proposals holds for the
//! library's.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

use devicemesh::rendezvous as library;
use library::{Decision as Theirs, Epoch, Incarnation, Knock, Passed, Replicas, Seen, Terms};

use crate::job::{Job, NO_SEAT};
use crate::state::{Decision, NOBODY, Plan, SEATS, Set, Why, one};

/// What a process of the model sees when it proposes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct View {
    /// Its epoch.
    pub(crate) epoch: Plan,
    /// Whether the mesh of its epoch was made.
    pub(crate) is_made: bool,
    /// The members that have come to the turn, also those that are lost.
    pub(crate) here: Set,
    /// Those of them that have the state.
    pub(crate) stateful: Set,
    /// The processes that are known to be lost.
    pub(crate) lost: Set,
    /// The newcomers that have knocked.
    pub(crate) door: Set,
    /// Whether the first rank that came asks for the end of the job.
    pub(crate) asks_end: bool,
}

/// A view, and what the library's answer to it depends on beside the view.
type Question = (View, [u8; 3], &'static [u8], u8, Option<u8>);

/// Panics where the library proposes something else than the model.
pub(crate) fn compare(job: &Job, view: &View, mine: &Decision) {
    thread_local! {
        /// The questions that were asked before. Many states have the same one.
        static ASKED: RefCell<HashSet<Question>> = RefCell::default();
    }
    let question = (view.clone(), [job.seats, job.replica, job.spares], job.newcomers, job.least, job.misfit);
    if !ASKED.with_borrow_mut(|asked| asked.insert(question)) {
        return;
    }
    let epoch = epoch(job, &view.epoch);
    let door: Vec<Knock> = members(view.door)
        .filter_map(|process| {
            let seat = job.claim(process).map(|seat| if seat == NO_SEAT { usize::MAX } else { usize::from(seat) })?;
            let fits = job.misfit != Some(process);
            Some(Knock { process: name(job, process), seat, fits })
        })
        .collect();
    let terms =
        Terms { ends: view.asks_end, min_size: usize::from(job.least), max_size: Some(SEATS), ..Terms::default() };
    let (here, stateful, lost) =
        (names(job, view.here & view.epoch.members), names(job, view.stateful), names(job, view.lost));
    let seen = Seen {
        epoch: &epoch,
        is_made: view.is_made,
        here: &here,
        stateful: &stateful,
        lost: &lost,
        door: &door,
        notes: door.len(),
        terms: &terms,
        passed: Passed::default(),
    };
    let theirs = seen.proposal();
    let is_equal = match (mine, &theirs) {
        (Decision::End, Theirs::End) => true,
        (Decision::Failure(why), Theirs::Failure(failure)) => {
            let kind = match why {
                Why::TooFew => library::Why::TooFew,
                Why::NoState => library::Why::NoState,
                Why::Timeout | Why::Mismatch | Why::Late => return,
            };
            failure.why == kind
        }
        (Decision::Epoch(plan), Theirs::Epoch(epoch)) => {
            let seat = |seat: usize| epoch.seats.get(seat).copied().flatten();
            let has_seats =
                (0..SEATS).all(|at| seat(at) == (plan.mesh[at] != NOBODY).then(|| name(job, plan.mesh[at])));
            let stateless = plan.used & !view.stateful;
            has_seats
                && epoch.members() == names(job, plan.members)
                && epoch.in_mesh() == names(job, plan.used)
                && BTreeSet::from_iter(epoch.stateless.iter().copied()) == names(job, stateless)
                && BTreeSet::from_iter(epoch.taken.iter().copied()) == names(job, plan.taken)
                && BTreeSet::from_iter(epoch.refused.iter().copied()) == names(job, plan.refused)
                // A text is read only when the parts of the epoch fit together.
                && theirs.to_string().parse() == Ok(theirs.clone())
        }
        _ => false,
    };
    assert!(is_equal, "{job:?}: from {view:?} the model proposes {mine:?}, and the library {theirs}");
}

/// Returns the model's epoch as the library has it.
fn epoch(job: &Job, plan: &Plan) -> Epoch {
    let replica = usize::from(job.replica);
    let held = plan.mesh.iter().rposition(|holder| *holder != NOBODY).map_or(0, |last| last + 1);
    let count = held.max(usize::from(job.seats)).div_ceil(replica);
    let seats: Vec<_> =
        plan.mesh[..count * replica].iter().map(|holder| (*holder != NOBODY).then(|| name(job, *holder))).collect();
    let is_used = |holder: &Option<Incarnation>| holder.is_some_and(|holder| plan.used & one(number(job, holder)) != 0);
    let without = (0..count).filter(|index| !seats[index * replica..][..replica].iter().all(is_used)).collect();
    Epoch {
        size: usize::from(job.processes()),
        replicas: Replicas { sizes: vec![count, replica], dim: 0 },
        seats,
        without,
        spares: names(job, plan.members & !plan.holders()).into_iter().collect(),
        stateless: Vec::new(),
        taken: names(job, plan.taken).into_iter().collect(),
        refused: names(job, plan.refused).into_iter().collect(),
        door: 0,
    }
}

/// Returns the process as the library has it: its rank, and how many processes had the rank before.
fn name(job: &Job, process: u8) -> Incarnation {
    let rank = job.rank(process);
    let ticket = (0..process).filter(|other| job.rank(*other) == rank).count() as u32;
    Incarnation { rank: i32::from(rank), ticket }
}

/// Returns the process of the model that has this name.
fn number(job: &Job, holder: Incarnation) -> u8 {
    (0..job.processes()).find(|process| name(job, *process) == holder).expect("a process of the job")
}

fn members(set: Set) -> impl Iterator<Item = u8> {
    (0..8).filter(move |process| set & one(*process) != 0)
}

fn names(job: &Job, set: Set) -> BTreeSet<Incarnation> {
    members(set).map(|process| name(job, process)).collect()
}
