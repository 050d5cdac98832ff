//! The peers of a rank: for which of them the rank waits, and which of them have left or died.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::poll::Blocker;
use crate::process::Process;
use crate::types::*;

/// How messages tell that a process has ended. Only its parent learns whether it exited or was
/// killed.
const GONE: &str = "has gone (its process exited or was killed)";

impl Comm {
    /// Fails when a peer's process has ended, or when a peer that has left the communicator is
    /// waited for. `blocked` is what the operation waits for and the value that it saw in the
    /// blocker's word; a peer that ends right after it has done its part harms nobody. `call`
    /// describes the operation.
    pub(crate) fn check_peers(&self, blocked: Option<(Blocker, u32)>, call: &dyn Fn() -> String) -> Result<()> {
        self.check()?;
        // A peer does its part before it leaves. So this value is up to date when it is read after
        // the peer's state.
        let still_blocked = || blocked.is_none_or(|(blocker, seen)| self.event(blocker).value() == seen);
        let mut processes: Vec<Arc<Process>> = Vec::new();
        let mut ranks = Vec::new();
        for rank in 0..self.nranks {
            let Some(id) = self.segment.process(rank) else { continue };
            if self.has_left(rank) {
                if blocked.is_some_and(|(blocker, _)| self.waits_for(rank, blocker)) && still_blocked() {
                    let message = format!("{} has destroyed its communicator", self.describe(rank));
                    return Err(self.fail_in(ncclRemoteError, Some(rank), &message, &call()));
                }
            } else if id.pid != self.own_process.pid {
                processes.push(self.peer_processes[rank].get_or_init(|| Process::watch(id)).clone());
                ranks.push(rank);
            }
        }
        while let Some(index) = Process::first_dead(&processes) {
            // The peer may have left after the loop above looked at it. Then it ended in good
            // order.
            if !self.has_left(ranks[index]) {
                if !still_blocked() {
                    return Ok(());
                }
                let message = format!("{} {GONE}", self.describe(ranks[index]));
                return Err(self.fail_in(ncclRemoteError, Some(ranks[index]), &message, &call()));
            }
            processes.swap_remove(index);
            ranks.swap_remove(index);
        }
        Ok(())
    }

    /// Fails when this rank has aborted the communicator, or when `peer` has left it or died.
    /// Another failure of the communicator does not count.
    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        self.check_aborted()?;
        if self.has_left(peer) {
            let message = format!("{} has destroyed its communicator", self.describe(peer));
            return Err(Error::new(ncclRemoteError, message).by(Some(peer)));
        }
        let Some(id) = self.segment.process(peer).filter(|id| id.pid != self.own_process.pid) else { return Ok(()) };
        let process = self.peer_processes[peer].get_or_init(|| Process::watch(id));
        match Process::first_dead(std::slice::from_ref(process)) {
            Some(_) => Err(Error::new(ncclRemoteError, format!("{} {GONE}", self.describe(peer))).by(Some(peer))),
            None => Ok(()),
        }
    }

    fn has_left(&self, rank: usize) -> bool {
        self.segment.seat(rank).left.load(Ordering::Acquire) != 0
    }

    /// Whether the blocker goes away only by something that `rank` has not done yet.
    fn waits_for(&self, rank: usize, blocker: Blocker) -> bool {
        match blocker {
            Blocker::Arrivals => self.segment.process(rank).is_none(),
            Blocker::Step(step) => (self.segment.seat(rank).step.value().wrapping_sub(step as u32) as i32) < 0,
            Blocker::From(peer) | Blocker::To { peer, .. } | Blocker::NewSegment(peer) => peer == rank,
            // Every rank has a call of its own there.
            Blocker::CommonName(_) | Blocker::Decision(_) => rank != self.rank,
            Blocker::Turn | Blocker::OtherCall(_) => false,
        }
    }

    /// Returns the ranks that keep this one waiting.
    pub(crate) fn missing(&self, blocker: Blocker) -> Vec<usize> {
        match blocker {
            Blocker::CommonName(_) | Blocker::Decision(_) => Vec::new(),
            _ => (0..self.nranks).filter(|&rank| self.waits_for(rank, blocker)).collect(),
        }
    }

    /// Adds the ranks that this rank waits for to another rank's timeout, which ended this rank's
    /// wait. The other rank may have waited for somebody else, even for this rank.
    pub(crate) fn add_missing(&self, error: Error, blocker: Blocker) -> Error {
        self.add_missing_ranks(error, &self.missing(blocker))
    }

    /// Does what [`add_missing`](Comm::add_missing) does, where the missing ranks are known.
    pub(crate) fn add_missing_ranks(&self, error: Error, missing: &[usize]) -> Error {
        let Some(&first) = missing.first() else { return error };
        if error.code() != ncclTimeout || error.lost().is_some_and(|rank| missing.contains(&rank)) {
            return error;
        }
        self.note_lost(first);
        let message = format!("{} has not come here either: {}", self.labels.ranks(missing), error.message());
        Error::new(ncclTimeout, message).by(Some(first))
    }
}
