//! Ends a job on several hosts, because a host cannot take part or because of a signal. The file
//! `lost_hosts` handles hosts that are lost.

use std::io::{self, ErrorKind, IsTerminal};
use std::time::{Duration, Instant};

use anstream::adapter::strip_str;
use devicemesh::printable::printable;
use rustix::process::{Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGINT, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2};

use super::control::when_without_starter;
use super::failures::LISTED;
use super::job::Starter;
use super::node::{Node, State};
use super::process::MESSAGE;
use super::words::{Word, line};
use crate::run::cause::Cause;
use crate::run::guard;
use crate::run::identity::span;
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

    /// Says why the job ends. The text has no characters that act on a terminal.
    pub(super) fn give_reason(&mut self, text: &str) {
        let line = format!("devicemesh run: {}", self.style.wrong(text));
        self.sinks.say(&line);
        self.reason = Some(line);
    }

    /// Ends the job with that code. The reason has been said.
    pub fn end(&mut self, code: u8) {
        self.end_with(code, None);
    }

    /// Sets the time for the end of all nodes, unless it is set.
    pub(super) fn limit_the_end(&mut self) {
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
    pub(super) fn end_with(&mut self, code: u8, lost: Option<u32>) {
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
        // The starter decides whether a signal is a second one, and not the nodes: the time between
        // the two signals may be shorter or longer there than here.
        self.send(if is_passing || self.interrupts == 1 { Word::Signal(signal) } else { Word::AtOnce(signal) });
        self.is_stopped = signal == SIGTSTP || (self.is_stopped && signal != SIGCONT);
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
