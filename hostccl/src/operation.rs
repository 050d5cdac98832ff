//! Operations under way: each a state machine that never blocks, and the loop that drives several of them to their end.
//!
//! A thread polls its operations; when none can go on it spins for about as long as a sleep costs, then sleeps on the
//! words that they wait for. At the end of each slice of sleep it looks whether the peers still live.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::comm::{Blocker, Comm};
use crate::error::{Error, Result};
use crate::event::{self, Watch};
use crate::types::ncclRemoteError;

/// The longest sleep before looking at the peers.
const SLICE: Duration = Duration::from_millis(100);
/// The longest sleep of an operation whose communicator `ncclCommAbort` cannot wake yet.
const JOIN_SLICE: Duration = Duration::from_millis(20);
/// How long ranks wait for each other to join, when `HOSTCCL_TIMEOUT_MS` does not say.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// Where an operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poll {
    Done,
    /// Nothing to do before the blocker's word differs from `seen`.
    Blocked {
        seen: u32,
        blocker: Blocker,
    },
}

/// A resumable operation.
pub(crate) trait Operation {
    /// Goes on as far as possible without waiting.
    fn poll(&mut self) -> Result<Poll>;

    /// The communicator it waits on; there is one whenever `poll` has said it is blocked.
    fn comm(&self) -> Option<&Arc<Comm>>;

    /// The call with its values, for messages.
    fn describe(&self) -> String;
}

/// Drives one operation to its end.
pub(crate) fn run(operation: &mut dyn Operation) -> Result<()> {
    let mut idle = Idle::default();
    loop {
        let step = operation.poll().and_then(|poll| match poll {
            Poll::Done => Ok(true),
            Poll::Blocked { seen, blocker } => {
                let comm = operation.comm().expect("a blocked operation has a communicator");
                idle.wait(&[(comm, seen, blocker)]).map(|()| false)
            }
        });
        match step {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(error.within(&operation.describe())),
        }
    }
}

/// Operations that take place one after another.
pub(crate) type Lane<'a> = std::collections::VecDeque<Box<dyn Operation + 'a>>;

/// Drives all lanes to their ends. When an operation fails its lane ends, the others go on as their peers expect; the
/// first failure is returned.
pub(crate) fn run_all(lanes: &mut Vec<Lane<'_>>) -> Result<()> {
    let mut idle = Idle::default();
    let mut first = Ok(());
    loop {
        let mut blocked = Vec::with_capacity(lanes.len());
        lanes.retain_mut(|lane| {
            while let Some(operation) = lane.front_mut() {
                match operation.poll() {
                    Ok(Poll::Done) => {
                        lane.pop_front();
                    }
                    Ok(Poll::Blocked { seen, blocker }) => {
                        blocked.push((seen, blocker));
                        return true;
                    }
                    Err(error) => {
                        let error = error.within(&operation.describe());
                        if first.is_ok() {
                            first = Err(error);
                        }
                        return false;
                    }
                }
            }
            false
        });
        if lanes.is_empty() {
            return first;
        }
        let waits: Vec<_> = lanes
            .iter()
            .zip(&blocked)
            .filter_map(|(lane, &(seen, blocker))| Some((lane.front()?.comm()?, seen, blocker)))
            .collect();
        // A failure found while waiting is the communicator's: its lanes meet it when polled next.
        if let Err(error) = idle.wait(&waits) {
            let blame = lanes.iter().find_map(|lane| {
                let operation = lane.front()?;
                operation.comm()?.check().is_err().then(|| operation.describe())
            });
            let error = blame.iter().fold(error, |error, call| error.within(call));
            if first.is_ok() {
                first = Err(error);
            }
            lanes.retain(|lane| {
                lane.front().and_then(|operation| operation.comm()).is_some_and(|comm| comm.check().is_ok())
            });
        }
    }
}

/// A thread's waiting: since when, and for how long at most.
#[derive(Default)]
struct Idle {
    since: Option<Instant>,
}

impl Idle {
    /// Waits until one of the operations may go on.
    fn wait(&mut self, waits: &[(&Arc<Comm>, u32, Blocker)]) -> Result<()> {
        let moved = || waits.iter().any(|&(comm, seen, blocker)| comm.event(blocker).value() != seen);
        for _ in 0..spins(waits) {
            if moved() {
                self.since = None;
                return Ok(());
            }
            std::hint::spin_loop();
        }
        for &(comm, ..) in waits {
            comm.check()?;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let joining = waits.iter().any(|wait| wait.2 == Blocker::Arrivals);
        let timeout = timeout().or(joining.then_some(JOIN_TIMEOUT));
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
fn expired(waits: &[(&Arc<Comm>, u32, Blocker)], timeout: Duration) -> Error {
    let errors = waits.iter().map(|&(comm, _, blocker)| {
        let message = format!("{} did not come within {} ms", comm.missing(blocker), timeout.as_millis());
        comm.fail(ncclRemoteError, None, &message)
    });
    errors.collect::<Vec<_>>().swap_remove(0)
}

/// Looks at the words before sleeping: about the time that falling asleep and being woken takes, so that waiting never
/// costs more than twice what it must; next to none when the ranks outnumber the processors, since then somebody else needs
/// this one.
fn spins(waits: &[(&Arc<Comm>, u32, Blocker)]) -> u32 {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let processors = *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
    let ranks = waits.iter().map(|(comm, ..)| comm.nranks).max().unwrap_or(0);
    if ranks <= processors { 400 } else { 20 }
}

/// `HOSTCCL_TIMEOUT_MS`: how long a wait without any progress may last; unset or 0: forever.
fn timeout() -> Option<Duration> {
    static TIMEOUT: OnceLock<Option<Duration>> = OnceLock::new();
    *TIMEOUT.get_or_init(|| {
        let millis = std::env::var("HOSTCCL_TIMEOUT_MS").ok()?.trim().parse().ok()?;
        (millis > 0).then(|| Duration::from_millis(millis))
    })
}
