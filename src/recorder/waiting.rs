//! The calls of this process that wait, and the ranks for which they wait, as far as the
//! recordings of this host show them.

use std::time::Duration;

use hostccl::recorder::{get, remote_of};
use recording::{ChannelState, EntryState, Operation, RecordedCall, RecordedChannel, RunningCall};

use super::late::{MOST_RANKS, difference};
use super::launched::unfinished;
use super::ranks::{Found, Rank, Wanted};
use super::words::short;
use super::{Group, Kind};
use crate::printable::printable;
use crate::rank_list::ranges;

/// The longest time for a search. No call waits for it.
const LONGEST: Duration = Duration::from_millis(500);

/// A call of this process that waits.
pub(crate) struct WaitingCall {
    /// This process's rank in the world of the call, or in the group where the group belongs to no
    /// world.
    pub(crate) rank: i32,
    /// The number of ranks of the world, or of the group where the group belongs to no world.
    pub(crate) world_size: i32,
    /// The epoch of the world.
    pub(crate) epoch: u64,
    /// The name of the group: a mesh and its dimension as `mesh/tp`, or the scope in which the
    /// ranks agree.
    pub(crate) group: String,
    /// The dimension; `None` where the group belongs to no dimension.
    pub(crate) dimension: Option<String>,
    /// The operation, or the text of a call on which the ranks agree.
    pub(crate) operation: String,
    /// The number of the call in its group, from 1.
    pub(crate) number: u64,
    /// The ranks for which the call waits, in ascending order, as far as this host shows it.
    pub(crate) missing: Vec<i32>,
    /// A description of the call in one line.
    pub(crate) message: String,
}

/// The oldest call of each group among the calls of this process that run, and those that NCCL has
/// launched and that have not ended. The other calls of the group may only wait for the oldest one.
pub(crate) fn running() -> Vec<RunningCall> {
    oldest(get().map_or_else(Vec::new, |recorder| recorder.running(&unfinished())))
}

/// The oldest call of each group.
fn oldest(mut calls: Vec<RunningCall>) -> Vec<RunningCall> {
    calls.sort_unstable_by_key(|call| (call.group, call.number));
    calls.dedup_by_key(|call| call.group);
    calls
}

