//! Exchanges along one dimension in which each rank has a count of its own.

use std::ffi::c_void;

use hostccl::blocks::{Block, Blocks, blocks, check_apart};

use super::operations::Operands;
use super::view::View;
use crate::error::{Error, Result};
use crate::recorder::{Operation, What};

/// A count for each rank of a dimension, and where the blocks of these counts begin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts<'a> {
    /// The name of the counts in messages.
    pub(crate) name: &'static str,
    /// How many elements the block of each rank has.
    pub(crate) counts: &'a [usize],
    /// Where each block begins, in elements. `None`: each begins where the one before it ends.
    pub(crate) displs: Option<&'a [usize]>,
}

/// The kind of an exchange, with the arguments that only this kind has.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Exchange<'a> {
    /// Each rank sends a block to each rank.
    AllToAll {
        /// The blocks of the send buffer.
        send: Counts<'a>,
        /// The blocks of the receive buffer.
        recv: Counts<'a>,
    },
    /// Each rank gets the block of each rank.
    AllGather {
        /// The blocks of the receive buffer. This rank sends as many elements as its own block has.
        recv: Counts<'a>,
    },
    /// Each rank gets its block of the reduction.
    ReduceScatter {
        /// The blocks of the send buffer. This rank receives as many elements as its own block has.
        send: Counts<'a>,
        /// The operator.
        op: i32,
    },
}

impl View {
    /// Makes an exchange along dimension `index`. `buffers` are the send and the receive buffer.
    ///
    /// # Safety
    /// The buffers hold the blocks, and live until the work is done.
    pub(crate) unsafe fn exchange(
        &self,
        name: &str,
        index: usize,
        exchange: Exchange<'_>,
        (send, recv): (*const c_void, *mut c_void),
        (dtype, stream): (i32, *mut c_void),
    ) -> Result<()> {
        self.check_index(index)?;
        // A mesh without communicators may have more ranks than there is memory for their blocks.
        self.library()?;
        let Some(element) = self.element_size(name, dtype)? else {
            return Err(Error::unsupported(format!(
                "{name}: dtype is {dtype}, whose size is not known here, so the places of the blocks are not known: send the bytes (uint8)"
            )));
        };
        let (size, me) = (self.mesh().dim_size(index), self.mesh().local_rank(index)?);
        let list = |counts: Counts<'_>| {
            let Counts { name: what, counts, displs } = counts;
            if counts.len() != size || displs.is_some_and(|displs| displs.len() != size) {
                let dim = self.mesh().dim_name(index);
                return Err(Error::invalid(format!(
                    "{name}: {what} has {} numbers, but dimension {dim} has {size} ranks",
                    counts.len()
                )));
            }
            blocks(what, counts, displs, element).map_err(|error| Error::invalid(format!("{name}: {error}")))
        };
        let one = |blocks: &[Block]| vec![Block { start: 0, count: blocks[me].count }];
        let (sends, receives, in_place) = match exchange {
            Exchange::AllToAll { send, recv } => (list(send)?, list(recv)?, (size == 1).then_some((0, 0))),
            Exchange::AllGather { recv } => {
                let receives = list(recv)?;
                (one(&receives), receives, Some((0, me)))
            }
            Exchange::ReduceScatter { send, op } => {
                self.check_operator(name, op)?;
                let sends = list(send)?;
                let own = one(&sends);
                (sends, own, Some((me, 0)))
            }
        };
        for (what, pointer, blocks) in [("send", send, &sends), ("recv", recv.cast_const(), &receives)] {
            let some = blocks.iter().map(|block| block.count).find(|count| *count > 0);
            if let Some(count) = some.filter(|_| pointer.is_null()) {
                return Err(Error::invalid(format!("{name}: {what} is NULL, but a block there has {count} elements")));
            }
        }
        let sent = Blocks { at: send.addr(), blocks: &sends };
        check_apart(sent, Blocks { at: recv.addr(), blocks: &receives }, element, in_place)
            .map_err(|error| Error::invalid(format!("{name}: {error}")))?;
        if let (Exchange::AllToAll { .. }, [out], [into]) = (exchange, &sends[..], &receives[..]) {
            if out.count != into.count {
                return Err(Error::invalid(format!(
                    "{name}: this rank sends {} elements to itself and expects {}",
                    out.count, into.count
                )));
            }
        }
        // The counts are checked already. A buffer whose blocks are all empty may be anything.
        let used = [("send", send, &sends), ("recv", recv.cast_const(), &receives)];
        let used = used.into_iter().filter(|(.., blocks)| blocks.iter().any(|block| block.count > 0));
        let buffers: Vec<(&str, *const c_void)> = used.map(|(what, pointer, _)| (what, pointer)).collect();
        let sum = |blocks: &[Block]| blocks.iter().map(|block| block.count).sum::<usize>();
        let (what, recorded) = match exchange {
            Exchange::AllToAll { .. } => (What::of(Operation::AllToAllV), sum(&sends)),
            Exchange::AllGather { .. } => (What::of(Operation::AllGatherV), sum(&receives)),
            Exchange::ReduceScatter { op, .. } => (What::of(Operation::ReduceScatterV).reducing(op), sum(&sends)),
        };
        let operands = Operands::new(usize::from(!buffers.is_empty()), dtype, stream).of(what.counting(recorded));
        let kind = (dtype, element);
        let outcome = self.operate(name, index, operands, &buffers, |library, comm| {
            // SAFETY: this function's contract, and the blocks were checked.
            unsafe {
                match exchange {
                    Exchange::AllToAll { .. } => {
                        library.all_to_allv((send, &sends), (recv, &receives), kind, comm, stream)
                    }
                    Exchange::AllGather { .. } => {
                        library.all_gatherv((send, me), (recv, &receives), kind, comm, stream)
                    }
                    Exchange::ReduceScatter { op, .. } => {
                        library.reduce_scatterv((send, &sends), (recv, me), kind, op, comm, stream)
                    }
                }
            }
        });
        match exchange {
            Exchange::ReduceScatter { op, .. } => outcome.map_err(|error| self.judge_operator(name, op, error)),
            _ => outcome,
        }
    }
}
