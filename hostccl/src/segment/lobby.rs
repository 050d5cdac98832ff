//! The header of a segment while its communicator is made. The segment is either the segment of a
//! unique id, as the process that made the id sees it, or the segment of one host for a
//! communicator that a shrink over several hosts makes.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::file::Mapping;
use super::header::Header;
use super::layout::HEADER_BYTES;
use crate::error::{Error, Result};

/// The ranks that have mapped the segment of the id have to leave the segment, and register with
/// the id's maker.
const MOVED: u32 = 1;
/// The id has started a communicator over several hosts.
const OVER: u32 = 2;

/// All ranks of all hosts have joined the communicator.
const JOINED: u32 = 3;

/// The header of a segment whose communicator is being made.
#[derive(Debug)]
pub(crate) struct Lobby(Mapping);

impl Lobby {
    /// Maps the header.
    pub(crate) fn of(fd: &OwnedFd) -> Result<Lobby> {
        Mapping::new(fd.as_raw_fd(), HEADER_BYTES).map(Lobby)
    }

    /// Tells the ranks in the segment to leave it and to register with the id's maker, because a
    /// rank has come that cannot open the segment.
    pub(crate) fn move_ranks(&self) {
        self.0.header().moved.store(MOVED, Ordering::SeqCst);
        self.0.header().arrived.wake();
    }

    /// Notes that the id has started a communicator over several hosts.
    pub(crate) fn close(&self) {
        self.0.header().moved.store(OVER, Ordering::SeqCst);
    }

    /// Returns the number of ranks of the communicator that the id has started in the segment.
    pub(crate) fn started(&self) -> Option<u32> {
        self.0.header().started()
    }

    /// Returns the failure that ended the segment.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.0.header().failure.error()
    }

    /// Ends the segment, so that the ranks in the segment read the reason.
    pub(crate) fn fail(&self, error: &Error) {
        self.0.header().fail(error.code(), error.blame(), error.message(), "");
    }
}

impl Lobby {
    /// Notes the number of the communicator, before other ranks look at the segment.
    pub(crate) fn set_number(&self, number: u64) {
        self.0.header().comm.store(number, Ordering::SeqCst);
    }

    /// Returns the number of the communicator.
    pub(crate) fn number(&self) -> u64 {
        self.0.header().comm.load(Ordering::SeqCst)
    }
}

impl Header {
    /// Notes that all ranks of all hosts have joined.
    pub(crate) fn set_joined(&self) {
        self.moved.store(JOINED, Ordering::SeqCst);
    }

    /// Whether all ranks of all hosts have joined.
    pub(crate) fn is_joined(&self) -> bool {
        self.moved.load(Ordering::SeqCst) == JOINED
    }

    /// Whether the ranks in the segment of a unique id are to leave it.
    pub(crate) fn is_moved(&self) -> bool {
        self.moved.load(Ordering::SeqCst) == MOVED
    }

    /// Whether the id of this segment has started a communicator over several hosts.
    pub(super) fn is_closed(&self) -> bool {
        self.moved.load(Ordering::SeqCst) == OVER
    }
}
