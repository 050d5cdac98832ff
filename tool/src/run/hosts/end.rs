//! Ends a job on several hosts, because a host cannot take part, because one is lost, or because of
//! a signal.

use std::io::{self, ErrorKind, IsTerminal};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anstream::adapter::strip_str;
use devicemesh::printable::printable;
use rustix::process::{Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGINT, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2};

use super::control::{SILENCE, when_without_starter};
use super::failures::LISTED;
use super::job::{Starter, without_end};
use super::losses::Held;
use super::node::{Node, State};
use super::process::MESSAGE;
use super::words::{Word, line};
use crate::run::cause::{Cause, How};
use crate::run::ending::TERM_TO_KILL;
use crate::run::guard;
use crate::run::identity::span;
use crate::run::restart::Unit;
use crate::run::signals::{is_impatient, too_early};
use crate::stdio::cannot_write;
use crate::words::listed;

/// How much longer than the ranks' grace period the other nodes may need when the job ends.
const ENDING: Duration = Duration::from_secs(20);
/// How long the starter waits in silence for the end of the nodes.
const LATE: Duration = Duration::from_secs(4);
/// The time between two lines about the hosts for which the starter waits.
pub const AGAIN: Duration = Duration::from_secs(10);
/// How many interrupts end a job whose nodes do not answer.
const IMPATIENT: u32 = 3;
/// The exit code of ssh where the connection fails.
const CONNECTION_FAILED: i32 = 255;
/// The exit code of a program whose reader has gone: 128 + SIGPIPE.
const NO_READER: u8 = 141;

