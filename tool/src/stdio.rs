//! Writes to standard output and standard error. A full disk is an error, and so is a standard
//! output that is closed (`>&-`). A reader that has closed the pipe is no error.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::io::{Errno, fcntl_getfd, retry_on_intr, write};

use crate::failure::Failure;

/// Whether standard output was closed when the tool was started.
static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Sets [`STDOUT_WAS_CLOSED`] before `main`. The start of Rust's own code opens /dev/null in place
/// of a closed standard output, and after that all output is lost without an error.
#[used]
#[expect(unsafe_code, reason = "no safe way runs code before the start of Rust's own")]
// SAFETY: the loader calls each function of this section once, before `main` and on one thread.
// This function makes one system call and stores the outcome, so it needs nothing that is set up
// later.
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = look_at_stdout;

extern "C" fn look_at_stdout() {
    let is_closed = fcntl_getfd(rustix::stdio::stdout()) == Err(Errno::BADF);
    STDOUT_WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

/// Says whether standard output was closed when the process was started. A program calls this that
/// loads the tool as a library, because [`look_at_stdout`] is too late there.
pub fn note_closed_stdout(is_closed: bool) {
    STDOUT_WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

/// Fails where standard output was closed when the tool was started.
pub fn stdout_is_open() -> io::Result<()> {
    match STDOUT_WAS_CLOSED.load(Ordering::Relaxed) {
        true => Err(Errno::BADF.into()),
        false => Ok(()),
    }
}

/// Prints to standard output.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    let written = stdout_is_open().and_then(|()| write_all(io::stdout(), text.as_ref()));
    match ignore_gone_reader(written) {
        Ok(()) => Ok(()),
        Err(error) => Err(Failure::new(1, cannot_print(&error))),
    }
}

/// The message of an error on standard output.
pub fn cannot_print(error: &io::Error) -> String {
    cannot_write(false, error)
}

/// The message of an error on standard error, or on standard output.
pub fn cannot_write(is_error: bool, error: &io::Error) -> String {
    format!("cannot write to standard {}: {error}", if is_error { "error" } else { "output" })
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
