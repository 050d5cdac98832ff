//! Adds to an error what the recordings say of the ranks that are late, or call something else:
//! where they are, how far they are behind, and the first call in which the ranks of the group
//! differ. The recordings are those of this host, and what other hosts have told (reports.rs).

use std::time::Duration;

use recording::{EntryState, RecordedCall, RecordedChannel};

use super::ranks::{Found, Rank, Wanted};
use super::reports::{self, Local, Reports};
use super::words::{content, short};
use super::{Group, Kind};
use crate::error::{Error, Status};

/// The longest time for a search, which the caller of a failed call waits for.
const LONGEST: Duration = Duration::from_millis(60);
/// The most ranks of which a message tells.
pub(super) const MOST_RANKS: usize = 3;

/// The error of a call of `group`, with what the recordings of this host say of it.
pub(crate) fn explained(error: Error, group: &Group) -> Error {
    with_sentences(error, group, None)
}

/// Does what [`explained`] does, also with the recordings of other hosts. `reports` is the place
/// where the hosts leave their reports. Where ranks of the group are on other hosts, this takes a
/// moment.
pub(crate) fn explained_with(error: Error, group: &Group, reports: &dyn Reports) -> Error {
    with_sentences(error, group, Some(reports))
}

fn with_sentences(error: Error, group: &Group, reports: Option<&dyn Reports>) -> Error {
    let is_meant = match error.status() {
        Status::Timeout | Status::Mismatch => true,
        Status::PeerLost => group.kind == Kind::Dimension,
        _ => false,
    };
    match is_meant.then(|| sentences(group, &error, reports)).flatten() {
        Some(text) => error.followed_by(&format!("; {text}")),
        None => error,
    }
}

/// Returns what the recordings say of the ranks of an error; `None` where they say nothing.
fn sentences(group: &Group, error: &Error, reports: Option<&dyn Reports>) -> Option<String> {
    // The ranks of a mismatch are not late, and its message says what they call. A lost rank has
    // taken its recording with it.
    let late = if error.status() == Status::Mismatch { &[] } else { error.ranks() };
    let late: Vec<u32> = late.iter().filter(|rank| !error.lost().contains(rank)).map(|rank| *rank as u32).collect();
    let own = Found::own()?;
    let is_mine = |channel: &&RecordedChannel| {
        channel.key == group.key && channel.kind == group.kind as u8 && channel.rank == group.rank
    };
    let mine = own.snapshot.channels.iter().find(is_mine)?;
    let (key, me) = own.snapshot.world_of(mine).map(|world| (world.key, world.rank))?;
    let (wanted, call) = (Wanted::of(&own, mine), own.snapshot.calls_of(mine).next_back().copied());
    let mut found = wanted.find(own, LONGEST);
    // A lost rank leaves no report, and the other ranks need not be compared.
    let is_lost = error.status() == Status::PeerLost;
    if let Some(reports) = reports.filter(|_| !is_lost || !late.is_empty()) {
        let others = if is_lost { &[] } else { &wanted.members[..] };
        let elsewhere = from_other_hosts(reports, group, (key, me), &found, &late, others);
        found.extend(elsewhere);
    }
    let (ranks, name) = (wanted.ranks(&found), &wanted.name);
    let here = ranks.iter().find(|rank| rank.number == me)?;
    // A stream does not say for whom it waits. In this case the late ranks are those that have
    // begun fewer calls.
    let is_unknown = error.status() == Status::Timeout && late.is_empty() && group.kind == Kind::Dimension;
    let is_behind = |rank: &Rank<'_>| rank.channel.is_some_and(|channel| channel.calls_begun < wanted.begun);
    let is_late =
        |rank: &&Rank<'_>| rank.number != me && (late.contains(&rank.number) || is_unknown && is_behind(rank));
    let late: Vec<String> = ranks.iter().filter(is_late).map(|rank| rank.place(&wanted, here)).collect();
    let mut said: Vec<String> = late.iter().take(MOST_RANKS).cloned().collect();
    if late.len() > MOST_RANKS {
        said.push(format!("{} more ranks are late", late.len() - MOST_RANKS));
    }
    // A call that is done is not the one that failed: this rank is in no call of the group.
    let call = call.filter(|call| call.state != EntryState::Done);
    if let (true, Some(call)) = (!late.is_empty() || error.status() == Status::PeerLost, &call) {
        said.push(format!("this rank is in {} of {name}", short(&here.found.snapshot, call)));
    }
    // A rank that has refused its own call takes part in the next one, so the calls of a scope may
    // differ without a mistake.
    if group.kind != Kind::Scope && error.status() != Status::PeerLost {
        let is_mismatch = error.status() == Status::Mismatch;
        let missing = || if is_mismatch { missing_call(&ranks, name) } else { None };
        said.extend(difference(&ranks, name).or_else(missing));
    }
    (!said.is_empty()).then(|| said.join("; "))
}

