//! Checks of the arguments that several functions have.

use std::sync::Arc;

use crate::collective::{Kind, Reduction};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::handle;
use crate::types::*;

/// Fails when an out-parameter is NULL.
pub(super) fn check_out<T>(name: &str, out: *mut T) -> Result<()> {
    if out.is_null() { Err(Error::argument(format!("{name} is NULL"))) } else { Ok(()) }
}

/// Returns the communicator, the element type and the reduction that an operation names. The
/// communicator must take operations.
// Inlined, because a call waits where it reads a result that was just written in smaller pieces.
#[inline(always)]
pub(super) fn named(
    comm: ncclComm_t,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
) -> Result<(Arc<Comm>, DataType, Option<Reduction>)> {
    let plain = op.and_then(ReduceOp::from_raw);
    if op.is_some() && plain.is_none() {
        return named_with_operator(comm, datatype, op);
    }
    let comm = handle::with(comm, |handle| handle.for_operation().cloned())?;
    Ok((comm, data_type(datatype)?, plain.map(Reduction::Plain)))
}

/// Does what [`named`] does, for a reduction that is none of NCCL's own.
#[cold]
fn named_with_operator(
    comm: ncclComm_t,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
) -> Result<(Arc<Comm>, DataType, Option<Reduction>)> {
    handle::with(comm, |handle| {
        let comm = handle.for_operation()?.clone();
        let dtype = data_type(datatype)?;
        let reduction = op.map(|op| handle.operators.reduction(op, dtype)).transpose()?;
        Ok((comm, dtype, reduction))
    })
}

/// Returns the element type of that number.
pub(super) fn data_type(raw: ncclDataType_t) -> Result<DataType> {
    DataType::from_raw(raw).ok_or_else(|| Error::argument(format!("datatype {raw} is not in 0..=11")))
}

/// Returns a root as a rank.
pub(super) fn check_root(root: i32, nranks: usize) -> Result<usize> {
    usize::try_from(root)
        .ok()
        .filter(|&root| root < nranks)
        .ok_or_else(|| Error::argument(format!("root {root} is not a rank of {nranks}")))
}

/// Returns a peer as a rank.
pub(super) fn check_peer(peer: i32, nranks: usize) -> Result<usize> {
    usize::try_from(peer)
        .ok()
        .filter(|&peer| peer < nranks)
        .ok_or_else(|| Error::argument(format!("peer {peer} is not a rank of {nranks}")))
}

/// Returns the address of a buffer. A buffer that is NULL is refused if `count` elements are needed
/// there; otherwise its address is one that is not NULL and is never used.
pub(super) fn check_buffer<T>(name: &str, buffer: *mut T, count: usize, needed: bool) -> Result<*mut u8> {
    match (buffer.is_null(), needed && count > 0) {
        (false, _) => Ok(buffer.cast()),
        (true, true) => Err(Error::argument(format!("{name} is NULL, but the call needs {count} elements there"))),
        (true, false) => Ok(std::ptr::NonNull::<u64>::dangling().as_ptr().cast()),
    }
}

/// Fails when `parts` parts of `count` elements are more bytes than any memory has.
pub(super) fn check_size(count: usize, parts: usize, dtype: DataType) -> Result<()> {
    match count.checked_mul(parts).and_then(|elements| elements.checked_mul(dtype.size())) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::argument(format!("count {count} of {} for {parts} ranks is beyond any memory", dtype.name()))),
    }
}

/// Fails when the buffers of a collective overlap in any other way than the one in which the
/// collective works in place. `block` is `count` in bytes.
pub(super) fn check_overlap(
    kind: Kind,
    send: *const u8,
    recv: *const u8,
    block: usize,
    comm: &Comm,
    root: Option<usize>,
) -> Result<()> {
    let (rank, nranks) = comm.whole();
    // On other ranks than the root, only one of the two buffers is used.
    if block == 0 || nranks == 1 && send == recv || root.is_some_and(|root| root != rank) {
        return Ok(());
    }
    let (whole, mine) = (block * nranks, block * rank);
    let (send, recv) = (send.addr(), recv.addr());
    let (sends, receives, in_place) = match kind {
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (block, block, send == recv),
        Kind::AllToAll => (whole, whole, send == recv),
        Kind::AllGather | Kind::Gather => (block, whole, send == recv + mine),
        Kind::ReduceScatter | Kind::Scatter => (whole, block, recv == send + mine),
        Kind::Split | Kind::Grow | Kind::AllToAllV | Kind::AllGatherV | Kind::ReduceScatterV => return Ok(()),
    };
    let (send_end, recv_end) = (send.saturating_add(sends), recv.saturating_add(receives));
    if in_place || send_end <= recv || recv_end <= send {
        return Ok(());
    }
    Err(Error::argument(format!(
        "sendbuff [{send:#x}, {send_end:#x}) and recvbuff [{recv:#x}, {recv_end:#x}) overlap, but not as in place: pass buffers that are apart, or exactly in place"
    )))
}
