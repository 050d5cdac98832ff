//! Passes on what the ranks write. It goes to the tool's own descriptors, into files for each
//! rank, or both, with the time and the rank before each line where asked. The tool keeps the last
//! lines for the report of a failure.

mod input;
mod lines;
mod logs;
mod options;
mod restarts;
mod route;
mod sink;
mod sinks;
mod stream;
mod tails;

use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use devicemesh::logging::utc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use self::input::copy_terminal;
use self::lines::{Block, Lines};
use self::logs::{Folder, Log};
pub use self::options::OutputOptions;
use self::restarts::Restarts;
pub use self::route::Route;
pub use self::sink::Sink;
pub use self::sinks::Sinks;
use self::stream::Stream;
pub use self::tails::{LastWords, TAIL};
use self::tails::{Tails, last_words_of};
use super::assignment::Assignment;
use crate::failure::{Failure, advice_on_limits};
use crate::stdio::{cannot_write, same_file};
use crate::style::Style;

/// How many times a pipe of a rank that has ended is read for its last words, so that a process
/// that holds the pipe and goes on writing cannot keep the tool.
const LAST_READS: usize = 1024;
/// How many bytes are read from a pipe at once. A pipe holds as many bytes.
const READ: usize = 64 << 10;

/// How long a line of the rank that reads the input waits for its end before it is shown.
const PROMPT: Duration = Duration::from_millis(200);

/// The output of all ranks that passes through the tool.
pub struct Output {
    route: Route,
    /// The folder of this run's logs, where there is one.
    folder: Option<Folder>,
    /// How often each rank was started again.
    restarts: Restarts,
    /// Whether the ranks were started, so that the folder and the sinks are there.
    has_begun: bool,
    /// This host's name in a job of several nodes, for the prefixes.
    host: Option<String>,
    sinks: Sinks,
    /// The pipes that have not ended.
    streams: Vec<Stream>,
    /// The last lines of each rank's standard error.
    tails: Tails,
    /// The style of what goes to standard output, and to standard error.
    styles: (Style, Style),
    /// Why some of the output is lost, or may be lost. The first reason stays.
    loss: Option<String>,
    /// The bytes of the last read.
    buffer: Vec<u8>,
}

/// The logs of a rank that is about to start, where the tool writes them: of its standard output
/// and of its standard error.
pub struct Logs([Option<Log>; 2]);

impl Output {
    pub fn new(route: Route) -> Output {
        let styles = (Style::new(route.color, &io::stdout()), Style::new(route.color, &io::stderr()));
        let (folder, host, sinks, loss) = (None, None, Sinks::default(), None);
        let restarts = Restarts::default();
        let (streams, tails, buffer) = (Vec::new(), Tails::default(), Vec::new());
        Output { route, folder, restarts, has_begun: false, host, sinks, streams, tails, styles, loss, buffer }
    }

    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Prepares for the ranks of this node: makes the folder of their logs, and starts the threads
    /// that write what passes through the tool. `is_agent` says that one terminal shows all nodes.
    pub fn begin(&mut self, assignment: &Assignment, is_agent: bool) -> Result<(), Failure> {
        if let Some(rank) = self.route.reader.filter(|rank| *rank >= assignment.world_size) {
            let last = assignment.world_size - 1;
            return Err(Failure::new(2, format!("--stdin {rank}: the ranks are 0 to {last}")));
        }
        self.host.clone_from(&assignment.host_name);
        self.restarts = Restarts::of_job(assignment.restarts);
        self.tails = Tails::default();
        // The threads and the folder are there already where the job starts again.
        if self.has_begun {
            return Ok(());
        }
        self.has_begun = true;
        let cannot = |error| {
            let advice = advice_on_limits(&error);
            Failure::new(1, format!("cannot start a thread for the output: {error}{advice}"))
        };
        self.sinks = Sinks::start(&self.route).map_err(cannot)?;
        if let Some(logs) = &self.route.logs {
            let made = Folder::make(logs, &assignment.run).map_err(|message| Failure::new(1, message))?;
            let (folder, remark) = made;
            remark.into_iter().for_each(|remark| self.say(&format!("devicemesh run: {remark}")));
            let on_each_host = if is_agent && assignment.nodes > 1 { " on each host" } else { "" };
            self.say(&format!("devicemesh run: logs in {}{on_each_host}", folder.path().display()));
            self.folder = Some(folder);
        }
        Ok(())
    }

