//! `devicemesh run`: starts this node's ranks, watches them, and leaves none behind.
//!
//! Like torchrun's agent it serves the store that the ranks meet in, so the port is known to be free and the store outlives every rank. On several
//! nodes it ends the job everywhere for one cause (see [`crate::nodes`]).

mod options;

use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server};

pub use self::options::{HELP, Options, endpoint};
use crate::cause::{Cause, Ended, signal_name};
use crate::nodes::{News, Nodes};
use crate::output::Output;
use crate::ranks::{Failure, Plan, Ranks};
use crate::signals::Signals;
use crate::style::Style;

/// After SIGTERM, how long a rank has before SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(5);
/// After the last rank has ended, how long its output may still come.
const DRAIN: Duration = Duration::from_secs(1);
/// Beyond the time in which other nodes end their ranks, how long the store is served for them.
const STAY: Duration = Duration::from_secs(10);
/// How many ranks that failed after the first are named.
const NAMED: usize = 8;

/// How far the end of the job has come.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// SIGTERM follows at that moment.
    Grace(Instant),
    /// SIGKILL follows at that moment.
    Terminating(Instant),
    Killed,
}

/// A job as this node sees it.
struct Job<'a> {
    options: &'a Options,
    signals: Signals,
    output: Output,
    /// None where there are no other nodes.
    nodes: Option<Nodes>,
    ranks: Option<Ranks>,
    called: Option<String>,
    end: Option<Instant>,
    phase: Phase,
    /// Why the job ends.
    cause: Option<Cause>,
    /// No other node needs the store.
    alone: bool,
    style: Style,
}

/// Runs the job and gives its exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    options.check()?;
    let meeting = options.meeting(options.count()?);
    if let Some(folder) = &options.log_dir {
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::new(1, format!("cannot make --log-dir {}: {error}", folder.display())))?;
    }
    // Signals are blocked before any thread starts, so that all threads leave them to the loop below.
    let signals = Signals::catch()?;
    let mut job = Job {
        options,
        signals,
        output: Output::new(options.route()),
        nodes: None,
        ranks: None,
        called: None,
        end: options.timeout.map(|timeout| Instant::now() + timeout),
        phase: Phase::Running,
        cause: None,
        alone: false,
        style: Style::new(options.color, &std::io::stderr()),
    };
    let mut server = None;
    let plan = if meeting.nodes > 1 {
        job.called = Some(host_name());
        job.nodes = Some(Nodes::meet(meeting)?);
        job.joined()
    } else {
        let server = server.insert(
            Secret::from_environment()
                .and_then(|secret| Server::at(&meeting.host, meeting.port, secret))
                .map_err(|error| Failure::new(1, error.message()))?,
        );
        server.expect_ranks(meeting.ranks as usize);
        Some(Plan::alone(meeting, server.local_addr().port()))
    };
    if let Some(plan) = plan {
        job.start(&plan)?;
    }
    job.watch();
    Ok(job.finish())
}

