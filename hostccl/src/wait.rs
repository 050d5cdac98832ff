//! Waiting for peers: poll for a moment, then sleep, and look after each slice of sleep whether the
//! peers still live.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::diagnosis;
use crate::error::{Error, Result};
use crate::event::{self, Watch};
use crate::interrupt::Interrupt;
use crate::outside;
use crate::poll::{Blocker, Poll};
use crate::rails::Rails;
use crate::recorder;
use crate::spin::{self, Purpose};
use crate::timeout;
use crate::types::ncclRemoteError;
use crate::wire::{Wire, request};

/// The longest sleep before a thread looks at the peers.
const SLICE: Duration = Duration::from_millis(100);
/// The longest sleep while a communicator is made, because `ncclCommAbort` cannot wake that sleep.
const JOIN_SLICE: Duration = Duration::from_millis(20);
/// The longest sleep of a call whose time is up, while it asks other ranks what they wait for.
const OVERTIME_SLICE: Duration = Duration::from_millis(5);
/// How long a call waits without progress before it asks the interrupt of its communicator. Most
/// waits are shorter.
const FIRST_QUESTION: Duration = Duration::from_millis(250);
/// How old the answer of a waiting rank may be when the rank that asked repeats it to others. A
/// rank that waits asks once a second.
const LATELY: Duration = Duration::from_secs(2);
/// The log does not warn of waits whose timeout is at most this time, because these waits are
/// short.
const SHORT_WAIT: Duration = Duration::from_secs(5);

/// A call that is blocked, and what it waits for.
pub(crate) struct BlockedCall<'a> {
    /// The communicator on which the call waits.
    pub(crate) comm: &'a Arc<Comm>,
    /// The value that the call saw in the blocker's word.
    pub(crate) seen: u32,
    /// The reason why the call is blocked.
    pub(crate) blocker: Blocker,
    /// How long the call may wait without progress, if the call's handle sets a timeout.
    pub(crate) timeout: Option<Duration>,
    /// How long the call may wait without progress, if nothing else sets a timeout.
    pub(crate) default_timeout: Option<Duration>,
    /// The communicator's timeout as it was when the call first waited with a deadline, because a
    /// call keeps the timeout with which it started. The outer `None` means that no wait has read
    /// the timeout yet.
    pub(crate) comm_timeout: &'a Cell<Option<Option<Duration>>>,
    /// Describes the call, for messages.
    pub(crate) call: &'a dyn Fn() -> String,
}

impl BlockedCall<'_> {
    /// The wire on which the call has messages under way. A process has one wire.
    fn wire(&self) -> Option<&dyn Wire> {
        let span = self.comm.span.as_ref()?;
        let waits =
            matches!(self.blocker, Blocker::Wire { .. } | Blocker::RemoteMessage { .. } | Blocker::HostNames { .. });
        // A call that waits for a rank of its own host may still send to other hosts.
        let sends = || self.comm.rails.as_ref().is_some_and(|rails| rails.transfers.load(Ordering::Relaxed) > 0);
        (waits || sends()).then(|| &*span.wire)
    }

    /// How many bytes of messages have moved between this process and the one for which the call
    /// waits.
    fn moved_bytes(&self) -> u64 {
        let (Blocker::Wire { from, .. } | Blocker::RemoteMessage { peer: from, .. }) = self.blocker else { return 0 };
        let span = self.comm.span.as_ref();
        span.and_then(|span| Some(span.wire.moved_bytes(span.peers[from]?, span.comm))).unwrap_or(0)
    }

    /// Whether the word for which the call waits is the wire's.
    fn waits_for_wire(&self) -> bool {
        matches!(self.blocker, Blocker::Wire { .. } | Blocker::RemoteMessage { .. })
    }

    /// Notes for which rank of another host the call waits, if it waits for one.
    fn note_remote(&self) {
        if let Blocker::Wire { from: rank } | Blocker::RemoteMessage { peer: rank, .. } = self.blocker {
            recorder::note_remote(self.comm.labels.number(rank));
        }
    }

    fn may_continue(&self) -> bool {
        self.comm.event(self.blocker).value() != self.seen
            || self.comm.second_event(self.blocker).is_some_and(|second| second.event.value() != second.seen)
    }

    /// Whether the failure of the communicator ends this wait.
    fn ends_with_comm(&self) -> bool {
        !matches!(self.blocker, Blocker::NewSegment(_))
    }

    /// Whether a deadline ends this wait. A call that waits for its turn needs none, because the
    /// call that is inside has one.
    fn has_deadline(&self) -> bool {
        self.ends_with_comm() && self.blocker != Blocker::Turn
    }

    /// How long the call may wait without progress; `None` where no deadline ends this wait.
    fn limit(&self) -> Option<Duration> {
        if !self.has_deadline() {
            return None;
        }
        let of_comm = self.comm_timeout.get().unwrap_or_else(|| self.comm.timeout());
        self.comm_timeout.set(Some(of_comm));
        // The time of a handle may change while the communicator is made.
        let set = self.timeout.into_iter().chain(of_comm).min();
        set.or_else(timeout::from_environment).or(self.default_timeout)
    }

    /// Returns how long the call may wait, if it fails now because it has waited for `waited`.
    fn limit_if_due(&self, waited: Duration) -> Option<Duration> {
        self.limit().filter(|limit| {
            waited >= *limit && diagnosis::is_due(self.comm, self.blocker, *limit, waited.saturating_sub(*limit))
        })
    }

    /// Fails when the communicator has failed, unless the call may continue.
    fn check(&self) -> Result<()> {
        let blocked = Poll::Blocked { seen: self.seen, blocker: self.blocker };
        let checked = self.comm.check_waiting(blocked).map(drop);
        checked.map_err(|error| self.comm.add_missing(error, self.blocker))
    }

    /// Fails when a peer of the call has left or died.
    fn check_peers(&self) -> Result<()> {
        let checked = self.comm.check_peers(Some((self.blocker, self.seen)), self.call);
        checked.map_err(|error| self.comm.add_missing(error, self.blocker))
    }
}

