//! A process's way through the decisions of a job that recovers from lost ranks (docs/recovery.md).
//!
//! | file | content |
//! |---|---|
//! | decision.rs | the decisions, and their text in the store |
//! | proposal.rs | what a rank proposes by what it sees, without any wait |
//! | recovery/come.rs | a turn: ranks come, and wait until decision `n` stands |
//! | recovery/knock.rs | the notes of newcomers at the door |
//! | recovery/wanted.rs | the mesh for which a newcomer asks, and whether it is that of the job |
//! | recovery/door.rs | the members read these notes, and say why they refuse a newcomer |
//! | recovery/newcomer.rs | a newcomer: it knocks, and waits until a decision lets it in |
//! | recovery/make.rs | the verdict on the mesh of an epoch: all its ranks have made it, or not |
//! | recovery/telling.rs | refusals, and the ranks that have read how a recovery has ended |
//! | recovery/standing.rs | what a process knows before it comes to a turn |
//! | recovery/ending.rs | the end of the job, of which the waiting processes are told |
//!
//! tests/recovery_model has the same protocol as a model, which is checked exhaustively. The names
//! of its states are those of the steps here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::decision::{Decision, Decisions, Epoch};
use super::missing::AT_ONCE;
use super::proposal::Terms;
use super::round::{LEAST_ASK, Membership, grace};
use crate::error::{Error, Result};
use crate::rendezvous::incarnation::Incarnation;
use crate::wait::{Deadline, Wait, Watch};

mod come;
mod door;
mod ending;
mod knock;
mod make;
mod newcomer;
mod options;
mod slow;
mod standing;
mod telling;
#[cfg(test)]
mod tests;
mod wanted;

pub use come::{Arrival, Outcome};
use knock::decided;
pub(in crate::rendezvous) use knock::{Note, count_waiting, decided_at, door_note, now};
pub use make::Made;
pub use newcomer::Request;
pub(in crate::rendezvous) use newcomer::{AtDoor, ended};
pub use wanted::mesh_text;

/// Where one process is among the decisions of its world.
pub struct Recovery {
    /// The ranks of the world, and the store.
    membership: Membership,
    /// The decisions of the world.
    decisions: Decisions,
    /// This process.
    me: Incarnation,
    /// The number of the last decision that this process has read. 0 is the start of the job.
    number: u64,
    /// The number of this process's epoch.
    epoch_number: u64,
    /// This process's epoch.
    epoch: Epoch,
    /// The number and the members of the last epoch whose mesh was made. The notes of the turn of
    /// that epoch and of all earlier turns are removed.
    last_made: (u64, BTreeSet<Incarnation>),
    /// The newcomers that have knocked, in the order of their numbers.
    door: Vec<Note>,
    /// How many notes of the door were read. Unreadable notes count, too.
    read_at_door: usize,
    /// How many of its own calls this process has refused since it last came to a turn.
    refusals: u64,
    /// The number of the decision, or of the turn, since which the others go on without this
    /// process. From then on this process takes part in no turn, because its proposals would be
    /// about an epoch that is over.
    fenced_since: Option<u64>,
    /// When the store has one of these keys, the wait of a process that is not in the mesh ends:
    /// another rank has made a call for which this process is needed, too.
    call_of_world: Vec<String>,
    /// The mesh with which the job has started, for which a newcomer must ask (wanted.rs); `None`
    /// where nobody has said which.
    mesh: Option<String>,
    /// The terms of the turn that has let this process in, while it is a newcomer whose dm_init has
    /// not ended. Such a newcomer has no terms of its own, and compares none.
    adopted: Option<Terms>,
    /// Whether this process was let in without a seat of the mesh and has not waited for the
    /// verdict on that epoch. The next call of this process waits for that verdict.
    awaits_verdict: bool,
    /// The number of the epoch in which this process has knocked as a member without a place in the
    /// mesh, because the next decision would give it a place; 0 where it has not knocked.
    knocked_in: u64,
    /// The deadline of a process that has got its seat in the call that it makes now; `None` where
    /// it has the caller's deadline.
    seated: Option<Deadline>,
}

impl Recovery {
    /// Begins at the start of a job, whose first epoch is `epoch`. All ranks have made its mesh.
    pub(in crate::rendezvous) fn new(membership: Membership, me: Incarnation, epoch: Epoch) -> Recovery {
        let decisions = Decisions::new(Arc::clone(&membership.store), membership.losses.prefix());
        let last_made = (0, epoch.members());
        Recovery {
            membership,
            decisions,
            me,
            number: 0,
            epoch_number: 0,
            epoch,
            last_made,
            door: Vec::new(),
            read_at_door: 0,
            refusals: 0,
            fenced_since: None,
            call_of_world: Vec::new(),
            mesh: None,
            adopted: None,
            awaits_verdict: false,
            knocked_in: 0,
            seated: None,
        }
    }

    /// Returns the number of this process's epoch.
    pub fn epoch_number(&self) -> u64 {
        self.epoch_number
    }

    /// Returns this process's epoch.
    pub fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// Whether this process is in the mesh of its epoch. A spare or benched process is not.
    pub fn is_in_mesh(&self) -> bool {
        self.epoch.in_mesh().contains(&self.me)
    }

    /// Whether the mesh of its epoch was made.
    fn is_made(&self) -> bool {
        self.last_made.0 == self.epoch_number
    }

