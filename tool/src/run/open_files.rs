//! The limit on open files (`ulimit -n`), and how many this node's part of a job needs.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::output::Route;
use crate::failure::Failure;

/// The most files that starting one rank needs for a moment: the ends of its pipes, its log, and
/// the pipe on which exec reports.
const WHILE_STARTING: u64 = 12;

/// The most files that the tool itself opens for a job of one node: its signals, and the server of
/// the store with its listeners and its own connections, the bell of the output, and the input of a
/// rank.
const OWN: u64 = 18;

/// How many ranks there are, for the number of files that they need.
#[derive(Clone, Copy)]
pub struct Ranks {
    /// The ranks on this node.
    pub here: u32,
    /// The ranks in the job where the job's store is in this process, and 0 elsewhere.
    pub served: u32,
    /// The tools of the job, one for each node.
    pub tools: u32,
}

/// Makes room for a job of one node, before this process has opened anything for it. Otherwise does
/// what [`make_room`] does.
pub fn make_room_for_one_node(ranks: u32, route: &Route) -> Result<Rlimit, Failure> {
    make_room_beside(OWN, Ranks { here: ranks, served: ranks, tools: 1 }, route)
}

/// Raises this process's soft limit as far as the job needs it, and returns the limit as it was,
/// for the ranks to get it back. Fails where the hard limit is too low, before any rank is started.
pub fn make_room(ranks: Ranks, route: &Route) -> Result<Rlimit, Failure> {
    make_room_beside(0, ranks, route)
}

/// Raises this process's soft limit to the hard one, for a subcommand that starts no other program.
pub fn make_most_room() {
    let before = getrlimit(Resource::Nofile);
    raise(before, before.maximum);
}

/// Sets this process's soft limit. Returns whether this was possible.
fn raise(before: Rlimit, soft: Option<u64>) -> bool {
    setrlimit(Resource::Nofile, Rlimit { current: soft, maximum: before.maximum }).is_ok()
}

fn make_room_beside(own: u64, ranks: Ranks, route: &Route) -> Result<Rlimit, Failure> {
    let before = getrlimit(Resource::Nofile);
    let open = match std::fs::read_dir("/proc/self/fd") {
        // The folder itself is one of the open files.
        Ok(files) => (files.count() as u64).saturating_sub(1),
        // All are in use, so there are as many as the limit allows.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::MFILE) => before.current.unwrap_or_default(),
        Err(_) => 0,
    };
    let output = route.files_per_rank() * u64::from(ranks.here);
    // In the store each rank has a connection, and each tool has one.
    let store = if ranks.served > 0 { u64::from(ranks.served) + u64::from(ranks.tools) } else { 0 };
    let needed = open + own + output + store + WHILE_STARTING;
    let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if is_enough(before.current) {
        return Ok(before);
    }
    if is_enough(before.maximum) && raise(before, Some(needed)) {
        return Ok(before);
    }
    let limit = before.maximum.or(before.current).unwrap_or_default();
    Err(Failure::new(
        1,
        format!(
            "{} ranks on this host need {needed} open files in devicemesh run ({output} for their output, {store} for their connections to the store), and the limit is {limit}: raise it with `ulimit -n {needed}`, or start fewer ranks here",
            ranks.here
        ),
    ))
}
