//! The state of a job on several hosts, which its starter keeps.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Instant;

use devicemesh::printable::printable;

use super::failures::{Failures, LISTED};
use super::losses::Losses;
use super::node::Node;
use super::words::{Word, line};
use crate::run::options::Options;
use crate::run::output::Sinks;
use crate::run::rendezvous::is_loopback;
use crate::run::signals::Signals;
use crate::style::Style;
use crate::words::listed;

/// A job on several hosts.
pub struct Starter<'a> {
    pub options: &'a Options,
    pub nodes: Vec<Node>,
    pub signals: Signals,
    /// The starter's standard output and standard error. Threads write to them, because a reader
    /// may stop for long.
    pub sinks: Sinks,
    /// When the starter began.
    pub began: Instant,
    pub style: Style,
    /// The folder in which the user is, and the variables that the nodes get.
    pub directory: OsString,
    pub environment: Vec<(OsString, OsString)>,
    pub meeting: String,
    pub port: Option<u16>,
    /// When the agents must have said hello.
    pub deadline: Instant,
    /// When the user is told next for which hosts the starter waits.
    pub next_note: Instant,
    /// When the processes that are left are killed, once the job ends.
    pub limit: Option<Instant>,
    /// The exit code, where the starter itself ends the job.
    pub code: Option<u8>,
    /// Whether all nodes have met, so that they tell each other of a failure.
    pub has_met: bool,
    /// The number of signals by which the user has asked for the end, the first of them, and when
    /// the last of them came. One that comes too early after another one does not count.
    pub interrupts: u32,
    pub first_signal: Option<i32>,
    pub asked: Option<Instant>,
    /// Whether the job is stopped (Ctrl-Z). No node gets its orders then.
    pub is_stopped: bool,
    /// Whether the user knows that two names of the list are one host.
    pub is_twin_told: bool,
    /// When the nodes get the next sign of life.
    pub next_alive: Instant,
    /// The hosts that cannot take part. The job ends when the other hosts have had their time.
    pub failures: Failures,
    /// The hosts that the job has lost.
    pub losses: Losses,
    /// Whether a `devicemesh store` serves the store, and not the first node.
    pub has_service: bool,
    /// The line that says why the job ends: the starter's own line, or a line of the node `teller`.
    /// The starter repeats this line at the end if other lines followed it.
    pub reason: Option<String>,
    /// Whether other lines followed the reason.
    pub is_reason_above: bool,
    /// The first node that has said why the job ends, which is then the reason. The loss of a host
    /// after that is not the reason.
    pub teller: Option<usize>,
    /// The messages of nodes that were passed on, each with the first node that has sent it,
    /// because several nodes may send one message.
    pub passed_on: HashMap<String, usize>,
}

/// Returns the part of a message before the first "; ". The rest differs between nodes that say the
/// same cause, because it has the number of ranks that a node ends.
pub fn without_end(message: &str) -> &str {
    message.split("; ").next().unwrap_or_default()
}

impl Starter<'_> {
    pub fn say(&self, text: &str) {
        self.sinks.say(&format!("devicemesh run: {}", printable(text)));
    }

    /// Says something that is not the reason for the end. If it stands below the reason, the
    /// starter repeats the reason at the end.
    pub fn say_more(&mut self, text: &str) {
        self.say(text);
        self.is_reason_above |= self.reason.is_some();
    }

    /// Some hosts as the user wrote them, for messages.
    pub fn names(&self, wanted: impl Fn(&Node) -> bool) -> String {
        listed(self.nodes.iter().filter(|node| wanted(node)).map(Node::target), LISTED)
    }

    /// Warns once if this host, which has just said hello, is in the list twice, by two names.
    /// Loopback addresses are exempt, because they are meant to be this machine several times.
    pub fn warn_of_twin(&mut self, index: usize) {
        let new = &self.nodes[index];
        let is_meant = |node: &Node| is_loopback(node.name());
        if self.is_twin_told || new.network.is_empty() || is_meant(new) || !self.options.hosts.has_ssh() {
            return;
        }
        let is_twin = |at: usize| at != index && self.nodes[at].network == new.network && !is_meant(&self.nodes[at]);
        let Some(twin) = (0..self.nodes.len()).find(|at| is_twin(*at)) else { return };
        let (first, second) = (&self.nodes[index.min(twin)], &self.nodes[index.max(twin)]);
        let (target, other) = (first.target(), second.target());
        let ranks = |node: &Node| node.planned.host.ranks;
        let sum = match (ranks(first), ranks(second)) {
            (Some(one), Some(two)) => (one + two).to_string(),
            _ => "N".to_owned(),
        };
        self.say(&format!(
            "{target} and {other} are one host, and LOCAL_RANK starts at 0 for each of the two, so their ranks share devices; write {target}:{sum} in place of both"
        ));
        self.is_twin_told = true;
    }

    /// Sends a word to all nodes that have their orders.
    pub fn send(&mut self, word: Word) {
        for node in self.nodes.iter_mut().filter(|node| node.has_orders()) {
            if let Some(process) = &mut node.process {
                process.send(&line(&word));
            }
        }
    }
}
