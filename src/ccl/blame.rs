//! The ranks that the host engine blames for the last error of a thread.

use std::ffi::c_int;
use std::time::Duration;

use super::functions::Functions;
use super::types::{NcclResult, result};

/// The things that the host engine tells about the last error of a thread.
pub(super) struct Blame {
    /// The error's code; `ncclSuccess` when there was no error since the thread's last operation
    /// began.
    pub(super) code: NcclResult,
    /// The ranks to blame, in the communicator of the failed call, and whether each is lost.
    pub(super) ranks: Vec<(usize, bool)>,
    /// How long the call waited for its peers.
    pub(super) waited: Option<Duration>,
}

impl Blame {
    /// Returns what the host engine tells about this thread's last error. `None` in other
    /// libraries.
    pub(super) fn last(functions: &Functions) -> Option<Blame> {
        // A communicator of the host engine has at most this many ranks.
        const MOST: usize = 1024;
        let ask = functions.host_last_error_ranks?;
        let (mut code, mut count, mut waited) = (result::SUCCESS, 0, -1);
        let (mut ranks, mut lost) = (vec![0; MOST], vec![0; MOST]);
        // SAFETY: the out-parameters are valid, and the lists have that many places.
        let done =
            unsafe { ask(&mut code, ranks.as_mut_ptr(), lost.as_mut_ptr(), MOST as c_int, &mut count, &mut waited) };
        let count = usize::try_from(count).unwrap_or(0).min(MOST);
        let ranks = ranks.into_iter().zip(lost).take(count);
        (done == result::SUCCESS).then(|| Blame {
            code,
            ranks: ranks.filter_map(|(rank, lost)| Some((usize::try_from(rank).ok()?, lost != 0))).collect(),
            waited: u64::try_from(waited).ok().map(Duration::from_millis),
        })
    }
}
