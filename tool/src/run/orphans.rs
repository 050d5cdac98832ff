//! The processes that a dead process has left behind. They become children of this process, which
//! is a subreaper.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper, wait};

use crate::proc::{Stat, pids};

/// Makes this process the parent of its descendants whose own parents end.
pub fn adopt() {
    // Linux has this call since 3.4. Where a sandbox refuses it, the ranks themselves still end
    // with the tool.
    let _ = set_child_subreaper(Some(getpid()));
}

/// Kills all children of this process, and the processes that become its children because their
/// parents have ended, whatever group or session they are in. Returns when no child is left, or at
/// that moment.
pub fn end_all(until: Instant) {
    loop {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some(_)) => {}
                Ok(None) if Instant::now() < until => break,
                _ => return,
            }
        }
        for pid in children() {
            // This process has not reaped the child, so no other process can have its number. A
            // child that may not be signalled (set-user-ID) is left alone.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
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

/// The children of this process.
fn children() -> Vec<Pid> {
    let me = std::process::id();
    let is_mine = |pid: &u32| Stat::read(*pid).is_some_and(|stat| stat.parent == me);
    pids().filter(is_mine).filter_map(|pid| Pid::from_raw(pid.try_into().ok()?)).collect()
}