    /// Makes this decision `number` unless the store has that decision already, and returns the
    /// one that the store has then. The decision stays in the store for as long as any rank is in
    /// the world.
    fn decide(&self, number: u64, decision: &Decision, wait: &Wait) -> Result<Decision> {
        let stands = self.decisions.decide(number, decision, wait)?;
        if stands == *decision {
            self.membership.left.note_of_others([self.decisions.key(number)]);
            self.say_decided(number, decision, wait);
        }
        Ok(stands)
    }

    /// Writes in the store that this decision was made, so that a newcomer need not read all
    /// earlier decisions. Nothing is written about a failure, because a newcomer begins with an
    /// epoch. An error of the store does not matter.
    fn say_decided(&self, number: u64, decision: &Decision, wait: &Wait) {
        if matches!(decision, Decision::Failure(_)) {
            return;
        }
        let key = decided(self.membership.losses.prefix());
        let _ = self.membership.store.set(&key, format!("{number} {}", now()).as_bytes(), wait);
        self.membership.left.note_of_others([key]);
    }

    /// Returns the key of a note of that turn.
    fn turn_key(&self, number: u64, name: &str) -> String {
        format!("{}/turn/{number}/{name}", self.membership.losses.prefix())
    }

    /// Returns the key of the note that a process has come to that turn.
    fn here(&self, number: u64, process: Incarnation) -> String {
        self.turn_key(number, &format!("here/{process}"))
    }

    /// Returns the members that have come to that turn.
    fn members_here(&self, number: u64, wait: &Wait) -> Result<BTreeSet<Incarnation>> {
        self.which_left(self.epoch.members(), |process| self.here(number, process), wait)
    }

    /// Returns how many processes were counted under that key.
    fn counted(&self, key: &str, wait: &Wait) -> Result<usize> {
        // A question by `add` would make the key again where another rank has removed it.
        let count = self.membership.store.try_get(key, wait)?;
        Ok(count.and_then(|count| String::from_utf8_lossy(&count).trim().parse().ok()).unwrap_or(0))
    }

    /// Returns the processes that have left the key that `key` returns for them.
    fn which_left(
        &self,
        processes: BTreeSet<Incarnation>,
        key: impl Fn(Incarnation) -> String,
        wait: &Wait,
    ) -> Result<BTreeSet<Incarnation>> {
        let (all, mut found): (Vec<_>, _) = (processes.into_iter().collect(), BTreeSet::new());
        for some in all.chunks(AT_ONCE) {
            let keys: Vec<String> = some.iter().map(|process| key(*process)).collect();
            let present = self.membership.store.present(&keys, wait)?;
            found.extend(some.iter().zip(present).filter(|(_, is_there)| *is_there).map(|(process, _)| *process));
        }
        Ok(found)
    }

    /// Returns this wait with a watch that looks for lost processes of this host. A process that is
    /// not in the mesh waits without a deadline.
    fn watching(&self, wait: &Wait) -> Wait {
        let deadline = if self.is_in_mesh() { self.deadline(wait) } else { Deadline::after(Duration::MAX) };
        self.watching_until(deadline, wait)
    }

    /// Returns the moment by which this process must have made its part of the mesh, where the
    /// caller has this wait. A spare or benched process waits for a seat without a limit, so its
    /// time for the mesh begins when it gets one. src/comm makes the communicators of the epoch by
    /// this deadline.
    pub fn deadline(&self, wait: &Wait) -> Deadline {
        match self.seated {
            Some(seated) if seated.left() > wait.deadline.left() => seated,
            _ => wait.deadline,
        }
    }

    /// Returns this wait with that deadline, and with a watch that looks for lost processes of this
    /// host.
    fn watching_until(&self, deadline: Deadline, wait: &Wait) -> Wait {
        let (losses, of_caller) = (Arc::clone(&self.membership.losses), wait.watch.clone());
        let looking = Wait { watch: None, ..wait.with_deadline(deadline) };
        let watch: Watch = Arc::new(move || {
            losses.look(&looking);
            of_caller.as_ref().map_or(Ok(()), |watch| watch())
        });
        Wait { watch: Some(watch), ..wait.with_deadline(deadline) }
    }

    /// Returns this wait for questions to the store. The store gets some time beyond the deadline,
    /// also where the deadline has passed, so that the others learn why this rank gives up.
    fn soon(wait: &Wait) -> Wait {
        let until = wait.deadline.extended(grace(wait)).at_least(LEAST_ASK);
        Wait { watch: None, ..wait.with_deadline(until) }
    }

    /// Returns the ranks of these processes.
    fn ranks(processes: &[Incarnation]) -> Vec<i32> {
        processes.iter().map(|process| process.rank).collect()
    }

    /// Returns the error of a process without which the others have gone on since turn or decision
    /// `number`. The process takes no part in later turns.
    fn fence(&mut self, number: u64) -> Error {
        let number = *self.fenced_since.get_or_insert(number);
        let Incarnation { rank, .. } = self.me;
        let message = format!(
            "the other ranks have gone on without rank {rank}, which is this process, since decision {number}: they took it for lost, or it did not come in time; leave the world (dm_world_abort) and end this process"
        );
        Error::not_member(message).with_ranks(&[rank])
    }
}
