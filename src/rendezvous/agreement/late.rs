//! Ranks that come to a call which the others have given up, and how these ranks catch up with the
//! others.
//!
//! A rank whose deadline passes gives the call up. The verdict names the missing ranks, and the
//! ranks that had come go on to the next number. A missing rank that comes later finds the verdict.
//! Its caller is told that it came too late, so the call has failed on all ranks. Meanwhile the
//! others may have given up further calls for which this rank did not come. So the next call of
//! this rank passes over every number that the others gave up because this rank did not come, and
//! takes part in the first number that they did not give up. There the texts of the calls are
//! compared as in every call.
//!
//! The ranks of a deadlock wait for each other in calls of several scopes. Each of them is told of
//! the deadlock in the call in which it waited. Later it comes to the other calls of the ring,
//! which have ended without it. Such a rank passes over these calls.
//!
//! A rank passes over a number only when its caller was told of a failure before. So the caller of
//! each rank learns of at least one failed call, and no rank stays behind the others.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::round::Round;
use super::verdict::{Reason, Verdict};
use crate::error::{MOST_RANKS, Status};
use crate::wait::{Deadline, Wait};

/// How many positions one key of the list of missing ranks tells of. The key has a bit for each.
const IN_ONE_KEY: usize = 4096;

/// How long the store may take to say whether this rank was missing.
const SHORT: Duration = Duration::from_millis(500);

impl Round {
    /// Whether the others have given this call up because this rank did not come. When the store
    /// does not answer, the answer is no, and the call itself then finds out why.
    pub(super) fn was_given_up(&self, wait: &Wait) -> bool {
        let key = self.key("", "verdict");
        let stands = self.membership.store.try_get(&key, &soon(wait));
        stands.ok().flatten().is_some_and(|stands| self.is_late_for(&self.verdict_in(&stands, &key), wait))
    }

    /// Whether the verdict says that this call was given up before this rank came.
    pub(super) fn is_late_for(&self, verdict: &Verdict, wait: &Wait) -> bool {
        let Reason::GivenUp { by, .. } = verdict.reason else { return false };
        if verdict.ranks().contains(&self.my_rank()) {
            return true;
        }
        // The verdict names the lowest missing ranks only. The rank that gave up has listed the
        // others.
        let me = self.membership.me;
        let listed = || self.membership.store.try_get(&self.missing(by, me / IN_ONE_KEY), &soon(wait)).ok().flatten();
        let at = me % IN_ONE_KEY;
        verdict.ranks().len() == MOST_RANKS
            && listed().is_some_and(|bits| bits.get(at / 8).is_some_and(|byte| byte & 1 << (at % 8) != 0))
    }

    /// Lists all missing ranks in the store, where they are more than the verdict can name. The
    /// list is in the store before the verdict is.
    pub(super) fn list_missing(&self, positions: &[usize], wait: &Wait) {
        if positions.len() <= MOST_RANKS {
            return;
        }
        for positions in positions.chunk_by(|one, next| one / IN_ONE_KEY == next / IN_ONE_KEY) {
            let mut bits = [0; IN_ONE_KEY / 8];
            for position in positions {
                bits[position % IN_ONE_KEY / 8] |= 1 << (position % 8);
            }
            // A rank that does not find itself in the list is told what the others are told.
            let _ = self.put(self.missing(self.my_rank(), positions[0] / IN_ONE_KEY), &bits, wait);
        }
    }

    /// Returns the key under which rank `by` lists the missing ranks of that range of positions.
    fn missing(&self, by: i32, range: usize) -> String {
        self.key("", &format!("missing/{by}/{range}"))
    }

    /// Whether the verdict is a deadlock of which this rank's caller was told before, in another
    /// call of the ring. From now on the caller counts as told.
    pub(super) fn was_told_before(&self, verdict: &Verdict) -> bool {
        let Reason::Deadlock { id } = &verdict.reason else { return false };
        !self.membership.losses.tell_deadlock(id)
    }

    /// Returns the verdict as this rank's caller is told it, and notes whether this rank may be
    /// behind the others now. A rank that was missing when the others gave up is told so.
    pub(super) fn told(&self, phase: &str, verdict: Verdict, wait: &Wait) -> Verdict {
        let is_late = phase.is_empty() && self.is_late_for(&verdict, wait);
        // A rank that is late for the end of a call has taken part in its beginning. The others may
        // have begun and given up further calls by then.
        let may_be_behind = is_late || (!phase.is_empty() && verdict.status == Status::Timeout);
        self.is_behind.store(may_be_behind, Ordering::SeqCst);
        match verdict.reason {
            Reason::GivenUp { by, waited } if is_late => {
                let message = format!(
                    "rank {}, which is this process, came too late with {}: rank {by} had waited {waited} ms in call {}, and gave it up; the next call of this process meets the next one of the others, who were told: {}",
                    self.my_rank(),
                    self.call,
                    self.number,
                    verdict.note(),
                );
                verdict.with_message(message)
            }
            _ => verdict,
        }
    }
}

/// Returns a wait for an answer of the store that is needed although the deadline may have passed.
fn soon(wait: &Wait) -> Wait {
    Wait { watch: None, ..wait.with_deadline(Deadline::after(SHORT)) }
}