impl Starter<'_> {
    /// Ends the job, because nothing more can be written to standard error, or to standard output.
    pub fn output_is_lost(&mut self, is_error: bool, error: &io::Error) {
        // The nodes end the job already. A user sees no more than the exit code, which is theirs.
        if is_error && self.teller.is_some() {
            return;
        }
        let is_gone = error.kind() == ErrorKind::BrokenPipe;
        let grace = self.options.ending.grace_period.as_secs_f64();
        let is_running = self.nodes.iter().any(|node| node.process.is_some());
        if self.code.is_none() {
            let what =
                if is_gone { "the reader of the output has ended".to_owned() } else { cannot_write(is_error, error) };
            let so = if is_gone { ", so the job ends" } else { "" };
            let rest = match is_running {
                true => format!("{so}; all ranks get SIGTERM now, and SIGKILL in {grace} s"),
                false => String::new(),
            };
            self.say(&format!("{what}{rest}"));
        }
        self.end(if is_gone { NO_READER } else { 1 });
    }

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
                    // ssh ends with 255 where the connection fails, and else with the code of the
                    // node.
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

    /// Notes that a host cannot take part.
    pub fn host_failed(&mut self, index: usize, why: String) {
        if self.nodes[index].is_left_behind {
            return self.try_has_failed(index, &why);
        }
        self.nodes[index].state = State::Lost;
        if self.code.is_none() {
            self.failures.add(index, self.nodes[index].target(), why);
        }
    }

    /// Ends the job where hosts cannot take part and nothing more is to be learnt of the others.
    pub fn tell_failures(&mut self, now: Instant) {
        let Some(until) = self.failures.until().filter(|_| self.code.is_none()) else { return };
        if now >= until.min(self.deadline) || !self.nodes.iter().any(Node::is_open) {
            self.note_silence(|node| span(now - node.began));
            self.say_failures();
            self.end(1);
        }
    }

    /// Notes that the hosts that are still starting cannot take part. `time` returns how long a
    /// host has given no answer. The reason quotes what the login shell has printed, maybe a
    /// question.
    pub fn note_silence(&mut self, time: impl Fn(&Node) -> String) {
        let hosts = &self.options.hosts;
        let (limit, why) = (hosts.time_to_connect(self.options.meeting.rdzv_timeout), hosts.why_silent());
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.state == State::Starting) {
            let printed =
                node.printed().map_or(String::new(), |text| format!("; {} has printed: {text}", node.program()));
            let advice = if node.is_connected(limit) { format!("; {why}") } else { String::new() };
            self.failures.add(index, node.target(), format!("no answer within {}{printed}{advice}", time(node)));
        }
    }

    /// Ends the job where nodes cannot reach the first host, because the endpoint is a loopback
    /// address and they use another network than the first host.
    pub fn refuse_loopback(&mut self) {
        let first = &self.nodes[0];
        let is_elsewhere = |node: &Node| !node.network.is_empty() && node.network != first.network;
        if first.network.is_empty() || !self.nodes.iter().any(is_elsewhere) {
            return;
        }
        let (meeting, first, others) = (&self.meeting, first.target(), self.names(is_elsewhere));
        let message = match self.has_service {
            true => format!(
                "--store {meeting} is a loopback address, so {first} and {others} cannot both reach it: give another address of its host"
            ),
            false => format!(
                "--rdzv-endpoint {meeting} is a loopback address, so {others} cannot reach {first} there: leave --rdzv-endpoint out, or give another address of {first}"
            ),
        };
        self.give_reason(&printable(&message));
        self.end(1);
    }

    /// Notes that a node says why the job ends.
    pub fn node_tells(&mut self, index: usize, cause: &str) {
        // A node that has not met the others again says why it cannot.
        if !self.nodes[index].is_left_behind && self.reason.is_none() && self.code.is_none() {
            self.teller = Some(index);
            self.reason = Some(format!("devicemesh run: {}", self.style.wrong(&printable(cause))));
        }
    }

    /// Notes whether this line of a node or a rank is the reason, or whether it now stands below
    /// the reason. If the node `teller` reports the rank that failed first, that line becomes the
    /// reason.
    pub fn look_for_reason(&mut self, index: usize, line: &[u8], is_passed_on: bool) {
        let Some(reason) = &self.reason else { return };
        if !line.starts_with(MESSAGE) || self.teller != Some(index) {
            self.is_reason_above |= is_passed_on;
            return;
        }
        let line = String::from_utf8_lossy(line);
        // The colours of the starter's line and of the node's may differ.
        let plain = |text: &str| strip_str(text).to_string();
        if line.contains(" failed first: ") {
            self.reason = Some(line.trim_end().to_owned());
            self.is_reason_above = false;
        } else if is_passed_on {
            self.is_reason_above = !plain(&line).starts_with(&plain(reason));
        }
    }

    pub fn say_failures(&mut self) {
        let untried: Vec<&str> =
            self.nodes.iter().filter(|node| node.state == State::Planned).map(Node::target).collect();
        let message = self.failures.message(self.nodes.len(), &untried);
        self.give_reason(&message);
    }

    /// Handles what a node says of one that has gone.
    pub fn node_has_gone(&mut self, from: usize, gone: usize, arrival: Option<u32>, text: String) {
        let Some(node) = self.nodes.get(gone) else { return };
        // The word may be about the process that was there before this one.
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

    /// Handles the word of a node's keeper that the node's own process was killed. On the starter's
    /// own host the end of that process has the signal, and comes a moment later at most.
    pub fn node_was_killed(&mut self, index: usize, text: String) {
        let node = &self.nodes[index];
        match node.planned.is_local && node.process.is_some() {
            true => self.losses.hold(index, index, text, true),
            false => self.node_says_it_has_gone(index, &text),
        }
    }

    /// Says what a node has said of a loss. If that is the first reason for the end, it is the
    /// reason from now on, without its end. If not, the job has lost one more host, as when a
    /// network fails.
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
        let Some(Held { from, node, text, .. }) = self.losses.take(all) else { return };
        // A node that misses the store, while the node that serves the store is still there, is the
        // lost one.
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

    /// Says why the job ends. The text has no characters that act on a terminal.
    fn give_reason(&mut self, text: &str) {
        let line = format!("devicemesh run: {}", self.style.wrong(text));
        self.sinks.say(&line);
        self.reason = Some(line);
    }

    /// Ends the job with that code. The reason has been said.
    pub fn end(&mut self, code: u8) {
        self.end_with(code, None);
    }

    /// Sets the time for the end of all nodes, unless it is set.
    fn limit_the_end(&mut self) {
        if self.limit.is_none() {
            self.limit = Some(Instant::now() + self.options.ending.longest() + ENDING);
            self.next_note = Instant::now() + LATE;
        }
    }

    /// Says from time to time for which nodes the end waits, and for how long. A host may be
    /// stopped or out of reach.
    pub fn tell_wait_for_end(&mut self, now: Instant) {
        let Some(limit) = self.limit.filter(|limit| now < *limit && now >= self.next_note) else { return };
        self.next_note = now + AGAIN;
        let late = self.nodes.iter().enumerate().filter(|(_, node)| node.process.is_some());
        let mut late: Vec<String> = late.map(|(index, node)| node.numbered(index)).collect();
        // Node 0 serves the store, so it waits for the others itself.
        if late.len() > 1 && self.nodes[0].process.is_some() {
            late.remove(0);
        }
        let late = listed(late, LISTED);
        let since = self.asked.map_or(String::new(), |asked| format!(", {} after the signal", span(now - asked)));
        let next = match self.interrupts {
            1 => "; a second signal kills the ranks at once",
            2 => "; a third signal closes it at once",
            _ => "",
        };
        self.say_more(&format!(
            "waiting for the end of {late}{since}; in {} the connection is closed{next}",
            span(limit - now)
        ));
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
        let cause = self.first_signal.map(|signal| Cause::Signal { signal, node: None });
        if let (None, None, Some(cause)) = (&self.reason, self.code, &cause) {
            // No node was there to say it.
            self.reason = Some(format!("devicemesh run: {}", self.style.wrong(&cause.to_string())));
            self.is_reason_above = true;
        }
        let code = self.code_of_nodes().unwrap_or(cause.map_or(1, |cause| cause.code()));
        self.code.get_or_insert(code);
    }

    pub fn handle_signal(&mut self, signal: i32) {
        if signal == SIGCHLD {
            return;
        }
        // The terminal has echoed the key, maybe behind a line of the ranks that has no end.
        if [SIGINT, SIGQUIT, SIGTSTP].contains(&signal) && io::stderr().is_terminal() {
            self.sinks.say("");
        }
        let is_passing = [SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT].contains(&signal);
        let has_started =
            |node: &Node| node.is_left_behind || node.has_orders() || matches!(node.state, State::Ended(_));
        if !is_passing {
            let named = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
            if self.asked.is_some_and(|last| !is_impatient(last, named)) {
                return self.say_too_early(named);
            }
            let now = Instant::now();
            self.asked = Some(now);
            self.first_signal.get_or_insert(signal);
            self.interrupts += 1;
            let cause = Cause::Signal { signal, node: None };
            let is_ending = self.code.is_some() || self.teller.is_some();
            let is_early = !is_ending && !self.nodes.iter().all(has_started);
            if is_early {
                if self.failures.until().is_some() {
                    self.say_failures();
                }
                self.say(&format!("{cause} before all hosts had started"));
                self.end(cause.code());
            } else if self.interrupts >= IMPATIENT {
                if self.interrupts == IMPATIENT {
                    let (when, late) = (when_without_starter(), self.names(|node| node.process.is_some()));
                    self.say_more(&format!(
                        "closed the connections to {late}; what still runs there is killed {when}; a devicemesh run that is stopped (kill -STOP) stays with its ranks, so look there"
                    ));
                }
                self.kill_all();
            } else {
                self.limit_the_end();
                if self.interrupts > 1 {
                    // The nodes do not wait for their ranks any more.
                    self.limit = self.limit.map(|limit| limit.min(now + ENDING));
                }
                self.next_note = now + LATE;
            }
        }
        // The nodes do not judge again whether a signal is a second one, because it may reach them
        // sooner or later after the first one than it came here.
        self.send(if is_passing || self.interrupts == 1 { Word::Signal(signal) } else { Word::AtOnce(signal) });
        if signal == SIGTSTP {
            self.say("stopped the ranks on all hosts; SIGCONT (fg or bg in the shell) continues");
            // The shell's prompt might come before the message otherwise.
            self.sinks.wait_for_messages();
            let _ = kill_process(guard::visible(), Signal::STOP);
        }
    }

    /// Tells a user at a terminal that a second key came too early to count.
    fn say_too_early(&self, signal: Signal) {
        let is_first = self.interrupts == 1 && self.nodes.iter().any(Node::has_orders);
        if let Some(text) = too_early(signal).filter(|_| is_first && io::stderr().is_terminal()) {
            self.say(&text);
        }
    }

    /// Returns the code of a node that has said why it has gone, else the code of the starter's own
    /// reason, else the first code that is not 0 in the order of the nodes, because node 0 knows
    /// the job best, else 1 if a node is lost, and 0 if not.
    pub fn exit_code(&self) -> u8 {
        let is_lost = self.nodes.iter().any(|node| node.state == State::Lost && !node.is_left_behind);
        self.losses.code().or(self.code).or(self.code_of_nodes()).unwrap_or(is_lost.into())
    }

    /// The first exit code of a node that is not 0, in the order of the nodes.
    fn code_of_nodes(&self) -> Option<u8> {
        let here = self.nodes.iter().filter(|node| !node.is_left_behind);
        let mut codes = here.map(|node| if let State::Ended(code) = node.state { code } else { 0 });
        codes.find(|code| *code != 0)
    }
}
