//! `devicemesh run`: starts this node's ranks, watches them, and leaves none behind.
//!
//! Like torchrun's agent it serves the store in which the ranks meet, so the port is known to be
//! free and the store outlives every rank. On several nodes it ends the job everywhere for one
//! cause (see [`nodes`]).

mod assignment;
mod cause;
mod nodes;
mod open_files;
mod options;
mod output;
mod ranks;
mod rendezvous;
mod signals;
mod tail;

use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;
use devicemesh::rendezvous::store::{Secret, Server};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Rlimit, Signal};

use self::assignment::Assignment;
use self::cause::{Cause, Ended, How, signal_name};
use self::nodes::{News, Nodes};
pub use self::options::{HELP, Options};
use self::output::Output;
use self::ranks::Ranks;
use self::signals::Signals;
use crate::failure::Failure;
use crate::stdio::say;
use crate::style::Style;

/// How long a rank has between SIGTERM and SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(5);
/// How long the tool still reads output after the last rank has ended.
const DRAIN: Duration = Duration::from_secs(1);
/// How long the tool still serves the store after the time that other nodes need to end their
/// ranks.
const STAY: Duration = Duration::from_secs(10);
/// The shortest grace period after a signal, so that a second signal is not needed at once.
const LEAST_GRACE_AFTER_SIGNAL: Duration = Duration::from_secs(1);
/// How many ranks that failed after the first are named.
const NAMED: usize = 8;

/// How far the end of the job has come.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Running,
    /// The ranks may end by themselves. They get SIGTERM at that moment.
    Grace(Instant),
    /// The ranks have got SIGTERM. They get SIGKILL at that moment.
    Terminating(Instant),
    /// The ranks have got SIGKILL, or have ended.
    Killed,
}

/// A job as this node sees it.
struct Job<'a> {
    options: &'a Options,
    signals: Signals,
    output: Output,
    /// The other nodes. `None` in a job of one node.
    nodes: Option<Nodes>,
    /// The limit on open files that the ranks get. In a job of several nodes it is known when the
    /// nodes have met.
    open_files: Option<Rlimit>,
    /// The ranks of this node, once they are started.
    ranks: Option<Ranks>,
    /// The name of this node in a cause that it reports. `None` in a job of one node.
    reporter: Option<String>,
    /// When the current phase ends by the clock: by `--timeout` while the ranks run, and by STAY
    /// when they have ended.
    deadline: Option<Instant>,
    phase: Phase,
    /// Why the job ends. `None` while nothing has ended it.
    cause: Option<Cause>,
    /// Whether no other node needs the store any more.
    store_is_unused: bool,
    /// Whether the user was told that some of the output is lost.
    loss_is_told: bool,
    /// The style of the tool's own messages.
    style: Style,
}

/// Runs the job and gives its exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    options.check()?;
    let rendezvous = options.rendezvous(options.ranks_here()?);
    if let Some(folder) = &options.log_dir {
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::new(1, format!("cannot make --log-dir {}: {error}", folder.display())))?;
    }
    let output = Output::new(options.route());
    let one_node = rendezvous.nodes == 1;
    let open_files =
        one_node.then(|| open_files::make_room_for_one_node(rendezvous.ranks, output.route())).transpose()?;
    let mut job = Job {
        options,
        signals: Signals::catch()?,
        output,
        open_files,
        nodes: None,
        ranks: None,
        reporter: None,
        deadline: options.timeout.map(|timeout| Instant::now() + timeout),
        phase: Phase::Running,
        cause: None,
        store_is_unused: false,
        loss_is_told: false,
        style: Style::new(options.color, &std::io::stderr()),
    };
    // The ranks of one node need the server until the job ends.
    let mut server = None;
    let assignment = if one_node {
        let server = server.insert(
            Secret::from_environment()
                .and_then(|secret| Server::at(&rendezvous.host, rendezvous.port, secret))
                .map_err(|error| Failure::new(1, error.message()))?,
        );
        server.expect_ranks(rendezvous.ranks as usize);
        Some(Assignment::whole_job(rendezvous, server.local_addr().port()))
    } else {
        job.reporter = Some(host_name());
        job.nodes = Some(Nodes::meet(rendezvous)?);
        job.wait_for_nodes()
    };
    if let Some(assignment) = assignment {
        job.start(&assignment)?;
    }
    job.watch();
    Ok(job.finish())
}