/// Describes the call `number` of this process, which has run for `time`. Returns `None` where the
/// call has ended by now. This may take half a second, because the function reads the recordings
/// of the other ranks.
pub(crate) fn describe(number: u64, time: Duration) -> Option<WaitingCall> {
    let own = Found::own()?;
    let snapshot = &own.snapshot;
    let call = *snapshot.calls.iter().rev().find(|call| call.number == number)?;
    let is_its = |place: u16, first: u64| place == call.channel && number >= first;
    let mine = snapshot.channels.iter().find(|channel| is_its(channel.place, channel.first_call))?;
    if !matches!(call.state, EntryState::Running | EntryState::Issued) || mine.state == ChannelState::Closed {
        return None;
    }
    // While a process joins, the call that agrees on the world says who has not come.
    let is_agreement = |later: &RecordedCall| later.number > number && snapshot.text(later).is_some();
    let is_joining = mine.kind == Kind::Scope as u8 && mine.world.is_none();
    if is_joining && snapshot.calls.iter().any(|later| later.state == EntryState::Running && is_agreement(later)) {
        return None;
    }
    let (wanted, position) = (Wanted::of(&own, mine), mine.rank);
    let world = snapshot.world_of(mine);
    let (rank, world_size) = world.map_or((wanted.rank_at(position), mine.size), |world| (world.rank, world.size));
    let epoch = world.map_or(0, |world| world.epoch.into());
    let dimension = (mine.kind == Kind::Dimension as u8).then(|| mine.name.rsplit_once('/')).flatten();
    let dimension = dimension.map(|(_, name)| name.to_owned());
    let (what, text) = (short(snapshot, &call), snapshot.text(&call).map(|text| printable(text).into_owned()));
    let operation = text.clone().unwrap_or_else(|| call.call.operation.name().to_owned());
    let found = wanted.find(own, LONGEST);
    let ranks = wanted.ranks(&found);
    let here = ranks.iter().find(|known| known.number == rank && known.channel.is_some())?;
    let Waits { missing, unseen } = Waits::of(&call, &wanted, (position, here), &ranks);
    let place = if text.is_some() { what } else { format!("{what} of {}", wanted.name) };
    let mut message = format!("rank {rank} has waited in {place} for {}", seconds(time));
    let mut numbers: Vec<i32> = missing.iter().map(|rank| rank.number as i32).collect();
    // The rank of another host may wait itself, so it counts only where this host misses nobody.
    let remote = remote_of(number).filter(|rank| numbers.is_empty() && unseen.contains(rank));
    let whom = match (numbers.is_empty(), unseen.is_empty()) {
        _ if call.call.operation == Operation::Custom => {
            numbers.extend(remote);
            match remote {
                Some(rank) => format!(": the call waits for a message of rank {rank} on another host"),
                None => ": nobody knows for which ranks it waits".to_owned(),
            }
        }
        (false, _) => format!(": {} did not come", ranges(&numbers)),
        (true, false) if remote.is_some() => {
            numbers.extend(remote);
            format!(
                ": no rank of this host is missing, and the call waits for a message of {} on another host",
                ranges(&numbers)
            )
        }
        (true, false) => {
            let is = if unseen.len() == 1 { "is" } else { "are" };
            format!(": {} {is} not seen on this host, and no other rank is missing", ranges(&unseen))
        }
        (true, true) => ", and no rank is missing: the call moves data, or the network is stuck".to_owned(),
    };
    message.push_str(&whom);
    let places = missing.iter().take(MOST_RANKS).map(|rank| rank.place(&wanted, here));
    let differs = (wanted.kind == Kind::Dimension as u8).then(|| difference(&ranks, &wanted.name)).flatten();
    places.chain(differs).for_each(|text| message.push_str(&format!("; {text}")));
    Some(WaitingCall {
        rank: rank as i32,
        world_size: world_size as i32,
        epoch,
        group: wanted.name,
        dimension,
        operation,
        number: call.in_channel,
        missing: numbers,
        message,
    })
}

/// Returns the ranks that have begun fewer calls of a group than this process, in ascending order,
/// and the sentences that say where they are. It knows only the ranks whose recordings are on this
/// host. It may take half a second.
pub(crate) fn behind(group: &Group) -> (Vec<i32>, Vec<String>) {
    let Some(own) = Found::own() else { return Default::default() };
    let is_mine = |channel: &&RecordedChannel| {
        channel.key == group.key && channel.kind == group.kind as u8 && channel.rank == group.rank
    };
    let Some(mine) = own.snapshot.channels.iter().find(is_mine) else { return Default::default() };
    let (wanted, position) = (Wanted::of(&own, mine), mine.rank);
    let found = wanted.find(own, LONGEST);
    let ranks = wanted.ranks(&found);
    let is_here = |rank: &&Rank<'_>| rank.channel.is_some_and(|channel| channel.rank == position);
    let Some(here) = ranks.iter().find(is_here) else { return Default::default() };
    let is_behind = |rank: &&Rank<'_>| rank.channel.is_some_and(|channel| channel.calls_begun < wanted.begun);
    let behind: Vec<&Rank<'_>> = ranks.iter().filter(is_behind).collect();
    let places = behind.iter().take(MOST_RANKS).map(|rank| rank.place(&wanted, here)).collect();
    (behind.iter().map(|rank| rank.number as i32).collect(), places)
}

/// The ranks for which a call waits.
struct Waits<'a> {
    /// The ranks that have not come to the call, or have made another one.
    missing: Vec<Rank<'a>>,
    /// The ranks of which this host has no recording.
    unseen: Vec<i32>,
}

