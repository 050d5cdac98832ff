//! The trait of all operations. Each is a state machine that is polled and does not wait for peers.
//! Only a poll that fails may take long: up to 0.9 s after the loss of a peer on another host, and
//! up to 0.5 s to tell the maker of an id.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::poll::Poll;
use crate::turn::Pass;

/// An operation that makes progress each time it is polled. The module `progress` drives
/// operations.
pub(crate) trait Operation {
    /// Does as much of the operation as is possible without waiting.
    fn poll(&mut self) -> Result<Poll>;

    /// The communicator on which the operation waits. There is one whenever `poll` has answered
    /// that the operation is blocked.
    fn comm(&self) -> Option<&Arc<Comm>>;

    /// The connection for which the operation waits, after [`Poll::Outside`]: its descriptor, and
    /// whether the descriptor is to become writable. `None` where only time helps.
    fn connection(&self) -> Option<(RawFd, bool)> {
        None
    }

    /// The timeout that came with the call (`hostcclNextCallTimeout`), if one did. It takes
    /// precedence over all others.
    fn call_timeout(&self) -> Option<Duration> {
        None
    }

    /// How long the operation may wait without progress, where its handle sets a time that the
    /// communicator does not have yet. This time takes precedence over `HOSTCCL_TIMEOUT_MS`.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// How long the operation may wait without progress, where nothing else says so.
    fn default_timeout(&self) -> Option<Duration> {
        None
    }

    /// Whether the other ranks have made the same call, as far as this call needs them. Until then,
    /// the words for which this call waits also change for calls under other names, so a wait does
    /// not take such a change for progress.
    fn is_matched(&self) -> bool {
        true
    }

    /// Ends the operation, because a wait for it has failed with `error`. Returns the error for the
    /// caller. An operation that makes a communicator tells the ranks of the parent here.
    fn wait_failed(&mut self, error: Error) -> Error {
        error
    }

    /// Describes the call with its values, for messages.
    fn describe(&self) -> String;

    /// Returns the operation's turn, which goes to the next operation of its lane (see
    /// `progress::Lane`) when this one is done. So other threads' calls of the same name stay
    /// outside until the lane has ended.
    fn pass(&mut self) -> Option<&mut Pass> {
        None
    }

    /// Ends the operation's turn when the operation is done. Fails when the result may belong to
    /// another call.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}
