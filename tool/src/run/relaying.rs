//! The relay of this node, by which its ranks reach the store in a large job.

use std::time::Duration;

use devicemesh::rendezvous::store::{Relay, Secret};
use devicemesh::wait::Wait;

use super::assignment::Assignment;
use crate::failure::Failure;

/// The variable that says from how many ranks on each node has a relay; 0 for never.
pub const FROM: &str = "DM_STORE_RELAY_FROM";

/// From how many ranks on each node has a relay, where the variable does not say so. A server takes
/// so many connections without effort, and a relay makes each of its answers come a little later.
const MANY: u32 = 1024;

/// How long the store may take to let the relay in. The node has just met the others there.
const SOON: Duration = Duration::from_secs(5);

/// Returns from how many ranks on each node has a relay.
pub fn threshold() -> Result<u32, Failure> {
    match std::env::var(FROM) {
        Ok(text) if !text.is_empty() => text.parse().map_err(|_| {
            Failure::new(2, format!("{FROM} is {text:?}, and must be a number of ranks (0: no node has a relay)"))
        }),
        _ => Ok(MANY),
    }
}

/// Starts the relay of this node, where the job is large enough, and tells the ranks of it. `from` is
/// the [`threshold`], and `serves` says whether this node serves the store. It is no failure if there can be no relay, because the
/// ranks then connect to the store themselves.
pub fn relay_for(assignment: &mut Assignment, from: u32, serves: bool) -> Result<Option<Relay>, Failure> {
    // The ranks of the node that serves the store reach it without the network.
    if from == 0 || assignment.world_size < from || assignment.nodes < 2 || serves {
        return Ok(None);
    }
    let secret = Secret::from_environment().map_err(|error| Failure::new(1, error.message()))?;
    let relay = Relay::start(&assignment.host, assignment.port, secret, &Wait::after(SOON)).ok().flatten();
    assignment.relay = relay.as_ref().map(|relay| relay.variable().to_owned());
    Ok(relay)
}
