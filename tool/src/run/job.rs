//! A job as this node sees it.

use std::io::{self, IsTerminal};
use std::time::Instant;

use devicemesh::rendezvous::host_name;
use rustix::process::Rlimit;

use super::assignment::Assignment;
use super::binding::Binding;
use super::cause::{Cause, How};
use super::hosts::Control;
use super::nodes::Nodes;
use super::options::Options;
use super::output::Output;
use super::ranks::Ranks;
use super::rendezvous::Rendezvous;
use super::restart::{Restarts, Unit};
use super::signals::Signals;
use crate::check;
use crate::style::Style;

/// The phase of the end of a job.
#[derive(Clone, Copy, PartialEq)]
pub enum Phase {
    Running,
    /// The ranks may end by themselves. They get SIGTERM at that moment.
    Grace(Instant),
    /// The ranks have got a signal that ends them. They get SIGKILL at that moment.
    Terminating(Instant),
    /// The ranks have got SIGKILL, or have ended.
    Killed,
}

/// The state of a job. [`end`](super::end) ends the job, and [`report`](super::report) writes the
/// messages about it.
pub struct Job<'a> {
    pub options: &'a Options,
    /// The CPUs and the memory that the ranks of this node get.
    pub binding: Binding,
    pub signals: Signals,
    pub output: Output,
    /// The other nodes. `None` in a job of one node.
    pub nodes: Option<Nodes>,
    /// The connection to the starter, where `--hosts` has started this node.
    pub control: Option<Control>,
    /// Whether the starter ends the job, and has said why.
    pub is_ended_by_starter: bool,
    /// The limit on open files that the ranks get. In a job of several nodes it is known when the
    /// nodes have met.
    pub open_files: Option<Rlimit>,
    /// This node's share of the job, once the nodes have met.
    pub assignment: Option<Assignment>,
    /// The ranks of this node, once they are started.
    pub ranks: Option<Ranks>,
    /// What was started again, and is to be.
    pub restarts: Restarts,
    /// The name of this node in a cause that it reports. `None` in a job of one node.
    pub reporter: Option<String>,
    /// When `--timeout` passes. This moment holds for all attempts together. It moves only by the
    /// time in which the ranks are stopped. At this moment the wait for a slow reader of the output
    /// ends, too.
    pub timeout: Option<Instant>,
    /// When this node no longer serves the store for the other nodes, once its ranks have ended.
    pub deadline: Option<Instant>,
    pub phase: Phase,
    /// When the user is told which ranks have not ended since SIGKILL. `None` where none was sent,
    /// and once the user knows.
    pub next_look: Option<Instant>,
    /// Whether the user knows that ranks have not ended since SIGKILL.
    pub unended_is_told: bool,
    /// Whether the tool ends without the ranks that the kernel does not end.
    pub gives_up: bool,
    /// When a signal asked the tool to end the job. `None` while none has.
    pub asked: Option<Instant>,
    /// When the ranks were stopped (Ctrl-Z). `None` while they run.
    pub stopped: Option<Instant>,
    /// How many ranks of this node failed at the same time as the one that failed first.
    pub failed_together: usize,
    /// Why the job ends. `None` while nothing has ended it.
    pub cause: Option<Cause>,
    /// When this node tells the store again that its ranks have ended well. `None` where the store
    /// has heard it, or need not hear it yet.
    pub tell_again: Option<Instant>,
    /// Whether no other node needs the store any more.
    pub store_is_unused: bool,
    /// Whether the user was told that some of the output is lost.
    pub loss_is_told: bool,
    /// Whether the user knows that a rank is stopped because it has used the terminal.
    pub stop_is_told: bool,
    /// The style of the tool's own messages.
    pub style: Style,
}

impl<'a> Job<'a> {
    /// A job of this node alone, whose ranks are not started.
    pub fn new(
        options: &'a Options,
        rendezvous: &Rendezvous,
        binding: Binding,
        output: Output,
        signals: Signals,
    ) -> Job<'a> {
        Job {
            options,
            binding,
            signals,
            output,
            open_files: None,
            nodes: None,
            control: None,
            is_ended_by_starter: false,
            assignment: None,
            ranks: None,
            restarts: Restarts::new(rendezvous.restart),
            reporter: None,
            timeout: options.ending.timeout.map(|timeout| Instant::now() + timeout),
            deadline: None,
            phase: Phase::Running,
            next_look: None,
            unended_is_told: false,
            gives_up: false,
            asked: None,
            stopped: None,
            failed_together: 0,
            cause: None,
            tell_again: None,
            store_is_unused: false,
            loss_is_told: false,
            stop_is_told: false,
            style: Style::new(options.color, &std::io::stderr()),
        }
    }
}

impl Job<'_> {
    /// The number of ranks of this node that run.
    pub fn running(&self) -> usize {
        self.ranks.as_ref().map_or(0, Ranks::running)
    }

    /// Whether ranks of this node run, or are to be started again alone.
    pub fn is_busy(&self) -> bool {
        !self.gives_up && (self.running() > 0 || self.restarts.has_due())
    }

    /// Writes a message of one or more lines in one write.
    pub fn say(&self, text: &str) {
        self.output.say(&format!("devicemesh run: {text}"));
    }

    /// Writes a message about a key of the terminal (Ctrl-C, Ctrl-Z). The terminal echoes the key,
    /// maybe behind a line of the ranks that has no end. So the message begins a new line there.
    pub fn say_after_key(&self, text: &str) {
        let before = if io::stderr().is_terminal() { "\n" } else { "" };
        self.output.say(&format!("{before}devicemesh run: {text}"));
    }

    /// The word that says, in a job of several nodes, that a message is about the ranks of this
    /// node.
    pub fn here(&self) -> String {
        match (&self.options.hosts.agent, &self.reporter) {
            (Some(_), _) => format!(" on {}", host_name()),
            (None, Some(_)) => " here".to_owned(),
            (None, None) => String::new(),
        }
    }

    /// Whether the ranks have told the user of this end themselves.
    pub fn is_told(&self, how: How) -> bool {
        matches!(how, How::Exited(code) if check::tells_itself(&self.options.command, code))
    }

    /// Whether this node reports a cause to the user. Where one terminal shows all nodes, only
    /// node 0 does. But another node reports a cause that node 0 cannot know.
    pub fn tells(&self, cause: &Cause) -> bool {
        if matches!(cause, Cause::Rank { ended, log: None, .. } if self.is_told(ended.how)) {
            return false;
        }
        let Some(share) = &self.options.hosts.agent else { return true };
        let is_private = match cause {
            Cause::Lost { .. } => true,
            Cause::Ordered => return false,
            Cause::Refused { .. } => !self.nodes.as_ref().is_some_and(Nodes::is_admitted),
            _ => false,
        };
        !self.is_ended_by_starter && (share.node == 0 || is_private)
    }

    /// Whether the job goes on when a node is lost.
    pub fn goes_on_without_nodes(&self) -> bool {
        self.restarts.standing.unit == Some(Unit::Rank) && self.nodes.is_some()
    }

    /// The number of the node that the job has lost, where a starter tells the user of it.
    pub fn lost_node(&self, cause: &Cause) -> Option<u32> {
        cause.lost_node().filter(|_| self.control.is_some())
    }
}
