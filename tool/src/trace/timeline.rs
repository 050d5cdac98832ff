//! The calls of all ranks of a job on one scale of time.

use std::collections::BTreeMap;

use devicemesh::ccl::element_size;
use devicemesh::rendezvous::host_name;
use recording::{EntryState, Operation, RecordedCall, Snapshot};

use super::clocks::{Meeting, offsets};
use crate::recordings::length_of_tick;

/// The name of the job of processes that have joined no world.
const NO_WORLD: &str = "no-world";

/// The calls of all ranks of a job.
pub struct Timeline {
    /// The processes, by rank. A rank that was started again has several.
    pub ranks: Vec<RankFacts>,
    /// The groups in which the ranks make calls, by the groups' keys.
    pub groups: BTreeMap<u64, Group>,
    /// All calls, in the order in which they began.
    pub calls: Vec<TimedCall>,
}

/// A process of the job.
pub struct RankFacts {
    /// The rank in the world.
    pub rank: u32,
    /// The process, in its own process-id namespace.
    pub pid: u32,
    /// The name of the host.
    pub host: String,
    /// How many calls the process has begun. Fewer are in the recording where it has made many.
    pub calls_begun: u64,
}

/// A group of ranks that make calls together.
pub struct Group {
    /// A mesh and its dimension as `mesh/dp`, or a scope.
    pub name: String,
    /// The number of ranks.
    pub size: u32,
    /// Whether it is a scope in which ranks agree, and no dimension or communicator.
    pub is_scope: bool,
}

/// One call of one process.
pub struct TimedCall {
    /// The process, as an index of [`Timeline::ranks`].
    pub process: usize,
    /// The group, as a key of [`Timeline::groups`].
    pub group: u64,
    /// The number of the call in the group. Collectives and messages are counted apart.
    pub number: u64,
    /// What the call does.
    pub operation: Operation,
    /// What the call moves, in bytes: the larger one of the two buffers, as nccl-tests counts.
    pub bytes: u64,
    /// The text of an agreement.
    pub text: Option<String>,
    /// How it went.
    pub state: EntryState,
    /// When the call began, in nanoseconds since the first call.
    pub begun: f64,
    /// When the call ended, in nanoseconds since the first call. A call that has not ended gets the
    /// time of the recording's last moment.
    pub ended: f64,
}

/// One process with the scale of its clock.
struct Process<'a> {
    snapshot: &'a Snapshot,
    /// The rank in the world.
    rank: u32,
    /// The host, as an index.
    host: usize,
    /// The nanoseconds of a tick.
    tick: f64,
}

impl Process<'_> {
    /// Nanoseconds of the host's monotonic clock.
    fn time(&self, ticks: u64) -> f64 {
        let began = &self.snapshot.process.began;
        began.monotonic as f64 + (ticks as f64 - began.ticks as f64) * self.tick
    }
}

impl Timeline {
    /// The timeline of the job with that name in these recordings. Fails with a message where no
    /// recording of another host is long enough to tell how fast that host's clock counts.
    pub fn new(snapshots: &[Snapshot], job: &str) -> Result<Timeline, String> {
        let of_job = |snapshot: &&Snapshot| job_and_rank(snapshot).is_some_and(|(of, _)| of == job);
        let here = host_name();
        let mut lengths: BTreeMap<&str, f64> = BTreeMap::new();
        for snapshot in snapshots.iter().filter(of_job) {
            if let Some(length) = snapshot.nanoseconds_per_tick(None) {
                lengths.insert(&snapshot.process.host, length);
            }
        }
        let is_short = |snapshot: &Snapshot| !lengths.contains_key(&*snapshot.process.host);
        if snapshots.iter().filter(of_job).any(|it| it.process.host == here && is_short(it)) {
            lengths.extend(length_of_tick().map(|length| (&*here, length)));
        }
        let mut hosts: Vec<&str> = Vec::new();
        let mut processes: Vec<Process> = Vec::new();
        for snapshot in snapshots {
            let Some((_, rank)) = job_and_rank(snapshot).filter(|(of, _)| of == job) else { continue };
            let name = snapshot.process.host.as_str();
            let host = hosts.iter().position(|known| *known == name).unwrap_or_else(|| {
                hosts.push(name);
                hosts.len() - 1
            });
            let own = snapshot.nanoseconds_per_tick(None);
            let tick = own.or_else(|| lengths.get(name).copied()).ok_or_else(|| {
                format!(
                    "the recordings of host {name} are shorter than 1 ms, so they do not tell how fast its clock counts"
                )
            })?;
            processes.push(Process { snapshot, rank, host, tick });
        }
        processes.sort_by_key(|process| (process.rank, process.snapshot.process.began.real));
        let real = real_differences(&processes, hosts.len());
        let offsets = offsets(&real, &meetings(&processes));
        Ok(Timeline::with_offsets(&processes, &offsets))
    }

