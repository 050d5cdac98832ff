//! Agreement: every rank of a set made the same call, or every rank learns who did not.
//!
//! For call number s of a scope, under `<prefix>/<s>/`: each rank leaves its call's text under `here/<position>`; all others read that of position
//! 0 and compare. An equal one counts itself in, and the last to do so writes the verdict "agreed"; a different one writes "mismatch" with
//! both texts; whoever passes its deadline writes "timeout" with those that are not there. The verdict is written once (compare-and-set), and
//! everybody waits for it and returns what it says. A constant number of store operations per rank, but for the one that names the
//! missing.
//!
//! The call's work follows, and then a second such verdict at `<prefix>/<s>/end/`: all ranks got through, or the first failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::store::Store;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// While a rank waits for one key, how often it looks whether the verdict is there already.
const LOOK: Duration = Duration::from_millis(250);

/// How long the rank that serves the store stays for the others to read a verdict, where all are known to be there.
const STAY: Duration = Duration::from_secs(2);

/// Between a call's text and its detail.
const DETAIL: char = '\n';

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
}

/// Who agrees and where: shared by a scope and its rounds.
pub(super) struct Party {
    pub(super) store: Arc<dyn Store>,
    pub(super) members: Members,
    /// This rank's position among the members.
    pub(super) me: usize,
    /// Whether a rank of the world serves the store, and whether that is this one.
    pub(super) served: bool,
    pub(super) serving: bool,
}

/// A set of ranks that make collective calls in the same order.
pub struct Scope {
    party: Arc<Party>,
    prefix: String,
    calls: AtomicU64,
}

impl Scope {
    /// Its keys begin with `prefix`, which is the same on all its ranks and used once.
    pub(super) fn new(party: Party, prefix: String) -> Scope {
        Scope { party: Arc::new(party), prefix, calls: AtomicU64::new(0) }
    }

    /// Returns when every rank of the scope has made this same call as its same-numbered call; else every rank gets the same error:
    /// `DM_STATUS_MISMATCH` with two different calls, `DM_STATUS_TIMEOUT` with the ranks that did not come.
    pub fn agree(&self, call: &str, wait: &Wait) -> Result<Round> {
        self.agree_in_detail(call, "", wait)
    }

    /// The same, where the ranks must also agree on something that the call's text does not say; it is spelled out only when the
    /// calls are equal and this is not.
    pub fn agree_in_detail(&self, call: &str, detail: &str, wait: &Wait) -> Result<Round> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let round = Round {
            party: Arc::clone(&self.party),
            prefix: format!("{}/{number}", self.prefix),
            call: call.to_owned(),
            number,
        };
        if round.party.members.len() > 1 {
            round.settle("", Some(&format!("{call}{DETAIL}{detail}")), wait)?;
        }
        Ok(round)
    }
}

/// One agreed call: the place where its ranks exchange what they need for it.
pub struct Round {
    party: Arc<Party>,
    prefix: String,
    call: String,
    number: u64,
}

impl Round {
    /// The number of the call in its scope: the same on every rank, and used once.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Leaves a value for the other ranks of the call.
    pub fn publish(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.party.store.set(&self.key("data", key), value, wait)
    }

    /// The value that another rank publishes. Ends early with the error of a rank that failed meanwhile.
    pub fn fetch(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.await_key(&self.key("data", key), "/end", wait)?.ok_or_else(|| {
            Error::timeout(format!(
                "{} was not published within {} ms for {}",
                key,
                wait.deadline.timeout().as_millis(),
                self.call
            ))
        })
    }

    /// Tells the other ranks that this one failed; the first failure of any rank stands.
    pub fn fail(&self, error: &Error) {
        if self.party.members.len() > 1 {
            let verdict = Verdict::of_failure(self.my_rank(), &self.call, error);
            let _ = self.party.store.set_once(
                &self.key("end", "verdict"),
                &verdict.encode(),
                &grace(Duration::from_secs(5)),
            );
        }
    }

    /// The failure that some rank reported, if any did by now.
    pub fn failed(&self, wait: &Wait) -> Result<Option<Error>> {
        if self.party.members.len() < 2 {
            return Ok(None);
        }
        let verdict = self.party.store.try_get(&self.key("end", "verdict"), wait)?;
        Ok(verdict.and_then(|bytes| Verdict::decode(&bytes).into_result().err()))
    }

