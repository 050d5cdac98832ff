//! The process that reaches one host: ssh, or the agent itself on the starter's own host.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use rustix::event::{PollFd, PollFlags};
use rustix::pipe::fcntl_getpipe_size;
use rustix::process::{Pid, Signal, kill_process_group};

use super::words::{BEGINS, MARK, Said};
use crate::run::guard;
use crate::run::output::{LastWords, TAIL};

/// The beginning of a node's message to the user.
pub const MESSAGE: &[u8] = b"devicemesh run: ";
/// The longest line that is passed on whole.
const MAX_LINE: usize = 64 << 10;
/// The most bytes that are read from one host before the other hosts get their turn.
const MOST_AT_ONCE: usize = 64 << 10;
/// The longest line that is passed on whole where the nodes write whole lines (`--prefix`,
/// `--timestamps`). It is more than a node writes as one line.
const MAX_WHOLE_LINE: usize = 2 << 20;

/// A piece of what a host has sent.
pub enum Got {
    /// Text of the node or its ranks for standard output or standard error.
    Text {
        is_error: bool,
        bytes: Vec<u8>,
    },
    Said(Said),
}

pub struct Process {
    child: Child,
    /// `None` when the process has closed it.
    input: Option<ChildStdin>,
    /// The bytes that are still to be written to standard input.
    pending: Vec<u8>,
    /// Standard output and standard error. `None` when they have ended.
    streams: [Option<Stream>; 2],
    /// Whether the agent has said hello. Before the hello, standard error has the words of ssh.
    is_greeted: bool,
    /// Whether the ranks' text has begun on standard output. What comes before was printed by the
    /// login shell of the host, for example in its .bashrc.
    has_text: bool,
    /// The last words of ssh and of the login shell.
    words: Vec<u8>,
}

struct Stream {
    pipe: File,
    /// The line that has not ended.
    line: Vec<u8>,
    /// The longest line that is passed on whole.
    max_line: usize,
}

impl Process {
    /// Starts the command in a process group of its own, so that Ctrl-C reaches the starter alone.
    /// `has_whole_lines` says whether the node there writes whole lines.
    pub fn start(command: &[OsString], has_whole_lines: bool) -> io::Result<Process> {
        let starting = guard::starting();
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        drop(starting);
        let input = child.stdin.take();
        let out = child.stdout.take().map(OwnedFd::from);
        let err = child.stderr.take().map(OwnedFd::from);
        for descriptor in input.iter().map(AsFd::as_fd).chain(out.iter().chain(&err).map(AsFd::as_fd)) {
            rustix::io::ioctl_fionbio(descriptor, true)?;
        }
        let max_line = if has_whole_lines { MAX_WHOLE_LINE } else { MAX_LINE };
        let stream = |pipe: OwnedFd| Stream { pipe: pipe.into(), line: Vec::new(), max_line };
        let streams = [out.map(stream), err.map(stream)];
        let (is_greeted, has_text) = (false, false);
        Ok(Process { child, input, pending: Vec::new(), streams, is_greeted, has_text, words: Vec::new() })
    }

    /// Sends the agent its orders.
    pub fn order(&mut self, orders: &[u8]) {
        self.words.clear();
        self.send(orders);
    }

    /// Sends bytes to the agent, now or when there is room.
    pub fn send(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(input) = self.input.as_mut().filter(|_| !self.pending.is_empty()) {
            match input.write(&self.pending) {
                Ok(count) => drop(self.pending.drain(..count)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The process is ending, which the starter notices by its end.
                Err(_) => self.input = None,
            }
        }
    }

    /// The descriptors to wait for. `reads` says whether standard output and standard error are
    /// read.
    pub fn entries(&self, reads: [bool; 2]) -> Vec<PollFd<'_>> {
        let streams = self.streams.iter().zip(reads).filter_map(|(stream, reads)| stream.as_ref().filter(|_| reads));
        let streams = streams.map(|stream| PollFd::new(&stream.pipe, PollFlags::IN));
        let input = self.input.iter().filter(|_| !self.pending.is_empty());
        streams.chain(input.map(|input| PollFd::new(input, PollFlags::OUT))).collect()
    }

    /// Whether there is a line that has not ended. It is passed on when nothing follows it for a
    /// moment.
    pub fn has_begun(&self) -> bool {
        self.streams.iter().flatten().any(|stream| !stream.line.is_empty())
    }

    /// Reads the bytes that have come, and writes the bytes that are pending. `reads` says whether
    /// standard output and standard error are read. With `whole` it also returns lines that have
    /// not ended.
    pub fn take(&mut self, reads: [bool; 2], whole: bool) -> Vec<Got> {
        self.flush();
        let mut got = Vec::new();
        // A node writes its ranks' last words before its own message, so standard output is read
        // after standard error and passed on before it. If the node has written a message, the last
        // line of standard output is passed on even without its newline.
        let errors = self.parts(1, reads[1], whole);
        let has_message = errors.iter().any(|line| line.starts_with(MESSAGE));
        for part in self.parts(0, reads[0], whole || has_message) {
            self.sort(false, part, &mut got);
        }
        for part in errors {
            self.sort(true, part, &mut got);
        }
        got
    }

