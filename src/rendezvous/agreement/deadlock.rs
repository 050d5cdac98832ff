//! Finds deadlocks: ranks that wait for each other in calls of different scopes, where each scope
//! waits for a rank that waits in the other.
//!
//! In one scope every call has a number, so calls in another order are different calls under one
//! number. Calls of different scopes have no common number. So a rank that has waited for a while
//! in a call leaves a note under `<prefix of the epoch>/at/<rank>` that names this call. The first
//! rank of a call to leave a note then searches: it finds out where the missing ranks wait, and
//! for which ranks those calls wait. If that leads back to a rank that waits in this call, the
//! ranks wait for each other in a ring. Such a ring never ends by itself, because a rank makes its
//! collective calls one after another.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::members::Members;
use super::round::{HURRIED, Round};
use super::verdict::Verdict;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// The most missing ranks of one call whose notes are read.
const LOOKED_FOR: usize = 8;

/// The most calls that one search looks into.
const CALLS: usize = 8;

/// The largest scope that is searched, because each search asks for all ranks of a scope.
const LARGEST: usize = 1 << 16;

/// The longest time for the requests of one search.
const SHORT: Duration = Duration::from_millis(500);

/// The search for deadlocks on behalf of one call.
pub(super) struct DeadlockSearch(Round);

/// A call in which ranks wait.
struct Call {
    /// The keys of the call begin with this prefix.
    prefix: String,
    /// The ranks of the call's scope.
    members: Members,
    /// The number of the call in its scope, for messages.
    number: String,
    /// The text of the call, for messages.
    call: String,
    /// The index of the call from which the search came here, and the rank that is missing there
    /// and waits here; `None` for the call where the search began.
    wanted: Option<(usize, i32)>,
    /// The note of the rank that is missing in the earlier call. While the note stays in the
    /// store, all that was read about this call is true.
    note: Vec<u8>,
}

/// Removes the note of this rank, because the rank no longer waits in `round`. `wait` is the wait
/// of the call.
pub(super) fn take_back_note(round: &Round, wait: &Wait) {
    if round.search.has_note.swap(false, Ordering::SeqCst) {
        // The store may be silent when the deadline has passed. The request goes out even if nobody
        // waits for its answer.
        let hurried = wait.cancel.is_raised() || wait.deadline.passed();
        let longest = if hurried { HURRIED } else { SHORT };
        let _ = round.membership.store.delete(&at(round, round.my_rank()), &Wait::after(longest));
    }
}

/// Returns the key where a rank notes in which call it waits.
pub(super) fn at(round: &Round, rank: i32) -> String {
    format!("{}/at/{rank}", round.membership.prefix())
}

impl DeadlockSearch {
    /// Begins the search for the first phase of `round`.
    pub(super) fn of(round: &Round) -> DeadlockSearch {
        DeadlockSearch(round.copy())
    }

    /// Looks for a deadlock. A rank that waits calls this function now and then. If there is a
    /// deadlock, this function writes the verdict of the calls, and the waits find this verdict in
    /// the store. So the function returns nothing.
    pub(super) fn look(&self, of_caller: &Wait) {
        let soon = Deadline::after(SHORT.min(of_caller.deadline.left()));
        let wait = Wait { watch: None, ..of_caller.with_deadline(soon) };
        let search = &self.0.search;
        let look = search.number.fetch_add(1, Ordering::SeqCst);
        if look == 0 {
            drop(self.leave_note(&wait));
        } else if search.turn.load(Ordering::SeqCst) == 1 {
            drop(self.look_for_missing(look, &wait));
        }
    }

    /// Writes in the store in which call this rank waits.
    fn leave_note(&self, wait: &Wait) -> Result<()> {
        let Round { membership, prefix, call, number, search, .. } = &self.0;
        search.has_note.store(true, Ordering::SeqCst);
        let note = format!("{prefix}\n{number}\n{call}");
        membership.store.set(&at(&self.0, self.0.my_rank()), note.as_bytes(), wait)?;
        let turn = self.0.count(self.0.key("", "looks"), 1, wait)?;
        if turn == 1 {
            self.0.put(self.0.key("", "members"), membership.members.to_text().as_bytes(), wait)?;
        }
        search.turn.store(turn, Ordering::SeqCst);
        Ok(())
    }

