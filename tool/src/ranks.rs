//! The rank processes: starting, signalling, reaping.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cause::{Ended, How};
use crate::nodes::Meeting;
use crate::output::Output;
use crate::signals::reset_in_child;

/// How long ending what the ranks have left may take.
const ORPHANS_END: Duration = Duration::from_secs(2);

/// Why the tool itself failed.
pub struct Failure {
    pub code: u8,
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}

/// Which ranks this node starts, of which job.
pub struct Plan {
    pub node: u32,
    pub nodes: u32,
    /// This node's first rank, and how many it has.
    pub first: u32,
    pub count: u32,
    pub world: u32,
    /// Where the ranks meet.
    pub host: String,
    pub port: u16,
    pub id: String,
    /// What the other nodes call this host; none where there are no others.
    pub called: Option<String>,
}

impl Plan {
    /// Of the only node, whose store has that port.
    pub fn alone(meeting: Meeting, port: u16) -> Plan {
        let Meeting { host, ranks, id, .. } = meeting;
        let id = id.unwrap_or_else(|| format!("devicemesh-{}", std::process::id()));
        Plan { node: 0, nodes: 1, first: 0, count: ranks, world: ranks, host, port, id, called: None }
    }
}

/// The ranks of this node. Each leads a process group of its own, so that what a rank started ends with it.
pub struct Ranks {
    first: u32,
    /// By local rank; `None` once reaped.
    pids: Vec<Option<i32>>,
    ended: Vec<Ended>,
}

impl Ranks {
    /// Starts all of them. When one cannot be started, those before it are killed again.
    pub fn start(plan: &Plan, command: &[OsString], output: &mut Output) -> Result<Ranks, Failure> {
        // Grandchildren whose parents have gone become ours, so that they can be ended and reaped.
        // SAFETY: no pointers.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
        let mut ranks = Ranks { first: plan.first, pids: Vec::new(), ended: Vec::new() };
        for local in 0..plan.count {
            match spawn(local, plan, command, output) {
                Ok(pid) => ranks.pids.push(Some(pid)),
                Err(error) => {
                    ranks.signal(libc::SIGKILL);
                    let until = Instant::now() + Duration::from_secs(5);
                    while ranks.running() > 0 && Instant::now() < until {
                        ranks.reap();
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    ranks.end_orphans();
                    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                    let program = command[0].to_string_lossy();
                    let rank = plan.first + local;
                    return Err(Failure::new(code, format!("cannot start {program} as rank {rank}: {error}")));
                }
            }
        }
        Ok(ranks)
    }

    /// How many have not ended.
    pub fn running(&self) -> usize {
        self.pids.iter().flatten().count()
    }

    /// Sends a signal to every rank that has not ended, and to what it started.
    pub fn signal(&self, signal: i32) {
        for pid in self.pids.iter().flatten() {
            // SAFETY: the group's leader is not reaped yet, so its number is still ours.
            unsafe { libc::kill(-pid, signal) };
        }
    }

    /// Those that have ended since the last time.
    pub fn reap(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for local in 0..self.pids.len() {
            let Some(pid) = self.pids[local] else { continue };
            if let Some(how) = peek(pid) {
                // What it started ends with it: while it is not reaped, the group's number is still ours.
                // SAFETY: no pointers.
                unsafe { libc::kill(-pid, libc::SIGKILL) };
                collect(pid);
                self.pids[local] = None;
                ended.push(Ended { rank: self.first + local as u32, pid, how });
            }
        }
        // Of several since the last time nobody knows the order, but a rank that learns of another's death exits.
        ended.sort_by_key(|ended| matches!(ended.how, How::Exited(_)));
        self.ended.extend(ended.iter().cloned());
        ended
    }

    /// Ends what the ranks have left: adopted grandchildren, also those that made a group or a session of their own, and whatever these
    /// have started, which becomes ours when they are gone.
    pub fn end_orphans(&self) {
        let until = Instant::now() + ORPHANS_END;
        loop {
            for pid in children() {
                // SAFETY: it is a child that nobody has reaped, so its number is still its own. One that may not be signalled (set-user-ID) is left.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
            loop {
                // SAFETY: no status is asked for.
                match unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } {
                    0 if Instant::now() < until => break std::thread::sleep(Duration::from_millis(2)),
                    pid if pid > 0 => {}
                    _ => return,
                }
            }
        }
    }

    /// Those that failed, but for that one, in the order in which they ended.
    pub fn failed_after(&self, first: Option<u32>) -> Vec<&Ended> {
        self.ended.iter().filter(|ended| ended.failed() && Some(ended.rank) != first).collect()
    }
}

fn spawn(local: u32, plan: &Plan, command: &[OsString], output: &mut Output) -> io::Result<i32> {
    let rank = plan.first + local;
    let mut child = Command::new(&command[0]);
    child.args(&command[1..]).stdin(Stdio::null()).process_group(0);
    for (name, value) in [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local.to_string()),
        ("ROLE_RANK", rank.to_string()),
        ("WORLD_SIZE", plan.world.to_string()),
        ("LOCAL_WORLD_SIZE", plan.count.to_string()),
        ("ROLE_WORLD_SIZE", plan.world.to_string()),
        ("GROUP_RANK", plan.node.to_string()),
        ("GROUP_WORLD_SIZE", plan.nodes.to_string()),
        ("ROLE_NAME", "default".to_owned()),
        ("MASTER_ADDR", plan.host.clone()),
        ("MASTER_PORT", plan.port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
        ("TORCHELASTIC_MAX_RESTARTS", "0".to_owned()),
        ("TORCHELASTIC_RUN_ID", plan.id.clone()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
    ] {
        child.env(name, value);
    }
    if plan.count > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
        child.env("OMP_NUM_THREADS", "1");
    }
    let log = output.prepare(rank, &mut child)?;
    let tool = std::process::id() as i32;
    // SAFETY: only async-signal-safe calls between fork and exec.
    unsafe {
        child.pre_exec(move || {
            reset_in_child();
            // The rank dies with the tool, however that ends; if it has ended already, here is the end.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            if libc::getppid() != tool {
                return Err(io::Error::other("the tool has ended"));
            }
            Ok(())
        });
    }
    let mut child = child.spawn()?;
    output.add(rank, child.stdout.take(), child.stderr.take(), log)?;
    Ok(child.id() as i32)
}

/// This process's children, from `/proc`.
fn children() -> Vec<i32> {
    let me = std::process::id();
    let is_mine = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Behind the name, which may hold anything, come the state and the parent.
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parent == Some(me)
    };
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_mine).collect()
}

/// How a child ended, without reaping it.
fn peek(pid: i32) -> Option<How> {
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the struct is writable, zeroed, and filled by the call; its child fields are read only when it says that a child ended.
    unsafe {
        let code = libc::waitid(libc::P_PID, pid as libc::id_t, info.as_mut_ptr(), flags);
        let info = info.assume_init();
        if code != 0 || info.si_pid() != pid {
            return None;
        }
        Some(if info.si_code == libc::CLD_EXITED {
            How::Exited(info.si_status())
        } else {
            How::Signalled(info.si_status())
        })
    }
}

fn collect(pid: i32) {
    // SAFETY: no status is asked for; the child has ended, so this does not wait.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
}
