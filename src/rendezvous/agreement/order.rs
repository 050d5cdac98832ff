//! Compares collectives before they are issued, where `DM_CHECK_COLLECTIVES` asks for that.
//!
//! Each rank *announces* a collective in the scope of its dimension, and issues it when all ranks
//! of the group have announced the same one under the same number. A rank announces without
//! waiting:
//!
//! 1. It writes the text of the collective under `here/<position>`.
//! 2. It adds 1 and the digest of its text to one counter (`tally`). If all texts are equal so far,
//!    the sum of the digests is the number of announced ranks times the rank's own digest. A rank
//!    that finds another sum writes the verdict "mismatch", with the texts of both sides.
//! 3. The last rank to be counted writes the verdict "agreed".
//!
//! Then the rank waits for the verdict, in the way of every call of a scope (deciding.rs). A rank
//! that waits for long leaves a note, by which the ranks find collectives of several dimensions
//! that wait for each other in a ring (deadlock.rs).
//!
//! # Groups
//!
//! A group announces all its collectives at once, and waits for one of them. It must not wait for
//! more: another rank may make the same collectives one after another, and comes to the second one
//! only when the first one has run. Along one dimension the group waits for its first collective.
//! The verdict of the last collective serves as well, because a rank that has announced the last
//! collective has announced the first one, too. The rank must also look at the last verdict,
//! because the keys of the first collective may be gone by then. Along several dimensions the
//! group waits for the first collective of any of them, and then the ranks look for no ring.

use std::sync::Arc;
use std::time::Duration;

use super::deadlock::take_back_note;
use super::deciding::{Part, Settled};
use super::round::Round;
use super::scope::Scope;
use super::verdict::{DETAIL, Sides, Verdict, split, split_mesh, with_mesh};
use super::waiting::Found;
use crate::digest::Fnv1a;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

/// The bits of a tally that count the ranks. The others are the sum of the digests.
const COUNT_BITS: u32 = 20;
/// The bits of a digest. The sum of 2^20 of them fits above the count.
const DIGEST_BITS: u32 = 63 - 2 * COUNT_BITS;
/// The most ranks whose texts are read for a message.
const READ: usize = 64;
/// How long a group over several dimensions waits between two looks for lost ranks.
const SLICE: Duration = Duration::from_millis(50);

/// The answer of a tally to the rank that has added to it.
pub(super) struct Tally {
    /// How many ranks have added to it so far.
    pub(super) count: usize,
    /// Whether all of them have this rank's digest. Two different texts have the same digest in 1
    /// of 2^23 cases.
    pub(super) is_equal: bool,
    /// The sum of the digests of the other ranks.
    others: i64,
}

impl Tally {
    /// Whether all other ranks in the tally have the digest of that call.
    fn are_others(&self, call: &str) -> bool {
        self.others == (self.count as i64 - 1) * short(Fnv1a::default().text(call).value())
    }
}

/// The collectives of a group along one dimension, which this rank has announced.
struct Announced<'a> {
    scope: &'a Scope,
    rounds: Vec<Round>,
    /// The keys of earlier calls, which may be removed when one of these collectives is agreed.
    /// Dropping this value returns the keys that were not removed to the scope.
    removable: Vec<String>,
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.scope.membership.left.note(std::mem::take(&mut self.removable));
    }
}

