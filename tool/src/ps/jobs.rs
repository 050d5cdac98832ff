//! Puts processes together: those of a rank, and the ranks of a job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::Parser;

use super::process::Process;
use crate::run;

/// The beginning of the id that this tool makes for a job without --rdzv-id.
pub const MADE_ID: &str = "devicemesh-";
/// The id of a job under torchrun that has no name.
pub const NO_ID: &str = "none";

/// The command line of a `devicemesh run`.
#[derive(Parser)]
struct RunLine {
    #[command(flatten)]
    options: run::Options,
}

/// The part of a job that is on this host.
pub struct Job<'a> {
    pub name: String,
    /// The process that started the ranks. `None` where it has ended or belongs to another user.
    pub starter: Option<u32>,
    pub launcher: &'static str,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// When it began here, in clock ticks since the host's start.
    pub started: u64,
    pub state: State,
    pub ranks: Vec<Rank<'a>>,
    /// The number of ranks of the whole job. `None` before the nodes have met.
    pub world_size: Option<usize>,
    /// How many of them are spares.
    pub spares: usize,
    /// How often the job was started again, or ranks of this host.
    pub restarts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    Running,
    /// All processes of the ranks are stopped, or no rank runs here and the tool is stopped.
    Stopped,
    /// Some ranks of this host have ended, for good or until they are started again.
    Ending,
    /// No rank runs here. The tool waits for other nodes, or for the time of a restart.
    Waiting,
    /// The tool that started the ranks has ended.
    LeftOver,
}

/// A rank, with the processes that it consists of: the one that was started first, and its
/// descendants.
pub struct Rank<'a> {
    pub rank: usize,
    pub processes: Vec<&'a Process>,
}

impl Job<'_> {
    /// The processes of all ranks.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.ranks.iter().flat_map(Rank::pids)
    }
}

impl Rank<'_> {
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.processes.iter().map(|process| process.pid)
    }

    /// How often it was started again.
    pub fn restarts(&self) -> u32 {
        self.processes.iter().map(|process| process.restarts).max().unwrap_or(0)
    }

    pub fn is_stopped(&self) -> bool {
        self.processes.iter().all(|process| process.is_stopped)
    }
}

/// The key of a job: two jobs have different keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// The tool that started the ranks.
    Tool(u32),
    /// Another launcher's process, and the job as the ranks' environment describes it.
    Other { parent: u32, size: usize, address: Option<(String, u16)>, id: Option<String> },
}

/// The jobs, in the order in which they began. Ranks that other launchers have started belong to a
/// job here if one of them uses the library.
pub fn jobs<'a>(all: &'a BTreeMap<u32, Process>, uses_library: &dyn Fn(&Process) -> bool) -> Vec<Job<'a>> {
    let mut found: BTreeMap<Key, BTreeMap<usize, Vec<&Process>>> = BTreeMap::new();
    let tools: BTreeMap<u32, u32> =
        all.values().filter(|process| process.is_tool()).map(|tool| (tool.pid, outermost(all, tool))).collect();
    for root in tools.values() {
        found.entry(Key::Tool(*root)).or_default();
    }
    for process in all.values().filter(|process| !tools.contains_key(&process.pid)) {
        let Some(place) = &process.place else { continue };
        let first = chain(all, process).take_while(|other| other.is_of_same_rank(process)).last();
        let parent = first.unwrap_or(process).parent;
        let key = match chain(all, process).find_map(|other| tools.get(&other.pid)) {
            Some(tool) => Key::Tool(*tool),
            None => Key::Other { parent, size: place.size, address: place.address.clone(), id: process.id.clone() },
        };
        found.entry(key).or_default().entry(place.rank).or_default().push(process);
    }
    let is_ours = |ranks: &BTreeMap<usize, Vec<&Process>>| {
        let mut processes = ranks.values().flatten();
        processes.any(|process| is_of_run(process) || uses_library(process))
    };
    let jobs = found.into_iter().filter(|(key, ranks)| matches!(key, Key::Tool(_)) || is_ours(ranks));
    let mut jobs: Vec<Job> = jobs.filter_map(|(key, ranks)| job(all, &key, ranks)).collect();
    jobs.sort_by_key(|job| (job.started, job.starter));
    jobs
}

/// The process and its ancestors, from the process upwards.
fn chain<'a>(all: &'a BTreeMap<u32, Process>, process: &'a Process) -> impl Iterator<Item = &'a Process> {
    // The kernel uses process numbers again, and the processes were read at different times. So
    // the list of parents could have a circle.
    let mut seen = BTreeSet::new();
    std::iter::successors(Some(process), |process| all.get(&process.parent))
        .take_while(move |process| seen.insert(process.pid))
}