    /// Says a line on standard error, after what the ranks have written there.
    pub fn say(&self, line: &str) {
        self.sinks.say(line);
    }

    /// Writes a mark for the starter of the job to standard error.
    pub fn mark(&self, mark: &str) {
        self.sinks.mark(mark);
    }

    /// Why some of the ranks' output is lost, or may be lost, where that has happened.
    pub fn loss(&self) -> Option<&str> {
        self.loss.as_deref()
    }

    /// The file of a rank's standard error, where there is one.
    pub fn log(&self, rank: u32) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.log(rank, self.restarts.of(rank), true))
    }

    /// Prepares for a rank that is started again alone. `again` is the number of this restart. The
    /// output of the earlier process is passed on, and no longer belongs to the last words of the
    /// rank.
    pub fn restart(&mut self, rank: u32, again: u32) {
        let (mut old, others): (Vec<Stream>, Vec<Stream>) =
            std::mem::take(&mut self.streams).into_iter().partition(|stream| stream.rank == rank);
        self.streams = others;
        // A process that the rank has left behind loses its pipes here, as it does when the job
        // ends.
        old.iter_mut().for_each(|stream| self.finish(stream));
        self.tails.forget(rank);
        self.restarts.note(rank, again);
    }

    /// Sets up a rank's input and output before the rank starts.
    pub fn prepare(&self, rank: u32, child: &mut Command) -> io::Result<Logs> {
        child.stdin(input::source(self.route.reader == Some(rank)));
        let mut logs = Logs([None, None]);
        for is_error in [false, true] {
            let restarts = self.restarts.of(rank);
            let file = self.folder.as_ref().map(|folder| folder.create(rank, restarts, is_error)).transpose()?;
            let to = match file {
                Some(file) if self.route.writes_logs_directly() => Stdio::from(file),
                Some(file) => {
                    let path =
                        self.folder.as_ref().map(|folder| folder.log(rank, restarts, is_error)).unwrap_or_default();
                    logs.0[usize::from(is_error)] = Some(Log::new(path, file, self.route.rotation));
                    Stdio::piped()
                }
                None if self.route.reads(is_error) => Stdio::piped(),
                None => Stdio::inherit(),
            };
            if is_error {
                child.stderr(to)
            } else {
                child.stdout(to)
            };
        }
        Ok(logs)
    }

    /// Takes over the pipes of a rank that has started.
    pub fn add(&mut self, rank: u32, child: &mut Child, logs: Logs) -> io::Result<()> {
        child.stdin.take().map(input::copy_terminal).transpose()?;
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        for ((pipe, log), is_error) in pipes.into_iter().zip(logs.0).zip([false, true]) {
            let Some(pipe) = pipe else { continue };
            // The pipe is closed here, so SIGPIPE ends a rank that writes. `notice_failures` does
            // the same.
            if self.sinks.of(is_error).is_some_and(Sink::has_no_reader) {
                continue;
            }
            rustix::io::ioctl_fionbio(&pipe, true)?;
            self.streams.push(Stream { rank, pipe: pipe.into(), is_error, log, lines: Lines::default(), prompt: None });
        }
        Ok(())
    }

    /// The descriptors to wait for, one entry for poll(2) each: the bell, and the open pipes. A
    /// rank whose output cannot be written yet has the bell in the place of its pipe.
    pub fn entries(&self) -> impl Iterator<Item = PollFd<'_>> {
        let bell = self.sinks.bell();
        let first = bell.into_iter().map(|bell| PollFd::new(bell, PollFlags::IN));
        first.chain(self.streams.iter().map(move |stream| match bell {
            Some(bell) if self.must_wait(stream) => PollFd::new(bell, PollFlags::IN),
            _ => PollFd::new(&stream.pipe, PollFlags::IN),
        }))
    }

    /// Passes on what can be read from the pipes, where `ready` says so for each of
    /// [`entries`](Output::entries).
    pub fn pass_on(&mut self, ready: &[bool]) {
        if self.sinks.bell().is_none() {
            return;
        }
        if ready.first() == Some(&true) {
            self.sinks.silence();
        }
        let mut ready = ready.iter().skip(1);
        let mut streams = std::mem::take(&mut self.streams);
        streams.retain_mut(|stream| match ready.next() {
            // The sink may have been emptied or filled since the entries were made.
            Some(true) if !self.must_wait(stream) => self.read(stream),
            _ => true,
        });
        let now = Instant::now();
        for stream in streams.iter_mut().filter(|stream| stream.prompt.is_some_and(|due| now >= due)) {
            self.show_prompt(stream);
        }
        self.streams = streams;
        self.notice_failures();
    }

    /// When a line that has not ended is to be shown.
    pub fn next_moment(&self) -> Option<Instant> {
        self.streams.iter().filter_map(|stream| stream.prompt).min()
    }

    /// Shows the line that a rank has not ended.
    fn show_prompt(&self, stream: &mut Stream) {
        stream.prompt = None;
        let Some(sink) = self.sinks.of(stream.is_error) else { return };
        let before = self.time() + &self.prefix(stream);
        let owner = (stream.rank, stream.is_error);
        let text = stream.lines.show();
        match sink.is_open(owner) {
            true => sink.push_on(text.to_vec()),
            false => sink.open(owner, [before.as_bytes(), text].concat()),
        }
    }

    /// The time as it stands before each line, or nothing.
    fn time(&self) -> String {
        if self.route.timestamps { utc(SystemTime::now()) + " " } else { String::new() }
    }

    /// Passes on the rest, until every pipe has ended or that moment has come, and looks whether
    /// the logs had room. All ranks have ended, so the rest is at most the content of the pipes.
    pub fn drain(&mut self, until: Instant) {
        let a_while = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        while !self.streams.is_empty() && Instant::now() < until {
            let mut entries: Vec<_> =
                self.streams.iter().map(|stream| PollFd::new(&stream.pipe, PollFlags::IN)).collect();
            let _ = poll(&mut entries, Some(&a_while));
            let ready: Vec<bool> = entries.iter().map(|entry| !entry.revents().is_empty()).collect();
            let mut ready = ready.into_iter();
            let mut streams = std::mem::take(&mut self.streams);
            streams.retain_mut(|stream| ready.next() != Some(true) || self.read(stream));
            self.streams = streams;
            self.notice_failures();
        }
        for mut stream in std::mem::take(&mut self.streams) {
            self.finish(&mut stream);
        }
        self.look_at_disk();
    }

    /// Whether some of the output is not written yet. Then there is a bell, which rings when that
    /// may have changed.
    pub fn is_busy(&mut self) -> bool {
        self.notice_failures();
        self.sinks.is_busy()
    }

    /// Waits a moment until the tool's own messages are written.
    pub fn wait_for_messages(&self) {
        self.sinks.wait_for_messages();
    }

    /// Gives up on a reader that does not read on. Returns whether any bytes of the ranks are not
    /// written.
    pub fn give_up(&self) -> bool {
        self.sinks.give_up()
    }

    /// The last lines of a rank's standard error, or of its file. Empty where they did not pass
    /// through the tool. The rank has ended.
    pub fn last_words(&mut self, rank: u32) -> LastWords {
        if self.route.writes_logs_directly() {
            return last_words_of(&self.log(rank).unwrap_or_default());
        }
        // Because the rank has ended, everything that it wrote is in its pipe. The end of the pipe
        // is read, too, so that a last line without an end is shown before the tool's report.
        let mut streams = std::mem::take(&mut self.streams);
        for stream in streams.iter_mut().filter(|stream| stream.rank == rank) {
            for _ in 0..LAST_READS {
                if !is_readable(&stream.pipe) || !self.read(stream) {
                    break;
                }
            }
        }
        self.streams = streams;
        self.tails.last_words(rank)
    }

    /// Whether what this rank writes has to wait until more of the output is written.
    fn must_wait(&self, stream: &Stream) -> bool {
        self.sinks.of(stream.is_error).is_some_and(Sink::is_full)
    }

    /// Acts on the failures of the sinks. Where the reader of the tool's output has gone, the pipes
    /// from the ranks are closed, so that a rank that goes on writing ends as it would without the
    /// tool (SIGPIPE).
    fn notice_failures(&mut self) {
        for is_error in [false, true] {
            let Some(error) = self.sinks.of(is_error).and_then(Sink::failure) else { continue };
            if error.kind() != ErrorKind::BrokenPipe {
                self.lose(&cannot_write(is_error, &error));
                continue;
            }
            let is_both = same_file(io::stdout(), io::stderr());
            self.streams.retain(|stream| stream.is_error != is_error && !is_both);
        }
    }

    /// Notes why some of the output is lost.
    fn lose(&mut self, why: &str) {
        self.loss.get_or_insert_with(|| format!("{why}; some of the ranks' output is lost"));
    }

    /// Notes that the disk of the logs is full. The tool does not see which writes of a rank that
    /// writes its logs itself have failed.
    fn look_at_disk(&mut self) {
        let Some(folder) = self.folder.as_ref().filter(|_| self.route.writes_logs_directly()) else { return };
        if let Err(error) = folder.has_room() {
            let path = folder.path().display();
            let loss = format!("no room is left in {path} ({error}); some of the ranks' output may be lost");
            self.loss.get_or_insert(loss);
        }
    }

    /// Reads once from a pipe and passes it on. Returns false when the pipe has ended.
    fn read(&mut self, stream: &mut Stream) -> bool {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(READ, 0);
        let read = stream.pipe.read(&mut buffer);
        let goes_on = match read {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => true,
            Ok(0) | Err(_) => {
                self.finish(stream);
                false
            }
            Ok(count) => {
                if stream.is_error {
                    self.tails.keep(stream.rank, &buffer[..count]);
                }
                // A progress bar without a prefix is shown each time that the rank writes over it.
                if let Some(block) = stream.lines.take(&buffer[..count], !self.route.decorates()) {
                    self.write(stream, block);
                }
                let may_be_prompt = self.route.reader == Some(stream.rank) && stream.lines.has_news();
                stream.prompt = may_be_prompt.then(|| stream.prompt.unwrap_or_else(|| Instant::now() + PROMPT));
                true
            }
        };
        self.buffer = buffer;
        goes_on
    }

    /// Passes on the last line of a pipe that has ended.
    fn finish(&mut self, stream: &mut Stream) {
        if let Some(block) = stream.lines.finish() {
            self.write(stream, block);
        }
    }

    /// Passes on lines to the log and to the tool's own output.
    fn write(&mut self, stream: &mut Stream, mut block: Block) {
        let time = self.time();
        if let Some(log) = &mut stream.log {
            let written = if time.is_empty() { log.write(&block.bytes) } else { log.write(&block.decorated(&time)) };
            if let Err(message) = written {
                stream.log = None;
                self.lose(&message);
            }
        }
        let Some(sink) = self.sinks.of(stream.is_error) else { return };
        let before = time + &self.prefix(stream);
        let was_shown = block.without_shown();
        let is_open = sink.is_open((stream.rank, stream.is_error));
        // The line was shown, and another output has ended it.
        if was_shown && !is_open && matches!(&block.bytes[..], b"" | b"\n") {
            return;
        }
        let block_is_empty = block.bytes.is_empty();
        let text = if self.route.decorates() { block.decorated(&before) } else { block.bytes };
        match is_open {
            true if block_is_empty => sink.close(b"\n".to_vec()),
            // The prefix stands before the line already.
            true => sink.close(text[before.len().min(text.len())..].to_vec()),
            false => sink.push(text),
        }
    }

    /// The prefix with the rank for each line, or nothing.
    fn prefix(&self, stream: &Stream) -> String {
        if !self.route.prefix {
            return String::new();
        }
        let host = self.host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
        let style = if stream.is_error { self.styles.1 } else { self.styles.0 };
        style.numbered(stream.rank, &format!("[rank {}{host}]", stream.rank)) + " "
    }
}

fn is_readable(pipe: impl AsFd) -> bool {
    let mut entry = [PollFd::new(&pipe, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut entry, Some(&now)).is_ok() && entry[0].revents().intersects(PollFlags::IN | PollFlags::HUP)
}
