//! A turn: the ranks come, and wait until its decision stands.
//!
//! The first rank of the mesh that comes tells all others, by a note in the list of losses. Then
//! the calls in which the other ranks wait end, and the other ranks come, too.
//!
//! A rank leaves a note that it is here, and counts itself in. Then the rank looks whether every
//! rank of the mesh is here or known to be lost. If not, the rank waits for the decision, the next
//! loss or the next newcomer. The event that completes the ranks is a loss, a newcomer, or the
//! arrival of a rank. A loss or a newcomer wakes all waiting ranks, and an arriving rank looks
//! after it has counted itself in. So some rank always finds that the ranks are complete, and
//! proposes.
//!
//! Only a rank of the mesh has a deadline. Spares and benched ranks wait until they get a seat in a
//! mesh that is made, or until the job has ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Recovery;
use super::options::Options;
use super::slow::SlowTurn;
use crate::error::{Result, Status};
use crate::rendezvous::agreement::decision::{Decision, Failure, Why};
use crate::rendezvous::agreement::proposal::{Passed, Seen, Terms, absent};
use crate::rendezvous::agreement::suspects::SUSPECTED;
use crate::rendezvous::incarnation::Incarnation;
use crate::rendezvous::store::any_of;
use crate::rendezvous::turns::Turn;
use crate::wait::{Deadline, Wait};

/// How long a waiting rank leaves it to the first rank to tell the others of the turn. After that
/// time the waiting rank tells them itself.
const UNTOLD: Duration = Duration::from_millis(250);

/// The shortest time for which a rank that waits for nobody of the mesh waits for benched ranks
/// that live. A benched rank comes to a turn by itself, a moment after the verdict on the epoch
/// before, and looks at the turn when it comes. So the waiting ranks need not be woken for it.
const BENCHED: Duration = Duration::from_millis(100);

/// The arguments with which a rank comes to a turn.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// The text of the call, which must be equal on all ranks of the mesh.
    pub call: &'a str,
    /// The terms that the call asks for. These terms must be equal on all ranks of the mesh. Where
    /// this rank is not in the mesh, the terms of the mesh count.
    pub terms: &'a Terms,
    /// Whether this rank has the state of the training. A rank of the mesh that has never joined
    /// has it anyway.
    pub has_state: bool,
    /// The ranks that are lost for certain, as far as this rank knows by other means than the
    /// store: for example, their processes have ended.
    pub lost: &'a [i32],
    /// The ranks that this rank takes for lost because a communicator blames them. A suspected
    /// rank that comes is not lost.
    pub suspects: &'a [i32],
}

/// How a turn has ended for this process, when it has not failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The process is a member of a new epoch, whose mesh must be made.
    Epoch,
    /// The job has ended.
    Ended,
    /// This process is not in the mesh and waits, and another rank has made a call of the world
    /// for which this process is needed.
    Called,
}

/// How long a rank has waited in one turn.
struct Waited {
    /// When the rank came.
    came: Instant,
    /// Since when nobody is waited for, and how long the rank waits from then on for processes that
    /// could take the empty seats.
    complete: Option<(Instant, Duration)>,
    /// Since when only suspected ranks are waited for.
    suspected: Option<Instant>,
}

impl Waited {
    /// Returns how long the rank can sleep when nothing happens. `suspects` says whether the rank
    /// suspects anybody. Such a rank looks now and then, because ranks that come do not wake it.
    fn nap(&self, silent: Option<Duration>, suspects: bool) -> Duration {
        let left = |(since, time): (Instant, Duration)| time.saturating_sub(since.elapsed());
        if let Some(complete) = self.complete {
            return left(complete);
        }
        let silent = silent.map(|time| (self.came, time));
        let suspected = suspects.then(|| (self.suspected.unwrap_or_else(Instant::now), SUSPECTED));
        [silent, suspected].into_iter().flatten().map(left).min().unwrap_or(Duration::MAX)
    }
}

impl Recovery {
    /// Comes to the next turn, and returns when its decision stands and is an epoch that names this
    /// process, or the end of the job. On a process that is not in the mesh it also returns, with
    /// [`Outcome::Called`], when another rank makes a call of the world for which this process is
    /// needed (`watch_call`). **Collective over the ranks of the mesh**; spares and benched ranks
    /// come, too. A failure is an error, equal on all ranks of the mesh. After a failure, a rank
    /// that is not in the mesh goes on to the next turn, unless the job is over. Fails with
    /// `DM_STATUS_NOT_MEMBER` when the others have gone on without this process.
    pub fn come(&mut self, arrival: &Arrival<'_>, wait: &Wait) -> Result<Outcome> {
        let outcome = self.come_to_turn(arrival, wait);
        if outcome.is_err() {
            self.seated = None;
        }
        outcome
    }

