//! The decisions about a call that all ranks make alike, from its arguments and from the shape of
//! the communicator alone.

use crate::collective::{Call, Kind, Reduction};
use crate::comm::Comm;
use crate::gathering::{most_payload, span_of};
use crate::types::{DataType, ReduceOp};

/// Whether the reduction of a call takes the elements of every rank as they are. Otherwise the
/// elements of a host's ranks are reduced first, and then those of the hosts.
///
/// The exact average of integers cannot be found from the averages of hosts, nor from sums that may
/// wrap. A float of 8 bits loses too much each time it is rounded. Where hosts have different
/// numbers of ranks, their averages have different weights.
pub(super) fn is_flat(call: &Call, comm: &Comm) -> bool {
    let is_average = matches!(call.reduction, Some(Reduction::Plain(ReduceOp::Avg)));
    let is_even = comm.rails.as_ref().is_some_and(|rails| rails.is_even);
    match call.dtype {
        DataType::Float8E4M3 | DataType::Float8E5M2 => call.reduction.is_some(),
        DataType::Float16 | DataType::Bfloat16 | DataType::Float32 | DataType::Float64 => is_average && !is_even,
        _ => is_average,
    }
}

/// How the data of a small call travels in the records of the hosts' meeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Small {
    /// How many bytes each rank contributes; the root alone in a broadcast or scatter.
    pub(super) contribution: usize,
    /// How many bytes each rank gets; the root alone in a reduce or gather.
    pub(super) result: usize,
    /// Whether all ranks that get a result get the same one.
    pub(super) is_shared: bool,
    /// Whether a host's payload is the reduction of its ranks' contributions. Otherwise it is the
    /// contributions, one behind the other.
    pub(super) reduces: bool,
}

impl Small {
    /// Returns how the call's data travels in the meeting, or `None` where it is too large for
    /// that.
    pub(super) fn of(call: &Call, comm: &Comm) -> Option<Small> {
        let span = span_of(comm);
        let bytes = call.count.checked_mul(call.dtype.size())?;
        let all = bytes.checked_mul(span.nranks)?;
        let (contribution, result, is_shared) = match call.kind {
            Kind::AllReduce | Kind::Reduce | Kind::Broadcast => (bytes, bytes, true),
            Kind::AllGather | Kind::Gather => (bytes, all, true),
            Kind::ReduceScatter | Kind::Scatter => (all, bytes, false),
            Kind::AllToAll => (all, all, false),
            _ => return None,
        };
        let reduces = call.reduction.is_some() && !is_flat(call, comm);
        let small = Small { contribution, result, is_shared, reduces };
        let seats = comm.rails.as_ref().map_or(1, |rails| rails.count);
        let payload = if reduces { contribution } else { contribution.checked_mul(seats)? };
        let results = if is_shared { result } else { result.checked_mul(seats)? };
        // With one rank on each host, nothing goes through a slot.
        let in_slots = if seats == 1 { 0 } else { results.max(contribution) };
        let fits = payload <= most_payload(span.hosts.len()) && in_slots <= SLOT_ROOM;
        fits.then_some(small)
    }

    /// Whether a rank contributes data.
    pub(super) fn gives(call: &Call, rank: usize) -> bool {
        !matches!(call.kind, Kind::Broadcast | Kind::Scatter) || call.root == Some(rank)
    }

    /// Whether a rank gets a result.
    pub(super) fn gets(call: &Call, rank: usize) -> bool {
        !matches!(call.kind, Kind::Reduce | Kind::Gather) || call.root == Some(rank)
    }

    /// The length of a host's payload in bytes.
    pub(super) fn payload(&self, call: &Call, ranks: &[usize]) -> usize {
        let givers = ranks.iter().filter(|rank| Small::gives(call, **rank)).count();
        if self.reduces { self.contribution * givers.min(1) } else { self.contribution * givers }
    }
}

/// The room for results in a slot of any size: a slot has 64 KiB at least, and begins with a line.
const SLOT_ROOM: usize = (64 << 10) - 128;
