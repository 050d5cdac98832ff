//! The error that ends a subcommand, and the advice on limits that belongs to some errors.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Why a subcommand could not do its work.
pub struct Failure {
    /// The exit code of the tool.
    pub code: u8,
    /// One line for standard error. `main` escapes the characters that act on a terminal.
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}

/// The end of a message about an error that a limit on processes, threads or open files has caused:
/// it says what to do. It is empty for other errors.
pub fn advice_on_limits(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => {
            let now = getrlimit(Resource::Nproc).current.map_or("unlimited".to_owned(), |limit| limit.to_string());
            format!(
                "; this user or this container has reached its limit of processes and threads (raise `ulimit -u`, now {now}, or the container's pids.max)"
            )
        }
        Some(Errno::MFILE) => {
            let now = getrlimit(Resource::Nofile).current.map_or("unlimited".to_owned(), |limit| limit.to_string());
            format!("; this process has reached its limit of open files (raise `ulimit -n`, now {now})")
        }
        _ => String::new(),
    }
}
