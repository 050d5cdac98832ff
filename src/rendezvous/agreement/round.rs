//! One call of a scope: its place in the store, and which of its ranks are lost.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::cleanup::ScopeKeys;
use super::departures::{self, Departures};
use super::members::Members;
use super::verdict::{Reason, Verdict, split};
use crate::error::{Error, Result, Status};
use crate::rank_list::ranges;
use crate::recorder::{self, RecordedAgreement};
use crate::rendezvous::incarnation::{Incarnation, Tickets};
use crate::rendezvous::losses::Losses;
use crate::rendezvous::store::Store;
use crate::rendezvous::turns::{Turn, prefix_of_epoch};
use crate::wait::{Nearing, Wait};

/// The longest time that a rank waits for a request when it is aborted or its deadline has passed.
pub(super) const HURRIED: Duration = Duration::from_millis(50);

/// How long the store may take to answer a question about a call, even if the deadline passed long
/// ago.
pub(super) const LEAST_ASK: Duration = Duration::from_millis(200);

/// Returns how long after its deadline a rank may take to find out which ranks it missed.
pub(super) fn grace(wait: &Wait) -> Duration {
    LEAST_ASK.max(wait.deadline.timeout() / 20)
}

/// The ranks that agree, and their store. A scope shares it with its rounds.
pub(in crate::rendezvous) struct Membership {
    /// The store in which the ranks meet.
    pub(in crate::rendezvous) store: Arc<dyn Store>,
    /// The processes of the world that are known to be lost.
    pub(in crate::rendezvous) losses: Arc<Losses>,
    /// The ranks of the scope.
    pub(in crate::rendezvous) members: Members,
    /// Which process holds each of these ranks. Only the loss of that process is a loss of the
    /// rank.
    pub(in crate::rendezvous) tickets: Tickets,
    /// The number of the epoch to which the scope belongs.
    pub(in crate::rendezvous) epoch: u64,
    /// This rank's position among the members.
    pub(in crate::rendezvous) me: usize,
    /// Whether rank 0 of the world serves the store.
    pub(in crate::rendezvous) served: bool,
    /// Whether this rank serves the store.
    pub(in crate::rendezvous) serving: bool,
    /// The keys that this rank has left in the store for calls of this scope.
    pub(in crate::rendezvous) left: ScopeKeys,
    /// The world in the recording of this process.
    pub(in crate::rendezvous) record: recorder::World,
}

impl Membership {
    /// Returns the error that the caller gets. When rank 0 serves the store, an error of the store
    /// usually means that rank 0 was lost. The error of a full store does not.
    pub(super) fn explain(&self, error: Error) -> Error {
        let full = error.os_error() == libc::ENOSPC;
        if error.status() != Status::Store || full || !self.served || self.serving {
            return error;
        }
        self.losses.noticed(self.tickets.holder(0), "the store that it serves does not answer");
        Error::new(
            Status::PeerLost,
            format!("rank 0, which serves the store of this job, was lost: {}", error.message()),
        )
        .with_os_error(error.os_error())
        .with_lost(&[0])
    }

    /// Stores a value that only this rank writes, and notes that the key is to be removed.
    pub(super) fn put(&self, key: String, value: &[u8], wait: &Wait) -> Result<()> {
        let set = self.store.set(&key, value, wait);
        self.left.note([key]);
        set
    }

    /// Adds to a counter and returns the sum. The first rank to count removes the counter later.
    pub(super) fn count(&self, key: String, amount: i64, wait: &Wait) -> Result<i64> {
        let sum = self.store.add(&key, amount, wait)?;
        if sum == amount {
            self.left.note([key]);
        }
        Ok(sum)
    }

    /// Adds a lost process to the store's list of losses. Does nothing if the part of the list that
    /// this process has read names it. `me` is this process. When several ranks know of a loss, the
    /// rank whose name is the value of `key` adds it. If that rank is lost, too, another rank adds
    /// the process.
    pub(super) fn tell_loss(&self, process: Incarnation, me: Incarnation, key: String, wait: &Wait) -> Result<()> {
        if self.losses.any(|lost| lost == process) {
            return Ok(());
        }
        let mine = me.to_string();
        let teller = self.store.set_once(&key, mine.as_bytes(), wait)?;
        let is_mine = teller == mine.as_bytes();
        if is_mine {
            self.left.note([key]);
        }
        if is_mine || self.losses.any(|lost| lost.to_string().as_bytes() == teller) {
            self.losses.announce(process);
        }
        Ok(())
    }

