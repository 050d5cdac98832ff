//! The calls of a library that make, ask and end communicators.

use std::ffi::c_int;

use hostccl::types::NCCL_SHRINK_ABORT;

use super::call_name::CallName;
use super::config::CommConfig;
use super::functions::RawComm;
use super::library::Library;
use super::types::{NcclResult, UniqueId, result};
use crate::error::{Error, Result, Status};

/// `ncclGetVersion` of the first release whose failed initialisation may leave its thread inside a
/// group.
const LEAVES_GROUPS_OPEN: i32 = 22_300;

impl Library {
    /// A fresh id. It serves for one communicator only. `shares_memory` says whether the ranks of
    /// the communicator share memory; `None` where nobody knows it. Only the host engine asks.
    pub(crate) fn unique_id(&self, shares_memory: Option<bool>) -> Result<UniqueId> {
        let mut id = UniqueId { bytes: [0; 128] };
        let (call, code) = match (self.functions.host_unique_id_for, shares_memory) {
            (Some(make), Some(shares)) => {
                // SAFETY: the out-parameter is a valid ncclUniqueId.
                ("hostcclGetUniqueIdFor", unsafe { make(&mut id, c_int::from(!shares)) })
            }
            // SAFETY: the out-parameter is a valid ncclUniqueId.
            _ => ("ncclGetUniqueId", unsafe { (self.functions.get_unique_id)(&mut id) }),
        };
        self.check(call, RawComm::NULL, code)?;
        Ok(id)
    }

    /// Gives up an id that no other rank has seen. The host engine holds memory for an id until a
    /// communicator is made from it. So this makes a communicator of this rank alone, and ends it.
    pub(crate) fn discard(&self, id: &UniqueId) {
        let mut config = CommConfig::unset(self.version()).blocking(true);
        if !self.is_host_engine() {
            return;
        }
        if let Ok(comm) = self.init_rank(1, &[*id], 0, &mut config) {
            let _ = self.abort(comm);
        }
    }

    /// Starts `ncclCommInitRankConfig`, or with several ids `ncclCommInitRankScalable`; with a
    /// non-blocking config the communicator is ready when [`poll`](Library::poll) says so.
    pub(crate) fn init_rank(
        &self,
        size: usize,
        ids: &[UniqueId],
        rank: usize,
        config: &mut CommConfig,
    ) -> Result<RawComm> {
        let mut comm = RawComm::NULL;
        let (size, rank, count) = (int(size), int(rank), int(ids.len()));
        match (ids, self.functions.init_rank_scalable) {
            ([id], _) => {
                // SAFETY: `comm` is NULL-initialised and valid; the config outlives the call, which
                // copies it.
                let code = hostccl::without_thread(|| unsafe {
                    (self.functions.init_rank_config)(&mut comm, size, *id, rank, config.as_mut_ptr())
                });
                self.started("ncclCommInitRankConfig", comm, code)
            }
            (ids, Some(init)) => {
                let mut ids = ids.to_vec();
                // SAFETY: as above; the ids are `count`, and the call copies them.
                let code = unsafe { init(&mut comm, size, rank, count, ids.as_mut_ptr(), config.as_mut_ptr()) };
                self.started("ncclCommInitRankScalable", comm, code)
            }
            _ => Err(Error::internal(format!("{} was given {count} ids", self.label()))),
        }
    }

    /// The communicator whose making began with `code`. When that is an error, the communicator is
    /// ended.
    fn started(&self, call: &str, comm: RawComm, code: NcclResult) -> Result<RawComm> {
        let Err(error) = self.check(call, RawComm::NULL, code) else { return Ok(comm) };
        if !comm.is_null() {
            let _ = self.abort(comm);
        } else if code == result::UNHANDLED_CUDA_ERROR && !self.is_host_engine() && self.version() >= LEAVES_GROUPS_OPEN
        {
            // A call that cannot ask for the current device returns from inside a group of its own,
            // and what this thread does next would only be queued there. Where there is no such
            // group, this is one more refused call.
            let _ = self.group_end();
        }
        Err(error)
    }

    /// Starts `ncclCommSplit` of a parent with nothing outstanding. The child's handle is written
    /// to `child` by the time [`poll`](Library::poll) of the *parent* says that it is done. The
    /// host engine waits for the other ranks for at most `millis` milliseconds.
    ///
    /// # Safety
    /// `child` is valid and stays where it is until then.
    pub(crate) unsafe fn split(
        &self,
        parent: RawComm,
        color: i32,
        key: i32,
        child: *mut RawComm,
        config: &mut CommConfig,
        millis: u64,
    ) -> Result<()> {
        let Some(split) = self.functions.split else {
            return Err(Error::unsupported(format!("{} has no ncclCommSplit", self.label())));
        };
        self.name_next_call(&CallName::OF_MAKING);
        self.limit_next_call(parent, millis);
        // SAFETY: the parent is live (its owner calls), `child` is a valid out-parameter that the
        // caller keeps in place.
        let code = hostccl::without_thread(|| unsafe { split(parent, color, key, child, config.as_mut_ptr()) });
        self.check("ncclCommSplit", parent, code)
    }

