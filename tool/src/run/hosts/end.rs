//! Ends a job on several hosts, because a host cannot take part, because one is lost, or because of
//! a signal.

use std::io::{self, ErrorKind};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use devicemesh::printable::printable;
use rustix::process::{Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGUSR1, SIGUSR2};

use super::job::Starter;
use super::node::{Node, State};
use super::words::{Word, line};
use crate::run::cause::{Cause, signal_name};
use crate::run::guard;
use crate::run::identity::span;
use crate::stdio::{cannot_print, say};

/// How much longer than the ranks' grace period the other nodes may need when the job ends.
const ENDING: Duration = Duration::from_secs(20);
/// How many interrupts end a job whose nodes do not answer.
const IMPATIENT: u32 = 3;
/// The exit code of a program whose reader has gone: 128 + SIGPIPE.
const NO_READER: u8 = 141;

impl Starter<'_> {
    pub fn output_is_lost(&mut self, error: &io::Error) {
        let is_gone = error.kind() == ErrorKind::BrokenPipe;
        if self.code.is_none() {
            match is_gone {
                true => self.say("the reader of the output has ended, so the job ends"),
                false => self.say(&cannot_print(error)),
            }
        }
        self.end(if is_gone { NO_READER } else { 1 });
    }

    /// Handles the exit code of a node.
    pub fn node_ended(&mut self, index: usize, code: u8) {
        self.nodes[index].state = State::Ended(code);
        self.losses.ended(index, code);
        self.limit_the_end();
        // Node 0 serves the store, and it ends last unless it has failed early. A node that fails
        // before all have met cannot tell the others, which would wait for it.
        if code != 0 && (index == 0 || !self.has_met) {
            self.end(code);
        }
    }

    /// Handles the end of the process that reaches a host.
    pub fn process_ended(&mut self, index: usize, status: ExitStatus) {
        let node = &mut self.nodes[index];
        let Some(process) = node.process.take() else { return };
        if matches!(node.state, State::Ended(_) | State::Lost) || self.code.is_some() {
            return;
        }
        let program =
            if node.planned.is_local { "the agent".into() } else { node.planned.command[0].to_string_lossy() };
        let how = match status.code() {
            Some(code) => format!("{program} ended with code {code}"),
            None => format!("{program} ended by a signal ({status})"),
        };
        let words = process.words();
        let colon = if words.is_empty() { "" } else { ": " };
        if node.has_orders() {
            let name = format!("node {index} ({})", node.name());
            return self.lose(index, format!("{} ({how}{colon}{words})", Cause::Gone { node: name, number: None }));
        }
        let advice = match status.code() {
            Some(0) => "; what ran there is no devicemesh",
            Some(126 | 127) => "; devicemesh must be there at the same path or in PATH, or --remote-tool names it",
            _ => "",
        };
        self.host_failed(index, format!("{how}{colon}{words}{advice}"));
    }

    /// Notes that a host cannot take part.
    pub fn host_failed(&mut self, index: usize, why: String) {
        self.nodes[index].state = State::Lost;
        if self.code.is_none() {
            self.failures.add(index, self.nodes[index].name(), why);
        }
    }

    /// Ends the job where hosts cannot take part and nothing more is to be learnt of the others.
    pub fn tell_failures(&mut self, now: Instant) {
        let Some(until) = self.failures.until().filter(|_| self.code.is_none()) else { return };
        if now >= until.min(self.deadline) || !self.nodes.iter().any(Node::is_open) {
            for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.state == State::Starting) {
                self.failures.add(index, node.name(), format!("no answer within {}", span(now - node.began)));
            }
            self.say_failures();
            self.end(1);
        }
    }

    fn say_failures(&mut self) {
        let untried: Vec<&str> =
            self.nodes.iter().filter(|node| node.state == State::Planned).map(Node::name).collect();
        let message = self.failures.message(self.nodes.len(), &untried);
        self.give_reason(&message);
    }

    /// Handles what a node says of one that has gone.
    pub fn node_has_gone(&mut self, from: usize, gone: usize, text: String) {
        if gone >= self.nodes.len() {
            return;
        }
        if from != gone {
            return self.losses.hold(gone, text);
        }
        self.losses.own(gone);
        if self.losses.tell(gone) && self.code.is_none() {
            self.say_loss(&text);
        }
    }

    /// Says the words of a node. What follows ";" in them is true for a moment only, so it is not
    /// said again.
    fn say_loss(&mut self, text: &str) {
        let reason = self.style.wrong(&printable(text.split("; ").next().unwrap_or_default()));
        self.give_reason(&printable(text));
        self.reason = Some(format!("devicemesh run: {reason}"));
    }

    /// Says what other nodes have said of a loss, when the lost host has had its time.
    pub fn tell_losses(&mut self, all: bool) {
        let Some((node, text)) = self.losses.take(all) else { return };
        if self.losses.tell(node) && self.code.is_none() {
            self.say_loss(&text);
        }
    }

    /// Ends the job, because the connection to a node has ended.
    fn lose(&mut self, index: usize, text: String) {
        self.nodes[index].state = State::Lost;
        if self.losses.tell(index) {
            self.give_reason(&printable(&text));
        }
        self.end_with(1, Some(index as u32));
    }

    /// Says why the job ends. The text has no characters that act on a terminal.
    fn give_reason(&mut self, text: &str) {
        let line = format!("devicemesh run: {}", self.style.wrong(text));
        say(&line);
        self.reason = Some(line);
    }

    /// Ends the job with that code. The reason has been said.
    pub fn end(&mut self, code: u8) {
        self.end_with(code, None);
    }

    /// Sets the time for the end of all nodes, unless it is set.
    fn limit_the_end(&mut self) {
        self.limit.get_or_insert(Instant::now() + self.options.ending.longest() + ENDING);
    }

    /// Ends the job with that code. `lost` is the node that is lost, where that is the reason: then
    /// the other nodes end in the way in which they end when they notice the loss themselves.
    fn end_with(&mut self, code: u8, lost: Option<u32>) {
        if self.code.is_some() {
            return;
        }
        self.code = Some(code);
        self.limit_the_end();
        for node in &mut self.nodes {
            let has_orders = node.has_orders();
            match (&node.state, &mut node.process) {
                (_, Some(process)) if has_orders => process.send(&line(&Word::End { lost })),
                (State::Ended(_), _) | (_, None) => {}
                // An agent without orders has started nothing.
                (_, Some(process)) => process.kill(),
            }
            if node.state == State::Planned {
                node.state = State::Lost;
            }
        }
    }

    pub fn kill_all(&mut self) {
        for process in self.nodes.iter().filter_map(|node| node.process.as_ref()) {
            process.kill();
        }
        self.limit = Some(Instant::now() + ENDING);
        self.code.get_or_insert(1);
    }

    pub fn handle_signal(&mut self, signal: i32) {
        if signal == SIGCHLD {
            return;
        }
        let is_passing = [SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT].contains(&signal);
        let has_started = |node: &Node| node.has_orders() || matches!(node.state, State::Ended(_));
        if !is_passing {
            self.interrupts += 1;
            let is_early = self.code.is_none() && !self.nodes.iter().all(has_started);
            if is_early {
                if self.failures.until().is_some() {
                    self.say_failures();
                }
                self.say(&format!("got signal {signal} ({}) before all hosts had started", signal_name(signal)));
                self.end(128 + signal as u8);
            } else if self.interrupts >= IMPATIENT {
                if self.interrupts == IMPATIENT {
                    self.say("closed the connections to the hosts; what still runs there is killed within 5 s");
                }
                self.code.get_or_insert(128 + signal as u8);
                self.kill_all();
            }
        }
        self.send(Word::Signal(signal));
        if signal == SIGTSTP {
            self.say("stopped the ranks on all hosts; SIGCONT (fg or bg in the shell) continues");
            let _ = kill_process(guard::visible(), Signal::STOP);
        }
    }

    /// Returns the code of a node that has said why it has gone, else the code of the starter's own
    /// reason, else the first code that is not 0 in the order of the nodes, because node 0 knows
    /// the job best.
    pub fn exit_code(&self) -> u8 {
        let codes = self.nodes.iter().map(|node| if let State::Ended(code) = node.state { code } else { 0 });
        let own = self.losses.code().or(self.code);
        own.unwrap_or_else(|| codes.into_iter().find(|code| *code != 0).unwrap_or(0))
    }
}
