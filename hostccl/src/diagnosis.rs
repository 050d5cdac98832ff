//! Finds out why ranks wait for each other without end, and ends the communicator with the reason.

use std::time::{Duration, Instant};

use crate::blame::Blame;
use crate::collective::{self, Descriptor};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::message;
use crate::poll::Blocker;
use crate::remote_message::{self, Unfit, messages_to_me};
use crate::types::*;

/// Says in errors what to do about two names that share a communicator.
const SHARED: &str = "the two names share one communicator: call along them in one order on all ranks, or give one of them a communicator of its own (DM_DIM_OWN_COMM)";

/// Returns the message for calls under two names that share a communicator. `millis` is how long
/// this rank has waited.
fn no_match(calls: &str, millis: u128) -> String {
    format!("{calls}: no matching call came within {millis} ms; {SHARED}")
}

/// Ends the communicator because `call` of this rank has waited for `timeout` without any progress.
/// `seen` is the value that the call saw in the blocker's word. Returns the error that ended the
/// communicator. Returns `None` where the last rank for which this rank waits has done its part
/// just now, so that the call can continue.
pub(crate) fn time_out(comm: &Comm, (blocker, seen): (Blocker, u32), timeout: Duration, call: &str) -> Option<Error> {
    let millis = timeout.as_millis();
    let different_names = |(calls, blame): (String, Blame)| {
        let message = no_match(&calls, millis);
        Some(comm.fail_whole(ncclInvalidUsage, blame, &message, ""))
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
            let ranks = [comm.rank, peer].map(|seat| comm.labels.of_seat(seat));
            return Some(both_send(comm, ranks, timeout, call));
        }
        Blocker::RemoteMessage { peer, sends, tag } => match remote_message::unfit(comm, peer, sends, tag) {
            Some(Unfit::BothSend) => return Some(both_send(comm, [comm.whole().0, peer], timeout, call)),
            Some(Unfit::OtherName(stream)) => {
                let calls = remote_message::different_names(comm, peer, tag, stream);
                let message = no_match(&calls, millis);
                let blame = Blame::of([comm.whole().0, peer]);
                return Some(comm.fail_whole(ncclInvalidUsage, blame, &message, ""));
            }
            None => {}
        },
        _ => {}
    }
    let seats = comm.missing_seats(blocker);
    let mut missing = comm.missing(blocker);
    // A rank first does its part, which `missing` reads, and then changes the word. So a changed
    // word means that the last rank came just now.
    if missing.is_empty() && comm.event(blocker).value() != seen {
        return None;
    }
    // A rank of this host that itself waits for another one is not the one that is missing.
    let without_call: Vec<usize> = seats.iter().filter(|seat| !comm.seat_waits(**seat)).copied().collect();
    if comm.span.is_some() && !without_call.is_empty() {
        missing = without_call.into_iter().map(|seat| comm.labels.of_seat(seat)).collect();
    }
    let sender = seats
        .iter()
        .find(|seat| matches!(blocker, Blocker::Step(_) | Blocker::OtherSeats(_)) && has_sent(comm, **seat));
    let sender = sender.map(|seat| comm.labels.of_seat(*seat)).or(match (blocker, &comm.span) {
        (Blocker::Wire { from }, Some(span)) => Some(from).filter(|_| !messages_to_me(span, from).is_empty()),
        _ => None,
    });
    let sending = sender
        .map_or_else(String::new, |rank| format!(" ({} is in a send to this rank)", comm.labels.rank(rank, None)));
    let trouble = match (blocker, &comm.span) {
        (Blocker::Wire { from: rank } | Blocker::RemoteMessage { peer: rank, .. }, Some(span)) => {
            span.peers[rank].and_then(|peer| span.wire.trouble(peer))
        }
        _ => None,
    };
    let trouble = trouble.map_or_else(String::new, |why| format!(" ({why})"));
    let message = format!("{}{sending}{trouble}", comm.did_not_come(&missing, millis));
    Some(comm.add_missing(comm.fail_whole(ncclTimeout, Blame::of(missing), &message, call), blocker))
}

/// How long a rank whose time is up waits for the answer of the rank for which it waits.
const ANSWER: Duration = Duration::from_millis(200);
/// How much longer a rank waits than the rank for which it waits, where that rank waits itself.
/// That rank then has time to name the missing rank.
const OTHERS_TELL: Duration = Duration::from_secs(1);