    /// Returns when every rank of the call got through its work; else every rank gets the first failure, or the ranks that did not come.
    pub fn finish(self, wait: &Wait) -> Result<()> {
        if self.party.members.len() > 1 { self.settle("/end", None, wait) } else { Ok(()) }
    }

    /// One verdict under `<prefix><phase>/`; `text` is what must be equal.
    fn settle(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<()> {
        let arrived = self.arrive(phase, text, wait);
        let verdict = match arrived.and_then(|()| self.await_verdict(phase, wait)) {
            Ok(verdict) => verdict,
            Err(error) if error.status() == Status::Timeout => self.late(phase, wait, error)?,
            Err(error) => {
                // Others need not wait for the deadline to learn that this rank has left, or that it found another one lost.
                let verdict = match error.status() {
                    Status::Aborted => Error::new(Status::PeerLost, "it was aborted there"),
                    Status::PeerLost => error.clone(),
                    _ => return Err(error),
                };
                let verdict = Verdict::of_failure(self.my_rank(), &self.call, &verdict).encode();
                let _ = self.party.store.set_once(&self.key(phase, "verdict"), &verdict, &grace(LOOK));
                return Err(error);
            }
        };
        // The rank that serves the store may end its process when this returns, so it stays until the others have read a last word.
        if self.party.served && (phase == "/end" || verdict.status != Status::Ok) {
            self.acknowledge(phase, &verdict);
        }
        verdict.into_result()
    }

    /// Leaves word that this rank is here and counts it in.
    fn arrive(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<()> {
        let size = self.party.members.len();
        let here = |position: usize| format!("{}{phase}/here/{position}", self.prefix);
        self.party.store.set(&here(self.party.me), text.unwrap_or("done").as_bytes(), wait)?;
        if let Some(mine) = text.filter(|_| self.party.me > 0) {
            let Some(theirs) = self.await_key(&here(0), phase, wait)? else { return Ok(()) };
            let theirs = String::from_utf8_lossy(&theirs);
            if theirs != mine {
                let verdict =
                    Verdict::of_mismatch(self.my_rank(), mine, self.party.members.rank(0), &theirs, self.number);
                self.party.store.set_once(&self.key(phase, "verdict"), &verdict.encode(), wait)?;
                return Ok(());
            }
        }
        if self.party.store.add(&self.key(phase, "count"), 1, wait)? == size as i64 {
            self.party.store.set_once(&self.key(phase, "verdict"), &Verdict::agreed().encode(), wait)?;
        }
        Ok(())
    }

    fn await_verdict(&self, phase: &str, wait: &Wait) -> Result<Verdict> {
        let key = self.key(phase, "verdict");
        loop {
            match self.party.store.get(&key, &slice_of(wait)) {
                Err(error) if error.status() == Status::Timeout && !wait.deadline.passed() => wait.look_around()?,
                found => return found.map(|bytes| Verdict::decode(&bytes)),
            }
        }
    }

    /// Waits for a key; `None` when the phase's verdict came instead and says "agreed"; its error when it says anything else.
    fn await_key(&self, key: &str, phase: &str, wait: &Wait) -> Result<Option<Vec<u8>>> {
        loop {
            match self.party.store.get(key, &slice_of(wait)) {
                Err(error) if error.status() == Status::Timeout => {
                    wait.look_around()?;
                    if let Some(bytes) = self.party.store.try_get(&self.key(phase, "verdict"), wait)? {
                        return Verdict::decode(&bytes).into_result().map(|()| None);
                    }
                    if wait.deadline.passed() {
                        return Err(error);
                    }
                }
                found => return found.map(Some),
            }
        }
    }

    /// The deadline has passed: names the ranks that are not here, unless a verdict stands already.
    fn late(&self, phase: &str, wait: &Wait, error: Error) -> Result<Verdict> {
        let timeout = wait.deadline.timeout();
        let grace = grace(Duration::from_millis(200).max(timeout / 20));
        let keys: Vec<String> =
            (0..self.party.members.len()).map(|position| format!("{}{phase}/here/{position}", self.prefix)).collect();
        let Ok(present) = self.party.store.present(&keys, &grace) else { return Err(error) };
        let missing = present.iter().enumerate().filter(|(_, here)| !**here);
        let missing: Vec<i32> = missing.map(|(position, _)| self.party.members.rank(position)).collect();
        let what = if phase.is_empty() { "never called" } else { "did not get through" };
        let who = if missing.is_empty() { "some ranks (all were here)".to_owned() } else { ranges(&missing) };
        let message = format!("{who} {what} {} as call {} within {} ms", self.call, self.number, timeout.as_millis());
        let verdict = Verdict { status: Status::Timeout, ccl: 0, device: 0, os: 0, message };
        match self.party.store.set_once(&self.key(phase, "verdict"), &verdict.encode(), &grace) {
            Ok(stands) => Ok(Verdict::decode(&stands)),
            Err(_) => Ok(verdict),
        }
    }

    fn acknowledge(&self, phase: &str, verdict: &Verdict) {
        let stay = grace(if verdict.status == Status::Timeout { Duration::from_millis(100) } else { STAY });
        let (count, all) = (self.key(phase, "read"), self.key(phase, "all read"));
        if self.party.serving {
            let _ = self.party.store.get(&all, &stay);
        } else if self.party.store.add(&count, 1, &stay).is_ok_and(|read| read == self.party.members.len() as i64 - 1) {
            let _ = self.party.store.set(&all, b"1", &stay);
        }
    }

    fn my_rank(&self) -> i32 {
        self.party.members.rank(self.party.me)
    }

    fn key(&self, phase: &str, name: &str) -> String {
        format!("{}/{}/{name}", self.prefix, phase.trim_start_matches('/')).replace("//", "/")
    }
}

/// The next part of a wait, after which the rank looks around.
fn slice_of(wait: &Wait) -> Wait {
    wait.with_deadline(Deadline::after(wait.deadline.left().min(LOOK)))
}

fn grace(time: Duration) -> Wait {
    Wait::after(time)
}

/// What stands for all ranks: a status and, unless it is well, a message with the codes of the layers below.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Verdict {
    status: Status,
    ccl: i32,
    device: i32,
    os: i32,
    message: String,
}

impl Verdict {
    fn agreed() -> Verdict {
        Verdict { status: Status::Ok, ccl: 0, device: 0, os: 0, message: String::new() }
    }

