//! What ranks write, with the rank before each line.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::process::{ChildStderr, ChildStdout};
use std::time::Instant;

/// Lines longer than this are passed on in parts.
const MAX_LINE: usize = 64 << 10;

/// The ranks' output; empty when they write to our own descriptors.
pub struct Output {
    prefixed: bool,
    streams: Vec<Stream>,
}

struct Stream {
    rank: u32,
    pipe: std::fs::File,
    is_error: bool,
    line: Vec<u8>,
}

impl Output {
    pub fn new(prefixed: bool) -> Output {
        Output { prefixed, streams: Vec::new() }
    }

    pub fn is_prefixed(&self) -> bool {
        self.prefixed
    }

    /// Takes a rank's pipes.
    pub fn add(&mut self, rank: u32, stdout: ChildStdout, stderr: ChildStderr) -> io::Result<()> {
        for (pipe, is_error) in [(OwnedFd::from(stdout), false), (OwnedFd::from(stderr), true)] {
            // SAFETY: our own descriptor.
            let set = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
            if set != 0 {
                return Err(io::Error::last_os_error());
            }
            self.streams.push(Stream { rank, pipe: pipe.into(), is_error, line: Vec::new() });
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
        self.streams.retain_mut(|stream| match polls.next() {
            Some(poll) if poll.revents != 0 => stream.pass_on(),
            _ => true,
        });
    }

    /// Passes on the rest, until every pipe has ended or the moment is there.
    pub fn drain(&mut self, until: Instant) {
        while !self.streams.is_empty() && Instant::now() < until {
            let mut polls = self.polls();
            // SAFETY: the entries are valid.
            unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 50) };
            self.pass_on(&polls);
        }
        for stream in &mut self.streams {
            stream.finish();
        }
    }
}

impl Stream {
    /// False when the pipe has ended.
    fn pass_on(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.pipe.read(&mut buffer) {
            Ok(0) => {
                self.finish();
                false
            }
            Ok(count) => {
                self.line.extend_from_slice(&buffer[..count]);
                let lines = self.line.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
                let whole = lines.or((self.line.len() > MAX_LINE).then_some(self.line.len()));
                if let Some(end) = whole {
                    let rest = self.line.split_off(end);
                    let lines = std::mem::replace(&mut self.line, rest);
                    self.write(&lines);
                }
                true
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => true,
            Err(_) => {
                self.finish();
                false
            }
        }
    }

    fn finish(&mut self) {
        let rest = std::mem::take(&mut self.line);
        if !rest.is_empty() {
            self.write(&rest);
        }
    }

    fn write(&self, lines: &[u8]) {
        let mut text = Vec::with_capacity(lines.len() + 16);
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            text.extend_from_slice(format!("[rank {}] ", self.rank).as_bytes());
            text.extend_from_slice(line);
        }
        if text.last() != Some(&b'\n') {
            text.push(b'\n');
        }
        // Whoever reads us may have gone; the ranks run on.
        let _ = match self.is_error {
            true => io::stderr().lock().write_all(&text),
            false => io::stdout().lock().write_all(&text),
        };
    }
}
