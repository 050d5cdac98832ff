//! The limit on open files (`ulimit -n`), and how many this node's part of a job needs.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::assignment::Assignment;
use super::output::Route;
use crate::failure::Failure;

/// The most files that starting one rank needs for a moment: the ends of its pipes, its log, and
/// the pipe on which exec reports.
const WHILE_STARTING: u64 = 12;

/// Raises this process's soft limit as far as the job needs it, and returns the limit as it was,
/// for the ranks to get it back. Fails where the hard limit is too low, before any rank is started.
/// `serves` tells whether the job's store is in this process.
pub fn make_room(assignment: &Assignment, route: &Route, serves: bool) -> Result<Rlimit, Failure> {
    let before = getrlimit(Resource::Nofile);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64);
    let output = route.files_per_rank() * u64::from(assignment.ranks);
    // In the store each rank has a connection, and each tool has one.
    let store = if serves { u64::from(assignment.world_size) + u64::from(assignment.nodes) } else { 0 };
    let needed = open + output + store + WHILE_STARTING;
    let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if is_enough(before.current) {
        return Ok(before);
    }
    let raised = Rlimit { current: Some(needed), maximum: before.maximum };
    if is_enough(before.maximum) && setrlimit(Resource::Nofile, raised).is_ok() {
        return Ok(before);
    }
    let limit = before.maximum.or(before.current).unwrap_or_default();
    Err(Failure::new(
        1,
        format!(
            "{} ranks on this host need {needed} open files in devicemesh run ({output} for their output, {store} for their connections to the store), and the limit is {limit}: raise it with `ulimit -n {needed}`, or start fewer ranks here",
            assignment.ranks
        ),
    ))
}
