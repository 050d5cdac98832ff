//! The starter: starts an agent on each host, gives it its orders, and passes on what comes back.
//! [`end`](super::end) ends the job.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::end::AGAIN;
use super::failures::Failures;
use super::forward::forwarded;
use super::job::{Starter, without_end};
use super::list::Host;
use super::losses::Losses;
use super::node::{Node, State};
use super::plan::Plan;
use super::process::{Got, MESSAGE, Process};
use super::words::{Orders, Said, Share, Word, line};
use crate::failure::Failure;
use crate::run::cause::TIMED_OUT;
use crate::run::guard;
use crate::run::identity::{default_id, span};
use crate::run::options::Options;
use crate::run::output::{Sink, Sinks};
use crate::run::rendezvous::is_loopback;
use crate::run::report::FLUSH;
use crate::run::signals::Signals;
use crate::style::{Style, When};
use crate::words::count;

/// How many agents start at one time, so that hundreds of ssh do not start together.
const AT_ONCE: usize = 32;
/// How long the starter waits in silence for the agents.
const FIRST: Duration = Duration::from_secs(1);
/// How long the starter waits for the end of a line before it passes the line on.
const HALF_LINE: Duration = Duration::from_millis(100);
/// The time between two signs of life to the nodes.
const ALIVE: Duration = Duration::from_secs(5);

/// Runs the job on these hosts and gives its exit code.
pub fn start(options: &Options, hosts: Vec<Host>, signals: Signals) -> Result<u8, Failure> {
    let plan = Plan::new(options, hosts)?;
    let environment = forwarded(&options.hosts.forward)?;
    let directory = std::env::current_dir();
    let directory = directory.map_err(|error| Failure::new(1, format!("the current folder has gone: {error}")))?;
    signals.catch_rest()?;
    let mut starter = Starter {
        options,
        nodes: plan.hosts.into_iter().map(Node::new).collect(),
        signals,
        sinks: Sinks::open(true)
            .map_err(|error| Failure::new(1, format!("cannot start a thread for the output: {error}")))?,
        began: Instant::now(),
        style: Style::new(options.color, &io::stderr()),
        directory: directory.into(),
        environment,
        meeting: plan.meeting,
        port: plan.port,
        deadline: Instant::now() + options.meeting.rdzv_timeout,
        next_note: Instant::now() + FIRST,
        limit: None,
        code: None,
        has_met: false,
        interrupts: 0,
        first_signal: None,
        asked: None,
        is_stopped: false,
        is_twin_told: false,
        next_alive: Instant::now() + ALIVE,
        failures: Failures::default(),
        losses: Losses::default(),
        has_service: options.meeting.service()?.is_some(),
        reason: None,
        is_reason_above: false,
        teller: None,
        passed_on: HashMap::new(),
    };
    while starter.has_more() {
        starter.step();
    }
    starter.tell_failures(Instant::now());
    starter.tell_losses(true);
    starter.say_what_may_run();
    if let Some(reason) = starter.reason.as_ref().filter(|_| starter.is_reason_above) {
        starter.sinks.say(reason);
    }
    let unwritten = starter.flush();
    // The exit code tells a reader that the output is incomplete.
    Ok(match starter.exit_code() {
        0 => unwritten.unwrap_or(0),
        code => code,
    })
}