    /// Reads what is left in the pipes. The process has ended. A process that it has left behind
    /// may write on and on, so this reads no more than the pipes hold.
    pub fn take_rest(&mut self, reads: [bool; 2]) -> Vec<Got> {
        let pipes = self.streams.iter().flatten().map(|stream| fcntl_getpipe_size(&stream.pipe).unwrap_or(0));
        let rounds = pipes.max().unwrap_or(0) / MAX_LINE + 2;
        (0..rounds).flat_map(|_| self.take(reads, true)).collect()
    }

    /// Reads what has come on standard output (0) or standard error (1), where `reads` allows it.
    /// Returns the lines, with `whole` and at the end of the stream also one that has not ended.
    fn parts(&mut self, index: usize, reads: bool, whole: bool) -> Vec<Vec<u8>> {
        let Some(mut stream) = self.streams[index].take_if(|_| reads) else { return Vec::new() };
        let has_more = stream.read();
        let parts = stream.parts(whole, !has_more, index == 1);
        if has_more {
            self.streams[index] = Some(stream);
        }
        parts
    }

    /// Separates marks, and the words of ssh and the login shell, from the ranks' text.
    fn sort(&mut self, is_error: bool, mut bytes: Vec<u8>, got: &mut Vec<Got>) {
        let mut said = None;
        if let Some(at) = find(&bytes, MARK.as_bytes()).filter(|_| is_error) {
            said = serde_json::from_slice(&bytes[at + MARK.len()..]).ok();
            bytes.truncate(at);
        }
        if !is_error && !self.has_text && find(&bytes, BEGINS.as_bytes()).is_some() {
            self.has_text = true;
            return self.words.clear();
        }
        let is_noise = if is_error { !self.is_greeted || is_end_of_ssh(&bytes) } else { !self.has_text };
        if is_noise {
            self.words.extend_from_slice(&bytes);
            self.words.drain(..self.words.len().saturating_sub(TAIL));
        } else if !bytes.is_empty() {
            got.push(Got::Text { is_error, bytes });
        }
        if let Some(said) = said {
            self.is_greeted = true;
            got.push(Got::Said(said));
        }
    }

    /// How the process ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The last words of ssh and of the login shell in one line, without the remarks that ssh makes
    /// while it connects.
    pub fn words(&self) -> String {
        let words = LastWords::of(&self.words);
        words.lines.lines().map(str::trim).filter(|line| !is_remark(line)).collect::<Vec<_>>().join("; ")
    }