impl Job<'_> {
    fn say(&self, text: &str) {
        say(&format!("devicemesh run: {text}"));
    }

    fn running(&self) -> usize {
        self.ranks.as_ref().map_or(0, Ranks::running)
    }

    /// Waits for the other nodes. Returns `None` when the job ended before it began.
    fn wait_for_nodes(&mut self) -> Option<Assignment> {
        while self.cause.is_none() {
            if let Some(assignment) = self.step() {
                // The job may be over by the time this node hears that it can begin.
                return self.cause.is_none().then_some(assignment);
            }
        }
        None
    }

    /// Starts the ranks. Without other nodes a failure is this function's, else it ends the job.
    fn start(&mut self, assignment: &Assignment) -> Result<(), Failure> {
        let serves = self.nodes.as_ref().is_some_and(Nodes::serves);
        let served = if serves { assignment.world_size } else { 0 };
        let ranks = open_files::Ranks { here: assignment.ranks, served, tools: assignment.nodes };
        let limit = self.open_files.map_or_else(|| open_files::make_room(ranks, self.output.route()), Ok);
        let started = limit.and_then(|limit| Ranks::start(assignment, &self.options.command, limit, &mut self.output));
        let host_name = assignment.host_name.as_ref();
        self.reporter = host_name.map(|host| format!("node {} ({host})", assignment.node));
        match started {
            Ok(ranks) => self.ranks = Some(ranks),
            Err(failure) if assignment.nodes == 1 => return Err(failure),
            Err(Failure { code, message }) => {
                self.end_everywhere(Cause::Start { code, message, node: self.reporter.clone() });
            }
        }
        Ok(())
    }

    /// Returns when the ranks have ended, here and on the other nodes.
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
        self.tell_loss();
        // The other nodes read the cause in the store and then end their ranks, so this node serves
        // the store until they have gone.
        let limit = self.options.grace_period + TERM_TO_KILL + STAY;
        self.phase = Phase::Killed;
        self.deadline = Some(Instant::now() + limit);
        while self.nodes.as_ref().is_some_and(Nodes::serves) && !self.store_is_unused && self.deadline.is_some() {
            self.step();
        }
    }

    /// Sleeps until there is an event, and handles it. Returns this node's share of
    /// the job when the nodes have met.
    fn step(&mut self) -> Option<Assignment> {
        self.obey_the_clock();
        let until = match self.phase {
            Phase::Running | Phase::Killed => self.deadline,
            Phase::Grace(until) | Phase::Terminating(until) => Some(until),
        };
        self.sleep(until);
        for signal in self.signals.take() {
            self.handle_signal(signal);
        }
        let mut assignment = None;
        for news in self.nodes.as_ref().map(Nodes::news).unwrap_or_default() {
            match news {
                News::Joined(joined) => assignment = Some(joined),
                News::Over(cause) => self.end_here(cause),
                News::StoreUnused => self.store_is_unused = true,
            }
        }
        for ended in self.ranks.as_mut().map(Ranks::reap).unwrap_or_default() {
            if ended.failed() && self.cause.is_none() {
                self.rank_failed(ended);
            }
        }
        assignment
    }

    /// Sleeps until a signal comes, a rank writes, there is news from the other nodes, or that
    /// moment has come. Passes on what the ranks have written.
    fn sleep(&mut self, until: Option<Instant>) {
        let mut entries = vec![PollFd::new(&self.signals, PollFlags::IN)];
        entries.extend(self.nodes.as_ref().map(|nodes| PollFd::new(nodes, PollFlags::IN)));
        let before = entries.len();
        entries.extend(self.output.entries());
        // One millisecond more, so that the moment has come when the sleep ends.
        let left = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        // A signal may interrupt poll. Then no entry is ready.
        let _ = poll(&mut entries, timeout.as_ref());
        let ready: Vec<bool> = entries[before..].iter().map(|entry| !entry.revents().is_empty()).collect();
        self.output.pass_on(&ready);
        self.tell_loss();
    }

    /// Says once that some of the ranks' output is lost.
    fn tell_loss(&mut self) {
        if let Some(loss) = self.output.loss().filter(|_| !self.loss_is_told) {
            self.say(&format!("{}: some of the ranks' output is lost; they run on", self.style.wrong(loss)));
            self.loss_is_told = true;
        }
    }

    /// Does what is due by now.
    fn obey_the_clock(&mut self) {
        let now = Instant::now();
        match self.phase {
            Phase::Running if self.deadline.is_some_and(|deadline| now >= deadline) => {
                let seconds = self.options.timeout.unwrap_or_default().as_secs_f64();
                self.end_everywhere(Cause::Timeout { seconds, node: self.reporter.clone() });
            }
            Phase::Grace(until) if now >= until => {
                self.signal(Signal::TERM);
                self.phase = Phase::Terminating(now + TERM_TO_KILL);
            }
            Phase::Terminating(until) if now >= until => {
                self.signal(Signal::KILL);
                self.phase = Phase::Killed;
                self.deadline = None;
            }
            Phase::Killed if self.deadline.is_some_and(|deadline| now >= deadline) => self.deadline = None,
            _ => {}
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(ranks) = &self.ranks {
            ranks.signal(signal);
        }
    }

    fn handle_signal(&mut self, number: i32) {
        let Some(signal) = Signal::from_named_raw(number) else { return };
        match signal {
            Signal::CHILD => {}
            Signal::INT | Signal::TERM | Signal::HUP | Signal::QUIT => {
                self.signal(signal);
                if self.cause.is_none() {
                    self.end_everywhere(Cause::Signal { signal: number, node: self.reporter.clone() });
                } else if self.running() == 0 {
                    // Only the store is still served for the other nodes, and a signal means that
                    // the user wants to end that too.
                    self.deadline = None;
                }
            }
            other => self.signal(other),
        }
    }

    fn rank_failed(&mut self, ended: Ended) {
        let output = self.output.last_words(ended.rank);
        let log = self.output.route().log(ended.rank).map(|path| path.display().to_string());
        let host = self.nodes.as_ref().map(|_| host_name());
        self.end_everywhere(Cause::Rank { ended, host, output, log });
    }

    /// Ends the job on all nodes, for this cause or for the one that another node reported earlier.
    fn end_everywhere(&mut self, cause: Cause) {
        let cause = match &self.nodes {
            Some(nodes) => nodes.end(cause),
            None => cause,
        };
        self.end_here(cause);
    }

    /// Begins to end the ranks of this node, unless that has begun.
    fn end_here(&mut self, cause: Cause) {
        if self.cause.is_some() {
            return;
        }
        let (now, grace) = (Instant::now(), self.options.grace_period);
        let running = self.running();
        self.phase = match &cause {
            Cause::Signal { signal, .. } => {
                if let Some(signal) = Signal::from_named_raw(*signal) {
                    self.signal(signal);
                }
                Phase::Terminating(now + grace.max(LEAST_GRACE_AFTER_SIGNAL))
            }
            Cause::Timeout { .. } => Phase::Grace(now),
            _ => Phase::Grace(now + grace),
        };
        let wrong = self.style.wrong(&cause.to_string());
        let here = if self.nodes.is_some() { " here" } else { "" };
        match &cause {
            Cause::Done => {}
            Cause::Signal { .. } => self.say(&format!("{wrong}, passed on to {}{here}", count(running))),
            Cause::Timeout { .. } => self.say(&format!("{wrong}; ending {}{here}", count(running))),
            _ => self.say(&format!("{wrong}{}", ending(running, here, grace))),
        }
        self.cause = Some(cause);
    }

    /// Says at the end why the job ended, and gives the exit code.
    fn finish(self) -> u8 {
        let first = match &self.cause {
            Some(Cause::Rank { ended, .. }) => Some(ended.rank),
            _ => None,
        };
        let later = self.ranks.as_ref().map(|ranks| ranks.failed_after(first)).unwrap_or_default();
        for ended in later.iter().take(NAMED) {
            self.say(&format!("afterwards {ended}"));
        }
        if later.len() > NAMED {
            self.say(&format!("and {} more ranks", later.len() - NAMED));
        }
        if let Some(Cause::Rank { ended, host, output, log }) = &self.cause {
            self.report(ended, host.as_deref(), output, log.as_deref(), !later.is_empty());
        }
        match self.cause.as_ref().map_or(0, Cause::code) {
            // The exit code tells a reader that the output is incomplete.
            0 if self.output.loss().is_some() => 1,
            code => code,
        }
    }

    /// Says which rank failed first and what it wrote last. It stands at the end, because people
    /// look there. `again` tells whether messages about other ranks came after the first one about
    /// this rank.
    fn report(&self, ended: &Ended, host: Option<&str>, output: &str, log: Option<&str>, again: bool) {
        if output.is_empty() && log.is_none() && !again {
            return;
        }
        let host = host.map_or(String::new(), |host| format!(" on {host}"));
        let how = match ended.how {
            How::Exited(code) => format!("exit code {code}"),
            How::Signalled(signal) => format!("signal {signal} ({})", signal_name(signal)),
        };
        let log = log.map_or(String::new(), |log| format!(", log in {log}"));
        let colon = if output.is_empty() { "" } else { "; its last output:" };
        let first = self.style.wrong(&format!("rank {}{host} failed first: {how}", ended.rank));
        self.say(&format!("{first}{log}{colon}"));
        for line in output.lines() {
            say(&format!("  {} {line}", self.style.dim("|")));
        }
    }
}

/// "1 rank", "2 ranks".
fn count(ranks: usize) -> String {
    if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") }
}

/// Says what happens to the ranks that still run.
fn ending(running: usize, here: &str, grace: Duration) -> String {
    let seconds = grace.as_secs_f64();
    match running {
        0 => String::new(),
        1 => format!("; ending the other rank{here}, in {seconds} s if it does not end itself"),
        n => format!("; ending the other {n} ranks{here}, in {seconds} s if they do not end themselves"),
    }
}
