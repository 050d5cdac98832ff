//! The collectives in which each rank has a count of its own.

use std::ffi::c_void;

use super::arguments::{check_buffer, named};
use crate::blocks::{Block, Blocks, blocks, check_apart};
use crate::call_name::Name;
use crate::collective::{Call, Kind, Ragged};
use crate::error::{Error, Result};
use crate::group;
use crate::raw_record::{RawRecord, What};
use crate::task::Task;
use crate::types::*;

/// The counts and displacements of one buffer, as the caller passed them.
#[derive(Clone, Copy)]
struct Lists {
    /// The name of the counts in messages.
    name: &'static str,
    /// The counts, one for each rank.
    counts: *const usize,
    /// The displacements, one for each rank; NULL where the blocks follow each other.
    displs: *const usize,
}

impl Lists {
    /// Returns the blocks of the buffer.
    ///
    /// # Safety
    /// The arrays are NULL or have `nranks` numbers.
    unsafe fn read(self, nranks: usize, dtype: DataType) -> Result<Vec<Block>> {
        if self.counts.is_null() {
            return Err(Error::argument(format!("{} is NULL, but the call needs {nranks} counts there", self.name)));
        }
        // SAFETY: this function's contract.
        let list = |at: *const usize| unsafe { std::slice::from_raw_parts(at, nranks) };
        let displs = (!self.displs.is_null()).then(|| list(self.displs));
        blocks(self.name, list(self.counts), displs, dtype.size()).map_err(Error::argument)
    }
}

/// Checks the arguments of a call, then performs it or adds it to the open group. `send` or `recv`
/// is `None` where the buffer has this rank's block alone.
///
/// # Safety
/// The arrays have a number for each rank. The buffers hold the blocks, and stay valid until the
/// call is over.
#[allow(clippy::too_many_arguments, reason = "they are those of the C functions")]
unsafe fn submit(
    kind: Kind,
    sendbuff: *const c_void,
    send: Option<Lists>,
    recvbuff: *mut c_void,
    recv: Option<Lists>,
    datatype: ncclDataType_t,
    op: Option<ncclRedOp_t>,
    comm: ncclComm_t,
) -> Result<ncclResult_t> {
    let (name, is_queued) = (Name::take_next(), group::is_open());
    let mut recorded = None;
    let outcome = group::submit_one(is_queued, || {
        let (comm, dtype, reduction) = named(comm, datatype, op, Some(&name))?;
        let (me, n) = comm.whole();
        // SAFETY: this function's contract.
        let read = |lists: Option<Lists>| unsafe { lists.map(|lists| lists.read(n, dtype)).transpose() };
        let (sends, receives) = (read(send)?, read(recv)?);
        let whole = |blocks: &Option<Vec<Block>>| {
            let count = blocks.as_ref().map_or(0, |blocks| blocks[me].count);
            vec![Block { start: 0, count }]
        };
        // The block that both buffers may share in a call in place.
        let in_place = match kind {
            Kind::AllGatherV => Some((0, me)),
            Kind::ReduceScatterV => Some((me, 0)),
            _ => (n == 1).then_some((0, 0)),
        };
        let (own_send, own_recv) = (whole(&receives), whole(&sends));
        let (from, to) = (sends.as_ref().unwrap_or(&own_send), receives.as_ref().unwrap_or(&own_recv));
        let most = |blocks: &[Block]| blocks.iter().map(|block| block.count).max().unwrap_or(0);
        let send = check_buffer("sendbuff", sendbuff.cast_mut(), most(from), true)?;
        let recv = check_buffer("recvbuff", recvbuff, most(to), true)?;
        let sent = Blocks { at: send.addr(), blocks: from };
        check_apart(sent, Blocks { at: recv.addr(), blocks: to }, dtype.size(), in_place).map_err(Error::argument)?;
        // Blocks that are sent may overlap, so the sum may not fit a number.
        let sum = |blocks: &[Block]| blocks.iter().fold(0_usize, |sum, block| sum.saturating_add(block.count));
        let count = if kind == Kind::AllGatherV { sum(to) } else { sum(from) };
        let what = || What { operation: kind.operation(), count, dtype, reduction: op, peer: None };
        recorded = RawRecord::begin(&comm, &name, is_queued, what);
        // A buffer with one block has this block for every rank.
        let of_all = |blocks: Option<Vec<Block>>, own: Vec<Block>| blocks.unwrap_or_else(|| own.repeat(n));
        let ragged = Ragged::new(of_all(sends, own_send), of_all(receives, own_recv));
        let call = Call { kind, send, recv, count: 0, dtype, reduction, root: None };
        if n == 1 {
            ragged.check_alone(&comm, &call)?;
        }
        // SAFETY: the caller's contract.
        unsafe { Task::collective(comm, call, Some(ragged), name) }
    });
    group::settle(recorded, is_queued, outcome)
}

pub(crate) unsafe fn hostcclAlltoAllv(
    sendbuff: *const c_void,
    sendcounts: *const usize,
    sdispls: *const usize,
    recvbuff: *mut c_void,
    recvcounts: *const usize,
    rdispls: *const usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let send = Lists { name: "sendcounts", counts: sendcounts, displs: sdispls };
    let recv = Lists { name: "recvcounts", counts: recvcounts, displs: rdispls };
    // SAFETY: the caller's contract.
    unsafe { submit(Kind::AllToAllV, sendbuff, Some(send), recvbuff, Some(recv), datatype, None, comm) }
}

pub(crate) unsafe fn hostcclAllGatherv(
    sendbuff: *const c_void,
    recvbuff: *mut c_void,
    recvcounts: *const usize,
    rdispls: *const usize,
    datatype: ncclDataType_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let recv = Lists { name: "recvcounts", counts: recvcounts, displs: rdispls };
    // SAFETY: the caller's contract.
    unsafe { submit(Kind::AllGatherV, sendbuff, None, recvbuff, Some(recv), datatype, None, comm) }
}

pub(crate) unsafe fn hostcclReduceScatterv(
    sendbuff: *const c_void,
    sendcounts: *const usize,
    sdispls: *const usize,
    recvbuff: *mut c_void,
    datatype: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    _stream: cudaStream_t,
) -> Result<ncclResult_t> {
    let send = Lists { name: "sendcounts", counts: sendcounts, displs: sdispls };
    // SAFETY: the caller's contract.
    unsafe { submit(Kind::ReduceScatterV, sendbuff, Some(send), recvbuff, None, datatype, Some(op), comm) }
}
