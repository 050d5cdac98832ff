//! All collectives over buffers, for programs that know the element type only when they run, such
//! as tools and benchmarks.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::buffers::BufferAt;
use super::elements::Operator;
use super::groups::in_group;
use super::operations::{BufferShape, Operands};
use super::view::View;
use crate::ccl::element_size;
use crate::error::{Error, Result};
use crate::recorder::{Operation, What};

/// A collective, with the arguments that only this collective has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Collective {
    /// Reduces over all ranks. Every rank gets the result.
    AllReduce(Operator),
    /// Reduces over all ranks. The rank `root` of the dimension gets the result.
    Reduce {
        /// How elements become one.
        op: Operator,
        /// The rank along the dimension that gets the result.
        root: usize,
    },
    /// Copies the data of the rank `root` of the dimension to all ranks.
    Broadcast {
        /// The rank along the dimension that has the data.
        root: usize,
    },
    /// Puts `count` elements of every rank into `recv`, in rank order.
    AllGather,
    /// Reduces `count` elements for each rank, and leaves block `i` of the result on rank `i`.
    ReduceScatter(Operator),
    /// Sends block `i` of `count` elements to rank `i`, and receives block `i` from it.
    AllToAll,
    /// Sends to the next rank along the dimension, and receives from the one before, as a ring.
    Shift,
    /// Sends to one rank of the dimension and receives from it. Only these two ranks make the call.
    Swap {
        /// The other rank, as its rank along the dimension.
        peer: usize,
    },
}

impl Collective {
    /// Returns how many blocks of `count` elements the send buffer and the receive buffer hold in a
    /// group of `size` ranks.
    pub fn blocks(self, size: usize) -> (usize, usize) {
        match self {
            Collective::AllGather => (1, size),
            Collective::ReduceScatter(_) => (size, 1),
            Collective::AllToAll => (size, size),
            _ => (1, 1),
        }
    }

    /// Returns what the recording of the process says of this collective.
    fn recorded(self) -> What {
        match self {
            Collective::AllReduce(op) => What::of(Operation::AllReduce).reducing(op as i32),
            Collective::Reduce { op, root } => What::of(Operation::Reduce).reducing(op as i32).with(root as i32),
            Collective::Broadcast { root } => What::of(Operation::Broadcast).with(root as i32),
            Collective::AllGather => What::of(Operation::AllGather),
            Collective::ReduceScatter(op) => What::of(Operation::ReduceScatter).reducing(op as i32),
            Collective::AllToAll => What::of(Operation::AllToAll),
            Collective::Shift | Collective::Swap { .. } => What::of(Operation::Exchange),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Collective::AllReduce(_) => "all_reduce",
            Collective::Reduce { .. } => "reduce",
            Collective::Broadcast { .. } => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter(_) => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Shift => "shift",
            Collective::Swap { .. } => "swap",
        }
    }
}

