//! The processes that a dead process has left behind. They become children of this process, which
//! is a subreaper.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper, wait};

use crate::proc::{Stat, pids};

/// The children that this process had before it started any, each with the time of its start. A
/// shell that ends with `exec devicemesh run` leaves its children behind, for example the tee of
/// `exec > >(tee log)`. They are not the job's, so nobody here ends them.
static EARLIER: OnceLock<Vec<(u32, u64)>> = OnceLock::new();
/// Whether this process is a subreaper.
static ADOPTS: AtomicBool = AtomicBool::new(false);
/// The children of this process that threads of their own wait for. They are no orphans.
static AWAITED: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Makes this process the parent of its descendants whose own parents end. The first call is made
/// before this process starts another one.
pub fn adopt() {
    EARLIER.get_or_init(|| all_children().collect());
    // Linux has this call since 3.4. Where a sandbox refuses it, the ranks themselves still end
    // with the tool.
    ADOPTS.store(set_child_subreaper(Some(getpid())).is_ok(), Ordering::Relaxed);
}

/// Kills all children of this process, and the processes that become its children because their
/// parents have ended, whatever group or session they are in. Returns when no child is left, at the
/// latest at the moment `until`. This process may have been stopped until then, so the children are
/// killed once in any case.
pub fn end_all(until: Instant) {
    while are_left() {
        for pid in children() {
            // This process has not reaped the child, so no other process can have its number. A
            // child that may not be signalled (set-user-ID) is left alone.
            let _ = kill_process(pid, Signal::KILL);
        }
        if Instant::now() >= until {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reaps the children that have ended. Returns whether others may be left.
pub fn are_left() -> bool {
    if reap().is_none() {
        return false;
    }
    let is_one_here = !children().is_empty();
    // When a child ends, its own children become children of this process, maybe after `children`
    // has passed them. Then there is a child to reap, and the next look finds them.
    reap().is_some_and(|reaped| is_one_here || reaped > 0)
}

/// Starts a child that no one else may reap until [`wait_for`] has done so.
pub fn spawn_awaited(command: &mut Command) -> io::Result<Child> {
    // The lock is held because a child that cannot run its program is reaped inside `spawn`.
    let mut awaited = AWAITED.lock().unwrap_or_else(PoisonError::into_inner);
    let child = command.spawn()?;
    awaited.push(Pid::from_child(&child));
    Ok(child)
}

/// Waits for the end of a child that [`spawn_awaited`] has started, and reaps it.
pub fn wait_for(mut child: Child) {
    let _ = child.wait();
    let pid = Pid::from_child(&child);
    AWAITED.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != pid);
}

/// The children that threads of their own wait for, and none is started until the result is
/// dropped. `None` while one is being started.
pub fn awaited() -> Option<MutexGuard<'static, Vec<Pid>>> {
    match AWAITED.try_lock() {
        Ok(awaited) => Some(awaited),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Whether the processes whose parents end become children of this process.
pub fn are_adopted() -> bool {
    ADOPTS.load(Ordering::Relaxed)
}

/// Reaps the children that have ended, and returns their number. `None` where no child is left.
fn reap() -> Option<usize> {
    let mut reaped = 0;
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => reaped += 1,
            Ok(None) => return Some(reaped),
            Err(_) => return None,
        }
    }
}

/// Kills the children of this process that run another program, each with its process group. A
/// child in another session is left alone.
pub fn kill_other_programs() {
    let session = |pid: u32| Stat::read(pid).map(|stat| stat.session);
    let file = |process: &str| std::fs::metadata(format!("/proc/{process}/exe")).map(|exe| (exe.dev(), exe.ino())).ok();
    let own = (session(std::process::id()), file("self"));
    for pid in children() {
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        if file(&number.to_string()) != own.1 && session(number) == own.0 {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

/// The children of this process, without those that it had from the beginning.
fn children() -> Vec<Pid> {
    let earlier = EARLIER.get().map_or(&[][..], Vec::as_slice);
    let others = all_children().filter(|child| !earlier.contains(child));
    others.filter_map(|(pid, _)| Pid::from_raw(pid.try_into().ok()?)).collect()
}

/// All children of this process, each with the time of its start.
fn all_children() -> impl Iterator<Item = (u32, u64)> {
    let me = std::process::id();
    let with_start = |pid: u32| Some((pid, Stat::read(pid)?));
    pids().filter_map(with_start).filter(move |(_, stat)| stat.parent == me).map(|(pid, stat)| (pid, stat.started))
}
