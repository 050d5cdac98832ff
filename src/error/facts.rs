//! The facts of an error that a program reads without its message: which ranks it is about, which
//! of them are lost, along which dimension, how long the call waited, and which call it was.

use std::time::Duration;

/// The most ranks that an error names. An error travels to every rank of a call, so its size has a
/// limit.
pub(crate) const MOST_RANKS: usize = 512;

/// The things that an error is about. Most errors have no facts, so an error holds them behind one
/// pointer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// The ranks of the world that the error is about, in ascending order.
    pub(super) ranks: Vec<i32>,
    /// Those of `ranks` that are lost, in ascending order.
    pub(super) lost: Vec<i32>,
    /// The ranks of a communicator that its library blames, and whether each is lost. They wait for
    /// their translation into ranks of the world.
    pub(super) blamed: Vec<(usize, bool)>,
    /// The name of the dimension along which the call was made.
    pub(super) dimension: Option<String>,
    /// How long the call waited for other ranks.
    pub(super) waited: Option<Duration>,
    /// The number of the collective call, as messages show it.
    pub(super) call: Option<u64>,
}

impl Facts {
    /// Adds ranks that the error is about.
    pub(super) fn add_ranks(&mut self, ranks: &[i32]) {
        add(&mut self.ranks, ranks);
        self.lost.retain(|rank| self.ranks.binary_search(rank).is_ok());
    }

    /// Adds lost ranks. The error is about these ranks.
    pub(super) fn add_lost(&mut self, lost: &[i32]) {
        self.add_ranks(lost);
        add(&mut self.lost, lost);
        self.lost.retain(|rank| self.ranks.binary_search(rank).is_ok());
    }
}

/// Adds ranks to an ordered list, and keeps the lowest ones.
fn add(list: &mut Vec<i32>, ranks: &[i32]) {
    list.extend_from_slice(ranks);
    list.sort_unstable();
    list.dedup();
    list.truncate(MOST_RANKS);
}
