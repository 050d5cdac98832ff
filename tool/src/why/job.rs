//! Puts processes together to jobs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::Place;

use super::find::{Found, Node, Started};
use super::process::{Origin, Process, State};

/// The most ranks of a group, and of all jobs together, that are looked at. A recording may say any
/// number, and each rank takes memory.
pub const MOST_RANKS: usize = 1 << 20;

/// A job: processes whose worlds have one key. Where processes are in several worlds, these worlds
/// belong to one job.
pub struct Job {
    /// The job's id; empty where it has none.
    pub id: String,
    /// The ranks, by their numbers. Those that are not seen here are among them.
    pub ranks: Vec<Rank>,
    /// The other recordings of the ranks: the second recording of a process that has two copies of
    /// the library, and those of processes whose rank was started again. They are not judged.
    unjudged: Vec<Process>,
    /// Whether no process of the job is known to run, on any host, and the process of at least one
    /// rank is gone.
    pub is_over: bool,
    /// The nodes of the job, and the hosts that were asked, where they are known.
    pub nodes: Vec<Node>,
    /// The places of the ranks in `ranks`, by the key of a world and the rank in that world.
    index: BTreeMap<(u64, u32), usize>,
}

/// A rank of a job.
pub struct Rank {
    /// The rank in the job's largest world.
    pub number: u32,
    /// What is known of the rank's process.
    pub seen: Seen,
}

/// What is known of a rank's process.
pub enum Seen {
    /// The process has a recording.
    Recorded(Box<Process>),
    /// The launcher has started a process with this number for the rank, on this host or on the
    /// named one. It has no recording, or has not joined the world.
    Started(u32, Option<String>),
    /// No process of the rank's host has the rank, and one should have it.
    Gone,
    /// The rank runs on another host, or nobody knows where.
    Elsewhere,
}

impl Rank {
    /// The rank's process, where it has a recording.
    pub fn process(&self) -> Option<&Process> {
        match &self.seen {
            Seen::Recorded(process) => Some(process),
            _ => None,
        }
    }
}

impl Job {
    /// All recordings of the job. A process may have several.
    pub fn recordings(&self) -> impl Iterator<Item = &Process> {
        self.ranks.iter().filter_map(Rank::process).chain(&self.unjudged)
    }

    /// The place in `ranks` of a rank of a world.
    pub fn rank_of(&self, world: u64, rank: u32) -> Option<usize> {
        self.index.get(&(world, rank)).copied()
    }

    /// The place in `ranks` of the rank with that number.
    pub fn rank_with_number(&self, number: u32) -> Option<usize> {
        self.ranks.binary_search_by_key(&number, |rank| rank.number).ok()
    }

    /// Whether the rank does not go on by itself, so that it waits for nobody. For a job that is
    /// gone, the answer holds for the time when it ran.
    pub fn is_halted(&self, rank: usize) -> bool {
        match &self.ranks[rank].seen {
            Seen::Recorded(process) => process.state.is_halted() && !self.is_over,
            _ => true,
        }
    }

    /// Sets the end of the time that is looked at: where no process of the job is known to run, the
    /// last moment that the recordings have.
    fn end_at_last_moment(&mut self) {
        let recorded = self.ranks.iter_mut().filter_map(|rank| match &mut rank.seen {
            Seen::Recorded(process) => Some(process),
            _ => None,
        });
        let mut processes: Vec<&mut Box<Process>> = recorded.collect();
        if processes.iter().any(|process| process.state.is_alive()) {
            return;
        }
        // Nobody knows whether a process of another host still runs. Its copy is judged as it was.
        self.is_over = processes.iter().any(|process| process.state == State::Gone);
        let last = |process: &Process| {
            let ticks = process.snapshot.calls.iter().flat_map(|call| [Some(call.begun), call.ended]).flatten();
            let real = ticks.filter_map(|ticks| process.timeline.real(ticks));
            real.chain([process.snapshot.process.later.real]).max().unwrap_or(0)
        };
        let last = processes.iter().map(|process| last(process)).max().unwrap_or(0);
        processes.iter_mut().for_each(|process| process.timeline.until = last);
    }
}

/// The jobs of the processes. Processes that have joined no world yet belong to the job in whose
/// place the launcher has started them.
pub fn jobs(found: Found) -> Vec<Job> {
    jobs_within(found, MOST_RANKS)
}

