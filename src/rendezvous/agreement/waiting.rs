//! Waits inside a call. Such a wait ends when a value or the verdict is there, or when a rank of
//! the scope is lost.

use std::sync::Arc;
use std::time::Duration;

use super::deadlock::DeadlockSearch;
use super::round::Round;
use super::verdict::Verdict;
use crate::error::{Error, Result, Status};
use crate::rendezvous::store::{Arrival, any_of, arrive_for_any};
use crate::wait::{Deadline, Wait, Watch};

/// How long a rank whose communicator library has failed waits for the news that another rank is
/// lost. The library may see a connection or memory of that rank go some milliseconds before the
/// store knows of the loss.
pub(super) const NEWS_OF_A_LOSS: Duration = Duration::from_millis(100);

/// The thing that a wait inside a call has found.
pub(super) enum Found {
    Value(Vec<u8>),
    Verdict(Verdict),
}

impl Round {
    pub(super) fn await_verdict(&self, phase: &str, wait: &Wait) -> Result<Verdict> {
        self.arrive_and_await_verdict(&Arrival::default(), &mut |_| Ok(()), phase, wait)
    }

    /// Does what [`Round::await_verdict`] does, after this rank has arrived.
    pub(super) fn arrive_and_await_verdict(
        &self,
        arrival: &Arrival<'_>,
        counted: &mut dyn FnMut(i64) -> Result<()>,
        phase: &str,
        wait: &Wait,
    ) -> Result<Verdict> {
        match self.arrive_and_await(arrival, counted, None, phase, wait)? {
            Found::Verdict(verdict) => Ok(verdict),
            Found::Value(_) => Err(Error::internal("a value that nobody asked for")),
        }
    }

    /// Waits for a key (if any) or the verdict of the phase. When a rank of the scope is lost, or
    /// has ended the mesh of the call, or when a recovery has begun, this event becomes the
    /// verdict, unless the key or a verdict is there already.
    pub(super) fn await_value(&self, key: Option<&str>, phase: &str, wait: &Wait) -> Result<Found> {
        self.arrive_and_await(&Arrival::default(), &mut |_| Ok(()), key, phase, wait)
    }

    /// Does what [`Round::await_value`] does, but first stores and counts what `arrival` holds.
    /// `counted` gets the sum.
    pub(super) fn arrive_and_await(
        &self,
        arrival: &Arrival<'_>,
        counted: &mut dyn FnMut(i64) -> Result<()>,
        key: Option<&str>,
        phase: &str,
        wait: &Wait,
    ) -> Result<Found> {
        let wait = &self.watching(phase, wait);
        let mut arrival = Some(arrival);
        let (store, verdict) = (&self.membership.store, self.key(phase, "verdict"));
        loop {
            let (has_lost, epoch) = (self.has_lost(), self.membership.check_epoch());
            let end = self.departure().or_else(|| self.turn());
            let is_over = has_lost || epoch.is_err() || end.is_some();
            if let Some(arrival) = arrival.take_if(|_| is_over) {
                store.arrive(arrival, &[], counted, wait)?;
            }
            if has_lost {
                // A value that was published before the loss still counts.
                if let Some(value) = key.map(|key| store.try_get(key, wait)).transpose()?.flatten() {
                    return Ok(Found::Value(value));
                }
                // Ranks that are lost together, for example all ranks of a host, are reported
                // together.
                self.membership.losses.wait_until_quiet(wait);
                let found = Verdict::of(&self.loss(phase, &self.lost(), wait));
                return self.decide(phase, &found, wait).map(Found::Verdict);
            }
            epoch?;
            if let Some(end) = end {
                if let Some(value) = key.map(|key| store.try_get(key, wait)).transpose()?.flatten() {
                    return Ok(Found::Value(value));
                }
                return self.decide(phase, &end, wait).map(Found::Verdict);
            }
            let (number, lost) = self.membership.losses.next();
            let left = self.departures.as_ref().map(|departures| (departures, departures.next()));
            let keys = key.into_iter().chain([verdict.as_str(), lost.as_str()]);
            let keys: Vec<&str> = keys.chain(left.as_ref().map(|(_, (_, key))| key.as_str())).collect();
            let (index, value) = match arrival.take() {
                Some(arrival) => arrive_for_any(&**store, arrival, &keys, counted, wait)?,
                None => any_of(&**store, &keys, wait)?,
            };
            // The value, if one is asked for, has the place 0, the verdict 1, and so on.
            match (index + usize::from(key.is_none()), left) {
                (0, _) => return Ok(Found::Value(value)),
                (1, _) => return Ok(Found::Verdict(self.verdict_in(&value, &verdict))),
                (3, Some((departures, (number, _)))) => departures.note(number, &value),
                _ => self.membership.losses.note(number, &value),
            }
            // A store may report without end losses of ranks that are not in this scope. The call
            // ends at its deadline all the same.
            wait.cancel.check()?;
            if wait.deadline.passed() && !self.has_lost() && self.departure().is_none() {
                let message =
                    format!("the store at {} reported further lost ranks until the deadline passed", store.name());
                return Err(Error::timeout(message));
            }
        }
    }

    /// Returns the verdict of the phase where a lost rank may be the reason for `error`, a failure
    /// that this rank has not told the others yet. Such a loss becomes the verdict if none stands.
    /// Returns `None` when no rank is found lost within a moment.
    pub(super) fn news_of_a_loss(&self, phase: &str, error: &Error, wait: &Wait) -> Option<Verdict> {
        if !may_follow_from_a_loss(error) {
            return None;
        }
        let wait = Wait { watch: None, ..wait.with_deadline(Deadline::after(NEWS_OF_A_LOSS)) };
        self.membership.losses.look(&wait);
        self.await_verdict(phase, &wait).ok()
    }

    /// Returns this wait with a watch that looks for lost ranks of this host and, in the first
    /// phase, for deadlocks.
    pub(super) fn watching(&self, phase: &str, wait: &Wait) -> Wait {
        let losses = Arc::clone(&self.membership.losses);
        let of_caller = wait.watch.clone();
        let (order, looking) =
            (phase.is_empty().then(|| DeadlockSearch::of(self)), Wait { watch: None, ..wait.clone() });
        let warning = log::log_enabled!(log::Level::Warn).then(|| (self.copy(), phase.to_owned()));
        let watch: Watch = Arc::new(move || {
            losses.look(&looking);
            if let Some(order) = &order {
                order.look(&looking);
            }
            if let Some((round, phase)) = &warning {
                round.warn_if_near(phase, &looking);
            }
            of_caller.as_ref().map_or(Ok(()), |watch| watch())
        });
        Wait { watch: Some(watch), ..wait.clone() }
    }

    /// Returns the error that these ranks were lost, before or after they came to the call.
    fn loss(&self, phase: &str, ranks: &[i32], wait: &Wait) -> Error {
        let store = &self.membership.store;
        let has_come = |rank: &i32| {
            let position = self.membership.members.position(*rank);
            position.and_then(|position| store.try_get(&self.here(phase, position), wait).ok()?).is_some()
        };
        match phase.is_empty() && !ranks.iter().any(has_come) {
            true => self.lost_before(ranks),
            false => self.lost_when("in", "in", ranks),
        }
    }
}

/// Whether a lost rank may be the reason for this failure of a communicator library: the library
/// does not say which rank is to blame.
pub(super) fn may_follow_from_a_loss(error: &Error) -> bool {
    matches!(error.status(), Status::Ccl | Status::PeerLost) && error.ranks().is_empty()
}
