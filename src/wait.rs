//! Deadlines and cancellation, which every wait of the library carries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The longest time that a blocked wait sleeps before it looks at its [`Cancel`] flag again.
pub const CANCEL_SLICE: Duration = Duration::from_millis(20);

/// The longest timeout.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A moment by which a wait ends. It knows the timeout that it was made with, for messages.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    /// The moment.
    at: Instant,
    /// The timeout, for messages.
    timeout: Duration,
}

impl Deadline {
    /// Makes the moment `timeout` from now. Timeouts past 100 years count as 100 years.
    pub fn after(timeout: Duration) -> Deadline {
        let timeout = timeout.min(LONGEST);
        Deadline { at: Instant::now() + timeout, timeout }
    }

    /// Returns the moment that is `grace` later, with the same timeout for messages. More than 100
    /// years count as 100 years. A moment that the clock cannot express leaves the deadline as it
    /// is.
    #[must_use]
    pub fn extended(&self, grace: Duration) -> Deadline {
        Deadline { at: self.at.checked_add(grace.min(LONGEST)).unwrap_or(self.at), ..*self }
    }

    /// Returns this moment, or the one that is `time` from now where that is later, with the same
    /// timeout for messages.
    #[must_use]
    pub fn at_least(&self, time: Duration) -> Deadline {
        Deadline { at: self.at.max(Deadline::after(time).at), ..*self }
    }

    /// Returns the time left; zero when the moment has passed.
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Returns the time left, at most [`CANCEL_SLICE`]: how long a wait may sleep before it looks
    /// at its flag again.
    pub fn slice(&self) -> Duration {
        self.left().min(CANCEL_SLICE)
    }

    /// Whether the moment has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns the whole timeout that this deadline was made with.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// The call that has raised the flag of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum By {
    Abort = 1,
    Shrink = 2,
    Recover = 3,
}

/// A flag that ends waits. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Cancel {
    /// The call that has raised this flag itself, as a number ([`By`]); 0 while it is not raised.
    raised: Arc<AtomicU8>,
    /// The flag above this one: when the flag of a world is raised, the flags of its meshes count
    /// as raised.
    above: Option<Arc<Cancel>>,
}

impl Cancel {
    /// Makes a flag that is not raised.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Makes another flag, which counts as raised also when this one is.
    #[must_use]
    pub fn child(&self) -> Cancel {
        Cancel { raised: Arc::default(), above: Some(Arc::new(self.clone())) }
    }

    /// Raises the flag. It stays raised.
    pub fn raise(&self) {
        self.raise_by(By::Abort);
    }

    /// Raises the flag of a mesh, which that call ends. Only the first call counts.
    pub(crate) fn raise_by(&self, by: By) {
        let _ = self.raised.compare_exchange(0, by as u8, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether the flag is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst) != 0 || self.above.as_ref().is_some_and(|above| above.is_raised())
    }

    /// Whether the flag counts as raised because of a flag above it.
    pub fn is_raised_above(&self) -> bool {
        self.above.as_ref().is_some_and(|above| above.is_raised())
    }

    /// Fails with `DM_STATUS_ABORTED` when the flag is raised.
    pub fn check(&self) -> Result<()> {
        match &self.above {
            _ if !self.is_raised() => Ok(()),
            Some(above) if !above.is_raised() => Err(Error::aborted(match self.raised.load(Ordering::SeqCst) {
                by if by == By::Shrink as u8 => "the mesh was ended by dm_shrink; if that call succeeds, use its mesh",
                by if by == By::Recover as u8 => {
                    "the mesh was ended by dm_recover; if that call succeeds, use its mesh"
                }
                _ => "the mesh was aborted by dm_abort",
            })),
            _ => Err(Error::aborted("the world was aborted on this rank by dm_world_abort")),
        }
    }
}

/// The log does not warn of waits of at most this time, because they end soon.
const SHORT_WAIT: Duration = Duration::from_secs(5);

/// Finds the moments at which a wait has used half and 90 % of its time, for the log.
#[derive(Debug, Default)]
pub(crate) struct Nearing {
    /// The percentage that was found last: 0, 50 or 90.
    found: AtomicU8,
}

