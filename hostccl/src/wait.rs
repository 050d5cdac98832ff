//! Waiting: spin for a moment, let others run, then sleep, and at the end of each slice of sleep look whether the peers
//! still live.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::event::{self, Watch};
use crate::types::ncclTimeout;

/// The longest sleep before looking at the peers.
const SLICE: Duration = Duration::from_millis(100);
/// The longest sleep of an operation whose communicator `ncclCommAbort` cannot wake yet.
const JOIN_SLICE: Duration = Duration::from_millis(20);
/// How long ranks wait for each other to join, when `HOSTCCL_TIMEOUT_MS` does not say.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// What one blocked operation waits for: its communicator, the value it saw, and the blocker whose word had it.
pub(crate) type Waiting<'a> = (&'a Arc<Comm>, u32, Blocker);

/// A thread's waiting: since when, and for how long at most.
#[derive(Default)]
pub(crate) struct Idle {
    since: Option<Instant>,
}

impl Idle {
    /// Waits until one of the operations may go on.
    pub(crate) fn wait(&mut self, waits: &[Waiting<'_>]) -> Result<()> {
        let moved = || waits.iter().any(|&(comm, seen, blocker)| comm.event(blocker).value() != seen);
        if spin(spins(waits), moved) || COURTESY.offer(moved) {
            self.since = None;
            return Ok(());
        }
        for &(comm, ..) in waits {
            comm.check()?;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let joining = waits.iter().any(|wait| wait.2 == Blocker::Arrivals);
        let set = waits.iter().filter_map(|(comm, ..)| comm.patience()).min();
        let timeout = set.or_else(timeout).or(joining.then_some(JOIN_TIMEOUT));
        let mut slice = if joining { JOIN_SLICE } else { SLICE };
        if let Some(timeout) = timeout {
            slice = slice.min(timeout.saturating_sub(since.elapsed()));
        }
        let mut watches = Vec::with_capacity(waits.len() + 1);
        for &(comm, seen, blocker) in waits {
            watches.push(Watch { event: comm.event(blocker), seen });
            if matches!(blocker, Blocker::From(_) | Blocker::To(_)) {
                let alarm = Watch { event: &comm.segment.header().alarm, seen: 0 };
                if !watches.iter().any(|watch| std::ptr::eq(watch.event, alarm.event)) {
                    watches.push(alarm);
                }
            }
        }
        event::sleep(&watches, slice);
        if moved() {
            self.since = None;
            return Ok(());
        }
        for &(comm, _, blocker) in waits {
            comm.check_peers(Some(blocker))?;
        }
        match timeout {
            Some(timeout) if since.elapsed() >= timeout && !moved() => Err(expired(waits, timeout)),
            _ => Ok(()),
        }
    }
}

/// Ends the communicators that have waited for too long.
fn expired(waits: &[Waiting<'_>], timeout: Duration) -> Error {
    let errors = waits.iter().map(|&(comm, _, blocker)| {
        let message = format!("{} did not come within {} ms", comm.missing(blocker), timeout.as_millis());
        comm.fail(ncclTimeout, None, &message)
    });
    errors.collect::<Vec<_>>().swap_remove(0)
}

/// Looks at the words again and again; says whether one has changed.
fn spin(times: u32, moved: impl Fn() -> bool) -> bool {
    (0..times).any(|_| {
        std::hint::spin_loop();
        moved()
    })
}

/// How often: for about as long as a system call takes; next to never when the ranks outnumber the processors, since then
/// somebody else needs this one.
fn spins(waits: &[Waiting<'_>]) -> u32 {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let processors = *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
    let ranks = waits.iter().map(|(comm, ..)| comm.nranks).max().unwrap_or(0);
    if ranks <= processors { 200 } else { 20 }
}

/// Giving the processor to other threads before sleeping.
///
/// Where ranks share processors, the thread that runs next is most likely the rank that this one waits for: it ends the
/// step in a fraction of the time that a sleep and a wake-up take. Where something else keeps the processors busy, though,
/// it runs for its whole time slice, which is far longer than a sleep. So a slow yield is followed by a time without any,
/// longer each time it happens again.
struct Courtesy {
    /// Waits that are left without a yield.
    pause: AtomicU32,
    /// How many the next slow yield costs.
    penalty: AtomicU32,
}

static COURTESY: Courtesy = Courtesy { pause: AtomicU32::new(0), penalty: AtomicU32::new(MIN_PENALTY) };
const YIELDS: u32 = 2;
const SLOW_YIELD: Duration = Duration::from_micros(500);
const MIN_PENALTY: u32 = 64;
const MAX_PENALTY: u32 = 16_384;

impl Courtesy {
    /// Yields; says whether a word has changed meanwhile. The counters are hints: threads may overwrite each other's.
    fn offer(&self, moved: impl Fn() -> bool) -> bool {
        let pause = self.pause.load(Ordering::Relaxed);
        if pause > 0 {
            self.pause.store(pause - 1, Ordering::Relaxed);
            return false;
        }
        for _ in 0..YIELDS {
            let before = Instant::now();
            std::thread::yield_now();
            let slow = before.elapsed() > SLOW_YIELD;
            let penalty = self.penalty.load(Ordering::Relaxed);
            if slow {
                self.pause.store(penalty, Ordering::Relaxed);
                self.penalty.store((penalty * 2).min(MAX_PENALTY), Ordering::Relaxed);
            }
            let moved = moved();
            if moved && !slow && penalty > MIN_PENALTY {
                self.penalty.store(penalty - 1, Ordering::Relaxed);
            }
            if moved || slow {
                return moved;
            }
        }
        false
    }
}

/// `HOSTCCL_TIMEOUT_MS`: how long a wait without any progress may last; unset or 0: forever.
fn timeout() -> Option<Duration> {
    static TIMEOUT: OnceLock<Option<Duration>> = OnceLock::new();
    *TIMEOUT.get_or_init(|| {
        let millis = std::env::var("HOSTCCL_TIMEOUT_MS").ok()?.trim().parse().ok()?;
        (millis > 0).then(|| Duration::from_millis(millis))
    })
}
