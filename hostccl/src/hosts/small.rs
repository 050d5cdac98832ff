//! Small calls: the data travels in the records of the hosts' meeting, so the meeting is the whole
//! call.

use super::plan::{Small, is_flat};
use crate::collective::{Call, Kind, Reduction};
use crate::comm::Comm;
use crate::gathering::{Records, span_of};
use crate::reduce::{self, Target};

/// Writes what this rank contributes to a call.
///
/// # Safety
/// The send buffer holds what the call says, and `to` has room for the contribution.
pub(super) unsafe fn contribute(call: &Call, small: &Small, to: *mut u8) {
    // SAFETY: this function's contract; the two places are apart.
    unsafe {
        match call.reduction {
            Some(Reduction::PreMulSum(scalar)) => {
                reduce::scale(call.dtype, scalar, call.send, to, small.contribution / call.dtype.size());
            }
            _ => std::ptr::copy_nonoverlapping(call.send, to, small.contribution),
        }
    }
}

/// Writes a host's payload: the reduction of the contributions of its ranks, or these contributions
/// one behind the other. Returns its length in bytes.
///
/// # Safety
/// Each contribution is complete and readable, and `to` has room for the payload.
pub(super) unsafe fn pack(call: &Call, small: &Small, contributions: &[*const u8], to: *mut u8) -> usize {
    let bytes = small.contribution;
    // SAFETY: this function's contract; the payload is apart from the contributions, except that a
    // single one may lie there already.
    unsafe {
        if small.reduces {
            let count = bytes / call.dtype.size();
            reduce::reduce(call.dtype, call.op(), contributions, &[Target::cached(to)], count);
            return if contributions.is_empty() { 0 } else { bytes };
        }
        for (index, from) in contributions.iter().enumerate() {
            std::ptr::copy(*from, to.add(index * bytes), bytes);
        }
    }
    contributions.len() * bytes
}

/// Whether every host's payload has the length that the call needs.
pub(super) fn is_complete(call: &Call, small: &Small, comm: &Comm, records: &Records) -> Option<usize> {
    let hosts = span_of(comm).hosts.iter().enumerate();
    let mut wrong = hosts.filter(|(host, ranks)| records.of(*host).1.len() != small.payload(call, ranks));
    wrong.next().map(|(_, ranks)| ranks[0])
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
        records.of(host).1.as_ptr().wrapping_add(before.count() * small.contribution)
    };
    // SAFETY: this function's contract; all offsets lie inside the contributions.
    unsafe {
        match (call.kind, call.root) {
            (Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter, _) => {
                let offset = if call.kind == Kind::ReduceScatter { rank * bytes } else { 0 };
                let inputs: Vec<*const u8> = match is_flat(call, comm) {
                    true => (0..span.nranks).map(|rank| of(rank).add(offset)).collect(),
                    false => (0..span.hosts.len()).map(|host| records.of(host).1.as_ptr().add(offset)).collect(),
                };
                reduce::reduce(call.dtype, call.op(), &inputs, &[Target::cached(to)], call.count);
            }
            (Kind::Broadcast, Some(root)) => std::ptr::copy(of(root), to, bytes),
            (Kind::Scatter, Some(root)) => std::ptr::copy(of(root).add(rank * bytes), to, bytes),
            (Kind::AllToAll, _) => {
                for from in 0..span.nranks {
                    std::ptr::copy(of(from).add(rank * bytes), to.add(from * bytes), bytes);
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
