//! Waiting: spin for a moment, let others run, then sleep, and at the end of each slice of sleep look whether the peers
//! still live.

use std::ffi::OsStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::event::{self, Watch};

/// The longest sleep before looking at the peers.
const SLICE: Duration = Duration::from_millis(100);
/// The longest sleep of an operation whose communicator `ncclCommAbort` cannot wake yet.
const JOIN_SLICE: Duration = Duration::from_millis(20);

/// The longest time that `HOSTCCL_TIMEOUT_MS` may give: 100 years.
const MOST_MILLIS: u64 = 100 * 365 * 86_400_000;

/// What one blocked operation waits for.
pub(crate) struct Waiting<'a> {
    pub(crate) comm: &'a Arc<Comm>,
    /// What the blocker's word held.
    pub(crate) seen: u32,
    pub(crate) blocker: Blocker,
    pub(crate) patience: Option<Duration>,
    /// The call that waits, for messages.
    pub(crate) call: &'a dyn Fn() -> String,
}

impl Waiting<'_> {
    fn moved(&self) -> bool {
        self.comm.event(self.blocker).value() != self.seen
            || self.comm.second_event(self.blocker).is_some_and(|second| second.event.value() != second.seen)
    }
}

/// A thread's waiting: since when, and for how long at most.
#[derive(Default)]
pub(crate) struct Idle {
    since: Option<Instant>,
    /// What the communicators' own patience was when it began: a call keeps the one it started with.
    set: Option<Option<Duration>>,
}

