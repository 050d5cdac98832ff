//! Passes on what the ranks write. It goes to the tool's own descriptors, with the rank before each
//! line, into a file for each rank, or both. The end of it is kept for the report of a failure.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::tail::{TAIL, last_lines};
use crate::stdio::{cannot_print, ignore_gone_reader, write_all};
use crate::style::{Style, When};

/// The longest line in bytes that is passed on whole. A longer one is passed on in parts.
const MAX_LINE: usize = 64 << 10;
/// How many times a pipe of a rank that has ended is read for its last words, so that a process
/// that holds the pipe and goes on writing cannot keep the tool.
const LAST_READS: usize = 1024;

/// The places to which the ranks' output goes.
pub struct Route {
    /// Whether the rank stands before each line.
    pub prefix: bool,
    /// The folder with a file for each rank, where there is one.
    pub logs: Option<PathBuf>,
    /// Whether the output is also shown, where it goes into files.
    pub tee: bool,
    /// Whether standard error always passes through the tool, so that a report on any node can
    /// quote it.
    pub keep_stderr: bool,
    /// When the rank prefixes of the lines are coloured.
    pub color: When,
}

impl Route {
    /// The file of a rank.
    pub fn log(&self, rank: u32) -> Option<PathBuf> {
        self.logs.as_ref().map(|folder| folder.join(format!("rank-{rank}.log")))
    }

    /// The number of files that this process holds open for the output of one rank: pipes, and for
    /// each of them the log.
    pub fn files_per_rank(&self) -> u64 {
        match (self.logs.is_some(), self.prefix) {
            (true, _) if self.only_logs() => 0,
            (true, _) => 4,
            (false, true) => 2,
            (false, false) => u64::from(self.reads_stderr()),
        }
    }

    fn only_logs(&self) -> bool {
        self.logs.is_some() && !self.tee
    }

    /// Whether standard error passes through the tool where standard output does not.
    fn reads_stderr(&self) -> bool {
        self.keep_stderr || !io::stderr().is_terminal()
    }
}

/// The output of all ranks that passes through the tool.
pub struct Output {
    route: Route,
    /// The pipes that have not ended.
    streams: Vec<Stream>,
    /// The last bytes of each rank's standard error, by rank, for those that have written any.
    tails: Vec<(u32, Vec<u8>)>,
    /// The style of what goes to standard output.
    out: Style,
    /// The style of what goes to standard error.
    err: Style,
    /// Why some of the output is lost. The first reason stays.
    loss: Option<String>,
}

/// One output of one rank.
struct Stream {
    rank: u32,
    /// The end from which the tool reads. It is non-blocking.
    pipe: File,
    /// Whether this is standard error.
    is_error: bool,
    /// The rank's file, where there is one.
    log: Option<File>,
    /// The line that has begun and not ended, where lines get a prefix.
    line: Vec<u8>,
}

impl Output {
    pub fn new(route: Route) -> Output {
        let (out, err) = (Style::new(route.color, &io::stdout()), Style::new(route.color, &io::stderr()));
        Output { route, streams: Vec::new(), tails: Vec::new(), out, err, loss: None }
    }

    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Why some of the ranks' output could not be written, where that has happened.
    pub fn loss(&self) -> Option<&str> {
        self.loss.as_deref()
    }

    /// Sets up a rank's output before the rank starts. Returns its file, where the tool writes
    /// that.
    pub fn prepare(&self, rank: u32, child: &mut Command) -> io::Result<Option<File>> {
        let file = match self.route.log(rank) {
            Some(path) => {
                let append = |path: &PathBuf| File::options().create(true).append(true).open(path);
                // A file that exists is from an earlier job, so it is emptied.
                let file = File::create(&path).and_then(|_| append(&path));
                Some(file.map_err(|error| io::Error::other(format!("cannot write {}: {error}", path.display())))?)
            }
            None => None,
        };
        match file {
            Some(file) if self.route.only_logs() => {
                child.stdout(file.try_clone()?).stderr(file);
                Ok(None)
            }
            file => {
                if self.route.prefix || file.is_some() {
                    child.stdout(Stdio::piped()).stderr(Stdio::piped());
                } else if self.route.reads_stderr() {
                    child.stderr(Stdio::piped());
                }
                Ok(file)
            }
        }
    }

    /// Takes over the pipes of a rank that has started.
    pub fn add(
        &mut self,
        rank: u32,
        stdout: Option<ChildStdout>,
        stderr: Option<ChildStderr>,
        log: Option<File>,
    ) -> io::Result<()> {
        for (pipe, is_error) in [(stdout.map(OwnedFd::from), false), (stderr.map(OwnedFd::from), true)] {
            let Some(pipe) = pipe else { continue };
            rustix::io::ioctl_fionbio(&pipe, true)?;
            let log = log.as_ref().map(File::try_clone).transpose()?;
            self.streams.push(Stream { rank, pipe: pipe.into(), is_error, log, line: Vec::new() });
        }
        Ok(())
    }

    /// The open pipes, one entry for poll(2) each.
    pub fn entries(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.streams.iter().map(|stream| PollFd::new(&stream.pipe, PollFlags::IN))
    }

    /// Passes on what can be read from the pipes, where `ready` says so for each of
    /// [`entries`](Output::entries).
    pub fn pass_on(&mut self, ready: &[bool]) {
        let mut ready = ready.iter();
        let mut streams = std::mem::take(&mut self.streams);
        streams.retain_mut(|stream| match ready.next() {
            Some(true) => self.read(stream),
            _ => true,
        });
        self.streams = streams;
    }

