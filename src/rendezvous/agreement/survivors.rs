//! The remaining ranks of a scope agree on which ranks are lost.
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
//! A rank may also suspect others, because a communicator cannot reach them. A suspected rank that
//! comes is not lost: ranks that cannot reach each other, because the network between them is
//! broken, all come. A suspected rank that is still absent a second after all others are here is
//! added to the list.
//!
//! A rank that is in the list and lives takes no part any more, because no later call would wait
//! for it either. The error of that rank says so. The deadline, ranks that come late and refusals
//! are those of every call (deciding.rs, late.rs).

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::deadlock::take_back_note;
use super::deciding::{Part, Settled};
use super::round::Round;
use super::scope::Scope;
use super::suspects::{SUSPECTED, TakenForLost};
use super::verdict::Verdict;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

/// The ranks of a scope that are lost, on which all other ranks of the scope have agreed.
pub struct AgreedLosses {
    /// The lost ranks of the world, in ascending order. There is at least one.
    pub lost: Vec<i32>,
    /// The number of the call in its scope. This number is equal on all ranks and is used once.
    pub number: u64,
}

impl Scope {
    /// Returns which ranks of the scope are lost, when every other rank has made this call. All of
    /// these ranks get one answer. `known` are ranks that this rank takes for lost by other means
    /// than the store. Fails when no rank is lost.
    pub fn agree_on_lost(&self, call: &str, known: TakenForLost<'_>, wait: &Wait) -> Result<AgreedLosses> {
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
            round.recorded.set_ends_well(true);
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
    pub(super) fn await_survivors(&self, phase: &str, known: TakenForLost<'_>, wait: &Wait) -> Result<Verdict> {
        let wait = &self.watching(phase, wait);
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        let verdict = self.key(phase, "verdict");
        // Where the store does not answer, this rank may add losses that the list has already.
        let _ = losses.refresh(wait);
        self.tell_losses(phase, known.lost, wait)?;
        self.put(self.here(phase, self.membership.me), b"here", wait)?;
        self.count(self.key(phase, "count"), 1, wait)?;
        // Since when only suspected ranks are absent.
        let mut suspected: Option<Instant> = None;
        loop {
            // An error does not matter: if notes are left unread, the wait below returns at once.
            let _ = losses.refresh(wait);
            // The rank that was to add a loss may be lost itself by now.
            self.tell_losses(phase, known.lost, wait)?;
            self.check_not_lost()?;
            self.membership.check_epoch()?;
            if let Some(end) = self.turn() {
                return self.decide(phase, &end, wait);
            }
            let absent = self.absent_survivors(phase, known.suspects, wait)?;
            if absent.as_ref().is_some_and(Vec::is_empty) {
                // Ranks that are lost together, for example all ranks of a host, are left out
                // together.
                losses.wait_until_quiet(wait);
                self.check_not_lost()?;
                return self.decide(phase, &self.proposal(), wait);
            }
            let absent = absent.filter(|absent| absent.iter().all(|rank| known.suspects.contains(rank)));
            suspected = absent.as_ref().map(|_| suspected.unwrap_or_else(Instant::now));
            let mut nap = suspected.map_or(SUSPECTED, |since| SUSPECTED.saturating_sub(since.elapsed()));
            if let Some(absent) = absent.filter(|_| nap.is_zero()) {
                // Where another rank is to tell of the suspected ranks, this rank looks again a
                // second later.
                (suspected, nap) = (Some(Instant::now()), SUSPECTED);
                self.tell_losses(phase, &absent, wait)?;
            }
            // The others come without waking this rank, so it looks now and then where it suspects
            // any.
            let nap = if known.suspects.is_empty() { wait.deadline.left() } else { nap.min(wait.deadline.left()) };
            let nap = Deadline::after(nap);
            let (number, lost) = losses.next();
            match any_of(&**store, &[&verdict, &lost], &wait.with_deadline(nap)) {
                Ok((0, value)) => return Ok(self.verdict_in(&value, &verdict)),
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout && nap.passed() && !wait.deadline.passed() => {}
                Err(error) => return Err(error),
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

    /// Returns the ranks that are neither here nor known to be lost; `None` where this rank has not
    /// looked at all of them.
    fn absent_survivors(&self, phase: &str, suspects: &[i32], wait: &Wait) -> Result<Option<Vec<i32>>> {
        let size = self.membership.members.len();
        let came = self.membership.store.add(&self.key(phase, "count"), 0, wait)?;
        let arrived = usize::try_from(came).unwrap_or(0) + self.lost().len();
        // Most ranks need not look at the keys of all others, because too few have come by then.
        if arrived + suspects.len() < size {
            return Ok(None);
        }
        let absent = self.absent(|position| self.here(phase, position), wait.deadline, wait)?;
        Ok((absent.looked_at == size).then_some(absent.ranks))
    }

    /// Returns the verdict that this rank proposes: the lost ranks, or an error where there are
    /// none.
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