    fn of_mismatch(rank: i32, mine: &str, first: i32, theirs: &str, number: u64) -> Verdict {
        let (my_call, my_detail) = mine.split_once(DETAIL).unwrap_or((mine, ""));
        let (their_call, their_detail) = theirs.split_once(DETAIL).unwrap_or((theirs, ""));
        let (mine, theirs) = match my_call == their_call {
            true => (format!("{my_call} {my_detail}"), format!("it {their_detail}")),
            false => (my_call.to_owned(), their_call.to_owned()),
        };
        let message = format!("rank {rank} called {mine} as call {number}, rank {first} called {theirs}");
        Verdict { status: Status::Mismatch, message, ..Verdict::agreed() }
    }

    fn of_failure(rank: i32, call: &str, error: &Error) -> Verdict {
        Verdict {
            status: error.status(),
            ccl: error.ccl_result(),
            device: error.device_error(),
            os: error.os_error(),
            message: format!("rank {rank} failed in {call}: {}", error.message()),
        }
    }

    fn encode(&self) -> Vec<u8> {
        format!("{} {} {} {}\n{}", self.status as i32, self.ccl, self.device, self.os, self.message).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Verdict {
        let text = String::from_utf8_lossy(bytes);
        let (codes, message) = text.split_once('\n').unwrap_or((&text, ""));
        let mut codes = codes.split(' ').map(|code| code.parse::<i32>().ok());
        let mut code = || codes.next().flatten();
        let status = code().and_then(Status::from_code).unwrap_or(Status::Store);
        let (ccl, device, os) = (code().unwrap_or(0), code().unwrap_or(0), code().unwrap_or(0));
        Verdict { status, ccl, device, os, message: message.to_owned() }
    }

    fn into_result(self) -> Result<()> {
        match self.status {
            Status::Ok => Ok(()),
            status => Err(Error::new(status, self.message)
                .with_ccl_result(self.ccl)
                .with_device_error(self.device)
                .with_os_error(self.os)),
        }
    }
}

/// Ranks as people write them: "rank 5", "ranks 5, 17-31 and 40 more".
pub(super) fn ranges(ranks: &[i32]) -> String {
    const SHOWN: usize = 8;
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let mut runs: Vec<(i32, i32)> = Vec::new();
    for rank in sorted {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): &(i32, i32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<String> = runs.iter().take(SHOWN).map(text).collect();
    let more: i32 = runs.iter().skip(SHOWN).map(|(first, last)| last - first + 1).sum();
    match more {
        0 => format!("{noun} {}", shown.join(", ")),
        more => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
