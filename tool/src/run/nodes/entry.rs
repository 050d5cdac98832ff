//! The entry in which each node tells the others about itself, and the number that the node gets.

use std::fmt;
use std::time::{Duration, SystemTime};

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::split_last_word;
use devicemesh::wait::Wait;
use serde::{Deserialize, Serialize};

use super::board::Board;
use super::keys;
use super::peer::from_a_peer;
use crate::run::assignment::run_name;
use crate::run::cause::Cause;
use crate::run::identity::Identity;
use crate::run::rendezvous::Rendezvous;
use crate::run::restart::Standing;
use crate::words::listed;

/// How many nodes a message lists.
const LISTED: usize = 8;

/// A node as it describes itself.
#[derive(Clone, Serialize, Deserialize)]
pub struct Entry {
    /// The name of its host.
    pub host: String,
    /// The process id of its tool.
    pub pid: u32,
    /// The name that it gives to this run ([`run_name`]). The name that the first node gives
    /// counts.
    pub run: String,
    /// The name that the job had at its first start (TORCHELASTIC_RUN_ID), where it starts again.
    #[serde(default)]
    pub run_id: Option<String>,
    /// Its `--nnodes`, the same on all nodes.
    pub nodes: u32,
    /// Its `--node-rank`, where it has one.
    pub node: Option<u32>,
    /// The number of its ranks.
    pub ranks: u32,
    /// Its `--rdzv-id`, where it has one.
    pub id: Option<String>,
    /// The version of its tool, the same on all nodes.
    pub version: String,
    /// The job that it belongs to. Tools before 0.3 do not say it.
    #[serde(default)]
    pub identity: Identity,
    /// Its spares, its options on restarts, and how often it has seen the job start again. Tools
    /// before 0.3 do not say it.
    #[serde(default)]
    pub restart: Standing,
}

/// The word that the server passes on when the connections of a tool end.
pub struct LastWord {
    /// The tool's arrival number. The first is 1.
    pub arrival: u32,
    /// True where the tool's connections were closed, so the tool was killed. False where nothing
    /// came from its host any more, so the host or the network is down.
    pub is_killed: bool,
}

impl LastWord {
    /// Reads the word. `None` where it has no arrival number.
    pub fn read(text: &[u8]) -> Option<LastWord> {
        let (word, is_silent) = split_last_word(text);
        let arrival = std::str::from_utf8(word).ok()?.parse().ok().filter(|arrival| *arrival > 0)?;
        Some(LastWord { arrival, is_killed: !is_silent })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.host, self.pid)
    }
}

impl Entry {
    /// This node.
    pub fn of_this_node(rendezvous: &Rendezvous) -> Entry {
        let run = rendezvous.run.as_ref();
        Entry {
            host: host_name(),
            pid: std::process::id(),
            run: run.map_or_else(|| run_name(SystemTime::now(), std::process::id()), |run| run.folder.clone()),
            run_id: run.map(|run| run.id.clone()),
            nodes: rendezvous.nodes,
            node: rendezvous.node,
            ranks: rendezvous.ranks,
            id: rendezvous.id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            identity: rendezvous.identity.clone(),
            restart: rendezvous.restart,
        }
    }

    /// Reads what a node has left in the store.
    pub fn read(text: &[u8]) -> Result<Entry, Cause> {
        from_a_peer(text).map_err(|error| {
            let message = format!("a node says {:?} of itself: {error}", String::from_utf8_lossy(text));
            Cause::Refused { message }
        })
    }

    /// Returns why this node and the node that serves the store belong to two jobs, or `None` if
    /// they belong to one.
    pub fn strangeness(&self, first: &Entry, rendezvous: &Rendezvous) -> Option<String> {
        let id = |entry: &Entry| entry.id.as_ref().map_or("none".to_owned(), |id| format!("{id:?}"));
        let same_id = self.id.is_some() && self.id == first.id;
        let (why, advice) = if self.id != first.id {
            (format!("their --rdzv-id are {} and {}", id(first), id(self)), "")
        } else {
            let advice = if same_id { "" } else { "; if they are one job, give both the same --rdzv-id" };
            (self.identity.difference(&first.identity, same_id)?.to_owned(), advice)
        };
        Some(format!(
            "{} serves {}, while this is {} on {self}: {why}. Two jobs need two {}{advice}",
            rendezvous.store(),
            first.job(),
            self.identity.describe(self.nodes),
            if rendezvous.has_service() { "`devicemesh store`s at one time" } else { "ports in --rdzv-endpoint" }
        ))
    }

