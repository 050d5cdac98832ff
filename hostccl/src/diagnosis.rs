//! Finds out why ranks wait for each other without end, and ends the communicator with the reason.

use std::time::Duration;

use crate::blame::Blame;
use crate::collective::{self, Descriptor};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::message;
use crate::poll::Blocker;
use crate::types::*;

/// Says in errors what to do about two names that share a communicator.
const SHARED: &str = "which share one communicator; call along them in one order on all ranks, or give one of them a communicator of its own (DM_DIM_OWN_COMM)";

/// Ends the communicator because `call` of this rank has waited for `timeout` without any progress.
/// Returns the error that ended it.
pub(crate) fn time_out(comm: &Comm, blocker: Blocker, timeout: Duration, call: &str) -> Error {
    let millis = timeout.as_millis();
    let different_names = |(calls, blame): (String, Blame)| {
        let message = format!("{calls}, {SHARED}: nothing that fits came within {millis} ms");
        comm.fail_whole(ncclInvalidUsage, blame, &message, "")
    };
    let with_peer = |calls: String, peer: usize| (calls, comm.whole_blame(Blame::of([comm.rank, peer])));
    match blocker {
        Blocker::CommonName(step) | Blocker::Decision(step) | Blocker::HostNames { step, .. } => {
            return different_names(collective::different_names(comm, step));
        }
        Blocker::To { peer, .. } if comm.segment.channel(comm.rank, peer).expects.name().is_some() => {
            return different_names(with_peer(message::different_names(comm, comm.rank, peer), peer));
        }
        Blocker::OtherCall(peer) => {
            return different_names(with_peer(message::different_names(comm, peer, comm.rank), peer));
        }
        Blocker::To { peer, .. } if has_sent(comm, peer) => {
            let message = format!(
                "{} and {} both send to each other and neither receives, for {millis} ms: put the send and the receive of each into one group",
                comm.label(comm.rank),
                comm.label(peer)
            );
            return comm.fail_in(ncclInvalidUsage, Blame::of([comm.rank, peer]), &message, call);
        }
        _ => {}
    }
    let missing = comm.missing(blocker);
    let seats = comm.missing_seats(blocker);
    let sender = seats.iter().find(|seat| matches!(blocker, Blocker::Step(_)) && has_sent(comm, **seat));
    let sending = sender.map_or_else(String::new, |rank| format!(" ({} is in a send to this rank)", comm.label(*rank)));
    let message = format!("{} did not come within {millis} ms{sending}", comm.labels.ranks(&missing));
    comm.add_missing(comm.fail_whole(ncclTimeout, Blame::of(missing), &message, call), blocker)
}

/// Whether a message of `peer` to this rank lies in the ring, where no receive takes it.
fn has_sent(comm: &Comm, peer: usize) -> bool {
    let channel = comm.segment.channel(peer, comm.rank);
    peer != comm.rank && channel.head.value() != channel.tail.value()
}

/// Ends the communicator when a peer waits in a collective that this rank does not call, because
/// this rank is in `call` instead. Both sides get the error. Fails too when the communicator has
/// failed.
pub(crate) fn end_if_peer_waits(comm: &Comm, call: &str) -> Result<()> {
    comm.check_before_call()?;
    let Some((rank, theirs)) = peer_in_collective(comm) else { return Ok(()) };
    let me = comm.label(comm.rank);
    let message = format!("{} is in {theirs}, which {me} does not call: {me} is in {call}", comm.describe(rank));
    Err(comm.fail_in(ncclInvalidUsage, Blame::of([comm.rank, rank]), &message, &theirs))
}

/// Returns a rank that is inside a collective which this rank has not begun, and that call. Returns
/// `None` while this rank has a collective of its own under way.
fn peer_in_collective(comm: &Comm) -> Option<(usize, String)> {
    if comm.places.has_collective() {
        return None;
    }
    let step = comm.step();
    let is_ahead = |rank: &usize| comm.segment.seat(*rank).step.value().wrapping_sub(step as u32) as i32 > 0;
    let rank = (0..comm.nranks).find(is_ahead)?;
    // A collective that another thread has begun meanwhile explains the peer's step, too.
    (!comm.places.has_collective()).then(|| (rank, Descriptor::read(comm, rank, step).to_string()))
}
