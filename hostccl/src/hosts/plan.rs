//! The decisions about a call that all ranks make alike, from its arguments and from the shape of
//! the communicator alone.

use crate::blocks::Block;
use crate::collective::{Call, Kind, Reduction, part};
use crate::comm::Comm;
use crate::gathering::{MOST_DIRECT, most_payload, span_of};
use crate::segment::{LINE, Layout};
use crate::types::{DataType, ReduceOp};

/// Whether the reduction of a call takes the elements of every rank as they are. Otherwise the
/// elements of a host's ranks are reduced first, and then those of the hosts.
///
/// The exact average of integers cannot be found from the averages of hosts, nor from sums that may
/// wrap. A float of 8 bits loses too much each time it is rounded. A host rounds its result of
/// 16-bit floats, because otherwise it would send the data of all its ranks. NCCL rounds in each
/// step, too. Where hosts have different numbers of ranks, their averages have different weights.
pub(super) fn is_flat(call: &Call, comm: &Comm) -> bool {
    let is_average = matches!(call.reduction, Some(Reduction::Plain(ReduceOp::Avg)));
    let is_even = comm.rails.as_ref().is_some_and(|rails| rails.is_even);
    match call.dtype {
        DataType::Float8E4M3 | DataType::Float8E5M2 => call.reduction.is_some(),
        DataType::Float16 | DataType::Bfloat16 | DataType::Float32 | DataType::Float64 => is_average && !is_even,
        _ => is_average,
    }
}

/// The part of a host's data that each other host gets in the meeting of a small call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parcels {
    /// All hosts get the same payload.
    Same,
    /// The host of the root gets a payload. The others get none.
    Root,
    /// Each host gets the blocks for its ranks.
    Blocks,
    /// Each host gets a piece of the elements, reduces it, and gives the others the result.
    Pieces,
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
    /// Which hosts get which part of the data.
    pub(super) parcels: Parcels,
    /// Whether the hosts exchange their records directly, and not in the ring.
    pub(super) is_direct: bool,
}

impl Small {
    /// Returns how the call's data travels in the meeting, or `None` where it is too large for
    /// that.
    pub(super) fn of(call: &Call, comm: &Comm) -> Option<Small> {
        let span = span_of(comm);
        let hosts = span.hosts.len();
        let bytes = call.count.checked_mul(call.dtype.size())?;
        let all = bytes.checked_mul(span.nranks)?;
        let (contribution, result, is_shared, direct) = match call.kind {
            Kind::AllReduce => (bytes, bytes, true, Parcels::Pieces),
            Kind::Broadcast => (bytes, bytes, true, Parcels::Same),
            Kind::Reduce => (bytes, bytes, true, Parcels::Root),
            Kind::AllGather => (bytes, all, true, Parcels::Same),
            Kind::Gather => (bytes, all, true, Parcels::Root),
            Kind::ReduceScatter | Kind::Scatter => (all, bytes, false, Parcels::Blocks),
            Kind::AllToAll => (all, all, false, Parcels::Blocks),
            _ => return None,
        };
        let reduces = call.reduction.is_some() && !is_flat(call, comm);
        // Where there are two hosts, each reduces all elements itself, because one exchange is then
        // enough. A reduction of the elements of all ranks at once needs all elements in one place.
        let direct = if direct == Parcels::Pieces && (hosts == 2 || !reduces) { Parcels::Same } else { direct };
        let small = Small { contribution, result, is_shared, reduces, parcels: Parcels::Same, is_direct: false };
        let rails = comm.rails.as_ref()?;
        let seats = rails.count;
        let results = if is_shared { result } else { result.checked_mul(seats)? };
        // With one rank on each host, nothing goes through a slot.
        let in_slots = if seats == 1 { 0 } else { results.max(contribution) };
        let room = Layout::split(seats as u32, comm.segment.among()).slot_bytes - 2 * LINE;
        // Seat 0 alone moves the data of its host.
        let is_quick = seats == 1 || contribution.checked_mul(seats)? <= MOST_FOR_A_SEAT;
        if in_slots > room || !is_quick || contribution > rails.limits.contribution {
            return None;
        }
        let most_shares = (0..hosts).map(|from| small.shares(call, comm, from)).max().unwrap_or(0);
        let longest = |small: &Small| {
            let longest_share = (0..hosts).map(|to| small.share(call, comm, to)).max().unwrap_or(0);
            longest_share * most_shares
        };
        let in_ring = longest(&small);
        if in_ring <= most_payload(hosts, false).min(if hosts > MOST_DIRECT { usize::MAX } else { MOST_IN_RING }) {
            return Some(small);
        }
        let small = Small { parcels: direct, is_direct: true, ..small };
        (hosts <= MOST_DIRECT && longest(&small) <= most_payload(hosts, true)).then_some(small)
    }

    /// Whether a rank contributes data.
    pub(super) fn gives(call: &Call, rank: usize) -> bool {
        !matches!(call.kind, Kind::Broadcast | Kind::Scatter) || call.root == Some(rank)
    }

    /// Whether a rank gets a result.
    pub(super) fn gets(call: &Call, rank: usize) -> bool {
        !matches!(call.kind, Kind::Reduce | Kind::Gather) || call.root == Some(rank)
    }

    /// The elements that a host reduces where each host reduces a piece.
    pub(super) fn piece(call: &Call, comm: &Comm, host: usize) -> Block {
        let (start, count) = part(call.count, host, span_of(comm).hosts.len(), call.dtype.size());
        Block { start, count }
    }

    /// How many bytes of one rank's contribution a host gets.
    pub(super) fn share(&self, call: &Call, comm: &Comm, to: usize) -> usize {
        let (span, size) = (span_of(comm), call.dtype.size());
        match self.parcels {
            Parcels::Same => self.contribution,
            Parcels::Root if call.root.is_some_and(|root| span.host_of[root] == to) => self.contribution,
            Parcels::Root => 0,
            Parcels::Blocks => span.hosts[to].len() * call.count * size,
            Parcels::Pieces => Small::piece(call, comm, to).count * size,
        }
    }

    /// How many shares a payload of that host has: one for each rank that contributes, or one for
    /// all of them where the host reduces them.
    fn shares(&self, call: &Call, comm: &Comm, from: usize) -> usize {
        let givers = span_of(comm).hosts[from].iter().filter(|rank| Small::gives(call, **rank)).count();
        if self.reduces { givers.min(1) } else { givers }
    }

    /// The length in bytes of the payload that one host has for another one, or for itself.
    pub(super) fn payload(&self, call: &Call, comm: &Comm, from: usize, to: usize) -> usize {
        self.share(call, comm, to) * self.shares(call, comm, from)
    }
}

/// The largest payload in bytes with which at most eight hosts gather in the ring.
const MOST_IN_RING: usize = 2 << 10;
/// The most bytes that the seats of a host together may contribute to a small call.
const MOST_FOR_A_SEAT: usize = 256 << 10;
