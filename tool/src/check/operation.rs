//! The collectives that are checked: their names, their buffers, their bus bandwidth, and how they are called.

use std::ffi::c_void;

use clap::ValueEnum;
use devicemesh::comm::{Operands, View};
use devicemesh::error::Result;

/// One of them, in the order in which they are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Collective {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// To the next rank of the group and from the one before, in one group of calls
    SendRecv,
}

/// Operators by their `ncclRedOp_t` number.
pub const OPERATORS: [&str; 5] = ["sum", "prod", "max", "min", "avg"];

/// One call along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub collective: Collective,
    /// Index into [`OPERATORS`]; for those that reduce.
    pub operator: usize,
    /// For those that have one.
    pub root: usize,
    pub in_place: bool,
    /// Elements, in the sense of the C function (per rank for gathers and scatters).
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

    /// The C function's name without its dm_.
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

    /// Operators that are verified; none where nothing is reduced.
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

    /// How many times its count the send and the receive buffer hold in a group of `size` ranks.
    pub fn blocks(self, size: usize) -> (usize, usize) {
        match self {
            Collective::AllGather => (1, size),
            Collective::ReduceScatter => (size, 1),
            Collective::AllToAll => (size, size),
            _ => (1, 1),
        }
    }

    /// The count for buffers of that many bytes, in the sense of nccl-tests: of the larger buffer. At least 1.
    pub fn count(self, bytes: usize, element: usize, size: usize) -> usize {
        let (send, recv) = self.blocks(size);
        (bytes / element / send.max(recv)).max(1)
    }

    /// Bus bandwidth over algorithm bandwidth in a group of `size` ranks: nccl-tests, doc/PERFORMANCE.md (its send/receive test, which that page does not
    /// list, takes 1: src/sendrecv.cu).
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
    /// A plain call for measuring: sum, root 0, out of place.
    pub fn plain(collective: Collective, count: usize) -> Call {
        Call { collective, operator: 0, root: 0, in_place: false, count }
    }

    /// What it is called in messages.
    pub fn label(&self) -> String {
        let mut label = self.collective.name().to_owned();
        if !self.collective.operators().is_empty() {
            label = format!("{label} ({})", OPERATORS[self.operator]);
        }
        if self.collective.has_root() {
            label = format!("{label} with root {}", self.root);
        }
        if self.in_place { format!("{label}, in place") } else { label }
    }

    /// Makes the call along dimension `index` of `view`. It is done when the stream is; in host memory when this returns.
    ///
    /// # Safety
    /// `send` and `recv` hold [`Collective::blocks`] times `count` elements, where `view`'s device type wants them, and live until the call is done.
    pub unsafe fn issue(&self, view: &View, index: usize, place: Place) -> Result<()> {
        let Call { collective, operator, root, count, .. } = *self;
        let Place { send, recv, dtype, stream } = place;
        let (operator, root) = (operator as i32, root as i32);
        let operands = Operands::new(count, dtype, stream);
        let name = collective.name();
        let size = view.mesh().dim_size(index);
        let buffers = [("send", send.cast_const()), ("recv", recv.cast_const())];
        let me = view.mesh().local_rank(index)?;
        if collective == Collective::SendRecv {
            let (next, before) = ((me + 1) % size, (me + size - 1) % size);
            view.group_start()?;
            let sent = view.operate("send", index, operands, &buffers[..1], |library, comm| {
                // SAFETY: the caller's contract, here and below.
                unsafe { library.send(send, count, dtype, next as i32, comm, stream) }
            });
            let received = view.operate("recv", index, operands, &buffers[1..], |library, comm| {
                // SAFETY: as above.
                unsafe { library.recv(recv, count, dtype, before as i32, comm, stream) }
            });
            // A group that was begun is always ended.
            let ended = view.group_end();
            return sent.and(received).and(ended);
        }
        let at_root = me == self.root;
        // As a program would: what only the root uses is NULL elsewhere.
        let null = std::ptr::null_mut();
        view.operate(name, index, operands, &[], |library, comm| {
            // SAFETY: as above.
            unsafe {
                match collective {
                    Collective::AllReduce => library.all_reduce(send, recv, count, dtype, operator, comm, stream),
                    Collective::Reduce => {
                        let recv = if at_root { recv } else { null };
                        library.reduce(send, recv, count, dtype, operator, root, comm, stream)
                    }
                    Collective::Broadcast => {
                        let send = if at_root { send } else { null };
                        library.broadcast(send, recv, count, dtype, root, comm, stream)
                    }
                    Collective::AllGather => library.all_gather(send, recv, count, dtype, comm, stream),
                    Collective::ReduceScatter => {
                        library.reduce_scatter(send, recv, count, dtype, operator, comm, stream)
                    }
                    Collective::AllToAll | Collective::SendRecv => {
                        library.all_to_all(send, recv, count, dtype, comm, stream)
                    }
                }
            }
        })
    }
}

/// Where a call works.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub send: *mut c_void,
    pub recv: *mut c_void,
    /// `ncclDataType_t`
    pub dtype: i32,
    /// NULL in host memory.
    pub stream: *mut c_void,
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