impl Job<'_> {
    fn say(&self, text: &str) {
        eprintln!("devicemesh run: {text}");
    }

    fn running(&self) -> usize {
        self.ranks.as_ref().map_or(0, Ranks::running)
    }

    /// Waits for the other nodes; none when the job ended before it began.
    fn joined(&mut self) -> Option<Plan> {
        while self.cause.is_none() {
            if let Some(plan) = self.step() {
                // It may be over by the time we hear that it can begin.
                return self.cause.is_none().then_some(plan);
            }
        }
        None
    }

    fn start(&mut self, plan: &Plan) -> Result<(), Failure> {
        let started = Ranks::start(plan, &self.options.command, &mut self.output);
        let nodes = plan.nodes;
        self.called = plan.called.clone().map(|host| format!("node {} ({host})", plan.node));
        match started {
            Ok(ranks) => self.ranks = Some(ranks),
            Err(failure) if nodes == 1 => return Err(failure),
            Err(Failure { code, message }) => self.ends(Cause::Start { code, message, node: self.called.clone() }),
        }
        Ok(())
    }

    /// Until the ranks have ended, here and elsewhere.
    fn watch(&mut self) {
        let mut told = false;
        while self.running() > 0 || (self.nodes.is_some() && self.cause.is_none()) {
            if self.running() == 0 && !told {
                told = true;
                self.nodes.as_ref().inspect(|nodes| nodes.finished());
            }
            self.step();
        }
        if let Some(ranks) = &self.ranks {
            ranks.end_orphans();
        }
        self.output.drain(Instant::now() + DRAIN);
        // The others read the cause in the store, and their ranks end there.
        let limit = self.options.grace_period + TERM_TO_KILL + STAY;
        self.phase = Phase::Killed;
        self.end = Some(Instant::now() + limit);
        while self.nodes.as_ref().is_some_and(Nodes::serves) && !self.alone && self.end.is_some() {
            self.step();
        }
    }

    /// Sleeps until something happens, and does what it asks for.
    fn step(&mut self) -> Option<Plan> {
        self.move_on();
        let next = match self.phase {
            Phase::Running => self.end,
            Phase::Grace(until) | Phase::Terminating(until) => Some(until),
            Phase::Killed => self.end,
        };
        let bell = self.nodes.as_ref().map(Nodes::bell);
        for signal in self.signals.wait(next, &mut self.output, bell) {
            self.got(signal);
        }
        let mut plan = None;
        for news in self.nodes.as_ref().map(Nodes::news).unwrap_or_default() {
            match news {
                News::Joined(joined) => plan = Some(joined),
                News::Over(cause) => self.ends_with(cause),
                News::Alone => self.alone = true,
            }
        }
        for ended in self.ranks.as_mut().map(Ranks::reap).unwrap_or_default() {
            if ended.failed() && self.cause.is_none() {
                self.failed(ended);
            }
        }
        plan
    }

    /// What the clock asks for.
    fn move_on(&mut self) {
        let now = Instant::now();
        match self.phase {
            Phase::Running if self.end.is_some_and(|end| now >= end) => {
                let seconds = self.options.timeout.unwrap_or_default().as_secs_f64();
                self.ends(Cause::Timeout { seconds, node: self.called.clone() });
            }
            Phase::Grace(until) if now >= until => {
                self.signal(libc::SIGTERM);
                self.phase = Phase::Terminating(now + TERM_TO_KILL);
            }
            Phase::Terminating(until) if now >= until => {
                self.signal(libc::SIGKILL);
                self.phase = Phase::Killed;
                self.end = None;
            }
            Phase::Killed if self.end.is_some_and(|end| now >= end) => self.end = None,
            _ => {}
        }
    }

    fn signal(&self, signal: i32) {
        if let Some(ranks) = &self.ranks {
            ranks.signal(signal);
        }
    }

    fn got(&mut self, signal: i32) {
        match signal {
            libc::SIGCHLD => {}
            libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => {
                self.signal(signal);
                if self.cause.is_none() {
                    self.ends(Cause::Signal { signal, node: self.called.clone() });
                } else if self.running() == 0 {
                    // Nothing is left but to stay for the others.
                    self.end = None;
                }
            }
            other => self.signal(other),
        }
    }

    fn failed(&mut self, ended: Ended) {
        let output = self.output.last_words(ended.rank);
        let log = self.output.route().log(ended.rank).map(|path| path.display().to_string());
        let host = self.nodes.as_ref().map(|_| host_name());
        self.ends(Cause::Rank { ended, host, output, log });
    }

    /// The job ends here, and so everywhere, for this cause or the one that another node was first with.
    fn ends(&mut self, cause: Cause) {
        let cause = match &self.nodes {
            Some(nodes) => nodes.end(cause),
            None => cause,
        };
        self.ends_with(cause);
    }

    fn ends_with(&mut self, cause: Cause) {
        if self.cause.is_some() {
            return;
        }
        let (now, grace) = (Instant::now(), self.options.grace_period);
        let running = self.running();
        self.phase = match &cause {
            Cause::Signal { signal, .. } => {
                self.signal(*signal);
                Phase::Terminating(now + grace.max(Duration::from_secs(1)))
            }
            Cause::Timeout { .. } => Phase::Grace(now),
            _ => Phase::Grace(now + grace),
        };
        let wrong = self.style.wrong(&cause.to_string());
        let here = if self.nodes.is_some() { " here" } else { "" };
        match &cause {
            Cause::Done => {}
            Cause::Signal { .. } => self.say(&format!("{wrong}, passed on to {}{here}", ranks(running))),
            Cause::Timeout { .. } => self.say(&format!("{wrong}; ending {}{here}", ranks(running))),
            _ => self.say(&format!("{wrong}{}", ending(running, here, grace))),
        }
        self.cause = Some(cause);
    }

    /// The last word on why the job ended, and the exit code.
    fn finish(self) -> u8 {
        let Some(cause) = &self.cause else { return 0 };
        let first = match cause {
            Cause::Rank { ended, .. } => Some(ended.rank),
            _ => None,
        };
        let later = self.ranks.as_ref().map(|ranks| ranks.failed_after(first)).unwrap_or_default();
        for ended in later.iter().take(NAMED) {
            self.say(&format!("afterwards {ended}"));
        }
        if later.len() > NAMED {
            self.say(&format!("and {} more ranks", later.len() - NAMED));
        }
        if let Cause::Rank { ended, host, output, log } = cause {
            self.report(ended, host.as_deref(), output, log.as_deref(), !later.is_empty());
        }
        cause.code()
    }

    /// Once more and at the end, where people look: who failed first, and what it wrote last.
    fn report(&self, ended: &Ended, host: Option<&str>, output: &str, log: Option<&str>, again: bool) {
        if output.is_empty() && log.is_none() && !again {
            return;
        }
        let host = host.map_or(String::new(), |host| format!(" on {host}"));
        let how = match ended.how {
            crate::cause::How::Exited(code) => format!("exit code {code}"),
            crate::cause::How::Signalled(signal) => format!("signal {signal} ({})", signal_name(signal)),
        };
        let log = log.map_or(String::new(), |log| format!(", log in {log}"));
        let colon = if output.is_empty() { "" } else { "; its last output:" };
        let first = self.style.wrong(&format!("rank {}{host} failed first: {how}", ended.rank));
        self.say(&format!("{first}{log}{colon}"));
        for line in output.lines() {
            eprintln!("  {} {line}", self.style.dim("|"));
        }
    }
}

fn ranks(count: usize) -> String {
    if count == 1 { "1 rank".to_owned() } else { format!("{count} ranks") }
}

fn ending(running: usize, here: &str, grace: Duration) -> String {
    let seconds = grace.as_secs_f64();
    match running {
        0 => String::new(),
        1 => format!("; ending the other rank{here}, in {seconds} s if it does not end itself"),
        n => format!("; ending the other {n} ranks{here}, in {seconds} s if they do not end themselves"),
    }
}
