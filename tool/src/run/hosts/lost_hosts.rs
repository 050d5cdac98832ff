//! Handles the end of a node, and hosts that the job has lost.

use std::process::ExitStatus;
use std::time::Instant;

use devicemesh::printable::printable;

use super::control::SILENCE;
use super::failures::LISTED;
use super::job::{Starter, without_end};
use super::losses::Held;
use super::node::{Node, State};
use crate::run::cause::{Cause, How};
use crate::run::ending::TERM_TO_KILL;
use crate::run::identity::span;
use crate::run::restart::Unit;

/// The exit code of ssh where the connection fails.
const CONNECTION_FAILED: i32 = 255;

impl Starter<'_> {
    /// Handles the exit code of a node.
    pub fn node_ended(&mut self, index: usize, code: u8) {
        self.nodes[index].state = State::Ended(code);
        if self.nodes[index].is_left_behind {
            return;
        }
        self.losses.ended(index, code);
        self.limit_the_end();
        // Node 0 serves the store, and it ends last unless it has failed early. A node that fails
        // before all have met cannot tell the others, which would wait for it. And a node that does
        // not reach a service any more does not end the job of the others.
        let is_alone = self.has_service && self.teller == Some(index);
        if code != 0 && (index == 0 || !self.has_met || is_alone) {
            self.end(code);
        }
    }

    /// Whether the job goes on when this host is lost: with `--restart rank`, once the nodes have
    /// met, and unless the store is lost with the host.
    fn goes_on_without(&self, index: usize) -> bool {
        let is_for_ranks = self.options.restart.standing().unit == Some(Unit::Rank);
        let is_needed = index == 0 && !self.has_service;
        let may_go_on = is_for_ranks && self.has_met && !is_needed && !self.is_ending();
        self.nodes[index].is_left_behind || may_go_on
    }

    /// Goes on without a host that is lost. Its connection is closed, because a node there that is
    /// cut off from the others must end its ranks.
    fn leave_behind(&mut self, index: usize, text: &str) {
        let is_own = self.losses.is_own(index);
        let node = &mut self.nodes[index];
        if std::mem::replace(&mut node.is_left_behind, true) {
            return;
        }
        if let Some(process) = &node.process {
            process.kill();
            if !is_own && !node.planned.is_local {
                node.ends_by = Some(Instant::now() + SILENCE + TERM_TO_KILL);
            }
        }
        let (lost, rest) = (without_end(text), self.plan_return(index));
        self.say(&format!("{}; the job goes on without its ranks{rest}", printable(lost)));
        if self.nodes.iter().all(|node| node.is_left_behind) {
            self.give_reason("all hosts of the job are lost");
            self.end(1);
        }
    }

    /// Handles the end of the process that reaches a host.
    pub fn process_ended(&mut self, index: usize, status: ExitStatus) {
        let is_own = self.losses.is_own(index);
        let node = &mut self.nodes[index];
        let Some(process) = node.process.take() else { return };
        if !is_own && node.has_orders() && !node.planned.is_local && status.code() == Some(CONNECTION_FAILED) {
            node.ends_by = Some(Instant::now() + SILENCE + TERM_TO_KILL);
        }
        let is_over = matches!(node.state, State::Ended(_) | State::Lost) && !node.is_left_behind;
        if is_over || self.code.is_some() {
            return;
        }
        let program = node.program();
        let how = match How::from(status) {
            How::Exited(code) => format!("ended with code {code}"),
            killed => killed.to_string(),
        };
        let words = process.words();
        let colon = if words.is_empty() { "" } else { ": " };
        if node.is_left_behind {
            let why = format!("{program} {how}{colon}{words}");
            return self.try_has_failed(index, &why);
        }
        if node.has_orders() {
            let name = node.numbered(index);
            let text = match status.code() {
                // The agent has become the node.
                None if node.planned.is_local => format!("{name} has gone: its devicemesh run {how}"),
                None => format!("{name} has gone: {program}, the connection to it, {how}"),
                Some(code) => {
                    // ssh ends with 255 where the connection fails, and otherwise with the code of
                    // the node.
                    let is_killed = (node.planned.is_local || code != CONNECTION_FAILED).then_some(true);
                    let gone = Cause::Gone { node: name, number: None, is_killed };
                    format!("{gone} ({program} {how}{colon}{words})")
                }
            };
            return self.lose(index, text);
        }
        let how = format!("{program} {how}");
        let advice = match status.code() {
            // A program exits with 2 where it does not understand its arguments.
            Some(0 | 2) => {
                concat!(
                    "; what ran there is no devicemesh ",
                    env!("CARGO_PKG_VERSION"),
                    ": --remote-tool names its path"
                )
            }
            Some(126 | 127) => "; devicemesh must be there at the same path or in PATH, or --remote-tool names it",
            _ => "",
        };
        self.host_failed(index, format!("{how}{colon}{words}{advice}"));
    }

    /// Handles what a node says of one that has gone.
    pub fn node_has_gone(&mut self, from: usize, gone: usize, arrival: Option<u32>, text: String) {
        let Some(node) = self.nodes.get(gone) else { return };
        // The message may be about an earlier process of this node.
        let is_past = arrival.zip(node.arrival).is_some_and(|(lost, now)| lost < now);
        let is_here = node.planned.is_local && node.process.is_some();
        // A node that has taken the place of a lost one reads of that loss, too.
        if from != gone || arrival.is_some() {
            if !is_past {
                self.losses.hold(from, gone, text, is_here);
            }
            return;
        }
        self.node_says_it_has_gone(gone, &text);
    }

    fn node_says_it_has_gone(&mut self, index: usize, text: &str) {
        self.losses.own(index);
        if self.losses.tell(index) && self.code.is_none() {
            self.say_loss(index, text);
        }
    }

    /// Handles the message of a node's keeper that the node's own process was killed. On the
    /// starter's own host the exit status of that process tells the signal, and comes a moment
    /// later at most.
    pub fn node_was_killed(&mut self, index: usize, text: String) {
        let node = &self.nodes[index];
        match node.planned.is_local && node.process.is_some() {
            true => self.losses.hold(index, index, text, true),
            false => self.node_says_it_has_gone(index, &text),
        }
    }

    /// Prints what a node has said of a loss. If this is the first reason for the end of the job,
    /// it is kept as the reason, without the last part of its text (`without_end`). Otherwise the
    /// job has lost one more host, as when a network fails.
    fn say_loss(&mut self, node: usize, text: &str) {
        if self.goes_on_without(node) {
            return self.leave_behind(node, text);
        }
        if self.reason.is_some() {
            return self.say_later_loss(without_end(text));
        }
        let reason = self.style.wrong(&printable(without_end(text)));
        self.give_reason(&printable(text));
        self.reason = Some(format!("devicemesh run: {reason}"));
    }

    /// Says what other nodes have said of a loss, when the lost host has had its time.
    pub fn tell_losses(&mut self, all: bool) {
        while let Some(held) = self.losses.take(all) {
            self.tell_held(held);
        }
    }

    fn tell_held(&mut self, Held { from, node, text, .. }: Held) {
        // If a node misses the store while the node that serves the store is still there, the node
        // that misses it is the lost one.
        let is_there = self.nodes[node].process.is_some() && self.nodes[node].state == State::Working;
        if node == 0 && is_there && self.goes_on_without(from) {
            let name = self.nodes[from].numbered(from);
            return self.leave_behind(from, &format!("{name} is lost: {}", without_end(&text)));
        }
        if self.losses.tell(node) && self.code.is_none() {
            self.say_loss(node, &text);
        }
    }

    /// Says at the end how long ranks may still run on hosts that are out of reach: such a node
    /// misses the starter after [`SILENCE`], and then it ends its ranks within [`TERM_TO_KILL`].
    pub fn say_what_may_run(&mut self) {
        let now = Instant::now();
        let may_run = |node: &Node| node.ends_by.is_some_and(|end| end > now);
        let Some(end) = self.nodes.iter().filter_map(|node| node.ends_by).max().filter(|end| *end > now) else {
            return;
        };
        let (hosts, left) = (self.names(may_run), span(end - now));
        self.say_more(&format!("the connection to {hosts} has failed: ranks there may run up to {left} more"));
    }

    /// Says that a host is lost while the job ends for another reason. Only the first losses are
    /// said, because a network that fails may take hundreds of hosts with it.
    fn say_later_loss(&mut self, text: &str) {
        if self.losses.count() <= LISTED {
            self.say_more(&format!("afterwards {text}"));
        }
    }

    /// Ends the job, because the connection to a node has ended.
    fn lose(&mut self, index: usize, text: String) {
        self.nodes[index].state = State::Lost;
        if self.goes_on_without(index) {
            self.losses.tell(index);
            return self.leave_behind(index, &text);
        }
        let is_new = self.losses.tell(index);
        match is_new {
            true if self.reason.is_some() => self.say_later_loss(&text),
            true => self.give_reason(&printable(&text)),
            false => {}
        }
        match self.teller {
            // The nodes end the job themselves, and the code is theirs.
            Some(_) => self.limit_the_end(),
            None => self.end_with(1, Some(index as u32)),
        }
    }
}
