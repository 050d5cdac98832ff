//! Waiting for peers: poll for a moment, then sleep, and look after each slice of sleep whether the
//! peers still live.

mod blocked_call;
mod own_time;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::comm::Comm;
use crate::diagnosis;
use crate::error::{Error, Result};
use crate::event::{self, Watch};
use crate::interrupt::Interrupt;
use crate::outside;
use crate::poll::Blocker;
use crate::rails::Rails;
use crate::recorder;
use crate::spin::{self, Purpose};
use crate::types::ncclRemoteError;
use crate::wire::{Wire, request};

pub(crate) use self::blocked_call::BlockedCall;
pub(crate) use self::own_time::OwnTime;

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
    /// The last look at the bytes that move over the wire: how many of the calls wait for another
    /// process, and the sum of the bytes that had moved between this process and those processes.
    bytes: Option<(usize, u64)>,
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
        let mut is_matched = false;
        for call in calls {
            is_matched |= call.own_time.note(call.blocker, call.is_matched);
        }
        if is_matched {
            self.end(calls);
        }
        if calls.iter().any(|call| call.own_time.is_contested()) {
            self.since.get_or_insert_with(Instant::now);
        }
        // The word of a wire changes with everything that happens there, so a change alone is no
        // progress of these calls.
        let has_progress = || calls.iter().any(|call| call.wire().is_none() && call.has_own_progress());
        let transfers = request::done_here();
        let may_transfer = || calls.iter().any(|call| !call.own_time.is_contested());
        if wire.is_some() && std::mem::replace(&mut self.transfers, transfers) != transfers && may_transfer() {
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
            if self.may_look_later() && !self.is_contested_call_due(calls) {
                return Ok(());
            }
        }
        first_failed(calls, BlockedCall::check)?;
        let since = *self.since.get_or_insert_with(Instant::now);
        // This is the shortest time that a call has left. Each call fails only at its own end.
        let left = || calls.iter().filter_map(|call| call.left(since.elapsed())).min();
        let joining = calls.iter().any(|call| call.blocker == Blocker::Arrivals);
        let mut slice = if joining { JOIN_SLICE } else { SLICE };
        if std::mem::take(&mut self.is_short) {
            slice = outside::MIXED_SLICE;
        }
        if let Some(left) = left() {
            // Some calls wait a little longer than their timeout, and check again and again
            // meanwhile.
            slice = slice.min(if left.is_zero() { OVERTIME_SLICE } else { left });
        }
        // Only ranks of communicators over several hosts note how long they wait.
        for call in calls.iter().filter(|call| call.has_deadline() && call.comm.span.is_some()) {
            let own = call.left(since.elapsed()).unwrap_or(Duration::ZERO);
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
        // The checks below need not run after each short sleep. A change of the wire is no
        // progress, so the deadline stays where it is.
        if (has_changed || self.end.is_some()) && self.may_look_later() && left().is_none_or(|left| !left.is_zero()) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let moved = calls.iter().filter_map(BlockedCall::moved_bytes);
        let (counted, bytes) = moved.fold((0, 0), |(count, sum), bytes| (count + 1, u64::wrapping_add(sum, bytes)));
        // A sum over other calls than at the last look tells nothing.
        if self.bytes.replace((counted, bytes)).is_some_and(|(before, sum)| before == counted && sum != bytes) {
            self.end(calls);
            return Ok(());
        }
        first_failed(calls, BlockedCall::check_peers)?;
        self.ask_interrupts(calls, since)?;
        if since.elapsed() >= FIRST_QUESTION {
            calls.iter().for_each(BlockedCall::note_remote);
        }
        let Some(limit) = calls.iter().filter_map(BlockedCall::limit).min() else { return Ok(()) };
        let waited = limit.saturating_sub(left().unwrap_or(limit));
        self.warn_if_near(calls.iter().filter(|call| call.limit() == Some(limit)), waited, limit);
        if left().is_some_and(|left| !left.is_zero()) {
            return Ok(());
        }
        // The checks above take time, so a call may have made progress meanwhile.
        let has_changed = changed();
        if has_changed && has_progress() {
            self.end(calls);
            return Ok(());
        }
        // A message that has come over the wire may be the one for which a call waits. So the call
        // is polled once more, and only once: messages may go on coming.
        if has_changed && !std::mem::replace(&mut self.is_late, true) {
            return Ok(());
        }
        if let Some(failed) = time_out(calls, since.elapsed()) {
            // The calls that go on have deadlines of their own.
            (self.is_late, self.told) = (false, 0);
            return Err(failed);
        }
        if has_progress() {
            self.end(calls);
        }
        Ok(())
    }

    /// Notes that a call has made progress, or has ended. `calls` are those that still wait.
    pub(crate) fn end(&mut self, calls: &[BlockedCall<'_>]) {
        for call in calls {
            self.leave(call.comm);
            call.own_time.restart();
        }
        (self.since, self.looked, self.asked, self.is_late, self.told) = (None, None, None, false, 0);
    }

    /// Notes that an operation of a communicator does not wait any more.
    pub(crate) fn leave(&self, comm: &Comm) {
        if self.since.is_some() {
            comm.note_waiting(None);
        }
    }

    /// Whether a contested call has used up its time. A call has no deadline while it waits for its
    /// turn. A contested call may happen to wait for its turn at each regular check, and would then
    /// never time out. So its time is also checked when a word has changed.
    fn is_contested_call_due(&self, calls: &[BlockedCall<'_>]) -> bool {
        let waited = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        let mut contested = calls.iter().filter(|call| call.own_time.is_contested());
        contested.any(|call| call.left(waited).is_some_and(|left| left.is_zero()))
    }

    /// Whether this thread may poll its calls first, because something has come over the wire or
    /// the sleep was short, and check the peers and the time later. The thread checks the peers and
    /// the time at least once in each [`SLICE`].
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
        // wakes nobody on the other words, because there are several for each rank and for each
        // pair of ranks. So a thread that sleeps on one of those also watches the alarm.
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
/// Returns the failure of the first of these calls, or `None` where no call fails.
fn time_out(calls: &[BlockedCall<'_>], waited: Duration) -> Option<Failed> {
    let mut first = None;
    for (index, call) in calls.iter().enumerate() {
        if let Some(limit) = call.limit_if_due(waited) {
            let error = diagnosis::time_out(call.comm, (call.blocker, call.seen), limit, &(call.call)());
            first = first.or(error.map(|error| Failed { call: index, error }));
        }
    }
    first
}
