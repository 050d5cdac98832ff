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
    std::thread::Builder::new().name("dm-stdin".to_owned()).spawn(move || copy(&io::stdin(), to)).map(drop)
}

fn copy(from: &impl AsFd, mut to: impl Write + AsFd) {
    let mut buffer = [0; 4096];
    loop {
        // If the rank has closed its end of the pipe, `poll` reports ERR without being asked. This
        // thread then ends, so that the next line goes to the next rank.
        let mut watched = [PollFd::new(from, PollFlags::IN), PollFd::new(&to, PollFlags::empty())];
        let ready = poll(&mut watched, None);
        if watched[1].revents().contains(PollFlags::ERR) {
            return;
        }
        // A read in the background would stop the tool, while the ranks would run on.
        if tcgetpgrp(from.as_fd()).is_ok_and(|group| group != getpgrp()) {
            std::thread::sleep(BACKGROUND);
            continue;
        }
        match ready.and_then(|_| read(from, &mut buffer)) {
            Ok(0) => return,
            Ok(count) if to.write_all(&buffer[..count]).is_ok() => {}
            Err(Errno::INTR | Errno::AGAIN) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::thread::{JoinHandle, sleep, spawn};
    use std::time::Instant;

    use rustix::pipe::pipe;

    use super::*;

    fn has_ended(thread: &JoinHandle<()>) -> bool {
        let until = Instant::now() + Duration::from_secs(10);
        while !thread.is_finished() && Instant::now() < until {
            sleep(Duration::from_millis(1));
        }
        thread.is_finished()
    }

    #[test]
    fn a_line_after_a_restart_is_for_the_new_rank() {
        let (terminal, user) = pipe().unwrap();
        let start = |to: OwnedFd| {
            let terminal = terminal.try_clone().unwrap();
            spawn(move || copy(&terminal, File::from(to)))
        };
        let (old_rank, to_old_rank) = pipe().unwrap();
        let old = start(to_old_rank);
        drop(old_rank);
        assert!(has_ended(&old), "the thread of the old rank still reads");
        let (rank, to_rank) = pipe().unwrap();
        let new = start(to_rank);
        File::from(user).write_all(b"line\n").unwrap();
        let mut said = String::new();
        File::from(rank).read_to_string(&mut said).unwrap();
        assert!(said == "line\n" && has_ended(&new), "{said:?}");
    }
}
