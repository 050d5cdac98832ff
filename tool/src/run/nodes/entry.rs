//! The entry in which each node tells the others about itself, and the number that the node gets.

use std::fmt;
use std::time::Duration;

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Store, TcpStore};
use devicemesh::wait::Wait;
use serde::{Deserialize, Serialize};

use super::keys;
use super::peer::from_a_peer;
use crate::run::cause::Cause;
use crate::run::rendezvous::Rendezvous;

/// How many nodes a message lists.
const LISTED: usize = 8;

/// A node as it describes itself. All of this except `host`, `pid`, `node` and `ranks` must be the
/// same on all nodes.
#[derive(Serialize, Deserialize)]
pub struct Entry {
    /// The name of its host.
    pub host: String,
    /// The process id of its tool.
    pub pid: u32,
    /// Its `--nnodes`.
    pub nodes: u32,
    /// Its `--node-rank`, where it has one.
    pub node: Option<u32>,
    /// The number of its ranks.
    pub ranks: u32,
    /// Its `--rdzv-id`, where it has one.
    pub id: Option<String>,
    /// The version of its tool.
    pub version: String,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.host, self.pid)
    }
}

impl Entry {
    /// This node.
    pub fn of_this_node(rendezvous: &Rendezvous) -> Entry {
        Entry {
            host: host_name(),
            pid: std::process::id(),
            nodes: rendezvous.nodes,
            node: rendezvous.node,
            ranks: rendezvous.ranks,
            id: rendezvous.id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Reads what a node has left in the store.
    pub fn read(text: &[u8]) -> Result<Entry, Cause> {
        from_a_peer(text).map_err(|error| {
            let message = format!("a node says {:?} of itself: {error}", String::from_utf8_lossy(text));
            Cause::Refused { message }
        })
    }

    /// Why this node and another one are not nodes of one job, if they are not.
    pub fn disagreement(&self, other: &Entry) -> Option<String> {
        let id = |entry: &Entry| entry.id.as_ref().map_or("none".to_owned(), |id| format!("{id:?}"));
        if self.version != other.version {
            return Some(format!(
                "{self} has devicemesh {}, {other} has {}: install the same on all nodes",
                self.version, other.version
            ));
        }
        if self.id != other.id {
            return Some(format!(
                "{self} has --rdzv-id {}, {other} has {}: two jobs need two ports in --rdzv-endpoint",
                id(self),
                id(other)
            ));
        }
        if self.nodes != other.nodes {
            return Some(format!(
                "{self} has --nnodes {}, {other} has --nnodes {}: say the same on all nodes",
                self.nodes, other.nodes
            ));
        }
        match (self.node, other.node) {
            (Some(mine), Some(theirs)) if mine == theirs => Some(format!(
                "{self} and {other} both have --node-rank {mine}: number the nodes 0 to {}, or leave --node-rank out",
                self.nodes - 1
            )),
            _ => None,
        }
    }
}

/// The number of each node, in the order of arrival. A node has the number that it claims, and the
/// others get the numbers that are left.
pub fn numbers(entries: &[Entry]) -> Vec<u32> {
    let claimed: Vec<u32> = entries.iter().filter_map(|entry| entry.node).collect();
    let mut free = (0..).filter(|node| !claimed.contains(node));
    entries.iter().map(|entry| entry.node.or_else(|| free.next()).unwrap_or_default()).collect()
}

/// Some of the nodes, with the numbers that they claim, for messages.
pub fn list(entries: &[Entry]) -> String {
    let text = |entry: &Entry| match entry.node {
        Some(node) => format!("node {node} on {entry}"),
        None => format!("one on {entry}"),
    };
    let mut names: Vec<String> = entries.iter().take(LISTED).map(text).collect();
    if entries.len() > LISTED {
        names.push(format!("{} more", entries.len() - LISTED));
    }
    names.join(", ")
}

/// The n-th node to arrive, as "node 1 (beta)". Asks the store, for that time at most each time.
pub fn name(store: &TcpStore, nodes: u32, arrival: u32, timeout: Duration) -> String {
    let read = |arrival: u32| {
        let text = store.try_get(&keys::node(arrival), &Wait::after(timeout)).ok().flatten()?;
        Entry::read(&text).ok()
    };
    let entries: Option<Vec<Entry>> = (1..=nodes).map(read).collect();
    match entries {
        Some(entries) => {
            let index = arrival as usize - 1;
            format!("node {} ({})", numbers(&entries)[index], entries[index].host)
        }
        None => format!("node number {arrival} to come"),
    }
}