/// Whether a call that has waited for `over` longer than its `timeout` fails now. On one host it
/// does. Over several hosts, a rank asks the rank for which it waits (the blocker). If the blocker
/// waits for another rank, it can name the missing rank, so this rank waits until the blocker's
/// time is up. The blocker's time may end later than this rank's time, because the blocker may have
/// made progress later. With equal timeouts, the blocker's time ends at most one timeout after this
/// rank's. So no rank is blamed only because it waits for the missing rank.
pub(crate) fn is_due(comm: &Comm, blocker: Blocker, timeout: Duration, over: Duration) -> bool {
    let Some(span) = &comm.span else { return true };
    let (asked, evident) = match blocker {
        Blocker::Wire { from } => (Some(from), false),
        Blocker::RemoteMessage { peer, sends, tag } => {
            (Some(peer), remote_message::unfit(comm, peer, sends, tag).is_some())
        }
        _ => (None, false),
    };
    if evident {
        return true;
    }
    if let Some((rank, peer)) = asked.and_then(|rank| Some((rank, span.peers[rank]?))) {
        if comm.may_ask(rank, ANSWER / 2) {
            comm.ask(rank, peer);
        }
    }
    match comm.others_wait_until(blocker, 2 * ANSWER) {
        None => asked.is_none() || over >= ANSWER,
        Some(until) => {
            let others_should_have_told = Instant::now() >= until + OTHERS_TELL;
            over >= OTHERS_TELL && (others_should_have_told || over >= timeout + OTHERS_TELL)
        }
    }
}

/// Whether a message of `peer` to this rank lies in the ring, where no receive takes it.
fn has_sent(comm: &Comm, peer: usize) -> bool {
    let channel = comm.segment.channel(peer, comm.rank);
    peer != comm.rank && channel.head.value() != channel.tail.value()
}

/// Ends the communicator because these two ranks of the whole communicator both send.
fn both_send(comm: &Comm, ranks: [usize; 2], timeout: Duration, call: &str) -> Error {
    let [me, peer] = ranks.map(|rank| comm.labels.rank(rank, None));
    let message = format!(
        "{me} and {peer} have both been sending to each other for {} ms, and neither receives: put the send and the receive of each into one group",
        timeout.as_millis()
    );
    comm.fail_whole(ncclInvalidUsage, Blame::of(ranks), &message, call)
}

/// Ends the communicator when a peer waits in a collective that this rank does not call, because
/// this rank is in `call` instead. Both sides get the error. Fails too when the communicator has
/// failed.
pub(crate) fn end_if_peer_waits(comm: &Comm, call: &str) -> Result<()> {
    comm.check_before_call()?;
    let Some((rank, theirs)) = peer_in_collective(comm) else { return end_if_other_host_waits(comm, call) };
    let me = comm.label(comm.rank);
    let message = format!("{} is in {theirs}, which {me} does not call: {me} is in {call}", comm.describe(rank));
    Err(comm.fail_in(ncclInvalidUsage, Blame::of([comm.rank, rank]), &message, &theirs))
}

/// Does what [`end_if_peer_waits`] does for ranks of other hosts. Their messages show that they are
/// in a collective, but not in which one.
fn end_if_other_host_waits(comm: &Comm, call: &str) -> Result<()> {
    let Some(span) = comm.span.as_ref().filter(|_| !comm.places.has_collective()) else { return Ok(()) };
    span.wire.progress();
    let waits = |rank: &usize| remote_message::is_in_collective(span, *rank);
    let Some(rank) = (0..span.nranks).find(waits) else { return Ok(()) };
    // A collective that another thread has begun meanwhile takes the messages.
    if comm.places.has_collective() {
        return Ok(());
    }
    let (me, peer) = (comm.label(comm.rank), comm.labels.rank(rank, None));
    let message = format!("{peer} is in a collective, which {me} does not call: {me} is in {call}");
    Err(comm.fail_whole(ncclInvalidUsage, Blame::of([span.rank, rank]), &message, ""))
}

/// Returns a rank that is inside a collective which this rank has not begun, and that call. Returns
/// `None` while this rank has a collective of its own under way.
fn peer_in_collective(comm: &Comm) -> Option<(usize, String)> {
    if comm.places.has_collective() {
        return None;
    }
    let step = comm.step();
    let rank = (0..comm.nranks).find(|rank| *rank != comm.rank && comm.has_begun(*rank, step))?;
    // A collective that another thread has begun meanwhile, or has even ended, explains the peer's
    // step, too.
    let is_idle = !comm.places.has_collective() && comm.step() == step;
    is_idle.then(|| (rank, Descriptor::read(comm, rank, step).to_string()))
}

#[cfg(test)]
mod tests;