/// The jobs. All of them together have at most `left` ranks that are not seen.
fn jobs_within(found: Found, mut left: usize) -> Vec<Job> {
    let Found { mut processes, started, nodes, .. } = found;
    // Two tools on one machine find the same processes, for example two containers that share the
    // process ids, or two nodes of Slurm that are one machine. A recording of a live process that
    // this tool has read itself counts. The copy of a live process from another tool counts before
    // a file whose process is not seen here.
    let is_sent = |process: &Process| matches!(process.origin, Origin::Sent(..));
    processes.sort_by_key(|process| match (is_sent(process), process.state.is_alive()) {
        (false, true) => 0,
        (true, true) => 1,
        (false, false) => 2,
        (true, false) => 3,
    });
    // One process may have several recordings here that look alike, and all of them are kept.
    let (mut known, mut sent) = (BTreeSet::new(), BTreeSet::new());
    processes.retain(|process| {
        let identity = process.identity();
        match is_sent(process) {
            true => known.insert(identity.clone()) && sent.insert(identity),
            false => {
                known.insert(identity.clone());
                !sent.contains(&identity)
            }
        }
    });
    let mut parts: Vec<Part> = Vec::new();
    for process in processes {
        let groups = process.joining().into_iter().chain(process.communicators());
        let keys = process.worlds().map(|world| world.key).chain(groups.map(|channel| channel.key)).collect();
        let mut part = Part { meeting: process.place.as_ref().map(meeting), keys, processes: vec![process] };
        // Every part with a world of this process becomes one with it.
        let (same, others): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|other| other.is_same(&part));
        parts = others;
        same.into_iter().for_each(|other| part.absorb(other));
        parts.push(part);
    }
    // Jobs with many processes come first, so that a job that only one recording claims does not
    // take their room.
    parts.sort_by_key(|part| Reverse(part.processes.len()));
    let job = |part: Part| {
        let most = left.max(part.processes.len());
        let job = part.job(&started, &nodes, most)?;
        left = left.saturating_sub(job.ranks.len());
        Some(job)
    };
    let mut jobs: Vec<Job> = parts.into_iter().filter_map(job).collect();
    jobs.sort_by(|one, other| one.id.cmp(&other.id));
    jobs
}

/// Where the ranks of a job meet, and how many they are. Two jobs of one host that run at the same
/// time have different ones.
type Meeting = (Option<(String, u16)>, usize);

fn meeting(place: &Place) -> Meeting {
    (place.address.clone(), place.size)
}

/// Processes that belong together.
struct Part {
    keys: BTreeSet<u64>,
    meeting: Option<Meeting>,
    processes: Vec<Process>,
}

impl Part {
    fn is_same(&self, other: &Part) -> bool {
        let is_same_meeting = self.meeting.is_some() && self.meeting == other.meeting;
        self.keys.intersection(&other.keys).next().is_some()
            || is_same_meeting && (self.is_joining() || other.is_joining())
    }

    /// Whether none of the processes has joined a world.
    fn is_joining(&self) -> bool {
        self.processes.iter().all(|process| process.snapshot.worlds.is_empty())
    }

    fn absorb(&mut self, other: Part) {
        self.keys.extend(other.keys);
        self.meeting = self.meeting.take().or(other.meeting);
        self.processes.extend(other.processes);
    }

