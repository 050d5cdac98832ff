//! The ranks that have left their communicators.

use std::collections::{HashSet, VecDeque};

/// The most ranks that a wire remembers. A message for a forgotten rank is kept until the
/// connection ends. Only a wrong program sends such a message.
const MOST_RETIRED: usize = 4096;

/// The ranks of this process that have left their communicators. Messages for them are dropped.
#[derive(Debug, Default)]
pub(super) struct Retired {
    /// The pairs of a communicator's number and a rank, for quick look-ups.
    ranks: HashSet<(u64, u32)>,
    /// The pairs in `ranks`, the oldest first. The oldest one is forgotten when there are too many.
    order: VecDeque<(u64, u32)>,
}

impl Retired {
    /// Whether the rank has left the communicator.
    pub(super) fn has(&self, comm: u64, rank: u32) -> bool {
        !self.ranks.is_empty() && self.ranks.contains(&(comm, rank))
    }

    /// Notes that a rank has left a communicator.
    pub(super) fn note(&mut self, comm: u64, rank: u32) {
        if !self.ranks.insert((comm, rank)) {
            return;
        }
        self.order.push_back((comm, rank));
        if self.order.len() > MOST_RETIRED {
            let oldest = self.order.pop_front();
            oldest.iter().for_each(|oldest| _ = self.ranks.remove(oldest));
        }
    }

    /// The number of ranks that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}
