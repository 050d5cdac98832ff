//! `devicemesh why --metrics`: the counters of the jobs' processes as text for Prometheus.

use recording::metrics::{Source, text};

use super::exit_code::NOT_MADE;
use super::job::{Job, Rank};
use super::process::Process;
use crate::failure::Failure;
use crate::stdio::print;

/// Prints the counters, and judges nothing.
pub fn metrics(jobs: &[Job]) -> Result<u8, Failure> {
    let processes = jobs.iter().flat_map(|job| &job.ranks).filter_map(Rank::process);
    let sources: Vec<Source<'_>> = processes.map(source).collect();
    print(text(&sources)).map_err(|failure| Failure { code: NOT_MADE, ..failure })?;
    Ok(0)
}

fn source(process: &Process) -> Source<'_> {
    let snapshot = &process.snapshot;
    // A process of this host has the clock of this host.
    let now = process.runs_here().then(|| snapshot.process.clock.moment());
    Source { snapshot, pid: process.pid, now }
}
