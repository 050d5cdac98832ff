//! Finds recordings: those of processes on this host, and those in files. The processes are those
//! of this user, and for root those of all users.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::launcher::{Place, detect};
use recording::Snapshot;
use recording::clock::Moment;
use recording::place::{is_recording, try_recordings_of};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::exit_code::NOT_MADE;
use super::process::{Origin, Process, State, Timeline};
use crate::failure::{Failure, advice_on_limits};
use crate::proc::{self, Stat};
use crate::ps::jobs::program;
use crate::recordings::{files, length_of_tick, open};
use crate::run::environment::MESH_SIZE;
use crate::run::open_files::make_most_room;
use crate::words::listed;

/// How many times the tool looks whether a process computes.
const LOOKS: u32 = 4;
/// The time between two looks.
const BETWEEN: Duration = Duration::from_millis(10);
/// The list of processes is read at most this many times.
const MOST_LISTS: usize = 8;
/// The most processes that a line about what cannot be read names.
const MOST_NAMED: usize = 8;
/// The most files that are read in all folders in which processes keep their recordings. Each file
/// takes memory, and any user's process may name a folder.
const MOST_FILES: usize = 4096;

/// What was found.
#[derive(Default)]
pub struct Found {
    /// The processes with recordings.
    pub processes: Vec<Process>,
    /// The processes that a launcher has started. It has those with recordings, too.
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

/// The recordings of the processes on this host, and of ended ones of their worlds.
pub fn live() -> Found {
    // The recordings of all processes are open at the same time.
    make_most_room();
    let mut found = Found::default();
    let mut folders = BTreeSet::new();
    let mut unreadable: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for (pid, Candidate { place, files }) in candidates() {
        // A process with two copies of the library has two recordings.
        for file in files {
            let recording = file.and_then(|(path, file)| Ok((path, read(&file)?)));
            match recording {
                Ok((path, (snapshot, bytes, now))) if innermost(pid) == Some(snapshot.process.pid) => {
                    let (timeline, state) = (Timeline::new(&snapshot, Some(now), now.real, None), state(pid));
                    let (place, program, origin) = (place.clone(), program_of(pid), Origin::Here);
                    found.processes.push(Process { pid, state, snapshot, bytes, timeline, place, program, origin });
                    folders.extend(path.and_then(|path| Some(path.parent()?.to_owned())));
                }
                // A forked child may have its parent's descriptors.
                Ok(_) => {}
                Err(error) => {
                    unreadable.entry(reason(&error)).or_default().insert(pid);
                }
            }
        }
        found.started.extend(place.map(|place| Started { pid, host: None, place }));
    }
    let line = |(reason, pids): (String, BTreeSet<u32>)| match pids.len() {
        1 => format!("the recording of process {}: {reason}", listed(pids, 1)),
        _ => format!("the recordings of processes {}: {reason}", listed(pids, MOST_NAMED)),
    };
    found.unreadable.extend(unreadable.into_iter().map(line));
    add_dead(&mut found, &folders);
    look_again(&mut found.processes);
    found
}

/// The recordings that this host alone knows: those of its processes, without the files of other
/// hosts that its processes have in their folders.
pub fn here() -> Found {
    let mut found = live();
    found.processes.retain(|process| process.origin == Origin::Here);
    found
}

/// Why a recording cannot be opened or read.
fn reason(error: &io::Error) -> String {
    let is_limit = Errno::from_io_error(error) == Some(Errno::MFILE);
    format!("{error}{}", if is_limit { advice_on_limits(error) } else { String::new() })
}

/// Looks again at the processes of this host that compute, or that a debugger has stopped.
fn look_again(processes: &mut [Process]) {
    let here = processes.iter_mut().filter(|process| process.origin == Origin::Here);
    look_again_at(here.map(|process| (process.pid, &mut process.state)).collect());
}

/// Looks again at the processes that compute or are traced, given by their numbers and states. A
/// process that sleeps wakes for a moment, for example for a timer, or after another
/// `devicemesh why` has read its stack. That reader also stops it for a moment as a debugger does.
/// So a process computes, or is traced, only if it does so at each look.
fn look_again_at(mut processes: Vec<(u32, &mut State)>) {
    for _ in 1..LOOKS {
        processes.retain(|(_, state)| matches!(**state, State::Computes | State::Traced));
        if processes.is_empty() {
            break;
        }
        sleep(BETWEEN);
        // Only a sleep shows that the process was awake for a moment. It may be stopped for a
        // moment by another tool, or may have ended since its recording was read.
        for (pid, known) in &mut processes {
            match (**known, state(*pid)) {
                (_, State::Sleeps) => **known = State::Sleeps,
                (State::Traced, now) if now != State::Gone => **known = now,
                _ => {}
            }
        }
    }
}

/// A process that may be a rank.
struct Candidate {
    /// The place in the job that the launcher gave.
    place: Option<Place>,
    /// Its recordings, and where they stand if they have names; or why one cannot be opened.
    files: Vec<io::Result<(Option<PathBuf>, File)>>,
}

/// The processes that may be ranks. The recordings are opened here and read afterwards, all at one
/// time, because the search takes long on a busy host. For the same reason the list of processes is
/// read again until it has no new ranks: a rank that starts while the others are looked at has not
/// died.
fn candidates() -> BTreeMap<u32, Candidate> {
    let mut found: BTreeMap<u32, Candidate> = BTreeMap::new();
    for _ in 0..MOST_LISTS {
        let mut is_new = false;
        for pid in proc::readable_pids().filter(|pid| *pid != std::process::id()).collect::<Vec<u32>>() {
            let is_done = |known: &Candidate| known.place.is_none() || !known.files.is_empty();
            if found.get(&pid).is_some_and(is_done) {
                continue;
            }
            let candidate = Candidate { place: place(pid), files: try_recordings_of(pid).collect() };
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
    let is_of_same = |process: &Process| process.snapshot.worlds.iter().any(|world| keys.contains(&world.key));
    let is_new = |process: &Process| process.state == State::Unknown || !living.contains(&process.snapshot.process.pid);
    let mut files = Vec::new();
    for (folder, most) in shares(folders, MOST_FILES) {
        let (newest, left_out) = newest(folder, most);
        files.extend(newest);
        if left_out > 0 {
            let folder = folder.display();
            found.unreadable.push(format!(
                "{left_out} recordings in {folder} are left out, because only the newest {most} are read; `devicemesh why {folder}/` reads all"
            ));
        }
    }
    if !files.is_empty() {
        let left = processes_of(files).filter_map(Result::ok);
        found.processes.extend(left.filter(|process| is_of_same(process) && is_new(process)));
    }
}

/// How many recordings of each folder may be read, where at most `most` of all folders may be.
/// Folders with few recordings are read whole. Folders with many share what is left.
fn shares(folders: &BTreeSet<PathBuf>, most: usize) -> Vec<(&Path, usize)> {
    let mut counted: Vec<(usize, &Path)> =
        folders.iter().map(|folder| (recordings_in(folder).count(), &**folder)).collect();
    counted.sort_unstable();
    let (mut room, mut left) = (most, counted.len());
    let mut shares = Vec::with_capacity(left);
    for (count, folder) in counted {
        // More recordings may come before the folder is read, so a small folder may take more.
        let share = room / left;
        shares.push((folder, share));
        room -= count.min(share);
        left -= 1;
    }
    shares
}

/// The recordings in a folder, at most `most` of them, and how many others there are. The others
/// were changed before these.
fn newest(folder: &Path, most: usize) -> (impl Iterator<Item = PathBuf>, usize) {
    let mut newest: BTreeSet<(Option<SystemTime>, PathBuf)> = BTreeSet::new();
    let mut left_out = 0;
    for entry in recordings_in(folder) {
        newest.insert((entry.metadata().and_then(|file| file.modified()).ok(), entry.path()));
        if newest.len() > most {
            newest.pop_first();
            left_out += 1;
        }
    }
    (newest.into_iter().map(|(_, path)| path), left_out)
}

fn recordings_in(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter(|entry| is_recording(entry.file_name().as_ref()))
}

/// The recordings in files, and in the files of folders.
pub fn of_files(paths: &[PathBuf]) -> Result<Found, Failure> {
    let mut found = Found::default();
    for process in processes_of(files(paths).map_err(|why| Failure::new(NOT_MADE, why))?) {
        match process {
            Ok(process) => found.processes.push(process),
            Err(line) => found.unreadable.push(line),
        }
    }
    look_again(&mut found.processes);
    Ok(found)
}

/// The processes whose recordings are in these files. An item is an error where a file cannot be
/// read: a line that says why.
fn processes_of(files: Vec<PathBuf>) -> impl Iterator<Item = Result<Process, String>> {
    let (host, usual, running) = (host_name(), length_of_tick(), Running::now());
    let process = move |path: PathBuf| -> Result<Option<Process>, String> {
        let read = open(&path).and_then(|file| read(&file));
        let (snapshot, bytes, now) = read.map_err(|error| format!("{}: {error}", path.display()))?;
        if snapshot.process.copied.is_some() {
            return Ok(Process::of_copy(snapshot, bytes, Origin::File));
        }
        let is_here = snapshot.process.host == host;
        let (pid, state) = match is_here {
            true => running.process_of_file(&path, snapshot.process.pid),
            false => (snapshot.process.pid, State::Unknown),
        };
        let moment = (is_here && state != State::Gone).then_some(now);
        let timeline = Timeline::new(&snapshot, moment, now.real, usual.filter(|_| is_here));
        let origin = if is_here { Origin::Here } else { Origin::File };
        let program = if state.is_alive() { program_of(pid) } else { String::new() };
        Ok(Some(Process { pid, state, snapshot, bytes, timeline, place: None, program, origin }))
    };
    files.into_iter().filter_map(move |path| process(path).transpose())
}

/// Whether there is a recording with that name that is no copy.
pub fn is_original(path: &Path) -> bool {
    open(path).and_then(|file| read(&file)).is_ok_and(|(snapshot, ..)| snapshot.process.copied.is_none())
}

/// Reads a recording. Returns its memory, too, and the moment at which it was read.
fn read(file: &File) -> io::Result<(Snapshot, Vec<u8>, Moment)> {
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
    let mut place = detect(&get).ok().filter(|place| place.launcher != "alone")?;
    // Spares have the last ranks of the world, so the ranks of one of several hosts are not
    // consecutive, and the place of one says nothing of the others.
    let mesh_size: Option<usize> = get(MESH_SIZE).and_then(|size| size.parse().ok());
    let has_spares = mesh_size.is_some_and(|mesh_size| mesh_size < place.size);
    if has_spares && place.local_size != Some(place.size) {
        place.local_size = None;
    }
    Some(place)
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

/// The processes of all users by their numbers in their own PID namespaces and their starts, as
/// the names of files have them.
struct Running {
    pids: BTreeMap<(u32, u64), u32>,
    /// Whether a process that is not among these has ended, also where it is another user's.
    is_complete: bool,
}

impl Running {
    fn now() -> Running {
        let entry = |pid| Some(((innermost(pid)?, Stat::read(pid)?.started), pid));
        Running { pids: proc::pids().filter_map(entry).collect(), is_complete: proc::sees_all_users() }
    }

    /// The process that writes or wrote a file, and its state. `recorded` is the number of the
    /// process in the recording. The file's name is HOST-PID-START.dmrec, or
    /// HOST-PID-START-COPY.dmrec.
    fn process_of_file(&self, path: &Path, recorded: u32) -> (u32, State) {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let parts = name.split('-').filter_map(|part| part.parse().ok());
        let is_own = || path.metadata().is_ok_and(|file| file.uid() == geteuid().as_raw());
        match parts.filter_map(|started| self.pids.get(&(recorded, started))).next() {
            Some(pid) => (*pid, state(*pid)),
            None if self.is_complete || is_own() => (recorded, State::Gone),
            None => (recorded, State::Unknown),
        }
    }
}

#[cfg(test)]
#[path = "find_tests.rs"]
mod tests;
