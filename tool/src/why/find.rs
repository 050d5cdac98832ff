//! Finds recordings: those of this user's processes on this host, and those in files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::{Place, detect};
use recording::Snapshot;
use recording::clock::Moment;
use recording::place::recordings_of;

use super::exit_code::NOT_MADE;
use super::process::{Origin, Process, State, Timeline};
use crate::failure::Failure;
use crate::proc::{self, Stat};
use crate::ps::jobs::program;
use crate::recordings::{files, length_of_tick, open};

/// How many times the tool looks whether a process computes.
const LOOKS: u32 = 4;
/// The time between two looks.
const BETWEEN: Duration = Duration::from_millis(10);
/// The list of processes is read at most this many times.
const MOST_LISTS: usize = 8;

/// What was found.
#[derive(Default)]
pub struct Found {
    /// The processes with recordings.
    pub processes: Vec<Process>,
    /// This user's processes that a launcher has started. It has those with recordings, too.
    pub started: Vec<Started>,
    /// The nodes of jobs, where they are known.
    pub nodes: Vec<Node>,
    /// What could not be read, with the reason: one line each.
    pub unreadable: Vec<String>,
}

/// A process that a launcher has started.
pub struct Started {
    /// The process number.
    pub pid: u32,
    /// The name of its host. `None` for this host.
    pub host: Option<String>,
    /// Its place in the job.
    pub place: Place,
}

/// A node of a job, or a host that was asked.
#[derive(Clone)]
pub struct Node {
    /// The node in words: "node 1 (beta)".
    pub name: String,
    /// Where the ranks of the job meet. `None` where the host may have ranks of every job.
    pub address: Option<(String, u16)>,
    /// The ranks of the node. It is empty where nobody knows them.
    pub ranks: Vec<u32>,
    /// Why the processes of the node are not known. `None` where they are.
    pub silence: Option<String>,
}

/// The recordings of this user's processes on this host.
pub fn live() -> Found {
    let mut found = Found::default();
    let mut folders = BTreeSet::new();
    for (pid, Candidate { place, files }) in candidates() {
        // A process with two copies of the library has two recordings.
        for (path, file) in files {
            match read(&file) {
                Ok((snapshot, bytes, now)) if innermost(pid) == Some(snapshot.process.pid) => {
                    let (timeline, state) = (Timeline::new(&snapshot, Some(now), now.real, None), state(pid));
                    let (place, program, origin) = (place.clone(), program_of(pid), Origin::Here);
                    found.processes.push(Process { pid, state, snapshot, bytes, timeline, place, program, origin });
                    folders.extend(path.and_then(|path| Some(path.parent()?.to_owned())));
                }
                // A forked child may have its parent's descriptors.
                Ok(_) => {}
                Err(error) => found.unreadable.push(format!("the recording of process {pid}: {error}")),
            }
        }
        found.started.extend(place.map(|place| Started { pid, host: None, place }));
    }
    add_dead(&mut found, &folders);
    look_again(&mut found.processes);
    found
}

/// Looks again at the processes of this host that compute.
fn look_again(processes: &mut [Process]) {
    let here = processes.iter_mut().filter(|process| process.origin == Origin::Here);
    look_again_at(here.map(|process| (process.pid, &mut process.state)).collect());
}

/// Looks again at the processes that compute, given by their numbers and states. A process that
/// sleeps wakes for a moment, for example for a timer, or after another `devicemesh why` has read
/// its stack. So a process computes only if it does so at each look.
fn look_again_at(mut processes: Vec<(u32, &mut State)>) {
    for _ in 1..LOOKS {
        processes.retain(|(_, state)| **state == State::Computes);
        if processes.is_empty() {
            break;
        }
        sleep(BETWEEN);
        // Only a sleep shows that the process was awake for a moment. It may be stopped for a
        // moment by another tool, or may have ended since its recording was read.
        for (_, known) in processes.iter_mut().filter(|(pid, _)| state(*pid) == State::Sleeps) {
            **known = State::Sleeps;
        }
    }
}

/// A process that may be a rank.
struct Candidate {
    /// The place in the job that the launcher gave.
    place: Option<Place>,
    /// Its recordings, and where they stand if they have names.
    files: Vec<(Option<PathBuf>, File)>,
}

/// This user's processes. The recordings are opened here and read afterwards, all at one time,
/// because the search takes long on a busy host. For the same reason the list of processes is read
/// again until it has no new ranks: a rank that starts while the others are looked at has not died.
fn candidates() -> BTreeMap<u32, Candidate> {
    let mut found: BTreeMap<u32, Candidate> = BTreeMap::new();
    for _ in 0..MOST_LISTS {
        let mut is_new = false;
        for pid in proc::own_pids().filter(|pid| *pid != std::process::id()).collect::<Vec<u32>>() {
            let is_done = |known: &Candidate| known.place.is_none() || !known.files.is_empty();
            if found.get(&pid).is_some_and(is_done) {
                continue;
            }
            let candidate = Candidate { place: place(pid), files: recordings_of(pid).collect() };
            let had_files = !candidate.files.is_empty();
            let is_rank = candidate.place.is_some() || had_files;
            is_new |= found.insert(pid, candidate).map_or(is_rank, |_| had_files);
        }
        if !is_new {
            break;
        }
    }
    found
}

