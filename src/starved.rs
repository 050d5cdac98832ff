//! For tests that bound a time from above: how long threads have waited for a processor that others
//! had. This file includes nothing of the library, because the tests in tests/ include it by its
//! path.

#![allow(dead_code, reason = "no test program uses all of this")]

use std::path::Path;
use std::time::{Duration, Instant};

/// Returns for how long a thread has waited for a processor since it began, by the path of its
/// schedstat in /proc. Without such a file, it is zero.
pub(crate) fn waited_in(schedstat: &Path) -> Duration {
    let stat = std::fs::read_to_string(schedstat).unwrap_or_default();
    let nanos = stat.split_whitespace().nth(1).and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// How long a call took.
#[derive(Debug)]
pub(crate) struct Took {
    pub(crate) whole: Duration,
    /// The part of it in which the calling thread waited for a processor.
    pub(crate) starved: Duration,
}

impl Took {
    pub(crate) fn own(&self) -> Duration {
        self.whole.saturating_sub(self.starved)
    }

    /// Whether a call with this timeout kept to what the library promises of each deadline: it
    /// returns at most a tenth of the timeout and 250 ms later.
    pub(crate) fn keeps_to(&self, timeout: Duration) -> bool {
        self.own() < timeout.mul_f64(1.1) + Duration::from_millis(250)
    }
}

/// Makes a call. Returns what the call returns, and how long it took.
pub(crate) fn timed<T>(call: impl FnOnce() -> T) -> (T, Took) {
    let own = || waited_in(Path::new("/proc/thread-self/schedstat"));
    let (before, began) = (own(), Instant::now());
    let returned = call();
    let whole = began.elapsed();
    (returned, Took { whole, starved: own() - before })
}
