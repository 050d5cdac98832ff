//! `devicemesh run`: starts this node's ranks, watches them, and leaves none behind.
//!
//! Like torchrun's agent it serves the store in which the ranks meet, so the port is known to be
//! free and the store outlives every rank. On several nodes it ends the job everywhere for one
//! cause (see [`nodes`]). Two processes do this work, and guard each other (see [`guard`]).

mod assignment;
mod binding;
mod cause;
mod dry_run;
mod end;
mod ending;
pub mod environment;
mod guard;
mod hosts;
mod identity;
mod job;
mod launcher;
mod meeting;
mod nodelist;
mod nodes;
pub mod open_files;
mod options;
mod orphans;
mod output;
mod program;
mod ranks;
mod reason;
mod relaying;
mod rendezvous;
mod report;
mod restart;
mod signals;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::getpid;

use self::assignment::Assignment;
use self::binding::Binding;
use self::cause::Cause;
pub use self::cause::signal_name;
use self::ending::STAY;
pub use self::guard::command_line;
use self::guard::{Part, Work};
pub use self::hosts::agent;
use self::hosts::{Control, Said};
use self::job::{Job, Phase};
pub use self::nodes::{
    Board, Card, Peer, Roster, ask, cards, end_questions, from_a_peer, left, listener, next_question, roster,
};
use self::nodes::{News, Nodes, TELL};
pub use self::options::{HELP, Options};
use self::output::Output;
use self::ranks::{LAST_LINES, Ranks};
pub use self::restart::Unit;
use self::signals::Signals;
pub use self::signals::{is_ignored, survive_too_large_files};
use crate::failure::Failure;
use crate::stdio::say;

/// How long the tool still reads output after the last rank has ended.
const DRAIN: Duration = Duration::from_secs(1);

/// The pause before the tool looks again whether all processes of the ranks have ended.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// The pause before this node tells the store again that its ranks have ended, where the store has
/// not answered.
const AGAIN: Duration = Duration::from_secs(3);

/// How long one question to the store may take when this node tells it again. In this time the main
/// thread handles no signal.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// Runs the job and gives its exit code.
pub fn run(options: &Options) -> Result<u8, Failure> {
    options.check()?;
    // The guard must come first, because the keeper runs everything after it once more. A hostfile
    // that is a pipe can be read only once.
    let mut signals = None;
    if options.hosts.starts() && !options.dry_run {
        match guard::stand_guard(Work::Hosts)? {
            Part::Worker(caught) => signals = Some(caught),
            Part::Front(ended) => {
                if let Some(killed) = ended.told("which reaches the hosts") {
                    let when = hosts::when_without_starter();
                    say(&format!("devicemesh run: {killed}; the ranks on all hosts end {when}"));
                }
                return Ok(ended.code());
            }
        }
    }
    if let Some(hosts) = options.hosts.listed()? {
        return match signals {
            Some(signals) => hosts::start(options, hosts, signals),
            None => hosts::show(options, hosts),
        };
    }
    let (reads_input, is_agent) = (options.output.stdin.0.is_some(), options.hosts.agent.is_some());
    let work = Work::Ranks { reads_input, is_agent };
    let part = if options.dry_run { None } else { Some(guard::stand_guard(work)?) };
    let mut done = match part {
        None => run_here(options, None),
        Some(Part::Worker(signals)) => run_here(options, Some(signals)),
        Some(Part::Front(ended)) => {
            if let Some(killed) = ended.told("the parent of the ranks") {
                say_killed(options, &killed);
            }
            Ok(ended.code())
        }
    };
    if let Some(share) = &options.hosts.agent {
        if guard::visible() == getpid() {
            Said::Ended { code: done.as_ref().map_or_else(|failure| failure.code, |code| *code) }.say();
        }
        if let Err(failure) = &mut done {
            // One terminal shows all nodes. The name of the node stands last. So the starter can
            // pass on one message for hundreds of nodes that say the same.
            failure.message += &format!("; {} says so", share.name_of(share.node));
        }
    }
    done
}

/// Says that this node has ended because its keeper was killed.
fn say_killed(options: &Options, killed: &str) {
    match &options.hosts.agent {
        Some(share) => {
            let name = share.name_of(share.node);
            let text = format!("{name}: {killed}; all ranks there are ended");
            Said::Gone { node: share.node, arrival: None, text }.say();
        }
        None => say(&format!("devicemesh run: {killed}; all ranks are ended")),
    }
}

