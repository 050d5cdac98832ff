//! The messages between the starter and an agent.
//!
//! The agent writes marks into its standard error, between the lines of the ranks: a mark is a line
//! with [`MARK`] and JSON. On standard output one mark separates what the login shell has printed
//! from the ranks' text. The starter writes the orders and then words into the agent's standard
//! input, each of them a line of JSON.

use std::ffi::OsString;
use std::io::Write;

use serde::{Deserialize, Serialize};

/// The beginning of a mark. Its first character stands in no text, so the starter also finds a
/// mark that follows half a line of a rank.
pub const MARK: &str = "\x1fdevicemesh-agent ";
/// The line by which the agent begins the ranks' text on standard output.
pub const BEGINS: &str = "\x1fdevicemesh-agent begins\n";

/// A message of an agent to the starter.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The agent runs. `port` is a port of its host that was free just now. `network` is what
    /// [`network`](crate::run::rendezvous::network) returns in the agent.
    Hello {
        version: String,
        port: u16,
        #[serde(default)]
        network: String,
    },
    /// The agent cannot carry out its orders, for this reason.
    Cannot { message: String },
    /// The agent has become the node.
    Begun,
    /// The job ends for this cause. The node also says the cause to the user.
    Ending { cause: String },
    /// A node has gone, as the text says. That node may be the one that says it. `arrival` is the
    /// number under which the node came to the job's store; `None` where the node is the one that
    /// says it.
    Gone {
        node: u32,
        #[serde(default)]
        arrival: Option<u32>,
        text: String,
    },
    /// The process of this node was killed, as the text says. The node's keeper, which guards that
    /// process, says so.
    Killed { text: String },
    /// The node has ended with that exit code.
    Ended { code: u8 },
    /// The node has met all the others, so that ranks may run. `arrival` is the number under which
    /// it came to the job's store.
    Met {
        #[serde(default)]
        arrival: Option<u32>,
    },
}

impl Said {
    /// Writes this as a mark to standard error. An error is ignored: without a starter nobody needs
    /// the mark.
    pub fn say(&self) {
        let _ = std::io::stderr().lock().write_all(self.mark().as_bytes());
    }

    /// Returns the line that [`say`](Said::say) writes: the mark and this message.
    pub fn mark(&self) -> String {
        format!("{MARK}{}\n", serde_json::to_string(self).unwrap_or_default())
    }
}

/// The orders for the agent of a host.
#[derive(Serialize, Deserialize)]
pub struct Orders {
    /// The starter's working folder.
    pub directory: OsString,
    /// Variables for the node and its ranks.
    pub environment: Vec<(OsString, OsString)>,
    /// The command line of the starter behind `devicemesh run`.
    pub arguments: Vec<OsString>,
    pub share: Share,
}

/// A node's share of the job.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct Share {
    /// The number of this node.
    pub node: u32,
    /// The names of all hosts of the job.
    pub hosts: Vec<String>,
    /// The number of ranks here, where the list of hosts has it.
    pub ranks: Option<u32>,
    /// Where the nodes meet.
    pub host: String,
    pub port: u16,
    /// The job's name.
    pub id: String,
    /// The host of the starter.
    pub starter: String,
}

impl Share {
    /// A node's name for messages: "node 1 (beta)".
    pub fn name_of(&self, node: u32) -> String {
        format!("node {node} ({})", self.hosts.get(node as usize).map_or("", String::as_str))
    }

    pub fn read(text: &str) -> Result<Share, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

/// A message of the starter after the orders.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// The starter got this signal.
    Signal(i32),
    /// The starter got this signal as a second one, so the node kills its ranks.
    AtOnce(i32),
    /// The job ends, and the starter has said why. `lost` is the number of the node that is lost,
    /// where that is why.
    End { lost: Option<u32> },
    /// The starter is alive. It sends this word every few seconds, so that a node notices when the
    /// starter is gone.
    Alive,
}

/// A line for the agent's standard input.
pub fn line(word: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(word).unwrap_or_default();
    line.push(b'\n');
    line
}