    /// Ends the process and those that it has started here.
    pub fn kill(&self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

impl Stream {
    /// Reads the bytes that have come. Returns false at the end of the input.
    fn read(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        let most = self.line.len() + MOST_AT_ONCE;
        while self.line.len() < most {
            match self.pipe.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.line.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        true
    }

    /// Returns the lines that have ended. With `whole` it also returns the bytes after them, unless
    /// a mark may have begun there. At the end of the stream it returns all. Only standard error
    /// has marks.
    fn parts(&mut self, whole: bool, is_end: bool, has_marks: bool) -> Vec<Vec<u8>> {
        let ended = self.line.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let rest = self.line.split_off(ended);
        let lines = std::mem::replace(&mut self.line, rest);
        let mut parts: Vec<Vec<u8>> = lines.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        let mark = if has_marks && !is_end { beginning_of_mark(&self.line) } else { None };
        if !self.line.is_empty() && (is_end || (whole && mark.is_none()) || self.line.len() > self.max_line) {
            // A mark may go on in what comes next.
            let rest = self.line.split_off(mark.filter(|at| *at > 0).unwrap_or(self.line.len()));
            parts.push(std::mem::replace(&mut self.line, rest));
        }
        parts
    }
}

/// Where a mark begins, or may begin at the end of what has come so far.
fn beginning_of_mark(line: &[u8]) -> Option<usize> {
    let mark = MARK.as_bytes();
    (0..line.len()).find(|at| line[*at..].starts_with(mark) || mark.starts_with(&line[*at..]))
}

/// Whether a line is a remark that OpenSSH makes about a connection that works.
fn is_remark(line: &str) -> bool {
    // OpenSSH 10 warns of old key exchanges in lines that begin with asterisks.
    ["Warning: Permanently added ", "Pseudo-terminal will not be allocated ", "** "]
        .iter()
        .any(|begin| line.starts_with(begin))
}

/// Whether a line is one in which OpenSSH says why it ends. Such a line comes without the host
/// among the lines of the ranks, so the starter says it with the host.
fn is_end_of_ssh(line: &[u8]) -> bool {
    let line = line.trim_ascii_end();
    let lines: [(&[u8], &[u8]); 3] = [
        (b"Timeout, server ", b" not responding."),
        (b"Connection to ", b" closed by remote host."),
        (b"client_loop: send disconnect: ", b""),
    ];
    lines.iter().any(|(begin, end)| line.starts_with(begin) && line.ends_with(end))
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use rustix::event::poll;

    use super::*;

    /// Runs a script to its end, and returns what it has printed.
    fn printed(script: &str) -> [Vec<u8>; 2] {
        let command = ["/bin/sh", "-c", &format!("printf '{BEGINS}'; {script}").replace('\x1f', "\\037")];
        let mut process = Process::start(&command.map(OsString::from), false).unwrap();
        process.is_greeted = true;
        while process.ended().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut printed = [Vec::new(), Vec::new()];
        for got in process.take_rest([true; 2]) {
            if let Got::Text { is_error, bytes } = got {
                printed[usize::from(is_error)].extend(bytes);
            }
        }
        printed
    }

    #[test]
    fn text_that_looks_like_the_beginning_of_a_mark_is_not_lost() {
        let begun = &MARK[..MARK.len() - 1];
        assert_eq!(printed(&format!("printf 'x{MARK}y'"))[0], format!("x{MARK}y").into_bytes());
        assert_eq!(printed("printf 'x\x1fy' >&2")[1], b"x\x1fy");
        assert_eq!(printed(&format!("printf 'x{begun}' >&2"))[1], format!("x{begun}").into_bytes());
    }

    #[test]
    fn all_that_a_large_pipe_holds_is_read_after_the_end() {
        // The pipe has the size that it has by default where pages have 64 KiB.
        let script = "exec 3>&1; printf go >&3; read go; seq 100000 150000";
        let mut process = Process::start(&["/bin/sh", "-c", script].map(OsString::from), false).unwrap();
        process.has_text = true;
        rustix::pipe::fcntl_setpipe_size(&process.streams[0].as_ref().unwrap().pipe, 1 << 20).unwrap();
        process.send(b"go\n");
        while process.ended().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let text = |got| if let Got::Text { bytes, .. } = got { bytes } else { Vec::new() };
        let printed: Vec<u8> = process.take_rest([true; 2]).into_iter().flat_map(text).collect();
        assert_eq!(printed.len(), 2 + 7 * 50_001);
        assert!(printed.ends_with(b"\n150000\n"));
    }

    /// With `--prefix` a node writes lines of up to 1 MiB whole. A part of such a line must not be
    /// passed on alone, because the text of another host may come behind it.
    #[test]
    fn a_long_line_with_a_prefix_is_passed_on_whole() {
        let long = (1 << 20) + 100;
        let script = format!("printf '{BEGINS}'; head -c {long} /dev/zero | tr '\\0' x; read go; echo; read go");
        let command = ["/bin/sh", "-c", &script.replace('\x1f', "\\037")].map(OsString::from);
        for has_whole_lines in [true, false] {
            let mut process = Process::start(&command, has_whole_lines).unwrap();
            let mut texts = Vec::new();
            let mut has_all = false;
            while !has_all || !texts.last().is_some_and(|text: &Vec<u8>| text.ends_with(b"\n")) {
                poll(&mut process.entries([true; 2]), None).unwrap();
                let text = |got| if let Got::Text { bytes, .. } = got { Some(bytes) } else { None };
                texts.extend(process.take([true; 2], false).into_iter().filter_map(text));
                let waiting = process.streams[0].as_ref().map_or(0, |stream| stream.line.len());
                let passed: usize = texts.iter().map(Vec::len).sum();
                if !has_all && passed + waiting == long {
                    has_all = true;
                    assert_eq!(passed == 0, has_whole_lines, "{passed}");
                    process.send(b"go\n");
                }
            }
            assert_eq!(texts.iter().map(Vec::len).sum::<usize>(), long + 1);
            assert_eq!(texts.len() == 1, has_whole_lines);
        }
    }

    #[test]
    fn the_last_words_of_ranks_come_before_the_message_of_their_node() {
        let script = format!(
            "printf '{BEGINS}half'; echo '{MARK}{{\"met\":{{}}}}' >&2; echo 'devicemesh run: it failed' >&2; read line"
        );
        let command = ["/bin/sh", "-c", &script.replace('\x1f', "\\037")].map(OsString::from);
        let mut process = Process::start(&command, false).unwrap();
        let mut texts = Vec::new();
        while !texts.iter().any(|text: &Vec<u8>| text.starts_with(MESSAGE)) {
            poll(&mut process.entries([true; 2]), None).unwrap();
            let text = |got| if let Got::Text { bytes, .. } = got { Some(bytes) } else { None };
            texts.extend(process.take([true; 2], false).into_iter().filter_map(text));
        }
        assert_eq!(texts, [b"half".to_vec(), b"devicemesh run: it failed\n".to_vec()]);
    }
}
