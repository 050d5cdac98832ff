//! A small all-gather that is a part of another call, such as a split.

use std::sync::Arc;

use super::operation::Spanning;
use crate::call_name::Name;
use crate::collective::{Call, Descriptor, Kind};
use crate::comm::Comm;
use crate::error::Result;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::turn::Pass;
use crate::types::DataType;

/// An all-gather of some bytes of every rank, under a call of `ncclCommSplit`. Like each
/// collective, it takes its turn, and fails where other ranks make a different call.
pub(crate) struct SmallGather {
    /// The all-gather. It is dropped before its buffers.
    gather: Spanning,
    /// The bytes that this rank gives.
    _mine: Vec<u8>,
    /// The bytes that all ranks give, in the order of the ranks.
    all: Vec<u8>,
    /// How many bytes each rank gives.
    each: usize,
}

impl SmallGather {
    /// Returns an all-gather that has not begun, on a communicator over several hosts. All ranks
    /// give equally many bytes. Fails when the communicator takes no more calls.
    pub(crate) fn new(comm: Arc<Comm>, mine: &[u8], name: Name) -> Result<SmallGather> {
        let (_, n) = comm.whole();
        let (mine, mut all) = (mine.to_vec(), vec![0; mine.len() * n]);
        let call = Call {
            kind: Kind::AllGather,
            send: mine.as_ptr(),
            recv: all.as_mut_ptr(),
            count: mine.len(),
            dtype: DataType::Uint8,
            reduction: None,
            root: None,
        };
        // SAFETY: both buffers have the size that the call says, and live as long as the operation.
        let gather = unsafe { Spanning::described(comm, call, None, Descriptor::split(name))? };
        Ok(SmallGather { gather, each: mine.len(), _mine: mine, all })
    }

    /// Does as much as is possible without waiting, as [`Operation::poll`] does.
    pub(crate) fn poll(&mut self) -> Result<Poll> {
        self.gather.poll()
    }

    /// The bytes that `rank` has given, once the all-gather is done.
    pub(crate) fn of(&self, rank: usize) -> &[u8] {
        &self.all[rank * self.each..(rank + 1) * self.each]
    }

    /// The turn of the call. Its owner ends it with [`Pass::leave`].
    pub(crate) fn pass(&mut self) -> &mut Pass {
        self.gather.turn()
    }
}
