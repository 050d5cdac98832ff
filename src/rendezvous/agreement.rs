//! Agreement: every rank of a set made the same call, or every rank learns who did not.
//!
//! For call number s of a scope, under `<prefix>/<s>/`: each rank leaves its call's text under `here/<position>`; all others read that of position
//! 0, compare, and count themselves in, those that differ also among the dissenters. The last one in writes the verdict "agreed", or
//! wakes the first dissenter, which waits a moment for others to spell out and writes "mismatch" with the calls of both
//! sides. Whoever passes its deadline writes "timeout" with those that are not there, and whoever learns of a rank that has gone writes
//! "lost". The verdict is written once (compare-and-set), and everybody waits for it and returns what it says. A constant number of
//! store operations per rank, but for the one that names the missing.
//!
//! The call's work follows, and then a second such verdict at `<prefix>/<s>/end/`: all ranks got through, or the first failure.
//!
//! What a call left in the store is removed when the next one is agreed (left.rs), so the store stays as small as it is.

mod left;
mod missing;
mod order;
mod settle;
mod verdict;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::losses::Losses;
use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};
pub(super) use left::{Left, Leftovers};
use order::Looks;
use settle::Came;
pub(super) use verdict::ranges;
use verdict::{DETAIL, Verdict};

/// How long asking for news takes when there are none.
const LISTEN: Duration = Duration::from_millis(10);

/// The ranks, by position, that act as soon as a deadline has passed.
const HASTY: usize = 4;

/// How long the word of a rank that is aborted may take to go out, and how much of that the rank waits for.
const FAREWELL: Duration = Duration::from_secs(1);
const FAREWELL_HERE: Duration = Duration::from_millis(50);

/// Instead of the name of what a rank could share, where there is nothing.
const NOTHING: &str = "-";

fn names_in_line(names: Vec<&str>) -> String {
    names.join(" ")
}

/// Who is in a scope: world rank by position.
#[derive(Debug, Clone)]
pub(super) enum Members {
    All(usize),
    Listed(Arc<[i32]>),
}

impl Members {
    fn len(&self) -> usize {
        match self {
            Members::All(size) => *size,
            Members::Listed(ranks) => ranks.len(),
        }
    }

    fn rank(&self, position: usize) -> i32 {
        match self {
            Members::All(_) => position as i32,
            Members::Listed(ranks) => ranks[position],
        }
    }

    fn position(&self, rank: i32) -> Option<usize> {
        match self {
            Members::All(size) => usize::try_from(rank).ok().filter(|rank| rank < size),
            Members::Listed(ranks) => ranks.iter().position(|known| *known == rank),
        }
    }
}

/// Who agrees and where: shared by a scope and its rounds.
pub(super) struct Party {
    pub(super) store: Arc<dyn Store>,
    pub(super) losses: Arc<Losses>,
    pub(super) members: Members,
    /// This rank's position among the members.
    pub(super) me: usize,
    /// Whether rank 0 of the world serves the store, and whether that is this one.
    pub(super) served: bool,
    pub(super) serving: bool,
    /// What this rank left in the store for the calls of this scope.
    pub(super) left: Left,
}

impl Party {
    /// When rank 0 serves the store, its going is what the others see first.
    fn explain(&self, error: Error) -> Error {
        let full = error.os_error() == libc::ENOSPC;
        if error.status() != Status::Store || full || !self.served || self.serving {
            return error;
        }
        Error::new(
            Status::PeerLost,
            format!("rank 0, which serves the store of this job, was lost: {}", error.message()),
        )
        .with_os_error(error.os_error())
        .with_ranks(&[0])
    }
}

/// A set of ranks that make collective calls in the same order.
pub struct Scope {
    party: Arc<Party>,
    prefix: String,
    calls: AtomicU64,
    /// Whether a call has ended because one of the ranks was lost: none can be agreed any more.
    over: AtomicBool,
}

impl Scope {
    /// Its keys begin with `prefix`, which is the same on all its ranks and used once.
    pub(super) fn new(party: Party, prefix: String) -> Scope {
        Scope { party: Arc::new(party), prefix, calls: AtomicU64::new(0), over: AtomicBool::new(false) }
    }

    /// Returns when every rank of the scope has made this same call as its same-numbered call; else every rank gets the same error:
    /// `DM_STATUS_MISMATCH` with the different calls, `DM_STATUS_TIMEOUT` with the ranks that did not come, `DM_STATUS_PEER_LOST` with one that
    /// cannot come any more.
    pub fn agree(&self, call: &str, wait: &Wait) -> Result<Round> {
        self.agree_in_detail(call, "", wait)
    }

    /// The same, where the ranks must also agree on something that the call's text does not say; it is spelled out only when the
    /// calls are equal and this is not.
    pub fn agree_in_detail(&self, call: &str, detail: &str, wait: &Wait) -> Result<Round> {
        let round = self.next_round(call);
        if round.party.members.len() > 1 {
            self.come(&round, &format!("{call}{DETAIL}{detail}"), wait)?;
        }
        Ok(round)
    }

