//! A call that is blocked.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::own_time::OwnTime;
use crate::comm::Comm;
use crate::diagnosis;
use crate::error::Result;
use crate::poll::{Blocker, Poll};
use crate::recorder;
use crate::timeout;
use crate::wire::Wire;

/// A call that is blocked, and what it waits for.
pub(crate) struct BlockedCall<'a> {
    /// The communicator on which the call waits.
    pub(crate) comm: &'a Arc<Comm>,
    /// The value that the call saw in the blocker's word.
    pub(crate) seen: u32,
    /// The reason why the call is blocked.
    pub(crate) blocker: Blocker,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
    /// How long the call may wait without progress, if the call's handle sets a timeout.
    pub(crate) timeout: Option<Duration>,
    /// How long the call may wait without progress, if nothing else sets a timeout.
    pub(crate) default_timeout: Option<Duration>,
    /// The communicator's timeout as it was when the call first waited with a deadline, because a
    /// call keeps the timeout with which it started. The outer `None` means that no wait has read
    /// the timeout yet.
    pub(crate) comm_timeout: &'a Cell<Option<Option<Duration>>>,
    /// Whether the other ranks have made the same call
    /// ([`Operation::is_matched`](crate::operation::Operation::is_matched)).
    pub(crate) is_matched: bool,
    /// The time of the call that counts for its deadline.
    pub(crate) own_time: &'a OwnTime,
    /// Describes the call, for messages.
    pub(crate) call: &'a dyn Fn() -> String,
}

impl BlockedCall<'_> {
    /// The wire on which the call has messages under way. A process has one wire.
    pub(super) fn wire(&self) -> Option<&dyn Wire> {
        let span = self.comm.span.as_ref()?;
        let waits =
            matches!(self.blocker, Blocker::Wire { .. } | Blocker::RemoteMessage { .. } | Blocker::HostNames { .. });
        // A call that waits for a rank of its own host may still send to other hosts.
        let sends = || self.comm.rails.as_ref().is_some_and(|rails| rails.transfers.load(Ordering::Relaxed) > 0);
        (waits || sends()).then(|| &*span.wire)
    }

    /// How many bytes of messages have moved between this process and the one for which the call
    /// waits. `None` where the call waits for no other process, or where these bytes may belong to
    /// other calls.
    pub(super) fn moved_bytes(&self) -> Option<u64> {
        if !self.is_matched && (self.own_time.is_contested() || self.comm.has_several_calls()) {
            return None;
        }
        let (Blocker::Wire { from, .. } | Blocker::RemoteMessage { peer: from, .. }) = self.blocker else {
            return None;
        };
        let span = self.comm.span.as_ref()?;
        Some(span.wire.moved_bytes(span.peers[from]?, span.comm))
    }

    /// Whether the word for which the call waits is the wire's.
    pub(super) fn waits_for_wire(&self) -> bool {
        matches!(self.blocker, Blocker::Wire { .. } | Blocker::RemoteMessage { .. })
    }

    /// Notes for which rank of another host the call waits, if it waits for one.
    pub(super) fn note_remote(&self) {
        if let Blocker::Wire { from: rank } | Blocker::RemoteMessage { peer: rank, .. } = self.blocker {
            recorder::note_remote(self.comm.labels.number(rank));
        }
    }

    pub(super) fn may_continue(&self) -> bool {
        self.comm.event(self.blocker).value() != self.seen
            || self.comm.second_event(self.blocker).is_some_and(|second| second.event.value() != second.seen)
    }

    /// Whether the change for which the call may continue is progress of the call. Words change for
    /// calls under other names, too.
    pub(super) fn has_own_progress(&self) -> bool {
        match self.blocker {
            _ if self.own_time.is_contested() => false,
            Blocker::To { .. } => self.comm.event(self.blocker).value() != self.seen,
            _ => self.may_continue(),
        }
    }

    /// Whether the failure of the communicator ends this wait.
    pub(super) fn ends_with_comm(&self) -> bool {
        !matches!(self.blocker, Blocker::NewSegment(_))
    }

    /// Whether a deadline ends this wait. A call that waits for its turn needs none, because the
    /// call that is inside has one.
    pub(super) fn has_deadline(&self) -> bool {
        self.ends_with_comm() && self.blocker != Blocker::Turn
    }

    /// How long the call may wait without progress; `None` where no deadline ends this wait.
    pub(super) fn limit(&self) -> Option<Duration> {
        if !self.has_deadline() {
            return None;
        }
        if self.call_timeout.is_some() {
            return self.call_timeout;
        }
        let of_comm = self.comm_timeout.get().unwrap_or_else(|| self.comm.timeout());
        self.comm_timeout.set(Some(of_comm));
        // The time of a handle may change while the communicator is made.
        let set = self.timeout.into_iter().chain(of_comm).min();
        set.or_else(timeout::from_environment).or(self.default_timeout)
    }

    /// Returns how much time the call has left, where the last progress was `waited` ago; `None`
    /// where no deadline ends this wait.
    pub(super) fn left(&self, waited: Duration) -> Option<Duration> {
        self.limit().map(|limit| limit.saturating_sub(self.own_time.counted(waited, limit)))
    }

    /// Returns how long the call may wait, if it fails now because the last progress was `waited`
    /// ago.
    pub(super) fn limit_if_due(&self, waited: Duration) -> Option<Duration> {
        self.limit().filter(|limit| {
            let over = self.own_time.counted(waited, *limit).checked_sub(*limit);
            over.is_some_and(|over| diagnosis::is_due(self.comm, self.blocker, *limit, over))
        })
    }

    /// Fails when the communicator has failed, unless the call may continue.
    pub(super) fn check(&self) -> Result<()> {
        let blocked = Poll::Blocked { seen: self.seen, blocker: self.blocker };
        let checked = self.comm.check_waiting(blocked).map(drop);
        checked.map_err(|error| self.comm.add_missing(error, self.blocker))
    }

    /// Fails when a peer of the call has left or died.
    pub(super) fn check_peers(&self) -> Result<()> {
        let checked = self.comm.check_peers(Some((self.blocker, self.seen)), self.call);
        checked.map_err(|error| self.comm.add_missing(error, self.blocker))
    }
}
