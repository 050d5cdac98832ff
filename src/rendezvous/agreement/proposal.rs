//! Computes the decision that a rank proposes in a turn, from the state of the turn that it sees at
//! one moment (docs/recovery.md, "Who is waited for" and "How a proposer fills the seats").
//!
//! Nothing here waits or asks the store. tests/recovery_model compares these rules with its own in
//! every state that it reaches.

use std::collections::BTreeSet;
use std::time::Duration;

use super::decision::{Decision, Epoch, Failure, Replicas, Why};
use crate::error::Error;
use crate::rank_list::ranges;
use crate::rendezvous::incarnation::Incarnation;

/// The state of a turn that a rank sees at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The epoch in which the rank is.
    pub epoch: &'a Epoch,
    /// Whether the mesh of that epoch was made.
    pub is_made: bool,
    /// The members that have come to the turn.
    pub here: &'a BTreeSet<Incarnation>,
    /// The members at the turn that have the state of the training.
    pub stateful: &'a BTreeSet<Incarnation>,
    /// The processes that are known to be lost.
    pub lost: &'a BTreeSet<Incarnation>,
    /// The newcomers that have knocked, in the order in which they came.
    pub door: &'a [Knock],
    /// How many notes of the door were read, also those of nobody.
    pub notes: usize,
    /// The terms of the turn.
    pub terms: &'a Terms,
    /// The time limits of this rank that have passed.
    pub passed: Passed,
}

/// A newcomer at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Knock {
    /// The newcomer.
    pub process: Incarnation,
    /// The seat that it asks for. A number beyond the seats lets the mesh grow, and `usize::MAX`
    /// asks for no seat: the newcomer takes the place of a spare.
    pub seat: usize,
    /// Whether the newcomer asks for the mesh of the job. A newcomer that does not is refused.
    pub fits: bool,
}

/// The terms on which the ranks of the mesh recover, equal on all of these ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Terms {
    /// Whether the ranks want the end of the job, and no recovery.
    pub ends: bool,
    /// The number of the dimension of replicas.
    pub dim: usize,
    /// How long to wait for processes that could take the empty seats.
    pub replace: Duration,
    /// How long a rank that has come waits for ranks that do not come and are not known to be
    /// lost. These ranks are left out after this time. `None` means that they are never left out.
    pub silent: Option<Duration>,
    /// The least number of replicas with which the job goes on. 0 means 1.
    pub min_size: usize,
    /// The greatest size of the outermost dimension; `None` where the mesh must not grow.
    pub max_size: Option<usize>,
    /// Whether the job goes on also where no rank has the state of some part of a replica.
    pub any_state: bool,
}

/// The waits of a rank in a turn that have lasted long enough.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passed {
    /// The rank's time for the call, where it has passed.
    pub deadline: Option<Duration>,
    /// Whether [`Terms::silent`] has passed since the rank came.
    pub silent: bool,
    /// Whether [`Terms::replace`] has passed since the rank saw that nobody is waited for.
    pub replace: bool,
}

/// Returns the ranks of the mesh that are neither here nor known to be lost. Nobody waits for
/// spares and benched ranks, because one that is hung must not hold up the others.
pub(super) fn absent(epoch: &Epoch, here: &BTreeSet<Incarnation>, lost: &BTreeSet<Incarnation>) -> Vec<Incarnation> {
    let arrived = |process: &Incarnation| here.contains(process) || lost.contains(process);
    epoch.in_mesh().into_iter().filter(|process| !arrived(process)).collect()
}

