//! How a rank ends its part in a communicator: it finalizes, leaves, or aborts it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Comm;
use crate::blame::Blame;
use crate::error::{Error, Result};
use crate::event::{self, Watch};
use crate::remote::Remote;
use crate::timeout;
use crate::types::*;

impl Comm {
    /// Refuses later calls, and waits until no call of this rank is under way, but at most as long
    /// as a call may wait. Fails when a call is still under way after that time.
    pub(crate) fn finalize(&self) -> Result<()> {
        if self.is_revoked() {
            return Err(Error::argument(format!("{} was revoked by ncclCommRevoke: destroy or abort it", self.name())));
        }
        self.check_open()?;
        self.finalized.store(true, Ordering::Release);
        self.wait_until_idle(self.timeout().or_else(timeout::from_environment))
    }

    /// Ends the calls of all ranks, and refuses later calls of this rank. Afterwards the
    /// communicator may be split or shrunk, whatever has ended its calls. Fails when this rank has
    /// revoked or finalized it before.
    pub(crate) fn revoke(&self) -> Result<()> {
        let already = |what| Err(Error::argument(format!("{} was {what} before on this rank", self.name())));
        if self.finalized.load(Ordering::Acquire) {
            return already("finalized");
        }
        if self.revoked.swap(true, Ordering::AcqRel) {
            return already("revoked");
        }
        self.end_calls("revoked");
        let message = format!("{} revoked the communicator that was to grow", self.describe(self.rank));
        self.end_growth(&Error::new(ncclRemoteError, message).by(Blame::of([self.whole().0])));
        Ok(())
    }

    /// Ends the calls of all ranks. `what` says what this rank has done to the communicator.
    pub(crate) fn end_calls(&self, what: &str) {
        let message = format!("{} {what} the communicator", self.describe(self.rank));
        self.fail(ncclRemoteError, Blame::of([self.rank]), &message);
    }

    /// Waits until no call of this rank is under way. Fails when a call is still under way after
    /// `timeout`. With `None` it waits without a limit.
    pub(crate) fn wait_until_idle(&self, timeout: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        while self.places.is_busy() || self.remote.as_ref().is_some_and(Remote::is_busy) {
            self.check_aborted()?;
            if let Some(timeout) = timeout.filter(|timeout| began.elapsed() >= *timeout) {
                let message = format!(
                    "a call of another thread of {} on {} is still under way after {} ms",
                    self.label(self.rank),
                    self.name(),
                    timeout.as_millis()
                );
                return Err(Error::new(ncclTimeout, message).after(began.elapsed()));
            }
            let changed = &self.places.changed;
            event::sleep(&[Watch { event: changed, seen: changed.value() }], None, Duration::from_millis(1));
        }
        Ok(())
    }

    /// Tells the peers that this rank has left the communicator.
    pub(crate) fn leave(&self) {
        self.leave_as(self.next_departure());
    }

    /// Counts this rank among those that leave, and returns its place in their order.
    fn next_departure(&self) -> u32 {
        self.segment.header().departures.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn leave_as(&self, departure: u32) {
        let message = format!("{} has destroyed the communicator that was to grow", self.describe(self.rank));
        self.end_growth(&Error::new(ncclRemoteError, message).by(Blame::of([self.whole().0])));
        let header = self.segment.header();
        let left = &self.segment.seat(self.rank).left;
        let had_left = left.compare_exchange(0, departure, Ordering::SeqCst, Ordering::Relaxed).is_err();
        // The ranks that wait for this one look at their peers when they wake.
        header.alarm.wake();
        header.steps.ended.wake();
        header.steps.count.wake();
        header.arrived.wake();
        header.wants.wake();
        header.verdict.wake();
        if let (Some(span), Some(remote)) = (&self.span, &self.remote) {
            if !had_left {
                remote.tell_left(span, self.written_failure().is_some());
            }
        }
    }

    /// Returns what the other ranks read after this rank has aborted the communicator.
    pub(crate) fn told_of_abort(&self) -> String {
        format!("{} aborted its communicator", self.describe(self.rank))
    }

    /// Ends all calls on all ranks. The caller has already raised the abort flag of this
    /// communicator.
    pub(crate) fn abort(&self) {
        // A rank that leaves because it has read this failure gets a later place in the order.
        let departure = self.next_departure();
        if self.whole().1 > 1 {
            self.fail(ncclRemoteError, Blame::of([self.rank]), &self.told_of_abort());
        }
        self.leave_as(departure);
    }
}
