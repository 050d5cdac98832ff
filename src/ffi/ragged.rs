//! Calls along one dimension in which each rank has a count of its own.

use std::ffi::{c_char, c_void};

use super::dim::dim_text;
use super::operation::{Operation, operation};
use super::types::{dm_dtype, dm_mesh, dm_op, dm_status};
use crate::comm::{Counts, Exchange};
use crate::error::{Error, Result};

/// Sends send_counts[i] elements to rank i of dim, and receives recv_counts[i] elements from it.
///
/// Collective over this rank's group along dim. The block for rank i begins send_displs[i] elements
/// after send, that from rank i recv_displs[i] elements after recv; without displacements (NULL)
/// the blocks follow each other. A count may be 0. The count that rank i sends to rank k is the
/// count that k expects from i. On cpu other counts give DM_STATUS_MISMATCH on all ranks, before
/// anything is written (DM_STATUS_INVALID_ARGUMENT in a group of one rank); NCCL does not compare
/// the counts. No block of recv overlaps another block of either buffer.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh. The lists of counts are copied.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
/// and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
/// dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
/// world, or a dtype whose size is not known here).
///
/// # Safety
/// dim is NULL or NUL-terminated; the lists have a number for each rank of dim; the buffers hold
/// the blocks and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_to_allv(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    send_counts: *const usize,
    send_displs: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    recv_displs: *const usize,
    dtype: dm_dtype,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_all_to_allv", mesh, dim, |call, index| {
        // SAFETY: the caller's contract.
        let (send_counts, recv_counts) = unsafe {
            (
                call.counts(index, "send_counts", send_counts, send_displs)?,
                call.counts(index, "recv_counts", recv_counts, recv_displs)?,
            )
        };
        let exchange = Exchange::AllToAll { send: send_counts, recv: recv_counts };
        // SAFETY: the caller's contract.
        unsafe { call.view.exchange(call.name, index, exchange, (send, recv), (dtype, stream)) }
    })
}

/// Gathers recv_counts[i] elements of each rank i of dim on every rank, recv_displs[i] elements
/// after recv.
///
/// Collective over this rank's group along dim. All ranks give the same counts, and each sends as
/// many elements as its own count says. On cpu other counts give DM_STATUS_MISMATCH on all ranks,
/// before anything is written; NCCL does not compare the counts. Without displacements (NULL) the
/// blocks follow each other. A count may be 0. The blocks of recv do not overlap. In place when
/// send == recv + recv_displs[my rank in dim].
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh. The lists of counts are copied.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
/// and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
/// dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
/// world, or a dtype whose size is not known here).
///
/// # Safety
/// dim is NULL or NUL-terminated; the lists have a number for each rank of dim; the buffers hold
/// the blocks and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_gatherv(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    recv_counts: *const usize,
    recv_displs: *const usize,
    dtype: dm_dtype,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_all_gatherv", mesh, dim, |call, index| {
        // SAFETY: the caller's contract.
        let recv_counts = unsafe { call.counts(index, "recv_counts", recv_counts, recv_displs)? };
        let exchange = Exchange::AllGather { recv: recv_counts };
        // SAFETY: the caller's contract.
        unsafe { call.view.exchange(call.name, index, exchange, (send, recv), (dtype, stream)) }
    })
}

/// Reduces a block for each rank i of dim over all ranks of dim, and leaves the result on rank i.
/// The block has send_counts[i] elements, which begin send_displs[i] elements after send.
///
/// Collective over this rank's group along dim. All ranks give the same counts, and each receives
/// as many elements as its own count says. On cpu other counts give DM_STATUS_MISMATCH on all
/// ranks, before anything is written; NCCL does not compare the counts. Without displacements
/// (NULL) the blocks follow each other. A count may be 0. In place when recv == send +
/// send_displs[my rank in dim].
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh. The lists of counts are copied.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_MISMATCH (cpu: the counts of two ranks do not fit together, and the message has both;
/// and as in dm_all_reduce), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (as in
/// dm_all_reduce), DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline
/// world, or a dtype whose size is not known here).
///
/// # Safety
/// dim is NULL or NUL-terminated; the lists have a number for each rank of dim; the buffers hold
/// the blocks and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_reduce_scatterv(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    send_counts: *const usize,
    send_displs: *const usize,
    recv: *mut c_void,
    dtype: dm_dtype,
    op: dm_op,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_reduce_scatterv", mesh, dim, |call, index| {
        // SAFETY: the caller's contract.
        let send_counts = unsafe { call.counts(index, "send_counts", send_counts, send_displs)? };
        let exchange = Exchange::ReduceScatter { send: send_counts, op };
        // SAFETY: the caller's contract.
        unsafe { call.view.exchange(call.name, index, exchange, (send, recv), (dtype, stream)) }
    })
}

impl Operation<'_> {
    /// The counts and displacements that the caller passed for the ranks of dimension `index`.
    ///
    /// # Safety
    /// The lists are NULL or have a number for each rank.
    unsafe fn counts<'a>(
        &self,
        index: usize,
        name: &'static str,
        counts: *const usize,
        displs: *const usize,
    ) -> Result<Counts<'a>> {
        // An offline mesh may have more ranks than any list. Its calls are refused in any case.
        self.view.library()?;
        let size = self.view.mesh().dim_size(index);
        // SAFETY: this function's contract.
        let list = |at: *const usize| (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at, size) });
        let missing = || Error::invalid(format!("{}: {name} is NULL, expected a count for each rank", self.name));
        Ok(Counts { name, counts: list(counts).ok_or_else(missing)?, displs: list(displs) })
    }
}