impl Seen<'_> {
    /// Returns what the rank proposes now; `None` while it waits.
    pub fn decision(&self) -> Option<Decision> {
        let absent = absent(self.epoch, self.here, self.lost);
        match (absent.is_empty(), self.passed.deadline) {
            (false, _) if self.passed.silent => Some(self.proposal()),
            (false, Some(timeout)) => Some(late(&absent, timeout)),
            (false, None) => None,
            (true, deadline) => {
                let proposal = self.proposal();
                let is_final = match &proposal {
                    Decision::Epoch(epoch) => epoch.without.is_empty(),
                    // Newcomers and spares do not have the state. They may avert every other
                    // failure.
                    Decision::Failure(_) => {
                        !self.is_anybody_of_the_mesh_here() || self.position_that_is_gone().is_some()
                    }
                    Decision::End => true,
                };
                (is_final || self.passed.replace || deadline.is_some()).then_some(proposal)
            }
        }
    }

    /// Returns what the rank proposes when it waits for nobody any more.
    pub fn proposal(&self) -> Decision {
        if !self.is_anybody_of_the_mesh_here() {
            // Only spares and benched ranks are left. These ranks were not in the mesh that
            // trained last.
            let message = "all ranks of the mesh are lost, and the state of the training with them: start the job from a checkpoint";
            return failure(Why::NoState, message);
        }
        if self.terms.ends {
            return Decision::End;
        }
        if let Some(position) = self.position_that_is_gone() {
            return self.no_state(position);
        }
        let epoch = self.next_epoch();
        let count = epoch.replicas.count();
        let left = count - epoch.without.len();
        if left < self.terms.min_size.max(1) {
            let message = format!(
                "{left} of {count} replicas along dimension {} are left, and {} must be: start further ranks, or start the job from a checkpoint",
                self.terms.dim,
                self.terms.min_size.max(1)
            );
            return failure(Why::TooFew, &message);
        }
        match self.position_without_state(&epoch) {
            Some(position) if !self.terms.any_state => self.no_state(position),
            _ => Decision::Epoch(epoch),
        }
    }

    fn no_state(&self, position: usize) -> Decision {
        let message = format!(
            "no rank that is left has the state of position {position} of the replicas along dimension {}: start the job from a checkpoint",
            self.terms.dim
        );
        failure(Why::NoState, &message)
    }

    /// Returns the lowest position inside the replicas whose state was lost with all of its
    /// holders, in a job that must not go on without that state. No process that may still come
    /// has that state.
    fn position_that_is_gone(&self) -> Option<usize> {
        if self.terms.any_state {
            return None;
        }
        let replicas = Replicas { sizes: self.epoch.replicas.sizes.clone(), dim: self.terms.dim };
        let (seats, in_mesh) = (self.epoch.seats.iter().enumerate(), self.epoch.in_mesh());
        let has_state =
            |holder: &Incarnation| in_mesh.contains(holder) && self.is_here(holder) && self.stateful.contains(holder);
        let stateful = seats.filter(|(_, holder)| holder.as_ref().is_some_and(has_state));
        let found: BTreeSet<usize> = stateful.map(|(seat, _)| replicas.position_of(seat)).collect();
        let positions = replicas.num_seats() / replicas.count();
        (0..positions).find(|position| !found.contains(position))
    }

    fn is_anybody_of_the_mesh_here(&self) -> bool {
        self.epoch.in_mesh().iter().any(|process| self.is_here(process))
    }

    fn is_here(&self, process: &Incarnation) -> bool {
        self.here.contains(process) && !self.lost.contains(process)
    }

    /// Returns the epoch that these members, spares and newcomers can make. Its mesh may be empty.
    fn next_epoch(&self) -> Epoch {
        let (members, in_mesh) = (self.epoch.members(), self.epoch.in_mesh());
        // Members that are not in the mesh stay members, whether or not they are here.
        let stays = |process: &Incarnation| {
            !self.lost.contains(process) && (self.here.contains(process) || !in_mesh.contains(process))
        };
        let replicas = Replicas { sizes: self.epoch.replicas.sizes.clone(), dim: self.terms.dim };
        let seats = self.epoch.seats.iter().map(|holder| holder.filter(stays)).collect();
        let spares = self.epoch.spares.iter().copied().filter(stays).collect();
        let mut epoch = Epoch { replicas, seats, spares, ..self.epoch.clone() };
        let mut ready: BTreeSet<Incarnation> =
            members.iter().copied().filter(|process| self.is_here(process)).collect();

        let newly_refused = if self.is_made { &self.epoch.taken[..] } else { &[] };
        let misfits = self.door.iter().filter(|knock| !knock.fits && !members.contains(&knock.process));
        let misfits = misfits.map(|knock| &knock.process);
        let refused: BTreeSet<Incarnation> =
            self.epoch.refused.iter().chain(newly_refused).chain(misfits).copied().collect();
        let is_out = |knock: &&Knock| {
            let process = &knock.process;
            self.lost.contains(process) || members.contains(process) || refused.contains(process)
        };
        let waiting: Vec<Knock> = self.door.iter().filter(|knock| !is_out(knock)).copied().collect();
        let mut seated = Seating { epoch: &mut epoch, ready: &mut ready };
        seated.let_in(&waiting);
        seated.give_spares_seats();
        if let Some(most) = self.terms.max_size {
            seated.grow(&waiting, most);
        }
        epoch.without = incomplete(&epoch, &ready);
        let in_mesh = epoch.in_mesh();
        let now = epoch.members();
        epoch.stateless = in_mesh.iter().filter(|process| !self.stateful.contains(process)).copied().collect();
        epoch.taken = taken(&waiting, &now, &in_mesh);
        // The note of a newcomer that is left out is still at the door. This newcomer must not be
        // let in again, because it may be hung: the others would wait for it in every second
        // epoch.
        let left_out = self.door.iter().map(|knock| knock.process);
        let left_out = left_out.filter(|process| members.contains(process) && !now.contains(process));
        let refused: BTreeSet<Incarnation> = refused.iter().copied().chain(left_out).collect();
        epoch.refused = refused.into_iter().filter(|process| !self.lost.contains(process)).collect();
        epoch.door = self.notes;
        epoch.size = now.iter().map(|process| process.rank as usize + 1).max().unwrap_or(0).max(self.epoch.size);
        epoch
    }

    /// Returns the lowest position inside the replicas of the mesh for which nobody has the state.
    fn position_without_state(&self, epoch: &Epoch) -> Option<usize> {
        let in_mesh = epoch.in_mesh();
        let seats = epoch.seats.iter().enumerate();
        let has_state = |holder: &Incarnation| in_mesh.contains(holder) && self.stateful.contains(holder);
        let stateful = seats.filter(|(_, holder)| holder.as_ref().is_some_and(has_state));
        let found: BTreeSet<usize> = stateful.map(|(seat, _)| epoch.replicas.position_of(seat)).collect();
        let positions = epoch.replicas.num_seats() / epoch.replicas.count();
        (0..positions).find(|position| !found.contains(position))
    }
}