/// The failure of one of the calls that wait.
pub(crate) struct Failed {
    /// The index of the call among those that wait.
    pub(crate) call: usize,
    /// The reason.
    pub(crate) error: Error,
}

/// A thread's wait for its calls, from the last progress on.
#[derive(Default)]
pub(crate) struct Wait {
    /// When the thread last saw progress; `None` until it has to sleep.
    since: Option<Instant>,
    /// How many bytes had moved over the wire, between this process and those for which the calls
    /// wait, at the last look.
    bytes: Option<u64>,
    /// When the thread looked at the peers last; `None` since the last progress.
    looked: Option<Instant>,
    /// Whether the calls were polled once more after their time was up.
    is_late: bool,
    /// How many transfers over the wire the thread had found done at the last look.
    transfers: u64,
    /// How many per cent of the time were used up when the log last said so: 0, 50 or 90.
    told: u8,
    /// When the thread asked the interrupts of the communicators last; `None` since the last
    /// progress.
    asked: Option<Instant>,
    /// Whether the next wait is short, because the thread also waits for connections.
    is_short: bool,
    /// When the wait ends although no call may continue; `None` where only the calls end it.
    end: Option<Instant>,
}

impl Wait {
    /// Adds the time for which the calls have waited to an error, if they have waited.
    pub(crate) fn time(&self, error: Error) -> Error {
        match self.since {
            Some(since) => error.after(since.elapsed()),
            None => error,
        }
    }

    /// Makes the next wait short, because the thread also waits for connections.
    pub(crate) fn look_soon(&mut self) {
        self.is_short = true;
    }

    /// Makes all waits end at `end`, until another end is set.
    pub(crate) fn end_at(&mut self, end: Instant) {
        self.end = Some(end);
    }

    /// Returns `slice`, or the time that is left until the end where that time is shorter.
    pub(crate) fn shortened(&self, slice: Duration) -> Duration {
        self.end.map_or(slice, |end| slice.min(end.saturating_duration_since(Instant::now())))
    }

