//! Where the threads of a process are: their native stacks where the system allows it, and what the
//! kernel says.
//!
//! A stack needs the registers of a thread. Three ways lead to them:
//!
//! - A signal handler of the library in the process. A process that has blocked the signal, or that
//!   is stopped, does not answer, and a library should take no signal from a program.
//! - /proc/PID/syscall and /proc/PID/stack. They need the same rights as ptrace or more, and have
//!   no registers of a thread that spins.
//! - ptrace, which this module uses. It stops a thread for some 100 µs, and works in every state
//!   of a thread except inside a driver.
//!
//! Linux allows ptrace to root, and to the same user unless Yama (kernel.yama.ptrace_scope) or a
//! container forbids it. Where it is forbidden, the recording and the kernel still say where the
//! process is.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod modules;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod thread;

use std::collections::BTreeMap;
use std::fs;

use devicemesh::printable::printable;
use serde::{Deserialize, Serialize};

use super::process::Process;
use crate::proc;
use crate::words::count;

/// The most threads of a process that are looked at.
const MOST_THREADS: usize = 32;
/// The beginnings of the names of this library's files.
const LIBRARIES: [&str; 2] = ["libdevicemesh.", "libhostccl."];
/// The most frames of a thread that are shown. `--json` has all.
const SHOWN_FRAMES: usize = 16;

/// A thread of a process.
#[derive(Clone, Serialize, Deserialize)]
pub struct Thread {
    /// The thread's number.
    thread: u32,
    /// The thread's name.
    name: String,
    /// The function of the kernel in which the thread waits; empty where it runs, or where the
    /// kernel does not say it.
    kernel: String,
    /// The functions of the program, the innermost first. Empty where they cannot be read.
    frames: Vec<String>,
}

/// The threads of ranks, by the ranks' places in the job.
#[derive(Default)]
pub struct Stacks {
    of: BTreeMap<usize, Vec<Thread>>,
    /// Why stacks could not be read; empty where they were.
    refusal: String,
}

impl Stacks {
    /// Looks at the threads of a rank's process, and with `frames` at their stacks.
    pub fn look(&mut self, rank: usize, process: &Process, frames: bool) {
        let threads = threads_of(process.pid, frames, &mut self.refusal);
        self.of.insert(rank, threads);
    }

    /// Notes the threads of a rank's process that another host has sent.
    pub fn note(&mut self, rank: usize, threads: Vec<Thread>, refusal: &str) {
        self.of.insert(rank, threads);
        if !refusal.is_empty() {
            refusal.clone_into(&mut self.refusal);
        }
    }

    /// The threads of a rank.
    pub fn of(&self, rank: usize) -> &[Thread] {
        self.of.get(&rank).map_or(&[], |threads| threads)
    }

    /// The threads of a rank as lines.
    pub fn text(&self, rank: usize) -> String {
        let line = |thread: &Thread| {
            let kernel =
                if thread.kernel.is_empty() { String::new() } else { format!(", in the kernel's {}", thread.kernel) };
            let shown = thread.frames.iter().take(SHOWN_FRAMES).map(|frame| format!("      {frame}\n"));
            let more = thread.frames.len().saturating_sub(SHOWN_FRAMES);
            let more = if more > 0 { format!("      and {}\n", count(more, "more frame")) } else { String::new() };
            format!("    thread {} ({}){kernel}\n{}{more}", thread.thread, thread.name, shown.collect::<String>())
        };
        self.of(rank).iter().map(line).collect()
    }

    /// Why stacks could not be read, as a line. It is empty where they were read.
    pub fn refusal(&self) -> String {
        if self.refusal.is_empty() { String::new() } else { format!("  no stacks: {}\n", self.refusal) }
    }
}

/// The threads of a process, with `frames` also their stacks. Where the stacks may not be read,
/// `refusal` gets the reason.
pub fn threads_of(pid: u32, frames: bool, refusal: &mut String) -> Vec<Thread> {
    let mut numbers: Vec<u32> = proc::threads(pid).collect();
    numbers.sort_unstable();
    let thread = |thread: u32| {
        let read = |file: &str| {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/{file}")).unwrap_or_default();
            printable(text.trim()).into_owned()
        };
        let kernel = Some(read("wchan")).filter(|name| name != "0").unwrap_or_default();
        Thread { thread, name: read("comm"), kernel, frames: Vec::new() }
    };
    let mut threads: Vec<Thread> = numbers.into_iter().take(MOST_THREADS).map(thread).collect();
    if frames {
        add_frames(pid, &mut threads, refusal);
    }
    threads
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn add_frames(pid: u32, threads: &mut [Thread], refusal: &mut String) {
    use nix::errno::Errno;

    let mut modules = match modules::Modules::of(pid) {
        Ok(modules) => modules,
        Err(error) => {
            // A process that has ended meanwhile has no stack.
            if error.kind() == std::io::ErrorKind::PermissionDenied {
                *refusal = reason(pid);
            }
            return;
        }
    };
    let mut unwind = || -> Vec<Vec<u64>> {
        let unwind = |thread: &Thread| {
            let frames = thread::stopped(thread.thread, |counter, registers| modules.unwind(counter, registers));
            if frames == Err(Errno::EPERM) {
                *refusal = reason(pid);
            }
            frames.unwrap_or_default()
        };
        threads.iter().map(unwind).collect()
    };
    // A thread that waits in a driver does not stop in time, and stays attached. The kernel
    // detaches it when the thread that has attached it ends, so that is a thread of its own.
    let tracer = std::thread::Builder::new().name("dm-tracer".to_owned());
    let traced =
        std::thread::scope(|scope| Some(tracer.spawn_scoped(scope, &mut unwind).ok()?.join().unwrap_or_default()));
    let unwound = traced.unwrap_or_else(unwind);
    // Looking up the names takes long, so no thread is stopped meanwhile.
    for (thread, addresses) in threads.iter_mut().zip(unwound) {
        thread.frames = names(&mut modules, &addresses);
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn add_frames(_pid: u32, _threads: &mut [Thread], refusal: &mut String) {
    *refusal = "stacks are read on x86_64 and aarch64 only".to_owned();
}

/// The names of a stack's functions, the innermost first. The frames inside this library are one
/// entry, and those that start the program are left out.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn names(modules: &mut modules::Modules, addresses: &[u64]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut inside: Option<(String, usize)> = None;
    let told = |(file, frames): (String, usize)| format!("{} in {file}", count(frames, "frame"));
    for address in addresses {
        if let Some(file) = modules.file(*address).filter(|file| LIBRARIES.iter().any(|name| file.starts_with(name))) {
            let frames = inside.map_or(0, |(_, frames)| frames);
            inside = Some((file, frames + 1));
            continue;
        }
        names.extend(inside.take().map(told));
        names.extend(modules.names(*address));
        if names.last().is_some_and(|name| name.starts_with("main ")) {
            break;
        }
    }
    names.extend(inside.map(told));
    names
}

/// Why the stacks of a process may not be read.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn reason(pid: u32) -> String {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "" | "0" => {
            format!("this user may not trace process {pid} here; root, or CAP_SYS_PTRACE in the container, may")
        }
        scope => format!(
            "kernel.yama.ptrace_scope is {scope}, so only root may trace process {pid}; run `devicemesh why` as root, or set it to 0"
        ),
    }
}