    fn with_offsets(processes: &[Process], offsets: &[f64]) -> Timeline {
        let mut timeline = Timeline { ranks: Vec::new(), groups: BTreeMap::new(), calls: Vec::new() };
        for (index, process) in processes.iter().enumerate() {
            let facts = &process.snapshot.process;
            timeline.ranks.push(RankFacts {
                rank: process.rank,
                pid: facts.pid,
                host: facts.host.clone(),
                calls_begun: facts.calls_begun,
            });
            let offset = offsets[process.host];
            let last = process.snapshot.calls.iter().map(|call| call.ended.unwrap_or(call.begun)).max().unwrap_or(0);
            let last = process.time(last.max(facts.later.ticks));
            for channel in &process.snapshot.channels {
                let (name, is_scope) = (channel.name.clone(), channel.kind == 1);
                let group = Group { name, size: channel.size, is_scope };
                timeline.groups.entry(channel.key).or_insert(group);
                timeline.calls.extend(process.snapshot.calls_of(channel).map(|call| TimedCall {
                    process: index,
                    group: channel.key,
                    number: call.in_channel,
                    operation: call.call.operation,
                    bytes: bytes(call, channel.size),
                    text: process.snapshot.text(call).map(str::to_owned),
                    state: call.state,
                    begun: process.time(call.begun) + offset,
                    ended: call.ended.map_or(last, |ticks| process.time(ticks)) + offset,
                }));
            }
        }
        let first = timeline.calls.iter().map(|call| call.begun).fold(f64::INFINITY, f64::min);
        for call in &mut timeline.calls {
            call.begun -= first;
            call.ended = (call.ended - first).max(call.begun);
        }
        timeline.calls.sort_by(|one, other| one.begun.total_cmp(&other.begun));
        timeline
    }
}

/// The jobs of these recordings, each with the number of its processes.
pub fn jobs(snapshots: &[Snapshot]) -> BTreeMap<String, usize> {
    let mut jobs = BTreeMap::new();
    for (job, _) in snapshots.iter().filter_map(job_and_rank) {
        *jobs.entry(job).or_default() += 1;
    }
    jobs
}

/// The job of a process and its rank: those of the world that it has joined last and not left, or
/// of the last one that it has left. A process without a world, of which NCCL alone has told, is in
/// the job [`NO_WORLD`] and has its rank in its largest communicator. `None` for a process without
/// groups.
fn job_and_rank(snapshot: &Snapshot) -> Option<(String, u32)> {
    let world = snapshot.worlds.iter().max_by_key(|world| !world.has_ended);
    let largest = snapshot.channels.iter().max_by_key(|channel| channel.size);
    let of_world = world.map(|world| (world.job.clone(), world.rank));
    of_world.or_else(|| Some((NO_WORLD.to_owned(), largest?.rank)))
}

/// For each host, what is added to its monotonic time so that it fits host 0's, by the real time of
/// the hosts.
fn real_differences(processes: &[Process], hosts: usize) -> Vec<f64> {
    let zero = |host: usize| {
        let process = processes.iter().find(|process| process.host == host);
        process.map_or(0.0, |it| it.snapshot.process.later.real as f64 - it.snapshot.process.later.monotonic as f64)
    };
    (0..hosts).map(|host| zero(host) - zero(0)).collect()
}

