//! Records which ranks wait for other ranks, and for how long, as far as a waiting rank can know
//! it.
//!
//! A rank whose time is up blames the rank for which it waits (the blocker), unless the blocker
//! waits itself, because the blocker can then name the missing rank. So each waiting rank tells the
//! later of two times: when its own time is up, and when the time of the ranks for which it waits
//! is up. It tells the ranks of its host by words in its seat, and ranks of other hosts when they
//! ask.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::comm::Comm;
use crate::poll::Blocker;

/// A rank whose last note is older than this counts as not waiting. A waiting rank writes the note
/// about every 100 ms, and less often on a machine with more work than processors.
const NOTED: Duration = Duration::from_millis(400);

impl Comm {
    /// Notes in this rank's seat whether this rank waits for others. A rank that waits notes again
    /// and again how much longer it will wait before it blames a rank. Other ranks read the note
    /// when their time is up.
    pub(crate) fn note_waiting(&self, left: Option<Duration>) {
        if let Some(remote) = &self.remote {
            remote.lock().waits_until = left.map(|left| Instant::now() + left);
            let seat = self.segment.seat(self.rank);
            let before = seat.waits.load(Ordering::Relaxed);
            if let Some(left) = left {
                seat.waits_millis.store(left.as_millis().min(u128::from(u32::MAX)) as u32, Ordering::Relaxed);
            }
            let word = if left.is_some() { before.wrapping_add(2) | 1 } else { before & !1 };
            seat.waits.store(word, Ordering::Release);
        }
    }

    /// How many milliseconds from now on this rank still waits, as it noted last. The age of the
    /// note is taken off. Otherwise two ranks that wait for each other would add that age to each
    /// other's times again and again, and both would wait for longer than their timeout.
    pub(crate) fn millis_left(&self) -> u32 {
        let until = self.remote.as_ref().and_then(|remote| remote.lock().waits_until);
        let left = until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        left.as_millis().min(u128::from(u32::MAX)) as u32
    }

    /// Whether the rank with that seat waits for another rank.
    pub(crate) fn seat_waits(&self, seat: usize) -> bool {
        self.seat_waits_until(seat).is_some()
    }

    /// Returns when the time of the rank with that seat is up, if it waits for another rank. The
    /// note of a rank in another process must be recent, because a process that is stopped inside
    /// a wait waits for nobody.
    fn seat_waits_until(&self, seat: usize) -> Option<Instant> {
        let word = self.segment.seat(seat).waits.load(Ordering::Acquire);
        let left = Duration::from_millis(u64::from(self.segment.seat(seat).waits_millis.load(Ordering::Relaxed)));
        let now = Instant::now();
        let Some(remote) = self.remote.as_ref().filter(|_| word & 1 == 1 && seat != self.rank) else {
            return (word & 1 == 1).then(|| now + left);
        };
        let mut state = remote.lock();
        let (seen, changed) = state.seat_waits.entry(seat).or_insert((word, now));
        if *seen != word {
            (*seen, *changed) = (word, now);
        }
        (changed.elapsed() < NOTED).then(|| *changed + left)
    }

    /// Returns when the time of the last of the ranks for which this rank waits is up. Returns
    /// `None` unless all of these ranks wait themselves. The reports of ranks on other hosts must
    /// not be older than `within`.
    pub(crate) fn others_wait_until(&self, blocker: Blocker, within: Duration) -> Option<Instant> {
        if let Blocker::Wire { from: rank } | Blocker::RemoteMessage { peer: rank, .. } = blocker {
            let state = self.remote.as_ref()?.lock();
            return state.waits.get(&rank).filter(|waits| waits.said.elapsed() <= within).map(|waits| waits.until);
        }
        // Every seat is read, also after one whose rank does not wait, because the reading records
        // when each note last changed.
        let until: Vec<Option<Instant>> =
            self.missing_seats(blocker).into_iter().map(|seat| self.seat_waits_until(seat)).collect();
        until.into_iter().collect::<Option<Vec<Instant>>>()?.into_iter().max()
    }
}
