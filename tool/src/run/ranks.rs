//! The rank processes: how they are started, signalled and reaped.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, getppid, kill_process_group,
    set_parent_process_death_signal, setrlimit, waitid, waitpid,
};

use super::assignment::Assignment;
use super::binding::Binding;
use super::cause::{Ended, How};
use super::environment::{not_inherited, variables};
use super::identity::shell_word;
use super::orphans;
use super::output::Output;
use super::program;
use crate::failure::{Failure, advice_on_limits};
use crate::terminal;

/// How long a rank's child processes may run on after the rank has ended. With
/// `exec > >(tee log)` in a script, tee must still write the last lines.
pub const LAST_LINES: Duration = Duration::from_millis(500);
/// How long it may take to end the processes that the ranks have left behind.
const ORPHANS_END: Duration = Duration::from_secs(2);
/// How long it may take to end the ranks that were started before one that could not be started.
const UNDO: Duration = Duration::from_secs(5);

/// The ranks of this node. Each one leads a process group of its own, so that the processes that a
/// rank started end soon after it.
pub struct Ranks {
    /// The rank in the world of each one, by its local rank.
    numbers: Vec<u32>,
    /// What the processes get when they are started.
    limits: (Rlimit, Stops),
    /// The process of each rank by its local rank. `None` once it has ended.
    pids: Vec<Option<Pid>>,
    /// The groups of the ranks that have ended: the rank, its process, and when the others of its
    /// group are killed. The process is reaped only then, so no other group can have its number.
    left: Vec<(u32, Pid, Instant)>,
    /// The ranks that have ended, in that order.
    ended: Vec<Ended>,
}

impl Ranks {
    /// Starts all ranks, with that limit on open files. When one cannot be started, those before it
    /// are killed.
    pub fn start(
        assignment: &Assignment,
        command: &[OsString],
        binding: &Binding,
        open_files: Rlimit,
        output: &mut Output,
    ) -> Result<Ranks, Failure> {
        // Grandchildren whose parents have ended become children of this process, so that it can
        // end and reap them.
        orphans::adopt();
        // The ranks' process groups are in the background of the terminal.
        let stops = if terminal::stops_writers() { Stops::Ignored } else { Stops::Allowed };
        if program::is_empty(&program::resolve(&command[0])) {
            let (program, rank) = (shell_word(&command[0].to_string_lossy()), assignment.rank(0));
            return Err(Failure::new(126, format!("cannot start {program} as rank {rank}: its file is empty")));
        }
        let numbers = (0..assignment.ranks).map(|local_rank| assignment.rank(local_rank)).collect();
        let limits = (open_files, stops);
        let mut ranks = Ranks { numbers, limits, pids: Vec::new(), left: Vec::new(), ended: Vec::new() };
        for local_rank in 0..assignment.ranks {
            match start_rank((local_rank, 0), assignment, command, binding, limits, output) {
                Ok(pid) => ranks.pids.push(Some(pid)),
                Err(error) => {
                    ranks.undo();
                    return Err(cannot_start(&command[0], assignment.rank(local_rank), &error));
                }
            }
        }
        Ok(ranks)
    }

    /// Starts again a rank that has ended. `again` is the number of this restart: 1 for the first
    /// one.
    pub fn start_again(
        &mut self,
        local_rank: u32,
        again: u32,
        assignment: &Assignment,
        command: &[OsString],
        binding: &Binding,
        output: &mut Output,
    ) -> Result<(), Failure> {
        let rank = assignment.rank(local_rank);
        self.end_left(|of_rank, _| of_rank == rank);
        output.restart(rank, again);
        let pid = start_rank((local_rank, again), assignment, command, binding, self.limits, output)
            .map_err(|error| cannot_start(&command[0], rank, &error))?;
        self.pids[local_rank as usize] = Some(pid);
        Ok(())
    }

    /// A rank whose process never ends, and that no signal reaches: no process has its number.
    #[cfg(test)]
    pub fn without_end(rank: u32) -> Ranks {
        let none = Rlimit { current: None, maximum: None };
        let pids = vec![Pid::from_raw(i32::MAX)];
        Ranks { numbers: vec![rank], limits: (none, Stops::Allowed), pids, left: Vec::new(), ended: Vec::new() }
    }