impl Starter<'_> {
    fn step(&mut self) {
        self.start_due_hosts(Instant::now());
        self.start_agents();
        self.give_orders();
        if self.limit.is_some() && self.waits_for_reader() {
            self.limit = None;
            self.limit_the_end();
        }
        self.obey_the_clock();
        let is_late = self.sleep();
        self.look_at_output();
        for signal in self.signals.take() {
            self.handle_signal(signal);
        }
        for index in 0..self.nodes.len() {
            let Some(process) = self.nodes[index].process.as_mut() else { continue };
            // The starter looks for the end of the process first, so that it reads everything that
            // was written before the end.
            let ended = process.ended();
            let is_over = matches!(self.nodes[index].state, State::Ended(_)) || ended.is_some();
            let reads = self.reads(is_over);
            let Some(process) = self.nodes[index].process.as_mut() else { continue };
            let got = match ended {
                Some(_) => process.take_rest(reads),
                None => process.take(reads, is_late),
            };
            for got in got {
                self.handle(index, got);
            }
            if let Some(status) = ended {
                self.process_ended(index, status);
            }
        }
    }

    /// Waits for something to do. Returns whether only time has passed.
    fn sleep(&self) -> bool {
        let mut entries = vec![PollFd::new(&self.signals, PollFlags::IN)];
        entries.extend(self.sinks.bell().map(|bell| PollFd::new(bell, PollFlags::IN)));
        let processes = || self.nodes.iter().filter_map(|node| node.process.as_ref());
        for node in &self.nodes {
            let reads = self.reads(matches!(node.state, State::Ended(_)));
            entries.extend(node.process.iter().flat_map(|process| process.entries(reads)));
        }
        let mut until = self.next_alive;
        if let Some(limit) = self.limit {
            until = until.min(limit).min(self.next_note);
        } else if self
            .nodes
            .iter()
            .any(|node| !node.is_left_behind && matches!(node.state, State::Starting | State::Ready(_)))
        {
            until = until.min(self.next_note).min(self.deadline);
        }
        let failures = self.failures.until().filter(|_| self.code.is_none());
        let again = self.nodes.iter().filter_map(|node| node.again);
        let until = failures.into_iter().chain(self.losses.due()).chain(again).fold(until, Instant::min);
        let mut left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        if processes().any(Process::has_begun) {
            left = left.min(HALF_LINE);
        }
        poll(&mut entries, Timespec::try_from(left).ok().as_ref()) == Ok(0)
    }

    /// Whether the standard output and the standard error of a host are read. The ranks wait while
    /// the reader of the starter's output does not read on. Once the node has ended (`is_over`),
    /// only its pipes have data left, and this is always read. Standard error has the marks, so it
    /// is read even while standard output is not, and always while the limit for the end runs.
    fn reads(&self, is_over: bool) -> [bool; 2] {
        let is_full = |is_error, full: fn(&Sink) -> bool| self.sinks.of(is_error).is_some_and(full);
        let at_the_end = self.limit.is_some() && !self.waits_for_reader();
        [is_over || !is_full(false, Sink::is_full), is_over || at_the_end || !is_full(true, Sink::is_very_full)]
    }

    /// Whether the job ends well, and only a reader that does not read on keeps the nodes from
    /// writing the rest. The time for their end begins when the reader reads on.
    fn waits_for_reader(&self) -> bool {
        let ends_well = self.code.is_none() && self.asked.is_none() && self.teller.is_none();
        let is_full = |is_error| self.sinks.of(is_error).is_some_and(Sink::is_full);
        ends_well && (is_full(false) || is_full(true))
    }

    /// Notices that the starter's output cannot be written.
    fn look_at_output(&mut self) {
        self.sinks.silence();
        for is_error in [false, true] {
            if let Some(error) = self.sinks.of(is_error).and_then(Sink::failure) {
                self.output_is_lost(is_error, &error);
            }
        }
    }

    /// Waits until a slow reader has taken everything. A signal ends the wait, and so does the end
    /// of the ranks' time after a signal or `--timeout`. Returns the exit code where bytes of the
    /// ranks are not written.
    fn flush(&mut self) -> Option<u8> {
        let (ending, interrupts, soon) = (&self.options.ending, self.interrupts, Instant::now() + FLUSH);
        let by_signal = self.asked.map(|asked| (asked + ending.grace_period).max(soon));
        let by_clock = ending.timeout.map(|timeout| (self.began + timeout).max(soon));
        while self.is_busy() && self.interrupts == interrupts {
            let now = Instant::now();
            let until = by_signal.into_iter().chain(by_clock).fold(now + AGAIN, Instant::min);
            if by_signal.is_some_and(|until| now >= until) {
                break;
            }
            if by_clock.is_some_and(|until| now >= until) {
                return self.sinks.give_up().then_some(TIMED_OUT);
            }
            let mut entries = vec![PollFd::new(&self.signals, PollFlags::IN)];
            entries.extend(self.sinks.bell().map(|bell| PollFd::new(bell, PollFlags::IN)));
            // One millisecond more, so that the moment has come when the wait ends.
            let left = until.saturating_duration_since(now) + Duration::from_millis(1);
            let _ = poll(&mut entries, Timespec::try_from(left).ok().as_ref());
            for signal in self.signals.take() {
                self.handle_signal(signal);
            }
        }
        self.sinks.give_up().then(|| 128 + self.first_signal.unwrap_or_default() as u8)
    }

    /// Whether some of the output is not written yet.
    fn is_busy(&mut self) -> bool {
        self.look_at_output();
        self.sinks.is_busy()
    }

    fn start_agents(&mut self) {
        let mut starting = self.nodes.iter().filter(|node| node.state == State::Starting).count();
        let has_whole_lines = self.options.output.prefix || self.options.output.timestamps;
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            if node.state != State::Planned || starting >= AT_ONCE {
                continue;
            }
            node.began = Instant::now();
            match Process::start(&node.planned.command, has_whole_lines) {
                Ok(process) => {
                    (node.process, node.state) = (Some(process), State::Starting);
                    starting += 1;
                }
                Err(error) => {
                    let program = node.planned.command[0].to_string_lossy().into_owned();
                    self.host_failed(index, format!("cannot start {program}: {error}"));
                }
            }
        }
    }

    /// Sends the orders to the agents that are ready, once the place of the store is known.
    fn give_orders(&mut self) {
        if self.code.is_none() && is_loopback(&self.meeting) {
            self.refuse_loopback();
        }
        // This function runs for each piece of the ranks' output, so it returns early: the code
        // below makes copies for all nodes.
        if self.is_stopped || !self.nodes.iter().any(|node| matches!(node.state, State::Ready(_))) {
            return;
        }
        let port = match (self.port, &self.nodes[0].state) {
            (Some(port), _) => port,
            (None, State::Ready(port)) => *port,
            (None, _) => return,
        };
        self.port = Some(port);
        let hosts: Vec<String> = self.nodes.iter().map(|node| node.name().to_owned()).collect();
        let arguments = arguments(self.options);
        let id = self.options.meeting.rdzv_id.clone();
        let id = id.unwrap_or_else(|| default_id(&host_name(), guard::visible().as_raw_nonzero().get() as u32));
        for (index, node) in self.nodes.iter_mut().enumerate() {
            let (State::Ready(_), Some(process)) = (&node.state, node.process.as_mut()) else { continue };
            let orders = Orders {
                directory: self.directory.clone(),
                environment: self.environment.clone(),
                arguments: arguments.clone(),
                share: Share {
                    node: index as u32,
                    hosts: hosts.clone(),
                    ranks: node.planned.host.ranks,
                    host: self.meeting.clone(),
                    port,
                    id: id.clone(),
                    starter: host_name(),
                },
            };
            process.order(&line(&orders));
            node.state = State::Ordered;
        }
    }

    fn obey_the_clock(&mut self) {
        let now = Instant::now();
        if now >= self.next_alive {
            self.next_alive = now + ALIVE;
            self.send(Word::Alive);
        }
        self.tell_losses(false);
        self.tell_failures(now);
        if self.limit.is_some_and(|limit| now >= limit) {
            let late = self.names(|node| node.process.is_some());
            if !late.is_empty() {
                self.say_more(&format!(
                    "{late} did not end in time, so the connection is closed; look there for ranks that still run, and for a devicemesh run that is stopped"
                ));
            }
            self.kill_all();
        }
        self.tell_wait_for_end(now);
        let silent = self.nodes.iter().filter(|node| node.is_silent()).count();
        if silent == 0 || self.limit.is_some() || self.failures.until().is_some() {
            return;
        }
        let names = self.names(Node::is_silent);
        if now >= self.deadline {
            let seconds = self.options.meeting.rdzv_timeout.as_secs_f64();
            self.note_silence(|_| format!("{seconds} s (--rdzv-timeout)"));
            self.say_failures();
            self.end(1);
        } else if now >= self.next_note {
            let (left, hosts) = (self.time_left(now), count(self.nodes.len(), "host"));
            // A login shell, or ssh itself, may have asked a question.
            let with_printed =
                |node: &Node| Some((format!("{} to {}", node.program(), node.target()), node.printed()?));
            let printed = self.nodes.iter().find_map(with_printed);
            let printed = printed.map_or(String::new(), |(host, text)| format!("; {host} has printed: {text}"));
            let limit = self.options.hosts.time_to_connect(self.options.meeting.rdzv_timeout);
            let connected = self.names(|node| node.is_connected(limit));
            let advice = match connected.as_str() {
                "" => String::new(),
                _ => format!("; {connected}: {}", self.options.hosts.why_silent()),
            };
            self.say(&format!("waiting for {silent} of {hosts} to answer: {names}; {left}{printed}{advice}"));
            self.next_note = now + AGAIN;
        }
    }

    /// Says how long the hosts may still take to answer. Where ssh may still be connecting, this
    /// also says when ssh gives up, because that is mostly before `--rdzv-timeout`.
    fn time_left(&self, now: Instant) -> String {
        let answer = span(self.deadline - now);
        let last = self.nodes.iter().filter(|node| node.state == State::Starting).map(|node| node.began).max();
        let connect = last.zip(self.options.hosts.connect_timeout()).map(|(last, time)| last + time);
        match connect.filter(|end| now < *end && *end < self.deadline) {
            Some(end) => format!(
                "{} left to connect (ssh's ConnectTimeout), {answer} left to answer (--rdzv-timeout)",
                span(end - now)
            ),
            None => format!("{answer} left (--rdzv-timeout)"),
        }
    }

    fn handle(&mut self, index: usize, got: Got) {
        match got {
            Got::Text { is_error: true, bytes } => {
                let is_new = self.is_new(index, &bytes);
                self.look_for_reason(index, &bytes, is_new);
                if is_new {
                    match bytes.starts_with(MESSAGE) {
                        // A rank of another node may have begun a line, so the message may need a
                        // new one.
                        true => self.sinks.say(String::from_utf8_lossy(&bytes).trim_end_matches('\n')),
                        false => self.write(true, bytes),
                    }
                }
            }
            Got::Text { is_error: false, bytes } => {
                if self.reason.is_some() && self.sinks.is_one() {
                    self.look_for_reason(index, &bytes, true);
                }
                self.write(false, bytes);
            }
            Got::Said(Said::Hello { version, .. }) if version != env!("CARGO_PKG_VERSION") => {
                let ours = env!("CARGO_PKG_VERSION");
                self.host_failed(
                    index,
                    format!("it has devicemesh {version}, and this is {ours}: install the same on all hosts"),
                );
            }
            Got::Said(Said::Hello { port, network, .. }) if self.nodes[index].state == State::Starting => {
                self.nodes[index].state = State::Ready(port);
                self.nodes[index].network = network;
                self.warn_of_twin(index);
            }
            Got::Said(Said::Hello { .. }) => {}
            Got::Said(Said::Cannot { message }) => self.host_failed(index, message),
            Got::Said(Said::Begun) if self.nodes[index].state == State::Ordered => {
                self.nodes[index].state = State::Working;
            }
            Got::Said(Said::Begun) => {}
            Got::Said(Said::Ending { cause }) => self.node_tells(index, &cause),
            Got::Said(Said::Gone { node, arrival, text }) => self.node_has_gone(index, node as usize, arrival, text),
            Got::Said(Said::Killed { text }) => self.node_was_killed(index, text),
            Got::Said(Said::Met { arrival }) => self.node_has_met(index, arrival),
            Got::Said(Said::Ended { code }) => self.node_ended(index, code),
        }
    }

    /// Writes a piece of the ranks' output.
    fn write(&self, is_error: bool, bytes: Vec<u8>) {
        if let Some(sink) = self.sinks.of(is_error) {
            sink.push_on(bytes);
        }
    }

    /// Whether a text is a rank's, or a message that no other node has said before this one.
    fn is_new(&mut self, index: usize, text: &[u8]) -> bool {
        let Some(message) = text.strip_prefix(MESSAGE) else { return true };
        let message = String::from_utf8_lossy(message);
        // The starter itself says for which hosts it waits.
        let is_starting = self.failures.until().is_some() || self.nodes.iter().any(Node::is_open);
        if message.starts_with("waiting for ") && is_starting {
            return false;
        }
        *self.passed_on.entry(without_end(&message).to_owned()).or_insert(index) == index
    }
}

/// Returns the command line for a node: the one of this process. A node writes into pipes, so the
/// command line says whether there is a terminal.
fn arguments(options: &Options) -> Vec<OsString> {
    let mut given: Vec<OsString> = guard::command_line().into_iter().skip(2).collect();
    let is_asked = given.iter().any(|word| word.to_string_lossy().starts_with("--color"));
    let is_colourful = Style::new(When::Auto, &io::stdout()).colour && Style::new(When::Auto, &io::stderr()).colour;
    if options.color == When::Auto && !is_asked && is_colourful {
        given.splice(0..0, ["--color".into(), "always".into()]);
    }
    given
}