impl<'a> Waits<'a> {
    /// The ranks for which `call` waits. The rank `here`, at the position `me` of the group, has
    /// made the call. No rank is missing in an operation of the program's own, because nobody knows
    /// which ranks make it.
    fn of(call: &RecordedCall, group: &Wanted, (me, here): (u32, &Rank<'a>), ranks: &[Rank<'a>]) -> Waits<'a> {
        let mut waits = Waits { missing: Vec::new(), unseen: Vec::new() };
        let peer = u32::try_from(call.call.peer).ok().filter(|_| call.call.operation.is_message());
        let is_collective = call.call.operation.is_compared();
        let positions = match peer {
            Some(peer) => peer..peer + 1,
            None => 0..group.size as u32,
        };
        for position in positions.filter(|position| *position != me) {
            let number = group.rank_at(position);
            let is_it = |rank: &&Rank<'_>| match rank.channel {
                Some(channel) => channel.rank == position,
                None => rank.number == number,
            };
            match ranks.iter().find(is_it) {
                None => waits.unseen.push(number as i32),
                Some(rank) if peer.is_some() && is_without_message(call, me, rank) => waits.missing.push(*rank),
                Some(rank) if is_collective && has_not_come(call, here, rank) => waits.missing.push(*rank),
                Some(_) => {}
            }
        }
        waits.missing.sort_by_key(|rank| rank.number);
        waits
    }
}

/// Whether a rank has not come to a collective call of the rank `here`, or has made another one.
fn has_not_come(call: &RecordedCall, here: &Rank<'_>, rank: &Rank<'_>) -> bool {
    let Some(channel) = rank.channel.filter(|channel| channel.calls_begun >= call.in_channel) else { return true };
    let mut calls = rank.found.snapshot.calls_of(channel).filter(|other| other.call.operation.is_compared());
    let same = calls.find(|other| other.in_channel == call.in_channel);
    // The rank's recording may have overwritten the call, and then nobody knows whether the rank
    // has made it.
    let is_queued = same.is_some_and(|same| same.state == EntryState::Queued);
    let differs = here.channel.is_some_and(|own| own.kind == Kind::Dimension as u8)
        && same.is_some_and(|same| same.digest != call.digest);
    is_queued || differs
}

/// Whether the peer of a message is not in the other half of the message. `me` is the position of
/// the rank that waits.
fn is_without_message(call: &RecordedCall, me: u32, peer: &Rank<'_>) -> bool {
    let half = if call.call.operation == Operation::Send { Operation::Recv } else { Operation::Send };
    let Some(channel) = peer.channel else { return true };
    let is_half = |other: &&RecordedCall| other.call.operation == half && other.call.peer == me as i32;
    let last = peer.found.snapshot.calls_of(channel).rev().find(is_half);
    !last.is_some_and(|last| matches!(last.state, EntryState::Running | EntryState::Issued))
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::ranks::tests::rank_in;
    use super::*;

    /// The ranks that are missing in the last call of rank 0, where the ranks run these operations.
    fn missing(operations: [&[Operation]; 2]) -> Vec<u32> {
        let found = [0, 1].map(|rank| rank_in(rank, [operations[rank], &[]]));
        let wanted = Wanted::of(&found[0], &found[0].snapshot.channels[0]);
        let (ranks, call) = (wanted.ranks(&found), found[0].snapshot.calls.last().unwrap());
        let waits = Waits::of(call, &wanted, (0, &ranks[0]), &ranks);
        assert!(waits.unseen.is_empty());
        waits.missing.iter().map(|rank| rank.number).collect()
    }

    #[test]
    fn nobody_knows_who_is_missing_in_an_operation_of_the_programs_own() {
        let [all_reduce, own] = [Operation::AllReduce, Operation::Custom];
        assert_eq!(missing([&[all_reduce], &[own, own]]), [1]);
        assert!(missing([&[own, own, all_reduce], &[all_reduce]]).is_empty());
        assert!(missing([&[all_reduce, own], &[]]).is_empty());
    }

    #[test]
    fn only_the_oldest_call_of_each_group_counts() {
        let call = |(number, group)| RunningCall { number, group, time: Duration::ZERO };
        let calls = [(2050, 1), (7, 3), (2049, 1), (9, 3), (2048, 0)].map(call);
        assert_eq!(oldest(calls.to_vec()), [(2048, 0), (2049, 1), (7, 3)].map(call));
    }
}