/// An epoch whose empty seats are being filled.
struct Seating<'a> {
    epoch: &'a mut Epoch,
    /// The processes that can be in the mesh: members that are here, and newcomers that are let in.
    ready: &'a mut BTreeSet<Incarnation>,
}

impl Seating<'_> {
    /// Gives newcomers the empty seats for which they ask, in the order in which they came. A
    /// newcomer whose seat was given to a spare becomes a spare itself, and so does a newcomer
    /// that asks for no seat.
    fn let_in(&mut self, waiting: &[Knock]) {
        for knock in waiting {
            if !self.is_new(knock.process) {
                continue;
            }
            match self.epoch.seats.get(knock.seat) {
                Some(None) => self.seat(knock.seat, knock.process),
                None if knock.seat != usize::MAX => {}
                Some(Some(_)) | None => {
                    self.epoch.spares.push(knock.process);
                    self.ready.insert(knock.process);
                }
            }
        }
        self.epoch.spares.sort_unstable();
    }

    /// Whether no member has this rank. Two processes never have one rank at the same time.
    fn is_new(&self, process: Incarnation) -> bool {
        let mut members = self.epoch.holders().chain(self.epoch.spares.iter().copied());
        members.all(|member| member.rank != process.rank)
    }

    fn seat(&mut self, seat: usize, process: Incarnation) {
        self.epoch.seats[seat] = Some(process);
        self.ready.insert(process);
    }

    /// Gives the spares that are here seats in the replicas that these spares can make whole. The
    /// replicas that need the fewest spares come first, so as many replicas as possible become
    /// whole.
    fn give_spares_seats(&mut self) {
        let mut empty = vec![Some(Vec::new()); self.epoch.replicas.count()];
        for (seat, holder) in self.epoch.seats.iter().enumerate() {
            let seats = &mut empty[self.epoch.replicas.replica_of(seat)];
            match holder {
                // Nobody can make a replica whole while the holder of one of its seats is not
                // here.
                Some(holder) if !self.ready.contains(holder) => *seats = None,
                Some(_) => {}
                None => seats.iter_mut().for_each(|seats| seats.push(seat)),
            }
        }
        let mut replicas: Vec<Vec<usize>> = empty.into_iter().flatten().filter(|seats| !seats.is_empty()).collect();
        replicas.sort_by_key(Vec::len);
        for seats in replicas {
            let ready = |spare: &Incarnation| self.ready.contains(spare);
            let spares: Vec<Incarnation> = self.epoch.spares.iter().copied().filter(ready).take(seats.len()).collect();
            if spares.len() < seats.len() {
                return;
            }
            self.epoch.spares.retain(|spare| !spares.contains(spare));
            seats.into_iter().zip(spares).for_each(|(seat, spare)| self.seat(seat, spare));
        }
    }

    /// Adds indices of the outermost dimension for which newcomers ask, as long as an index gets
    /// all of its ranks and the dimension has at most `most` indices.
    fn grow(&mut self, waiting: &[Knock], most: usize) {
        let row = self.epoch.seats.len() / self.epoch.replicas.sizes[0];
        while self.epoch.replicas.sizes[0] < most {
            let first = self.epoch.seats.len();
            let mut ranks = BTreeSet::new();
            let mut newcomer = |seat: usize| {
                let asks = |knock: &&Knock| knock.seat == seat && self.is_new(knock.process);
                let found = waiting.iter().find(asks)?;
                ranks.insert(found.process.rank).then_some(found.process)
            };
            let Some(newcomers) = (first..first + row).map(&mut newcomer).collect::<Option<Vec<_>>>() else { return };
            self.epoch.replicas.sizes[0] += 1;
            self.epoch.seats.extend(newcomers.iter().copied().map(Some));
            self.ready.extend(newcomers);
        }
    }
}