    fn come_to_turn(&mut self, arrival: &Arrival<'_>, of_caller: &Wait) -> Result<Outcome> {
        self.refusals = 0;
        if let Some(number) = self.fenced_since {
            return Err(self.fence(number));
        }
        if std::mem::take(&mut self.awaits_verdict) {
            self.make(Ok(()), of_caller)?;
        }
        loop {
            let (number, is_in_mesh) = (self.number + 1, self.is_in_mesh());
            let wait = self.watching(of_caller);
            let decision = self.decisions.read(number, &wait).and_then(|stands| match stands {
                Some(decision) => Ok(Some(decision)),
                None => self.reach(number, arrival, &wait),
            });
            let Some(decision) = decision.map_err(|error| self.membership.explain(error))? else {
                return Ok(Outcome::Called);
            };
            log::debug!("rank {}: decision {number} is: {decision}", self.me.rank);
            self.pass(number);
            match decision {
                Decision::Epoch(epoch) if epoch.members().contains(&self.me) => {
                    (self.epoch_number, self.epoch) = (number, epoch);
                    if !is_in_mesh && self.is_in_mesh() {
                        self.seated = Some(Deadline::after(of_caller.deadline.timeout()));
                    }
                    return Ok(Outcome::Epoch);
                }
                Decision::Epoch(_) => return Err(self.fence(number)),
                Decision::End => {
                    self.acknowledge_end(of_caller.deadline.timeout(), &wait);
                    return Ok(Outcome::Ended);
                }
                Decision::Failure(failure) if is_in_mesh || failure.why == Why::NoState => {
                    let error = failure.error();
                    self.acknowledge("decision", error.status(), &wait);
                    return Err(error);
                }
                Decision::Failure(_) => {}
            }
        }
    }

    /// Takes part in the turn of that number, and returns the decision that stands then; `None`
    /// where this process is needed in a call of the world.
    fn reach(&mut self, number: u64, arrival: &Arrival<'_>, wait: &Wait) -> Result<Option<Decision>> {
        if let Some(mismatch) = self.compare(number, arrival, wait)? {
            self.tell_turn(number, wait)?;
            return self.decide(number, &mismatch, wait).map(Some);
        }
        // Where the store does not answer, this rank may tell of losses that are known already.
        let _ = self.membership.losses.refresh(wait);
        self.tell(number, arrival.lost, wait)?;
        let note = if arrival.has_state || self.is_stateful() { b"1" } else { b"0" };
        self.membership.put(self.here(number, self.me), note, wait)?;
        self.membership.count(self.turn_key(number, "count"), 1, wait)?;
        let mut waited = Waited { came: Instant::now(), complete: None, suspected: None };
        let mut slow = SlowTurn::begin();
        loop {
            if let Some(decision) = self.look(number, arrival, &mut waited, wait)? {
                return Ok(Some(decision));
            }
            slow.look(self, number, arrival.call, wait);
            let (next, lost) = self.membership.losses.next();
            let keys = [self.decisions.key(number), lost, self.next_at_door()];
            // The calls of the world end with the turn, and need nobody any more.
            let is_needed = !self.is_in_mesh() && !self.membership.losses.turns().is_begun(number);
            let called = if is_needed { self.call_of_world.as_slice() } else { &[] };
            let keys: Vec<&str> = keys.iter().chain(called).map(String::as_str).collect();
            let silent = arrival.terms.silent.filter(|_| self.is_in_mesh());
            let nap = waited.nap(silent, !arrival.suspects.is_empty()).min(wait.deadline.left());
            let nap = if self.is_to_tell(number) { nap.min(UNTOLD) } else { nap };
            let nap = Deadline::after(nap.min(slow.nap(self)));
            match any_of(&*self.membership.store, &keys, &wait.with_deadline(nap)) {
                Ok((0, value)) => return self.decisions.decode(number, &value).map(Some),
                Ok((1, value)) => self.membership.losses.note(next, &value),
                Ok((2, value)) => self.note_at_door(&value),
                Ok(_) => return Ok(None),
                Err(error) if error.status() == Status::Timeout => {}
                Err(error) => return Err(error),
            }
            wait.cancel.check()?;
        }
    }

