//! The place where the nodes of a job meet, and what this node says there.

use std::time::Duration;

/// The meeting of the nodes, as the command line describes it.
pub struct Rendezvous {
    /// The host of the store in which the nodes meet.
    pub host: String,
    /// The port of that store. 0 where there is one node alone, which takes any free port.
    pub port: u16,
    /// The number of nodes in the job.
    pub nodes: u32,
    /// This node's number from `--node-rank`. `None` leaves it to the order of arrival.
    pub node: Option<u32>,
    /// The number of ranks on this node.
    pub ranks: u32,
    /// The job's name from `--rdzv-id`, which is the same on all nodes.
    pub id: Option<String>,
    /// How long a node waits for the others.
    pub timeout: Duration,
}

impl Rendezvous {
    /// The store's address for messages.
    pub fn store(&self) -> String {
        match self.host.contains(':') {
            true => format!("tcp://[{}]:{}", self.host, self.port),
            false => format!("tcp://{}:{}", self.host, self.port),
        }
    }
}