    /// Returns the prefix of the keys of the scope's epoch.
    pub(super) fn prefix(&self) -> String {
        prefix_of_epoch(self.losses.prefix(), self.epoch)
    }

    /// Fails when this process has gone on to a later epoch than that of the scope. The ranks of
    /// the scope may be others by now, so no call of the scope goes on.
    pub(super) fn check_epoch(&self) -> Result<()> {
        let now = self.losses.turns().epoch();
        if now == self.epoch {
            return Ok(());
        }
        let message = format!(
            "this mesh belongs to epoch {}, and the job is in epoch {now}: use the mesh of epoch {now}",
            self.epoch
        );
        Err(Error::aborted(message))
    }

    /// Whether a process that holds a rank for which `is_missed` is true is known to be lost.
    pub(super) fn has_lost(&self, is_missed: impl Fn(i32) -> bool) -> bool {
        self.losses.any(|process| self.is_loss_of(process, &is_missed))
    }

    /// Returns the ranks whose processes are known to be lost and for which `is_missed` holds.
    pub(super) fn lost(&self, is_missed: impl Fn(i32) -> bool) -> BTreeSet<i32> {
        let lost = self.losses.all(|process| self.is_loss_of(process, &is_missed));
        lost.into_iter().map(|process| process.rank).collect()
    }

    /// Whether this is a rank of the scope, and not this rank itself.
    fn is_other(&self, rank: i32) -> bool {
        rank != self.members.rank(self.me) && self.members.position(rank).is_some()
    }

    /// Returns the other ranks of the scope that are known to be lost, in ascending order.
    pub(super) fn lost_others(&self) -> Vec<i32> {
        self.lost(|rank| self.is_other(rank)).into_iter().collect()
    }

    fn is_loss_of(&self, process: Incarnation, is_missed: impl Fn(i32) -> bool) -> bool {
        self.tickets.are_of(process) && is_missed(process.rank)
    }
}

/// One agreed call, in which its ranks exchange what they need.
pub struct Round {
    /// The ranks, and the store.
    pub(super) membership: Arc<Membership>,
    /// The keys of the call begin with this prefix.
    pub(super) prefix: String,
    /// The text of the call, for comparisons and messages.
    pub(super) call: String,
    /// The number of the call in its scope.
    pub(super) number: u64,
    /// How far this rank's search for deadlocks is.
    pub(super) search: Arc<SearchState>,
    /// Why this rank cannot take part in the call, if it cannot.
    pub(super) failure: Option<Error>,
    /// The things that this rank could share, in one line; `None` when the call shares nothing.
    pub(super) offers: Option<String>,
    /// The result on which the ranks have agreed beside the text: the places of the offers that all
    /// ranks share, or the ranks that are lost. The result is empty until the ranks have agreed.
    pub(super) shared: OnceLock<String>,
    /// Whether this rank may be behind the others in its scope. The scope shares it with its
    /// rounds ([`Scope::is_behind`](super::scope::Scope)).
    pub(super) is_behind: Arc<AtomicBool>,
    /// The ranks that have ended the mesh of the call; `None` where the call concerns no mesh.
    pub(super) departures: Option<Arc<Departures>>,
    /// The call in the recording of this process. A round in which this rank takes no part is not
    /// recorded.
    pub(super) recorded: RecordedAgreement,
}

/// How far the search for deadlocks of one rank in one call is.
#[derive(Default)]
pub(super) struct SearchState {
    /// How often this rank has looked so far.
    pub(super) number: AtomicU32,
    /// This rank's number in the order in which the ranks of the call left their notes; 0 while it
    /// has left none. The rank with number 1 searches.
    pub(super) turn: AtomicI64,
    /// How many ranks had left a note at the last search.
    pub(super) seen: AtomicI64,
    /// Whether the store has a note that says where this rank waits.
    pub(super) has_note: AtomicBool,
    /// How much of the call's time was used up when the log last said so.
    pub(super) nearing: Nearing,
}

impl Round {
    /// Does what [`Membership::put`] does.
    pub(super) fn put(&self, key: String, value: &[u8], wait: &Wait) -> Result<()> {
        self.membership.put(key, value, wait)
    }

    /// Does what [`Membership::count`] does.
    pub(super) fn count(&self, key: String, amount: i64, wait: &Wait) -> Result<i64> {
        self.membership.count(key, amount, wait)
    }

