//! The last step of every join: a rank takes its seat in a segment.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::blame::Blame;
use crate::comm::Comm;
use crate::crowd::Crowd;
use crate::error::{Error, Result};
use crate::labels::{GlobalRanks, Labels};
use crate::news;
use crate::process::ProcessId;
use crate::segment::Segment;
use crate::span::Span;
use crate::types::ncclInvalidUsage;

/// The facts that a rank brings to its join.
#[derive(Debug)]
pub(super) struct Context {
    /// The number of ranks of the new communicator.
    pub(super) nranks: u32,
    /// This rank's number in the new communicator.
    pub(super) rank: u32,
    /// The ranks and processors of the communicator from which the new one is made; zeros where it
    /// is made by a unique id.
    pub(super) crowd: Crowd,
    /// The communicator's name in messages.
    pub(super) name: String,
    /// The numbers by which messages name the ranks.
    pub(super) global_ranks: GlobalRanks,
    /// Whether `ncclCommAbort` was called. The call may come before there is a communicator.
    pub(super) aborted: Arc<AtomicBool>,
}

impl Context {
    /// Returns the names of the new communicator and its ranks.
    pub(super) fn labels(&self) -> Labels {
        Labels { comm_name: self.name.clone(), global_ranks: Arc::clone(&self.global_ranks), seats: Box::default() }
    }
}

/// Maps the segment, takes this rank's seat in it, and counts the rank in. `seats` is the rank's
/// seat and the number of seats.
pub(super) fn take_seat(
    fd: &OwnedFd,
    seats: (usize, usize),
    crowd: Crowd,
    labels: Labels,
    context: &Context,
    span: Option<Span>,
) -> Result<Arc<Comm>> {
    let rank = labels.of_seat(seats.0);
    let segment = Segment::map(fd, seats.1 as u32, seats.0 as u32, &labels)?;
    let me = ProcessId::current();
    if let Err(pid) = segment.seat(seats.0).take(me) {
        let message = format!("rank {rank} was taken twice: by pid {pid} and by pid {}", me.pid);
        segment.header().fail(ncclInvalidUsage, &Blame::of([rank]), &message, "");
        return Err(segment.header().failure.error().unwrap_or_else(|| Error::usage(message)));
    }
    let comm = Arc::new(Comm::new(segment, seats.0, crowd, labels, context.aborted.clone(), me, span));
    news::register(&comm);
    comm.segment.header().arrive(seats.1);
    Ok(comm)
}
