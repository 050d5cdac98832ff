//! `devicemesh run --hosts`: starts an agent on each host, and ends all when one fails.
//!
//! ```text
//! starter         devicemesh run --hosts alpha,beta  the command of the user
//!   | ssh beta    one process for each host, but none for the starter's own host
//! agent           devicemesh agent                   says hello, and reads its orders from stdin
//!   | exec        the agent becomes the node
//! node            devicemesh run --agent ...         meets the other nodes, and starts its ranks
//! ```
//!
//! The orders are the command line, the environment and the secret. They travel over the agent's
//! standard input, so other users do not see them on a command line. The starter keeps the agent's
//! standard input open. When this input ends, the node ends its ranks, so nothing outlives the
//! starter or its connection. Standard error carries the node's messages, and marks (see
//! [`words`]) for the starter.
//!
//! The starter has a second process, as a node has, so that no ssh outlives it (see
//! [`guard`](super::guard)).

mod again;
mod agent;
mod control;
mod dry_run;
mod end;
mod failures;
mod forward;
mod job;
mod list;
mod losses;
mod lost_hosts;
mod node;
mod options;
mod plan;
mod process;
mod starter;
mod words;

pub use agent::agent;
pub use control::{Control, Order, when_without_starter};
pub use dry_run::show;
pub use options::Hosts;
pub use starter::start;
pub use words::{Said, Share};
