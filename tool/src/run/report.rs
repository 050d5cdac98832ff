//! The tool's own messages about the job. Each message is one write of whole lines.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;
use rustix::process::{Signal, kill_process};

use super::cause::{Cause, Ended, How, TIMED_OUT, signal_name};
use super::ending::TERM_TO_KILL;
use super::guard;
use super::hosts::{Control, Order, Said};
use super::job::{Job, Phase};
use super::signals::{is_impatient, too_early};
use crate::words::{count, listed};

/// How many ranks are named in one list.
const NAMED: usize = 8;

/// How long a reader that has stopped may keep the tool after `--timeout`.
pub const FLUSH: Duration = Duration::from_secs(2);

impl Job<'_> {
    /// Says why the job ends, and what happens to the ranks that still run.
    pub fn announce(&self, cause: &Cause) {
        if matches!(cause, Cause::Done) || !self.tells(cause) {
            return;
        }
        let also = match cause {
            Cause::Rank { .. } if self.failed_together > 0 => {
                format!(", and {}{} failed at the same time", count(self.failed_together, "rank"), self.here())
            }
            _ => String::new(),
        };
        let (behind, restart) = self.told_restart(cause);
        let rest = format!("{}{restart}", self.end_of_the_others(cause));
        if let Some(node) = self.lost_node(cause) {
            return self.tell_starter(&Said::Gone { node, arrival: None, text: format!("{cause}{rest}") });
        }
        if self.control.is_some() && !self.starts_again(cause) {
            self.tell_starter(&Said::Ending { cause: cause.to_string() });
        }
        let text = format!("{}{also}{rest}", self.style.wrong(&format!("{cause}{behind}")));
        let is_key = |signal: i32| [Signal::INT, Signal::QUIT].iter().any(|key| key.as_raw() == signal);
        match cause {
            Cause::Signal { signal, .. } if is_key(*signal) => self.say_after_key(&text),
            _ => self.say(&text),
        }
    }

    /// Says that a node is lost and the job goes on. A starter of several hosts says it once for
    /// all nodes.
    pub fn tell_missed(&self, node: Option<u32>, arrival: u32, text: String) {
        match (&self.control, node) {
            (Some(_), Some(node)) => self.tell_starter(&Said::Gone { node, arrival: Some(arrival), text }),
            (Some(_), None) => self.say(&format!("{text}; the job goes on without its ranks")),
            (None, _) => self.say(&format!(
                "{text}; the job goes on, and a node that joins takes its place: start the same devicemesh run again"
            )),
        }
    }

    /// Tells the starter of the job something.
    pub fn tell_starter(&self, said: &Said) {
        self.output.mark(&said.mark());
    }

    /// Tells a user at a terminal that a second key came too early to count.
    pub fn say_too_early(&self, signal: Signal) {
        if let Some(text) = too_early(signal).filter(|_| self.running() > 0 && io::stderr().is_terminal()) {
            self.say_after_key(&text);
        }
    }

    /// How long the ranks have that were asked to end.
    fn time_to_sigkill(&self) -> Duration {
        let whole = self.options.ending.grace_period;
        let left = match self.phase {
            Phase::Terminating(until) => until.saturating_duration_since(Instant::now()),
            _ => whole,
        };
        // The whole time began a moment ago, so half a second less still counts as the whole.
        match left + Duration::from_millis(500) < whole {
            true => Duration::from_secs(left.as_millis().div_ceil(1000) as u64),
            false => whole,
        }
    }

    /// Returns what the ranks that still run get, as the end of the message about this cause.
    fn end_of_the_others(&self, cause: &Cause) -> String {
        let running = self.running();
        if running == 0 {
            return String::new();
        }
        let starter_has_gone = self.control.as_ref().is_some_and(|control| control.entry().is_none());
        // Where one terminal shows all nodes, one node speaks for the ranks of all.
        let speaks_for_all = self.control.is_some() && !starter_has_gone;
        let ranks = match speaks_for_all {
            true => "all ranks".to_owned(),
            false => format!("{}{}", count(running, "rank"), self.here()),
        };
        let (are, get, run, they_end) = match running {
            1 if !speaks_for_all => ("is", "gets", "runs", "it ends"),
            _ => ("are", "get", "run", "they end"),
        };
        let ending = &self.options.ending;
        let (grace, failure_grace) = (seconds(self.time_to_sigkill()), seconds(ending.failure_grace));
        match cause {
            Cause::Signal { .. } => {
                format!(", passed on to {ranks}, which {are} killed in {grace}; a second signal kills at once")
            }
            _ if starter_has_gone => {
                format!("; {ranks} {get} SIGTERM now, and SIGKILL in {}", seconds(TERM_TO_KILL))
            }
            Cause::Timeout { .. } | Cause::Output { .. } => {
                format!("; {ranks} {get} SIGTERM now, and SIGKILL in {grace}")
            }
            _ if speaks_for_all => {
                format!("; the ranks that still run get SIGTERM in {failure_grace} unless they end before")
            }
            _ => format!("; {ranks} still {run} and {get} SIGTERM in {failure_grace} unless {they_end} before"),
        }
    }

    /// Says at the end why the job ended, and gives the exit code.
    pub fn finish(mut self) -> u8 {
        let first = match &self.cause {
            Some(Cause::Rank { ended, .. }) => Some(ended.rank),
            _ => None,
        };
        let mut later = self.ranks.as_ref().map(|ranks| ranks.failed_after(first)).unwrap_or_default();
        // The ranks that failed at the same time as the first one come first in this list.
        let together: Vec<u32> = later.iter().take(self.failed_together).map(|ended| ended.rank).collect();
        let is_told = matches!(&self.cause, Some(Cause::Rank { ended, .. }) if self.is_told(ended.how));
        later.retain(|ended| !(self.is_told(ended.how) || is_told && ended.was_ended()));
        let on_host = self.on_host();
        let told = |ended: &&Ended| {
            let when = if together.contains(&ended.rank) { "at the same time" } else { "afterwards" };
            format!("{when} {}", ended.told(&on_host))
        };
        let mut lines: Vec<String> = later.iter().take(NAMED).map(told).collect();
        if later.len() > NAMED {
            lines.push(format!("and {} more ranks", later.len() - NAMED));
        }
        let has_more = !lines.is_empty();
        lines.iter().for_each(|line| self.say(line));
        let others: Vec<u32> = later.iter().filter(|ended| !ended.was_ended()).map(|ended| ended.rank).collect();
        let until = match &self.cause {
            Some(Cause::Timeout { .. }) => Some(Instant::now() + FLUSH),
            Some(Cause::Signal { .. }) => Some(Instant::now() + self.options.ending.grace_period),
            None | Some(Cause::Done) => self.timeout,
            Some(_) => self.timeout.map(|timeout| timeout.max(Instant::now() + FLUSH)),
        };
        let restarts = self.told_restarts();
        let cause = self.cause.take();
        let tells = cause.as_ref().is_some_and(|cause| self.tells(cause));
        let code = match cause {
            Some(Cause::Rank { ended, host, output, reason, log, restarts }) => {
                // Where nothing else is known, the first message about this rank already has
                // everything.
                if tells && (has_more || !output.is_empty() || log.is_some() || !restarts.is_empty()) {
                    let other = match reason.is_empty() {
                        true => others.into_iter().find_map(|rank| self.words_of(rank)),
                        false => None,
                    };
                    let (output, reason, log) = match other {
                        // The last lines of the rank that failed first do not say why it failed.
                        Some((reason, log)) => (String::new(), reason, log),
                        None => (output, reason, log),
                    };
                    self.report(&ended, host.as_deref(), &output, &reason, log.as_deref(), &restarts);
                }
                ended.how.code()
            }
            None | Some(Cause::Done) => {
                self.tell_success(&restarts);
                0
            }
            Some(cause) => {
                if tells && (has_more || !restarts.is_empty()) && self.lost_node(&cause).is_none() {
                    self.say(&format!("{}{restarts}", self.style.wrong(&cause.to_string())));
                }
                cause.code()
            }
        };
        let end_of_wait = self.flush(until);
        // The exit code tells a reader that the output is incomplete.
        match end_of_wait {
            Some(code_of_end) if code == 0 => code_of_end,
            None if code == 0 && self.output.loss().is_some() => 1,
            _ => code,
        }
    }

    /// The host of this node's ranks for messages, where one terminal shows all hosts.
    pub fn on_host(&self) -> String {
        self.options.hosts.agent.as_ref().map_or(String::new(), |_| self.here())
    }

    /// Returns the reason that a rank gave, as the end of the line that reports the rank that
    /// failed first, and the rank's log. Returns `None` where the rank gave no reason.
    fn words_of(&mut self, rank: u32) -> Option<(String, Option<String>)> {
        let words = self.output.last_words(rank);
        let reason = format!("; rank {rank} said: {}", words.reason?.text());
        Some((reason, self.name_of_log(rank)))
    }

    /// The log of a rank of this node for messages, where there is one: "logs/run/rank-1.err on
    /// beta".
    pub fn name_of_log(&self, rank: u32) -> Option<String> {
        let on_host = self.reporter.as_ref().map_or(String::new(), |_| format!(" on {}", host_name()));
        self.output.log(rank).map(|path| format!("{}{on_host}", path.display()))
    }

    /// Waits until a slow reader has taken what the ranks and the tool have written. A signal ends
    /// the wait, and so does that moment. Then it says how much is not written, and gives the exit
    /// code.
    fn flush(&mut self, until: Option<Instant>) -> Option<u8> {
        let code = loop {
            if !self.output.is_busy() {
                return None;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break TIMED_OUT;
            }
            self.sleep(until);
            if let Some(signal) = self.signal_to_end() {
                break 128 + signal as u8;
            }
        };
        self.output.give_up().then_some(code)
    }

    /// The signal that ends the wait for a slow reader, where one has come.
    fn signal_to_end(&mut self) -> Option<i32> {
        // Nothing that other nodes say matters now, but it must be read, or the wait would spin.
        self.nodes.as_ref().inspect(|nodes| drop(nodes.news()));
        let mut signals = self.signals.take();
        signals.extend(self.control.as_mut().map(Control::orders).unwrap_or_default().into_iter().map(|order| {
            match order {
                Order::Signal(signal) | Order::AtOnce(signal) => signal,
                Order::End { .. } | Order::StarterGone(_) => Signal::TERM.as_raw(),
            }
        }));
        if signals.contains(&Signal::TSTP.as_raw()) && self.control.is_none() {
            let _ = kill_process(guard::visible(), Signal::STOP);
        }
        let ends = |signal: &Signal| matches!(*signal, Signal::INT | Signal::TERM | Signal::HUP | Signal::QUIT);
        let mut signals = signals.into_iter().filter_map(Signal::from_named_raw).filter(ends);
        signals.find(|signal| self.asked.is_none_or(|first| is_impatient(first, *signal))).map(Signal::as_raw)
    }

    /// Shows the last lines of the rank that failed first. The tool's last line says how and why
    /// the rank failed, because people look at the last line.
    fn report(&self, ended: &Ended, host: Option<&str>, output: &str, reason: &str, log: Option<&str>, restarts: &str) {
        let rank = format!("rank {}{}", ended.rank, host.map_or(String::new(), |host| format!(" on {host}")));
        let how = match ended.how {
            How::Exited(code) => format!("exit code {code}"),
            How::Signalled(signal) => format!("signal {signal} ({}){}", signal_name(signal), ended.core()),
        };
        let mut text = String::new();
        // The tool's last line already quotes a single line.
        if output.lines().count() > 1 {
            text = format!("the last output of {rank}:\n");
            for line in output.lines() {
                text.push_str(&format!("  {} {line}\n", self.style.dim("|")));
            }
            text.push_str("devicemesh run: ");
        }
        let log = log.map_or(String::new(), |log| format!(" (log in {log})"));
        let first = self.style.wrong(&format!("{rank} failed first: {how}{reason}"));
        self.say(&format!("{text}{first}{log}{restarts}"));
    }
}

/// "rank 1", "ranks 1, 5".
pub fn list(ranks: &[u32]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", listed(ranks, NAMED))
}

/// "30 s".
fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}
