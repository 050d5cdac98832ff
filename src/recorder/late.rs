//! Adds to an error what the recordings say of the ranks that are late, or call something else:
//! where they are, how far they are behind, and the first call in which the ranks of the group
//! differ. The recordings are those of this host, and what other hosts have told (reports.rs).
//!
//! A reader finds the recordings of this user's processes in /proc. It begins with the processes
//! whose numbers are near this one's, because a launcher starts the ranks of a job one after the
//! other. The search looks at no further process after [`LONGEST`].

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use recording::layout::{header, world};
use recording::place::recordings_of;
use recording::{EntryState, RecordedCall, RecordedChannel, RecordedWorld, Snapshot};

use super::reports::{self, Local, Reports};
use super::words::{content, short};
use super::{Group, Kind};
use crate::error::{Error, Status};
use crate::printable::printable;

/// The longest time for a search.
const LONGEST: Duration = Duration::from_millis(60);
/// The kind of a group of calls that a program makes itself on a communicator.
const RAW: u8 = 2;
/// The most ranks of which a message tells.
const MOST_RANKS: usize = 3;

/// The recording of a process, and the process.
struct Found {
    /// The process; 0 for a process of another host.
    pid: u32,
    snapshot: Snapshot,
    /// The memory of the recording; empty for a process of another host.
    memory: Vec<u8>,
}

/// One rank's recording: its process may have others, too.
#[derive(Clone, Copy)]
struct Rank<'a> {
    found: &'a Found,
    world: &'a RecordedWorld,
}

/// The error of a call of `group`, with what the recordings of this host say of it.
pub(crate) fn explained(error: Error, group: &Group) -> Error {
    with_sentences(error, group, None)
}

/// Does what [`explained`] does, also with the recordings of other hosts. `reports` is where the
/// hosts tell each other. Where ranks of the group are on other hosts, this takes a moment.
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