/// Returns the replicas that have an empty seat, or the seat of a benched rank that is not here.
fn incomplete(epoch: &Epoch, ready: &BTreeSet<Incarnation>) -> Vec<usize> {
    let seats = epoch.seats.iter().enumerate();
    let is_missing = |holder: &Option<Incarnation>| holder.is_none_or(|holder| !ready.contains(&holder));
    let missing = seats.filter(|(_, holder)| is_missing(holder)).map(|(seat, _)| epoch.replicas.replica_of(seat));
    missing.collect::<BTreeSet<usize>>().into_iter().collect()
}

/// Returns the newcomers whose rank is in the mesh as another process.
fn taken(waiting: &[Knock], members: &BTreeSet<Incarnation>, in_mesh: &BTreeSet<Incarnation>) -> Vec<Incarnation> {
    let is_taken = |knock: &&Knock| {
        !members.contains(&knock.process) && in_mesh.iter().any(|member| member.rank == knock.process.rank)
    };
    let taken: BTreeSet<Incarnation> = waiting.iter().filter(is_taken).map(|knock| knock.process).collect();
    taken.into_iter().collect()
}

fn failure(why: Why, message: &str) -> Decision {
    Decision::Failure(Failure::new(why, &Error::invalid_state(message)))
}

/// Returns the failure of a turn to which these ranks did not come in time.
fn late(absent: &[Incarnation], timeout: Duration) -> Decision {
    let ranks: Vec<i32> = absent.iter().map(|process| process.rank).collect();
    let message = format!("{} did not come to the recovery within {} ms", ranges(&ranks), timeout.as_millis());
    Decision::Failure(Failure::new(Why::Timeout, &Error::timeout(message).with_ranks(&ranks)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(ranks: &[i32]) -> BTreeSet<Incarnation> {
        ranks.iter().map(|rank| Incarnation { rank: *rank, ticket: 0 }).collect()
    }

    /// Returns the decision of a rank of the mesh (2, 2), whose rows are the replicas. All ranks
    /// that are left are here.
    fn decision(left: &[i32], lost: &[i32], terms: &Terms, replace: bool) -> Option<Decision> {
        let epoch: Epoch = "epoch size=4 shape=2x2 dim=0 without= seats=0-3 spares= stateless= taken= refused= door=0"
            .parse()
            .map(|decision| match decision {
                Decision::Epoch(epoch) => epoch,
                other => panic!("{other}"),
            })
            .expect("an epoch");
        let (here, lost) = (processes(left), processes(lost));
        let seen = Seen {
            epoch: &epoch,
            is_made: true,
            here: &here,
            stateful: &here,
            lost: &lost,
            door: &[],
            notes: 0,
            terms,
            passed: Passed { replace, ..Passed::default() },
        };
        seen.decision()
    }

    fn why(decision: Option<Decision>) -> Option<Why> {
        decision.map(|decision| match decision {
            Decision::Failure(failure) => failure.why,
            other => panic!("{other}"),
        })
    }

    #[test]
    fn nobody_waits_for_others_where_the_state_of_a_position_went_with_all_of_its_holders() {
        let terms = Terms::default();
        assert_eq!(why(decision(&[0, 2], &[1, 3], &terms, false)), Some(Why::NoState));
        // Each replica has lost a rank, and other processes may take the places of these ranks.
        assert_eq!(why(decision(&[0, 3], &[1, 2], &terms, false)), None);
        assert_eq!(why(decision(&[0, 3], &[1, 2], &terms, true)), Some(Why::TooFew));
        // A program that reads a checkpoint waits for others, too.
        let terms = Terms { any_state: true, ..Terms::default() };
        assert_eq!(why(decision(&[0, 2], &[1, 3], &terms, false)), None);
    }
}