    /// Compares this rank's call with that of the first rank of the mesh that came. Returns the
    /// failure that they differ, if they do. A rank that is not in the mesh demands nothing, and
    /// neither does a newcomer in its dm_init.
    fn compare(&self, number: u64, arrival: &Arrival<'_>, wait: &Wait) -> Result<Option<Decision>> {
        if !self.is_in_mesh() || self.adopted.is_some() {
            return Ok(None);
        }
        let key = self.options_key(number);
        let mine = Options {
            rank: self.me.rank,
            terms: arrival.terms.clone(),
            mesh: self.mesh.clone().unwrap_or_default(),
            call: arrival.call.to_owned(),
        };
        let stands = self.membership.store.set_once(&key, mine.to_string().as_bytes(), wait)?;
        let theirs = self.read_options(&key, &stands)?;
        if theirs == mine {
            self.membership.left.note([key]);
            self.membership.losses.announce_turn(Turn { number, by: self.me.rank }, wait)?;
        }
        Ok(mine
            .mismatch(&theirs, self.epoch_number == 0)
            .map(|error| Decision::Failure(Failure::new(Why::Mismatch, &error))))
    }

    /// Whether this rank may have to tell the others that it has come to that turn, because it
    /// knows of no other rank that has come. A rank that is not in the mesh begins no turn.
    fn is_to_tell(&self, number: u64) -> bool {
        self.is_in_mesh() && !self.membership.losses.turns().is_begun(number)
    }

    /// Tells the ranks that have not come to that turn of it, where nobody has told them: the
    /// first rank that came may have died or hung before it told them. It does no harm when two
    /// ranks tell them.
    fn tell_turn(&self, number: u64, wait: &Wait) -> Result<()> {
        if !self.is_to_tell(number) {
            return Ok(());
        }
        let _ = self.membership.losses.refresh(wait);
        match self.is_to_tell(number) {
            true => self.membership.losses.announce_turn(Turn { number, by: self.me.rank }, wait),
            false => Ok(()),
        }
    }

    /// Adds these ranks to the list of lost processes, where the list does not have them.
    fn tell(&self, number: u64, ranks: &[i32], wait: &Wait) -> Result<()> {
        let is_told = |process: &Incarnation| *process != self.me && ranks.contains(&process.rank);
        self.epoch.members().into_iter().filter(is_told).try_for_each(|process| {
            let key = self.turn_key(number, &format!("tells/{process}"));
            self.membership.tell_loss(process, self.me, key, wait)
        })
    }

