//! Ends a job on this node: for which cause, with which signals to the ranks, and when.
//!
//! | the job ends because | the ranks get | and SIGKILL |
//! |---|---|---|
//! | the tool got SIGINT, SIGTERM, SIGHUP or SIGQUIT | that signal at once | after `--grace-period`, or at a second signal |
//! | `--timeout` passed, or output is lost | SIGTERM at once | after `--grace-period` |
//! | a rank failed, a node has gone, ... | SIGTERM after `--failure-grace` | [`TERM_TO_KILL`] later |

use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;
use rustix::process::{Signal, kill_process};

use super::cause::{Cause, Ended, signal_name};
use super::ending::TERM_TO_KILL;
use super::guard;
use super::hosts::Order;
use super::job::{Job, Phase};
use super::output::LastWords;
use super::ranks::Ranks;
use super::report::list;
use super::signals::is_impatient;
use crate::proc::state;
use crate::terminal::stops_writers;
use crate::words::count;

/// How long the kernel may take to end a rank that has got SIGKILL, before the user is told. A rank
/// with much memory takes a while.
const KILLED_END: Duration = Duration::from_secs(10);

/// How long the guard may take to notice that the front has ended.
const GUARD_NOTICES: Duration = Duration::from_millis(50);

impl Job<'_> {
    /// When [`obey_the_clock`](Job::obey_the_clock) has something to do.
    pub fn next_moment(&self) -> Option<Instant> {
        match self.phase {
            // While the ranks are stopped, --timeout does not pass. It also does nothing once
            // the job is about to end anyway.
            Phase::Running if self.stopped.is_some() || self.restarts.is_ended() => None,
            Phase::Running => self.timeout,
            Phase::Killed => self.deadline.into_iter().chain(self.next_look).min(),
            Phase::Grace(until) | Phase::Terminating(until) => Some(until),
        }
    }

    /// Does what is due by now.
    pub fn obey_the_clock(&mut self) {
        let now = Instant::now();
        if self.next_moment().is_none_or(|moment| now < moment) {
            return;
        }
        match self.phase {
            Phase::Running => {
                let seconds = self.options.ending.timeout.unwrap_or_default().as_secs_f64();
                let cause = Cause::Timeout { seconds, node: self.reporter.clone() };
                if self.end_between_attempts(&cause) {
                    self.announce(&cause);
                } else {
                    self.end_everywhere(cause);
                }
            }
            Phase::Grace(_) => {
                self.ask_to_end(Signal::TERM);
                self.phase = Phase::Terminating(now + TERM_TO_KILL);
            }
            Phase::Terminating(_) => {
                let late = self.kill();
                self.tell_killed(&late, "in time");
            }
            Phase::Killed => {
                self.deadline = self.deadline.filter(|deadline| now < *deadline);
                if self.next_look.take_if(|moment| now >= *moment).is_some() {
                    self.tell_unended();
                }
            }
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(ranks) = &self.ranks {
            ranks.signal(signal);
        }
    }

    /// Sends the ranks a signal that asks them to end, and then SIGCONT, because a rank that
    /// somebody has stopped (SIGSTOP) handles the signal only after that. systemd and Slurm do the
    /// same.
    fn ask_to_end(&self, signal: Signal) {
        self.signal(signal);
        self.signal(Signal::CONT);
    }

    /// Kills the ranks that still run, because of a second signal. `when` says which one it is.
    pub fn kill_at_second_signal(&mut self, when: &str) {
        let killed = self.kill();
        // A starter of several hosts got the second signal, so no node has to tell of it.
        if self.control.is_none() {
            self.tell_killed(&killed, when);
        }
    }

    /// Kills the ranks that still run, and returns them.
    fn kill(&mut self) -> Vec<u32> {
        let running = self.ranks.as_ref().map(Ranks::still_running).unwrap_or_default();
        self.signal(Signal::KILL);
        (self.phase, self.deadline) = (Phase::Killed, None);
        if !self.unended_is_told {
            self.next_look = Some(Instant::now() + KILLED_END);
        }
        running
    }

    /// Says which ranks have not ended since SIGKILL. The kernel cannot end a process that waits
    /// for a driver or a file system that never answers. So the next signal ends the tool without
    /// such ranks. A node that has lost its starter gets no signal, so it ends at once.
    fn tell_unended(&mut self) {
        let unended = self.ranks.as_ref().map(Ranks::processes).unwrap_or_default();
        let Some((rank, pid)) = unended.first() else { return };
        let ranks: Vec<u32> = unended.iter().map(|(rank, _)| *rank).collect();
        let (have, them) = if ranks.len() == 1 { ("has", "it") } else { ("have", "them") };
        let what = match state(*pid) {
            Some('D') => "waits in the kernel, for a driver or a file system (state D)".to_owned(),
            state => format!("is in state {}", state.unwrap_or('?')),
        };
        let (ranks, on_host, seconds) = (list(&ranks), self.on_host(), KILLED_END.as_secs());
        self.say(&format!(
            "{ranks}{on_host} {have} not ended {seconds} s after SIGKILL; process {pid} of rank {rank} {what}; the next signal ends devicemesh run without {them}"
        ));
        self.unended_is_told = true;
        self.gives_up = self.control.as_ref().is_some_and(|control| control.entry().is_none());
    }

    /// Says which ranks were killed. `when` follows the words "had not ended".
    fn tell_killed(&self, killed: &[u32], when: &str) {
        if !killed.is_empty() {
            self.say(&format!("killed {}{}, which had not ended {when}", list(killed), self.on_host()));
        }
    }

    /// Handles the signals that have come since the last time.
    pub fn handle_signals(&mut self) {
        for signal in self.signals.take() {
            self.handle_signal(signal);
        }
    }

    pub fn handle_signal(&mut self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        match signal {
            Signal::CHILD => self.look_for_stopped(),
            Signal::INT | Signal::TERM | Signal::HUP | Signal::QUIT => self.asked_to_end(signal),
            Signal::TSTP => self.stop(),
            Signal::CONT => self.go_on(),
            other => self.signal(other),
        }
    }

    /// Looks for ranks that are stopped because they have used the terminal. Such a rank would wait
    /// silently and for ever.
    fn look_for_stopped(&mut self) {
        let stopped = self.ranks.as_ref().map(Ranks::stopped_by_terminal).unwrap_or_default();
        match self.phase {
            // The rank was continued after the signal that ends it, so this is a new stop.
            Phase::Terminating(_) => stopped.into_iter().for_each(|(rank, signal)| self.kill_stopped(rank, signal)),
            _ => stopped.first().into_iter().for_each(|(rank, signal)| self.tell_stopped(*rank, *signal)),
        }
    }

    /// Kills a rank that the terminal has stopped again while it was to end, because it would be
    /// stopped until the end of its time.
    fn kill_stopped(&self, rank: u32, signal: Signal) {
        let (name, on_host) = (signal_name(signal.as_raw()), self.on_host());
        self.say(&format!(
            "rank {rank}{on_host} has used the terminal again and is stopped by {name}, so it cannot end by itself; it is killed now"
        ));
        self.ranks.as_ref().inspect(|ranks| ranks.kill(rank));
    }

    /// Says, once in a job, that a rank is stopped because it has used the terminal.
    fn tell_stopped(&mut self, rank: u32, signal: Signal) {
        if self.stop_is_told {
            return;
        }
        self.stop_is_told = true;
        let (name, on_host) = (signal_name(signal.as_raw()), self.on_host());
        let why = match signal {
            Signal::TTIN => format!("read the terminal: let it read a file, or standard input with --stdin {rank}"),
            _ if stops_writers() => {
                "write to the terminal, where `stty tostop` was set after the job began: set `stty -tostop`, and stop (Ctrl-Z) and continue (fg) the job".to_owned()
            }
            _ => "change the terminal's settings, as stty and a prompt for a password do: start it without that"
                .to_owned(),
        };
        self.say(&format!("rank {rank}{on_host} is stopped by {name}, because a rank may not {why}"));
    }

    /// Handles a signal by which the user ends the job, or ends it at once.
    fn asked_to_end(&mut self, signal: Signal) {
        self.gives_up |= self.unended_is_told;
        match self.asked {
            None => {
                self.asked = Some(Instant::now());
                self.end_by(signal, Cause::Signal { signal: signal.as_raw(), node: self.reporter.clone() });
            }
            Some(first) if is_impatient(first, signal) => self.end_at_once(signal),
            Some(_) => self.say_too_early(signal),
        }
    }

    /// Ends the job with this signal, for this cause. Where the job ends already, the ranks get the
    /// signal, too.
    fn end_by(&mut self, signal: Signal, cause: Cause) {
        let is_noted = self.end_between_attempts(&cause);
        if self.cause.is_none() && !is_noted {
            let is_later = self.end_everywhere(cause);
            let is_asked = is_later || matches!(self.cause, Some(Cause::Signal { .. } | Cause::Ordered));
            if !is_asked {
                self.ask_to_end_soon(signal);
            }
            return;
        }
        if self.cause.is_some() {
            self.ask_to_end_soon(signal);
        }
        if is_noted {
            self.announce(&cause);
        }
    }

    /// Asks the ranks of a job that ends already to end. They have `--grace-period` from now on,
    /// but not more time than they had before.
    fn ask_to_end_soon(&mut self, signal: Signal) {
        self.ask_to_end(signal);
        let latest = Instant::now() + self.options.ending.grace_period;
        match self.phase {
            Phase::Grace(until) => self.phase = Phase::Terminating(latest.min(until + TERM_TO_KILL)),
            Phase::Terminating(until) => self.phase = Phase::Terminating(latest.min(until)),
            // The ranks have ended, and this tool only serves the store for the other nodes. The
            // signal ends that, too.
            Phase::Killed => self.deadline = None,
            Phase::Running => {}
        }
    }

    fn end_at_once(&mut self, signal: Signal) {
        self.gives_up |= self.unended_is_told;
        self.end_if_asked_between_attempts(true);
        if self.running() == 0 || self.gives_up {
            self.deadline = None;
        } else if self.phase != Phase::Killed {
            let name = signal_name(signal.as_raw());
            self.kill_at_second_signal(&format!("before a second signal ({name})"));
            self.nodes.as_ref().inspect(|nodes| nodes.end_at_once());
        }
    }

    /// Stops the ranks and then this process, as a shell's job that gets Ctrl-Z. The ranks lead
    /// process groups of their own, so the terminal does not stop them. Ranks that are to end are
    /// not stopped, but no rank starts again before the job is continued.
    fn stop(&mut self) {
        if self.stopped.is_none() {
            self.stopped = Some(Instant::now());
            if self.cause.is_none() {
                self.signal(Signal::STOP);
            }
            if self.cause.is_none() && self.control.is_none() {
                let (ranks, here) = (count(self.running(), "rank"), self.here());
                self.say_after_key(&format!("stopped {ranks}{here}; SIGCONT (fg or bg in the shell) continues"));
            }
        }
        // The starter of a job on several hosts stops itself.
        if self.control.is_none() {
            // The shell's prompt might come before the message otherwise.
            self.output.wait_for_messages();
            let _ = kill_process(guard::visible(), Signal::STOP);
        }
    }

    /// Continues ranks that are stopped. The time in which they were stopped does not count.
    fn go_on(&mut self) {
        if let Some(since) = self.stopped.take() {
            let stopped_for = since.elapsed();
            self.timeout = self.timeout.map(|timeout| timeout + stopped_for);
            self.deadline = self.deadline.map(|deadline| deadline + stopped_for);
            self.signal(Signal::CONT);
        }
    }

    /// Does what the starter of the job orders.
    pub fn obey(&mut self, order: Order) {
        match order {
            Order::Signal(signal) => {
                // The starter got the signal, so no node is named.
                let reporter = self.reporter.take();
                self.handle_signal(signal);
                self.reporter = reporter;
            }
            Order::AtOnce(signal) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    self.end_at_once(signal);
                }
            }
            Order::End { lost: None } => {
                self.is_ended_by_starter = true;
                // The order is no signal of the user. So it does not count as a second signal, and
                // the user's first signal after it does not count as a second one, either.
                if self.asked.is_none() {
                    self.end_by(Signal::TERM, Cause::Ordered);
                }
            }
            Order::End { lost: Some(number) } => {
                self.is_ended_by_starter = true;
                let share = self.options.hosts.agent.as_ref();
                let node = share.map_or(String::new(), |share| share.name_of(number));
                let cause = Cause::Gone { node, number: Some(number), is_killed: None };
                self.end_between_attempts(&cause);
                self.end_everywhere(cause);
            }
            Order::StarterGone(host) => {
                // The connection also ends when the front of this node is killed.
                std::thread::sleep(GUARD_NOTICES);
                guard::wait_if_ending();
                let node = self.reporter.as_ref().map_or(String::new(), |node| format!("{node}: "));
                let message =
                    format!("{node}the connection to the devicemesh run that started this job on {host} has ended");
                let number = self.options.hosts.agent.as_ref().map(|share| share.node);
                let cause = Cause::Lost { message, number };
                self.end_between_attempts(&cause);
                match self.goes_on_without_nodes() {
                    // The starter may have lost this host alone. Then the others go on.
                    true => self.end_here(cause),
                    false => _ = self.end_everywhere(cause),
                }
                self.hurry();
                self.gives_up |= self.unended_is_told;
                // Nobody reads the messages of this node any more, and the other nodes end in this
                // way, too.
                if self.running() == 0 {
                    self.deadline = None;
                }
            }
        }
    }

    /// Shortens the time that the ranks have to end, because nobody is left who could end them
    /// sooner.
    fn hurry(&mut self) {
        let latest = Instant::now() + TERM_TO_KILL;
        match self.phase {
            Phase::Running | Phase::Grace(_) => {
                self.ask_to_end(Signal::TERM);
                self.phase = Phase::Terminating(latest);
            }
            Phase::Terminating(until) => self.phase = Phase::Terminating(until.min(latest)),
            Phase::Killed => {}
        }
    }

    /// Ends the job because of the rank that failed first. `more` others failed at the same time.
    pub fn rank_failed(&mut self, ended: Ended, more: usize) {
        let LastWords { lines: output, reason } = self.output.last_words(ended.rank);
        let reason = reason.map_or(String::new(), |reason| reason.to_string());
        let log = self.name_of_log(ended.rank);
        let host = self.reporter.as_ref().map(|_| host_name().into());
        let (rank, restarts) = (ended.rank, self.told_restarts().into());
        let cause = self.agree(Cause::Rank { ended, host, output, reason, log, restarts });
        // Where another node has reported a rank before, all failed ranks of this node failed after
        // that one.
        let is_first = matches!(&cause, Cause::Rank { ended, .. } if ended.rank == rank);
        self.failed_together = if is_first { more } else { 0 };
        self.end_here(cause);
    }

    /// Ends the job when some of the ranks' output is lost, as the error of a full disk would end
    /// a rank that writes itself. Where the job ends already, this only tells the user, once.
    pub fn end_for_loss(&mut self) {
        let Some(loss) = self.output.loss().filter(|_| !self.loss_is_told) else { return };
        self.loss_is_told = true;
        let cause = Cause::Output { message: loss.to_owned(), node: self.reporter.clone() };
        let is_between_attempts = self.end_between_attempts(&cause);
        match self.cause {
            None if !is_between_attempts => _ = self.end_everywhere(cause),
            _ => self.say(&self.style.wrong(&cause.to_string())),
        }
    }

    /// Ends the job on all nodes, for this cause or for the one that another node reported earlier.
    /// If the job starts again after the other node's cause, it ends for this cause as soon as the
    /// nodes have met again. Returns whether it does.
    pub fn end_everywhere(&mut self, cause: Cause) -> bool {
        let is_later = self.agree_and_end(cause.clone());
        if is_later {
            // The failure of the other node leaves the ranks time to end by themselves. This cause
            // does not.
            match cause {
                Cause::Signal { signal, .. } => {
                    Signal::from_named_raw(signal).into_iter().for_each(|signal| self.ask_to_end_soon(signal));
                }
                Cause::Ordered | Cause::Timeout { .. } | Cause::Output { .. } => self.ask_to_end_soon(Signal::TERM),
                _ => {}
            }
            self.announce(&cause);
        }
        is_later
    }

    /// Does what [`end_everywhere`](Job::end_everywhere) does where the user knows the cause
    /// already. Returns whether the job ends for the cause only when the nodes have met again.
    pub fn agree_and_end(&mut self, cause: Cause) -> bool {
        let stands = self.agree(cause.clone());
        let is_later = self.starts_again(&stands);
        if is_later {
            self.end_in_next_meeting(cause);
        }
        self.end_here(stands);
        is_later
    }

    /// Tells the other nodes this cause. Returns the cause that stands, which another node may have
    /// reported earlier.
    fn agree(&self, cause: Cause) -> Cause {
        match &self.nodes {
            Some(nodes) => nodes.end(cause),
            None => cause,
        }
    }

    /// Begins to end the ranks of this node, unless that has begun.
    pub fn end_here(&mut self, cause: Cause) {
        if self.cause.is_some() {
            return;
        }
        self.restarts.forget_due();
        let (now, ending) = (Instant::now(), &self.options.ending);
        self.phase = match &cause {
            Cause::Signal { signal, .. } => {
                if let Some(signal) = Signal::from_named_raw(*signal) {
                    self.ask_to_end(signal);
                }
                Phase::Terminating(now + ending.grace_period)
            }
            Cause::Ordered | Cause::Timeout { .. } | Cause::Output { .. } => {
                self.ask_to_end(Signal::TERM);
                Phase::Terminating(now + ending.grace_period)
            }
            // The command line is wrong on all ranks, and the others have nothing to report.
            Cause::Rank { ended, .. } if self.is_told(ended.how) => {
                self.ask_to_end(Signal::TERM);
                Phase::Terminating(now + TERM_TO_KILL)
            }
            _ => Phase::Grace(now + ending.failure_grace),
        };
        // Ranks that this tool has stopped are continued for every cause, so that they can react to
        // it.
        self.go_on();
        // A cause that was noted between two attempts was announced then.
        if self.restarts.ended_by.as_ref() != Some(&cause) {
            self.announce(&cause);
        }
        self.cause = Some(cause);
    }
}

#[cfg(test)]
#[path = "end_tests.rs"]
mod tests;
