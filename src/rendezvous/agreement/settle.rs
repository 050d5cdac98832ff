//! How one verdict comes about: arriving, comparing, counting, and what is said of those who differ, do not come or have gone.

use std::sync::Arc;
use std::time::Duration;

use super::Round;
use super::order::Order;
use super::verdict::{Verdict, ranges};
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait, Watch};

/// A dissenter's step of the counter: its low half counts who is there, its high half who differs.
const DISSENT: i64 = 1 << 32;
/// How long the first dissenter waits for others, so that the message names more than one.
const WINDOW: Duration = Duration::from_millis(250);
/// The most dissenters whose calls are read.
const READ: i64 = 16;
/// How long the rank that serves the store stays for the others to read a verdict: where all are known to be there, where they may
/// still come, and where some will not.
const STAY: Duration = Duration::from_secs(2);
const STAY_AFTER_MISMATCH: Duration = Duration::from_millis(600);
const STAY_AFTER_LOSS: Duration = Duration::from_millis(100);

/// What ends a wait inside a call.
pub(super) enum Came {
    Value(Vec<u8>),
    Verdict(Verdict),
}

impl Round {
    /// One verdict under `<prefix><phase>/`; `text` is what must be equal.
    pub(super) fn settle(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<()> {
        let verdict = match self.arrive(phase, text, wait) {
            Ok(verdict) => verdict,
            Err(error) if error.status() == Status::Timeout => {
                self.late(phase, wait, error).map_err(|error| self.party.explain(error))?
            }
            Err(error) => {
                // Others need not wait for the deadline to learn that this rank has left, or that it found another one lost.
                let verdict = match error.status() {
                    Status::Aborted => Error::new(Status::PeerLost, "it was aborted there"),
                    Status::PeerLost => error.clone(),
                    _ => return Err(self.party.explain(error)),
                };
                let verdict = Verdict::of_failure(self.my_rank(), &self.call, &verdict).encode();
                let short = Wait::after(Duration::from_millis(250));
                let _ = self.party.store.set_once(&self.key(phase, "verdict"), &verdict, &short);
                return Err(error);
            }
        };
        // The rank that serves the store may end its process when this returns, so it stays until the others have read a last word.
        let serves_here = self.party.served && self.party.members.position(0).is_some();
        if serves_here && (phase == "/end" || verdict.status != Status::Ok) {
            self.acknowledge(phase, &verdict);
        }
        verdict.into_result()
    }

    /// Leaves word that this rank is here, compares, counts itself in, and waits for the verdict.
    fn arrive(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<Verdict> {
        let store = &self.party.store;
        let first = self.here(phase, 0);
        store.set(&self.here(phase, self.party.me), text.unwrap_or("done").as_bytes(), wait)?;
        if let Some(mine) = text.filter(|_| self.party.me > 0) {
            match self.await_value(Some(&first), phase, wait)? {
                Came::Verdict(verdict) => return Ok(verdict),
                Came::Value(theirs) if theirs != mine.as_bytes() => {
                    return self.dissent(phase, mine, &String::from_utf8_lossy(&theirs), wait);
                }
                Came::Value(_) => {}
            }
        }
        let counted = store.add(&self.key(phase, "count"), 1, wait)?;
        if counted % DISSENT == self.party.members.len() as i64 {
            if counted < DISSENT {
                let stands = store.set_once(&self.key(phase, "verdict"), &Verdict::agreed().encode(), wait)?;
                return Ok(Verdict::decode(&stands));
            }
            store.set(&self.key(phase, "all"), b"1", wait)?;
        }
        self.await_verdict(phase, wait)
    }

    /// This rank was asked for something else than the first. The first such rank speaks for all of them.
    fn dissent(&self, phase: &str, mine: &str, theirs: &str, wait: &Wait) -> Result<Verdict> {
        let store = &self.party.store;
        let counted = store.add(&self.key(phase, "count"), DISSENT + 1, wait)?;
        let all = counted % DISSENT == self.party.members.len() as i64;
        let number = counted / DISSENT;
        let differing = |number: i64| self.key(phase, &format!("differs/{number}"));
        let stands = if number > 1 {
            store.set(&differing(number), self.party.me.to_string().as_bytes(), wait)?;
            if all {
                store.set(&self.key(phase, "all"), b"1", wait)?;
            }
            self.await_verdict(phase, wait)?
        } else {
            let window = wait.with_deadline(Deadline::after(wait.deadline.left().min(WINDOW)));
            if !all {
                match store.get_any(&[&self.key(phase, "all"), &self.key(phase, "verdict")], &window) {
                    Err(error) if error.status() == Status::Timeout => {}
                    came => drop(came?),
                }
            }
            let all = (store.add(&self.key(phase, "count"), 0, wait)? / DISSENT).max(1);
            let mut dissenters = vec![(self.my_rank(), mine.to_owned())];
            let soon = Wait { watch: None, ..wait.with_deadline(Deadline::after(WINDOW)) };
            for number in 2..=all.min(READ) {
                // One that has counted itself in but is not to be found has died since.
                let position = store.get(&differing(number), &soon).ok();
                let position = position.and_then(|text| String::from_utf8_lossy(&text).parse::<usize>().ok());
                let Some(position) = position.filter(|position| *position < self.party.members.len()) else { continue };
                if let Ok(Some(text)) = store.try_get(&self.here(phase, position), &soon) {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    dissenters.push((self.party.members.rank(position), text));
                }
            }
            dissenters.sort();
            let first = self.party.members.rank(0);
            let verdict = Verdict::of_mismatch(&dissenters, all as usize, first, theirs, self.number);
            Verdict::decode(&store.set_once(&self.key(phase, "verdict"), &verdict.encode(), wait)?)
        };
        if stands.status == Status::Ok {
            // They were complete without this rank: it takes the set to be a larger one.
            let first = self.party.members.rank(0);
            return Ok(Verdict::of_mismatch(&[(self.my_rank(), mine.to_owned())], 1, first, theirs, self.number));
        }
        Ok(stands)
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
        let (order, deadline) = (phase.is_empty().then(|| Order::of(self)), wait.deadline);
        let watch: Watch = Arc::new(move || {
            losses.look();
            if let Some(order) = &order {
                order.look(deadline);
            }
            of_caller.as_ref().map_or(Ok(()), |watch| watch())
        });
        let wait = &Wait { watch: Some(watch), ..wait.clone() };
        let (store, verdict) = (&self.party.store, self.key(phase, "verdict"));
        let as_verdict = |value: Vec<u8>| Came::Verdict(Verdict::decode(&value));
        loop {
            let missed = |rank| rank != self.my_rank() && self.party.members.position(rank).is_some();
            if let Some(lost) = self.party.losses.first(missed) {
                // What came before it went still counts.
                if let Some(value) = key.map(|key| store.try_get(key, wait)).transpose()?.flatten() {
                    return Ok(Came::Value(value));
                }
                let found = Verdict::of(&self.loss(phase, lost, wait));
                return store.set_once(&verdict, &found.encode(), wait).map(as_verdict);
            }
            let (number, lost) = self.party.losses.next();
            let keys: Vec<&str> = key.into_iter().chain([verdict.as_str(), lost.as_str()]).collect();
            let (index, value) = store.get_any(&keys, wait)?;
            match (keys.len() - index, key) {
                (1, _) => self.party.losses.note(number, &value),
                (2, _) => return Ok(as_verdict(value)),
                _ => return Ok(Came::Value(value)),
            }
        }
    }

    fn loss(&self, phase: &str, rank: i32, wait: &Wait) -> Error {
        let position = self.party.members.position(rank);
        let came = position.and_then(|position| self.party.store.try_get(&self.here(phase, position), wait).ok());
        let when = if phase.is_empty() && came.flatten().is_none() { "before it called" } else { "in" };
        let message = format!(
            "rank {rank} was lost {when} {} as call {}: its process ended, it freed its world, or its host fell silent",
            self.call, self.number
        );
        Error::new(Status::PeerLost, message)
    }

    /// The deadline has passed: names the ranks that are not here, unless a verdict stands already.
    fn late(&self, phase: &str, wait: &Wait, error: Error) -> Result<Verdict> {
        let timeout = wait.deadline.timeout();
        let grace = Duration::from_millis(200).max(timeout / 20);
        let (store, verdict_key) = (&self.party.store, self.key(phase, "verdict"));
        let whole = Wait { deadline: wait.deadline.extended(grace), ..Wait::after(grace) };
        let stuck = |position: usize| format!("{}{phase}/stuck/{position}", self.prefix);
        let _ = store.set(&stuck(self.party.me), b"1", &whole);
        // All ranks are late at the same moment; looking for each of thousands is the first one's work.
        if store.add(&self.key(phase, "late"), 1, &whole).is_ok_and(|number| number > 1) {
            if let Ok(stands) = store.get(&verdict_key, &Wait::after(grace / 2)) {
                return Ok(Verdict::decode(&stands));
            }
        }
        let size = self.party.members.len();
        let keys: Vec<String> = (0..size).map(|position| self.here(phase, position)).collect();
        let Ok(present) = store.present(&keys, &whole) else {
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
        let absent = |present: Vec<bool>| -> Vec<i32> {
            let missing = present.iter().enumerate().filter(|(_, here)| !**here);
            missing.map(|(position, _)| self.party.members.rank(position)).collect()
        };
        let mut missing = absent(present);
        let mut what = if phase.is_empty() { "never called" } else { "did not get through" };
        if missing.is_empty() {
            // One that has come and stopped before it counted itself in is not late like the others, which are so about now.
            std::thread::sleep(grace / 4);
            let keys: Vec<String> = (0..size).map(stuck).collect();
            // Where the store has gone meanwhile, it can be any of them.
            let others = || (0..size).map(|position| position == self.party.me).collect();
            missing = absent(store.present(&keys, &whole).unwrap_or_else(|_| others()));
            what = "came but got no further in";
        }
        let who = if missing.is_empty() { "some ranks (all were here)".to_owned() } else { ranges(&missing) };
        let message = format!("{who} {what} {} as call {} within {} ms", self.call, self.number, timeout.as_millis());
        let verdict = Verdict::of(&Error::timeout(message));
        match store.set_once(&verdict_key, &verdict.encode(), &whole) {
            Ok(stands) => Ok(Verdict::decode(&stands)),
            Err(_) => Ok(verdict),
        }
    }

    /// Every other rank says that it has read the verdict; the one that serves waits until all have.
    fn acknowledge(&self, phase: &str, verdict: &Verdict) {
        let stay = Wait::after(match verdict.status {
            Status::Mismatch => STAY_AFTER_MISMATCH,
            Status::Timeout | Status::PeerLost => STAY_AFTER_LOSS,
            _ => STAY,
        });
        let read = |count: i64| self.key(phase, &format!("read/{count}"));
        if !self.party.serving {
            let counted = self.party.store.add(&self.key(phase, "read"), 1, &stay);
            let _ = counted.and_then(|count| self.party.store.set(&read(count), b"1", &stay));
            return;
        }
        let all = read(self.party.members.len() as i64 - 1);
        // Not for those that have gone meanwhile: they read nothing any more.
        loop {
            let missed = |rank| rank != self.my_rank() && self.party.members.position(rank).is_some();
            let lost = self.party.losses.first(missed).is_some();
            let stay = if lost { Wait::after(STAY_AFTER_LOSS) } else { stay.clone() };
            let (number, next) = self.party.losses.next();
            match self.party.store.get_any(&[&all, &next], &stay) {
                Ok((1, value)) if !stay.deadline.passed() => self.party.losses.note(number, &value),
                _ => return,
            }
        }
    }
}
