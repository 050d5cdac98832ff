//! Waits for work that a communicator library does in the background, by asking again and again.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::wait::Wait;

/// The first pause between two questions. Each pause is twice as long as the one before, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_micros(20);

/// The longest pause between two questions.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// Returns when `is_done` says so. Fails when `is_done` fails, at the deadline, and when the wait
/// is cancelled. `what` names the work in messages. `rest` lets a pause pass between two questions,
/// and may return early when there is news.
pub(super) fn poll_until_done(
    wait: &Wait,
    what: impl Fn() -> String,
    rest: impl Fn(Duration),
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        match is_done() {
            Ok(true) => return Ok(()),
            Ok(false) => wait.cancel.check()?,
            Err(error) => {
                // An abort takes the communicator away while it is being asked. The abort is then
                // the reason.
                wait.cancel.check()?;
                return Err(error.within(&what()));
            }
        }
        if wait.deadline.passed() {
            let timeout = wait.deadline.timeout().as_millis();
            return Err(Error::timeout(format!("{} was not done after {timeout} ms", what())));
        }
        rest(pause.min(wait.deadline.left()));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// A time in milliseconds, as the host engine takes it.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
