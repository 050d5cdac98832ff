//! The verdict on the mesh of an epoch.
//!
//! Each rank of the mesh makes its communicators, and counts itself in. The last one writes the
//! verdict `made`. A rank that learns that one of the mesh is lost writes `broken`, and all ranks
//! go on to the next turn. A rank whose deadline passes writes its error, and so does a rank that
//! cannot make its part, unless it learns within a moment that a rank of the mesh is lost. The
//! verdict is written once, and all members act on the one that stands.

use std::collections::BTreeSet;

use super::Recovery;
use crate::error::{Error, Result, Status};
use crate::rank_list::ranges;
use crate::rendezvous::agreement::round::Membership;
use crate::rendezvous::agreement::verdict::Verdict;
use crate::rendezvous::agreement::waiting::NEWS_OF_A_LOSS;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::any_of;
use crate::wait::{Deadline, Wait};

/// How the making of a mesh has ended, when it has not failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// All ranks of the mesh have made it.
    Whole,
    /// A rank of the mesh was lost meanwhile, or this process is not in the mesh and the ranks of
    /// the mesh have failed. The next turn is due.
    Broken,
}

impl Recovery {
    /// Says that this process has made its part of the mesh of its epoch, or why it could not, and
    /// returns the verdict that all members get. A process that is not in the mesh only waits for
    /// the verdict, and has no deadline.
    pub fn make(&mut self, mine: std::result::Result<(), &Error>, wait: &Wait) -> Result<Made> {
        let made = self.make_by_verdict(mine, wait);
        if !matches!(made, Ok(Made::Broken)) {
            self.seated = None;
        }
        made
    }

    fn make_by_verdict(&mut self, mine: std::result::Result<(), &Error>, wait: &Wait) -> Result<Made> {
        let wait = self.watching(wait);
        let verdict = self.await_made(mine, &wait).map_err(|error| self.membership.explain(error))?;
        log::debug!("rank {}: the verdict on epoch {} is: {verdict}", self.me.rank, self.epoch_number);
        match verdict.as_str() {
            MADE => {
                self.clean_up(&wait);
                self.acknowledge("verdict", Status::Ok, &wait);
                Ok(Made::Whole)
            }
            BROKEN => Ok(Made::Broken),
            other => match other.strip_prefix(FAILED).and_then(Verdict::read) {
                Some(error) if self.is_in_mesh() => {
                    self.acknowledge("verdict", error.status, &wait);
                    error.into_result().map(|()| Made::Broken)
                }
                Some(_) => Ok(Made::Broken),
                None => Err(Error::store(format!(
                    "the store at {} gave an unreadable verdict under the key {}: it must give the values back as they were set",
                    self.membership.store.name(),
                    self.verdict_key()
                ))),
            },
        }
    }

    fn await_made(&self, mine: std::result::Result<(), &Error>, wait: &Wait) -> Result<String> {
        let in_mesh = self.epoch.in_mesh();
        if in_mesh.contains(&self.me) {
            // A rank whose part was not made in time has no time left, and the others must know.
            let soon = Recovery::soon(wait);
            if let Err(error) = mine {
                if let Some(verdict) = self.news_of_a_loss(&in_mesh, error, wait)? {
                    return Ok(verdict);
                }
                let error = Verdict::of_failure(self.me.rank, &format!("epoch {}", self.epoch_number), error);
                return self.settle(&failed(&error), &soon);
            }
            self.membership.put(self.made(self.me), b"1", &soon)?;
            self.membership.count(self.made_count(), 1, &soon)?;
        }
        let (store, losses) = (&self.membership.store, &self.membership.losses);
        loop {
            let soon = Recovery::soon(wait);
            let _ = losses.refresh(&soon);
            // The rank that was counted last may have died before it wrote the verdict.
            if self.counted(&self.made_count(), &soon)? >= in_mesh.len() {
                return self.settle(MADE, &soon);
            }
            if losses.any(|lost| in_mesh.contains(&lost)) {
                return self.settle(BROKEN, &soon);
            }
            if wait.deadline.passed() {
                return self.settle(&self.late(&in_mesh, wait, &soon)?, &soon);
            }
            let (number, lost) = losses.next();
            match any_of(&**store, &[&self.verdict_key(), &lost], wait) {
                Ok((0, value)) => return Ok(String::from_utf8_lossy(&value).into_owned()),
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout => {}
                Err(error) => return Err(error),
            }
            wait.cancel.check()?;
        }
    }

