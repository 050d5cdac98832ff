//! The tool's standard output and standard error, where the ranks' output passes through the tool.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::route::Route;
use super::sink::Sink;
use crate::stdio::{same_file, say};

/// How long the tool waits for its own messages to be written. It waits before Ctrl-Z stops it, and
/// after it has given up on a reader.
const LAST_LINE: Duration = Duration::from_millis(500);

/// The sinks of this process. Before the ranks start there are none.
#[derive(Default)]
pub struct Sinks {
    /// An eventfd that rings when there is news of the sinks. `None` before the ranks start.
    bell: Option<Arc<OwnedFd>>,
    /// Writes to standard output, where the ranks' standard output passes through the tool.
    out: Option<Sink>,
    /// Writes to standard error, where the ranks' standard error does. It is `out` where both are
    /// one file, so that their lines do not mix.
    err: Option<Sink>,
    /// Writes the tool's own messages to standard error. It is `err` where there is one. A terminal
    /// that is stopped (Ctrl-S) blocks only the thread of this sink.
    own: Option<Sink>,
}

impl Sinks {
    /// Starts the threads that write what passes through the tool on this route, and the tool's
    /// own messages.
    pub fn start(route: &Route) -> io::Result<Sinks> {
        match route.reads(true) && route.is_shown() {
            true => Sinks::open(route.reads(false)),
            false => {
                let bell = new_bell()?;
                let own = Some(Sink::start(true, Arc::clone(&bell))?);
                Ok(Sinks { bell: Some(bell), own, ..Sinks::default() })
            }
        }
    }

    /// Starts the thread that writes to standard error, and with `has_out` the one that writes to
    /// standard output.
    pub fn open(has_out: bool) -> io::Result<Sinks> {
        let bell = new_bell()?;
        let out = has_out.then(|| Sink::start(false, Arc::clone(&bell))).transpose()?;
        let err = match &out {
            Some(out) if same_file(io::stdout(), io::stderr()) => out.clone(),
            _ => Sink::start(true, Arc::clone(&bell))?,
        };
        let own = Some(err.clone());
        Ok(Sinks { bell: Some(bell), out, err: Some(err), own })
    }

    /// The sink of the ranks' standard error, else of their standard output, where there is one.
    pub fn of(&self, is_error: bool) -> Option<&Sink> {
        if is_error { self.err.as_ref() } else { self.out.as_ref() }
    }

    /// The descriptor that is readable when there is news of the sinks.
    pub fn bell(&self) -> Option<&Arc<OwnedFd>> {
        self.bell.as_ref()
    }

    /// Silences the bell, so that it can ring again.
    pub fn silence(&self) {
        if let Some(bell) = &self.bell {
            // The read fails if the bell has not rung. That is no error.
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
    }

    /// Says a line on standard error, after what the ranks have written there. Where their standard
    /// error passes through this process, the line begins a new line.
    pub fn say(&self, line: &str) {
        match &self.own {
            Some(sink) => sink.push_own(format!("{line}\n").into_bytes()),
            None => say(line),
        }
    }

    /// Writes a mark for the starter of the job to standard error, after what the ranks have
    /// written there. Where the starter reads no more, the mark waits in the queue, and this
    /// process goes on.
    pub fn mark(&self, mark: &str) {
        match &self.own {
            Some(sink) => sink.push_mark(mark.as_bytes().to_vec()),
            None => say(mark.trim_end()),
        }
    }

    /// Whether there are bytes that are not written yet. The bell then rings when that may have
    /// changed.
    pub fn is_busy(&self) -> bool {
        [&self.out, &self.own].into_iter().flatten().any(Sink::is_busy)
    }

    /// Whether both are one sink, because they write to one file.
    pub fn is_one(&self) -> bool {
        self.out.is_some() && same_file(io::stdout(), io::stderr())
    }

    /// How many bytes of the ranks are not written yet.
    fn unwritten(&self) -> usize {
        let err = self.err.as_ref().filter(|_| !self.is_one());
        [self.out.as_ref(), err].into_iter().flatten().map(Sink::unwritten).sum()
    }

    /// Gives up on a reader that does not read on: says how many bytes of the ranks are not
    /// written, and returns whether there are any.
    pub fn give_up(&self) -> bool {
        let unwritten = self.unwritten();
        match unwritten {
            0 => {}
            1 => self.say("devicemesh run: 1 byte of the ranks' output is not written"),
            bytes => self.say(&format!("devicemesh run: {bytes} bytes of the ranks' output are not written")),
        }
        self.wait_for_messages();
        unwritten > 0
    }

    /// Waits a moment until the tool's own messages are written.
    pub fn wait_for_messages(&self) {
        let until = Instant::now() + LAST_LINE;
        while self.own.as_ref().is_some_and(Sink::is_busy) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn new_bell() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}
