//! The rank that stands in a record.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};

/// No world was joined yet.
const NONE: i64 = -1;
/// Threads of this process have joined worlds as different ranks.
const SEVERAL: i64 = -2;

/// The rank of this process, where all its threads have joined as one rank.
static OF_PROCESS: AtomicI64 = AtomicI64::new(NONE);

thread_local! {
    /// The rank as which this thread joined a world last.
    static OF_THREAD: Cell<i64> = const { Cell::new(NONE) };
}

/// Notes that the calling thread joins a world as this rank.
pub(crate) fn set_rank(rank: usize) {
    let rank = i64::try_from(rank).unwrap_or(SEVERAL);
    let _ = OF_THREAD.try_with(|mine| mine.set(rank));
    let known = OF_PROCESS.compare_exchange(NONE, rank, Ordering::Relaxed, Ordering::Relaxed);
    if known.is_err_and(|known| known != rank) {
        OF_PROCESS.store(SEVERAL, Ordering::Relaxed);
    }
}

/// The rank of the calling thread, as a record begins with it: "rank 3". Where no rank is known, it
/// is the process: "pid 4711".
pub(crate) struct Me;

impl fmt::Display for Me {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mine = OF_THREAD.try_with(Cell::get).unwrap_or(NONE);
        let rank = if mine == NONE { OF_PROCESS.load(Ordering::Relaxed) } else { mine };
        if rank < 0 { write!(f, "pid {}", std::process::id()) } else { write!(f, "rank {rank}") }
    }
}
