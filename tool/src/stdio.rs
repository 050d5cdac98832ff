//! Writes to standard output and standard error. A full disk is an error. A reader that has closed
//! the pipe is no error.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::io::{Errno, retry_on_intr, write};

use crate::failure::Failure;

/// Prints to standard output.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    match ignore_gone_reader(write_all(io::stdout(), text.as_ref())) {
        Ok(()) => Ok(()),
        Err(error) => Err(Failure::new(1, cannot_print(&error))),
    }
}

/// The message of an error on standard output.
pub fn cannot_print(error: &io::Error) -> String {
    format!("cannot write to standard output: {error}")
}

/// Prints one line to standard error. An error is ignored, because there is no other place to
/// report it.
pub fn say(line: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(format!("{line}\n").as_bytes());
}

/// Whether two descriptors lead to one file, pipe or terminal.
pub fn same_file(one: impl AsFd, other: impl AsFd) -> bool {
    let (Ok(one), Ok(other)) = (fstat(one), fstat(other)) else { return false };
    (one.st_dev, one.st_ino, one.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)
}

/// The outcome of a write. A reader that has closed its end, as `head` does, is no error.
pub fn ignore_gone_reader(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes all bytes. Waits where the descriptor is non-blocking and full, because whoever started
/// the tool may have made it so.
pub fn write_all(descriptor: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match retry_on_intr(|| write(&descriptor, bytes)) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::AGAIN) => {
                // A signal may end the wait early; then the next write waits again.
                let _ = poll(&mut [PollFd::new(&descriptor, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
