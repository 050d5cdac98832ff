//! Collectives and messages.

use std::ffi::{c_int, c_void};

use super::data_type;
use crate::collective::{Call, Collective, Kind, check_root};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::group::{self, Task};
use crate::handle;
use crate::message::{Message, Side};
use crate::turn::Name;
use crate::types::*;

/// A collective's arguments as they came.
struct Raw {
    kind: Kind,
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
    root: Option<c_int>,
    comm: ncclComm_t,
}

/// A buffer, or, for no elements, some address that is not NULL.
fn checked<T>(name: &str, buffer: *mut T, count: usize, needed: bool) -> Result<*mut u8> {
    match (buffer.is_null(), needed && count > 0) {
        (false, _) => Ok(buffer.cast()),
        (true, true) => Err(Error::argument(format!("{name} is NULL, {count} elements are wanted there"))),
        (true, false) => Ok(std::ptr::NonNull::<u64>::dangling().as_ptr().cast()),
    }
}

fn check_size(count: usize, parts: usize, dtype: DataType) -> Result<()> {
    match count.checked_mul(parts).and_then(|elements| elements.checked_mul(dtype.size())) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::argument(format!("count {count} of {} for {parts} ranks is beyond any memory", dtype.name()))),
    }
}

/// Fails where the buffers of a collective overlap in another way than the one in which it works in place. `block` is `count` in bytes.
fn check_overlap(
    kind: Kind,
    send: *const u8,
    recv: *const u8,
    block: usize,
    comm: &Comm,
    root: Option<usize>,
) -> Result<()> {
    // A buffer that only the root uses is nothing elsewhere.
    if block == 0 || comm.nranks == 1 && send == recv || root.is_some_and(|root| root != comm.rank) {
        return Ok(());
    }
    let (whole, mine) = (block * comm.nranks, block * comm.rank);
    let (send, recv) = (send.addr(), recv.addr());
    let (sends, receives, in_place) = match kind {
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (block, block, send == recv),
        Kind::AllToAll => (whole, whole, send == recv),
        Kind::AllGather | Kind::Gather => (block, whole, send == recv + mine),
        Kind::ReduceScatter | Kind::Scatter => (whole, block, recv == send + mine),
        Kind::Split => return Ok(()),
    };
    let (send_end, recv_end) = (send.saturating_add(sends), recv.saturating_add(receives));
    if in_place || send_end <= recv || recv_end <= send {
        return Ok(());
    }
    Err(Error::argument(format!(
        "sendbuff [{send:#x}, {send_end:#x}) and recvbuff [{recv:#x}, {recv_end:#x}) overlap, but not as in place: pass buffers that are apart, or exactly in place"
    )))
}

impl Raw {
    /// # Safety
    /// The buffers are as the call of that kind wants them and stay until it is over.
    unsafe fn submit(self) -> Result<ncclResult_t> {
        let name = Name::take_next();
        group::submit_collective(|| {
            let handle = handle::find(self.comm)?;
            let comm = handle.for_operation()?.clone();
            let dtype = data_type(self.datatype)?;
            let reduction = self.op.map(|op| handle.reduction(op, dtype)).transpose()?;
            let root = self.root.map(|root| check_root(root, comm.nranks)).transpose()?;
            check_size(self.count, comm.nranks, dtype)?;
            let is_root = root == Some(comm.rank);
            let (sends, receives) = match self.kind {
                Kind::Broadcast => (is_root, true),
                Kind::Scatter => (is_root, true),
                Kind::Reduce | Kind::Gather => (true, is_root),
                _ => (true, true),
            };
            let send = checked("sendbuff", self.sendbuff.cast_mut(), self.count, sends)?;
            let recv = checked("recvbuff", self.recvbuff, self.count, receives)?;
            check_overlap(self.kind, send, recv, self.count * dtype.size(), &comm, root)?;
            let call = Call { kind: self.kind, send, recv, count: self.count, dtype, reduction, root };
            // SAFETY: the caller's contract.
            unsafe { Collective::new(comm, call, name) }
        })
    }
}

pub(crate) unsafe fn ncclAllReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::AllReduce, sendbuff, recvbuff, count, datatype, op: Some(op), root: None, comm };
    // SAFETY: the caller's contract; likewise below.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclReduce(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    root: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::Reduce, sendbuff, recvbuff, count, datatype, op: Some(op), root: Some(root), comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclBroadcast(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::Broadcast, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclBcast(
    buff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Result<ncclResult_t> {
    // SAFETY: as above.
    unsafe { ncclBroadcast(buff, buff, count, datatype, root, comm, stream) }
}

pub(crate) unsafe fn ncclAllGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    sendcount: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::AllGather, sendbuff, recvbuff, count: sendcount, datatype, op: None, root: None, comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclReduceScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcount: usize,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let kind = Kind::ReduceScatter;
    let raw = Raw { kind, sendbuff, recvbuff, count: recvcount, datatype, op: Some(op), root: None, comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclAlltoAll(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::AllToAll, sendbuff, recvbuff, count, datatype, op: None, root: None, comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclGather(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::Gather, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

pub(crate) unsafe fn ncclScatter(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    root: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let raw = Raw { kind: Kind::Scatter, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: as above.
    unsafe { raw.submit() }
}

/// # Safety
/// The buffer holds `count` elements and stays until the call is over.
unsafe fn message(
    side: impl FnOnce(*mut u8) -> Side,
    name: &str,
    buffer: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
) -> Result<ncclResult_t> {
    let call = Name::take_next();
    group::submit(|| {
        let handle = handle::find(comm)?;
        let comm = handle.for_operation()?.clone();
        let dtype = data_type(datatype)?;
        check_size(count, 1, dtype)?;
        let nranks = comm.nranks;
        let peer = usize::try_from(peer)
            .ok()
            .filter(|&peer| peer < nranks)
            .ok_or_else(|| Error::argument(format!("peer {peer} is not a rank of {nranks}")))?;
        let side = side(checked(name, buffer, count, true)?);
        // SAFETY: the caller's contract.
        Ok(vec![Task::Message(unsafe { Message::new(comm, side, peer, count, dtype, call) }?)])
    })
}

pub(crate) unsafe fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let side = |buffer: *mut u8| Side::Send(buffer.cast_const());
    // SAFETY: the caller's contract.
    unsafe { message(side, "sendbuff", sendbuff.cast_mut(), count, datatype, peer, comm) }
}

pub(crate) unsafe fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    // SAFETY: the caller's contract.
    unsafe { message(Side::Recv, "recvbuff", recvbuff, count, datatype, peer, comm) }
}