/// The first of the tools of one job, because a tool may start another process of itself. A tool
/// that a rank of another job has started has a job of its own.
fn outermost(all: &BTreeMap<u32, Process>, tool: &Process) -> u32 {
    let same = |other: &&Process| (other.is_tool() || other.is_keeper()) && other.is_of_same_rank(tool);
    let tools = chain(all, tool).take_while(same).filter(|other| other.is_tool());
    tools.last().map_or(tool.pid, |first| first.pid)
}

/// Whether a `devicemesh run` has started this process.
fn is_of_run(process: &Process) -> bool {
    process.place.as_ref().is_some_and(|place| place.launcher == "devicemesh run")
}

fn job<'a>(all: &'a BTreeMap<u32, Process>, key: &Key, ranks: BTreeMap<usize, Vec<&'a Process>>) -> Option<Job<'a>> {
    let mut ranks: Vec<Rank> = ranks.into_iter().map(|(rank, processes)| Rank { rank, processes }).collect();
    ranks.iter_mut().for_each(|rank| rank.processes.sort_by_key(|process| (process.started, process.pid)));
    let leader = ranks.first().and_then(|rank| rank.processes.first()).copied();
    let place = leader.and_then(|leader| leader.place.as_ref());
    let (tool, starter) = match key {
        Key::Tool(pid) => (all.get(pid), Some(*pid)),
        Key::Other { parent, .. } => (None, all.contains_key(parent).then_some(*parent)),
    };
    let line = tool.and_then(|tool| RunLine::try_parse_from(&tool.command[1..]).ok());
    let command: Vec<String> = match (leader, &line) {
        (Some(leader), _) => leader.command.clone(),
        (None, Some(line)) => line.options.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        // A tool of another version has options that this one does not know.
        (None, None) => tool?.command.splitn(2, |word| word == "--").last()?.to_vec(),
    };
    let id = leader.and_then(|leader| leader.id.clone()).or_else(|| line.as_ref()?.options.meeting.rdzv_id.clone());
    let id = id.filter(|id| !id.starts_with(MADE_ID) && id != NO_ID);
    let is_left = tool.is_none() && leader.is_some_and(is_of_run);
    let state = match place {
        None if tool.is_some_and(|tool| tool.is_stopped) => State::Stopped,
        None => State::Waiting,
        Some(_) if is_left => State::LeftOver,
        Some(_) if ranks.iter().all(Rank::is_stopped) => State::Stopped,
        Some(place) if place.local_size.is_some_and(|size| ranks.len() < size) => State::Ending,
        Some(_) => State::Running,
    };
    let spares = place.zip(leader).and_then(|(place, leader)| Some(place.size.saturating_sub(leader.mesh_size?)));
    let is_by_rank = line.is_some_and(|line| line.options.restart.restart == Some(run::Unit::Rank));
    let restarts: Vec<u32> = ranks.iter().map(Rank::restarts).collect();
    Some(Job {
        name: id.unwrap_or_else(|| program(&command)),
        starter,
        launcher: if tool.is_some() || is_left { "devicemesh run" } else { place?.launcher },
        started: tool.or(leader)?.started,
        world_size: place.map(|place| place.size),
        spares: spares.unwrap_or(0),
        restarts: if is_by_rank { restarts.iter().sum() } else { restarts.iter().copied().max().unwrap_or(0) },
        command,
        state,
        ranks,
    })
}

/// The name of a program. Where an interpreter runs a script it is the script's name.
pub fn program(command: &[String]) -> String {
    let base =
        |word: &str| Path::new(word).file_name().map_or(word.to_owned(), |name| name.to_string_lossy().into_owned());
    let own = command.first().map_or(String::new(), |word| base(word));
    let is_interpreter =
        ["python", "bash", "sh", "dash", "perl", "ruby", "julia"].iter().any(|name| own.starts_with(name));
    let mut words = command.iter().skip(1);
    match words.next() {
        // This tool has the name of its subcommand, for example "check".
        Some(subcommand) if own == "devicemesh" && !subcommand.starts_with('-') => subcommand.clone(),
        Some(option) if is_interpreter && option == "-m" => words.next().map_or(own, |module| module.clone()),
        Some(option) if is_interpreter && !option.starts_with('-') => base(option),
        Some(option) if is_interpreter && option == "-u" => words.next().map_or(own, |script| base(script)),
        _ => own,
    }
}

#[cfg(test)]
#[path = "jobs_tests.rs"]
mod tests;