    /// The same, where each rank may also have things that it could share with the others, such as communicators. `offers` has a name for each of them
    /// at its place in a list that is equally long on every rank, or nothing. Beside the round: for each place whether all ranks have named the same
    /// thing, which is then shared by all. One rank alone that has nothing there, or something else, makes it nothing for all.
    pub fn agree_to_share(&self, call: &str, offers: &[Option<String>], wait: &Wait) -> Result<(Round, Vec<bool>)> {
        let names = offers.iter().map(|offer| offer.as_deref().unwrap_or(NOTHING)).collect();
        let round = Round { offers: Some(names_in_line(names)), ..self.next_round(call) };
        if round.party.members.len() < 2 {
            let shared = offers.iter().map(Option::is_some).collect();
            return Ok((round, shared));
        }
        // Only what the first rank offers can be shared, so the others' offers stay with them.
        let offered = if round.party.me == 0 { round.offers.as_deref().unwrap_or_default() } else { "" };
        self.come(&round, &format!("{call}{DETAIL}{offered}"), wait)?;
        let agreed = round.shared.get().map_or("", String::as_str);
        let places: Vec<usize> = agreed.split(' ').filter_map(|place| place.parse().ok()).collect();
        let shared = (0..offers.len()).map(|place| places.contains(&place)).collect();
        Ok((round, shared))
    }

    /// Comes to that call. When it is agreed, all ranks have left the calls before it, and what this one left there is removed.
    fn come(&self, round: &Round, text: &str, wait: &Wait) -> Result<()> {
        if let Some(lost) = round.lost().filter(|_| self.over.load(Ordering::SeqCst)) {
            return Err(round.lost_before(lost));
        }
        let behind = self.party.left.take();
        let settled = round.settle("", Some(text), wait);
        // Before this rank can come to another call: who finds its word must be able to rely on it.
        round.looks.take_back_word(round, wait);
        match &settled {
            Ok(()) => self.party.store.forget(behind, wait),
            Err(error) => {
                self.party.left.note(behind);
                // The loss stands in the store for good, so every rank finds it by itself: no later call needs keys for that.
                if error.status() == Status::PeerLost && round.lost().is_some() {
                    self.over.store(true, Ordering::SeqCst);
                }
            }
        }
        settled
    }

    /// Makes `error` the verdict of the next call, in which this rank takes no part.
    pub(super) fn refuse(&self, error: &Error, wait: &Wait) {
        let _ = self.next_round("").decide("", &Verdict::of(error), wait);
    }

    /// The same for a rank that cannot take part after all, which is what the others are told where it does not wait for all of them.
    pub(super) fn agree_in_vain(&self, call: &str, failure: &Error, wait: &Wait) -> Result<Round> {
        let round = Round { failure: Some(failure.clone()), ..self.next_round(call) };
        self.come(&round, &format!("{call}{DETAIL}"), wait).map(|()| round)
    }

    fn next_round(&self, call: &str) -> Round {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let prefix = format!("{}/{number}", self.prefix);
        let (party, call) = (Arc::clone(&self.party), call.to_owned());
        Round {
            party,
            prefix,
            call,
            number,
            looks: Arc::default(),
            failure: None,
            offers: None,
            shared: OnceLock::new(),
        }
    }
}

/// One agreed call: the place where its ranks exchange what they need for it.
pub struct Round {
    party: Arc<Party>,
    prefix: String,
    call: String,
    number: u64,
    looks: Arc<Looks>,
    /// Why this rank cannot take part.
    failure: Option<Error>,
    /// What this rank could share, in a line; `None` where the call shares nothing.
    offers: Option<String>,
    /// The places of what all ranks share, once they have agreed.
    shared: OnceLock<String>,
}

impl Round {
    /// The number of the call in its scope: the same on every rank, and used once.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What the call is known by in its world: the same on every rank, and different from every other call's.
    pub fn name(&self) -> String {
        let name = self.prefix.strip_prefix(self.party.losses.prefix()).unwrap_or(&self.prefix);
        name.replace(' ', "_")
    }

    /// Leaves a value for the other ranks of the call.
    pub fn publish(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.leave(self.key("/data", key), value, wait).map_err(|error| self.party.explain(error))
    }

    /// The value that another rank (`from`, its world rank) publishes. Ends early with the error of a rank that failed or was lost meanwhile.
    pub fn fetch(&self, key: &str, from: i32, wait: &Wait) -> Result<Vec<u8>> {
        let full = self.key("/data", key);
        match self.await_value(Some(&full), "/end", wait) {
            Ok(Came::Value(value)) => Ok(value),
            Ok(Came::Verdict(verdict)) => {
                let unlike = || Error::internal(format!("{} ended well without {key}", self.call));
                verdict.into_result().and_then(|()| Err(unlike()))
            }
            Err(error) if error.status() == Status::Timeout => Err(Error::timeout(format!(
                "rank {from} did not publish {key} within {} ms for {}",
                wait.deadline.timeout().as_millis(),
                self.call
            ))
            .with_ranks(&[from])),
            Err(error) => Err(self.party.explain(error)),
        }
    }

