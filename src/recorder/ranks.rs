//! The ranks of a group, as far as the recordings of this host show them.
//!
//! A reader finds the recordings of this user's processes in /proc. It begins with the processes
//! whose numbers are near this one's, because a launcher starts the ranks of a job one after the
//! other. The search has a limit of time, because a host may have very many processes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use hostccl::recorder::get;
use recording::layout::{header, world};
use recording::place::recordings_of;
use recording::{EntryState, RecordedCall, RecordedChannel, RecordedWorld, Snapshot};

use super::Kind;
use super::words::short;
use crate::printable::printable;

/// The kind of a group of calls that a program makes itself on a communicator.
const RAW: u8 = 2;

/// The recording of a process, and the process.
pub(super) struct Found {
    /// The process; 0 for a process of another host.
    pub(super) pid: u32,
    pub(super) snapshot: Snapshot,
    /// The memory of the recording; empty for a process of another host.
    pub(super) memory: Vec<u8>,
}

/// The group whose ranks are looked for, from this process's recording.
pub(super) struct Wanted {
    /// The kind of the group.
    pub(super) kind: u8,
    /// All ranks of the group have this value, and no other group of this kind has it.
    pub(super) key: u64,
    /// The key of the group's world; `None` for a group that belongs to no world.
    pub(super) world: Option<u64>,
    /// The world ranks of the members. Empty where they are not recorded.
    pub(super) members: Vec<u32>,
    /// The number of members.
    pub(super) size: usize,
    /// The name of the group for messages.
    pub(super) name: String,
    /// How many calls of the group this process has begun.
    pub(super) begun: u64,
}

/// One rank, and its part of its process's recording. The process may have other ranks, too.
#[derive(Clone, Copy)]
pub(super) struct Rank<'a> {
    /// The rank in the world, or in the group where the group belongs to no world.
    pub(super) number: u32,
    /// The rank's process.
    pub(super) found: &'a Found,
    /// The rank's part of the group; `None` where it has not made the group.
    pub(super) channel: Option<&'a RecordedChannel>,
    /// The group's world, in the recording of the rank.
    world: Option<&'a RecordedWorld>,
}

impl Found {
    /// The recording of this process. A second copy of the library in this process has another
    /// one.
    pub(super) fn own() -> Option<Found> {
        let (snapshot, memory) = get()?.with_memory().ok()?;
        Some(Found { pid: std::process::id(), snapshot, memory })
    }

    fn read(pid: u32, file: &File) -> Option<Found> {
        let (snapshot, memory) = Snapshot::with_memory(file).ok()?;
        Some(Found { pid, snapshot, memory })
    }
}

impl Wanted {
    /// The group of this channel of a recording.
    pub(super) fn of(own: &Found, channel: &RecordedChannel) -> Wanted {
        Wanted {
            kind: channel.kind,
            key: channel.key,
            world: own.snapshot.world_of(channel).map(|world| world.key),
            members: channel.members.to_vec(),
            size: channel.size as usize,
            name: printable(&channel.name).into_owned(),
            begun: channel.calls_begun,
        }
    }

    /// Whether this is the group, in any process's recording.
    pub(super) fn is(&self, channel: &RecordedChannel) -> bool {
        channel.key == self.key && channel.kind == self.kind
    }

    /// The number of the rank at a position of the group: the world rank where it is known.
    pub(super) fn rank_at(&self, position: u32) -> u32 {
        self.members.get(position as usize).copied().unwrap_or(position)
    }

    /// Finds the recordings of the group's ranks on this host, `own` among them. Looks at no
    /// further process after `longest`.
    pub(super) fn find(&self, own: Found, longest: Duration) -> Vec<Found> {
        let of_group = |rank: &Rank<'_>| self.members.is_empty() || self.members.contains(&rank.number);
        let count = |found: &Found| self.ranks_in(found).filter(of_group).count();
        let (me, until) = (own.pid, Instant::now() + longest);
        let (mut known, mut found) = (count(&own), vec![own]);
        for pid in own_processes(me) {
            if known >= self.size || Instant::now() > until {
                break;
            }
            // A process with two copies of the library has two recordings.
            let is_wanted = |file: &File| self.world.is_none_or(|key| has_world(file, key));
            let files = recordings_of(pid).map(|(_, file)| file).filter(is_wanted);
            let mut recordings = files.filter_map(|file| Found::read(pid, &file));
            if let Some(next) = recordings.find(|next| self.ranks_in(next).next().is_some()) {
                known += count(&next);
                found.push(next);
            }
        }
        found
    }