impl View {
    /// Makes a collective along dimension `index` with elements of type `dtype` (`ncclDataType_t`).
    /// `count` is meant as in the C function of that name. In host memory the call is done when it
    /// returns; on a device when `Memory::wait` returns. `send` and `recv` may lie in one buffer
    /// where the collective works in place. **Collective over the group.**
    ///
    /// `DM_STATUS_INVALID_ARGUMENT` where the data does not fit into the buffers, and
    /// `DM_STATUS_INVALID_STATE` inside a group that this thread has begun.
    pub fn collective(
        &self,
        index: usize,
        collective: Collective,
        dtype: i32,
        count: usize,
        send: BufferAt<'_>,
        recv: BufferAt<'_>,
    ) -> Result<()> {
        self.check_index(index)?;
        let name = collective.name();
        let (library, (device_type, stream)) = (self.library()?, send.place());
        if !send.is_beside(&recv) || device_type != self.mesh().device_type() {
            return Err(Error::invalid(format!(
                "{name}: send and recv must be buffers of one Memory of device type {}",
                self.mesh().device_type()
            )));
        }
        if in_group(library) {
            return Err(Error::invalid_state(format!(
                "{name}: a group delays its operations until its end, but the buffers are borrowed only for this call: end the group first"
            )));
        }
        let (size, me) = (self.mesh().dim_size(index), self.mesh().local_rank(index)?);
        let element = element_size(dtype)
            .ok_or_else(|| Error::invalid(format!("{name}: dtype is {dtype}, not one of 0 to 11")))?;
        let bytes = |blocks: usize| {
            let bytes = count.checked_mul(element).and_then(|bytes| bytes.checked_mul(blocks));
            bytes.ok_or_else(|| Error::invalid(format!("{name}: {count} elements are more than memory can hold")))
        };
        let blocks = collective.blocks(size);
        let send = send.checked(name, bytes(blocks.0)?)?.cast::<c_void>();
        let recv = recv.checked(name, bytes(blocks.1)?)?.cast::<c_void>();
        let operands = Operands::new(count, dtype, stream);
        let shape = match collective {
            Collective::AllGather => BufferShape::Gather,
            Collective::ReduceScatter(_) => BufferShape::Scatter,
            Collective::AllToAll => BufferShape::AllToAll,
            _ => BufferShape::Same,
        };
        self.check_overlap(name, index, operands, send, recv, shape)?;
        let peers = match collective {
            Collective::Shift => Some(((me + 1) % size, (me + size - 1) % size)),
            Collective::Swap { peer } => Some((peer, peer)),
            _ => None,
        };
        if let Some((next, before)) = peers {
            if send == recv && size > 1 && count > 0 {
                return Err(Error::invalid(format!(
                    "{name}: send and recv begin at the same byte, but {name} never works in place"
                )));
            }
            let as_peer = |rank: usize| i32::try_from(rank).unwrap_or(i32::MAX);
            let (next, before) = (as_peer(next), as_peer(before));
            self.check_peer(name, index, "peer", next)?;
            self.group_start()?;
            let message = |operation, peer| operands.of(What::of(operation).with(peer));
            let sent =
                self.operate("send", index, message(Operation::Send, next), &[("send", send)], |library, comm| {
                    // SAFETY: as below; the group ends in this call.
                    unsafe { library.send(send, count, dtype, next, comm, stream) }
                });
            let received =
                self.operate("recv", index, message(Operation::Recv, before), &[("recv", recv)], |library, comm| {
                    // SAFETY: as below; the group ends in this call.
                    unsafe { library.recv(recv, count, dtype, before, comm, stream) }
                });
            // A group that was begun is always ended.
            let ended = self.group_end();
            return sent.and(received).and(ended);
        }
        if let Collective::Reduce { root, .. } | Collective::Broadcast { root } = collective {
            self.check_peer(name, index, "root", i32::try_from(root).unwrap_or(i32::MAX))?;
        }
        // A buffer that only the root uses is NULL on the other ranks, as a C program would pass
        // it.
        let at_root = |root: usize, pointer: *mut c_void| if me == root { pointer } else { null_mut() };
        self.operate(name, index, operands.of(collective.recorded()), &[], |library, comm| {
            // SAFETY: `checked` has found that the buffers hold the data of this call. They lie
            // where the library works. In host memory the call is done when it returns; on a device
            // a buffer is not given back before the stream is idle.
            unsafe {
                match collective {
                    Collective::AllReduce(op) => library.all_reduce(send, recv, count, dtype, op as i32, comm, stream),
                    Collective::Reduce { op, root } => {
                        let recv = at_root(root, recv);
                        library.reduce(send, recv, count, dtype, op as i32, root as i32, comm, stream)
                    }
                    Collective::Broadcast { root } => {
                        let send = at_root(root, send);
                        library.broadcast(send, recv, count, dtype, root as i32, comm, stream)
                    }
                    Collective::AllGather => library.all_gather(send, recv, count, dtype, comm, stream),
                    Collective::ReduceScatter(op) => {
                        library.reduce_scatter(send, recv, count, dtype, op as i32, comm, stream)
                    }
                    Collective::AllToAll | Collective::Shift | Collective::Swap { .. } => {
                        library.all_to_all(send, recv, count, dtype, comm, stream)
                    }
                }
            }
        })
    }
}