/// Runs this node's part of the job. Without signals, this is a dry run.
fn run_here(options: &Options, signals: Option<Signals>) -> Result<u8, Failure> {
    let share = options.hosts.agent.as_ref();
    let mut rendezvous = options.meeting.rendezvous(options.ranks_here()?, &options.command, &options.hosts)?;
    rendezvous.restart = options.restart.standing();
    let is_for_ranks = rendezvous.restart.unit == Some(Unit::Rank);
    rendezvous.heals = is_for_ranks && rendezvous.nodes > 1;
    let binding = Binding::choose(&options.binding, rendezvous.ranks)?;
    let Some(signals) = signals else {
        return dry_run::show(options, rendezvous, &binding);
    };
    if let Some(folder) = &options.output.log_dir {
        std::fs::create_dir_all(folder).map_err(|error| {
            let why = match folder.is_file() {
                true => "it is a file, not a folder".to_owned(),
                false => error.to_string(),
            };
            Failure::new(1, format!("cannot make --log-dir {}: {why}", folder.display()))
        })?;
    }
    let output = Output::new(options.output.route(rendezvous.nodes > 1, options.color));
    let one_node = rendezvous.is_private();
    let open_files =
        one_node.then(|| open_files::make_room_for_one_node(rendezvous.ranks, output.route())).transpose()?;
    signals.catch_rest()?;
    let mut job = Job::new(options, &rendezvous, binding, output, signals);
    (job.open_files, job.control) = (open_files, Control::of(share));
    match job.run(rendezvous) {
        Ok(()) => Ok(job.finish()),
        Err(failure) => {
            job.output.wait_for_messages();
            Err(failure)
        }
    }
}