/// What the recordings say of the ranks of an error; `None` where they say nothing.
fn sentences(group: &Group, error: &Error, reports: Option<&dyn Reports>) -> Option<String> {
    // The ranks of a mismatch are not late, and its message says what they call. A lost rank has
    // taken its recording with it.
    let late = if error.status() == Status::Mismatch { &[] } else { error.ranks() };
    let late: Vec<u32> = late.iter().filter(|rank| !error.lost().contains(rank)).map(|rank| *rank as u32).collect();
    let own = recording_of(std::process::id(), |_| true)?;
    let mine = own.snapshot.channels.iter().find(|channel| is_group(channel, group) && channel.rank == group.rank)?;
    let (key, me) = own.snapshot.world_of(mine).map(|world| (world.key, world.rank))?;
    let (members, begun) = (mine.members.clone(), mine.calls_begun);
    let call = own.snapshot.calls_of(mine).next_back().copied();
    let of_group = |rank: &u32| if members.is_empty() { true } else { members.contains(rank) };
    let (size, name) = (mine.size as usize, printable(&mine.name).into_owned());
    let mut found = vec![own];
    let until = Instant::now() + LONGEST;
    for pid in own_processes() {
        let known = found.iter().flat_map(|found| &found.snapshot.worlds).filter(|world| world.key == key);
        if known.filter(|world| of_group(&world.rank)).count() >= size || Instant::now() > until {
            break;
        }
        found.extend(recording_of(pid, |file| has_world(file, key)));
    }
    // Who is lost says nothing, and the others have no difference.
    let is_lost = error.status() == Status::PeerLost;
    if let Some(reports) = reports.filter(|_| !is_lost || !late.is_empty()) {
        let others = if is_lost { &[] } else { &members[..] };
        let elsewhere = from_other_hosts(reports, group, (key, me), &found, &late, others);
        found.extend(elsewhere);
    }
    let mut ranks: Vec<Rank<'_>> = Vec::new();
    for found in &found {
        ranks.extend(found.snapshot.worlds.iter().filter(|it| it.key == key).map(|world| Rank { found, world }));
    }
    ranks.sort_by_key(|rank| rank.world.rank);
    let here = ranks.iter().find(|rank| rank.world.rank == me)?;
    // A stream does not say for whom it waits. The ranks that have begun fewer calls are late
    // then.
    let is_unknown = error.status() == Status::Timeout && late.is_empty() && group.kind == Kind::Dimension;
    let is_behind = |rank: &Rank<'_>| rank.channel(group).is_some_and(|channel| channel.calls_begun < begun);
    let is_late =
        |rank: &&Rank<'_>| rank.world.rank != me && (late.contains(&rank.world.rank) || is_unknown && is_behind(rank));
    let late: Vec<String> = ranks.iter().filter(is_late).map(|rank| rank.place(group, &name, begun, here)).collect();
    let mut said: Vec<String> = late.iter().take(MOST_RANKS).cloned().collect();
    if late.len() > MOST_RANKS {
        said.push(format!("{} more ranks are late", late.len() - MOST_RANKS));
    }
    if let (true, Some(call)) = (!late.is_empty() || error.status() == Status::PeerLost, &call) {
        said.push(format!("this rank is in {} of {name}", short(&here.found.snapshot, call)));
    }
    // A rank that refuses its own agreement goes on with the others, so scopes may differ.
    if group.kind != Kind::Scope && error.status() != Status::PeerLost {
        let is_mismatch = error.status() == Status::Mismatch;
        let missing = || if is_mismatch { missing_call(&ranks, group, &name) } else { None };
        said.extend(difference(&ranks, group, &name).or_else(missing));
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
    if let Some(own) = local(me) {
        reports::leave(reports, group, key, &own, &here);
    }
    if absent.is_empty() && others.is_empty() {
        return Vec::new();
    }
    let told = reports::read(reports, group, &absent, &others);
    told.into_values().map(|snapshot| Found { pid: 0, snapshot, memory: Vec::new() }).collect()
}

impl<'a> Rank<'a> {
    /// The rank's part of the group; `None` where it has not made it.
    fn channel(&self, group: &Group) -> Option<&'a RecordedChannel> {
        let is_own = |channel: &&RecordedChannel| is_group(channel, group) && channel.world == Some(self.world.place);
        self.found.snapshot.channels.iter().find(is_own)
    }

    /// Where the rank is, for a message of the rank `here`, which has begun `begun` calls of the
    /// group.
    fn place(&self, group: &Group, name: &str, begun: u64, here: &Rank<'_>) -> String {
        let (rank, snapshot) = (self.world.rank, &self.found.snapshot);
        let last = self.channel(group).and_then(|channel| snapshot.calls_of(channel).next_back());
        let at = match (self.channel(group), last) {
            (Some(channel), Some(last)) if channel.calls_begun < begun => {
                let behind = match begun - channel.calls_begun {
                    1 => String::new(),
                    calls => format!(", {calls} calls behind"),
                };
                format!("is at {} of {name}{behind}", short(snapshot, last))
            }
            (Some(_), Some(last)) if last.state == EntryState::Queued => {
                format!("has {} of {name} in a group of calls that it has not ended", short(snapshot, last))
            }
            (Some(channel), Some(last)) if channel.calls_begun > begun => {
                format!("is at {} of {name}, which is ahead of this rank", short(snapshot, last))
            }
            (Some(_), Some(last)) => format!("has begun {} of {name}", short(snapshot, last)),
            _ => format!("has made no call of {name}"),
        };
        let elsewhere = self.elsewhere(group).map_or_else(String::new, |(channel, call)| {
            let of = if channel.kind != Kind::Scope as u8 {
                format!(" of {}", printable(&channel.name))
            } else {
                String::new()
            };
            let crossed = match here.has_begun(channel) {
                Some(begun) if begun < call.in_channel && channel.kind == 0 => {
                    format!(
                        ", which this rank has not begun: these ranks call along {name} and {} in different orders",
                        printable(&channel.name)
                    )
                }
                _ => String::new(),
            };
            format!(" and is in {}{of}{crossed}", short(snapshot, call))
        });
        let stopped = if is_stopped(self.found.pid) { " and is stopped" } else { "" };
        format!("rank {rank} {at}{elsewhere}{stopped}")
    }

    /// The call of another group in which the rank is.
    fn elsewhere(&self, group: &Group) -> Option<(&'a RecordedChannel, &'a RecordedCall)> {
        let snapshot = &self.found.snapshot;
        let running = snapshot.calls.iter().rev().filter(|call| call.state == EntryState::Running);
        let mut placed = running.filter_map(|call| {
            let channel = snapshot.channels.iter().find(|channel| channel.place == call.channel)?;
            (call.number >= channel.first_call).then_some((channel, call))
        });
        // The calls that a program makes itself on a communicator belong to no world.
        let is_only = snapshot.worlds.iter().filter(|world| !world.has_ended).count() == 1;
        let is_raw = |channel: &RecordedChannel| channel.kind == RAW && channel.world.is_none() && is_only;
        let is_own = |channel: &RecordedChannel| channel.world == Some(self.world.place) || is_raw(channel);
        placed.find(|(channel, _)| !is_group(channel, group) && is_own(channel))
    }

    /// How many calls this rank has begun in a group of another process's recording. `None` where
    /// it is not in the group.
    fn has_begun(&self, group: &RecordedChannel) -> Option<u64> {
        let mut own = self.found.snapshot.channels.iter().filter(|own| own.world == Some(self.world.place));
        own.find(|own| own.key == group.key).map(|own| own.calls_begun)
    }
}

