//! The place where the nodes of a job meet, and what this node says there.

use std::time::Duration;

use super::identity::Identity;

/// The meeting of the nodes, as the command line or the launcher describes it.
pub struct Rendezvous {
    /// The host of the store in which the nodes meet.
    pub host: String,
    /// The port of that store. 0 where there is one node alone, which takes any free port.
    pub port: u16,
    /// The number of nodes in the job.
    pub nodes: u32,
    /// This node's number, from `--node-rank` or the launcher. `None` leaves it to the order of
    /// arrival.
    pub node: Option<u32>,
    /// The number of ranks on this node.
    pub ranks: u32,
    /// The job's name from `--rdzv-id` or the launcher, which is the same on all nodes.
    pub id: Option<String>,
    /// How long a node waits for the others.
    pub timeout: Duration,
    /// The user and the command of the job.
    pub identity: Identity,
    /// The name of each node's host by the node's number, where the launcher knows them. The list
    /// is empty where the launcher does not know them.
    pub hosts: Vec<String>,
    /// Whether every node says for which nodes it waits. Where one terminal shows all nodes, only
    /// the node that serves the store does.
    pub all_report: bool,
    /// Whether the endpoint's name may be unknown until `timeout`, because the name server learns
    /// it when the host starts.
    pub name_comes_late: bool,
}

impl Rendezvous {
    /// Whether this node meets nobody, because the job has one node and no endpoint.
    pub fn is_private(&self) -> bool {
        self.port == 0
    }

    /// The store's address for messages.
    pub fn store(&self) -> String {
        match self.host.contains(':') {
            true => format!("tcp://[{}]:{}", self.host, self.port),
            false => format!("tcp://{}:{}", self.host, self.port),
        }
    }
}
