//! The names of a communicator and of its ranks in messages.

use std::sync::{Arc, OnceLock};

use crate::blame::Blame;
use crate::error::Error;
use crate::types::ncclSystemError;

/// The global ranks of a communicator's ranks. PyTorch calls the number of a rank in a larger set
/// of ranks its global rank. The index is the rank in the communicator. Messages use the global
/// ranks. While none are set, messages use the communicator's own ranks.
pub(crate) type GlobalRanks = Arc<OnceLock<Box<[i32]>>>;

/// The most ranks that a message lists.
const MOST_LISTED: usize = 8;

/// The names of a communicator and of its ranks.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    /// The name of the communicator.
    pub(crate) comm_name: String,
    /// The global ranks, shared with the handle, which may set them later.
    pub(crate) global_ranks: GlobalRanks,
    /// For each seat of this host, in a communicator over several hosts, the rank in that
    /// communicator. The list is empty in a communicator on one host, where the seats are the
    /// ranks.
    pub(crate) seats: Box<[usize]>,
}

impl Labels {
    /// Returns the rank, in the communicator, of the rank with that seat in the segment.
    pub(crate) fn of_seat(&self, seat: usize) -> usize {
        self.seats.get(seat).copied().unwrap_or(seat)
    }

    /// Returns "rank 3", or "rank 7 (rank 3 of mesh_tp)" where the global rank is another number. A
    /// process number is added in the parentheses: "rank 7 (rank 3 of mesh_tp, pid 4711)".
    pub(crate) fn rank(&self, rank: usize, pid: Option<u32>) -> String {
        let global = self.global_rank(rank);
        let own = global.map(|_| format!("rank {rank} of {}", self.comm_name));
        let details: Vec<String> = own.into_iter().chain(pid.map(|pid| format!("pid {pid}"))).collect();
        let number = self.number(rank);
        match details.is_empty() {
            true => format!("rank {number}"),
            false => format!("rank {number} ({})", details.join(", ")),
        }
    }

    /// Returns "rank 3 of mesh_tp (pid 4711)", or "rank 7 (rank 3 of mesh_tp, pid 4711)".
    pub(crate) fn process(&self, rank: usize, pid: u32) -> String {
        match self.global_rank(rank) {
            Some(_) => self.rank(rank, Some(pid)),
            None => format!("rank {rank} of {} (pid {pid})", self.comm_name),
        }
    }

    /// Returns `error` as the ranks of this communicator read it. `rank` is this process's rank. If
    /// the operating system has refused something to this process, the returned error names and
    /// blames `rank`. An error that blames a rank already stays as it is.
    pub(crate) fn refused(&self, rank: usize, error: Error) -> Error {
        if error.code() != ncclSystemError || error.lost().is_some() {
            return error;
        }
        let message = format!("{}: {}", self.process(rank, std::process::id()), error.message());
        Error::new(error.code(), message).by(Blame::of([rank]))
    }

    /// Returns "rank 3 of mesh_tp", or "rank 7 (rank 3 of mesh_tp)".
    pub(crate) fn rank_in_comm(&self, rank: usize) -> String {
        match self.global_rank(rank) {
            Some(_) => self.rank(rank, None),
            None => format!("rank {rank} of {}", self.comm_name),
        }
    }

    /// Returns "ranks 1, 2 and 40 more", or "ranks 5, 6 (ranks 1, 2 of mesh_tp)".
    pub(crate) fn ranks(&self, ranks: &[usize]) -> String {
        let global: Vec<i32> = ranks.iter().map(|&rank| self.global_rank(rank).unwrap_or(rank as i32)).collect();
        let own: Vec<i32> = ranks.iter().map(|&rank| rank as i32).collect();
        match global == own {
            true => list(own),
            false => format!("{} ({} of {})", list(global), list(own), self.comm_name),
        }
    }

    /// Returns the global ranks of a communicator that is made of these ranks, in this order.
    pub(crate) fn global_ranks_of(&self, members: &[usize]) -> GlobalRanks {
        let inherited = GlobalRanks::default();
        if let Some(known) = self.global_ranks.get() {
            let _ = inherited.set(members.iter().filter_map(|&rank| known.get(rank).copied()).collect());
        }
        inherited
    }

    /// Returns the number that messages use for the rank: its global rank, or its rank in the
    /// communicator where no global ranks are set.
    pub(crate) fn number(&self, rank: usize) -> i32 {
        self.global_rank(rank).unwrap_or(rank as i32)
    }

    /// Returns the global rank where it is another number than the rank in the communicator.
    fn global_rank(&self, rank: usize) -> Option<i32> {
        let global = self.global_ranks.get()?.get(rank).copied();
        global.filter(|global| usize::try_from(*global) != Ok(rank))
    }
}

/// Returns "ranks 1, 2 and 40 more".
pub(crate) fn list(ranks: impl IntoIterator<Item = i32>) -> String {
    let ranks: Vec<i32> = ranks.into_iter().collect();
    let shown: Vec<String> = ranks.iter().take(MOST_LISTED).map(i32::to_string).collect();
    let more =
        if ranks.len() > shown.len() { format!(" and {} more", ranks.len() - shown.len()) } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}
