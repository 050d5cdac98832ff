//! Small calls: the data travels in the records of the hosts' meeting, so the meeting is the whole
//! call. An all-reduce of some KiB among more than two hosts has a second exchange, in which the
//! hosts give each other the results of the pieces that they have reduced.

use std::sync::Arc;

use hostccl_reduce::{Target, reduce, scale};

use super::plan::{Parcels, Small, is_flat};
use super::work::SECOND;
use crate::blocks::Block;
use crate::collective::{Call, Descriptor, Kind, Reduction};
use crate::comm::Comm;
use crate::error::Result;
use crate::flow::wait;
use crate::gathering::{Records, span_of};
use crate::transfers::Transfers;

/// Writes what this rank contributes to a call.
///
/// # Safety
/// The send buffer holds what the call says, and `to` has room for the contribution.
pub(super) unsafe fn contribute(call: &Call, small: &Small, to: *mut u8) {
    // SAFETY: this function's contract; the two places are apart.
    unsafe {
        match call.reduction {
            Some(Reduction::PreMulSum(scalar)) => {
                scale(call.dtype, scalar, call.send, to, small.contribution / call.dtype.size());
            }
            _ => std::ptr::copy_nonoverlapping(call.send, to, small.contribution),
        }
    }
}

/// Writes the payload of this host for the host `to`. The payload covers the part of the data that
/// `to` gets. It is the reduction of the contributions of this host's ranks, or it has these
/// contributions one after the other.
///
/// # Safety
/// Each contribution is complete and readable, and `at` has room for the payload, apart from the
/// contributions.
pub(super) unsafe fn pack(
    call: &Call,
    small: &Small,
    comm: &Comm,
    contributions: &[*const u8],
    to: usize,
    at: *mut u8,
) {
    let (size, share) = (call.dtype.size(), small.share(call, comm, to));
    // The part of each contribution that goes to that host: its ranks' blocks, its piece, or all.
    let block = call.count * size;
    let blocks = || span_of(comm).hosts[to].iter().enumerate().map(|(seat, rank)| (rank * block, seat * block, block));
    let parts: Vec<(usize, usize, usize)> = match small.parcels {
        Parcels::Blocks => blocks().collect(),
        Parcels::Pieces => vec![(Small::piece(call, comm, to).start * size, 0, share)],
        Parcels::Same | Parcels::Root => vec![(0, 0, share)],
    };
    for (start, place, bytes) in parts {
        // SAFETY: this function's contract; the parts lie in the contributions.
        unsafe {
            if small.reduces {
                let inputs: Vec<*const u8> = contributions.iter().map(|from| from.add(start)).collect();
                reduce(call.dtype, call.op(), &inputs, &[Target::cached(at.add(place))], bytes / size);
                continue;
            }
            for (index, from) in contributions.iter().enumerate() {
                std::ptr::copy_nonoverlapping(from.add(start), at.add(index * share + place), bytes);
            }
        }
    }
}

/// Returns the first rank of a host whose payload has another length than the call needs.
pub(super) fn wrong_length(call: &Call, small: &Small, comm: &Comm, records: &Records) -> Option<usize> {
    let span = span_of(comm);
    let due = |host: usize| small.payload(call, comm, host, span.host());
    let wrong = (0..span.hosts.len()).find(|host| records.of(*host).1.len() != due(*host));
    wrong.map(|host| span.hosts[host][0])
}

/// Writes the result of `rank` from the records of all hosts.
///
/// # Safety
/// The payloads have the lengths that the call needs, and `to` has room for the result.
pub(super) unsafe fn finish(call: &Call, small: &Small, comm: &Comm, records: &Records, rank: usize, to: *mut u8) {
    let span = span_of(comm);
    let bytes = call.count * call.dtype.size();
    // Where the contribution of a rank lies.
    let of = |rank: usize| {
        let host = span.host_of[rank];
        let before = span.hosts[host].iter().filter(|other| **other < rank && Small::gives(call, **other));
        records.of(host).1.as_ptr().wrapping_add(before.count() * small.share(call, comm, span.host()))
    };
    // Where the block for `rank` lies in a contribution.
    let own = match small.parcels {
        Parcels::Blocks => comm.rails.as_ref().map_or(0, |rails| rails.seat(rank)) * bytes,
        _ => rank * bytes,
    };
    // SAFETY: this function's contract; all offsets lie inside the contributions.
    unsafe {
        match (call.kind, call.root) {
            (Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter, _) => {
                let offset = if call.kind == Kind::ReduceScatter { own } else { 0 };
                let inputs: Vec<*const u8> = match is_flat(call, comm) {
                    true => (0..span.nranks).map(|rank| of(rank).add(offset)).collect(),
                    false => (0..span.hosts.len()).map(|host| records.of(host).1.as_ptr().add(offset)).collect(),
                };
                reduce(call.dtype, call.op(), &inputs, &[Target::cached(to)], call.count);
            }
            (Kind::Broadcast, Some(root)) => std::ptr::copy(of(root), to, bytes),
            (Kind::Scatter, Some(root)) => std::ptr::copy(of(root).add(own), to, bytes),
            (Kind::AllToAll, _) => {
                for from in 0..span.nranks {
                    std::ptr::copy(of(from).add(own), to.add(from * bytes), bytes);
                }
            }
            _ => {
                for from in 0..span.nranks {
                    std::ptr::copy(of(from), to.add(from * bytes), bytes);
                }
            }
        }
    }
}

/// Reduces this host's piece of the elements, and exchanges the results of the pieces with the
/// other hosts. `to` is the place for the result of all elements.
///
/// # Safety
/// The payloads have the lengths that the call needs, and `to` has room for the result.
pub(super) async unsafe fn finish_pieces(
    call: &Call,
    comm: &Arc<Comm>,
    descriptor: Descriptor,
    records: &Records,
    to: *mut u8,
) -> Result<()> {
    let (span, size) = (span_of(comm), call.dtype.size());
    let (hosts, me) = (span.hosts.len(), span.host());
    let place = |host: usize| {
        let Block { start, count } = Small::piece(call, comm, host);
        (to.wrapping_add(start * size), count * size)
    };
    let inputs: Vec<*const u8> = (0..hosts).map(|host| records.of(host).1.as_ptr()).collect();
    let (mine, bytes) = place(me);
    let mut transfers = Transfers::new(comm, descriptor);
    // SAFETY: this function's contract; the pieces lie in the result, apart from each other.
    unsafe {
        reduce(call.dtype, call.op(), &inputs, &[Target::cached(mine)], bytes / size);
        let others = || (1..hosts).map(|step| (me + step) % hosts);
        for host in others() {
            transfers.send(span.hosts[host][0], SECOND, mine, bytes);
        }
        for host in others() {
            let (theirs, bytes) = place(host);
            transfers.recv(span.hosts[host][0], SECOND, theirs, bytes);
        }
    }
    wait(|| transfers.poll()).await
}
