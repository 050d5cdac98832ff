//! Who waits for whom.

use recording::{EntryState, Operation, RecordedCall};

use super::groups::{Group, Member, Seat};
use super::job::{Job, Seen};

/// The most edges of a job. A recording may have 2,048 calls that run in a group of 2^20 ranks, and
/// each edge takes memory.
const MOST_EDGES: usize = 1 << 22;

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
    /// The rank has put its half of the message into a group of calls that the rank has not ended.
    QueuedMessage,
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

/// Whom the waits wait for. A wait that waits for nobody has no edge. Where the limit on all edges
/// is reached, each further wait has one edge, so that it does not look like a wait for nobody.
pub fn edges(job: &Job, groups: &[Group<'_>], waits: &[Wait<'_>]) -> Vec<Edge> {
    edges_within(job, groups, waits, MOST_EDGES)
}

/// The edges: at most `left`, and one more for each wait.
fn edges_within<'a>(job: &Job, groups: &'a [Group<'a>], waits: &[Wait<'_>], left: usize) -> Vec<Edge> {
    // Ranks of other hosts come last. If a wait also waits for a rank that is seen, that rank
    // explains more.
    let is_elsewhere = |rank: usize| matches!(job.ranks[rank].seen, Seen::Elsewhere);
    let in_order = |group: &'a Group<'a>| -> Vec<&'a Member<'a>> {
        let known = group.members.iter().filter(|member| member.rank.is_some());
        let (elsewhere, others): (Vec<&Member>, Vec<&Member>) =
            known.partition(|member| member.rank.is_some_and(is_elsewhere));
        [others, elsewhere].concat()
    };
    let members: Vec<Vec<&Member>> = groups.iter().map(in_order).collect();
    let mut edges = Vec::new();
    for (at, wait) in waits.iter().enumerate() {
        let edge = |member: &&Member| {
            let to = member.rank.filter(|rank| *rank != wait.rank)?;
            let reason = reason(job, wait, to, member.seat)?;
            Some(Edge { wait: at, from: wait.rank, to, reason })
        };
        let most = left.saturating_sub(edges.len()).max(1);
        if wait.call.call.operation.is_message() {
            let peer = usize::try_from(wait.call.call.peer).ok();
            let peer = peer.and_then(|peer| groups[wait.group].member(peer));
            edges.extend(peer.as_ref().and_then(edge));
        } else {
            edges.extend(members[wait.group].iter().filter_map(edge).take(most));
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
        return without_message(wait, &seat).map(|reason| if is_halted { Reason::Absent } else { reason });
    }
    // Nobody knows which ranks make an operation of the program's own.
    if !wait.call.call.operation.is_compared() {
        return is_halted.then_some(Reason::Absent);
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

/// Why a send or a receive waits for its peer: the peer is not in the other half of the message.
/// `None` where it is.
fn without_message(wait: &Wait<'_>, peer: &Seat<'_>) -> Option<Reason> {
    let half = match wait.call.call.operation {
        Operation::Send => Operation::Recv,
        _ => Operation::Send,
    };
    let own = wait.seat.channel.rank as i32;
    let is_half = |call: &&RecordedCall| call.call.operation == half && call.call.peer == own;
    match peer.calls().rev().find(is_half).map(|call| call.state) {
        Some(EntryState::Running | EntryState::Issued) => None,
        Some(EntryState::Queued) => Some(Reason::QueuedMessage),
        _ => Some(Reason::NoMessage),
    }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use recording::{Call, ChannelFacts, NO_PEER, Recorder, Snapshot, WorldFacts, layout};

    use super::super::find::Found;
    use super::super::groups::groups;
    use super::super::job::jobs;
    use super::super::process::{Origin, Process, State, Timeline};
    use super::*;

    /// A process whose recording has calls that run in a group of many ranks. It claims all of its
    /// values.
    fn claiming(size: usize, calls: usize) -> Process {
        let words: &'static [AtomicU64] = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 200, "alpha", "0.2.0");
        let world = WorldFacts { key: 7, rank: 0, size, job: "train", store: "", launcher: "" };
        let world = recorder.open_world(&world);
        let facts = ChannelFacts { kind: 0, key: 8, world, rank: 0, members: &[], size, name: "mesh/dp" };
        let channel = recorder.open_channel(&facts);
        let call = Call { operation: Operation::AllReduce, dtype: 7, reduction: 0, count: 4, peer: NO_PEER, stream: 0 };
        for _ in 0..calls {
            let _ = recorder.begin(channel, &call);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        let snapshot = Snapshot::of_bytes(&bytes, &bytes, &bytes).unwrap();
        let timeline = Timeline::new(&snapshot, None, snapshot.process.later.real, None);
        let (state, program, origin) = (State::Sleeps, String::new(), Origin::Here);
        Process { pid: 200, state, snapshot, bytes, timeline, place: None, program, origin }
    }

    #[test]
    fn all_waits_together_have_a_limit_on_edges() {
        let jobs = jobs(Found { processes: vec![claiming(300, 100)], ..Found::default() });
        let groups = groups(&jobs[0]);
        let waits = waits(&groups);
        assert_eq!(waits.len(), 100);
        let edges = edges_within(&jobs[0], &groups, &waits, 1000);
        assert!((1000..=1000 + 100).contains(&edges.len()), "{} edges", edges.len());
        // A wait without an edge would look like one for nobody.
        let with_edges: BTreeSet<usize> = edges.iter().map(|edge| edge.wait).collect();
        assert_eq!(with_edges.len(), 100);
        // All ranks for which the job waits are known.
        let awaited: BTreeSet<usize> = edges.iter().map(|edge| edge.to).collect();
        assert_eq!(awaited.len(), 299);
    }
}
