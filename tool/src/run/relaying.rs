//! The relay of this node, by which its ranks reach the store in a large job.

use std::env::VarError;
use std::time::Duration;

use devicemesh::rendezvous::store::{Relay, Secret};
use devicemesh::wait::Wait;

use super::assignment::Assignment;
use crate::failure::Failure;

/// The variable for the number of ranks from which on each node has a relay. With 0 no node has
/// one.
const FROM: &str = "DM_STORE_RELAY_FROM";

/// The number of ranks from which on each node has a relay, if the variable is not set. A server
/// serves fewer connections without effort, and a relay delays each answer of the server a little.
const MANY: u32 = 1024;

/// How long the store may take to let the relay in. The node has just met the others there.
const SOON: Duration = Duration::from_secs(5);

/// Returns the number of ranks from which on each node has a relay.
pub fn threshold() -> Result<u32, Failure> {
    match std::env::var(FROM) {
        Ok(text) if !text.is_empty() => text.parse().map_err(|_| {
            Failure::new(2, format!("{FROM} is {text:?}, and must be a number of ranks (0: no node has a relay)"))
        }),
        Err(VarError::NotUnicode(_)) => Err(Failure::new(2, format!("{FROM} is not valid UTF-8"))),
        _ => Ok(MANY),
    }
}

/// Starts the relay of this node, where the job is large enough, and tells the ranks of it. `from`
/// is the [`threshold`]. `serves` says whether this node serves the store. Where there can be no
/// relay, the ranks connect to the store themselves, and `say` says why.
pub fn start_relay(
    assignment: &mut Assignment,
    from: u32,
    serves: bool,
    say: impl FnOnce(&str),
) -> Result<Option<Relay>, Failure> {
    // The ranks of the node that serves the store reach it without the network.
    if from == 0 || assignment.world_size < from || assignment.nodes < 2 || serves {
        return Ok(None);
    }
    let secret = Secret::from_environment().map_err(|error| Failure::new(1, error.message()))?;
    let started = Relay::start(&assignment.host, assignment.port, secret, &Wait::after(SOON));
    let relay = started.unwrap_or_else(|error| {
        say(&format!("the ranks of this node share no connection to the store: {}", error.message()));
        None
    });
    assignment.relay = relay.as_ref().map(|relay| relay.variable().to_owned());
    Ok(relay)
}