    /// Searches whenever another rank of this call has begun to wait, and after 0.5 s, 1 s, 2 s, 4
    /// s and so on.
    fn look_for_missing(&self, look: u32, wait: &Wait) -> Result<()> {
        let search = &self.0.search;
        let notes = self.0.membership.store.add(&self.0.key("", "looks"), 0, wait)?;
        let due = look & (look + 1) == 0;
        if (due || notes != search.seen.load(Ordering::SeqCst)) && self.search(wait)? {
            search.seen.store(notes, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Goes from this call to the calls in which its missing ranks wait, and on from there. Returns
    /// `false` when a rank was just leaving its note, so the search must be repeated.
    pub(super) fn search(&self, wait: &Wait) -> Result<bool> {
        let Round { membership, prefix, call, number, .. } = &self.0;
        let mut calls = vec![Call {
            prefix: prefix.clone(),
            members: membership.members.clone(),
            number: number.to_string(),
            call: call.clone(),
            wanted: None,
            note: Vec::new(),
        }];
        let mut waiting = HashSet::new();
        let (mut at_call, mut complete) = (0, true);
        while at_call < calls.len() {
            let (came, missing) = self.attendance(&calls[at_call], wait)?;
            if at_call == 0 {
                waiting = HashSet::from_iter(came);
            } else if let Some(rank) = missing.iter().find(|rank| waiting.contains(rank)) {
                return self.report(&calls, at_call, *rank, wait).map(|()| true);
            }
            for rank in missing.into_iter().take(LOOKED_FOR) {
                let Some(note) = membership.store.try_get(&at(&self.0, rank), wait)? else { continue };
                let text = String::from_utf8_lossy(&note).into_owned();
                let Some((prefix, number, call)) = read(&text) else { continue };
                if calls.len() == CALLS || calls.iter().any(|known| known.prefix == prefix) {
                    continue;
                }
                let Some(members) = membership.store.try_get(&format!("{prefix}/members"), wait)? else {
                    complete = false;
                    continue;
                };
                let Some(members) = Members::from_text(&String::from_utf8_lossy(&members)) else { continue };
                let (prefix, number, call) = (prefix.to_owned(), number.to_owned(), call.to_owned());
                let found = Call { prefix, members, number, call, wanted: Some((at_call, rank)), note };
                if self.waits_in(rank, &found, wait)? {
                    calls.push(found);
                }
            }
            at_call += 1;
        }
        Ok(complete)
    }

    /// Returns the ranks that have come to a call, and the ranks that have not. A lost rank waits
    /// nowhere, whatever its note says, so it is left out.
    fn attendance(&self, call: &Call, wait: &Wait) -> Result<(Vec<i32>, Vec<i32>)> {
        if call.members.len() > LARGEST {
            return Ok((Vec::new(), Vec::new()));
        }
        let keys: Vec<String> = (0..call.members.len()).map(|position| call.here(position)).collect();
        let present = self.0.membership.store.present(&keys, wait)?;
        let (came, missing): (Vec<_>, Vec<_>) = present.into_iter().enumerate().partition(|(_, here)| *here);
        let ranks = |positions: Vec<(usize, bool)>| {
            let ranks = positions.into_iter().map(|(position, _)| call.members.rank(position));
            ranks.filter(|rank| !self.0.membership.has_lost(|lost| lost == *rank)).collect::<Vec<i32>>()
        };
        Ok((ranks(came), ranks(missing)))
    }

    /// Whether that rank waits in that call now. A note about a call that has ended is out of date.
    fn waits_in(&self, rank: i32, call: &Call, wait: &Wait) -> Result<bool> {
        let Some(position) = call.members.position(rank) else { return Ok(false) };
        Ok(self.0.membership.store.present(&[call.here(position), call.verdict()], wait)? == [true, false])
    }

    /// Writes the deadlock as the verdict of its calls. The last of these calls waits for `rank`,
    /// which waits in the first one.
    fn report(&self, calls: &[Call], last: usize, rank: i32, wait: &Wait) -> Result<()> {
        let mut ring = vec![(rank, &calls[0])];
        let mut at_call = last;
        while let Some((by, wanted)) = calls[at_call].wanted {
            // The facts that were read about a call are true only while this rank is in the call.
            // The rank takes its note back when it leaves the call, and only then can the call's
            // keys be removed.
            if self.0.membership.store.try_get(&at(&self.0, wanted), wait)?.as_ref() != Some(&calls[at_call].note) {
                return Ok(());
            }
            ring.push((wanted, &calls[at_call]));
            at_call = by;
        }
        ring.reverse();
        let says = |(rank, call): &(i32, &Call)| format!("rank {rank} called {} as call {}", call.call, call.number);
        let (ends, others): (&(i32, &Call), _) = (&ring[ring.len() - 1], &ring[..ring.len() - 1]);
        let message = format!(
            "{}, while {}: each waits for the {}; collective calls must come in the same order on every rank",
            others.iter().map(says).collect::<Vec<_>>().join(", "),
            says(ends),
            if others.len() == 1 { "other" } else { "one before" },
        );
        // Several ranks may find the ring at the same time, so its name must not depend on the
        // finder.
        let id = ring.iter().map(|(_, call)| call.prefix.as_str()).min().unwrap_or_default();
        let ranks: Vec<i32> = ring.iter().map(|(rank, _)| *rank).collect();
        let verdict = Verdict::of_deadlock(id, &Error::new(Status::Mismatch, message).with_ranks(&ranks));
        let theirs: Vec<String> = others.iter().map(|(_, call)| call.verdict()).collect();
        // If one of the calls has ended meanwhile, there is no deadlock.
        if self.0.membership.store.present(&theirs, wait)?.contains(&true)
            || self.0.decide_at(calls[0].verdict(), &verdict, wait)? != verdict
        {
            return Ok(());
        }
        theirs.into_iter().try_for_each(|key| self.0.decide_at(key, &verdict, wait).map(drop))
    }
}

impl Call {
    pub(super) fn here(&self, position: usize) -> String {
        format!("{}/here/{position}", self.prefix)
    }

    pub(super) fn verdict(&self) -> String {
        format!("{}/verdict", self.prefix)
    }
}

/// Returns prefix, number and text of the call from a rank's note.
pub(super) fn read(note: &str) -> Option<(&str, &str, &str)> {
    let mut lines = note.splitn(3, '\n');
    Some((lines.next()?, lines.next()?, lines.next()?))
}

#[cfg(test)]
mod tests;