    /// Makes this the verdict of a phase unless the phase has one already, and returns the verdict
    /// that the phase has then. The rank that wrote the verdict removes it later.
    pub(super) fn decide(&self, phase: &str, verdict: &Verdict, wait: &Wait) -> Result<Verdict> {
        self.decide_at(self.key(phase, "verdict"), verdict, wait)
    }

    /// Does what [`Round::decide`] does, for the verdict under that key. The verdict may belong to
    /// a call of another scope.
    pub(super) fn decide_at(&self, key: String, verdict: &Verdict, wait: &Wait) -> Result<Verdict> {
        let mine = verdict.encode();
        let stands = self.membership.store.set_once(&key, &mine, wait)?;
        let verdict = self.verdict_in(&stands, &key);
        let is_own = key.strip_prefix(&self.prefix).is_some_and(|rest| rest.starts_with('/'));
        if stands == mine && is_own {
            self.membership.left.note([key]);
        } else if stands == mine {
            self.membership.left.note_of_others([key]);
        }
        Ok(verdict)
    }

    /// Decodes the verdict that the store has under that key.
    pub(super) fn verdict_in(&self, value: &[u8], key: &str) -> Verdict {
        Verdict::decode(value, key, self.membership.store.name())
    }

    /// Returns a copy for a watch or for another thread. The copy only reads and writes verdicts
    /// and notes, so it has no failure and no offers.
    pub(super) fn copy(&self) -> Round {
        Round {
            membership: Arc::clone(&self.membership),
            prefix: self.prefix.clone(),
            call: self.call.clone(),
            number: self.number,
            search: Arc::clone(&self.search),
            failure: None,
            offers: None,
            shared: OnceLock::new(),
            is_behind: Arc::clone(&self.is_behind),
            departures: self.departures.clone(),
            recorded: RecordedAgreement::none(),
        }
    }

    /// Returns the key under which the rank at that position leaves the text of its call.
    pub(super) fn here(&self, phase: &str, position: usize) -> String {
        self.key(phase, &format!("here/{position}"))
    }

    pub(super) fn my_rank(&self) -> i32 {
        self.membership.members.rank(self.membership.me)
    }

    /// Returns the full name of a key; `phase` is "", "/data" or "/end".
    pub(super) fn key(&self, phase: &str, name: &str) -> String {
        format!("{}{phase}/{name}", self.prefix)
    }

    /// Returns the key where a rank notes that its deadline has passed before there was a verdict.
    pub(super) fn stuck(&self, phase: &str, position: usize) -> String {
        self.key(phase, &format!("stuck/{position}"))
    }

    /// Whether a rank of the scope is known to be lost.
    pub(super) fn has_lost(&self) -> bool {
        self.membership.has_lost(|rank| self.is_other(rank))
    }

    /// Returns the ranks of the scope that are known to be lost, in ascending order.
    pub(super) fn lost(&self) -> Vec<i32> {
        self.membership.lost_others()
    }

    /// Returns the error of a call in which ranks were lost that had not come.
    pub(super) fn lost_before(&self, ranks: &[i32]) -> Error {
        self.lost_when("before it called", "before they called", ranks)
    }

    /// Returns the error of a call in which ranks were lost. `one` and `several` say when that was,
    /// for one rank and for several.
    pub(super) fn lost_when(&self, one: &str, several: &str, ranks: &[i32]) -> Error {
        let (when, why) = match ranks {
            [_] => (one, "its process ended, it freed or aborted its world, or its host fell silent"),
            _ => (several, "their processes ended, they freed or aborted their worlds, or their hosts fell silent"),
        };
        let was = if ranks.len() == 1 { "was" } else { "were" };
        let who = ranges(ranks);
        let message = format!("{who} {was} lost {when} {} as call {}: {why}", self.call, self.number);
        Error::new(Status::PeerLost, message).with_lost(ranks)
    }

    /// Returns the verdict that a rank has come to a turn whose decision this rank has not read, or
    /// `None` when no such rank is known. All ranks leave their calls then, because the turn waits
    /// for every rank of the mesh.
    pub(super) fn turn(&self) -> Option<Verdict> {
        let turn = self.membership.losses.turns().next()?;
        let Turn { number, by } = turn;
        let message = format!("{} as call {} has ended, because {}", self.call, self.number, turn.reason());
        Some(Verdict::of_turn(number, &Error::new(Status::PeerLost, message).with_ranks(&[by])))
    }

