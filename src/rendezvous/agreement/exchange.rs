//! Lets the ranks of an agreed call publish and fetch values, say that they failed, and end it.

use std::time::Duration;

use super::deciding::Part;
use super::round::Round;
use super::verdict::Verdict;
use super::waiting::{Found, may_follow_from_a_loss};
use crate::error::{Error, Result, Status};
use crate::recorder::Operation;
use crate::rendezvous::store::Store;
use crate::wait::{Deadline, Wait};

/// The number of values that [`Round::fetch_each`] asks for at once.
pub(super) const AT_ONCE: usize = 64;

/// How long [`Round::failed`] waits for the report of a failure.
const LISTEN: Duration = Duration::from_millis(10);

/// How long another process waits for the end of a call to which all ranks have come. Where a rank
/// is lost meanwhile, the others end the call at once.
const ENDS: Duration = Duration::from_millis(500);

impl Round {
    /// Returns the number of the call in its scope. The number is equal on all ranks and is used
    /// once.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the name of the call in its world. The name is equal on all ranks, and no other call
    /// has it.
    pub fn name(&self) -> String {
        let name = self.prefix.strip_prefix(self.membership.losses.prefix()).unwrap_or(&self.prefix);
        name.replace(' ', "_")
    }

    /// Publishes a value for the other ranks of the call.
    pub fn publish(&self, key: &str, value: &[u8], wait: &Wait) -> Result<()> {
        self.put(self.key("/data", key), value, wait).map_err(|error| self.membership.explain(error))
    }

    /// Counts this rank under `key`, and adds its digest to those of the other ranks of the call.
    /// Returns how many ranks were counted by now, and whether all of their digests are equal.
    pub fn compare(&self, key: &str, digest: u64, wait: &Wait) -> Result<(usize, bool)> {
        let tally = self.tally(self.key("/data", key), digest, wait).map_err(|error| self.membership.explain(error))?;
        Ok((tally.count, tally.is_equal))
    }

    /// Returns the value that another rank publishes; `from` is its world rank. Fails early when a
    /// rank has failed or was lost meanwhile.
    pub fn fetch(&self, key: &str, from: i32, wait: &Wait) -> Result<Vec<u8>> {
        let late = |millis| {
            let message = format!("rank {from} did not publish {key} within {millis} ms for {}", self.call);
            Error::timeout(message).with_ranks(&[from])
        };
        self.await_key(&self.key("/data", key), late, wait)
    }

    /// Fetches several values. `from` has the key of each value, and the world rank that publishes
    /// it. The store is asked for many values at once, so a rank can fetch those of 100,000 others.
    pub fn fetch_each(&self, from: &[(String, i32)], wait: &Wait) -> Result<Vec<Vec<u8>>> {
        let mut values = Vec::with_capacity(from.len());
        for part in from.chunks(AT_ONCE) {
            let keys: Vec<String> = part.iter().map(|(key, _)| self.key("/data", key)).collect();
            let there = self.membership.store.try_get_each(&keys, wait);
            for ((key, rank), value) in part.iter().zip(there.map_err(|error| self.membership.explain(error))?) {
                // This rank waits for a value that is not there yet, and for all that ends such a
                // wait.
                values.push(value.map_or_else(|| self.fetch(key, *rank, wait), Ok)?);
            }
        }
        Ok(values)
    }

    /// Does what [`fetch`](Round::fetch) does, for a key that does not belong to the call alone.
    pub fn fetch_of_world(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        let late = |millis| Error::timeout(format!("no rank wrote {key} within {millis} ms for {}", self.call));
        self.await_key(key, late, wait)
    }

    /// Waits for a key of the store. `late` makes the error for a key that does not come within so
    /// many milliseconds.
    fn await_key(&self, key: &str, late: impl FnOnce(u128) -> Error, wait: &Wait) -> Result<Vec<u8>> {
        match self.await_value(Some(key), "/end", wait) {
            Ok(Found::Value(value)) => Ok(value),
            Ok(Found::Verdict(verdict)) => {
                let unlike = || Error::internal(format!("{} ended well without {key}", self.call));
                verdict.into_result().and_then(|()| Err(unlike())).map_err(|error| error.in_call(self.number))
            }
            Err(error) if error.status() == Status::Timeout => {
                let timeout = wait.deadline.timeout();
                Err(late(timeout.as_millis()).in_call(self.number).after_waiting(timeout))
            }
            Err(error) => Err(self.membership.explain(error)),
        }
    }

    /// Tells the other ranks that this one failed. The first failure of any rank becomes the
    /// verdict. Where a lost rank may be the reason, the loss becomes the verdict instead. When the
    /// deadline has passed, this function takes a moment at most. Returns whether the others can
    /// read the failure: `false` when the store did not take the failure.
    pub fn fail(&self, error: &Error, wait: &Wait) -> bool {
        self.recorded.set_ends_well(false);
        if self.membership.members.len() < 2 {
            return true;
        }
        if self.news_of_a_loss("/end", error, wait).is_some() {
            return true;
        }
        let soon = wait.deadline.left().clamp(Duration::from_millis(200), Duration::from_secs(5));
        self.publish_verdict("/end", &Verdict::of_failure(self.my_rank(), &self.call, error), soon, wait, false)
    }