    /// Looks at the turn. Returns the decision once the store has it; `None` while the rank has to
    /// wait.
    fn look(
        &mut self,
        number: u64,
        arrival: &Arrival<'_>,
        waited: &mut Waited,
        wait: &Wait,
    ) -> Result<Option<Decision>> {
        let soon = Recovery::soon(wait);
        let losses = Arc::clone(&self.membership.losses);
        // An error does not matter: if notes are left unread, the next wait returns at once, and
        // this rank reads again.
        let _ = losses.refresh(&soon);
        self.tell(number, arrival.lost, &soon)?;
        if waited.came.elapsed() >= UNTOLD {
            self.tell_turn(number, &soon)?;
        }
        self.read_door(&soon)?;
        if losses.any(|lost| lost == self.me) {
            let stands = self.decisions.read(number, &soon)?;
            return stands.map_or_else(|| Err(self.fence(number)), |decision| Ok(Some(decision)));
        }
        let has_terms = self.is_in_mesh();
        let mut passed = Passed {
            deadline: (has_terms && wait.deadline.passed()).then(|| wait.deadline.timeout()),
            silent: has_terms && arrival.terms.silent.is_some_and(|time| waited.came.elapsed() >= time),
            replace: false,
        };
        if !has_terms {
            self.knock_again(number, &soon)?;
        }
        let gives_up = passed.deadline.is_some() || passed.silent || !arrival.suspects.is_empty();
        if !gives_up && !self.may_be_complete(number, &soon)? {
            return Ok(None);
        }
        let here = self.members_here(number, &soon)?;
        let absent = absent(&self.epoch, &here, &losses.all(|_| true));
        if !absent.is_empty() && passed.deadline.is_none() {
            let was_told = self.give_up_suspects(number, &absent, arrival.suspects, waited, &soon)?;
            // The list of losses wakes this rank when suspected ranks were added to it.
            if was_told || !passed.silent {
                return Ok(None);
            }
        }
        let terms = match has_terms && self.adopted.is_none() {
            true => arrival.terms.clone(),
            false => self.terms_of_mesh(number, arrival, &soon)?,
        };
        if absent.is_empty() {
            let benched =
                self.epoch.holders().any(|holder| !here.contains(&holder) && !losses.any(|lost| lost == holder));
            let patience = if benched { terms.replace.max(BENCHED) } else { terms.replace };
            let (since, _) =
                *waited.complete.insert((waited.complete.map_or_else(Instant::now, |(since, _)| since), patience));
            passed.replace = since.elapsed() >= patience;
            // Ranks that are lost together, for example all ranks of a host, are left out together.
            losses.wait_until_quiet(&soon);
        }
        let (stateful, lost) = (self.who_has_state(number, &here, &soon)?, losses.all(|_| true));
        let (door, is_made) = (self.knocks(), self.was_made(&soon)?);
        let seen = Seen {
            epoch: &self.epoch,
            is_made,
            here: &here,
            stateful: &stateful,
            lost: &lost,
            door: &door,
            notes: self.read_at_door,
            terms: &terms,
            passed,
        };
        let Some(proposal) = seen.decision() else { return Ok(None) };
        // The others must learn of the turn, because this rank has ended its part of the mesh,
        // whatever is decided.
        self.tell_turn(number, &soon)?;
        self.explain_refusals(&proposal, &soon)?;
        self.decide(number, &proposal, &soon).map(Some)
    }

    /// Whether enough processes were counted that every rank of the mesh may be here or lost. Most
    /// ranks find that they are too few, and need not look at the notes of all others.
    fn may_be_complete(&self, number: u64, wait: &Wait) -> Result<bool> {
        let in_mesh = self.epoch.in_mesh();
        let came = self.counted(&self.turn_key(number, "count"), wait)?;
        let lost = self.membership.losses.all(|process| in_mesh.contains(&process)).len();
        Ok(came + lost >= in_mesh.len())
    }

    /// Returns which of the processes that are here have the state of the training. Only the notes
    /// of the processes for which this is not certain are read.
    fn who_has_state(&self, number: u64, here: &BTreeSet<Incarnation>, wait: &Wait) -> Result<BTreeSet<Incarnation>> {
        let in_mesh = self.epoch.in_mesh();
        let mut stateful = BTreeSet::new();
        for process in here {
            let is_certain = in_mesh.contains(process) && !self.epoch.stateless.contains(process);
            let note = || self.membership.store.try_get(&self.here(number, *process), wait);
            if is_certain || note()?.is_some_and(|note| note == b"1") {
                stateful.insert(*process);
            }
        }
        Ok(stateful)
    }

    /// Returns the terms of the ranks of the mesh, for a rank that is not in the mesh and for a
    /// newcomer in its dm_init. While no rank of the mesh has come, returns the terms of this
    /// rank.
    fn terms_of_mesh(&self, number: u64, arrival: &Arrival<'_>, wait: &Wait) -> Result<Terms> {
        let key = self.options_key(number);
        match self.membership.store.try_get(&key, wait)? {
            Some(value) => Ok(self.adopt_options(&self.epoch, &key, &value)?.terms),
            None => Ok(arrival.terms.clone()),
        }
    }

    /// Adds suspected ranks to the list of lost processes when only suspected ranks have been
    /// absent for a second. Returns whether it has done so.
    fn give_up_suspects(
        &self,
        number: u64,
        absent: &[Incarnation],
        suspects: &[i32],
        waited: &mut Waited,
        wait: &Wait,
    ) -> Result<bool> {
        if !absent.iter().all(|process| suspects.contains(&process.rank)) {
            waited.suspected = None;
            return Ok(false);
        }
        if waited.suspected.get_or_insert_with(Instant::now).elapsed() < SUSPECTED {
            return Ok(false);
        }
        // Where another rank is to tell of the suspected ranks, this rank looks again a second
        // later.
        waited.suspected = Some(Instant::now());
        self.tell(number, &Recovery::ranks(absent), wait)?;
        Ok(true)
    }
}
