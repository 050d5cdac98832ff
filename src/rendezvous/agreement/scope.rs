//! A set of ranks that make collective calls in the same order.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::deadlock::take_back_note;
use super::round::{Membership, Round};
use super::sharing::NOTHING;
use super::verdict::{DETAIL, Verdict};
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// A set of ranks that make collective calls in the same order.
pub struct Scope {
    /// The ranks, and the store.
    pub(super) membership: Arc<Membership>,
    /// The keys of the scope begin with this prefix.
    pub(super) prefix: String,
    /// How many calls were begun so far.
    pub(super) calls: AtomicU64,
    /// Whether a call has ended because one of the ranks was lost. Then no later call can be
    /// agreed.
    pub(super) over: AtomicBool,
}

impl Scope {
    /// The keys of the scope begin with `prefix`, which is the same on all its ranks and is used
    /// once.
    pub(in crate::rendezvous) fn new(membership: Membership, prefix: String) -> Scope {
        Scope { membership: Arc::new(membership), prefix, calls: AtomicU64::new(0), over: AtomicBool::new(false) }
    }

    /// Returns when every rank of the scope has made this call as its call of the same number.
    /// Otherwise every rank gets the same error: `DM_STATUS_MISMATCH` with the different calls,
    /// `DM_STATUS_TIMEOUT` with the missing ranks, or `DM_STATUS_PEER_LOST` with a rank that is
    /// lost.
    pub fn agree(&self, call: &str, wait: &Wait) -> Result<Round> {
        self.agree_in_detail(call, "", wait)
    }

    /// Does what [`Scope::agree`] does. The ranks must also agree on `detail`, which the call's
    /// text does not say. A message shows the detail only when the calls are equal and the details
    /// are not.
    pub fn agree_in_detail(&self, call: &str, detail: &str, wait: &Wait) -> Result<Round> {
        let round = self.next_round(call);
        if round.membership.members.len() > 1 {
            self.enter(&round, &format!("{call}{DETAIL}{detail}"), wait)?;
        }
        Ok(round)
    }

    /// Does what [`Scope::agree_in_detail`] does, for a call in which each rank may have things that
    /// it could share with the others, such as communicators. `offers` has the same length on every rank,
    /// and names the thing that the rank has at each place. The second result says for each place
    /// whether all ranks have named the same thing there. If so, all ranks share this thing.
    /// Otherwise no rank shares anything at this place.
    pub fn agree_to_share(
        &self,
        call: &str,
        detail: &str,
        offers: &[Option<String>],
        wait: &Wait,
    ) -> Result<(Round, Vec<bool>)> {
        let names = offers.iter().map(|offer| offer.as_deref().unwrap_or(NOTHING)).collect();
        let round = Round { offers: Some(names_in_line(names)), ..self.next_round(call) };
        if round.membership.members.len() < 2 {
            let shared = offers.iter().map(Option::is_some).collect();
            return Ok((round, shared));
        }
        // Only what the first rank offers can be shared, so the other ranks do not publish their
        // offers.
        let offered = if round.membership.me == 0 { round.offers.as_deref().unwrap_or_default() } else { "" };
        self.enter(&round, &format!("{call}{DETAIL}{detail}{DETAIL}{offered}"), wait)?;
        let agreed = round.shared.get().map_or("", String::as_str);
        let places: Vec<usize> = agreed.split(' ').filter_map(|place| place.parse().ok()).collect();
        let shared = (0..offers.len()).map(|place| places.contains(&place)).collect();
        Ok((round, shared))
    }

    /// Takes part in that call. When the call is agreed, all ranks have left the earlier calls, so
    /// the keys that this rank left for the earlier calls are removed.
    fn enter(&self, round: &Round, text: &str, wait: &Wait) -> Result<()> {
        if self.over.load(Ordering::SeqCst) && round.has_lost() {
            let _ = self.membership.losses.refresh(wait);
            return Err(round.lost_before(&round.lost()).in_call(round.number));
        }
        let removable = self.membership.left.take();
        let settled = round.reach_verdict("", Some(text), wait);
        // This comes before the rank begins another call, because other ranks rely on the note
        // while it stands.
        take_back_note(round, wait);
        match &settled {
            Ok(()) => self.membership.store.forget(removable, wait),
            Err(error) => {
                self.membership.left.note(removable);
                // The store keeps the loss, so every rank finds it by itself, and no later call
                // needs keys for it.
                if error.status() == Status::PeerLost && round.has_lost() {
                    self.over.store(true, Ordering::SeqCst);
                }
            }
        }
        settled
    }

    /// Makes `error` the verdict of the next call, in which this rank takes no part.
    pub(in crate::rendezvous) fn refuse(&self, error: &Error, wait: &Wait) {
        let _ = self.next_round("").decide("", &Verdict::of(error), wait);
    }

    /// Takes part in the next call as a rank that cannot do its work. If this rank stops waiting
    /// before all ranks have come, the others are told `failure`.
    pub(in crate::rendezvous) fn agree_in_vain(&self, call: &str, failure: &Error, wait: &Wait) -> Result<Round> {
        let round = Round { failure: Some(failure.clone()), ..self.next_round(call) };
        self.enter(&round, &format!("{call}{DETAIL}"), wait).map(|()| round)
    }

    fn next_round(&self, call: &str) -> Round {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let prefix = format!("{}/{number}", self.prefix);
        let (membership, call) = (Arc::clone(&self.membership), call.to_owned());
        Round {
            membership,
            prefix,
            call,
            number,
            search: Arc::default(),
            failure: None,
            offers: None,
            shared: OnceLock::new(),
        }
    }
}

fn names_in_line(names: Vec<&str>) -> String {
    names.join(" ")
}
