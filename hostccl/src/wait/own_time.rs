//! The time of a call, as far as it counts for the call's deadline.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::poll::Blocker;

/// A call that has waited long for its turn keeps the turn at least this long before it times out.
/// The calls of the other ranks may have waited as long, and come only now.
const LAST_CHANCE: Duration = Duration::from_secs(1);

/// The time of a call since its last progress.
///
/// Calls under several names take turns on a communicator. Until the other ranks have made the same
/// call, the words for which this call waits also change when calls under other names come and go.
/// Such a change is no progress of this call. The time in which the call waits for its turn does
/// not count, up to one timeout.
#[derive(Debug, Default)]
pub(crate) struct OwnTime {
    /// Whether calls under other names have stood in the way of this call, and the other ranks have
    /// not made this call yet.
    is_contested: Cell<bool>,
    /// How long the call has waited for its turn since its last progress.
    in_turn: Cell<Duration>,
    /// When the present wait for the turn began; `None` while the call has its turn.
    turn_began: Cell<Option<Instant>>,
}

impl OwnTime {
    /// Notes what the call waits for, and whether the other ranks have made the same call. Returns
    /// whether they have made it since the last look, which is progress.
    pub(super) fn note(&self, blocker: Blocker, is_matched: bool) -> bool {
        if is_matched {
            // Nothing stands in the way any more, so all time counts from now on.
            self.turn_began.set(None);
            self.in_turn.set(Duration::ZERO);
            return self.is_contested.replace(false);
        }
        let is_behind_others = matches!(
            blocker,
            Blocker::Turn
                | Blocker::OtherCall(_)
                | Blocker::CommonName(_)
                | Blocker::Decision(_)
                | Blocker::HostNames { .. }
        );
        if is_behind_others {
            self.is_contested.set(true);
        }
        match (blocker == Blocker::Turn, self.turn_began.get()) {
            (true, None) => self.turn_began.set(Some(Instant::now())),
            (false, Some(began)) => {
                self.in_turn.set(self.in_turn.get() + began.elapsed());
                self.turn_began.set(None);
            }
            _ => {}
        }
        false
    }

    /// Whether changes of the words for which the call waits may belong to calls under other names.
    pub(super) fn is_contested(&self) -> bool {
        self.is_contested.get()
    }

    /// Notes that the call has made progress.
    pub(super) fn restart(&self) {
        self.in_turn.set(Duration::ZERO);
        self.turn_began.set(self.turn_began.get().map(|_| Instant::now()));
    }

    /// Forgets the call, because another one takes its place.
    pub(crate) fn clear(&self) {
        self.is_contested.set(false);
        self.in_turn.set(Duration::ZERO);
        self.turn_began.set(None);
    }

    /// Returns how much of the time since the last progress counts. `waited` is the whole of that
    /// time, and `limit` the timeout of the call.
    pub(super) fn counted(&self, waited: Duration, limit: Duration) -> Duration {
        let in_turn = self.in_turn.get() + self.turn_began.get().map_or(Duration::ZERO, |began| began.elapsed());
        let with_turn = waited.saturating_sub(in_turn);
        match waited.saturating_sub(limit) >= limit && with_turn >= LAST_CHANCE.min(limit) {
            true => with_turn.max(limit),
            false => with_turn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn all_time_of_a_call_that_met_no_other_name_counts() {
        let time = OwnTime::default();
        assert!(!time.note(Blocker::Step(3), false) && !time.is_contested());
        assert!(!time.note(Blocker::Step(4), true));
        assert_eq!(time.counted(seconds(3), LIMIT), seconds(3));
        assert_eq!(time.counted(seconds(30), LIMIT), seconds(30));
    }

    #[test]
    fn a_call_is_contested_until_the_other_ranks_have_made_it() {
        for blocker in [Blocker::Turn, Blocker::OtherCall(1), Blocker::CommonName(1), Blocker::Decision(1)] {
            let time = OwnTime::default();
            assert!(!time.note(blocker, false) && time.is_contested());
            assert!(!time.note(Blocker::Step(7), false) && time.is_contested());
            assert!(time.note(Blocker::Step(7), true) && !time.is_contested());
            assert!(!time.note(Blocker::Step(8), true), "only the first look is progress");
        }
    }

    #[test]
    fn all_time_counts_once_the_other_ranks_have_made_the_call() {
        let time = OwnTime::default();
        assert!(!time.note(Blocker::Turn, false) && time.is_contested());
        // The call gets its turn after those of the other ranks, and waits for them once more. So
        // it is matched at the next look.
        assert!(time.note(Blocker::Step(5), true));
        time.restart();
        assert!(!time.note(Blocker::Step(6), true));
        assert_eq!(time.counted(seconds(30), LIMIT), seconds(30));
    }

    #[test]
    fn the_wait_for_the_turn_does_not_count_up_to_one_timeout() {
        let time = OwnTime::default();
        time.is_contested.set(true);
        time.in_turn.set(seconds(4));
        assert_eq!(time.counted(seconds(7), LIMIT), seconds(3));
        time.in_turn.set(seconds(20));
        assert!(time.counted(seconds(20), LIMIT) < LIMIT, "the call has its turn only now");
        assert_eq!(time.counted(seconds(21), LIMIT), LIMIT);
        time.restart();
        assert_eq!(time.counted(seconds(2), LIMIT), seconds(2));
    }
}
