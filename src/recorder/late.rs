//! Adds to an error what the recordings of this host say of the ranks that are late, or call
//! something else: where they are, how far they are behind, and the first call in which the ranks
//! of the group differ.

use std::time::Duration;

use recording::RecordedCall;

use super::ranks::{Found, Rank, Wanted};
use super::words::{content, short};
use super::{Group, Kind};
use crate::error::{Error, Status};

/// The longest time for a search, which the caller of a failed call waits for.
const LONGEST: Duration = Duration::from_millis(60);
/// The most ranks of which a message tells.
pub(super) const MOST_RANKS: usize = 3;

/// The error of a call of `group`, with what the recordings of this host say of it.
pub(crate) fn explained(error: Error, group: &Group) -> Error {
    let is_meant = matches!(error.status(), Status::Timeout | Status::Mismatch);
    // The ranks of a mismatch are not late, and its message says what they call.
    let late = if error.status() == Status::Timeout { error.ranks() } else { &[] };
    match is_meant.then(|| sentences(group, late)).flatten() {
        Some(text) => error.followed_by(&format!("; {text}")),
        None => error,
    }
}

/// What the recordings say of the `late` ranks of the world; `None` where they say nothing.
fn sentences(group: &Group, late: &[i32]) -> Option<String> {
    let own = Found::own()?;
    let is_mine = |key, kind, rank| key == group.key && kind == group.kind as u8 && rank == group.rank;
    let mine = own.snapshot.channels.iter().find(|channel| is_mine(channel.key, channel.kind, channel.rank))?;
    let me = own.snapshot.world_of(mine)?.rank;
    let (wanted, call) = (Wanted::of(&own, mine), own.snapshot.calls_of(mine).next_back().copied());
    let found = wanted.find(own, LONGEST);
    let ranks = wanted.ranks(&found);
    let here = ranks.iter().find(|rank| rank.number == me)?;
    let is_late = |rank: &&Rank<'_>| rank.number != me && late.contains(&(rank.number as i32));
    let late: Vec<String> = ranks.iter().filter(is_late).map(|rank| rank.place(&wanted, here)).collect();
    let mut said: Vec<String> = late.iter().take(MOST_RANKS).cloned().collect();
    if late.len() > MOST_RANKS {
        said.push(format!("{} more ranks are late", late.len() - MOST_RANKS));
    }
    if let (false, Some(call)) = (late.is_empty(), &call) {
        said.push(format!("this rank is in {} of {}", short(&here.found.snapshot, call), wanted.name));
    }
    // A rank that refuses its own agreement goes on with the others, so scopes may differ.
    said.extend(Some(group).filter(|it| it.kind == Kind::Dimension).and_then(|_| difference(&ranks, &wanted.name)));
    (!said.is_empty()).then(|| said.join("; "))
}

/// The first call in which two ranks of the group differ, as far as the recordings go back.
pub(super) fn difference(ranks: &[Rank<'_>], name: &str) -> Option<String> {
    let calls = |rank: &Rank<'_>| -> Option<(u32, Vec<RecordedCall>)> {
        let channel = rank.channel?;
        let counted = rank.found.snapshot.calls_of(channel).filter(|call| !call.call.operation.is_message());
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
    let is_earlier = call.call.operation == others.call.operation
        && (call.call.count, call.call.dtype, call.call.peer)
            == (others.call.count, others.call.dtype, others.call.peer)
        && call.call.reduction == others.call.reduction;
    if is_earlier {
        return Some(format!("ranks {rank} and {other} have made different calls of {name} before call {number}"));
    }
    Some(format!(
        "the first call of {name} in which these ranks differ is call {number}: rank {rank} {}, rank {other} {}",
        text(rank, &call)?,
        text(other, &others)?
    ))
}
