//! How one verdict comes about: arriving, comparing, counting, and what is said of those who differ, do not come or have gone.

use std::sync::Arc;
use std::time::Duration;

use super::order::Order;
use super::verdict::{DETAIL, Verdict};
use super::{HASTY, NOTHING, Party, Round};
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait, Watch};

/// A dissenter's step of the counter: its low half counts who is there, its high half who differs.
const DISSENT: i64 = 1 << 32;
/// How long the first dissenter waits for others, so that the message names more than one.
const WINDOW: Duration = Duration::from_millis(250);
/// How long a dissenter that has counted itself in may take to say who it is, and the pause between two looks for who has read.
const MOMENT: Duration = Duration::from_millis(50);
/// The most dissenters whose calls are read.
const READ: i64 = 16;
/// How long the rank that serves the store stays for the others to read a verdict: where all are known to be there, if only they run; where they may
/// still come; and where some will not.
const STAY: Duration = Duration::from_secs(10);
const STAY_AFTER_FAILURE: Duration = Duration::from_secs(2);
const STAY_AFTER_MISMATCH: Duration = Duration::from_millis(600);
const STAY_AFTER_LOSS: Duration = Duration::from_millis(100);

/// What the first rank offers in its word, by place.
fn offered(word: &str) -> impl Iterator<Item = (usize, &str)> {
    let offers = word.split_once(DETAIL).map_or("", |(_, offers)| offers);
    offers.split(' ').enumerate().filter(|(_, name)| !name.is_empty() && *name != NOTHING)
}

/// How long after its deadline a rank may take to find out whom it missed.
fn grace(wait: &Wait) -> Duration {
    Duration::from_millis(200).max(wait.deadline.timeout() / 20)
}

/// What ends a wait inside a call.
pub(super) enum Came {
    Value(Vec<u8>),
    Verdict(Verdict),
}