    /// Returns the verdict on the epoch where a lost rank of the mesh may be the reason for
    /// `error`, with which the making of the mesh has failed here. A communicator library may see a
    /// rank go some milliseconds before the store knows of it. Returns `None` when neither a loss
    /// nor a verdict is there within a moment.
    fn news_of_a_loss(&self, in_mesh: &BTreeSet<Incarnation>, error: &Error, wait: &Wait) -> Result<Option<String>> {
        if !matches!(error.status(), Status::Ccl | Status::PeerLost) {
            return Ok(None);
        }
        let Membership { store, losses, .. } = &self.membership;
        let soon = Wait { watch: None, ..wait.with_deadline(Deadline::after(NEWS_OF_A_LOSS)) };
        losses.look(&soon);
        loop {
            if losses.any(|lost| in_mesh.contains(&lost)) {
                return self.settle(BROKEN, &Recovery::soon(wait)).map(Some);
            }
            let (number, lost) = losses.next();
            match any_of(&**store, &[&self.verdict_key(), &lost], &soon) {
                Ok((0, value)) => return Ok(Some(String::from_utf8_lossy(&value).into_owned())),
                Ok((_, value)) => losses.note(number, &value),
                Err(error) if error.status() == Status::Timeout => return Ok(None),
                Err(error) => return Err(error),
            }
            wait.cancel.check()?;
        }
    }

    /// Makes this the verdict on the epoch unless the epoch has one already, and returns the
    /// verdict that the epoch has then.
    fn settle(&self, verdict: &str, wait: &Wait) -> Result<String> {
        let key = self.verdict_key();
        let stands = self.membership.store.set_once(&key, verdict.as_bytes(), wait)?;
        if stands == verdict.as_bytes() {
            self.membership.left.note_of_others([key]);
        }
        Ok(String::from_utf8_lossy(&stands).into_owned())
    }

    /// Returns the verdict that this rank's deadline has passed.
    fn late(&self, in_mesh: &BTreeSet<Incarnation>, wait: &Wait, soon: &Wait) -> Result<String> {
        let done = self.which_left(in_mesh.clone(), |process| self.made(process), soon)?;
        let missing: Vec<Incarnation> = in_mesh.difference(&done).copied().collect();
        let ranks = Recovery::ranks(&missing);
        let who = if ranks.is_empty() { "some rank (all were here)".to_owned() } else { ranges(&ranks) };
        let message = format!(
            "{who} did not make the mesh of epoch {} within {} ms",
            self.epoch_number,
            wait.deadline.timeout().as_millis()
        );
        Ok(failed(&Verdict::of(&Error::timeout(message).with_ranks(&ranks))))
    }

    /// Removes what this process has left in the turns up to this epoch, and in the epochs before.
    /// The decisions stand, and all ranks of the mesh have left the earlier calls, so nobody needs
    /// these keys any more. The first rank of the mesh also removes the keys that lost members
    /// have left.
    fn clean_up(&mut self, wait: &Wait) {
        let Recovery { membership, epoch, epoch_number, .. } = self;
        let mut keys = membership.left.take_under(&format!("{}/turn/", membership.losses.prefix()));
        keys.extend(membership.left.take_before_epoch(*epoch_number));
        let members = epoch.members();
        let (last, before) = std::mem::replace(&mut self.last_made, (*epoch_number, members));
        if self.epoch.in_mesh().first() == Some(&self.me) {
            let lost = self.membership.losses.all(|process| before.contains(&process));
            for number in last + 1..=self.epoch_number {
                keys.extend(["count", "options"].map(|name| self.turn_key(number, name)));
                keys.extend(lost.iter().map(|process| self.here(number, *process)));
            }
        }
        self.membership.store.forget(keys, wait);
    }

    /// Whether all ranks have made the mesh of this process's epoch. Where this process has not
    /// read the verdict, it asks the store.
    pub(super) fn was_made(&self, wait: &Wait) -> Result<bool> {
        if self.is_made() {
            return Ok(true);
        }
        let stands = self.membership.store.try_get(&self.verdict_key(), wait)?;
        Ok(stands.is_some_and(|verdict| verdict == MADE.as_bytes()))
    }

    pub(super) fn verdict_key(&self) -> String {
        format!("{}/verdict", self.decisions.key(self.epoch_number))
    }

    /// Returns the key that counts the processes that have made their part of the mesh.
    fn made_count(&self) -> String {
        self.turn_key(self.epoch_number, "made")
    }

    /// Returns the key of the note that a process has made its part of the mesh.
    fn made(&self, process: Incarnation) -> String {
        format!("{}/{process}", self.made_count())
    }
}

pub(super) const MADE: &str = "made";
const BROKEN: &str = "broken";
/// A verdict that is an error begins with this word. The text of the error follows.
const FAILED: &str = "failed\n";

fn failed(error: &Verdict) -> String {
    format!("{FAILED}{}", String::from_utf8_lossy(&error.encode()))
}