    /// Starts `ncclCommShrink` with NCCL_SHRINK_ABORT: calls in progress on the parent end, and
    /// the ranks that are not `excluded` get a child. The child's handle is written when
    /// [`split`](Library::split) would write it. After that, the parent can only be aborted. The
    /// host engine waits for the other ranks for at most `millis` milliseconds.
    ///
    /// # Safety
    /// The conditions of [`split`](Library::split) hold.
    pub(crate) unsafe fn shrink(
        &self,
        parent: RawComm,
        excluded: &mut [i32],
        child: *mut RawComm,
        config: &mut CommConfig,
        millis: u64,
    ) -> Result<()> {
        self.check_can_shrink()?;
        let Some(shrink) = self.functions.shrink else { return Ok(()) };
        let count = int(excluded.len());
        // The engine takes the time of a shrink from the parent. Nothing else begins on the parent
        // any more, so the change harms no call. A refusal does no harm either: the polling ends at
        // the deadline anyway.
        let _ = self.set_timeout(parent, millis);
        // SAFETY: the parent is live (its owner calls), the list has that many ranks (NCCL sorts it
        // in place and copies it), and `child` is a valid out-parameter that the caller keeps in
        // place.
        let code = hostccl::without_thread(|| unsafe {
            shrink(parent, excluded.as_mut_ptr(), count, child, config.as_mut_ptr(), NCCL_SHRINK_ABORT)
        });
        self.check("ncclCommShrink", parent, code)
    }

    /// Asks `ncclCommGetAsyncError`. Returns true when nothing is in progress on the communicator,
    /// and false while something is.
    pub(crate) fn poll(&self, comm: RawComm) -> Result<bool> {
        // SAFETY: the communicator is live and the out-parameter valid.
        self.is_idle("ncclCommGetAsyncError", comm, |state| unsafe { (self.functions.get_async_error)(comm, state) })
    }

    /// Does what [`poll`](Library::poll) does, for a communicator that is being made or that is the
    /// parent of one. The host engine does not check the peers' processes then: while
    /// communicators are made, it finds a peer's end itself.
    pub(crate) fn poll_making(&self, comm: RawComm) -> Result<bool> {
        let Some(wait) = self.functions.host_wait else { return self.poll(comm) };
        // SAFETY: the communicator is live and the out-parameter valid.
        self.is_idle("hostcclCommWait", comm, |state| unsafe { wait(comm, 0, state) })
    }

    /// Asks for the state of a communicator by `call`. Returns whether nothing is in progress.
    fn is_idle(&self, call: &str, comm: RawComm, ask: impl FnOnce(&mut NcclResult) -> NcclResult) -> Result<bool> {
        let mut state = result::SUCCESS;
        self.check(call, comm, ask(&mut state))?;
        if state == result::IN_PROGRESS {
            return Ok(false);
        }
        self.check("the communicator", comm, state).map(|()| true)
    }

    /// Starts `ncclCommFinalize`, where the library has it. That flushes outstanding work.
    pub(crate) fn finalize(&self, comm: RawComm) -> Result<()> {
        match self.functions.finalize {
            // SAFETY: the communicator is live.
            Some(finalize) => self.check("ncclCommFinalize", comm, unsafe { finalize(comm) }),
            None => Ok(()),
        }
    }

    /// `ncclCommDestroy`: frees a communicator whose ranks are all leaving in order.
    pub(crate) fn destroy(&self, comm: RawComm) -> Result<()> {
        // SAFETY: the owner calls this once and forgets the handle.
        self.check("ncclCommDestroy", RawComm::NULL, unsafe { (self.functions.destroy)(comm) })
    }

    /// `ncclCommAbort`: ends the work in progress and frees the communicator.
    pub(crate) fn abort(&self, comm: RawComm) -> Result<()> {
        // SAFETY: the owner calls this once and forgets the handle.
        self.check("ncclCommAbort", RawComm::NULL, unsafe { (self.functions.abort)(comm) })
    }

    /// The number of ranks of a communicator, and this process's rank in it.
    pub(crate) fn size_and_rank(&self, comm: RawComm) -> Result<(usize, usize)> {
        let (mut size, mut rank) = (0, 0);
        // SAFETY: the communicator is live by the caller's word, the out-parameters are valid.
        self.check("ncclCommCount", comm, unsafe { (self.functions.count)(comm, &mut size) })?;
        // SAFETY: as above.
        self.check("ncclCommUserRank", comm, unsafe { (self.functions.user_rank)(comm, &mut rank) })?;
        match (usize::try_from(size), usize::try_from(rank)) {
            (Ok(size), Ok(rank)) if rank < size => Ok((size, rank)),
            _ => Err(Error::new(Status::Ccl, format!("{} says rank {rank} of {size} ranks", self.name()))),
        }
    }
}

fn int(value: usize) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}