impl Nearing {
    /// Returns 50 or 90, once each, when so many per cent of the deadline's time have passed.
    /// Returns `None` for short waits, and where nobody reads warnings.
    pub(crate) fn due(&self, deadline: &Deadline) -> Option<u8> {
        let timeout = deadline.timeout();
        if timeout <= SHORT_WAIT || !log::log_enabled!(log::Level::Warn) {
            return None;
        }
        let used = timeout.saturating_sub(deadline.left());
        let percent = match used {
            used if used >= timeout / 10 * 9 => 90,
            used if used >= timeout / 2 => 50,
            _ => return None,
        };
        (self.found.fetch_max(percent, Ordering::SeqCst) < percent).then_some(percent)
    }
}

/// How often a long wait calls its watch.
const LOOK: Duration = Duration::from_millis(250);

/// A function that a long wait calls now and then. The wait ends with its error.
pub type Watch = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// How long a blocking call may wait, and what may end it early. It is cheap to clone.
#[derive(Clone)]
pub struct Wait {
    /// When the call gives up.
    pub deadline: Deadline,
    /// Another thread raises this flag to end the call at once.
    pub cancel: Cancel,
    /// A function that a long wait calls now and then. Its error ends the wait.
    pub watch: Option<Watch>,
}

impl Wait {
    /// Makes a wait of at most `timeout` that nobody cancels.
    pub fn after(timeout: Duration) -> Wait {
        Wait { deadline: Deadline::after(timeout), cancel: Cancel::new(), watch: None }
    }

    /// Returns this wait with another deadline.
    #[must_use]
    pub fn with_deadline(&self, deadline: Deadline) -> Wait {
        Wait { deadline, ..self.clone() }
    }

    /// Returns the outcome of a call that had this wait. When the call failed and was aborted
    /// meanwhile, the abort is the error, whatever the call met first.
    pub fn outcome<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.cancel.check().err().unwrap_or(error))
    }

    /// Returns the object that a long wait asks when to look at its flag and its watch.
    pub fn lookout(&self) -> Lookout<'_> {
        Lookout { wait: self, next: Deadline::after(LOOK) }
    }

    /// Fails when the flag is raised, or with the error of the watch.
    pub fn look_around(&self) -> Result<()> {
        self.cancel.check()?;
        self.watch.as_ref().map_or(Ok(()), |watch| watch())
    }
}

/// Knows when a long wait looks at its flag and its watch next.
pub struct Lookout<'a> {
    /// The wait.
    wait: &'a Wait,
    /// The moment of the next look.
    next: Deadline,
}

impl Lookout<'_> {
    /// Whether it is time to look.
    pub fn is_due(&self) -> bool {
        self.next.passed()
    }

    /// Looks at the flag and the watch if it is time.
    pub fn look(&mut self) -> Result<()> {
        if self.is_due() {
            self.wait.look_around()?;
            self.next = Deadline::after(LOOK);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_times_are_cut_off() {
        let longest = Deadline::after(Duration::MAX);
        assert_eq!(longest.timeout(), LONGEST);
        assert!(longest.left() <= LONGEST && !longest.passed());
        let later = longest.extended(Duration::MAX);
        assert!(later.left() > LONGEST && later.left() <= 2 * LONGEST);
        assert_eq!(later.timeout(), LONGEST);
        let mut later = later;
        for _ in 0..1000 {
            later = later.extended(Duration::MAX);
        }
        assert!(!later.passed());
        let soon = Deadline::after(Duration::ZERO).at_least(Duration::from_secs(60));
        assert!(soon.left() > Duration::from_secs(30) && soon.timeout().is_zero());
        assert!(later.at_least(Duration::ZERO).left() > Duration::from_secs(1));
    }

    #[test]
    fn the_error_of_a_wait_names_the_call_that_has_ended_the_mesh() {
        for (by, name) in [(By::Abort, "dm_abort"), (By::Shrink, "dm_shrink"), (By::Recover, "dm_recover")] {
            let mesh = Cancel::new().child();
            mesh.raise_by(by);
            mesh.raise();
            let error = mesh.check().unwrap_err();
            assert!(error.message().contains(name), "{error}");
        }
    }
}