/// Returns when the collectives `calls` may be issued together. Each scope is that of a dimension,
/// with the texts of the collectives along it, in their order; no list is empty. Fails on all
/// ranks that wait, if a rank makes another collective, or dimensions wait for each other in a
/// ring. Fails at once where the scopes belong to several worlds, because a rank waits for the
/// verdicts in the store of one world.
pub(crate) fn check_order(calls: &[(Arc<Scope>, Vec<String>)], wait: &Wait) -> Result<()> {
    let is_elsewhere =
        |(scope, _): &(Arc<Scope>, _)| !Arc::ptr_eq(&scope.membership.losses, &calls[0].0.membership.losses);
    if calls.iter().any(is_elsewhere) {
        return Err(Error::unsupported(
            "the group has collectives of several worlds, which DM_CHECK_COLLECTIVES cannot compare together: use one group for each world",
        ));
    }
    loop {
        let mut announced = Vec::with_capacity(calls.len());
        for (scope, texts) in calls {
            announced.push(scope.announce(texts, wait)?);
        }
        let first = match &announced[..] {
            [_] => 0,
            _ => any_verdict(&announced, wait)?,
        };
        if announced.swap_remove(first).settle(wait)? {
            // A failure that other dimensions have by now is reported. This rank does not wait for
            // their verdicts.
            for other in announced.iter().filter(|other| other.has_verdict(wait)) {
                other.reach(wait)?;
            }
            return Ok(());
        }
        if calls.len() > 1 || calls[0].1.len() > 1 {
            return Err(Error::new(
                Status::InvalidState,
                "an earlier collective of this rank has failed, and the other ranks may have given up further ones: this group has not begun",
            ));
        }
    }
}

/// Waits until one of the announced collectives has a verdict, and returns its place in the list.
/// Returns a place also where a rank is lost, and the first place at the deadline. The wait for
/// the verdict at this place then finds out what is wrong.
fn any_verdict(announced: &[Announced<'_>], wait: &Wait) -> Result<usize> {
    let rounds = || announced.iter().flat_map(|one| one.ends().map(|round| round.key("", "verdict")));
    let places: Vec<usize> =
        announced.iter().enumerate().flat_map(|(place, one)| one.ends().map(move |_| place)).collect();
    let keys: Vec<String> = rounds().collect();
    let membership = &announced[0].rounds[0].membership;
    loop {
        let (number, lost) = membership.losses.next();
        let keys: Vec<&str> = keys.iter().map(String::as_str).chain([lost.as_str()]).collect();
        let slice = wait.with_deadline(Deadline::after(SLICE.min(wait.deadline.left())));
        match any_of(&*membership.store, &keys, &slice) {
            Ok((index, value)) if index == places.len() => membership.losses.note(number, &value),
            Ok((index, _)) => return Ok(places[index]),
            Err(error) if error.status() == Status::Timeout => membership.losses.look(&slice),
            Err(error) => return Err(membership.explain(error)),
        }
        let is_over = |one: &Announced<'_>| {
            let round = &one.rounds[0];
            round.has_lost() || round.departure().is_some() || round.turn().is_some()
        };
        if let Some(place) = announced.iter().position(is_over) {
            return Ok(place);
        }
        if wait.deadline.passed() {
            return Ok(0);
        }
    }
}

impl Scope {
    /// Announces collectives of this rank as its next calls of the scope.
    fn announce(&self, texts: &[String], wait: &Wait) -> Result<Announced<'_>> {
        let rounds = Vec::with_capacity(texts.len());
        let mut announced = Announced { scope: self, rounds, removable: self.membership.left.take() };
        for text in texts {
            self.check_turn(text)?;
            let round = self.join_next_in_place(text, wait);
            round.announce(wait).map_err(|error| self.membership.explain(error))?;
            announced.rounds.push(round);
        }
        Ok(announced)
    }

    /// Begins the next call of the scope. Skips calls that the other ranks have given up because
    /// this rank did not come.
    fn join_next_in_place(&self, text: &str, wait: &Wait) -> Round {
        loop {
            let round = self.join_next(text);
            if !self.may_have_been_given_up() || !round.was_given_up(wait) {
                return round;
            }
        }
    }
}