    /// Forgets how a rank has ended, because it is started again.
    pub fn forget(&mut self, rank: u32) {
        self.ended.retain(|ended| ended.rank != rank);
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

    /// The ranks that have not ended.
    pub fn still_running(&self) -> Vec<u32> {
        self.processes().into_iter().map(|(rank, _)| rank).collect()
    }

    /// The ranks that have not ended, with their processes.
    pub fn processes(&self) -> Vec<(u32, u32)> {
        let ranks = self.numbers.iter().zip(&self.pids);
        ranks.filter_map(|(rank, pid)| Some((*rank, pid.as_ref()?.as_raw_nonzero().get().unsigned_abs()))).collect()
    }

    /// Sends a signal to every rank that has not ended, and to the processes in its group. SIGKILL
    /// is also for the groups of ranks that have ended.
    pub fn signal(&self, signal: Signal) {
        let left = self.left.iter().filter(|_| signal == Signal::KILL).map(|(_, pid, _)| pid);
        for pid in self.pids.iter().flatten().chain(left) {
            // The leader of the group is not reaped yet, so no other group can have its number.
            let _ = kill_process_group(*pid, signal);
        }
    }

    /// When [`reap`](Ranks::reap) has something to kill.
    pub fn next_moment(&self) -> Option<Instant> {
        self.left.iter().map(|(.., moment)| *moment).min()
    }

    /// Kills what is left of the groups of these ranks that have ended, and reaps their processes.
    fn end_left(&mut self, is_due: impl Fn(u32, Instant) -> bool) {
        self.left.retain(|(rank, pid, moment)| {
            let is_due = is_due(*rank, *moment);
            if is_due {
                let _ = kill_process_group(*pid, Signal::KILL);
                let _ = waitpid(Some(*pid), WaitOptions::empty());
            }
            !is_due
        });
    }

    /// The ranks that have ended since the last time. What their groups have left is killed
    /// [`LAST_LINES`] later.
    pub fn reap(&mut self) -> Vec<Ended> {
        let now = Instant::now();
        self.end_left(|_, moment| moment <= now);
        let mut ended = Vec::new();
        for local_rank in 0..self.pids.len() {
            let Some(pid) = self.pids[local_rank] else { continue };
            if let Some((how, has_dumped_core)) = peek(pid) {
                self.pids[local_rank] = None;
                self.left.push((self.numbers[local_rank], pid, now + LAST_LINES));
                let (rank, pid) = (self.numbers[local_rank], pid.as_raw_nonzero().get());
                ended.push(Ended { rank, pid, how, has_dumped_core });
            }
        }
        // Nobody knows which of these ended first. A rank that a signal killed is likelier to be
        // the cause, because a rank that learns of another's death exits.
        ended.sort_by_key(|ended| matches!(ended.how, How::Exited(_)));
        self.ended.extend(ended.iter().cloned());
        if orphans::are_adopted() {
            self.reap_adopted();
        }
        ended
    }

    /// Reaps the processes that became children of this one because their own parents have ended. A
    /// rank that leaves one behind every second would otherwise fill the process table. The kernel
    /// names one child at a time, so a process that is reaped elsewhere holds up those behind it.
    /// A rank that has ended holds them up for [`LAST_LINES`] at most.
    fn reap_adopted(&self) {
        let Some(awaited) = orphans::awaited() else { return };
        let is_left = |pid: Pid| self.left.iter().any(|(_, left, _)| *left == pid);
        let is_reaped_elsewhere = |pid: Pid| self.pids.contains(&Some(pid)) || is_left(pid) || awaited.contains(&pid);
        while let Some(pid) = ended_child().filter(|pid| !is_reaped_elsewhere(*pid)) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    /// Returns the ranks that were stopped because they used the terminal, each with the signal:
    /// SIGTTIN for reading, SIGTTOU for a change of the settings. The ranks' process groups are in
    /// the background of the terminal, where neither is allowed. Each stop is returned once.
    pub fn stopped_by_terminal(&self) -> Vec<(u32, Signal)> {
        let stopped = self.numbers.iter().zip(&self.pids).filter_map(|(rank, pid)| {
            let status = waitid(WaitId::Pid((*pid)?), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG).ok()??;
            Some((*rank, Signal::from_named_raw(status.stopping_signal()?)?))
        });
        stopped.filter(|(_, signal)| [Signal::TTIN, Signal::TTOU].contains(signal)).collect()
    }

    /// Kills this rank and the processes in its group.
    pub fn kill(&self, rank: u32) {
        let place = self.numbers.iter().position(|number| *number == rank);
        if let Some(pid) = place.and_then(|place| self.pids[place]) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    /// Ends what the ranks have left behind: grandchildren that have become children of this
    /// process, also those in a group or a session of their own, and the processes that these have
    /// started, which become children of this process in turn.
    pub fn end_orphans(&mut self) {
        self.forget_left();
        orphans::end_all(Instant::now() + ORPHANS_END);
    }

    /// Whether processes of the ranks are left, in whatever group or session. All ranks have ended.
    pub fn have_left(&mut self) -> bool {
        self.forget_left();
        orphans::are_left()
    }

    /// Forgets the groups of the ranks that have ended, because the orphans are reaped now, and
    /// with them the ranks. Then other groups may have their numbers. Where no process becomes an
    /// orphan of this one, the groups are killed before.
    fn forget_left(&mut self) {
        if !orphans::are_adopted() {
            self.end_left(|_, _| true);
        }
        self.left.clear();
    }

    /// The ranks that failed, without the rank `first`, in the order in which they ended.
    pub fn failed_after(&self, first: Option<u32>) -> Vec<&Ended> {
        self.ended.iter().filter(|ended| ended.failed() && Some(ended.rank) != first).collect()
    }
}

/// Why a rank could not be started, with the exit code that a shell would give.
fn cannot_start(program: &OsString, rank: u32, error: &io::Error) -> Failure {
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    let advice = advice_on_limits(error);
    let missing = program::why(program, error).unwrap_or_else(|| error.to_string());
    let program = shell_word(&program.to_string_lossy());
    Failure::new(code, format!("cannot start {program} as rank {rank}: {missing}{advice}"))
}

/// Starts one rank in torchrun's environment. `again` is how often it was started again alone.
fn start_rank(
    (local_rank, again): (u32, u32),
    assignment: &Assignment,
    command: &[OsString],
    binding: &Binding,
    limits: (Rlimit, Stops),
    output: &mut Output,
) -> io::Result<Pid> {
    let rank = assignment.rank(local_rank);
    let mut child = Command::new(program::resolve(&command[0]));
    child.args(&command[1..]).process_group(0);
    for name in not_inherited() {
        child.env_remove(name);
    }
    child.envs(variables(local_rank, again, assignment, binding.own_cores(local_rank)));
    let logs = output.prepare(rank, &mut child)?;
    before_exec(&mut child, limits);
    let bound = binding.enter(local_rank)?;
    let mut child = child.spawn()?;
    drop(bound);
    let pid = Pid::from_child(&child);
    output.add(rank, &mut child, logs)?;
    Ok(pid)
}

/// Has the child prepare itself before it runs the program.
#[expect(unsafe_code, reason = "no safe interface sets the parent-death signal of a child")]
fn before_exec(child: &mut Command, (open_files, stops): (Rlimit, Stops)) {
    let tool = getpid();
    let prepare = move || {
        // The rank dies with the tool, however the tool ends. Where the tool has ended before this
        // call, the rank ends here.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(tool) {
            return Err(Errno::CHILD.into());
        }
        stops.set()?;
        Ok(setrlimit(Resource::Nofile, open_files)?)
    };
    // SAFETY: between fork and exec the closure only makes four system calls, without an
    // allocation or a lock.
    unsafe { child.pre_exec(prepare) };
}

/// Whether SIGTTOU stops this process and the processes that it starts. The terminal sends SIGTTOU
/// to a process in the background that changes the terminal's settings, and after `stty tostop`
/// also for each write.
#[derive(Clone, Copy)]
pub enum Stops {
    Allowed,
    Ignored,
}

impl Stops {
    /// Sets this for the calling process. The signal is ignored and not blocked, because a shell
    /// unblocks all signals, and leaves ignored what was ignored when it was started.
    #[expect(unsafe_code, reason = "no safe interface ignores a signal")]
    pub fn set(self) -> io::Result<()> {
        let action = match self {
            Stops::Allowed => libc::SIG_DFL,
            Stops::Ignored => libc::SIG_IGN,
        };
        // SAFETY: neither action runs code of this process, and the call may be made between fork
        // and exec (signal-safety(7)).
        match unsafe { libc::signal(libc::SIGTTOU, action) } {
            libc::SIG_ERR => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

/// How a child ended, and whether it left a core dump, or `None` while it runs. Does not reap it.
fn peek(pid: Pid) -> Option<(How, bool)> {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(pid), ended).ok().flatten()?;
    let how = match status.exit_status() {
        Some(code) => How::Exited(code),
        None => How::Signalled(status.terminating_signal()?),
    };
    Some((how, status.dumped()))
}

/// A child of this process that has ended and is not reaped. Does not reap it.
#[expect(unsafe_code, reason = "no safe interface names the child")]
fn ended_child() -> Option<Pid> {
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: all fields of a siginfo_t are numbers and pointers, for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes to `info` alone, which lives until it returns.
    let done = unsafe { libc::waitid(libc::P_ALL, 0, &mut info, options) };
    // SAFETY: waitid has written this field, or it is still zero because no child has ended.
    let pid = unsafe { info.si_pid() };
    Pid::from_raw(pid).filter(|_| done == 0)
}
