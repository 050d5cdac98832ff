//! What ranks write: to our own descriptors, with the rank before each line, into a file for each rank, or both; and the last of it, for the report.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::time::Instant;

use crate::style::{Style, When};

/// Lines longer than this are passed on in parts.
const MAX_LINE: usize = 64 << 10;
/// What is kept of a rank's stderr, in bytes and in lines.
const TAIL: usize = 4 << 10;
const TAIL_LINES: usize = 10;

/// Where the ranks' output goes.
pub struct Route {
    /// The rank before each line.
    pub prefix: bool,
    /// A file for each rank in this folder.
    pub logs: Option<PathBuf>,
    /// With `logs`: to the terminal too.
    pub tee: bool,
    /// What goes to stderr comes through us in any case, so that the report can quote it.
    pub keep: bool,
    pub color: When,
}

impl Route {
    /// Where a rank's file is.
    pub fn log(&self, rank: u32) -> Option<PathBuf> {
        self.logs.as_ref().map(|folder| folder.join(format!("rank-{rank}.log")))
    }

    fn only_logs(&self) -> bool {
        self.logs.is_some() && !self.tee
    }
}

/// The ranks' output; empty when they write to our own descriptors or to files.
pub struct Output {
    route: Route,
    streams: Vec<Stream>,
    /// Ranks that have written to stderr through us, with the last of it.
    tails: Vec<(u32, Vec<u8>)>,
    out: Style,
    err: Style,
}

struct Stream {
    rank: u32,
    pipe: File,
    is_error: bool,
    log: Option<File>,
    line: Vec<u8>,
}

impl Output {
    pub fn new(route: Route) -> Output {
        let (out, err) = (Style::new(route.color, &io::stdout()), Style::new(route.color, &io::stderr()));
        Output { route, streams: Vec::new(), tails: Vec::new(), out, err }
    }

    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Sets up what a rank writes to, before it starts; gives its file, where we write that.
    pub fn prepare(&self, rank: u32, child: &mut Command) -> io::Result<Option<File>> {
        let file = match self.route.log(rank) {
            Some(path) => {
                let open = |path: &PathBuf| File::options().create(true).append(true).open(path);
                // One that is there is of another job.
                let file = File::create(&path).and_then(|_| open(&path));
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
                } else if self.route.keep || !io::stderr().is_terminal() {
                    child.stderr(Stdio::piped());
                }
                Ok(file)
            }
        }
    }

    /// Takes a rank's pipes.
    pub fn add(
        &mut self,
        rank: u32,
        stdout: Option<ChildStdout>,
        stderr: Option<ChildStderr>,
        log: Option<File>,
    ) -> io::Result<()> {
        for (pipe, is_error) in [(stdout.map(OwnedFd::from), false), (stderr.map(OwnedFd::from), true)] {
            let Some(pipe) = pipe else { continue };
            // SAFETY: our own descriptor.
            let set = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
            if set != 0 {
                return Err(io::Error::last_os_error());
            }
            let log = log.as_ref().map(File::try_clone).transpose()?;
            self.streams.push(Stream { rank, pipe: pipe.into(), is_error, log, line: Vec::new() });
        }
        Ok(())
    }

    /// One entry for poll(2) per open pipe.
    pub fn polls(&self) -> Vec<libc::pollfd> {
        let entry = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        self.streams.iter().map(|stream| entry(stream.pipe.as_raw_fd())).collect()
    }

    /// Passes on what has come on the pipes that poll found ready.
    pub fn pass_on(&mut self, polls: &[libc::pollfd]) {
        let mut polls = polls.iter();
        let mut streams = std::mem::take(&mut self.streams);
        streams.retain_mut(|stream| match polls.next() {
            Some(poll) if poll.revents != 0 => self.read(stream),
            _ => true,
        });
        self.streams = streams;
    }

    /// Passes on the rest, until every pipe has ended or the moment is there.
    pub fn drain(&mut self, until: Instant) {
        while !self.streams.is_empty() && Instant::now() < until {
            let mut polls = self.polls();
            // SAFETY: the entries are valid.
            unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 50) };
            self.pass_on(&polls);
        }
        for mut stream in std::mem::take(&mut self.streams) {
            self.finish(&mut stream);
        }
    }

    /// The last lines that a rank wrote to stderr, or into its file; empty where they did not come through here.
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
        // The rank has ended, so all that it wrote is in its pipe.
        let mut streams = std::mem::take(&mut self.streams);
        for stream in streams.iter_mut().filter(|stream| stream.rank == rank && stream.is_error) {
            let mut ready = libc::pollfd { fd: stream.pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            for _ in 0..1024 {
                // SAFETY: one valid entry.
                let there = unsafe { libc::poll(&mut ready, 1, 0) } == 1 && ready.revents & libc::POLLIN != 0;
                if !there || !self.read(stream) {
                    break;
                }
            }
        }
        self.streams = streams;
        self.tails.iter().find(|(known, _)| *known == rank).map_or(String::new(), |(_, tail)| last_lines(tail))
    }

    /// False when the pipe has ended.
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

    fn take(&mut self, stream: &mut Stream, bytes: &[u8]) {
        // Whoever reads us may have gone, or the disk be full; the ranks run on.
        if let Some(log) = &mut stream.log {
            let _ = log.write_all(bytes);
        }
        if stream.is_error {
            self.keep(stream.rank, bytes);
        }
        if !self.route.prefix {
            let _ = match stream.is_error {
                true => io::stderr().lock().write_all(bytes),
                false => io::stdout().lock().write_all(bytes).and_then(|()| io::stdout().flush()),
            };
            return;
        }
        stream.line.extend_from_slice(bytes);
        let lines = stream.line.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        if let Some(end) = lines.or((stream.line.len() > MAX_LINE).then_some(stream.line.len())) {
            let rest = stream.line.split_off(end);
            let lines = std::mem::replace(&mut stream.line, rest);
            self.write(stream, &lines);
        }
    }

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

    fn finish(&self, stream: &mut Stream) {
        let rest = std::mem::take(&mut stream.line);
        if !rest.is_empty() {
            self.write(stream, &rest);
        }
    }

    fn write(&self, stream: &Stream, lines: &[u8]) {
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
        let _ = match stream.is_error {
            true => io::stderr().lock().write_all(&text),
            false => io::stdout().lock().write_all(&text),
        };
    }
}

/// The last lines, without what moves a terminal's cursor or colours it; of one that was written over, what stood there last.
fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<String> = text.lines().map(plain).filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

fn plain(line: &str) -> String {
    let mut out = String::new();
    let mut characters = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default().chars();
    while let Some(character) = characters.next() {
        match character {
            // ESC [ ... ends with a letter or one of @[\]^_`{|}~ (ECMA-48).
            '\x1b' if characters.as_str().starts_with('[') => {
                characters.next();
                characters.find(|character| ('@'..='~').contains(character));
            }
            '\t' => out.push('\t'),
            character if character.is_control() => {}
            character => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::last_lines;

    #[test]
    fn the_last_lines_are_plain_text() {
        assert_eq!(
            last_lines(b"one\n\x1b[1;31mtwo\x1b[0m\r\n\n 10%\r 99%\r100%\n\tthree\xff\x07"),
            "one\ntwo\n100%\n\tthree\u{fffd}"
        );
        let many: String = (0..30).map(|line| format!("{line}\n")).collect();
        assert_eq!(last_lines(many.as_bytes()), (20..30).map(|line| line.to_string()).collect::<Vec<_>>().join("\n"));
        assert_eq!(last_lines(b""), "");
    }
}
