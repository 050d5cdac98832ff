//! The turns of the threads of one rank, where only one thread at a time may make a call.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::wait::Wait;

/// Gives the threads their turns.
#[derive(Default)]
pub(super) struct Turns {
    /// Whether a thread has the turn.
    is_taken: Mutex<bool>,
    /// Wakes the threads that wait for their turn.
    over: Condvar,
}

/// The right to make one call. Dropping it gives the turn to the next thread.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for the calling thread's turn. Fails when the wait ends before the thread has its
    /// turn. `busy` describes, for the message, what the thread that has the turn does.
    pub(super) fn take(&self, wait: &Wait, busy: impl FnOnce() -> String) -> Result<Turn<'_>> {
        let mut is_taken = self.is_taken();
        while *is_taken {
            wait.cancel.check()?;
            if wait.deadline.passed() {
                return Err(Error::timeout(format!("{} for {} ms", busy(), wait.deadline.timeout().as_millis())));
            }
            let waited = self.over.wait_timeout(is_taken, wait.deadline.slice());
            is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        Ok(Turn(self))
    }

    fn is_taken(&self) -> MutexGuard<'_, bool> {
        self.is_taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.is_taken() = false;
        self.0.over.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Status;

    #[test]
    fn a_wait_for_a_turn_ends_at_its_deadline_and_when_it_is_cancelled() {
        let (turns, busy) = (Turns::default(), || "another thread was busy".to_owned());
        let long = Wait::after(Duration::from_secs(3600));
        let turn = turns.take(&long, busy).unwrap();
        let late = turns.take(&Wait::after(Duration::ZERO), busy).map(drop).unwrap_err();
        assert_eq!((late.status(), late.message()), (Status::Timeout, "another thread was busy for 0 ms"));
        let cancelled = Wait { cancel: crate::wait::Cancel::new(), ..long.clone() };
        cancelled.cancel.raise();
        assert_eq!(turns.take(&cancelled, busy).map(drop).unwrap_err().status(), Status::Aborted);
        drop(turn);
        // The turn is free again, also for a wait that has no time.
        assert!(turns.take(&Wait::after(Duration::ZERO), busy).is_ok());
    }
}
