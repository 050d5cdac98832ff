//! Standard input for the rank that reads it.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::process::{ChildStdin, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, read};
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;

/// How long the tool waits before it looks again whether it may read from the terminal.
const BACKGROUND: Duration = Duration::from_millis(200);

/// Returns the standard input of a rank.
pub fn source(reads: bool) -> Stdio {
    match (reads, io::stdin().is_terminal()) {
        (false, _) => Stdio::null(),
        (true, false) => Stdio::inherit(),
        // Each rank is in a process group of its own, and the terminal stops a process that reads
        // while its group is in the background. So the tool reads. Its group stays in the
        // foreground, and Ctrl-C reaches the tool as before.
        (true, true) => Stdio::piped(),
    }
}

/// Starts a thread that copies the terminal's lines to a rank, until the rank has ended or closed
/// its input, or Ctrl-D ends the input.
pub fn copy_terminal(to: ChildStdin) -> io::Result<()> {
    std::thread::Builder::new().name("dm-stdin".to_owned()).spawn(move || copy(to)).map(drop)
}

fn copy(mut to: ChildStdin) {
    let stdin = io::stdin();
    let mut buffer = [0; 4096];
    loop {
        let ready = poll(&mut [PollFd::new(&stdin, PollFlags::IN)], None);
        // A read in the background would stop the tool, while the ranks would run on.
        if tcgetpgrp(stdin.as_fd()).is_ok_and(|group| group != getpgrp()) {
            std::thread::sleep(BACKGROUND);
            continue;
        }
        match ready.and_then(|_| read(&stdin, &mut buffer)) {
            Ok(0) => return,
            Ok(count) if to.write_all(&buffer[..count]).is_ok() => {}
            Err(Errno::INTR | Errno::AGAIN) => {}
            _ => return,
        }
    }
}