/// Whether the operation ends on no rank before it has begun on every rank.
pub fn is_meeting(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::AllReduce
            | Operation::AllGather
            | Operation::ReduceScatter
            | Operation::AllToAll
            | Operation::Agreement
            | Operation::Barrier
    )
}

/// A call of one rank, in nanoseconds of its host's clock.
struct OnHost {
    host: usize,
    begun: f64,
    ended: f64,
}

/// The calls that all ranks of a group on at least two hosts have made and ended.
fn meetings(processes: &[Process]) -> Vec<Meeting> {
    // For each call, the size of its group, and the ranks that have made it.
    let mut calls: BTreeMap<(u64, u64), (u32, Vec<OnHost>)> = BTreeMap::new();
    for process in processes {
        for channel in &process.snapshot.channels {
            let made = process.snapshot.calls_of(channel).filter(|call| counts_as_meeting(call));
            for (call, ended) in made.filter_map(|call| Some((call, call.ended?))) {
                let (_, ranks) = calls.entry((channel.key, call.in_channel)).or_insert((channel.size, Vec::new()));
                let (begun, ended) = (process.time(call.begun), process.time(ended));
                ranks.push(OnHost { host: process.host, begun, ended });
            }
        }
    }
    let mut meetings = Vec::new();
    for (_, ranks) in calls.values().filter(|(size, ranks)| ranks.len() == *size as usize && *size > 1) {
        let mut hosts: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for OnHost { host, begun, ended } in ranks {
            let (last, first) = hosts.entry(*host).or_insert((f64::NEG_INFINITY, f64::INFINITY));
            *last = last.max(*begun);
            *first = first.min(*ended);
        }
        let hosts: Vec<_> = hosts.into_iter().collect();
        for (at, (first, one)) in hosts.iter().enumerate() {
            meetings.extend(hosts[at + 1..].iter().map(|(second, other)| Meeting {
                hosts: (*first, *second),
                begun: (one.0, other.0),
                ended: (one.1, other.1),
            }));
        }
    }
    meetings
}

/// Whether the call is a meeting that has ended well. A call of no elements moves nothing, so
/// nobody waits in it.
fn counts_as_meeting(call: &RecordedCall) -> bool {
    let moves = !matches!(call.call.operation, Operation::Agreement | Operation::Barrier);
    is_meeting(call.call.operation) && call.state == EntryState::Done && (call.call.count > 0 || !moves)
}

/// What a call moves, in bytes. 0 for a call that moves no elements, and for elements whose size is
/// not known.
fn bytes(call: &RecordedCall, ranks: u32) -> u64 {
    let blocks = match call.call.operation {
        Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => ranks.into(),
        Operation::Gather | Operation::Scatter => ranks.into(),
        Operation::Agreement | Operation::Barrier | Operation::StoreBytes | Operation::MakeComms => 0,
        _ => 1,
    };
    let element = element_size(call.call.dtype.into()).unwrap_or(0) as u64;
    call.call.count.saturating_mul(element).saturating_mul(blocks)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A timeline of three ranks, which have one dimension in common.
    pub fn timeline(calls: impl IntoIterator<Item = TimedCall>) -> Timeline {
        let rank = |rank| RankFacts { rank, pid: 100 + rank, host: "alpha".to_owned(), calls_begun: 1 };
        Timeline {
            ranks: (0..3).map(rank).collect(),
            groups: [(7, Group { name: "mesh/dp".to_owned(), size: 3, is_scope: false })].into(),
            calls: calls.into_iter().collect(),
        }
    }

    /// An all-reduce of a rank, with its times in nanoseconds.
    pub fn call(process: usize, number: u64, bytes: u64, begun: f64, ended: f64) -> TimedCall {
        let (operation, state) = (Operation::AllReduce, EntryState::Done);
        TimedCall { process, group: 7, number, operation, bytes, text: None, state, begun, ended }
    }
}
