//! Checks of the arguments that several functions have.

use std::sync::Arc;

use crate::call_name::Name;
use crate::collective::{Kind, Reduction};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::handle::{self, Handle};
use crate::types::*;

/// Fails when an out-parameter is NULL.
pub(super) fn check_out<T>(name: &str, out: *mut T) -> Result<()> {
    if out.is_null() { Err(Error::argument(format!("{name} is NULL"))) } else { Ok(()) }
}

/// Returns the communicator, the element type and the reduction that an operation names. `call` is
/// the name of a collective, and `None` for a message. Fails where the communicator does not accept
/// the operation now.
// Inlined, because the processor stalls where a call reads a result that was just written in
// smaller pieces.
#[inline(always)]
pub(super) fn named(
    comm: ncclComm_t,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
    call: Option<&Name>,
) -> Result<(Arc<Comm>, DataType, Option<Reduction>)> {
    let plain = op.and_then(ReduceOp::from_raw);
    if op.is_some() && plain.is_none() {
        return named_with_operator(comm, datatype, op, call);
    }
    let comm = handle::with(comm, |handle| taking(handle, call).cloned())?;
    Ok((comm, data_type(datatype)?, plain.map(Reduction::Plain)))
}

/// Returns the handle's communicator for that collective, or for a message.
#[inline(always)]
fn taking<'a>(handle: &'a Handle, call: Option<&Name>) -> Result<&'a Arc<Comm>> {
    match call {
        Some(name) => handle.for_collective(name),
        None => handle.for_message(),
    }
}

/// Does what [`named`] does, for a reduction that is none of NCCL's own.
#[cold]
fn named_with_operator(
    comm: ncclComm_t,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
    call: Option<&Name>,
) -> Result<(Arc<Comm>, DataType, Option<Reduction>)> {
    handle::with(comm, |handle| {
        let comm = taking(handle, call)?.clone();
        let dtype = data_type(datatype)?;
        let reduction = op.map(|op| handle.operators.reduction(op, dtype)).transpose()?;
        Ok((comm, dtype, reduction))
    })
}

/// Returns the element type of that number.
pub(super) fn data_type(raw: ncclDataType_t) -> Result<DataType> {
    DataType::from_raw(raw).ok_or_else(|| Error::argument(format!("datatype {raw} is not in 0..=11")))
}

/// Returns the root, once it is known to be one of the `nranks` ranks.
pub(super) fn check_root(root: i32, nranks: usize) -> Result<usize> {
    usize::try_from(root)
        .ok()
        .filter(|&root| root < nranks)
        .ok_or_else(|| Error::argument(format!("root {root} is not a rank of {nranks}")))
}

/// Returns the peer, once it is known to be one of the `nranks` ranks.
pub(super) fn check_peer(peer: i32, nranks: usize) -> Result<usize> {
    usize::try_from(peer)
        .ok()
        .filter(|&peer| peer < nranks)
        .ok_or_else(|| Error::argument(format!("peer {peer} is not a rank of {nranks}")))
}

/// Returns the address of a buffer. NULL is refused if the call needs `count` elements there.
/// Otherwise NULL is replaced by an address that is not NULL and that nobody uses.
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

/// Fails when the buffers of a collective overlap. The one exception is the overlap with which the
/// collective works in place. `block` is the collective's `count` in bytes.
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
        "sendbuff [{send:#x}, {send_end:#x}) and recvbuff [{recv:#x}, {recv_end:#x}) overlap, but not at the exact addresses of an in-place call: pass buffers that do not overlap, or the in-place addresses"
    )))
}