    /// Records that this rank goes on to make communicators for the call.
    pub(crate) fn note_making(&self) {
        self.recorded.set_operation(Operation::MakeComms);
    }

    /// Tells the other ranks that this one failed, as [`fail`](Round::fail) does. If this rank was
    /// aborted, the verdict says that this rank is lost.
    pub fn tell(&self, error: &Error, wait: &Wait) -> bool {
        if error.status() != Status::Aborted {
            return self.fail(error, wait);
        }
        let lost = Error::new(Status::PeerLost, format!("it was lost: {}", error.message()));
        self.fail(&lost.with_ranks(&[self.my_rank()]), wait)
    }

    /// Ends the call after this rank's work, whose outcome is `done`: tells the other ranks of a
    /// failure, and reaches the second verdict. Returns how the call has ended on this rank. When
    /// any rank has failed, every rank gets the first failure.
    pub fn end<T>(self, done: Result<T>, wait: &Wait) -> Result<T> {
        let told = done.as_ref().err().is_none_or(|error| self.tell(error, wait));
        // A rank that could not tell its failure must not count itself among the ranks that are
        // done. The others then find it missing at their deadline.
        match told {
            true => verdict_for_all(done, self.finish(wait)),
            false => done.map_err(|error| self.untold(error, wait)),
        }
    }

    /// Returns the error for this rank's caller where the store did not take `error`, which is
    /// this rank's failure. The reason for the failure may be that the rank that serves the store
    /// is lost.
    fn untold(&self, error: Error, wait: &Wait) -> Error {
        let loss = self.failed(wait).err().filter(|loss| loss.status() == Status::PeerLost);
        loss.filter(|_| may_follow_from_a_loss(&error)).unwrap_or(error)
    }

    /// Returns the failure that a rank has reported by now, if any. If a rank was lost, the loss
    /// becomes that failure.
    pub fn failed(&self, wait: &Wait) -> Result<Option<Error>> {
        if self.membership.members.len() < 2 {
            return Ok(None);
        }
        self.membership.losses.look(wait);
        match self.await_value(None, "/end", &wait.with_deadline(Deadline::after(LISTEN))) {
            Ok(Found::Verdict(verdict)) => Ok(verdict.into_result().err().map(|error| error.in_call(self.number))),
            Ok(Found::Value(_)) => Ok(None),
            Err(error) if error.status() == Status::Timeout => Ok(None),
            Err(error) => Err(self.membership.explain(error)),
        }
    }

    /// Returns when every rank of the call got through its work. Otherwise every rank gets the
    /// first failure, or the ranks that did not get through. After a success nobody reads the
    /// values of the call any more, so this rank removes those that it has published.
    pub fn finish(self, wait: &Wait) -> Result<()> {
        if self.membership.members.len() < 2 {
            return Ok(());
        }
        self.recorded.set_ends_well(false);
        self.reach_verdict("/end", Part::Equal(None), wait)?;
        self.recorded.set_ends_well(true);
        let published = self.membership.left.take_under(&self.key("/data", ""));
        if !published.is_empty() {
            self.membership.store.forget(published, wait);
        }
        Ok(())
    }
}

/// Whether the first call of a scope has failed on all of its ranks, where the store still has the
/// keys of that call. The keys of the scope begin with `prefix`. Where all ranks have come to the
/// call and it has not ended, this function waits for its end for a moment.
pub(in crate::rendezvous) fn has_first_call_failed(store: &dyn Store, prefix: &str, wait: &Wait) -> Result<bool> {
    let key = format!("{prefix}/0/end/verdict");
    let mut verdict = store.try_get(&key, wait)?;
    if verdict.is_none() && store.try_get(&format!("{prefix}/0/count"), wait)?.is_some() {
        let moment = wait.with_deadline(Deadline::after(ENDS.min(wait.deadline.left())));
        verdict = match store.get(&key, &moment) {
            Err(error) if error.status() == Status::Timeout => None,
            verdict => Some(verdict?),
        };
    }
    Ok(verdict.is_some_and(|verdict| Verdict::decode(&verdict, &key, store.name()).status != Status::Ok))
}

/// Returns how an agreed call ended on this rank. `mine` is the outcome of this rank's work, and
/// `verdict` is the second verdict of the ranks. The verdict counts, because it is the first
/// failure of any rank, and the error that this rank met may follow from that failure. The error
/// of this rank counts in three cases: this rank was aborted; it could not read the verdict; or
/// all ranks were late, and its error says for which ranks it waited.
fn verdict_for_all<T>(mine: Result<T>, verdict: Result<()>) -> Result<T> {
    match (mine, verdict) {
        (Ok(value), verdict) => verdict.map(|()| value),
        (Err(mine), Err(verdict)) => Err(match (mine.status(), verdict.status()) {
            (Status::Aborted, _)
            | (_, Status::Aborted | Status::Store | Status::Exhausted)
            | (Status::Timeout, Status::Timeout) => mine,
            _ => verdict,
        }),
        (Err(mine), Ok(())) => Err(mine),
    }
}
