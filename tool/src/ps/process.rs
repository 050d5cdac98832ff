//! This user's processes, from /proc. Each function returns nothing for a process that has ended
//! meanwhile or that may not be looked at.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::launcher::{Place, detect};
use rustix::process::geteuid;

use crate::proc::{self, Stat};
use crate::run::environment::MESH_SIZE;

/// One process.
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    /// Whether it is stopped, by Ctrl-Z or by a debugger.
    pub is_stopped: bool,
    /// When it was started: the time since the host's start, in clock ticks.
    pub started: u64,
    /// The program's file, without folders.
    pub program: String,
    /// The command line. It is never empty.
    pub command: Vec<String>,
    /// Its place in a job. `None` for a process that no launcher has started.
    pub place: Option<Place>,
    /// TORCHELASTIC_RUN_ID, the name that torchrun and this tool give a job.
    pub id: Option<String>,
    /// TORCHELASTIC_RESTART_COUNT: how often the rank was started again, alone or with the job.
    pub restarts: u32,
    /// DM_MESH_SIZE, the number of ranks without spares, which this tool gives.
    pub mesh_size: Option<usize>,
}

impl Process {
    /// Whether this is a `devicemesh run`.
    pub fn is_tool(&self) -> bool {
        self.program == "devicemesh" && self.command.get(1).is_some_and(|word| word == "run")
    }

    /// Whether this is the second process of a `devicemesh run`.
    pub fn is_keeper(&self) -> bool {
        self.program == "devicemesh" && self.command[0] == "dm-ranks"
    }

    /// Whether both are processes of one rank of one job, or of no job.
    pub fn is_of_same_rank(&self, other: &Process) -> bool {
        match (&self.place, &other.place) {
            (Some(own), Some(theirs)) => {
                (own.rank, own.size, &own.address) == (theirs.rank, theirs.size, &theirs.address) && self.id == other.id
            }
            (None, None) => true,
            _ => false,
        }
    }

    /// Reads a process. Returns `None` also for a kernel thread, and for a process that has ended
    /// and whose parent has not yet noticed.
    fn read(pid: u32) -> Option<Process> {
        let stat = Stat::read(pid)?;
        let command = words(pid, "cmdline")?;
        if command.is_empty() {
            return None;
        }
        let exe = fs::read_link(format!("{}/exe", proc::folder(pid))).ok()?;
        let exe = exe.file_name()?.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
        let environment = words(pid, "environ")?;
        let variables: BTreeMap<&str, &str> = environment.iter().filter_map(|entry| entry.split_once('=')).collect();
        let get = |name: &str| variables.get(name).filter(|value| !value.is_empty()).map(|value| (*value).to_owned());
        let place = detect(&get).ok().filter(|place| place.launcher != "alone");
        let id = get("TORCHELASTIC_RUN_ID");
        let restarts = get("TORCHELASTIC_RESTART_COUNT").and_then(|count| count.parse().ok()).unwrap_or(0);
        let mesh_size = get(MESH_SIZE).and_then(|size| size.parse().ok());
        let (parent, is_stopped, started) = (stat.parent, stat.is_stopped, stat.started);
        Some(Process { pid, parent, is_stopped, started, program: exe, command, place, id, restarts, mesh_size })
    }
}

/// The words of a file of the process, as text.
fn words(pid: u32, file: &str) -> Option<Vec<String>> {
    let words = proc::words(pid, file)?;
    Some(words.into_iter().map(|word| word.to_string_lossy().into_owned()).collect())
}

/// This user's processes, by process number.
pub fn processes() -> BTreeMap<u32, Process> {
    let user = geteuid().as_raw();
    let own = proc::pids().filter(|pid| fs::metadata(format!("/proc/{pid}")).is_ok_and(|folder| folder.uid() == user));
    own.filter_map(Process::read).map(|process| (process.pid, process)).collect()
}

/// Whether a process uses this library: its file is mapped, or the process is this tool.
pub fn uses_library(process: &Process) -> bool {
    let is_own = |file: &str| ["libdevicemesh.", "libhostccl."].iter().any(|name| file.starts_with(name));
    let maps = fs::read_to_string(format!("{}/maps", proc::folder(process.pid))).unwrap_or_default();
    let mut files = maps.lines().filter_map(|line| Path::new(line).file_name()?.to_str());
    process.program == "devicemesh" || files.any(is_own)
}

/// The memory and the CPU time that processes use.
pub struct Usage {
    of: BTreeMap<u32, (u64, f64)>,
}

impl Usage {
    /// Watches these processes for that time.
    pub fn watch(pids: impl Iterator<Item = u32>, time: Duration) -> Usage {
        let began = Instant::now();
        let before: Vec<(u32, Stat)> = pids.filter_map(|pid| Some((pid, Stat::read(pid)?))).collect();
        if before.is_empty() {
            return Usage { of: BTreeMap::new() };
        }
        let memory: Vec<u64> = before.iter().map(|(pid, _)| memory(*pid).unwrap_or(0)).collect();
        std::thread::sleep(time.saturating_sub(began.elapsed()));
        let seconds = began.elapsed().as_secs_f64();
        let used = |pid: u32, before: &Stat| {
            // Another process may have got the number of one that has ended.
            let now = Stat::read(pid).filter(|now| now.started == before.started)?;
            Some(clock(now.ticks.saturating_sub(before.ticks)) / seconds * 100.0)
        };
        let entry = |((pid, stat), bytes): (&(u32, Stat), u64)| (*pid, (bytes, used(*pid, stat).unwrap_or(0.0)));
        Usage { of: before.iter().zip(memory).map(entry).collect() }
    }

    /// The bytes of memory of these processes, and their CPU time in percent of one CPU.
    pub fn of(&self, pids: impl Iterator<Item = u32>) -> (u64, f64) {
        let each = pids.filter_map(|pid| self.of.get(&pid));
        each.fold((0, 0.0), |(bytes, percent), (more, busy)| (bytes + more, percent + busy))
    }
}

/// Returns the memory of a process in bytes. Memory that several processes share is divided among
/// them, so that the sum counts it once. Where the kernel does not tell the shares, all of the
/// memory counts.
fn memory(pid: u32) -> Option<u64> {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
        let kilobytes = text.lines().find_map(|line| line.strip_prefix(name))?;
        kilobytes.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    Some(1024 * field("smaps_rollup", "Pss:").or_else(|| field("status", "VmRSS:"))?)
}

/// Clock ticks in seconds.
fn clock(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// The seconds since a process was started.
pub fn elapsed(started: u64) -> f64 {
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let uptime: f64 = uptime.split(' ').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0.0);
    (uptime - clock(started)).max(0.0)
}
