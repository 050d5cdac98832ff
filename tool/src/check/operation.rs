//! The collectives that are checked: their names, their buffers and their bus bandwidth.

use clap::ValueEnum;
use devicemesh::comm::{self, Operator};

/// A collective that is checked. They are checked in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Collective {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// Each rank sends to the next rank of the group and receives from the one before, in one group
    /// of calls
    SendRecv,
}

/// The operators by their `ncclRedOp_t` numbers, with their names in messages.
const OPERATORS: [(&str, Operator); 5] = [
    ("sum", Operator::Sum),
    ("prod", Operator::Product),
    ("max", Operator::Max),
    ("min", Operator::Min),
    ("avg", Operator::Average),
];

/// One call along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub collective: Collective,
    /// The operator's index in [`OPERATORS`]. Only collectives that reduce use it.
    pub operator: usize,
    /// The root's position in the group. Only collectives with a root use it.
    pub root: usize,
    /// Whether both buffers are one.
    pub in_place: bool,
    /// The number of elements, as the C function means it: those of each rank for gathers and
    /// scatters.
    pub count: usize,
}

impl Collective {
    pub const ALL: [Collective; 7] = [
        Collective::AllReduce,
        Collective::Reduce,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::SendRecv,
    ];

    /// The name of the C function without its dm_.
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::Broadcast => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::SendRecv => "send_recv",
        }
    }

    /// The operators that are verified. There is none where nothing is reduced.
    pub fn operators(self) -> &'static [usize] {
        match self {
            Collective::AllReduce => &[0, 1, 2, 3, 4],
            Collective::Reduce | Collective::ReduceScatter => &[0, 2],
            _ => &[],
        }
    }

    pub fn has_root(self) -> bool {
        matches!(self, Collective::Reduce | Collective::Broadcast)
    }

    pub fn can_be_in_place(self) -> bool {
        !matches!(self, Collective::AllToAll | Collective::SendRecv)
    }

    /// The lengths of the send and the receive buffer in a group of `size` ranks, as multiples of
    /// the call's count.
    pub fn blocks(self, size: usize) -> (usize, usize) {
        Call::plain(self, 0).collective().blocks(size)
    }

    /// The count with which the larger buffer has that many bytes, as nccl-tests means it. It is at
    /// least 1.
    pub fn count(self, bytes: usize, element: usize, size: usize) -> usize {
        let (send, recv) = self.blocks(size);
        (bytes / element / send.max(recv)).max(1)
    }

    /// The bus bandwidth divided by the algorithm bandwidth in a group of `size` ranks. nccl-tests
    /// defines it in doc/PERFORMANCE.md, and for send and receive in src/sendrecv.cu.
    pub fn bus_factor(self, size: usize) -> f64 {
        let size = size as f64;
        match self {
            Collective::AllReduce => 2.0 * (size - 1.0) / size,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => (size - 1.0) / size,
            Collective::Reduce | Collective::Broadcast | Collective::SendRecv => 1.0,
        }
    }
}

impl Call {
    /// A call for measuring: a sum, with root 0, with two buffers.
    pub fn plain(collective: Collective, count: usize) -> Call {
        Call { collective, operator: 0, root: 0, in_place: false, count }
    }

    /// The call in words, for messages.
    pub fn label(&self) -> String {
        let mut label = self.collective.name().to_owned();
        if !self.collective.operators().is_empty() {
            label = format!("{label} ({})", OPERATORS[self.operator].0);
        }
        if self.collective.has_root() {
            label = format!("{label} with root {}", self.root);
        }
        if self.in_place { format!("{label}, in place") } else { label }
    }

    /// The library's name of the collective, with this call's operator and root.
    pub fn collective(&self) -> comm::Collective {
        let (op, root) = (OPERATORS[self.operator].1, self.root);
        match self.collective {
            Collective::AllReduce => comm::Collective::AllReduce(op),
            Collective::Reduce => comm::Collective::Reduce { op, root },
            Collective::Broadcast => comm::Collective::Broadcast { root },
            Collective::AllGather => comm::Collective::AllGather,
            Collective::ReduceScatter => comm::Collective::ReduceScatter(op),
            Collective::AllToAll => comm::Collective::AllToAll,
            Collective::SendRecv => comm::Collective::Shift,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factors: Vec<f64> = Collective::ALL.iter().map(|collective| collective.bus_factor(4)).collect();
        assert_eq!(factors, [1.5, 1.0, 1.0, 0.75, 0.75, 0.75, 1.0]);
    }

    #[test]
    fn sizes_are_those_of_the_larger_buffer() {
        assert_eq!(Collective::AllReduce.count(4096, 4, 8), 1024);
        assert_eq!(Collective::AllGather.count(4096, 4, 8), 128);
        assert_eq!(Collective::ReduceScatter.count(4096, 4, 8), 128);
        assert_eq!(Collective::AllToAll.count(4, 4, 8), 1, "no less than one element");
    }
}