    /// Whether the verdict is that a rank has come to a turn whose decision this rank has read.
    /// This rank was not in the call when the turn began.
    pub(super) fn is_of_past_turn(&self, verdict: &Verdict) -> bool {
        matches!(verdict.reason, Reason::Turn { number } if self.membership.losses.turns().has_passed(number))
    }

    /// Returns the verdict that other ranks of the scope have ended the mesh of the call, or `None`
    /// when no such rank is known.
    pub(super) fn departure(&self) -> Option<Verdict> {
        let departures = self.departures.as_ref()?;
        let gone = departures.all(|rank| self.is_other(rank));
        self.of_departed(departures.mesh(), &self.call, &gone)
    }

    /// Returns the verdict that ranks of the scope have ended the mesh of this rank's call or that
    /// of the first rank's call, where the two calls concern different meshes. The rank that has
    /// ended a mesh makes its next call under a number that others use for a call on that mesh. The
    /// note of the end was written before that next call. Returns `None` when both meshes are
    /// whole.
    pub(super) fn departure_between(&self, theirs: &str, their_mesh: &str, wait: &Wait) -> Result<Option<Verdict>> {
        if let Some(departures) = &self.departures {
            departures.catch_up(wait)?;
            if let Some(departure) = self.departure() {
                return Ok(Some(departure));
            }
        }
        if their_mesh.is_empty() {
            return Ok(None);
        }
        let members = &self.membership.members;
        let mut gone = departures::read(&*self.membership.store, their_mesh, wait)?;
        gone.retain(|rank| *rank != members.rank(0) && members.position(*rank).is_some());
        gone.sort_unstable();
        gone.dedup();
        Ok(self.of_departed(their_mesh, split(theirs).0, &gone))
    }

    /// Makes the verdict that the ranks `gone` have ended the mesh of that name, which `call`
    /// concerns; `None` when there are no such ranks.
    fn of_departed(&self, mesh: &str, call: &str, gone: &[i32]) -> Option<Verdict> {
        let (have, them) = match gone {
            [] => return None,
            [_] => ("has", "that rank"),
            _ => ("have", "these ranks"),
        };
        let (who, number) = (ranges(gone), self.number);
        let message = format!(
            "{who} {have} ended the mesh by dm_abort, dm_recover or dm_shrink, and {call} as call {number} needs {them}"
        );
        Some(Verdict::of_departure(mesh, &Error::new(Status::PeerLost, message).with_ranks(gone)))
    }

    /// Returns the name of the mesh that the call concerns; "" where it concerns no mesh.
    pub(super) fn mesh(&self) -> &str {
        self.departures.as_ref().map_or("", |departures| departures.mesh())
    }

    /// Makes the verdict that this rank has failed with `error`. A communicator may tell this rank
    /// that others have ended the mesh before their note does. Where this rank has ended the mesh
    /// itself, `error` names this rank alone.
    pub(super) fn of_failure(&self, phase: &str, error: &Error) -> Verdict {
        let verdict = Verdict::of_failure(self.my_rank(), &self.call, error);
        let is_by_abort = phase.is_empty() && error.status() == Status::PeerLost && error.lost().is_empty();
        let Some(departures) = self.departures.as_ref().filter(|_| is_by_abort) else { return verdict };
        match error.ranks() {
            [rank] if *rank == self.my_rank() => verdict.of_abort(departures.mesh()),
            ranks if ranks.iter().any(|rank| self.is_other(*rank)) => verdict.after_departure(departures.mesh()),
            _ => verdict,
        }
    }

    /// Whether the verdict is that ranks have ended the mesh of another call than this one, and
    /// this rank passes over that other call. If a rank ended the mesh while it was in the other
    /// call, only a rank that has ended that mesh itself passes over the call.
    pub(super) fn is_of_another_mesh(&self, verdict: &Verdict, wait: &Wait) -> bool {
        match &verdict.reason {
            Reason::Departed { mesh } => mesh != self.mesh(),
            Reason::Aborted { mesh } if mesh != self.mesh() => {
                let wait = wait.with_deadline(wait.deadline.at_least(LEAST_ASK));
                // This rank's own note was written before this call began.
                departures::read(&*self.membership.store, mesh, &wait)
                    .is_ok_and(|ended| ended.contains(&self.my_rank()))
            }
            _ => false,
        }
    }

    /// Whether this is a rank of the scope, and not this rank itself.
    pub(super) fn is_other(&self, rank: i32) -> bool {
        self.membership.is_other(rank)
    }
}