impl Round {
    /// One verdict under `<prefix><phase>/`; `text` is what must be equal.
    pub(super) fn settle(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<()> {
        // Thousands of ranks are late at the same moment. Most need only wait a little longer for what the first ones find.
        let patience = if self.party.me < HASTY { Duration::ZERO } else { grace(wait) / 2 };
        // The rank that serves the store may end its process when this returns, so it stays until the others have read a last word.
        let with_server = self.party.served && self.party.members.position(0).is_some();
        let arrived = self.arrive(phase, text, &wait.with_deadline(wait.deadline.extended(patience)));
        let verdict = match arrived {
            Ok(verdict) => verdict,
            // What a watch found may be a deadline that another wait has missed.
            Err(error) if error.status() == Status::Timeout && self.failure.is_none() && wait.deadline.passed() => {
                self.late(phase, wait, error).map_err(|error| self.party.explain(error))?
            }
            Err(error) => {
                // Others need not wait for the deadline to learn that this rank has left, and why.
                let verdict = match (error.status(), &self.failure) {
                    (Status::Aborted, _) => Error::new(Status::PeerLost, "it was aborted there"),
                    (Status::Timeout, Some(failure)) => failure.clone(),
                    _ => error.clone(),
                };
                let verdict = Verdict::of_failure(self.my_rank(), &self.call, &verdict);
                // Another verdict may stand already, and the rank that serves stay for this one to read it.
                let reads = with_server && !self.party.serving;
                self.tell(phase, &verdict, Duration::from_millis(250), wait, reads);
                return Err(self.party.explain(error));
            }
        };
        if verdict.status == Status::Ok && self.offers.is_some() && phase.is_empty() {
            let _ = self.shared.set(verdict.note().to_owned());
        }
        if with_server && (phase == "/end" || verdict.status != Status::Ok) {
            self.acknowledge(phase, &verdict, wait);
        }
        verdict.into_result()
    }

    /// Leaves word that this rank is here, compares, counts itself in, and waits for the verdict.
    fn arrive(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<Verdict> {
        let first = self.here(phase, 0);
        self.leave(self.here(phase, self.party.me), text.unwrap_or("done").as_bytes(), wait)?;
        if let Some(mine) = text.filter(|_| self.party.me > 0) {
            match self.await_value(Some(&first), phase, wait)? {
                Came::Verdict(verdict) => return Ok(verdict),
                Came::Value(theirs) if !self.is_like(mine, &theirs) => {
                    return self.dissent(phase, mine, &String::from_utf8_lossy(&theirs), wait);
                }
                Came::Value(theirs) => self.object(phase, &String::from_utf8_lossy(&theirs), wait)?,
            }
        }
        let counted = self.count(self.key(phase, "count"), 1, wait)?;
        if counted % DISSENT == self.party.members.len() as i64 {
            if counted < DISSENT {
                let verdict = Verdict::agreed_on(self.what_is_shared(phase, wait)?);
                return self.decide(phase, &verdict, wait);
            }
            self.leave(self.key(phase, "all"), b"1", wait)?;
        }
        self.await_verdict(phase, wait)
    }

    /// Whether the first rank was asked for the same. What it could share is not compared here.
    fn is_like(&self, mine: &str, theirs: &[u8]) -> bool {
        let call = |text: &[u8]| text.split(|byte| *byte == DETAIL as u8).next().map(<[u8]>::to_vec);
        theirs == mine.as_bytes() || (self.offers.is_some() && call(theirs) == call(mine.as_bytes()))
    }

    /// Says what of the first rank's offers this rank does not have. The others hear it, because it stands there before this rank is counted.
    fn object(&self, phase: &str, theirs: &str, wait: &Wait) -> Result<()> {
        let Some(mine) = &self.offers else { return Ok(()) };
        for (place, name) in offered(theirs) {
            if mine.split(' ').nth(place) != Some(name) {
                self.leave(self.objection(phase, place), b"1", wait)?;
            }
        }
        Ok(())
    }

    /// The places of what the first rank offers and no rank objects to. Asked by the last rank to be counted, when all objections are there.
    fn what_is_shared(&self, phase: &str, wait: &Wait) -> Result<String> {
        if self.offers.is_none() || !phase.is_empty() {
            return Ok(String::new());
        }
        let theirs = self.party.store.get(&self.here(phase, 0), wait)?;
        let theirs = String::from_utf8_lossy(&theirs).into_owned();
        let places: Vec<usize> = offered(&theirs).map(|(place, _)| place).collect();
        if places.is_empty() {
            return Ok(String::new());
        }
        let keys: Vec<String> = places.iter().map(|place| self.objection(phase, *place)).collect();
        let objected = self.party.store.present(&keys, wait)?;
        let agreed = places.iter().zip(objected).filter(|(_, objected)| !objected);
        Ok(agreed.map(|(place, _)| place.to_string()).collect::<Vec<_>>().join(" "))
    }

    /// Where a rank says that it does not have what the first one offers at that place.
    fn objection(&self, phase: &str, place: usize) -> String {
        self.key(phase, &format!("object/{place}"))
    }

    /// This rank was asked for something else than the first. The first such rank speaks for all of them.
    fn dissent(&self, phase: &str, mine: &str, theirs: &str, wait: &Wait) -> Result<Verdict> {
        let store = &self.party.store;
        let counted = self.count(self.key(phase, "count"), DISSENT + 1, wait)?;
        let all = counted % DISSENT == self.party.members.len() as i64;
        let number = counted / DISSENT;
        self.leave(self.differing(phase, number), self.party.me.to_string().as_bytes(), wait)?;
        let stands = if number > 1 {
            if all {
                self.leave(self.key(phase, "all"), b"1", wait)?;
            }
            self.await_verdict(phase, wait)?
        } else {
            // It speaks before its own deadline makes something else of it.
            let window = wait.with_deadline(Deadline::after(WINDOW.min(wait.deadline.left() / 2)));
            if !all {
                match any_of(&**store, &[&self.key(phase, "all"), &self.key(phase, "verdict")], &window) {
                    Err(error) if error.status() == Status::Timeout => {}
                    came => drop(came?),
                }
            }
            let soon = Wait { watch: None, ..wait.with_deadline(Deadline::after(WINDOW)) };
            let verdict = self.spell_out(phase, theirs, &soon)?;
            let verdict = verdict.unwrap_or_else(|| self.mismatch(&[(self.my_rank(), mine.to_owned())], 1, theirs));
            self.decide(phase, &verdict, &soon)?
        };
        if stands.status == Status::Ok {
            // They were complete without this rank: it takes the set to be a larger one. Where they are not through yet, they learn of it.
            let verdict = self.mismatch(&[(self.my_rank(), mine.to_owned())], 1, theirs);
            self.decide("/end", &verdict, wait)?;
            return Ok(verdict);
        }
        Ok(stands)
    }

    /// What those ask for that differ, as far as they are known by now; `None` when that is nobody.
    fn spell_out(&self, phase: &str, theirs: &str, soon: &Wait) -> Result<Option<Verdict>> {
        let store = &self.party.store;
        let all = store.add(&self.key(phase, "count"), 0, soon)? / DISSENT;
        let keys: Vec<String> = (1..=all.min(READ)).map(|number| self.differing(phase, number)).collect();
        let mut positions: Vec<_> = keys.iter().map(|key| store.try_get(key, soon).ok().flatten()).collect();
        // They say who they are right after they have counted themselves in, or have died since.
        let moment = soon.with_deadline(Deadline::after(MOMENT.min(soon.deadline.left())));
        for (position, key) in positions.iter_mut().zip(&keys).filter(|(position, _)| position.is_none()) {
            *position = store.get(key, &moment).ok();
        }
        let mut dissenters = Vec::new();
        for position in positions.into_iter().flatten() {
            let position = String::from_utf8_lossy(&position).parse::<usize>().ok();
            let Some(position) = position.filter(|position| *position < self.party.members.len()) else { continue };
            if let Ok(Some(text)) = store.try_get(&self.here(phase, position), soon) {
                dissenters.push((self.party.members.rank(position), String::from_utf8_lossy(&text).into_owned()));
            }
        }
        dissenters.sort();
        Ok((!dissenters.is_empty()).then(|| self.mismatch(&dissenters, all as usize, theirs)))
    }

    fn mismatch(&self, dissenters: &[(i32, String)], all: usize, theirs: &str) -> Verdict {
        Verdict::of_mismatch(dissenters, all, self.party.members.rank(0), theirs, self.number)
    }

    /// Where the dissenter of that number says who it is.
    fn differing(&self, phase: &str, number: i64) -> String {
        self.key(phase, &format!("differs/{number}"))
    }

    fn await_verdict(&self, phase: &str, wait: &Wait) -> Result<Verdict> {
        match self.await_value(None, phase, wait)? {
            Came::Verdict(verdict) => Ok(verdict),
            Came::Value(_) => Err(Error::internal("a value that nobody asked for")),
        }
    }

    /// Waits for a key (if any) or the phase's verdict. When a member of the set has gone and neither is there, that becomes the
    /// verdict: it does not come any more.
    pub(super) fn await_value(&self, key: Option<&str>, phase: &str, wait: &Wait) -> Result<Came> {
        let losses = Arc::clone(&self.party.losses);
        let of_caller = wait.watch.clone();
        let (order, looking) = (phase.is_empty().then(|| Order::of(self)), Wait { watch: None, ..wait.clone() });
        let watch: Watch = Arc::new(move || {
            losses.look(&looking);
            if let Some(order) = &order {
                order.look(&looking);
            }
            of_caller.as_ref().map_or(Ok(()), |watch| watch())
        });
        let wait = &Wait { watch: Some(watch), ..wait.clone() };
        let (store, verdict) = (&self.party.store, self.key(phase, "verdict"));
        loop {
            if let Some(lost) = self.lost() {
                // What came before it went still counts.
                if let Some(value) = key.map(|key| store.try_get(key, wait)).transpose()?.flatten() {
                    return Ok(Came::Value(value));
                }
                let found = Verdict::of(&self.loss(phase, lost, wait));
                return self.decide(phase, &found, wait).map(Came::Verdict);
            }
            let (number, lost) = self.party.losses.next();
            let keys: Vec<&str> = key.into_iter().chain([verdict.as_str(), lost.as_str()]).collect();
            let (index, value) = any_of(&**store, &keys, wait)?;
            match (keys.len() - index, key) {
                (1, _) => {
                    self.party.losses.note(number, &value);
                    // A store that tells of losses again and again, none of them a rank of this scope, does not keep the call beyond its deadline.
                    wait.cancel.check()?;
                    if wait.deadline.passed() && self.lost().is_none() {
                        return Err(Error::timeout(format!(
                            "the store at {} tells of lost ranks without end",
                            store.name()
                        )));
                    }
                }
                (2, _) => return Ok(Came::Verdict(self.verdict_in(&value, &verdict))),
                _ => return Ok(Came::Value(value)),
            }
        }
    }

    fn loss(&self, phase: &str, rank: i32, wait: &Wait) -> Error {
        let position = self.party.members.position(rank);
        let came = position.and_then(|position| self.party.store.try_get(&self.here(phase, position), wait).ok());
        if phase.is_empty() && came.flatten().is_none() { self.lost_before(rank) } else { self.lost_when("in", rank) }
    }

    /// A rank of the scope that is known to have gone.
    pub(super) fn lost(&self) -> Option<i32> {
        self.party.losses.first(|rank| self.is_other(rank))
    }

    pub(super) fn lost_before(&self, rank: i32) -> Error {
        self.lost_when("before it called", rank)
    }

    fn lost_when(&self, when: &str, rank: i32) -> Error {
        let message = format!(
            "rank {rank} was lost {when} {} as call {}: its process ended, it freed or aborted its world, or its host fell silent",
            self.call, self.number
        );
        Error::new(Status::PeerLost, message).with_ranks(&[rank])
    }

    /// The deadline has passed: names the ranks that are not here, unless a verdict stands already.
    fn late(&self, phase: &str, wait: &Wait, error: Error) -> Result<Verdict> {
        let timeout = wait.deadline.timeout();
        let grace = grace(wait);
        let (store, verdict_key) = (&self.party.store, self.key(phase, "verdict"));
        let whole = Wait { watch: None, ..wait.with_deadline(wait.deadline.extended(grace)) };
        let _ = self.leave(self.stuck(phase, self.party.me), b"1", &whole);
        // Looking for each of thousands is the first one's work.
        if self.count(self.key(phase, "late"), 1, &whole).is_ok_and(|number| number > 1) {
            let half = whole.with_deadline(Deadline::after(whole.deadline.left().min(grace / 2)));
            if let Ok(stands) = store.get(&verdict_key, &half) {
                return Ok(self.verdict_in(&stands, &verdict_key));
            }
        }
        let found = match self.late_dissent(phase, &whole) {
            Some(mismatch) => Ok(mismatch),
            None => self.name_missing(phase, timeout, &whole),
        };
        let Ok(verdict) = found else {
            let served = if self.party.served { ", which rank 0 serves," } else { "" };
            return Err(Error::timeout(format!(
                "{} as call {} did not end within {} ms, and the store at {}{served} gives no answer: {}",
                self.call,
                self.number,
                timeout.as_millis(),
                store.name(),
                error.message()
            )));
        };
        Ok(self.decide(phase, &verdict, &whole).unwrap_or(verdict))
    }

    /// That somebody differs says more than that somebody is missing: it was about to be said, or who was to say it has died.
    fn late_dissent(&self, phase: &str, soon: &Wait) -> Option<Verdict> {
        let store = &self.party.store;
        let counted = store.try_get(&self.key(phase, "count"), soon).ok()??;
        let counted: i64 = String::from_utf8_lossy(&counted).trim().parse().ok()?;
        if counted < DISSENT {
            return None;
        }
        let theirs = store.try_get(&self.here(phase, 0), soon).ok()??;
        self.spell_out(phase, &String::from_utf8_lossy(&theirs), soon).ok()?
    }

    /// Where a rank says that it is late, as the others are.
    pub(super) fn stuck(&self, phase: &str, position: usize) -> String {
        self.key(phase, &format!("stuck/{position}"))
    }

    /// Every other rank says that it has read the verdict; the one that serves waits until all have that have not gone.
    fn acknowledge(&self, phase: &str, verdict: &Verdict, wait: &Wait) {
        let stay = match verdict.status {
            Status::Mismatch => STAY_AFTER_MISMATCH,
            Status::Timeout | Status::PeerLost => STAY_AFTER_LOSS,
            Status::Ok => STAY,
            _ => STAY_AFTER_FAILURE,
        };
        let stay = Deadline::after(stay.min(wait.deadline.left().max(STAY_AFTER_LOSS)));
        let stay = Wait { watch: None, ..wait.with_deadline(stay) };
        // How it ends does not matter: the call has its verdict.
        let _ = if self.party.serving { self.await_readers(phase, &stay) } else { self.say_read(phase, &stay) };
    }

    pub(super) fn say_read(&self, phase: &str, wait: &Wait) -> Result<()> {
        self.leave(self.read_by(phase, self.my_rank()), b"1", wait)?;
        let count = self.count(self.key(phase, "read"), 1, wait)?;
        self.leave(self.key(phase, &format!("read/{count}")), b"1", wait)
    }

    fn await_readers(&self, phase: &str, wait: &Wait) -> Result<()> {
        let Party { store, losses, members, .. } = &*self.party;
        loop {
            if self.lost().is_some() {
                return self.await_each_reader(phase, wait);
            }
            let (number, next) = losses.next();
            match any_of(&**store, &[&self.key(phase, &format!("read/{}", members.len() - 1)), &next], wait)? {
                (1, value) if !wait.deadline.passed() => losses.note(number, &value),
                _ => return Ok(()),
            }
        }
    }

    /// The same where some have gone. Their number is no guide then: one may have died after its word and before it counted itself in.
    fn await_each_reader(&self, phase: &str, wait: &Wait) -> Result<()> {
        let Party { store, losses, .. } = &*self.party;
        loop {
            let gone = losses.all(|rank| self.is_other(rank));
            let stays = |rank| rank != self.my_rank() && !gone.contains(&rank);
            if self.all_left(|rank| self.read_by(phase, rank), stays, wait)? {
                return Ok(());
            }
            let (number, next) = losses.next();
            let moment = wait.with_deadline(Deadline::after(MOMENT.min(wait.deadline.left())));
            match store.get_any(&[&next], &moment) {
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout && !wait.deadline.passed() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether it is a member, and not this one.
    fn is_other(&self, rank: i32) -> bool {
        rank != self.my_rank() && self.party.members.position(rank).is_some()
    }

    fn read_by(&self, phase: &str, rank: i32) -> String {
        self.key(phase, &format!("read/by/{rank}"))
    }
}
