//! The tool's standard output or standard error, to which a thread writes, so that a reader that is
//! slow or has stopped does not keep the tool from its signals and deadlines.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::stdio::write_all;

/// How many bytes may wait to be written. With more bytes the tool stops reading, so the ranks'
/// pipes fill and the ranks wait, as they would for a slow reader without the tool.
const FULL: usize = 1 << 20;

/// How many bytes are written at once: as many as a pipe takes whole (PIPE_BUF of Linux).
const PIECE: usize = 4096;

/// A queue of bytes that a thread writes.
#[derive(Clone)]
pub struct Sink(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Wakes the thread when there is something to write.
    written_to: Condvar,
    /// An eventfd that wakes the main thread.
    bell: Arc<OwnedFd>,
}

#[derive(Default)]
struct State {
    /// The bytes that the thread has not taken yet.
    queue: Vec<u8>,
    /// The owner of the line that stands at the end of the output without a line break: a rank, and
    /// whether the line is from the rank's standard error. It is `None` where the output ends with
    /// a line break.
    open: Option<(u32, bool)>,
    /// Whether the output ends inside a line, because its last byte is no line break. A rank may
    /// end inside a line, a long line may be cut, and a progress bar ends with a carriage return.
    is_inside_line: bool,
    /// How many bytes the thread is writing.
    writing: usize,
    /// How many bytes were ever added.
    added: u64,
    /// Where the tool's own lines stand among these bytes: each line's begin and end.
    own: Vec<(u64, u64)>,
    /// Whether the main thread waits until the thread has written something.
    is_awaited: bool,
    /// The error after which nothing more can be written, where there was one.
    failed: Option<io::Error>,
    /// Whether the main thread knows of that error.
    is_told: bool,
}

impl Sink {
    /// Starts the thread that writes to standard error, or to standard output. `bell` is an
    /// eventfd.
    pub fn start(is_error: bool, bell: Arc<OwnedFd>) -> io::Result<Sink> {
        let shared = Arc::new(Shared { state: Mutex::default(), written_to: Condvar::new(), bell });
        let theirs = Arc::clone(&shared);
        let name = if is_error { "dm-stderr" } else { "dm-stdout" };
        std::thread::Builder::new().name(name.to_owned()).spawn(move || theirs.write(is_error))?;
        Ok(Sink(shared))
    }

    /// Adds whole lines to the queue, in a new line. They are dropped after a failure.
    pub fn push(&self, bytes: Vec<u8>) {
        self.push_lines(bytes, false);
    }

    /// Adds whole lines of the tool itself. They begin a new line.
    pub fn push_own(&self, bytes: Vec<u8>) {
        self.push_lines(bytes, true);
    }

    /// Adds a mark for the starter, which removes it from the output. So the mark neither needs a
    /// new line nor ends a line of the ranks.
    pub fn push_mark(&self, bytes: Vec<u8>) {
        let mut state = self.0.state();
        let is_inside_line = state.is_inside_line;
        self.0.add(&mut state, bytes, true);
        state.is_inside_line = is_inside_line;
    }

    fn push_lines(&self, mut bytes: Vec<u8>, is_own: bool) {
        let mut state = self.0.state();
        let begins_itself = is_own && bytes.first() == Some(&b'\n');
        if (state.open.take().is_some() || (is_own && state.is_inside_line)) && !begins_itself {
            bytes.insert(0, b'\n');
        }
        self.0.add(&mut state, bytes, is_own);
    }

    /// Adds the beginning of a line of this output of a rank, in a new line.
    pub fn open(&self, owner: (u32, bool), bytes: Vec<u8>) {
        self.push(bytes);
        self.0.state().open = Some(owner);
    }

    /// Whether the output ends inside a line of this output of a rank.
    pub fn is_open(&self, owner: (u32, bool)) -> bool {
        self.0.state().open == Some(owner)
    }

    /// Adds what ends the line that is open, and more lines.
    pub fn close(&self, bytes: Vec<u8>) {
        self.0.state().open = None;
        self.push_on(bytes);
    }

    /// Adds bytes after those in the queue. They are dropped after a failure.
    pub fn push_on(&self, bytes: Vec<u8>) {
        self.0.add(&mut self.0.state(), bytes, false);
    }

    /// Whether the ranks have to wait. The bell then rings when that has changed.
    pub fn is_full(&self) -> bool {
        self.holds(FULL)
    }

    /// Whether so much has to be written that not even the nodes' messages among the ranks' lines
    /// are read. The bell then rings when that has changed.
    pub fn is_very_full(&self) -> bool {
        self.holds(16 * FULL)
    }

    fn holds(&self, bytes: usize) -> bool {
        let mut state = self.0.state();
        let holds = state.unwritten() >= bytes;
        state.is_awaited |= holds;
        holds
    }

    /// Whether there are bytes that are not written yet. The bell then rings when that may have
    /// changed.
    pub fn is_busy(&self) -> bool {
        let mut state = self.0.state();
        let is_busy = state.unwritten() > 0;
        state.is_awaited |= is_busy;
        is_busy
    }

    /// How many bytes of the ranks are not written yet. The tool's own lines do not count.
    pub fn unwritten(&self) -> usize {
        let state = self.0.state();
        let own = state.own.iter().map(|(begin, end)| end.saturating_sub(state.written().max(*begin)));
        state.unwritten() - own.sum::<u64>() as usize
    }

