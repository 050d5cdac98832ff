//! The ranks of a scope.

use std::sync::Arc;

/// The ranks of a scope: the world rank for each position.
#[derive(Debug, Clone)]
pub(in crate::rendezvous) enum Members {
    /// The ranks from 0 to this number minus 1.
    All(usize),
    /// These ranks, in the order of their positions.
    Listed(Arc<[i32]>),
}

impl Members {
    /// Returns these ranks, which are in ascending order.
    pub(in crate::rendezvous) fn of(ranks: Vec<i32>) -> Members {
        match ranks.iter().copied().eq(0..ranks.len() as i32) {
            true => Members::All(ranks.len()),
            false => Members::Listed(ranks.into()),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Members::All(size) => *size,
            Members::Listed(ranks) => ranks.len(),
        }
    }

    pub(super) fn rank(&self, position: usize) -> i32 {
        match self {
            Members::All(_) => position as i32,
            Members::Listed(ranks) => ranks[position],
        }
    }

    pub(super) fn position(&self, rank: i32) -> Option<usize> {
        match self {
            Members::All(size) => usize::try_from(rank).ok().filter(|rank| rank < size),
            Members::Listed(ranks) => ranks.iter().position(|known| *known == rank),
        }
    }
}

impl Members {
    pub(super) fn to_text(&self) -> String {
        match self {
            Members::All(size) => format!("all {size}"),
            Members::Listed(ranks) => ranks.iter().map(i32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    pub(super) fn from_text(text: &str) -> Option<Members> {
        match text.strip_prefix("all ") {
            Some(size) => size.parse().ok().map(Members::All),
            None => {
                let ranks = text.split(' ').map(|rank| rank.parse().ok()).collect::<Option<Arc<[i32]>>>();
                ranks.map(Members::Listed)
            }
        }
    }
}
