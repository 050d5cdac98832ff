//! Compares the calls of the ranks, and says which ranks differ.

use std::time::Duration;

use super::round::{Round, grace};
use super::verdict::{Sides, Verdict, split, split_mesh};
use crate::error::{Result, Status};
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

/// A dissenter adds 1 and this number to the counter. The low half counts all ranks that have
/// called, and the high half counts the dissenters.
pub(super) const DISSENT: i64 = 1 << 32;

/// How long the first dissenter waits for others, so that the message can name several.
const WINDOW: Duration = Duration::from_millis(250);

/// How long a counted dissenter may take to write its position. The rank that serves the store also
/// pauses for this long between two looks at who has read a verdict.
pub(super) const MOMENT: Duration = Duration::from_millis(50);

/// The most dissenters whose calls are read. Below this limit, half of all ranks and one more are
/// read, because the majority may have made the right call.
const MOST_READ: usize = 1024;
/// At least this many dissenters' calls are read, if there are so many.
const LEAST_READ: usize = 16;

impl Round {
    /// Whether the calls of this rank and of the first rank are equal. The offers are not compared
    /// here.
    pub(super) fn is_like(&self, mine: &str, theirs: &str) -> bool {
        theirs == mine || (self.offers.is_some() && split(theirs) == split(mine))
    }

    /// Counts this rank as a dissenter, because its call differs from that of the first rank. The
    /// first dissenter writes the verdict for all dissenters.
    pub(super) fn dissent(&self, phase: &str, mine: &str, theirs: &str, wait: &Wait) -> Result<Verdict> {
        let store = &self.membership.store;
        let counted = self.count(self.key(phase, "count"), DISSENT + 1, wait)?;
        let all = counted % DISSENT == self.membership.members.len() as i64;
        let number = counted / DISSENT;
        self.put(self.differing(phase, number), self.membership.me.to_string().as_bytes(), wait)?;
        let stands = if number > 1 {
            if all {
                self.put(self.key(phase, "all"), b"1", wait)?;
            }
            self.await_verdict(phase, wait)?
        } else {
            // The dissenter writes the verdict before its own deadline passes. After the deadline
            // the verdict would be a timeout.
            let window = wait.with_deadline(Deadline::after(WINDOW.min(wait.deadline.left() / 2)));
            if !all {
                match any_of(&**store, &[&self.key(phase, "all"), &self.key(phase, "verdict")], &window) {
                    Err(error) if error.status() == Status::Timeout => {}
                    came => drop(came?),
                }
            }
            // A store on a loaded machine may need more than the window to take the verdict.
            let soon = Wait { watch: None, ..wait.with_deadline(Deadline::after(WINDOW.max(grace(wait)))) };
            let verdict = self.spell_out(phase, theirs, &soon)?;
            let verdict = verdict.unwrap_or_else(|| self.mismatch(&[(self.my_rank(), mine.to_owned())], 1, 1, theirs));
            self.decide(phase, &verdict, &soon)?
        };
        if stands.status == Status::Ok {
            // The other ranks were complete without this rank, so they and this rank do not agree
            // on the size of the scope. If the others are still in the call, they learn of it.
            let others = self.membership.members.len() - 1;
            let verdict = self.mismatch(&[(self.my_rank(), mine.to_owned())], others, 1, theirs);
            self.decide("/end", &verdict, wait)?;
            return Ok(verdict);
        }
        Ok(stands)
    }

    /// Returns the verdict with the calls of the dissenters that are known by now, or `None` when
    /// no dissenter is known.
    fn spell_out(&self, phase: &str, theirs: &str, soon: &Wait) -> Result<Option<Verdict>> {
        let store = &self.membership.store;
        let counted = store.add(&self.key(phase, "count"), 0, soon)?;
        let differ = counted / DISSENT;
        // The first rank agrees with itself, even if it has not added itself to the counter yet.
        let agree = (counted % DISSENT - differ).max(1);
        let most = (self.membership.members.len() / 2 + 1).clamp(LEAST_READ, MOST_READ) as i64;
        let keys: Vec<String> = (1..=differ.min(most)).map(|number| self.differing(phase, number)).collect();
        let mut positions = store.try_get_each(&keys, soon).unwrap_or_default();
        positions.resize(keys.len(), None);
        // A dissenter writes its position right after it has counted itself in, so the position
        // comes within a moment unless the dissenter has died.
        let moment = soon.with_deadline(Deadline::after(MOMENT.min(soon.deadline.left())));
        for (position, key) in positions.iter_mut().zip(&keys).filter(|(position, _)| position.is_none()) {
            *position = store.get(key, &moment).ok();
        }
        let members = &self.membership.members;
        let parse = |position: Vec<u8>| String::from_utf8_lossy(&position).parse::<usize>().ok();
        let positions = positions.into_iter().flatten().filter_map(parse);
        let positions: Vec<usize> = positions.filter(|position| *position < members.len()).collect();
        let keys: Vec<String> = positions.iter().map(|position| self.here(phase, *position)).collect();
        let texts = store.try_get_each(&keys, soon).unwrap_or_default();
        let read = positions.into_iter().zip(texts);
        let mut dissenters: Vec<(i32, String)> =
            read.filter_map(|(position, text)| Some((members.rank(position), split_mesh(&text?).0))).collect();
        dissenters.sort();
        let found = !dissenters.is_empty();
        Ok(found.then(|| self.mismatch(&dissenters, agree as usize, differ as usize, theirs)))
    }

    /// Makes the verdict that ranks differ from the first rank. `agree` and `differ` count the
    /// ranks on the two sides ([`Sides`]).
    fn mismatch(&self, dissenters: &[(i32, String)], agree: usize, differ: usize, theirs: &str) -> Verdict {
        let sides = Sides { agree, differ, is_one_call: false, size: self.membership.members.len() };
        Verdict::of_mismatch(dissenters, &sides, self.membership.members.rank(0), theirs, self.number)
    }

    /// Returns the key under which dissenter `number` writes its position.
    fn differing(&self, phase: &str, number: i64) -> String {
        self.key(phase, &format!("differs/{number}"))
    }

    /// Returns the mismatch when a rank differs. A rank whose deadline has passed calls this first,
    /// because a mismatch says more than a list of missing ranks. The first dissenter was about to
    /// write this mismatch, or has died.
    pub(super) fn late_dissent(&self, phase: &str, soon: &Wait) -> Option<Verdict> {
        let store = &self.membership.store;
        let counted = store.try_get(&self.key(phase, "count"), soon).ok()??;
        let counted: i64 = String::from_utf8_lossy(&counted).trim().parse().ok()?;
        if counted < DISSENT {
            return None;
        }
        let theirs = store.try_get(&self.here(phase, 0), soon).ok()??;
        self.spell_out(phase, &split_mesh(&theirs).0, soon).ok()?
    }
}