impl Announced<'_> {
    /// The first and the last round.
    fn ends(&self) -> impl Iterator<Item = &Round> {
        let last = self.rounds.len() - 1;
        self.rounds.iter().enumerate().filter(move |(place, _)| *place == 0 || *place == last).map(|(_, round)| round)
    }

    /// Whether the first collective has its verdict by now.
    fn has_verdict(&self, wait: &Wait) -> bool {
        let round = &self.rounds[0];
        round.membership.store.try_get(&round.key("", "verdict"), wait).is_ok_and(|found| found.is_some())
    }

    /// Waits for the verdict of the first collective.
    fn reach(&self, wait: &Wait) -> Result<Settled> {
        let [first, ..] = &self.rounds[..] else { return Ok(Settled::Agreed) };
        let last = self.rounds.last().filter(|_| self.rounds.len() > 1).map(|last| last.key("", "verdict"));
        let settled = first.reach_verdict("", Part::Announced(last.as_deref()), wait);
        take_back_note(first, wait);
        settled.map_err(|error| self.scope.explained(error))
    }

    /// Waits for the verdict of the first collective. Returns `false` where this rank must
    /// announce the collective anew, because the other ranks have given up the call of this
    /// number.
    fn settle(mut self, wait: &Wait) -> Result<bool> {
        let settled = self.reach(wait)?;
        let is_agreed = matches!(settled, Settled::Agreed);
        if is_agreed {
            self.scope.membership.store.forget(std::mem::take(&mut self.removable), wait);
            self.rounds.iter().for_each(|round| round.recorded.set_ends_well(true));
        }
        Ok(is_agreed)
    }
}

impl Round {
    /// Tells the other ranks of this rank's call, and compares it with the calls of those that
    /// have come before. Waits for nobody.
    fn announce(&self, wait: &Wait) -> Result<()> {
        let text = format!("{}{DETAIL}", self.call);
        self.put(self.here("", self.membership.me), with_mesh(&text, self.mesh()).as_bytes(), wait)?;
        let digest = Fnv1a::default().text(&self.call).value();
        let tally = self.tally(self.key("", "tally"), digest, wait)?;
        let verdict = match tally.is_equal {
            false => self.difference(&tally, wait)?,
            true if tally.count == self.membership.members.len() => Verdict::agreed(),
            true => return Ok(()),
        };
        self.decide("", &verdict, wait).map(drop)
    }

    /// Waits for the verdict of a call that this rank has announced. The verdict `last` of a later
    /// call that was announced together with this one serves as well.
    pub(super) fn await_announced(&self, last: Option<&str>, phase: &str, wait: &Wait) -> Result<Verdict> {
        let value = match self.await_value(last, phase, wait)? {
            Found::Verdict(verdict) => return Ok(verdict),
            Found::Value(value) => value,
        };
        let first = self.key(phase, "verdict");
        match self.membership.store.try_get(&first, wait)? {
            Some(own) => Ok(self.verdict_in(&own, &first)),
            None => Ok(self.verdict_in(&value, last.unwrap_or_default())),
        }
    }

    /// Adds this rank and its digest to the counter of that key. The sum and the count are changed
    /// together, so whoever adds can tell whether the digests so far are equal.
    pub(super) fn tally(&self, key: String, digest: u64, wait: &Wait) -> Result<Tally> {
        let digest = short(digest);
        let sum = self.count(key, digest << COUNT_BITS | 1, wait)?;
        let count = sum & ((1 << COUNT_BITS) - 1);
        let others = (sum >> COUNT_BITS) - digest;
        Ok(Tally { count: count as usize, is_equal: others == (count - 1) * digest, others })
    }

    /// The verdict that ranks have announced different calls under this number. The others are
    /// compared with the lowest rank that has announced a call. Where this rank alone differs, the
    /// tally shows how many ranks have announced the other call, also those whose texts are not
    /// read.
    fn difference(&self, tally: &Tally, wait: &Wait) -> Result<Verdict> {
        let (members, store) = (&self.membership.members, &self.membership.store);
        let mut texts = Vec::new();
        for position in read_positions(members.len(), self.membership.me) {
            if let Some(text) = store.try_get(&self.here("", position), wait)? {
                texts.push((members.rank(position), split_mesh(&text).0));
            }
        }
        let (first, theirs) = texts.first().cloned().unwrap_or((self.my_rank(), self.call.clone()));
        let (same, dissenters): (Vec<_>, Vec<_>) = texts.into_iter().partition(|(_, text)| *text == theirs);
        let Some((_, other)) = dissenters.first() else {
            let message = format!("ranks after the first {READ} do not call {} as call {}", self.call, self.number);
            return Ok(Verdict::of(&Error::new(Status::Mismatch, message)));
        };
        let mut sides = Sides { agree: same.len(), differ: dissenters.len(), is_one_call: false, size: members.len() };
        let others = tally.count.saturating_sub(1);
        let (first_call, other_call) = (split(&theirs).0, split(other).0);
        if self.call != first_call && tally.are_others(first_call) {
            sides.agree = sides.agree.max(others);
        } else if self.call == first_call && tally.are_others(other_call) {
            (sides.differ, sides.is_one_call) = (sides.differ.max(others), true);
        }
        Ok(Verdict::of_mismatch(&dissenters, &sides, first, &theirs, self.number))
    }
}

