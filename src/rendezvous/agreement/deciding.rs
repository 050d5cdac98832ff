//! Reaches one verdict: a rank arrives, compares, counts itself in, and waits for the verdict.

use std::time::{Duration, Instant};

use super::comparing::DISSENT;
use super::missing::FIRST_AT_DEADLINE;
use super::round::{LEAST_ASK, Round, grace};
use super::sharing::offered;
use super::suspects::TakenForLost;
use super::verdict::{Reason, Verdict, function_of, split_mesh, with_mesh};
use super::waiting::Found;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::{Arrival, Count, Last};
use crate::wait::{Deadline, Wait};

/// The way in which a rank takes part in a phase of a call.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    /// The rank counts itself in. A text, if there is one, must be equal on all ranks.
    Equal(Option<&'a str>),
    /// The rank agrees with the other ranks on who is lost. The value holds the ranks that this
    /// rank takes for lost.
    Survivors(TakenForLost<'a>),
    /// The rank has announced its call already (order.rs). The verdict under this key, if there is
    /// one, serves as well.
    Announced(Option<&'a str>),
}

/// How a phase of a call has ended on this rank, when it has not failed.
pub(super) enum Settled {
    /// All ranks have agreed.
    Agreed,
    /// This rank passes over the call of that number, and takes the next number. There are four
    /// possible reasons:
    /// - Another rank refused a call of another function under this number.
    /// - The call is in a deadlock, and this rank's caller was told of it in another call of the
    ///   ring.
    /// - The call is on another mesh, which a rank has ended by dm_abort.
    /// - The call ended because of a turn that this rank has left since.
    PassedOver,
}

impl Round {
    /// Reaches the verdict under `<prefix><phase>/`.
    pub(super) fn reach_verdict(&self, phase: &str, part: Part<'_>, wait: &Wait) -> Result<Settled> {
        let began = Instant::now();
        let settled = self.seek_verdict(phase, part, wait);
        if log::log_enabled!(log::Level::Debug) {
            let outcome = match (&settled, phase) {
                (Ok(Settled::Agreed), "/end") => "is done on all ranks",
                (Ok(Settled::Agreed), _) => "is agreed",
                (Ok(Settled::PassedOver), _) => "is no call of this rank",
                (Err(_), _) => "has failed",
            };
            let millis = began.elapsed().as_secs_f64() * 1e3;
            log::debug!("rank {}: call {} {outcome} after {millis:.1} ms: {}", self.my_rank(), self.number, self.call);
        }
        if let Err(error) = &settled {
            let membership = &self.membership;
            membership.losses.warn_of(error.lost().iter().map(|rank| membership.tickets.holder(*rank)));
        }
        settled.map_err(|error| error.in_call(self.number).after_waiting(began.elapsed()))
    }

    fn seek_verdict(&self, phase: &str, part: Part<'_>, wait: &Wait) -> Result<Settled> {
        // Thousands of ranks may pass their deadlines at the same moment. Only the first ranks look
        // for the missing ones then, and the others wait a little longer for the verdict.
        let patience = if self.membership.me < FIRST_AT_DEADLINE { Duration::ZERO } else { grace(wait) / 2 };
        // The rank that serves the store may end its process when this function returns, so that
        // rank stays until the others have read the final verdict.
        let with_server = self.membership.served && self.membership.members.position(0).is_some();
        let patient = wait.with_deadline(wait.deadline.extended(patience));
        let arrived = match part {
            Part::Equal(text) => self.arrive(phase, text, &patient),
            Part::Survivors(known) => self.await_survivors(phase, known, &patient),
            Part::Announced(last) => self.await_announced(last, phase, &patient),
        };
        let seeks_survivors = matches!(part, Part::Survivors(_));
        let arrived = arrived.or_else(|error| match seeks_survivors {
            true => Err(error),
            false => self.news_of_a_loss(phase, &error, wait).ok_or(error),
        });
        let verdict = match arrived {
            Ok(verdict) => verdict,
            // A timeout before this deadline comes from a watch, which has another deadline. Such
            // a timeout is handled below.
            Err(error) if error.status() == Status::Timeout && self.failure.is_none() && wait.deadline.passed() => {
                self.after_deadline(phase, wait, error).map_err(|error| self.membership.explain(error))?
            }
            // The others take this rank for lost, or learn that it is lost, and go on without it.
            Err(error) if seeks_survivors && matches!(error.status(), Status::Aborted | Status::NotMember) => {
                return Err(error);
            }
            Err(error) => {
                // The others learn now that this rank has left, and why, and need not wait for
                // their deadlines.
                let verdict = match (error.status(), &self.failure) {
                    (Status::Aborted, _) => {
                        Error::new(Status::PeerLost, "it was aborted there").with_ranks(&[self.my_rank()])
                    }
                    (Status::Timeout, Some(failure)) => failure.clone(),
                    _ => error.clone(),
                };
                let verdict = self.of_failure(phase, &verdict);
                // Another verdict may stand already, and then the rank that serves the store waits
                // until this rank has read that verdict.
                let reads = with_server && !self.membership.serving;
                self.publish_verdict(phase, &verdict, Duration::from_millis(250), wait, reads);
                return Err(self.membership.explain(error));
            }
        };
        let is_of_another = verdict.is_of_another(function_of(&self.call))
            || self.is_of_past_turn(&verdict)
            || self.is_of_another_mesh(&verdict, wait);
        if phase.is_empty() && (is_of_another || self.was_told_before(&verdict)) {
            return Ok(Settled::PassedOver);
        }
        if verdict.status == Status::Ok && phase.is_empty() {
            let _ = self.shared.set(verdict.note().to_owned());
        }
        // After a turn the rank that serves stays in the recovery, for which all others wait.
        let is_turn = matches!(verdict.reason, Reason::Turn { .. });
        if with_server && !is_turn && (phase == "/end" || verdict.status != Status::Ok || seeks_survivors) {
            self.acknowledge(phase, &verdict, wait);
        }
        self.told(phase, verdict, wait).into_result().map(|()| Settled::Agreed)
    }

    /// Leaves a note that this rank is here, compares, counts itself in, and waits for the verdict.
    fn arrive(&self, phase: &str, text: Option<&str>, wait: &Wait) -> Result<Verdict> {
        let (first, my_mesh) = (self.here(phase, 0), self.mesh());
        let note = text.map_or_else(|| "done".to_owned(), |text| with_mesh(text, my_mesh));
        if text.is_some() {
            // Where the calls differ because this rank has ended a mesh, the others must find the
            // note that says so.
            self.membership.left.await_written(wait);
        }
        let here = self.here(phase, self.membership.me);
        self.membership.left.note([here.clone()]);
        let mut note = Some((here.as_str(), note.as_bytes()));
        let mut of_first = text.map(str::to_owned);
        if let Some(mine) = text.filter(|_| self.membership.me > 0) {
            let arrival = Arrival { note: note.take(), count: None };
            match self.arrive_and_await(&arrival, &mut |_| Ok(()), Some(&first), phase, wait)? {
                Found::Verdict(verdict) => return Ok(verdict),
                Found::Value(theirs) => {
                    let (theirs, their_mesh) = split_mesh(&theirs);
                    if their_mesh != my_mesh {
                        if let Some(departure) = self.departure_between(&theirs, &their_mesh, wait)? {
                            return self.decide(phase, &departure, wait);
                        }
                    }
                    if !self.is_like(mine, &theirs) {
                        return self.dissent(phase, mine, &theirs, wait);
                    }
                    self.object(phase, &theirs, wait)?;
                    of_first = Some(theirs);
                }
            }
        }
        self.count_in(phase, note, of_first.as_deref(), wait)
    }

    /// Stores the note, counts this rank in, and waits for the verdict. The last rank to be counted
    /// makes the verdict. Where the first rank offers nothing in its text, the verdict is known
    /// beforehand, so the store itself can write it.
    fn count_in(
        &self,
        phase: &str,
        note: Option<(&str, &[u8])>,
        of_first: Option<&str>,
        wait: &Wait,
    ) -> Result<Verdict> {
        let offers = of_first.filter(|text| self.offers.is_some() && offered(text).next().is_some());
        let ranks = self.membership.members.len() as i64;
        let (counter, key) = (self.key(phase, "count"), self.key(phase, "verdict"));
        let agreed = Verdict::agreed_on(String::new()).encode();
        let last = offers.is_none().then_some(Last { sum: ranks, key: &key, value: &agreed });
        let mut is_last = false;
        let mut counted = |sum: i64| {
            if sum == 1 {
                self.membership.left.note([counter.clone()]);
            }
            is_last = sum == ranks;
            if is_last && last.is_some() {
                self.membership.left.note([key.clone()]);
            }
            if sum > DISSENT && sum % DISSENT == ranks { self.put(self.key(phase, "all"), b"1", wait) } else { Ok(()) }
        };
        let arrival = Arrival { note, count: Some(Count { counter: &counter, amount: 1, last }) };
        let Some(offers) = offers else {
            return self.arrive_and_await_verdict(&arrival, &mut counted, phase, wait);
        };
        self.membership.store.arrive(&arrival, &[], &mut counted, wait)?;
        if is_last {
            let verdict = Verdict::agreed_on(self.what_is_shared(offers, phase, wait)?);
            return self.decide(phase, &verdict, wait);
        }
        self.await_verdict(phase, wait)
    }

    /// Returns, after the deadline has passed, the verdict that stands, or one that names the
    /// missing ranks.
    fn after_deadline(&self, phase: &str, wait: &Wait, error: Error) -> Result<Verdict> {
        let timeout = wait.deadline.timeout();
        let grace = grace(wait);
        let (store, verdict_key) = (&self.membership.store, self.key(phase, "verdict"));
        let mut until = wait.deadline.extended(grace);
        // The deadline may have passed long ago, in an earlier part of the call or while this
        // process was stopped. The store may have the verdict all the same, so it gets some time to
        // answer.
        if until.left() < LEAST_ASK {
            until = Deadline::after(LEAST_ASK);
        }
        let whole = Wait { watch: None, ..wait.with_deadline(until) };
        let _ = self.put(self.stuck(phase, self.membership.me), b"1", &whole);
        // The first rank to pass its deadline looks for the missing ones, because there may be
        // thousands.
        if self.count(self.key(phase, "late"), 1, &whole).is_ok_and(|number| number > 1) {
            let half = whole.with_deadline(Deadline::after(whole.deadline.left().min(grace / 2)));
            if let Ok(stands) = store.get(&verdict_key, &half) {
                return Ok(self.verdict_in(&stands, &verdict_key));
            }
        }
        let found = match self.late_dissent(phase, &whole) {
            Some(mismatch) => Ok(mismatch),
            None => self.name_missing(phase, timeout, &error, &whole),
        };
        let verdict = match found {
            Ok(verdict) => verdict,
            Err(why) => {
                let served = if self.membership.served { ", which rank 0 serves," } else { "" };
                let why = if why.status() == Status::Timeout {
                    format!("gives no answer: {}", error.message())
                } else {
                    format!("fails: {}", why.message())
                };
                return Err(Error::timeout(format!(
                    "{} as call {} did not end within {} ms, and the store at {}{served} {why}",
                    self.call,
                    self.number,
                    timeout.as_millis(),
                    store.name(),
                )));
            }
        };
        Ok(self.decide(phase, &verdict, &whole).unwrap_or(verdict))
    }
}