    /// The job of this node for messages, with its age and its host.
    pub fn job(&self) -> String {
        format!("{}, started {} ago on {self}", self.identity.describe(self.nodes), self.identity.age())
    }

    /// Returns why this node and another one of the same job do not fit together, or `None` if
    /// they fit.
    pub fn disagreement(&self, other: &Entry) -> Option<String> {
        if self.version != other.version {
            return Some(format!(
                "{self} has devicemesh {}, {other} has {}: install the same on all nodes",
                self.version, other.version
            ));
        }
        if self.nodes != other.nodes {
            return Some(format!(
                "{self} has --nnodes {}, {other} has --nnodes {}: say the same on all nodes",
                self.nodes, other.nodes
            ));
        }
        if !self.restart.fits(&other.restart) {
            let (mine, theirs) = (&self.restart, &other.restart);
            return Some(format!("{self} has {mine}, {other} has {theirs}: say the same on all nodes"));
        }
        match (self.node, other.node) {
            (Some(mine), Some(theirs)) if mine == theirs && self.nodes > 1 => Some(format!(
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
    listed(entries.iter().map(text), LISTED)
}

/// Returns the cause that says that a node has gone, as its [`LastWord`] says. The entries of all
/// nodes in the store give its name, as "node 1 (beta)". To read one entry takes `timeout` at most.
pub fn gone(store: &Board, nodes: u32, LastWord { arrival, is_killed }: LastWord, timeout: Duration) -> Cause {
    let read = |arrival: u32| {
        let text = store.try_get(&keys::node(arrival), &Wait::after(timeout)).ok().flatten()?;
        Entry::read(&text).ok()
    };
    let entries: Option<Vec<Entry>> = (1..=nodes).map(read).collect();
    match entries {
        Some(entries) => {
            let index = arrival as usize - 1;
            let (number, entry) = (numbers(&entries)[index], &entries[index]);
            let node = format!("node {number} ({})", entry.host);
            Cause::Gone { node, number: Some(number), is_killed: Some(is_killed) }
        }
        None => Cause::Gone {
            node: format!("the node that arrived as number {arrival}"),
            number: None,
            is_killed: Some(is_killed),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32, version: &str, nodes: u32, node: Option<u32>) -> Entry {
        let (host, run, version) = ("alpha".to_owned(), "run".to_owned(), version.to_owned());
        Entry {
            host,
            pid,
            run,
            nodes,
            node,
            ranks: 1,
            id: None,
            version,
            restart: Standing::default(),
            run_id: None,
            identity: Identity::default(),
        }
    }

    #[test]
    fn nodes_that_do_not_fit_together_are_told_with_their_values() {
        let first = entry(7, "0.2.0", 2, Some(0));
        let said = |other: Entry| first.disagreement(&other);
        assert_eq!(said(entry(8, "0.2.0", 2, Some(1))), None);
        assert_eq!(said(entry(8, "0.2.0", 2, None)), None);
        for (other, text) in [
            (entry(8, "0.3.0", 2, Some(1)), "alpha (pid 7) has devicemesh 0.2.0, alpha (pid 8) has 0.3.0: install"),
            (entry(8, "0.2.0", 3, Some(1)), "alpha (pid 7) has --nnodes 2, alpha (pid 8) has --nnodes 3: say the same"),
            (entry(8, "0.2.0", 2, Some(0)), "alpha (pid 7) and alpha (pid 8) both have --node-rank 0: number"),
        ] {
            assert!(said(other).is_some_and(|said| said.starts_with(text)), "{text}");
        }
    }
}
