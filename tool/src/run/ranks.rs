//! The rank processes: how they are started, signalled and reaped.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, getppid, kill_process,
    kill_process_group, set_child_subreaper, set_parent_process_death_signal, setrlimit, wait, waitid, waitpid,
};

use super::assignment::Assignment;
use super::cause::{Ended, How};
use super::output::Output;
use crate::failure::Failure;

/// How long it may take to end the processes that the ranks have left behind.
const ORPHANS_END: Duration = Duration::from_secs(2);
/// How long it may take to end the ranks that were started before one that could not be started.
const UNDO: Duration = Duration::from_secs(5);

/// The ranks of this node. Each one leads a process group of its own, so that the processes that a
/// rank started end with it.
pub struct Ranks {
    /// The rank in the world of the first one.
    first_rank: u32,
    /// The process of each rank by its local rank. `None` once it is reaped.
    pids: Vec<Option<Pid>>,
    /// The ranks that have ended, in that order.
    ended: Vec<Ended>,
}

impl Ranks {
    /// Starts all ranks, with that limit on open files. When one cannot be started, those before it
    /// are killed.
    pub fn start(
        assignment: &Assignment,
        command: &[OsString],
        open_files: Rlimit,
        output: &mut Output,
    ) -> Result<Ranks, Failure> {
        // Grandchildren whose parents have ended become children of this process, so that it can
        // end and reap them.
        let _ = set_child_subreaper(Some(getpid()));
        let mut ranks = Ranks { first_rank: assignment.first_rank, pids: Vec::new(), ended: Vec::new() };
        for local_rank in 0..assignment.ranks {
            match start_rank(local_rank, assignment, command, open_files, output) {
                Ok(pid) => ranks.pids.push(Some(pid)),
                Err(error) => {
                    ranks.undo();
                    return Err(cannot_start(&command[0], assignment.first_rank + local_rank, &error));
                }
            }
        }
        Ok(ranks)
    }

    /// Kills the ranks that were started.
    fn undo(&mut self) {
        self.signal(Signal::KILL);
        let until = Instant::now() + UNDO;
        while self.running() > 0 && Instant::now() < until {
            self.reap();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.end_orphans();
    }

    /// The number of ranks that have not ended.
    pub fn running(&self) -> usize {
        self.pids.iter().flatten().count()
    }

    /// Sends a signal to every rank that has not ended, and to the processes in its group.
    pub fn signal(&self, signal: Signal) {
        for pid in self.pids.iter().flatten() {
            // The leader of the group is not reaped yet, so no other group can have its number.
            let _ = kill_process_group(*pid, signal);
        }
    }

    /// The ranks that have ended since the last time.
    pub fn reap(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for local_rank in 0..self.pids.len() {
            let Some(pid) = self.pids[local_rank] else { continue };
            if let Some(how) = peek(pid) {
                // The processes that the rank started end with it. Its group is signalled before it
                // is reaped, while no other group can have its number.
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::empty());
                self.pids[local_rank] = None;
                let (rank, pid) = (self.first_rank + local_rank as u32, pid.as_raw_nonzero().get());
                ended.push(Ended { rank, pid, how });
            }
        }
        // Nobody knows which of these ended first. A rank that a signal killed is likelier to be
        // the cause, because a rank that learns of another's death exits.
        ended.sort_by_key(|ended| matches!(ended.how, How::Exited(_)));
        self.ended.extend(ended.iter().cloned());
        ended
    }