    /// Passes on the rest, until every pipe has ended or that moment has come.
    pub fn drain(&mut self, until: Instant) {
        let a_while = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        while !self.streams.is_empty() && Instant::now() < until {
            let mut entries: Vec<PollFd<'_>> = self.entries().collect();
            let _ = poll(&mut entries, Some(&a_while));
            let ready: Vec<bool> = entries.iter().map(|entry| !entry.revents().is_empty()).collect();
            self.pass_on(&ready);
        }
        for mut stream in std::mem::take(&mut self.streams) {
            self.finish(&mut stream);
        }
    }

    /// The last lines of a rank's standard error, or of its file. Empty where they did not pass
    /// through the tool. The rank has ended.
    pub fn last_words(&mut self, rank: u32) -> String {
        if self.route.only_logs() {
            let read = || -> io::Result<Vec<u8>> {
                let mut file = File::open(self.route.log(rank).unwrap_or_default())?;
                let length = file.metadata()?.len();
                file.seek(SeekFrom::Start(length.saturating_sub(TAIL as u64)))?;
                let mut text = Vec::new();
                file.take(TAIL as u64).read_to_end(&mut text)?;
                Ok(text)
            };
            return last_lines(&read().unwrap_or_default());
        }
        // Because the rank has ended, everything that it wrote is in its pipe.
        let mut streams = std::mem::take(&mut self.streams);
        for stream in streams.iter_mut().filter(|stream| stream.rank == rank && stream.is_error) {
            for _ in 0..LAST_READS {
                if !is_readable(&stream.pipe) || !self.read(stream) {
                    break;
                }
            }
        }
        self.streams = streams;
        self.tails.iter().find(|(known, _)| *known == rank).map_or(String::new(), |(_, tail)| last_lines(tail))
    }

    /// Reads once from a pipe and passes it on. Returns false when the pipe has ended.
    fn read(&mut self, stream: &mut Stream) -> bool {
        let mut buffer = [0; 16 << 10];
        match stream.pipe.read(&mut buffer) {
            Ok(0) => {
                self.finish(stream);
                false
            }
            Ok(count) => {
                self.take(stream, &buffer[..count]);
                true
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => true,
            Err(_) => {
                self.finish(stream);
                false
            }
        }
    }

    /// Passes on what a rank has written.
    fn take(&mut self, stream: &mut Stream, bytes: &[u8]) {
        if let Some(log) = &mut stream.log {
            let written = log.write_all(bytes);
            let path = self.route.log(stream.rank).unwrap_or_default();
            self.note(written, |error| format!("cannot write {}: {error}", path.display()));
        }
        if stream.is_error {
            self.keep(stream.rank, bytes);
        }
        if !self.route.prefix {
            return self.write(stream.is_error, bytes);
        }
        stream.line.extend_from_slice(bytes);
        let lines = stream.line.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        if let Some(end) = lines.or((stream.line.len() > MAX_LINE).then_some(stream.line.len())) {
            let rest = stream.line.split_off(end);
            let lines = std::mem::replace(&mut stream.line, rest);
            self.write_with_prefix(stream, &lines);
        }
    }

    /// Keeps the last bytes of a rank's standard error.
    fn keep(&mut self, rank: u32, bytes: &[u8]) {
        let index = self.tails.iter().position(|(known, _)| *known == rank).unwrap_or_else(|| {
            self.tails.push((rank, Vec::new()));
            self.tails.len() - 1
        });
        let tail = &mut self.tails[index].1;
        tail.extend_from_slice(bytes);
        let too_long = tail.len().saturating_sub(TAIL);
        tail.drain(..too_long);
    }

    /// Passes on the last line of a pipe that has ended.
    fn finish(&mut self, stream: &mut Stream) {
        let rest = std::mem::take(&mut stream.line);
        if !rest.is_empty() {
            self.write_with_prefix(stream, &rest);
        }
    }

    fn write_with_prefix(&mut self, stream: &Stream, lines: &[u8]) {
        let style = if stream.is_error { self.err } else { self.out };
        let prefix = style.numbered(stream.rank, &format!("[rank {}]", stream.rank));
        let mut text = Vec::with_capacity(lines.len() + 16);
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            text.extend_from_slice(prefix.as_bytes());
            text.push(b' ');
            text.extend_from_slice(line);
        }
        if text.last() != Some(&b'\n') {
            text.push(b'\n');
        }
        self.write(stream.is_error, &text);
    }

    /// Writes to the tool's standard output or standard error.
    fn write(&mut self, is_error: bool, bytes: &[u8]) {
        match is_error {
            true => {
                self.note(write_all(io::stderr(), bytes), |error| format!("cannot write to standard error: {error}"))
            }
            false => self.note(write_all(io::stdout(), bytes), cannot_print),
        }
    }

    /// Remembers that output is lost. The ranks run on, because their work is worth more than their
    /// output.
    fn note(&mut self, written: io::Result<()>, message: impl FnOnce(&io::Error) -> String) {
        if let (None, Err(error)) = (&self.loss, ignore_gone_reader(written)) {
            self.loss = Some(message(&error));
        }
    }
}

fn is_readable(pipe: impl AsFd) -> bool {
    let mut entry = [PollFd::new(&pipe, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut entry, Some(&now)).is_ok() && entry[0].revents().contains(PollFlags::IN)
}
