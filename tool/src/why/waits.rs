//! Who waits for whom.

use recording::{EntryState, Operation, RecordedCall};

use super::groups::{Group, Member, Seat};
use super::job::{Job, Seen};

/// A call in which a rank waits.
pub struct Wait<'a> {
    /// The place of the rank in the job.
    pub rank: usize,
    /// The place of the group among the groups.
    pub group: usize,
    /// The rank's part in the group.
    pub seat: Seat<'a>,
    /// The call.
    pub call: &'a RecordedCall,
    /// The seconds since the call began. `None` where nobody knows.
    pub seconds: Option<f64>,
}

/// A rank waits for another one.
#[derive(Debug, Clone, Copy)]
pub struct Edge {
    /// The place of the wait among the waits.
    pub wait: usize,
    /// The rank that waits.
    pub from: usize,
    /// The rank for which it waits.
    pub to: usize,
    /// Why it waits.
    pub reason: Reason,
}

/// Why a call waits for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The rank has made another call, of that number in the group.
    Differs(u64),
    /// The rank does not go on: it is stopped or gone, or its process is not known here.
    Absent,
    /// The rank has put the call into a group of calls that the rank has not ended.
    Queued(u64),
    /// The rank's call of that number has failed.
    Failed(u64),
    /// The rank has not begun the call of that number.
    Behind(u64),
    /// The rank has left the group.
    Left,
    /// The rank has no such group yet.
    NoGroup,
    /// The rank does not send or receive the message.
    NoMessage,
}

/// All waits of a job.
pub fn waits<'a>(groups: &[Group<'a>]) -> Vec<Wait<'a>> {
    let mut waits = Vec::new();
    for (at, group) in groups.iter().enumerate() {
        for member in &group.members {
            let (Some(rank), Some(seat)) = (member.rank, member.seat) else { continue };
            for call in seat.pending() {
                let seconds = seat.process.timeline.seconds_since(call.begun);
                waits.push(Wait { rank, group: at, seat, call, seconds });
            }
        }
    }
    waits
}

/// Whom the waits wait for. A wait that waits for nobody has no edge.
pub fn edges(job: &Job, groups: &[Group<'_>], waits: &[Wait<'_>]) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (at, wait) in waits.iter().enumerate() {
        let group = &groups[wait.group];
        let peer = usize::try_from(wait.call.call.peer).ok();
        let members: Vec<&Member> = match wait.call.call.operation.is_message() {
            true => peer.and_then(|peer| group.member(peer)).into_iter().collect(),
            false => group.members.iter().collect(),
        };
        for member in members {
            let Some(rank) = member.rank.filter(|rank| *rank != wait.rank) else { continue };
            if let Some(reason) = reason(job, wait, rank, member.seat) {
                edges.push(Edge { wait: at, from: wait.rank, to: rank, reason });
            }
        }
    }
    edges
}

/// Why the wait waits for this member. `None` where it does not.
fn reason(job: &Job, wait: &Wait<'_>, rank: usize, seat: Option<Seat<'_>>) -> Option<Reason> {
    let Seen::Recorded(_) = &job.ranks[rank].seen else { return Some(Reason::Absent) };
    let is_halted = job.is_halted(rank);
    let Some(seat) = seat else {
        return Some(if is_halted { Reason::Absent } else { Reason::NoGroup });
    };
    if wait.call.call.operation.is_message() {
        return without_message(wait, &seat).then_some(if is_halted { Reason::Absent } else { Reason::NoMessage });
    }
    let number = wait.call.in_channel;
    if let Some(number) = first_difference(&wait.seat, &seat) {
        return Some(Reason::Differs(number));
    }
    if seat.channel.calls_begun < number {
        let missing = seat.channel.calls_begun + 1;
        return Some(match (is_halted, seat.is_closed()) {
            (true, _) => Reason::Absent,
            (false, true) => Reason::Left,
            (false, false) => Reason::Behind(missing),
        });
    }
    match seat.call(number)?.state {
        EntryState::Queued => Some(if is_halted { Reason::Absent } else { Reason::Queued(number) }),
        EntryState::Running | EntryState::Issued if is_halted => Some(Reason::Absent),
        EntryState::Failed if wait.call.state == EntryState::Failed => None,
        EntryState::Failed => Some(if is_halted { Reason::Absent } else { Reason::Failed(number) }),
        _ => None,
    }
}

/// Whether a send or a receive waits because its peer is not in the other half of the message.
fn without_message(wait: &Wait<'_>, peer: &Seat<'_>) -> bool {
    let half = match wait.call.call.operation {
        Operation::Send => Operation::Recv,
        _ => Operation::Send,
    };
    let own = wait.seat.channel.rank as i32;
    let is_half = |call: &&RecordedCall| call.call.operation == half && call.call.peer == own;
    let last = peer.calls().rev().find(is_half);
    !last.is_some_and(|call| matches!(call.state, EntryState::Running | EntryState::Issued))
}

/// The number of the first call of a group in which two ranks differ, among those that both rings
/// still have.
pub fn first_difference(one: &Seat<'_>, other: &Seat<'_>) -> Option<u64> {
    let common = one.channel.calls_begun.min(other.channel.calls_begun);
    let (last, theirs) = (one.call(common)?, other.call(common)?);
    if last.digest == theirs.digest {
        return None;
    }
    // The digests differ from the first different call on.
    let mut first = common;
    let calls = one.collective_calls().rev().filter(|call| call.in_channel <= common);
    let mut others = other.collective_calls().rev().filter(|call| call.in_channel <= common);
    for call in calls {
        match others.next() {
            Some(theirs) if theirs.in_channel == call.in_channel && theirs.digest != call.digest => {
                first = call.in_channel;
            }
            _ => break,
        }
    }
    Some(first)
}
