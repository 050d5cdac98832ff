//! A host of the job, as the starter sees it.

use std::time::{Duration, Instant};

use super::plan::Planned;
use super::process::Process;

/// The state of a host.
#[derive(PartialEq)]
pub enum State {
    /// Its agent is not started.
    Planned,
    /// Its agent has not said hello.
    Starting,
    /// Its agent has said hello and this free port.
    Ready(u16),
    /// Its agent has its orders, and has not become the node yet.
    Ordered,
    /// Its node runs.
    Working,
    /// Its node has ended with this exit code. The process may still run.
    Ended(u8),
    /// The host is done: nothing more is expected from it.
    Lost,
}

/// A host with its node, and the process that reaches it.
pub struct Node {
    pub planned: Planned,
    /// `None` before the agent is started, and when the process has ended.
    pub process: Option<Process>,
    pub state: State,
    /// When the agent was started.
    pub began: Instant,
    /// The network that the agent has named in its hello. Empty before the hello, and where the
    /// agent does not know its network.
    pub network: String,
    /// The moment by which the last rank there is killed, where the connection has failed: the node
    /// may notice the failure late. `None` elsewhere.
    pub ends_by: Option<Instant>,
    /// The number under which the node came to the job's store, once it has met the others. A node
    /// that is started again has a higher one.
    pub arrival: Option<u32>,
    /// Whether the host is lost and the job goes on without its ranks (`--restart rank`). It ends
    /// when a node there has met the others again.
    pub is_left_behind: bool,
    /// How often the node was lost, and was or will be started again.
    pub restarts: u32,
    /// How often the starter has tried to start it again since it was lost last.
    pub tries: u32,
    /// When the next try begins; `None` where none is planned.
    pub again: Option<Instant>,
}

impl Node {
    pub fn new(planned: Planned) -> Node {
        Node {
            planned,
            process: None,
            state: State::Planned,
            began: Instant::now(),
            network: String::new(),
            ends_by: None,
            arrival: None,
            is_left_behind: false,
            restarts: 0,
            tries: 0,
            again: None,
        }
    }

    /// The name of the host, as the list of hosts has it.
    pub fn name(&self) -> &str {
        self.planned.host.name()
    }

    /// The node for messages: "node 1 (beta)". `index` is its number.
    pub fn numbered(&self, index: usize) -> String {
        format!("node {index} ({})", self.name())
    }

    /// The text that ssh and the login shell have printed for a host whose agent has not said
    /// hello. `None` for other hosts, and where they have printed nothing.
    pub fn printed(&self) -> Option<String> {
        let process = self.process.as_ref().filter(|_| self.state == State::Starting);
        process.map(Process::words).filter(|words| !words.is_empty())
    }

    /// Whether the job waits for the host to say hello. It does not wait for one that was lost.
    pub fn is_silent(&self) -> bool {
        !self.is_left_behind && matches!(self.state, State::Planned | State::Starting)
    }

    /// Whether the host gives no answer, although the command that reaches it has had that time to
    /// connect. ssh would have given up after it.
    pub fn is_connected(&self, limit: Duration) -> bool {
        self.state == State::Starting && self.began.elapsed() > limit
    }

    /// Whether the host may still turn out to be unable to take part.
    pub fn is_open(&self) -> bool {
        self.is_silent() || (!self.is_left_behind && self.state == State::Ordered)
    }

    /// Whether the host has its orders, so that a node may run there.
    pub fn has_orders(&self) -> bool {
        matches!(self.state, State::Ordered | State::Working)
    }

    /// The host as the user wrote it, maybe with a login: "anna@beta".
    pub fn target(&self) -> &str {
        &self.planned.host.target
    }

    /// The program that reaches the host, for messages: "ssh".
    pub fn program(&self) -> std::borrow::Cow<'_, str> {
        if self.planned.is_local { "the agent".into() } else { self.planned.command[0].to_string_lossy() }
    }
}