/// Adds the processes of the same worlds that have ended, where they have left files.
fn add_dead(found: &mut Found, folders: &BTreeSet<PathBuf>) {
    let keys: BTreeSet<u64> =
        found.processes.iter().flat_map(|process| &process.snapshot.worlds).map(|world| world.key).collect();
    let living: BTreeSet<u32> = found.processes.iter().map(|process| process.snapshot.process.pid).collect();
    for folder in folders {
        let left = read_files(std::slice::from_ref(folder)).unwrap_or_default();
        let is_of_same = |process: &Process| process.snapshot.worlds.iter().any(|world| keys.contains(&world.key));
        let is_new =
            |process: &Process| process.state == State::Unknown || !living.contains(&process.snapshot.process.pid);
        found.processes.extend(left.processes.into_iter().filter(|process| is_of_same(process) && is_new(process)));
    }
}

/// The recordings in files, and in the files of folders.
pub fn of_files(paths: &[PathBuf]) -> Result<Found, Failure> {
    let mut found = read_files(paths)?;
    look_again(&mut found.processes);
    Ok(found)
}

fn read_files(paths: &[PathBuf]) -> Result<Found, Failure> {
    let (host, usual, running) = (host_name(), length_of_tick(), Running::now());
    let mut found = Found::default();
    for path in files(paths).map_err(|why| Failure::new(NOT_MADE, why))? {
        match open(&path).and_then(|file| read(&file)) {
            Ok((snapshot, bytes, now)) => {
                if snapshot.process.copied.is_some() {
                    found.processes.extend(Process::of_copy(snapshot, bytes, Origin::File));
                    continue;
                }
                let is_here = snapshot.process.host == host;
                let (pid, state) = match is_here {
                    true => running.process_of_file(&path, &snapshot),
                    false => (snapshot.process.pid, State::Unknown),
                };
                let moment = (is_here && state != State::Gone).then_some(now);
                let timeline = Timeline::new(&snapshot, moment, now.real, usual.filter(|_| is_here));
                let origin = if is_here { Origin::Here } else { Origin::File };
                let program = if state.is_alive() { program_of(pid) } else { String::new() };
                found.processes.push(Process { pid, state, snapshot, bytes, timeline, place: None, program, origin });
            }
            Err(error) => found.unreadable.push(format!("{}: {error}", path.display())),
        }
    }
    Ok(found)
}

/// Whether there is a recording with that name that is no copy.
pub fn is_original(path: &Path) -> bool {
    open(path).and_then(|file| read(&file)).is_ok_and(|(snapshot, ..)| snapshot.process.copied.is_none())
}

/// Reads a recording. Returns its memory, too, and the moment at which it was read.
fn read(file: &File) -> std::io::Result<(Snapshot, Vec<u8>, Moment)> {
    let (snapshot, bytes) = Snapshot::with_memory(file)?;
    let now = snapshot.process.clock.moment();
    Ok((snapshot, bytes, now))
}

/// The number of a process in its own PID namespace, which is the number in its recording.
fn innermost(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

/// The name of the program of a process of this host. It is empty where it cannot be read.
fn program_of(pid: u32) -> String {
    let command = proc::words(pid, "cmdline").unwrap_or_default();
    let command: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    program(&command)
}

/// The place that the launcher gave a process.
pub fn place(pid: u32) -> Option<Place> {
    let environment = proc::words(pid, "environ")?;
    let environment: Vec<String> = environment.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let variables: BTreeMap<&str, &str> = environment.iter().filter_map(|entry| entry.split_once('=')).collect();
    let get = |name: &str| variables.get(name).filter(|value| !value.is_empty()).map(|value| (*value).to_owned());
    detect(&get).ok().filter(|place| place.launcher != "alone")
}

/// What a process of this host does.
fn state(pid: u32) -> State {
    match proc::state(pid) {
        None | Some('Z' | 'X') => State::Gone,
        Some('T') => State::Stopped,
        Some('t') => State::Traced,
        Some('D') => State::Blocked,
        Some(_) if proc::threads(pid).any(|thread| proc::state_of_thread(pid, thread) == Some('R')) => State::Computes,
        Some(_) => State::Sleeps,
    }
}

/// The processes of this user by their numbers in their own PID namespaces and their starts, as
/// the names of files have them.
struct Running(BTreeMap<(u32, u64), u32>);

impl Running {
    fn now() -> Running {
        let entry = |pid| Some(((innermost(pid)?, Stat::read(pid)?.started), pid));
        Running(proc::own_pids().filter_map(entry).collect())
    }

    /// The process that writes or wrote a file, and its state. The file's name is
    /// HOST-PID-START.dmrec, or HOST-PID-START-COPY.dmrec.
    fn process_of_file(&self, path: &Path, snapshot: &Snapshot) -> (u32, State) {
        let recorded = snapshot.process.pid;
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let parts = name.split('-').filter_map(|part| part.parse().ok());
        match parts.filter_map(|started| self.0.get(&(recorded, started))).next() {
            Some(pid) => (*pid, state(*pid)),
            None => (recorded, State::Gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_process_that_was_awake_for_a_moment_sleeps() {
        let (mut reads, mut spins) = (shell("read line"), shell("while :; do :; done"));
        // The shells begin, and one of them then waits for its input.
        while state(reads.id()) != State::Sleeps || state(spins.id()) != State::Computes {
            sleep(Duration::from_millis(1));
        }
        let (mut one, mut other) = (State::Computes, State::Computes);
        look_again_at(vec![(reads.id(), &mut one), (spins.id(), &mut other)]);
        for child in [&mut reads, &mut spins] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((one, other), (State::Sleeps, State::Computes));
    }
}
