//! A small all-gather that is a part of another call: of a split over several hosts, or of a
//! growth.

use std::sync::Arc;

use super::operation::Spanning;
use crate::call_name::Name;
use crate::collective::{Call, Collective, Descriptor, Kind};
use crate::comm::Comm;
use crate::error::Result;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::turn::Pass;
use crate::types::DataType;

/// An all-gather of some bytes of every rank, under the name of the call that it is a part of. Like
/// each collective, it takes its turn, and fails where other ranks make a different call.
pub(crate) struct SmallGather {
    /// The all-gather. It is dropped before its buffers.
    gather: Gather,
    /// The bytes that this rank gives.
    _mine: Vec<u8>,
    /// The bytes that all ranks give, in the order of the ranks.
    all: Vec<u8>,
    /// How many bytes each rank gives.
    each: usize,
}

/// An all-gather among ranks of one host, or over several hosts.
enum Gather {
    /// All ranks share a segment.
    Here(Box<Collective>),
    /// The ranks are on several hosts.
    Spanning(Box<Spanning>),
}

impl SmallGather {
    /// Returns an all-gather that has not begun, as a part of a call of that kind. All ranks give
    /// the same number of bytes. Fails when the communicator takes no more calls.
    pub(crate) fn new(comm: Arc<Comm>, kind: Kind, mine: &[u8], name: Name) -> Result<SmallGather> {
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
        let descriptor = Descriptor::making(kind, name);
        // SAFETY: both buffers have the size that the call says, and live as long as the operation.
        let gather = unsafe {
            match comm.span {
                None => {
                    comm.check_open()?;
                    Gather::Here(Box::new(Collective::described(comm, call, None, descriptor)))
                }
                Some(_) => Gather::Spanning(Box::new(Spanning::described(comm, call, None, descriptor)?)),
            }
        };
        Ok(SmallGather { gather, each: mine.len(), _mine: mine, all })
    }

    /// Does as much as is possible without waiting, as [`Operation::poll`] does.
    pub(crate) fn poll(&mut self) -> Result<Poll> {
        match &mut self.gather {
            Gather::Here(gather) => gather.poll(),
            Gather::Spanning(gather) => gather.poll(),
        }
    }

    /// Whether the other ranks have made the same call, as [`Operation::is_matched`] says it.
    pub(crate) fn is_matched(&self) -> bool {
        match &self.gather {
            Gather::Here(gather) => gather.is_matched(),
            Gather::Spanning(gather) => gather.is_matched(),
        }
    }

    /// The bytes that `rank` has given, once the all-gather is done.
    pub(crate) fn of(&self, rank: usize) -> &[u8] {
        &self.all[rank * self.each..(rank + 1) * self.each]
    }

    /// The turn of the call. Its owner ends it with [`Pass::leave`].
    pub(crate) fn pass(&mut self) -> &mut Pass {
        match &mut self.gather {
            Gather::Here(gather) => gather.turn(),
            Gather::Spanning(gather) => gather.turn(),
        }
    }
}
