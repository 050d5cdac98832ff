//! The ranks that are left of a scope agree on which ranks are lost.
//!
//! Each rank knows some of the lost ranks, and further ranks may be lost meanwhile. The list of
//! lost ranks in the store brings what each rank knows together (losses.rs): a rank adds what it
//! alone knows, for example from its communicators. The list only grows, and every rank that waits
//! is woken when it does.
//!
//! Each rank notes that it is here. When it knows that every rank of the scope is here or in the
//! list, it proposes the list as the verdict. The first proposal stands (compare-and-set), so all
//! ranks get the same one, and one round is enough. A rank that comes, and a rank that is lost, may
//! each be the last for whom the others wait. Therefore a rank looks whether all are here after it
//! has come, and again whenever the list has grown.
//!
//! A rank that is in the list and lives takes no part any more, because no later call would wait
//! for it either. Its error says so. The deadline, ranks that come late and refusals are those of
//! every call (deciding.rs, late.rs).

use std::sync::atomic::Ordering;

use super::deadlock::take_back_note;
use super::deciding::{Part, Settled};
use super::round::Round;
use super::scope::Scope;
use super::verdict::Verdict;
use crate::error::{Error, Result};
use crate::rendezvous::store::any_of;
use crate::wait::Wait;

/// The ranks of a scope that are lost, on which all other ranks of the scope have agreed.
pub struct AgreedLosses {
    /// The lost ranks of the world, in ascending order. There is at least one.
    pub lost: Vec<i32>,
    /// The number of the call in its scope. It is equal on all ranks and is used once.
    pub number: u64,
}

impl Scope {
    /// Returns which ranks of the scope are lost, when every other rank has made this call. All of
    /// them get the same answer. `known` are lost ranks that this rank knows of by other means than
    /// the store. Fails when no rank is lost.
    pub fn agree_on_lost(&self, call: &str, known: &[i32], wait: &Wait) -> Result<AgreedLosses> {
        loop {
            self.check_turn(call)?;
            let round = self.join_next(call);
            if self.is_behind.load(Ordering::SeqCst) && round.was_given_up(wait) {
                continue;
            }
            let settled = round.reach_verdict("", Part::Survivors(known), wait);
            take_back_note(&round, wait);
            let Settled::Agreed = settled? else { continue };
            let agreed = round.shared.get().map_or("", String::as_str);
            let lost: Vec<i32> = agreed.split(' ').filter_map(|rank| rank.parse().ok()).collect();
            if lost.contains(&round.my_rank()) {
                return Err(round.is_taken_for_lost());
            }
            return Ok(AgreedLosses { lost, number: round.number });
        }
    }

    /// Removes the keys that this rank has left in the scope, once all ranks that are not lost have
    /// agreed on a later call in another scope. A lost rank will not read them.
    pub fn forget_keys(&self, wait: &Wait) {
        self.membership.store.forget(self.membership.left.take(), wait);
    }
}

impl Round {
    /// Comes to the call, and waits until every rank is here or lost. Returns the verdict that
    /// stands then.
    pub(super) fn await_survivors(&self, phase: &str, known: &[i32], wait: &Wait) -> Result<Verdict> {
        let wait = &self.watching(phase, wait);
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        let verdict = self.key(phase, "verdict");
        // Where the store does not answer, this rank may add losses that the list has already.
        let _ = losses.refresh(wait);
        self.tell_losses(phase, known, wait)?;
        self.put(self.here(phase, self.membership.me), b"here", wait)?;
        self.count(self.key(phase, "count"), 1, wait)?;
        loop {
            // A list that was not read to its end wakes this rank at once below.
            let _ = losses.refresh(wait);
            // The rank that was to add a loss may be lost itself by now.
            self.tell_losses(phase, known, wait)?;
            self.check_not_lost()?;
            self.membership.check_epoch()?;
            if let Some(end) = self.turn() {
                return self.decide(phase, &end, wait);
            }
            if self.are_all_here(phase, wait)? {
                // Ranks that are lost together, for example all ranks of a host, are left out
                // together.
                losses.wait_until_quiet(wait);
                self.check_not_lost()?;
                return self.decide(phase, &self.proposal(), wait);
            }
            let (number, lost) = losses.next();
            match any_of(&**store, &[&verdict, &lost], wait)? {
                (0, value) => return Ok(self.verdict_in(&value, &verdict)),
                (_, value) => losses.note(number, &value),
            }
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(Error::timeout(format!("{} as call {} had no verdict in time", self.call, self.number)));
            }
        }
    }

    /// Adds the lost ranks that this rank knows of, and that the list in the store lacks, to the
    /// list ([`Membership::tell_loss`](super::round::Membership)).
    fn tell_losses(&self, phase: &str, known: &[i32], wait: &Wait) -> Result<()> {
        let (membership, tickets) = (&self.membership, &self.membership.tickets);
        let me = tickets.holder(self.my_rank());
        known.iter().filter(|rank| self.is_other(**rank)).try_for_each(|rank| {
            let key = self.key(phase, &format!("tells/{rank}"));
            membership.tell_loss(tickets.holder(*rank), me, key, wait)
        })
    }

    /// Whether every rank is here or known to be lost.
    fn are_all_here(&self, phase: &str, wait: &Wait) -> Result<bool> {
        let size = self.membership.members.len();
        let came = self.membership.store.add(&self.key(phase, "count"), 0, wait)?;
        // Most ranks need not look at the keys of all others, because too few have come by then.
        if usize::try_from(came).unwrap_or(0) + self.lost().len() < size {
            return Ok(false);
        }
        let absent = self.absent(|position| self.here(phase, position), wait.deadline, wait)?;
        Ok(absent.ranks.is_empty() && absent.looked_at == size)
    }

    /// The verdict that this rank proposes: the lost ranks, or an error where there are none.
    fn proposal(&self) -> Verdict {
        let lost = self.lost();
        if lost.is_empty() {
            return Verdict::of(&Error::invalid_state(format!(
                "no rank is lost: there is nothing to leave out by {}; the mesh has ended on all ranks, so make it anew (dm_init)",
                self.call
            )));
        }
        Verdict::agreed_on(lost.iter().map(i32::to_string).collect::<Vec<_>>().join(" "))
    }

    /// Fails when the list of lost ranks has this rank.
    fn check_not_lost(&self) -> Result<()> {
        let me = self.my_rank();
        if self.membership.has_lost(|rank| rank == me) { Err(self.is_taken_for_lost()) } else { Ok(()) }
    }

    fn is_taken_for_lost(&self) -> Error {
        let me = self.my_rank();
        let message = format!(
            "the other ranks take rank {me}, which is this process, for lost, and go on without it in {} as call {}: leave the world (dm_world_abort) and end this process",
            self.call, self.number
        );
        Error::not_member(message).with_lost(&[me])
    }
}
