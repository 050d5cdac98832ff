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
use crate::poll::Blocker;
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
}

/// A thread's wait for its calls, from the last progress on.
#[derive(Default)]
pub(crate) struct Wait {
    /// When the thread last saw progress; `None` until it has to sleep.
    since: Option<Instant>,
    /// The communicators' own timeout as it was when the wait began, because a call keeps the
    /// timeout with which it started. The outer `None` means that the timeout was not read yet.
    comm_timeout: Option<Option<Duration>>,
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

    /// Waits until one of the calls may continue. This function may return earlier. Fails when a
    /// communicator has failed, when a peer that is waited for has left or died, and when the time
    /// is up.
    pub(crate) fn until_any_may_continue(&mut self, calls: &[BlockedCall<'_>]) -> Result<()> {
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
        let ended = || calls.iter().filter(|call| call.ends_with_comm());
        for call in ended() {
            call.comm.check_waiting(call.blocker).map_err(|error| call.comm.add_missing(error, call.blocker))?;
        }
        let timed = || calls.iter().filter(|call| call.has_deadline());
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.comm_timeout.is_none() && timed().next().is_some() {
            self.comm_timeout = Some(timed().filter_map(|call| call.comm.timeout()).min());
        }
        // The time of a handle may change while the communicator is made.
        let of_handles = timed().filter_map(|call| call.timeout);
        let set = of_handles.chain(self.comm_timeout.flatten()).min().or_else(timeout::from_environment);
        let timeout = set.or_else(|| timed().filter_map(|call| call.default_timeout).min());
        let timeout = timeout.filter(|_| timed().next().is_some());
        let joining = calls.iter().any(|call| call.blocker == Blocker::Arrivals);
        let mut slice = if joining { JOIN_SLICE } else { SLICE };
        if std::mem::take(&mut self.is_short) {
            slice = outside::MIXED_SLICE;
        }
        if let Some(timeout) = timeout {
            // Some calls wait a little longer than their timeout, and check again and again
            // meanwhile.
            let left = timeout.saturating_sub(since.elapsed());
            slice = slice.min(if left.is_zero() { OVERTIME_SLICE } else { left });
        }
        // Only ranks of communicators over several hosts note how long they wait.
        for call in timed().filter(|call| call.comm.span.is_some()) {
            let own = timeout.map_or(Duration::ZERO, |timeout| timeout.saturating_sub(since.elapsed()));
            let others = call.comm.others_wait_until(call.blocker, LATELY);
            let others = others.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
            call.comm.note_waiting(Some(own.max(others)));
        }
        sleep(calls, wire, slice);
        if changed() {
            if has_progress() {
                self.end(calls);
                return Ok(());
            }
            // This is no progress, so the deadline stays where it is.
            if self.may_look_later() && timeout.is_none_or(|timeout| since.elapsed() < timeout) {
                return Ok(());
            }
        }
        self.looked = Some(Instant::now());
        let bytes = calls.iter().map(BlockedCall::moved_bytes).fold(0, u64::wrapping_add);
        if self.bytes.replace(bytes).is_some_and(|before| before != bytes) {
            self.end(calls);
            return Ok(());
        }
        for call in ended() {
            let checked = call.comm.check_peers(Some((call.blocker, call.seen)), call.call);
            checked.map_err(|error| call.comm.add_missing(error, call.blocker))?;
        }
        self.ask_interrupts(ended(), since)?;
        if since.elapsed() >= FIRST_QUESTION {
            calls.iter().for_each(BlockedCall::note_remote);
        }
        if let Some(timeout) = timeout {
            self.warn_if_near(timed(), since.elapsed(), timeout);
        }
        match timeout {
            // A message that has come over the wire may be the one for which a call waits. So the
            // call is polled once more, and only once: messages may go on coming.
            Some(timeout) if since.elapsed() >= timeout && changed() && !std::mem::replace(&mut self.is_late, true) => {
                Ok(())
            }
            Some(timeout) if since.elapsed() >= timeout => {
                let over = since.elapsed() - timeout;
                let is_due = |call: &&BlockedCall<'_>| diagnosis::is_due(call.comm, call.blocker, timeout, over);
                time_out(timed().filter(is_due), timeout).map_or(Ok(()), Err)
            }
            _ => Ok(()),
        }
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

    /// Whether this thread may poll its calls first, because something has come over the wire, and
    /// check the peers and the time later. The thread checks them at least once in each [`SLICE`].
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
    fn ask_interrupts<'a>(&mut self, calls: impl Iterator<Item = &'a BlockedCall<'a>>, since: Instant) -> Result<()> {
        if since.elapsed() < FIRST_QUESTION || self.asked.is_some_and(|asked| asked.elapsed() < SLICE) {
            return Ok(());
        }
        self.asked = Some(Instant::now());
        for call in calls {
            if let Some(why) = call.comm.interrupt().and_then(Interrupt::reason) {
                return Err(call.comm.fail_in(ncclRemoteError, Blame::none(), &why, &(call.call)()));
            }
        }
        Ok(())
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
        // A failure wakes the threads that sleep on a barrier. There are too many channels to wake
        // the sleepers of each one, so threads that sleep on a channel watch the alarm as well.
        let alarm = &call.comm.segment.header().alarm;
        let pairwise = matches!(
            call.blocker,
            Blocker::From(_)
                | Blocker::OtherSeats(_)
                | Blocker::To { .. }
                | Blocker::Turn
                | Blocker::OtherCall(_)
                | Blocker::Wire { .. }
                | Blocker::RemoteMessage { .. }
        );
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

/// Ends the communicators of these calls, whose time is up. Returns the error of the first call, or
/// `None` where there is no call.
fn time_out<'a>(calls: impl Iterator<Item = &'a BlockedCall<'a>>, timeout: Duration) -> Option<Error> {
    let errors = calls.map(|call| diagnosis::time_out(call.comm, call.blocker, timeout, &(call.call)()));
    errors.collect::<Vec<_>>().into_iter().next()
}
