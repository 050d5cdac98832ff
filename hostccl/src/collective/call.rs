//! The checked arguments of a collective.

use recording::Operation;

use crate::types::*;

/// The kind of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    AllReduce = 1,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Split,
    Grow,
    AllToAllV,
    AllGatherV,
    ReduceScatterV,
}

impl Kind {
    /// Returns the operation that stands for this kind in the recording of the process.
    pub(crate) fn operation(self) -> Operation {
        match self {
            Kind::AllReduce => Operation::AllReduce,
            Kind::Reduce => Operation::Reduce,
            Kind::Broadcast => Operation::Broadcast,
            Kind::AllGather => Operation::AllGather,
            Kind::ReduceScatter => Operation::ReduceScatter,
            Kind::AllToAll => Operation::AllToAll,
            Kind::Gather => Operation::Gather,
            Kind::Scatter => Operation::Scatter,
            Kind::Split | Kind::Grow => Operation::MakeComms,
            Kind::AllToAllV => Operation::AllToAllV,
            Kind::AllGatherV => Operation::AllGatherV,
            Kind::ReduceScatterV => Operation::ReduceScatterV,
        }
    }

    const ALL: [(Kind, &'static str); 13] = [
        (Kind::AllReduce, "ncclAllReduce"),
        (Kind::Reduce, "ncclReduce"),
        (Kind::Broadcast, "ncclBroadcast"),
        (Kind::AllGather, "ncclAllGather"),
        (Kind::ReduceScatter, "ncclReduceScatter"),
        (Kind::AllToAll, "ncclAlltoAll"),
        (Kind::Gather, "ncclGather"),
        (Kind::Scatter, "ncclScatter"),
        (Kind::Split, "ncclCommSplit"),
        (Kind::Grow, "ncclCommGrow"),
        (Kind::AllToAllV, "hostcclAlltoAllv"),
        (Kind::AllGatherV, "hostcclAllGatherv"),
        (Kind::ReduceScatterV, "hostcclReduceScatterv"),
    ];

    /// Whether a call of this kind has one count for all ranks. The number may come from shared
    /// memory, so any value is allowed.
    pub(super) fn has_one_count(raw: u8) -> bool {
        Kind::ALL.iter().all(|(kind, _)| *kind as u8 != raw || !kind.is_ragged())
    }

    /// Whether each rank has a count of its own.
    pub(crate) fn is_ragged(self) -> bool {
        matches!(self, Kind::AllToAllV | Kind::AllGatherV | Kind::ReduceScatterV)
    }

    /// Returns the name of the C function.
    pub(crate) fn function(self) -> &'static str {
        Kind::name(self as u8)
    }

    /// Returns the name of the C function. The number may come from shared memory, so any value is
    /// allowed.
    pub(super) fn name(raw: u8) -> &'static str {
        Kind::ALL.iter().find(|(kind, _)| *kind as u8 == raw).map_or("an unknown call", |(_, name)| name)
    }
}

/// How elements are reduced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Reduction {
    /// One of NCCL's built-in reductions.
    Plain(ReduceOp),
    /// A sum of elements that each rank first multiplies by its own scalar. The scalar's bytes are
    /// padded with zeros.
    PreMulSum([u8; 8]),
}

/// The arguments of a collective.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    /// Which collective it is.
    pub(crate) kind: Kind,
    /// The caller's send buffer; dangling where this rank sends nothing.
    pub(crate) send: *const u8,
    /// The caller's receive buffer; dangling where this rank receives nothing.
    pub(crate) recv: *mut u8,
    /// The count as the caller gave it: the number of elements of each rank's part, or of the whole
    /// buffer. It is 0 in a collective in which each rank has a count of its own.
    pub(crate) count: usize,
    /// The element type.
    pub(crate) dtype: DataType,
    /// How the elements are reduced; `None` where they are only copied.
    pub(crate) reduction: Option<Reduction>,
    /// The root; `None` for a collective without one.
    pub(crate) root: Option<usize>,
}

impl Call {
    /// Whether this rank's own elements can be read from its send buffer. If not, they are read
    /// from its slot, which holds the scaled elements.
    pub(crate) fn own_from_send(&self) -> bool {
        !matches!(self.reduction, Some(Reduction::PreMulSum(_)))
    }

    /// Returns the operator by which the staged elements are reduced.
    pub(crate) fn op(&self) -> ReduceOp {
        match self.reduction {
            Some(Reduction::Plain(op)) => op,
            _ => ReduceOp::Sum,
        }
    }
}