/// The first call in which two ranks of the group differ, as far as the recordings go back.
fn difference(ranks: &[Rank<'_>], group: &Group, name: &str) -> Option<String> {
    let calls = |rank: &Rank<'_>| -> Option<(u32, Vec<RecordedCall>)> {
        let channel = rank.channel(group)?;
        let counted = rank.found.snapshot.calls_of(channel).filter(|call| !call.call.operation.is_message());
        Some((rank.world.rank, counted.copied().collect()))
    };
    let all: Vec<(u32, Vec<RecordedCall>)> =
        ranks.iter().filter_map(calls).filter(|(_, calls)| !calls.is_empty()).collect();
    let text = |rank: u32, call: &RecordedCall| {
        let found = ranks.iter().find(|known| known.world.rank == rank)?.found;
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
    // A call and the digest after it give the digest before it.
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

/// The call that some ranks of the group have made beyond the last one of the others.
fn missing_call(ranks: &[Rank<'_>], group: &Group, name: &str) -> Option<String> {
    let channels = || ranks.iter().filter_map(|rank| Some((rank, rank.channel(group)?)));
    let (rank, last) = channels().min_by_key(|(_, channel)| channel.calls_begun)?;
    let (other, more) = channels().max_by_key(|(_, channel)| channel.calls_begun)?;
    let (few, many) = (last.calls_begun, more.calls_begun);
    let snapshot = &other.found.snapshot;
    let is_next = |call: &&RecordedCall| call.in_channel == few + 1 && !call.call.operation.is_message();
    let next = snapshot.calls_of(more).find(is_next).map(|call| content(snapshot, call));
    let next = next.map_or_else(String::new, |text| format!(": call {} is {text}", few + 1));
    let (rank, other) = (rank.world.rank, other.world.rank);
    (few < many).then(|| {
        format!("rank {rank} has made {few} collective calls of {name}, and rank {other} has made {many}{next}")
    })
}

fn is_group(channel: &RecordedChannel, group: &Group) -> bool {
    channel.key == group.key && channel.kind == group.kind as u8
}

/// The other processes of this user, those with numbers near this one's first.
fn own_processes() -> Vec<u32> {
    let (me, user) = (std::process::id(), rustix::process::geteuid().as_raw());
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let is_own = |entry: &fs::DirEntry| entry.metadata().is_ok_and(|entry| entry.uid() == user);
    let pids = entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry)));
    let mut pids: Vec<u32> = pids.filter(|(pid, entry)| *pid != me && is_own(entry)).map(|(pid, _)| pid).collect();
    pids.sort_by_key(|pid| pid.abs_diff(me));
    pids
}

/// Whether a recording may have the world of that key. Reading its header is much quicker than
/// reading all of it, and a host may have many processes of other jobs.
fn has_world(file: &File, key: u64) -> bool {
    let key = key.to_ne_bytes();
    let is_there = |place: usize| {
        let at = (header::WORLDS + place * header::WORLD_WORDS + world::KEY) * key.len();
        let mut found = [0; 8];
        file.read_exact_at(&mut found, at as u64).is_ok() && found == key
    };
    (0..header::WORLD_COUNT).any(is_there)
}

/// The first recording of a process, if `is_wanted` holds for it.
fn recording_of(pid: u32, is_wanted: impl Fn(&File) -> bool) -> Option<Found> {
    let (_, file) = recordings_of(pid).next().filter(|(_, file)| is_wanted(file))?;
    let (snapshot, memory) = Snapshot::with_memory(&file).ok()?;
    Some(Found { pid, snapshot, memory })
}

fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}