/// Tells the other hosts what the recordings `found` on this host say, and returns what they tell.
/// `key` and `me` are the world and this rank.
fn from_other_hosts(
    reports: &dyn Reports,
    group: &Group,
    (key, me): (u64, u32),
    found: &[Found],
    late: &[u32],
    members: &[u32],
) -> Vec<Found> {
    let local = |rank: u32| {
        let is_of = |found: &&Found| found.snapshot.worlds.iter().any(|world| world.key == key && world.rank == rank);
        let Found { snapshot, memory, .. } = found.iter().find(is_of)?;
        Some(Local { rank, snapshot, memory })
    };
    let is_elsewhere = |rank: &&u32| local(**rank).is_none();
    let absent: Vec<u32> = late.iter().filter(is_elsewhere).copied().collect();
    // Ranks that have not agreed on a call may differ, so only the late ones are of interest
    // there.
    let is_compared = group.kind != Kind::Scope;
    let others = members.iter().filter(|rank| is_compared && !late.contains(*rank)).filter(is_elsewhere);
    let others: Vec<u32> = others.copied().collect();
    let here: Vec<Local<'_>> = late.iter().filter(|rank| **rank != me).filter_map(|rank| local(*rank)).collect();
    let is_silent = local(me).is_some_and(|own| !reports::leave(reports, group, key, &own, &here));
    if is_silent || absent.is_empty() && others.is_empty() {
        return Vec::new();
    }
    let told = reports::read(reports, group, &absent, &others);
    told.into_values().map(|snapshot| Found { pid: 0, snapshot, memory: Vec::new() }).collect()
}

/// The first call in which two ranks of the group differ, as far as the recordings go back.
pub(super) fn difference(ranks: &[Rank<'_>], name: &str) -> Option<String> {
    let calls = |rank: &Rank<'_>| -> Option<(u32, Vec<RecordedCall>)> {
        let channel = rank.channel?;
        let counted = rank.found.snapshot.calls_of(channel).filter(|call| call.call.operation.is_compared());
        Some((rank.number, counted.copied().collect()))
    };
    let all: Vec<(u32, Vec<RecordedCall>)> =
        ranks.iter().filter_map(calls).filter(|(_, calls)| !calls.is_empty()).collect();
    let text = |rank: u32, call: &RecordedCall| {
        let found = ranks.iter().find(|known| known.number == rank)?.found;
        Some(content(&found.snapshot, call))
    };
    // The number of the call, and what the two ranks call there.
    type Differs = (u64, [(u32, RecordedCall); 2]);
    let mut first: Option<Differs> = None;
    // Ranks whose digests are equal have made equal calls, so each rank is compared with one.
    let (one, calls) = all.iter().rev().max_by_key(|(_, calls)| calls.len())?;
    for (other, others) in &all {
        let same = |call: &RecordedCall| {
            let at = others.binary_search_by_key(&call.in_channel, |other| other.in_channel).ok()?;
            Some(others[at])
        };
        let differs = calls.iter().find_map(|call| {
            let same = same(call).filter(|same| same.digest != call.digest)?;
            let mut both = [(*one, *call), (*other, same)];
            both.sort_by_key(|(rank, _)| *rank);
            Some((call.in_channel, both))
        });
        first = [first, differs].into_iter().flatten().min_by_key(|(number, ..)| *number);
    }
    let (number, [(rank, call), (other, others)]) = first?;
    // The digest before a call follows from the call and the digest after it.
    if call.call.digest_before(call.digest) != others.call.digest_before(others.digest) {
        return Some(format!(
            "ranks {rank} and {other} have made different calls of {name} before call {number}, which is the oldest that both recordings hold"
        ));
    }
    Some(format!(
        "the first call of {name} in which these ranks differ is call {number}: rank {rank} {}, rank {other} {}",
        text(rank, &call)?,
        text(other, &others)?
    ))
}

/// The first call that some ranks of the group have made and the others have not.
fn missing_call(ranks: &[Rank<'_>], name: &str) -> Option<String> {
    let channels = || ranks.iter().filter_map(|rank| Some((rank, rank.channel?)));
    let (rank, last) = channels().min_by_key(|(_, channel)| channel.calls_begun)?;
    let (other, more) = channels().max_by_key(|(_, channel)| channel.calls_begun)?;
    let (few, many) = (last.calls_begun, more.calls_begun);
    let snapshot = &other.found.snapshot;
    let is_next = |call: &&RecordedCall| call.in_channel == few + 1 && call.call.operation.is_compared();
    let next = snapshot.calls_of(more).find(is_next).map(|call| content(snapshot, call));
    let next = next.map_or_else(String::new, |text| format!(": call {} is {text}", few + 1));
    let (rank, other) = (rank.number, other.number);
    (few < many).then(|| {
        format!("rank {rank} has made {few} collective calls of {name}, and rank {other} has made {many}{next}")
    })
}