impl Job<'_> {
    /// Waits for the other nodes. Returns `None` when the job ended before it began.
    fn wait_for_nodes(&mut self) -> Option<Assignment> {
        while self.cause.is_none() {
            if let Some(assignment) = self.step() {
                if self.cause.is_none() {
                    return Some(assignment);
                }
                // The job is over by the time this node hears that it can begin. Where it starts
                // again, this node keeps its number and the run's name.
                self.assignment = Some(assignment);
            }
        }
        None
    }

    /// Starts the ranks. Without other nodes a failure is this function's, else it ends the job.
    fn start(&mut self, assignment: Assignment) -> Result<(), Failure> {
        let assignment = &*self.assignment.insert(assignment);
        let serves = self.nodes.as_ref().is_some_and(Nodes::serves);
        let served = if serves { assignment.world_size } else { 0 };
        let ranks = open_files::Ranks { here: assignment.ranks, served, tools: assignment.nodes };
        let limit = self.open_files.map_or_else(|| open_files::make_room(ranks, self.output.route()), Ok);
        self.open_files = limit.as_ref().ok().copied();
        let is_agent = self.options.hosts.agent.is_some();
        let begun = limit.and_then(|limit| self.output.begin(assignment, is_agent).map(|()| limit));
        let started = begun
            .and_then(|limit| Ranks::start(assignment, &self.options.command, &self.binding, limit, &mut self.output));
        let host_name = assignment.host_name.as_ref();
        self.reporter = host_name.map(|host| format!("node {} ({host})", assignment.node));
        match started {
            Ok(ranks) => {
                self.ranks = Some(ranks);
                self.restarts.has_started();
            }
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
        while self.is_busy() || (self.nodes.is_some() && self.cause.is_none()) {
            let is_due = self.tell_again.map_or(!told, |moment| Instant::now() >= moment);
            if !self.is_busy() && is_due {
                let limit = if std::mem::replace(&mut told, true) { TELL_AGAIN } else { TELL };
                let is_heard = self.nodes.as_ref().is_none_or(|nodes| nodes.finished(limit));
                self.tell_again = (!is_heard).then(|| Instant::now() + AGAIN);
            }
            self.step();
        }
        self.tell_again = None;
        self.end_orphans();
        self.output.drain(Instant::now() + DRAIN);
        self.end_for_loss();
        // The other nodes read the cause in the store and then end their ranks, so this node serves
        // the store until they have gone. A tool that gives up has served it for longer than that.
        self.phase = Phase::Killed;
        self.deadline = (!self.gives_up).then(|| Instant::now() + self.options.ending.longest() + STAY);
        while self.nodes.as_ref().is_some_and(Nodes::serves)
            && !self.store_is_unused
            && self.deadline.is_some_and(|end| Instant::now() < end)
        {
            self.step();
        }
    }

    /// Waits a moment for the processes that the ranks have left behind, while it passes on what
    /// they write, and then kills them.
    fn end_orphans(&mut self) {
        let Some(ranks) = &mut self.ranks else { return };
        let until = Instant::now() + LAST_LINES;
        while !self.gives_up && ranks.have_left() && Instant::now() < until {
            let mut entries: Vec<_> = self.output.entries().collect();
            let _ = poll(&mut entries, Some(&LOOK));
            let ready: Vec<bool> = entries.iter().map(|entry| !entry.revents().is_empty()).collect();
            self.output.pass_on(&ready);
        }
        ranks.end_orphans();
    }

    /// Sleeps until there is an event, and handles it. Returns this node's share of
    /// the job when the nodes have met.
    fn step(&mut self) -> Option<Assignment> {
        self.obey_the_clock();
        let starter_is_gone = self.control.as_ref().and_then(Control::deadline);
        let moments = self.next_moment().into_iter().chain(starter_is_gone).chain(self.restart_moment());
        let moments = moments.chain(self.tell_again).chain(self.ranks.as_ref().and_then(Ranks::next_moment));
        self.sleep(moments.min());
        self.handle_signals();
        for order in self.control.as_mut().map(Control::orders).unwrap_or_default() {
            self.obey(order);
        }
        let mut assignment = None;
        for news in self.nodes.as_ref().map(Nodes::news).unwrap_or_default() {
            match news {
                News::Note(text) => self.say(&text),
                News::Missed { node, arrival, text } => self.tell_missed(node, arrival, text),
                News::Joined(joined) => {
                    self.restarts.has_met = true;
                    self.restarts.standing.restarts = joined.restarts;
                    if self.options.hosts.agent.is_some() {
                        let arrival = self.nodes.as_ref().and_then(Nodes::arrival);
                        self.tell_starter(&Said::Met { arrival });
                    }
                    assignment = Some(joined);
                }
                News::Over(cause) => self.end_here(cause),
                News::AtOnce if self.running() == 0 => {}
                News::AtOnce => self.kill_at_second_signal("before a second signal at another node"),
                News::StoreUnused => self.store_is_unused = true,
            }
        }
        // Where this process was stopped (SIGSTOP) beyond the moment of `--timeout`, all ranks may
        // have ended meanwhile. Nobody knows whether they ended in time, so the job ends by
        // `--timeout`.
        if self.phase == Phase::Running {
            self.obey_the_clock();
        }
        let ended = self.ranks.as_mut().map(Ranks::reap).unwrap_or_default();
        guard::wait_if_ending();
        self.ranks_ended(ended);
        self.start_due_ranks();
        self.end_if_asked_between_attempts(false);
        assignment
    }

    /// Sleeps until a signal comes, a rank writes, there is news from the other nodes, or that
    /// moment has come. Passes on what the ranks have written.
    fn sleep(&mut self, until: Option<Instant>) {
        let mut entries = vec![PollFd::new(&self.signals, PollFlags::IN)];
        entries.extend(self.nodes.as_ref().map(|nodes| PollFd::new(nodes, PollFlags::IN)));
        let control = self.control.as_ref().and_then(Control::entry);
        entries.extend(control.as_ref().map(|control| PollFd::new(control, PollFlags::IN)));
        let before = entries.len();
        entries.extend(self.output.entries());
        // One millisecond more, so that the moment has come when the sleep ends.
        let until = until.into_iter().chain(self.output.next_moment()).min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        // A signal may interrupt poll. Then no entry is ready.
        let _ = poll(&mut entries, timeout.as_ref());
        let ready: Vec<bool> = entries[before..].iter().map(|entry| !entry.revents().is_empty()).collect();
        self.output.pass_on(&ready);
        self.end_for_loss();
    }
}
