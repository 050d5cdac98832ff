//! Exchanges in which each rank has a count of its own. The host engine has functions for them. On
//! other libraries they are groups of the library's own calls.

use std::ffi::c_void;

use hostccl::blocks::Block;

use super::functions::RawComm;
use super::library::Library;
use super::types::{NcclResult, result};

/// The counts and displacements of blocks, as the host engine takes them.
fn lists(blocks: &[Block]) -> (Vec<usize>, Vec<usize>) {
    blocks.iter().map(|block| (block.count, block.start)).unzip()
}

/// # Safety
/// The buffers hold the blocks of elements of `element` bytes, one for each rank of the
/// communicator, and live until the work is done.
#[allow(clippy::too_many_arguments, clippy::missing_safety_doc, reason = "they are NCCL's, as said above")]
impl Library {
    /// Whether `ncclAlltoAll` has to be made of sends and receives, for which the size of an
    /// element is needed.
    pub(crate) fn lacks_all_to_all(&self) -> bool {
        self.functions.all_to_all.is_none()
    }

    /// Sends a block to each rank and receives one from each.
    pub(crate) unsafe fn all_to_allv(
        &self,
        (send, sends): (*const c_void, &[Block]),
        (recv, receives): (*mut c_void, &[Block]),
        (dtype, element): (i32, usize),
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract; a part of a buffer is as large as its block.
        unsafe {
            if let Some(call) = self.functions.host_all_to_allv {
                let ((out, from), (into, to)) = (lists(sends), lists(receives));
                return call(send, out.as_ptr(), from.as_ptr(), recv, into.as_ptr(), to.as_ptr(), dtype, comm, stream);
            }
            self.in_one_group(sends.len(), |rank, peer| {
                let (out, into) = (sends[rank], receives[rank]);
                let (from, to) = (send.byte_add(out.start * element), recv.byte_add(into.start * element));
                let sent = || (self.functions.send)(from, out.count, dtype, peer, comm, stream);
                let received = || (self.functions.recv)(to, into.count, dtype, peer, comm, stream);
                [if_any(out, sent), if_any(into, received)]
            })
        }
    }

    /// Gathers the block of each rank on every rank. `rank` is this rank.
    pub(crate) unsafe fn all_gatherv(
        &self,
        (send, rank): (*const c_void, usize),
        (recv, receives): (*mut c_void, &[Block]),
        (dtype, element): (i32, usize),
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract; a part of a buffer is as large as its block.
        unsafe {
            if let Some(call) = self.functions.host_all_gatherv {
                let (counts, displs) = lists(receives);
                return call(send, recv, counts.as_ptr(), displs.as_ptr(), dtype, comm, stream);
            }
            self.in_one_group(receives.len(), |of, root| {
                let block = receives[of];
                let to = recv.byte_add(block.start * element);
                // Only the root reads the send buffer.
                let from = if of == rank { send } else { to.cast_const() };
                let sent = || (self.functions.broadcast)(from, to, block.count, dtype, root, comm, stream);
                [if_any(block, sent), result::SUCCESS]
            })
        }
    }

    /// Reduces a block for each rank and leaves it there. `rank` is this rank.
    pub(crate) unsafe fn reduce_scatterv(
        &self,
        (send, sends): (*const c_void, &[Block]),
        (recv, rank): (*mut c_void, usize),
        (dtype, element): (i32, usize),
        op: i32,
        comm: RawComm,
        stream: *mut c_void,
    ) -> NcclResult {
        // SAFETY: the caller's contract; a part of a buffer is as large as its block.
        unsafe {
            if let Some(call) = self.functions.host_reduce_scatterv {
                let (counts, displs) = lists(sends);
                return call(send, counts.as_ptr(), displs.as_ptr(), recv, dtype, op, comm, stream);
            }
            self.in_one_group(sends.len(), |of, root| {
                let block = sends[of];
                let from = send.byte_add(block.start * element);
                // Only the root writes to the receive buffer.
                let to = if of == rank { recv } else { std::ptr::null_mut() };
                let reduced = || (self.functions.reduce)(from, to, block.count, dtype, op, root, comm, stream);
                [if_any(block, reduced), result::SUCCESS]
            })
        }
    }

    /// Runs `issue` for each rank in one group of the library. Returns the first failure, else what
    /// the end of the group returns.
    pub(super) unsafe fn in_one_group(
        &self,
        ranks: usize,
        issue: impl Fn(usize, i32) -> [NcclResult; 2],
    ) -> NcclResult {
        // SAFETY: no arguments; a group that was started is always ended.
        unsafe {
            let begun = (self.functions.group_start)();
            if begun != result::SUCCESS {
                return begun;
            }
            let is_failure = |code: &NcclResult| *code != result::SUCCESS && *code != result::IN_PROGRESS;
            // After a failure no further call joins the group.
            let failure = (0..ranks).find_map(|rank| issue(rank, rank as i32).into_iter().find(is_failure));
            let ended = (self.functions.group_end)();
            failure.unwrap_or(ended)
        }
    }
}

/// Makes a call unless its block is empty.
fn if_any(block: Block, call: impl FnOnce() -> NcclResult) -> NcclResult {
    if block.count > 0 { call() } else { result::SUCCESS }
}
