//! Calls that wait and are in no recording: dm_stream_wait, and the ranks that wait in dm_recover.
//!
//! A call notes its wait here when it has waited for a moment. Then the thread `dm-events` finds
//! the wait while the thread of the call sleeps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::event::Event;

/// Describes a wait that has lasted for that time. `None` where there is nothing to tell any more.
pub(super) type Describe = dyn Fn(Duration) -> Option<Event> + Send + Sync;

/// The waits of this process.
static WAITS: Mutex<Vec<Known>> = Mutex::new(Vec::new());
/// The number of the next wait.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A wait that has not ended.
#[derive(Clone)]
pub(super) struct Known {
    /// The number of the wait, which no other one has.
    pub(super) number: u64,
    /// When the wait began.
    pub(super) since: Instant,
    pub(super) describe: Arc<Describe>,
}

/// A wait that is noted until this is dropped.
#[must_use = "dropping it ends the wait"]
pub(crate) struct Waiting(u64);

impl Waiting {
    /// Notes a wait that began at that time. `describe` runs on the thread `dm-events`, for half a
    /// second at most, and may run once more when the wait is over. `describe` must own nothing
    /// whose drop waits for other ranks.
    pub(crate) fn since(
        since: Instant,
        describe: impl Fn(Duration) -> Option<Event> + Send + Sync + 'static,
    ) -> Waiting {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        lock().push(Known { number, since, describe: Arc::new(describe) });
        Waiting(number)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waits = lock();
        let ended = waits.iter().position(|known| known.number == self.0).map(|at| waits.swap_remove(at));
        drop(waits);
        // The description may hold much, so it is dropped without the lock.
        drop(ended);
    }
}

/// The waits that have not ended.
pub(super) fn waits() -> Vec<Known> {
    lock().clone()
}

fn lock() -> MutexGuard<'static, Vec<Known>> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_known_until_it_ends() {
        let is_known = |number| waits().iter().any(|known| known.number == number);
        let waiting = Waiting::since(Instant::now(), |_| None);
        let number = waiting.0;
        assert!(is_known(number));
        drop(waiting);
        assert!(!is_known(number));
    }
}