    /// The ranks in these recordings: those of the group's world, or those of the group where it
    /// belongs to no world. They are in ascending order.
    pub(super) fn ranks<'a>(&self, found: &'a [Found]) -> Vec<Rank<'a>> {
        let mut ranks: Vec<Rank<'a>> = found.iter().flat_map(|found| self.ranks_in(found)).collect();
        ranks.sort_by_key(|rank| rank.number);
        ranks
    }

    fn ranks_in<'a>(&self, found: &'a Found) -> impl Iterator<Item = Rank<'a>> {
        let Found { snapshot, .. } = found;
        let channels = || snapshot.channels.iter().filter(|channel| self.is(channel));
        let of_world = |world: &'a RecordedWorld| {
            let channel = channels().find(|channel| channel.world == Some(world.number));
            Rank { number: world.rank, found, channel, world: Some(world) }
        };
        let alone = |channel: &'a RecordedChannel| Rank {
            number: self.rank_at(channel.rank),
            found,
            channel: Some(channel),
            world: None,
        };
        let worlds = snapshot.worlds.iter().filter(|world| Some(world.key) == self.world).map(of_world);
        let channels = channels().filter(|_| self.world.is_none()).map(alone);
        worlds.chain(channels).collect::<Vec<_>>().into_iter()
    }
}

impl<'a> Rank<'a> {
    /// Returns the words that say where the rank is, for a message of the rank `here`.
    pub(super) fn place(&self, group: &Wanted, here: &Rank<'_>) -> String {
        let (rank, snapshot, name, begun) = (self.number, &self.found.snapshot, &group.name, group.begun);
        let last = self.channel.and_then(|channel| snapshot.calls_of(channel).next_back());
        let at = match (self.channel, last) {
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
            // Messages and operations of the program's own are not counted among the calls.
            let is_counted = channel.kind == Kind::Dimension as u8 && call.call.operation.is_compared();
            let crossed = match here.has_begun(channel).filter(|_| is_counted) {
                Some(begun) if begun < call.in_channel => {
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
    fn elsewhere(&self, group: &Wanted) -> Option<(&'a RecordedChannel, &'a RecordedCall)> {
        let snapshot = &self.found.snapshot;
        let running = snapshot.calls.iter().rev().filter(|call| call.state == EntryState::Running);
        let mut placed = running.filter_map(|call| {
            let channel = snapshot.channels.iter().find(|channel| channel.place == call.channel)?;
            (call.number >= channel.first_call).then_some((channel, call))
        });
        let world = self.world.map(|world| world.number);
        // The calls that a program makes itself on a communicator belong to no world.
        let is_only = snapshot.worlds.iter().filter(|world| !world.has_ended).count() == 1;
        let is_raw = |channel: &RecordedChannel| channel.kind == RAW && channel.world.is_none() && is_only;
        placed.find(|(channel, _)| !group.is(channel) && (channel.world == world || is_raw(channel)))
    }

    /// How many calls this rank has begun in a group of another process's recording. `None` where
    /// it is not in the group.
    fn has_begun(&self, group: &RecordedChannel) -> Option<u64> {
        let world = self.world.map(|world| world.number);
        let mut own = self.found.snapshot.channels.iter().filter(|own| own.world == world);
        own.find(|own| own.key == group.key).map(|own| own.calls_begun)
    }
}

/// The other processes of this user, those with numbers near this one's first.
fn own_processes(me: u32) -> Vec<u32> {
    let user = rustix::process::geteuid().as_raw();
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

fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicU64;

    use recording::{Call, ChannelFacts, NO_PEER, Operation, Recorder, WorldFacts, layout};

    use super::*;

    /// One of two ranks, which runs these operations of mesh/dp and of mesh/tp.
    pub(in crate::recorder) fn rank_in(rank: usize, [of_dp, of_tp]: [&[Operation]; 2]) -> Found {
        let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 100, "alpha", "0.2.0");
        let world = WorldFacts { key: 7, rank, size: 2, job: "", store: "", launcher: "" };
        let world = recorder.open_world(&world);
        for (key, name, operations) in [(1, "mesh/dp", of_dp), (2, "mesh/tp", of_tp)] {
            let facts = ChannelFacts { kind: 0, key, world, rank, members: &[0, 1], size: 2, name };
            let channel = recorder.open_channel(&facts);
            for operation in operations.iter().copied() {
                let call = Call { operation, dtype: 7, reduction: 0, count: 4, peer: NO_PEER, stream: 0 };
                let _running = recorder.begin(channel, &call);
            }
        }
        Found { pid: 0, snapshot: recorder.snapshot().unwrap(), memory: Vec::new() }
    }

    /// Rank 0 waits in a call of mesh/dp. Rank 1 runs these operations of mesh/tp.
    fn place(operations: &[Operation]) -> String {
        let found = [rank_in(0, [&[Operation::AllReduce], &[]]), rank_in(1, [&[], operations])];
        let wanted = Wanted::of(&found[0], &found[0].snapshot.channels[0]);
        let ranks = wanted.ranks(&found);
        ranks[1].place(&wanted, &ranks[0])
    }

    #[test]
    fn only_calls_that_all_ranks_make_have_an_order() {
        let is_in = |call: &str| format!("rank 1 has made no call of mesh/dp and is in {call} of mesh/tp");
        let orders = ", which this rank has not begun: these ranks call along mesh/dp and mesh/tp in different orders";
        assert_eq!(place(&[Operation::AllReduce]), is_in("all-reduce 1") + orders);
        assert_eq!(place(&[Operation::Send]), is_in("send 1"));
        assert_eq!(place(&[Operation::Custom]), is_in("own operation 1"));
    }
}
