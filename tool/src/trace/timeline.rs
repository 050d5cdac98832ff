//! The calls of all ranks of a job on one scale of time.

use std::collections::BTreeMap;

use devicemesh::ccl::element_size;
use devicemesh::rendezvous::host_name;
use recording::{EntryState, Operation, RecordedCall, RecordedChannel, Snapshot};

use super::clocks::{Bounds, OnHost, offsets};
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
    /// How many calls the process has begun, without the recorded calls of other jobs. Fewer are in
    /// the recording where it has made many.
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
    /// The number of the call in the group. Collectives and other calls are counted apart.
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
    /// The job.
    job: &'a str,
    /// The rank in the world.
    rank: u32,
    /// The host, as an index.
    host: usize,
    /// The nanoseconds of a tick.
    tick: f64,
}

impl<'a> Process<'a> {
    /// The groups whose calls belong to the job: those of its worlds, and those of no world. Where
    /// the recording has lost the world of a group, the group belongs to the job if all worlds that
    /// are recorded do.
    fn channels(&self) -> impl Iterator<Item = &'a RecordedChannel> {
        self.snapshot.channels.iter().filter(|channel| self.is_own(channel))
    }

    fn is_own(&self, channel: &RecordedChannel) -> bool {
        match self.snapshot.world_of(channel) {
            Some(world) => world.job == self.job,
            None => channel.world.is_none() || self.snapshot.worlds.iter().all(|world| world.job == self.job),
        }
    }

    /// How many calls of other jobs are in the recording.
    fn calls_of_others(&self) -> usize {
        let others = self.snapshot.channels.iter().filter(|channel| !self.is_own(channel));
        others.map(|channel| self.snapshot.calls_of(channel).count()).sum()
    }

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
            processes.push(Process { snapshot, job, rank, host, tick });
        }
        processes.sort_by_key(|process| (process.rank, process.snapshot.process.began.real));
        let real = real_differences(&processes, hosts.len());
        let offsets = offsets(&real, bounds(&processes));
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
                calls_begun: facts.calls_begun.saturating_sub(process.calls_of_others() as u64),
            });
            let offset = offsets[process.host];
            let last = process.snapshot.calls.iter().map(|call| call.ended.unwrap_or(call.begun)).max().unwrap_or(0);
            let last = process.time(last.max(facts.later.ticks));
            for channel in process.channels() {
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

/// The job of a process and its rank. The job is that of the world joined last, among those that
/// the process has not left, or among all where it has left all. The rank is that in the job's
/// largest world, and in the last one of several. A process without a world, of which NCCL alone
/// has told, is in the job [`NO_WORLD`] and has its rank in its largest communicator. `None` for a
/// process without groups.
fn job_and_rank(snapshot: &Snapshot) -> Option<(String, u32)> {
    let last = snapshot.worlds.iter().max_by_key(|world| (!world.has_ended, world.number));
    let largest = snapshot.channels.iter().max_by_key(|channel| channel.size);
    let of_world = last.map(|last| {
        let of_job = snapshot.worlds.iter().filter(|world| world.job == last.job);
        let main = of_job.max_by_key(|world| (!world.has_ended, world.size, world.number)).unwrap_or(last);
        (last.job.clone(), main.rank)
    });
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

/// The bounds on the clocks of the hosts. They come from the calls that all ranks of a group on
/// several hosts have made and ended.
fn bounds(processes: &[Process]) -> Bounds {
    // For each call, the size of its group, and the ranks that have made it.
    let mut calls: BTreeMap<(u64, u64), (u32, Vec<OnHost>)> = BTreeMap::new();
    for process in processes {
        for channel in process.channels() {
            let made = process.snapshot.calls_of(channel).filter(|call| counts_as_meeting(call));
            for (call, ended) in made.filter_map(|call| Some((call, call.ended?))) {
                let (_, ranks) = calls.entry((channel.key, call.in_channel)).or_insert((channel.size, Vec::new()));
                let (begun, ended) = (process.time(call.begun), process.time(ended));
                ranks.push(OnHost { host: process.host, begun, ended });
            }
        }
    }
    let mut bounds = Bounds::default();
    for (_, ranks) in calls.values().filter(|(size, ranks)| ranks.len() == *size as usize && *size > 1) {
        let mut hosts: BTreeMap<usize, OnHost> = BTreeMap::new();
        for rank in ranks {
            let all = hosts.entry(rank.host).or_insert(*rank);
            (all.begun, all.ended) = (all.begun.max(rank.begun), all.ended.min(rank.ended));
        }
        bounds.meet(&hosts.into_values().collect::<Vec<_>>());
    }
    bounds
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
    use std::sync::atomic::AtomicU64;

    use recording::{Call, ChannelFacts, NO_PEER, Recorder, WorldFacts, layout};

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

    /// A process that has joined the job A and left it, has joined B, and then C twice.
    #[test]
    fn a_process_is_in_the_job_that_it_has_joined_last_with_the_calls_of_this_job() {
        let words = Vec::leak((0..layout::WORDS).map(|_| AtomicU64::new(0)).collect());
        let recorder = Recorder::new(words, 100, &host_name(), "0.2.0");
        let join = |key: usize, job, size| {
            let facts = WorldFacts { key: key as u64, rank: key, size, job, store: "", launcher: "torchrun" };
            recorder.open_world(&facts).unwrap()
        };
        let calls = |world, key, times| {
            let facts =
                ChannelFacts { kind: 0, key, world, rank: 0, members: &[], size: 1, name: &format!("group{key}") };
            let channel = recorder.open_channel(&facts);
            let (operation, peer) = (Operation::AllReduce, NO_PEER);
            let call = Call { operation, dtype: 7, reduction: 0, count: 4, peer, stream: 0 };
            (0..times).for_each(|_| recorder.end(recorder.begin(channel, &call), EntryState::Done));
        };
        let first = join(1, "A", 8);
        calls(Some(first), 11, 3);
        let second = join(2, "B", 8);
        calls(Some(second), 12, 4);
        recorder.close_world(first);
        let third = join(3, "C", 8);
        calls(Some(third), 13, 5);
        // The rank is that in the larger world, and the calls of both worlds belong to the job.
        let part = join(0, "C", 4);
        calls(Some(part), 15, 2);
        calls(None, 14, 1);

        let snapshots = [recorder.snapshot().unwrap()];
        assert_eq!(jobs(&snapshots), [("C".to_owned(), 1)].into());
        let timeline = Timeline::new(&snapshots, "C").unwrap();
        let groups: Vec<&str> = timeline.groups.values().map(|group| &*group.name).collect();
        assert_eq!((groups, timeline.calls.len()), (vec!["group13", "group14", "group15"], 8));
        assert_eq!((timeline.ranks[0].rank, timeline.ranks[0].calls_begun), (3, 8));

        for world in [second, third, part] {
            recorder.close_world(world);
        }
        assert_eq!(jobs(&[recorder.snapshot().unwrap()]), [("C".to_owned(), 1)].into());
        // A job that is joined again and again loses the worlds of its first calls, but not the
        // calls.
        (1..=8).for_each(|key| recorder.close_world(join(key, "C", 8)));
        let timeline = Timeline::new(&[recorder.snapshot().unwrap()], "C").unwrap();
        assert_eq!(timeline.calls.len(), 8 + 3 + 4, "the worlds of the other jobs are lost, too");
    }
}
