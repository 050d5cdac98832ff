//! What every wait of the library carries: a deadline, and a flag by which another thread ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The longest a blocked wait sleeps before it looks at its [`Cancel`] flag again.
pub const CANCEL_SLICE: Duration = Duration::from_millis(20);

/// The longest timeout.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A moment by which a wait ends, with the timeout it came from (for messages).
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// The moment `timeout` from now. Timeouts past 100 years count as 100 years.
    pub fn after(timeout: Duration) -> Deadline {
        let timeout = timeout.min(LONGEST);
        Deadline { at: Instant::now() + timeout, timeout }
    }

    /// The moment this much later, with the same timeout for messages. More than 100 years count as 100 years, and a moment that the clock
    /// cannot express leaves the deadline as it is.
    #[must_use]
    pub fn extended(&self, grace: Duration) -> Deadline {
        Deadline { at: self.at.checked_add(grace.min(LONGEST)).unwrap_or(self.at), ..*self }
    }

    /// Time left, zero when passed.
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Time left, at most [`CANCEL_SLICE`]: how long to sleep before looking around again.
    pub fn slice(&self) -> Duration {
        self.left().min(CANCEL_SLICE)
    }

    /// Whether the moment has passed.
    pub fn passed(&self) -> bool {
        self.left().is_zero()
    }

    /// The whole timeout that this deadline was made with.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// A flag that ends waits: clones share it.
#[derive(Debug, Clone, Default)]
pub struct Cancel {
    raised: Arc<AtomicBool>,
    /// Raised together with what it belongs to: a mesh's flag with its world's.
    above: Option<Arc<Cancel>>,
}

impl Cancel {
    /// A flag that is not raised.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// A flag of its own that counts as raised also when this one is.
    #[must_use]
    pub fn child(&self) -> Cancel {
        Cancel { raised: Arc::default(), above: Some(Arc::new(self.clone())) }
    }

    /// Raises the flag; it stays raised.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst) || self.above.as_ref().is_some_and(|above| above.is_raised())
    }

    /// `DM_STATUS_ABORTED` when raised.
    pub fn check(&self) -> Result<()> {
        match &self.above {
            _ if !self.is_raised() => Ok(()),
            Some(above) if !above.is_raised() => Err(Error::aborted("the mesh was aborted by dm_abort")),
            _ => Err(Error::aborted("the world was aborted on this rank by dm_world_abort")),
        }
    }
}

/// How often a long wait looks at what its caller watches.
const LOOK: Duration = Duration::from_millis(250);

/// Something that a long wait looks at now and then: an error ends the wait.
pub type Watch = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// How long a blocking call may wait and who may end it early. Cheap to clone.
#[derive(Clone)]
pub struct Wait {
    /// When the call gives up.
    pub deadline: Deadline,
    /// Raised by another thread to end the call at once.
    pub cancel: Cancel,
    /// What else may make the wait pointless.
    pub watch: Option<Watch>,
}

impl Wait {
    /// A wait of at most `timeout` that nobody cancels.
    pub fn after(timeout: Duration) -> Wait {
        Wait { deadline: Deadline::after(timeout), cancel: Cancel::new(), watch: None }
    }

    /// The same with another deadline.
    #[must_use]
    pub fn with_deadline(&self, deadline: Deadline) -> Wait {
        Wait { deadline, ..self.clone() }
    }

    /// The outcome of a call that waited so: when it failed and was aborted meanwhile, that is why, whatever it met first (its own going
    /// among it).
    pub fn outcome<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.cancel.check().err().unwrap_or(error))
    }

    /// For a wait that goes on and on: looks around now and then.
    pub fn lookout(&self) -> Lookout<'_> {
        Lookout { wait: self, next: Deadline::after(LOOK) }
    }

    /// Whether the wait has still a point.
    pub fn look_around(&self) -> Result<()> {
        self.cancel.check()?;
        self.watch.as_ref().map_or(Ok(()), |watch| watch())
    }
}

/// When a long wait looks around next.
pub struct Lookout<'a> {
    wait: &'a Wait,
    next: Deadline,
}

impl Lookout<'_> {
    /// Whether it is time.
    pub fn is_due(&self) -> bool {
        self.next.passed()
    }

    /// Looks around, if it is time.
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
    }
}