    /// Tells the other ranks that this one failed; the first failure of any rank stands. Takes a moment at most when the deadline has passed.
    pub fn fail(&self, error: &Error, wait: &Wait) {
        if self.party.members.len() > 1 {
            let soon = wait.deadline.left().clamp(Duration::from_millis(200), Duration::from_secs(5));
            self.tell("/end", &Verdict::of_failure(self.my_rank(), &self.call, error), soon, wait, false);
        }
    }

    /// Writes a verdict, and with `reads` that this rank has read the one that stands. A store that is slow or silent does not keep
    /// one that is aborted: its word goes out beside it.
    fn tell(&self, phase: &str, verdict: &Verdict, longest: Duration, wait: &Wait, reads: bool) {
        let (round, phase, verdict) = (self.copy(), phase.to_owned(), verdict.clone());
        let say = move |longest| {
            let wait = Wait::after(longest);
            let _ = round.decide(&phase, &verdict, &wait);
            let _ = if reads { round.say_read(&phase, &wait) } else { Ok(()) };
        };
        if !wait.cancel.is_raised() {
            return say(longest);
        }
        let (told, telling) = channel();
        let tell = move || {
            say(longest.min(FAREWELL));
            let _ = told.send(());
        };
        if std::thread::Builder::new().name("dm-farewell".to_owned()).spawn(tell).is_ok() {
            let _ = telling.recv_timeout(FAREWELL_HERE);
        }
    }

    /// The failure that some rank reported, if any did by now, or that a rank has gone, which then stands as such.
    pub fn failed(&self, wait: &Wait) -> Result<Option<Error>> {
        if self.party.members.len() < 2 {
            return Ok(None);
        }
        self.party.losses.look(wait);
        match self.await_value(None, "/end", &wait.with_deadline(Deadline::after(LISTEN))) {
            Ok(Came::Verdict(verdict)) => Ok(verdict.into_result().err()),
            Ok(Came::Value(_)) => Ok(None),
            Err(error) if error.status() == Status::Timeout => Ok(None),
            Err(error) => Err(self.party.explain(error)),
        }
    }

    /// Returns when every rank of the call got through its work; else every rank gets the first failure, or the ranks that did not come.
    pub fn finish(self, wait: &Wait) -> Result<()> {
        if self.party.members.len() > 1 { self.settle("/end", None, wait) } else { Ok(()) }
    }

    /// Stores a value that only this rank writes, and notes that it is to be removed.
    fn leave(&self, key: String, value: &[u8], wait: &Wait) -> Result<()> {
        let set = self.party.store.set(&key, value, wait);
        self.party.left.note([key]);
        set
    }

    /// Counts. Who counts first removes the counter later.
    fn count(&self, key: String, amount: i64, wait: &Wait) -> Result<i64> {
        let sum = self.party.store.add(&key, amount, wait)?;
        if sum == amount {
            self.party.left.note([key]);
        }
        Ok(sum)
    }

    /// Makes that the verdict of a phase unless one stands, and gives the one that stands. Who wrote it removes it later.
    fn decide(&self, phase: &str, verdict: &Verdict, wait: &Wait) -> Result<Verdict> {
        self.decide_at(self.key(phase, "verdict"), verdict, wait)
    }

    fn decide_at(&self, key: String, verdict: &Verdict, wait: &Wait) -> Result<Verdict> {
        let mine = verdict.encode();
        let stands = self.party.store.set_once(&key, &mine, wait)?;
        let verdict = self.verdict_in(&stands, &key);
        if stands == mine {
            self.party.left.note([key]);
        }
        Ok(verdict)
    }

    /// The verdict that the store gives under that key.
    fn verdict_in(&self, value: &[u8], key: &str) -> Verdict {
        Verdict::decode(value, key, self.party.store.name())
    }

    fn copy(&self) -> Round {
        Round {
            party: Arc::clone(&self.party),
            prefix: self.prefix.clone(),
            call: self.call.clone(),
            number: self.number,
            looks: Arc::clone(&self.looks),
            failure: None,
            offers: None,
            shared: OnceLock::new(),
        }
    }

    fn here(&self, phase: &str, position: usize) -> String {
        self.key(phase, &format!("here/{position}"))
    }

    fn my_rank(&self) -> i32 {
        self.party.members.rank(self.party.me)
    }

    /// `phase` is "", "/data" or "/end".
    fn key(&self, phase: &str, name: &str) -> String {
        format!("{}{phase}/{name}", self.prefix)
    }
}

#[cfg(test)]
mod tests;