    /// The job of these processes, with at most that many ranks that are not seen. `None` for a
    /// process that is in no job.
    fn job(self, started: &[Started], nodes: &[Node], most: usize) -> Option<Job> {
        let Part { meeting: met, processes, .. } = self;
        let worlds = || processes.iter().flat_map(Process::worlds);
        let main =
            worlds().max_by_key(|world| (world.size, u8::MAX - world.place)).map(|world| (world.key, world.size));
        let joining = processes.iter().find_map(|process| Some(process.joining()?.size as usize));
        // Without a world and a launcher, the ranks are those of the largest communicator.
        let communicators = processes.iter().flat_map(Process::communicators);
        let largest = communicators.map(|channel| (channel.size, channel.key)).max();
        let size = main.map(|(_, size)| size as usize).or(joining).or(met.as_ref().map(|(_, size)| *size));
        let size = size.or(largest.map(|(size, _)| size as usize))?;
        let size = size.min(most);
        let id = worlds().map(|world| world.job.clone()).find(|id| !id.is_empty()).unwrap_or_default();
        let number = |process: &Process| {
            let world = process.worlds().find(|world| Some(world.key) == main.map(|(key, _)| key));
            let joining = process.joining().map(|channel| channel.rank);
            let known =
                world.map(|world| world.rank).or(joining).or(process.place.as_ref().map(|place| place.rank as u32));
            let mut communicators = process.communicators();
            known.or_else(|| Some(communicators.find(|channel| Some((channel.size, channel.key)) == largest)?.rank))
        };
        let known = processes.iter().filter_map(|process| Some((process.host(), process.place.as_ref()?)));
        let own = host_name();
        let others = started.iter().filter(|started| Some(meeting(&started.place)) == met);
        let others = others.map(|started| (started.host.as_deref().unwrap_or(&own), &started.place));
        let own_ranks = ranks_of_hosts(known.chain(others).filter(|(_, place)| place.size == size));
        let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
        let (mut others, mut unjudged) = (Vec::new(), Vec::new());
        for process in processes {
            match number(&process) {
                Some(rank) => unjudged.extend(put(&mut seen, rank, process)),
                None => others.push(process),
            }
        }
        let started_as = |rank: u32| {
            let is_same = |other: &&Started| Some(meeting(&other.place)) == met && other.place.rank == rank as usize;
            started.iter().filter(is_same).max_by_key(|started| started.pid)
        };
        let address = met.as_ref().and_then(|(address, _)| address.as_ref());
        let is_own = |node: &&Node| node.address.is_none() || node.address.as_ref() == address;
        let nodes: Vec<Node> = nodes.iter().filter(is_own).cloned().collect();
        let of_nodes = |is_heard: bool| -> BTreeSet<u32> {
            let nodes = nodes.iter().filter(|node| node.silence.is_none() == is_heard);
            nodes.flat_map(|node| &node.ranks).copied().collect()
        };
        let (heard, silent) = (of_nodes(true), of_nodes(false));
        let is_own = |rank: u32| own_ranks.iter().any(|ranks| ranks.contains(&(rank as usize)));
        let missing = |rank: u32| match started_as(rank) {
            Some(started) => Seen::Started(started.pid, started.host.clone()),
            None if heard.contains(&rank) => Seen::Gone,
            // A silent node has said which ranks are its own. The places of others allow only a
            // guess.
            None if silent.contains(&rank) => Seen::Elsewhere,
            None if is_own(rank) => Seen::Gone,
            None => Seen::Elsewhere,
        };
        for rank in 0..size as u32 {
            seen.entry(rank).or_insert_with(|| missing(rank));
        }
        let mut ranks: Vec<Rank> = seen.into_iter().map(|(number, seen)| Rank { number, seen }).collect();
        // A process of a smaller world that is not in the main one gets a number of its own.
        let further = (ranks.len() as u32..).zip(others);
        ranks.extend(further.map(|(number, process)| Rank { number, seen: Seen::Recorded(Box::new(process)) }));
        let mut index = BTreeMap::new();
        for (at, rank) in ranks.iter().enumerate() {
            let worlds = rank.process().into_iter().flat_map(|process| &process.snapshot.worlds);
            index.extend(worlds.map(|world| ((world.key, world.rank), at)));
            index.extend(main.iter().map(|(key, _)| ((*key, rank.number), at)));
        }
        let mut job = Job { id, ranks, unjudged, is_over: false, nodes, index };
        job.end_at_last_moment();
        Some(job)
    }
}

/// Puts a process in its rank's place. Where the rank was started again, the process that runs is
/// the rank's, or the one that began last. Returns the process that has no place.
fn put(seen: &mut BTreeMap<u32, Seen>, rank: u32, process: Process) -> Option<Process> {
    let is_joined = |process: &Process| !process.snapshot.worlds.is_empty();
    let order =
        |process: &Process| (is_joined(process), process.state != State::Gone, process.snapshot.process.began.real);
    match seen.get(&rank) {
        Some(Seen::Recorded(other)) if order(other) >= order(&process) => Some(process),
        _ => match seen.insert(rank, Seen::Recorded(Box::new(process))) {
            Some(Seen::Recorded(other)) => Some(*other),
            _ => None,
        },
    }
}

/// The ranks that certainly run on one of the hosts of these places, or have run there. Each place
/// is that of a process on the named host.
///
/// Most launchers give the ranks of a host consecutive numbers. Others deal the ranks to the hosts
/// in turn (`mpirun --map-by node`, `srun --distribution=cyclic`). There the places of one host
/// contradict each other, and nothing is known of further ranks. So one place alone says nothing,
/// unless its host has all ranks.
fn ranks_of_hosts<'a>(places: impl Iterator<Item = (&'a str, &'a Place)>) -> Vec<Range<usize>> {
    let mut hosts: BTreeMap<&str, Vec<&Place>> = BTreeMap::new();
    places.for_each(|(host, place)| hosts.entry(host).or_default().push(place));
    let block = |place: &&Place| {
        let (local, size) = (place.local_rank?, place.local_size?);
        let first = if size == place.size { 0 } else { place.rank.checked_sub(local)? };
        Some(first..first.saturating_add(size))
    };
    let mut certain = Vec::new();
    for places in hosts.values() {
        let mut blocks: BTreeMap<(usize, usize), BTreeSet<usize>> = BTreeMap::new();
        let mut ranks: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut has_all = false;
        for place in places {
            let Some(block) = block(place) else { continue };
            blocks.entry((block.start, block.end)).or_default().insert(place.rank);
            ranks.entry(place.local_rank.unwrap_or(0)).or_default().insert(place.rank);
            has_all |= place.local_size == Some(place.size);
        }
        // Only where several nodes share one machine, two ranks of a host have one local rank.
        if blocks.len() > 1 && ranks.values().all(|ranks| ranks.len() == 1) {
            // A launcher deals the ranks in one way for all hosts.
            return Vec::new();
        }
        let agreed = blocks.iter().filter(|(_, ranks)| has_all || ranks.len() > 1);
        certain.extend(agreed.map(|((start, end), _)| *start..*end));
    }
    certain
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