    /// Whether the reader of the output has gone.
    pub fn has_no_reader(&self) -> bool {
        self.0.state().failed.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Returns the error after which nothing more can be written, but only once.
    pub fn failure(&self) -> Option<io::Error> {
        let mut state = self.0.state();
        if state.is_told || state.failed.is_none() {
            return None;
        }
        state.is_told = true;
        let error = state.failed.as_ref()?;
        Some(error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error))
    }
}

impl State {
    fn unwritten(&self) -> usize {
        self.queue.len() + self.writing
    }

    /// How many of the bytes that were ever added have left the tool.
    fn written(&self) -> u64 {
        self.added - self.unwritten() as u64
    }
}

impl Shared {
    /// Adds bytes to the queue and wakes the thread. They are dropped after a failure.
    fn add(&self, state: &mut State, bytes: Vec<u8>, is_own: bool) {
        if state.failed.is_some() {
            return;
        }
        let begin = state.added;
        state.added += bytes.len() as u64;
        state.is_inside_line = bytes.last().map_or(state.is_inside_line, |last| *last != b'\n');
        match state.queue.is_empty() {
            true => state.queue = bytes,
            false => state.queue.extend_from_slice(&bytes),
        }
        if is_own {
            let written = state.written();
            state.own.retain(|(_, end)| *end > written);
            let end = state.added;
            state.own.push((begin, end));
        }
        self.written_to.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the bytes in pieces of whole lines where they fit, and counts each one, so that the
    /// number of bytes that a reader has not taken is known.
    fn write_pieces(&self, mut bytes: &[u8], is_error: bool) -> io::Result<()> {
        while !bytes.is_empty() {
            let most = &bytes[..bytes.len().min(PIECE)];
            let (piece, rest) =
                bytes.split_at(most.iter().rposition(|byte| *byte == b'\n').map_or(most.len(), |at| at + 1));
            match is_error {
                true => write_all(io::stderr(), piece)?,
                false => write_all(io::stdout(), piece)?,
            }
            self.state().writing = rest.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Writes what is queued, until that fails or the process ends.
    fn write(&self, is_error: bool) {
        loop {
            let mut state = self.state();
            while state.queue.is_empty() {
                state = self.written_to.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let bytes = std::mem::take(&mut state.queue);
            state.writing = bytes.len();
            drop(state);
            let written = self.write_pieces(&bytes, is_error);
            let mut state = self.state();
            state.writing = 0;
            let is_over = written.is_err();
            if let Err(error) = written {
                state.queue = Vec::new();
                state.failed = Some(error);
            }
            if std::mem::take(&mut state.is_awaited) || is_over {
                // The write fails where the counter is full, and then the bell is readable already.
                let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
            }
            if is_over {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A sink without a thread, so that only the test writes.
    fn sink() -> Sink {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        Sink(Arc::new(Shared { state: Mutex::default(), written_to: Condvar::new(), bell }))
    }

    /// Does what the thread does when it has written all but `left` bytes of the queue.
    fn write_all_but(sink: &Sink, left: usize) {
        let mut state = sink.0.state();
        state.queue.clear();
        state.writing = left;
    }

    #[test]
    fn the_tools_own_lines_begin_a_line() {
        let sink = sink();
        for text in [&b"whole\n"[..], b"no end", b"bar 10%\r", b"bar 20%"] {
            sink.push(text.to_vec());
            if text != b"bar 10%\r" {
                sink.push_own(b"own\n".to_vec());
            }
        }
        let queue = sink.0.state().queue.clone();
        assert_eq!(String::from_utf8(queue).unwrap(), "whole\nown\nno end\nown\nbar 10%\rbar 20%\nown\n");
        sink.0.state().queue.clear();
        // A message about a key begins with a line break itself.
        sink.open((0, false), b"prompt".to_vec());
        sink.push_own(b"\nown\n".to_vec());
        sink.push(b"no end".to_vec());
        sink.push_own(b"\nown\n".to_vec());
        let queue = sink.0.state().queue.clone();
        assert_eq!(String::from_utf8(queue).unwrap(), "prompt\nown\nno end\nown\n");
    }

    #[test]
    fn a_mark_changes_no_line() {
        let sink = sink();
        sink.push(b"half".to_vec());
        sink.push_mark(b"mark\n".to_vec());
        assert_eq!(sink.unwritten(), 4);
        sink.push_own(b"own\n".to_vec());
        sink.open((0, false), b"prompt".to_vec());
        sink.push_mark(b"mark\n".to_vec());
        assert!(sink.is_open((0, false)));
        let queue = sink.0.state().queue.clone();
        assert_eq!(String::from_utf8(queue).unwrap(), "halfmark\n\nown\npromptmark\n");
    }

    #[test]
    fn the_tools_own_lines_are_no_output_of_the_ranks() {
        let sink = sink();
        sink.push_own(b"own\n".to_vec());
        assert_eq!((sink.unwritten(), sink.is_busy()), (0, true));
        sink.push(b"of a rank\n".to_vec());
        sink.push_own(b"own again\n".to_vec());
        assert_eq!(sink.unwritten(), 10);
        // A part of the rank's line and the line after it are left.
        write_all_but(&sink, 10 + 3);
        assert_eq!(sink.unwritten(), 3);
        // A part of the tool's last line is left.
        write_all_but(&sink, 4);
        assert_eq!((sink.unwritten(), sink.is_busy()), (0, true));
        sink.push(b"more\n".to_vec());
        assert_eq!(sink.unwritten(), 5);
        write_all_but(&sink, 0);
        assert_eq!((sink.unwritten(), sink.is_busy()), (0, false));
    }
}