/// The part of a digest that a tally adds up.
fn short(digest: u64) -> i64 {
    (digest >> (64 - DIGEST_BITS)) as i64
}

/// The positions whose texts are read for a message: the first [`READ`] of `size` positions, and
/// the own one.
fn read_positions(size: usize, me: usize) -> impl Iterator<Item = usize> {
    (0..size.min(READ)).chain((me >= READ).then_some(me))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{scope, soon};
    use super::*;
    use crate::rendezvous::store::MemoryStore;

    /// Returns the ranks that the verdict blames when these of `size` ranks announce a barrier, or
    /// rank `wrong` another collective, in this order.
    fn blamed(size: usize, order: impl IntoIterator<Item = usize>, wrong: usize) -> Vec<i32> {
        let store = MemoryStore::new();
        for me in order {
            let text = if me == wrong { "an all-reduce" } else { "a barrier" };
            scope(&store, me, size).join_next(text).announce(&soon()).unwrap();
        }
        let round = scope(&store, 0, size).join_next("");
        let verdict = round.await_verdict("", &soon()).unwrap();
        assert_eq!(verdict.status, Status::Mismatch, "{verdict:?}");
        verdict.ranks().to_vec()
    }

    /// A rank writes its call before it adds itself to the tally.
    #[test]
    fn calls_that_are_read_count_also_where_the_tally_lacks_them() {
        let store = MemoryStore::new();
        let round = |me: usize, text: &str| scope(&store, me, 8).join_next(text);
        (0..2).for_each(|me| round(me, "a barrier").announce(&soon()).unwrap());
        for me in [2, 4, 5, 6, 7] {
            let early = round(me, "a barrier");
            let text = with_mesh(&format!("{}{DETAIL}", early.call), early.mesh());
            early.put(early.here("", me), text.as_bytes(), &soon()).unwrap();
        }
        round(3, "an all-reduce").announce(&soon()).unwrap();
        assert_eq!(round(0, "").await_verdict("", &soon()).unwrap().ranks(), [3]);
    }

    #[test]
    fn ranks_are_blamed_alone_where_more_than_half_of_all_differ_from_them() {
        // Ranks that have announced nothing are on neither side.
        assert_eq!(blamed(4, [0, 1], 0), [0, 1]);
        assert_eq!(blamed(4, [0, 1], 1), [0, 1]);
        assert_eq!(blamed(4, [2, 1, 3, 0], 0), [0]);
        assert_eq!(blamed(4, [0, 1, 2, 3], 3), [3]);
        // The tally counts the ranks whose texts are not read.
        assert_eq!(blamed(200, 0..200, 199), [199]);
        assert_eq!(blamed(200, (0..200).rev(), 0), [0]);
        assert_eq!(blamed(200, 0..81, 80), [0, 80]);
    }

    #[test]
    fn each_position_is_read_once() {
        for (size, me, count) in [(4, 3, 4), (64, 63, 64), (100, 0, 64), (100, 63, 64), (100, 64, 65), (100, 99, 65)] {
            let read: Vec<usize> = read_positions(size, me).collect();
            let different: std::collections::BTreeSet<usize> = read.iter().copied().collect();
            assert_eq!((read.len(), different.len()), (count, count), "{size} {me}");
            assert!(different.contains(&me), "{size} {me}");
        }
    }
}
