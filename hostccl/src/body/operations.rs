//! The functions that move data: collectives, sends and receives.

use std::ffi::{c_int, c_void};

use recording::Operation;

use super::arguments::{check_buffer, check_overlap, check_peer, check_root, check_size, named};
use crate::call_name::Name;
use crate::collective::{Call, Kind};
use crate::error::Result;
use crate::group;
use crate::message::{Message, Side};
use crate::raw_record::{RawRecord, What};
use crate::remote_message::RemoteMessage;
use crate::task::Task;
use crate::types::*;

/// The arguments of a collective as the caller passed them.
struct RawCall {
    /// Which collective it is.
    kind: Kind,
    /// The send buffer; NULL is allowed where this rank sends nothing.
    sendbuff: *const c_void,
    /// The receive buffer; NULL is allowed where this rank receives nothing.
    recvbuff: *mut c_void,
    /// The number of elements of each rank's part, or of the whole buffer.
    count: usize,
    /// The element type.
    datatype: ncclDataType_t,
    /// The reduction; `None` for a collective that only copies.
    op: Option<ncclRedOp_t>,
    /// The root; `None` for a collective without one.
    root: Option<c_int>,
    /// The communicator's token.
    comm: ncclComm_t,
}

impl RawCall {
    /// Checks the arguments, then performs the call or adds it to the open group.
    ///
    /// # Safety
    /// The buffers hold what a call of that kind reads and writes, and stay valid until it is over.
    unsafe fn submit(self) -> Result<ncclResult_t> {
        let (name, is_queued) = (Name::take_next(), group::is_open());
        let mut recorded = None;
        let outcome = group::submit_one(is_queued, || {
            let (comm, dtype, reduction) = named(self.comm, self.datatype, self.op, Some(&name))?;
            let (rank, nranks) = comm.whole();
            let root = self.root.map(|root| check_root(root, nranks)).transpose()?;
            check_size(self.count, nranks, dtype)?;
            let is_root = root == Some(rank);
            let (sends, receives) = match self.kind {
                Kind::Broadcast => (is_root, true),
                Kind::Scatter => (is_root, true),
                Kind::Reduce | Kind::Gather => (true, is_root),
                _ => (true, true),
            };
            let send = check_buffer("sendbuff", self.sendbuff.cast_mut(), self.count, sends)?;
            let recv = check_buffer("recvbuff", self.recvbuff, self.count, receives)?;
            check_overlap(self.kind, send, recv, self.count * dtype.size(), &comm, root)?;
            let call = Call { kind: self.kind, send, recv, count: self.count, dtype, reduction, root };
            let what =
                || What { operation: self.kind.operation(), count: self.count, dtype, reduction: self.op, peer: root };
            recorded = RawRecord::begin(&comm, &name, is_queued, what);
            // SAFETY: the caller's contract.
            unsafe { Task::collective(comm, call, None, name) }
        });
        group::settle(recorded, is_queued, outcome)
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
    let raw = RawCall { kind: Kind::AllReduce, sendbuff, recvbuff, count, datatype, op: Some(op), root: None, comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind: Kind::Reduce, sendbuff, recvbuff, count, datatype, op: Some(op), root: Some(root), comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind: Kind::Broadcast, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: the caller's contract.
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
    // SAFETY: the caller's contract.
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
    let raw =
        RawCall { kind: Kind::AllGather, sendbuff, recvbuff, count: sendcount, datatype, op: None, root: None, comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind, sendbuff, recvbuff, count: recvcount, datatype, op: Some(op), root: None, comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind: Kind::AllToAll, sendbuff, recvbuff, count, datatype, op: None, root: None, comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind: Kind::Gather, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: the caller's contract.
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
    let raw = RawCall { kind: Kind::Scatter, sendbuff, recvbuff, count, datatype, op: None, root: Some(root), comm };
    // SAFETY: the caller's contract.
    unsafe { raw.submit() }
}

/// Checks the arguments of a send or a receive, then performs it or adds it to the open group.
///
/// # Safety
/// The buffer holds `count` elements and stays valid until the call is over.
unsafe fn message(
    side: impl FnOnce(*mut u8) -> Side,
    name: &str,
    buffer: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
) -> Result<ncclResult_t> {
    let (call, is_queued) = (Name::take_next(), group::is_open());
    let mut recorded = None;
    let outcome = group::submit_one(is_queued, || {
        let (comm, dtype, _) = named(comm, datatype, None, None)?;
        check_size(count, 1, dtype)?;
        let peer = check_peer(peer, comm.whole().1)?;
        let side = side(check_buffer(name, buffer, count, true)?);
        let operation = if matches!(side, Side::Send(_)) { Operation::Send } else { Operation::Recv };
        let what = || What { operation, count, dtype, reduction: None, peer: Some(peer) };
        recorded = RawRecord::begin(&comm, &call, is_queued, what);
        let seat = comm.span.as_ref().map_or(Some(peer), |span| span.seat_of(peer));
        // SAFETY: the caller's contract.
        unsafe {
            match seat {
                Some(seat) => {
                    comm.check_open()?;
                    Ok(Task::Message(Message::new(comm, side, seat, count, dtype, call)))
                }
                None => Ok(Task::Remote(RemoteMessage::new(comm, side, peer, count, dtype, call)?)),
            }
        }
    });
    group::settle(recorded, is_queued, outcome)
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