    /// Ends what the ranks have left behind: grandchildren that have become children of this
    /// process, also those in a group or a session of their own, and the processes that these have
    /// started, which become children of this process in turn.
    pub fn end_orphans(&self) {
        let until = Instant::now() + ORPHANS_END;
        loop {
            for pid in children() {
                // Nobody has reaped this child, so its number is still its own. One that may not be
                // signalled (set-user-ID) is left alone.
                let _ = kill_process(pid, Signal::KILL);
            }
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) => {}
                    Ok(None) if Instant::now() < until => break std::thread::sleep(Duration::from_millis(2)),
                    _ => return,
                }
            }
        }
    }

    /// The ranks that failed, without the rank `first`, in the order in which they ended.
    pub fn failed_after(&self, first: Option<u32>) -> Vec<&Ended> {
        self.ended.iter().filter(|ended| ended.failed() && Some(ended.rank) != first).collect()
    }
}

/// Why a rank could not be started, with the exit code that a shell would give.
fn cannot_start(program: &OsString, rank: u32, error: &io::Error) -> Failure {
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    let advice = match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => {
            "; this user or this container has as many processes as it may: raise `ulimit -u`, or the container's pids.max"
        }
        _ => "",
    };
    Failure::new(code, format!("cannot start {} as rank {rank}: {error}{advice}", program.to_string_lossy()))
}

/// Starts one rank in torchrun's environment.
fn start_rank(
    local_rank: u32,
    assignment: &Assignment,
    command: &[OsString],
    open_files: Rlimit,
    output: &mut Output,
) -> io::Result<Pid> {
    let rank = assignment.first_rank + local_rank;
    let mut child = Command::new(&command[0]);
    child.args(&command[1..]).stdin(Stdio::null()).process_group(0);
    child.envs(environment(local_rank, assignment));
    if assignment.ranks > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
        child.env("OMP_NUM_THREADS", "1");
    }
    let log = output.prepare(rank, &mut child)?;
    before_exec(&mut child, open_files);
    let mut child = child.spawn()?;
    let pid = Pid::from_child(&child);
    output.add(rank, child.stdout.take(), child.stderr.take(), log)?;
    Ok(pid)
}

/// Has the child prepare itself before it runs the program.
#[expect(unsafe_code, reason = "no safe interface sets the parent-death signal of a child")]
fn before_exec(child: &mut Command, open_files: Rlimit) {
    let tool = getpid();
    let prepare = move || {
        // The rank dies with the tool, however the tool ends. Where the tool has ended before this
        // call, the rank ends here.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(tool) {
            return Err(Errno::CHILD.into());
        }
        Ok(setrlimit(Resource::Nofile, open_files)?)
    };
    // SAFETY: between fork and exec the closure only makes three system calls, without an
    // allocation or a lock.
    unsafe { child.pre_exec(prepare) };
}

fn environment(local_rank: u32, assignment: &Assignment) -> [(&'static str, String); 15] {
    let rank = assignment.first_rank + local_rank;
    [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("ROLE_RANK", rank.to_string()),
        ("WORLD_SIZE", assignment.world_size.to_string()),
        ("LOCAL_WORLD_SIZE", assignment.ranks.to_string()),
        ("ROLE_WORLD_SIZE", assignment.world_size.to_string()),
        ("GROUP_RANK", assignment.node.to_string()),
        ("GROUP_WORLD_SIZE", assignment.nodes.to_string()),
        ("ROLE_NAME", "default".to_owned()),
        ("MASTER_ADDR", assignment.host.clone()),
        ("MASTER_PORT", assignment.port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
        ("TORCHELASTIC_MAX_RESTARTS", "0".to_owned()),
        ("TORCHELASTIC_RUN_ID", assignment.id.clone()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
    ]
}

/// The children of this process, from `/proc`.
fn children() -> Vec<Pid> {
    let me = std::process::id();
    let is_mine = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The state and the parent follow the program's name, which may contain anything.
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parent == Some(me)
    };
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(is_mine).filter_map(Pid::from_raw).collect()
}

/// How a child ended, or `None` while it runs. Does not reap it.
fn peek(pid: Pid) -> Option<How> {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(pid), ended).ok().flatten()?;
    match status.exit_status() {
        Some(code) => Some(How::Exited(code)),
        None => status.terminating_signal().map(How::Signalled),
    }
}
