//! Where the threads of a process are: their native stacks where the system allows it, else what
//! the kernel says.

use std::collections::BTreeMap;
use std::fs;

use devicemesh::printable::printable;
use serde::Serialize;

use super::process::Process;
use crate::proc;

/// A thread of a process.
#[derive(Clone, Serialize)]
pub struct Thread {
    /// The thread's number.
    pub thread: u32,
    /// The thread's name.
    pub name: String,
    /// The function of the kernel in which the thread waits; empty where it runs or where the
    /// kernel does not say it.
    pub kernel: String,
    /// The functions of the program, the innermost first. Empty where they cannot be read.
    pub frames: Vec<String>,
}

/// The threads of ranks, by the ranks' places in the job.
#[derive(Default)]
pub struct Stacks {
    of: BTreeMap<usize, Vec<Thread>>,
}

impl Stacks {
    /// Looks at the threads of a rank's process.
    pub fn look(&mut self, rank: usize, process: &Process) {
        let mut threads: Vec<u32> = proc::threads(process.pid).collect();
        threads.sort_unstable();
        let read = |thread: u32, file: &str| {
            let text = fs::read_to_string(format!("/proc/{}/task/{thread}/{file}", process.pid)).unwrap_or_default();
            printable(text.trim()).into_owned()
        };
        let thread = |thread| {
            let kernel = Some(read(thread, "wchan")).filter(|name| name != "0").unwrap_or_default();
            Thread { thread, name: read(thread, "comm"), kernel, frames: Vec::new() }
        };
        self.of.insert(rank, threads.into_iter().map(thread).collect());
    }

    /// The threads of a rank.
    pub fn of(&self, rank: usize) -> &[Thread] {
        self.of.get(&rank).map_or(&[], |threads| threads)
    }

    /// The threads of a rank as lines.
    pub fn text(&self, rank: usize) -> String {
        let line = |thread: &Thread| {
            let kernel = if thread.kernel.is_empty() { "runs".to_owned() } else { format!("waits in {}", thread.kernel) };
            let frames: String = thread.frames.iter().map(|frame| format!("      {frame}\n")).collect();
            format!("    thread {} ({}) {kernel}\n{frames}", thread.thread, thread.name)
        };
        self.of(rank).iter().map(line).collect()
    }
}