impl Idle {
    /// Waits until one of the operations may go on.
    pub(crate) fn wait(&mut self, waits: &[Waiting<'_>]) -> Result<()> {
        let moved = || waits.iter().any(Waiting::moved);
        let crowded = waits.iter().any(|wait| wait.comm.crowd > processors());
        if SPIN.watch(crowded, moved) || COURTESY.offer(crowded, moved) {
            self.since = None;
            return Ok(());
        }
        // Those that the communicator's end ends.
        let ended = || waits.iter().filter(|wait| !matches!(wait.blocker, Blocker::Offer(_)));
        for wait in ended() {
            wait.comm.check().map_err(|error| wait.comm.while_waiting(error, wait.blocker))?;
        }
        // Whoever is inside has a deadline; who waits for its turn needs none.
        let timed = || ended().filter(|wait| wait.blocker != Blocker::Turn);
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.set.is_none() && timed().next().is_some() {
            self.set = Some(timed().filter_map(|wait| wait.comm.patience()).min());
        }
        let set = self.set.flatten();
        let patience = set.or_else(timeout).or_else(|| timed().filter_map(|wait| wait.patience).min());
        let patience = patience.filter(|_| timed().next().is_some());
        let joining = waits.iter().any(|wait| wait.blocker == Blocker::Arrivals);
        let mut slice = if joining { JOIN_SLICE } else { SLICE };
        if let Some(patience) = patience {
            slice = slice.min(patience.saturating_sub(since.elapsed()));
        }
        sleep(waits, slice);
        if moved() {
            self.since = None;
            return Ok(());
        }
        for wait in ended() {
            let checked = wait.comm.check_peers(Some((wait.blocker, wait.seen)), wait.call);
            checked.map_err(|error| wait.comm.while_waiting(error, wait.blocker))?;
        }
        match patience {
            Some(patience) if since.elapsed() >= patience && !moved() => Err(expired(timed(), patience)),
            _ => Ok(()),
        }
    }
}

/// Sleeps on all words at once.
fn sleep(waits: &[Waiting<'_>], slice: Duration) {
    let mut watches: Vec<Watch<'_>> = Vec::with_capacity(waits.len() + 1);
    for wait in waits {
        watches.push(Watch { event: wait.comm.event(wait.blocker), seen: wait.seen });
        watches.extend(wait.comm.second_event(wait.blocker));
        // A failure wakes who sleeps on a barrier; there are too many channels to wake them all, so their sleepers watch the
        // alarm as well.
        let alarm = &wait.comm.segment.header().alarm;
        let pairwise =
            matches!(wait.blocker, Blocker::From(_) | Blocker::To { .. } | Blocker::Turn | Blocker::Other(_));
        if pairwise && !watches.iter().any(|watch| std::ptr::eq(watch.event, alarm)) {
            watches.push(Watch { event: alarm, seen: 0 });
        }
    }
    event::sleep(&watches, slice);
}

/// Ends the communicators that have waited for too long.
fn expired<'a>(waits: impl Iterator<Item = &'a Waiting<'a>>, timeout: Duration) -> Error {
    let errors = waits.map(|wait| wait.comm.expire(wait.blocker, timeout, &(wait.call)()));
    errors.collect::<Vec<_>>().swap_remove(0)
}

/// Looking at the words again and again.
///
/// It pays when the peer runs on another processor and is about to finish: then about as long as a system call takes. When
/// the ranks outnumber the processors, or share one all the same, nothing can change meanwhile; so the time grows with
/// each success and shrinks with each failure.
struct Spin {
    times: AtomicU32,
}

static SPIN: Spin = Spin { times: AtomicU32::new(MAX_SPINS) };
const MIN_SPINS: u32 = 20;
const MAX_SPINS: u32 = 200;

impl Spin {
    /// Spins; says whether a word has changed meanwhile. The counter is a hint, as in [`Courtesy`].
    fn watch(&self, crowded: bool, moved: impl Fn() -> bool) -> bool {
        let look = |times: u32| {
            (0..times).any(|_| {
                std::hint::spin_loop();
                moved()
            })
        };
        if crowded {
            return look(MIN_SPINS);
        }
        let times = self.times.load(Ordering::Relaxed);
        let seen = look(times);
        let next = if seen { times + times / 8 } else { times - times / 8 };
        self.times.store(next.clamp(MIN_SPINS, MAX_SPINS), Ordering::Relaxed);
        seen
    }
}

/// Those on which this thread may run: one, where a launcher has bound each rank to its own, so that ranks count as more than the processors and do
/// not look on.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Giving the processor to other threads before sleeping.
///
/// Where ranks share processors, the thread that runs next is most likely the rank that this one waits for: it ends the
/// step in a fraction of the time that a sleep and a wake-up take. Where something else keeps the processors busy, though,
/// it runs for its whole time slice, which is far longer than a sleep. So a slow yield is followed by a time without any,
/// longer each time it happens again.
///
/// Where there is a processor for each rank, a yield that nobody takes returns at once, and to look on for about as long as a
/// wake-up from an idle processor takes delays nobody. Once others have run, this rank had better sleep and be woken where there is
/// room; and an idle processor of fewer than ranks had better take one of the waiting ranks from another.
struct Courtesy {
    /// Waits that are left without a yield.
    pause: AtomicU32,
    /// How many the next slow yield costs.
    penalty: AtomicU32,
}

static COURTESY: Courtesy = Courtesy { pause: AtomicU32::new(0), penalty: AtomicU32::new(MIN_PENALTY) };
/// The most yields in which others run.
const TURNS: u32 = 2;
/// A yield that nobody took is quicker than this: one system call, no switch.
const QUICK_YIELD: Duration = Duration::from_nanos(1500);
const SLOW_YIELD: Duration = Duration::from_micros(500);
const LONGEST_LOOK: Duration = Duration::from_micros(50);
const MIN_PENALTY: u32 = 64;
const MAX_PENALTY: u32 = 16_384;

impl Courtesy {
    /// Yields; says whether a word has changed meanwhile. The counters are hints: threads may overwrite each other's.
    fn offer(&self, crowded: bool, moved: impl Fn() -> bool) -> bool {
        let pause = self.pause.load(Ordering::Relaxed);
        if pause > 0 {
            self.pause.store(pause - 1, Ordering::Relaxed);
            return false;
        }
        let began = Instant::now();
        let (mut before, mut turns) = (began, 0);
        while turns < TURNS && (crowded || before.duration_since(began) < LONGEST_LOOK) {
            std::thread::yield_now();
            let after = Instant::now();
            let took = after.duration_since(before);
            before = after;
            turns += u32::from(crowded || took > QUICK_YIELD);
            let slow = took > SLOW_YIELD;
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
pub(crate) fn timeout() -> Option<Duration> {
    from_environment().as_ref().ok().copied().flatten()
}

/// An error where `HOSTCCL_TIMEOUT_MS` is no time: to be asked before a communicator is made.
pub(crate) fn check_timeout() -> Result<()> {
    from_environment().as_ref().map(drop).map_err(Clone::clone)
}

fn from_environment() -> &'static Result<Option<Duration>> {
    static TIMEOUT: OnceLock<Result<Option<Duration>>> = OnceLock::new();
    TIMEOUT.get_or_init(|| read_timeout(std::env::var_os("HOSTCCL_TIMEOUT_MS").as_deref()))
}

/// Empty counts as unset.
fn read_timeout(value: Option<&OsStr>) -> Result<Option<Duration>> {
    let text = value.unwrap_or_default().to_string_lossy();
    let digits = text.trim();
    if digits.is_empty() {
        return Ok(None);
    }
    let millis: u64 = digits.parse().ok().filter(|millis| *millis <= MOST_MILLIS).ok_or_else(|| {
        Error::argument(format!(
            "HOSTCCL_TIMEOUT_MS is {text:?}: it must be a whole number of milliseconds from 0 (no limit) to {MOST_MILLIS}"
        ))
    })?;
    Ok((millis > 0).then(|| Duration::from_millis(millis)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_that_is_no_time_is_refused_with_its_value() {
        for (text, millis) in
            [(None, 0), (Some(""), 0), (Some("0"), 0), (Some(" 300 "), 300), (Some("3153600000000"), MOST_MILLIS)]
        {
            let read = read_timeout(text.map(OsStr::new)).unwrap();
            assert_eq!(read, (millis > 0).then(|| Duration::from_millis(millis)), "{text:?}");
        }
        for text in ["abc", "-1", "1.5", "30s", "3153600000001", "99999999999999999999"] {
            let error = read_timeout(Some(OsStr::new(text))).unwrap_err();
            assert_eq!(error.code(), crate::types::ncclInvalidArgument);
            assert!(error.message().contains(&format!("HOSTCCL_TIMEOUT_MS is {text:?}")), "{}", error.message());
        }
    }
}