    /// Waits until one of the calls may continue. This function may return earlier. Fails when the
    /// communicator of a call has failed, when a peer that is waited for has left or died, and when
    /// the time of a call is up. The other calls may still succeed then.
    pub(crate) fn until_any_may_continue(&mut self, calls: &[BlockedCall<'_>]) -> Result<(), Failed> {
        let looked = Cell::new(recorder::note_wait());
        let wire = calls.iter().find_map(|call| call.wire());
        let changed = || {
            if let Some(wire) = wire {
                wire.progress();
            }
            calls.iter().any(BlockedCall::may_continue)
        };
        // The word of a wire changes with everything that happens there, so a change alone is no
        // progress of these calls.
        let has_progress = || wire.is_none() || calls.iter().any(|call| call.wire().is_none() && call.may_continue());
        let transfers = request::done_here();
        if wire.is_some() && std::mem::replace(&mut self.transfers, transfers) != transfers {
            self.end(calls);
        }
        let is_met = calls.iter().all(|call| call.comm.rails.as_deref().is_some_and(Rails::is_meeting));
        let purpose = if is_met {
            Purpose::Meeting
        } else if calls.iter().all(|call| matches!(call.blocker, Blocker::From(_) | Blocker::To { .. })) {
            Purpose::Message
        } else {
            Purpose::Other
        };
        let clock = recorder::quick_clock();
        let look = || clock.iter().for_each(|clock| looked.set(clock.ticks()));
        let is_crowded = || calls.iter().any(|call| call.comm.is_crowded());
        let may_continue = match wire {
            Some(_) => spin::poll_wire(purpose, changed),
            None => spin::spin_then_yield(is_crowded(), purpose, changed, look),
        };
        match may_continue {
            true if clock.is_some() && looked.get() != 0 => recorder::note_end_of_wait(looked.get()),
            true => {}
            false => recorder::note_sleep(),
        }
        if may_continue {
            if has_progress() {
                self.end(calls);
                return Ok(());
            }
            if self.may_look_later() {
                return Ok(());
            }
        }
        first_failed(calls, BlockedCall::check)?;
        let since = *self.since.get_or_insert_with(Instant::now);
        // This is the shortest limit of all calls. Each call fails only at the end of its own limit.
        let limit = calls.iter().filter_map(BlockedCall::limit).min();
        let joining = calls.iter().any(|call| call.blocker == Blocker::Arrivals);
        let mut slice = if joining { JOIN_SLICE } else { SLICE };
        if std::mem::take(&mut self.is_short) {
            slice = outside::MIXED_SLICE;
        }
        if let Some(limit) = limit {
            // Some calls wait a little longer than their timeout, and check again and again
            // meanwhile.
            let left = limit.saturating_sub(since.elapsed());
            slice = slice.min(if left.is_zero() { OVERTIME_SLICE } else { left });
        }
        // Only ranks of communicators over several hosts note how long they wait.
        for call in calls.iter().filter(|call| call.has_deadline() && call.comm.span.is_some()) {
            let own = call.limit().map_or(Duration::ZERO, |limit| limit.saturating_sub(since.elapsed()));
            let others = call.comm.others_wait_until(call.blocker, LATELY);
            let others = others.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
            call.comm.note_waiting(Some(own.max(others)));
        }
        sleep(calls, wire, self.shortened(slice));
        let has_changed = changed();
        if has_changed && has_progress() {
            self.end(calls);
            return Ok(());
        }
        // The checks below need not run after each short sleep. A change of the wire is no progress,
        // so the deadline stays where it is.
        if (has_changed || self.end.is_some())
            && self.may_look_later()
            && limit.is_none_or(|limit| since.elapsed() < limit)
        {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let bytes = calls.iter().map(BlockedCall::moved_bytes).fold(0, u64::wrapping_add);
        if self.bytes.replace(bytes).is_some_and(|before| before != bytes) {
            self.end(calls);
            return Ok(());
        }
        first_failed(calls, BlockedCall::check_peers)?;
        self.ask_interrupts(calls, since)?;
        if since.elapsed() >= FIRST_QUESTION {
            calls.iter().for_each(BlockedCall::note_remote);
        }
        let Some(limit) = limit else { return Ok(()) };
        self.warn_if_near(calls.iter().filter(|call| call.limit() == Some(limit)), since.elapsed(), limit);
        let waited = since.elapsed();
        // A message that has come over the wire may be the one for which a call waits. So the call
        // is polled once more, and only once: messages may go on coming.
        if waited < limit || changed() && !std::mem::replace(&mut self.is_late, true) {
            return Ok(());
        }
        time_out(calls, waited).map_or(Ok(()), |failed| {
            // The calls that go on have later deadlines of their own.
            (self.is_late, self.told) = (false, 0);
            Err(failed)
        })
    }

    /// Notes that a call has made progress.
    fn end(&mut self, calls: &[BlockedCall<'_>]) {
        calls.iter().for_each(|call| self.leave(call.comm));
        (self.since, self.looked, self.asked, self.is_late, self.told) = (None, None, None, false, 0);
    }

    /// Notes that an operation of a communicator does not wait any more.
    pub(crate) fn leave(&self, comm: &Comm) {
        if self.since.is_some() {
            comm.note_waiting(None);
        }
    }

    /// Whether this thread may poll its calls first, because something has come over the wire or
    /// the sleep was short, and check the peers and the time later. The thread checks them at least once in each [`SLICE`].
    fn may_look_later(&mut self) -> bool {
        let now = Instant::now();
        let last = self.looked.or(self.since).unwrap_or(now);
        self.since.get_or_insert(now);
        now.duration_since(last) < SLICE
    }
}

impl Wait {
    /// Asks the interrupts of these calls' communicators, at most once a slice. Ends a
    /// communicator whose interrupt gives a reason.
    fn ask_interrupts(&mut self, calls: &[BlockedCall<'_>], since: Instant) -> Result<(), Failed> {
        if since.elapsed() < FIRST_QUESTION || self.asked.is_some_and(|asked| asked.elapsed() < SLICE) {
            return Ok(());
        }
        self.asked = Some(Instant::now());
        first_failed(calls, |call| match call.comm.interrupt().and_then(Interrupt::reason) {
            Some(why) => Err(call.comm.fail_in(ncclRemoteError, Blame::none(), &why, &(call.call)())),
            None => Ok(()),
        })
    }

    /// Warns in the log when 50 % and again when 90 % of the time of these calls have passed. The
    /// warning names the ranks for which the first of these calls waits.
    fn warn_if_near<'a>(
        &mut self,
        mut calls: impl Iterator<Item = &'a BlockedCall<'a>>,
        waited: Duration,
        timeout: Duration,
    ) {
        let percent = match waited {
            waited if waited >= timeout / 10 * 9 => 90,
            waited if waited >= timeout / 2 => 50,
            _ => 0,
        };
        if timeout <= SHORT_WAIT || percent <= self.told || !log::log_enabled!(log::Level::Warn) {
            return;
        }
        self.told = percent;
        if let Some(call) = calls.next() {
            let (comm, missing) = (call.comm, call.comm.missing(call.blocker));
            let who = if missing.is_empty() { "other ranks".to_owned() } else { comm.labels.ranks(&missing) };
            let (me, millis) = (comm.label(comm.rank), timeout.as_millis());
            log::warn!("{me}: {} waits for {who}: {percent} % of its {millis} ms have passed", (call.call)());
        }
    }
}

/// Sleeps on all words at once.
fn sleep(calls: &[BlockedCall<'_>], wire: Option<&dyn Wire>, slice: Duration) {
    let mut watches: Vec<Watch<'_>> = Vec::with_capacity(calls.len() + 1);
    for call in calls {
        watches.push(Watch { event: call.comm.event(call.blocker), seen: call.seen });
        watches.extend(call.comm.second_event(call.blocker));
        // A failure wakes the threads that sleep on words of the header, which all ranks use. It
        // wakes nobody on the other words, because there are several for each rank and for each pair
        // of ranks. So a thread that sleeps on one of those also watches the alarm.
        let alarm = &call.comm.segment.header().alarm;
        let pairwise = match call.blocker {
            Blocker::Step(_) => call.comm.other_of_two().is_some(),
            Blocker::From(_)
            | Blocker::OtherSeats(_)
            | Blocker::To { .. }
            | Blocker::Turn
            | Blocker::OtherCall(_)
            | Blocker::Wire { .. }
            | Blocker::RemoteMessage { .. } => true,
            Blocker::Arrivals
            | Blocker::CommonName(_)
            | Blocker::HostNames { .. }
            | Blocker::Decision(_)
            | Blocker::NewSegment(_) => false,
        };
        if pairwise && !watches.iter().any(|watch| std::ptr::eq(watch.event, alarm)) {
            watches.push(Watch { event: alarm, seen: 0 });
        }
    }
    let Some(wire) = wire else {
        // The words of several communicators have no common doorbell. The words of one `Comm` are
        // in its segment or in the `Comm` itself.
        let comm = calls.first().map(|call| call.comm);
        let comm = comm.filter(|comm| calls.iter().all(|call| Arc::ptr_eq(call.comm, comm)));
        return event::sleep(&watches, comm.map(|comm| comm.segment.bell(comm.rank)), slice);
    };
    if calls.iter().all(BlockedCall::waits_for_wire) {
        let seen = calls[0].seen;
        watches.retain(|watch| !std::ptr::eq(watch.event, wire.moved()) || watch.seen != seen);
        return wire.sleep_on_wire(seen, &watches, slice);
    }
    wire.sleep(&watches, slice);
}

/// Returns the first failure of a check of the calls that end with their communicators.
fn first_failed<'a>(
    calls: &'a [BlockedCall<'a>],
    check: impl Fn(&BlockedCall<'a>) -> Result<()>,
) -> Result<(), Failed> {
    let mut ended = calls.iter().enumerate().filter(|(_, call)| call.ends_with_comm());
    ended.try_for_each(|(index, call)| check(call).map_err(|error| Failed { call: index, error }))
}

/// Ends the communicators of the calls whose time is up after they have waited for `waited`.
/// Returns the failure of the first of these calls, or `None` where there is none.
fn time_out(calls: &[BlockedCall<'_>], waited: Duration) -> Option<Failed> {
    let mut first = None;
    for (index, call) in calls.iter().enumerate() {
        if let Some(limit) = call.limit_if_due(waited) {
            let error = diagnosis::time_out(call.comm, call.blocker, limit, &(call.call)());
            first = first.or(Some(Failed { call: index, error }));
        }
    }
    first
}
