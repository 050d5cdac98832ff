//! How ranks end, and why a job does.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A rank that has ended.
#[derive(Clone, Serialize, Deserialize)]
pub struct Ended {
    pub rank: u32,
    pub pid: i32,
    pub how: How,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    Exited(i32),
    Signalled(i32),
}

impl Ended {
    pub fn failed(&self) -> bool {
        self.how != How::Exited(0)
    }

    pub fn code(&self) -> u8 {
        match self.how {
            How::Exited(code) => code as u8,
            How::Signalled(signal) => 128 + signal as u8,
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}) {}", self.rank, self.pid, self.how)
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Exited(code) => write!(f, "exited with code {code}"),
            How::Signalled(signal) => write!(f, "was killed by signal {signal} ({})", signal_name(*signal)),
        }
    }
}

pub fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGABRT => "SIGABRT",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGILL => "SIGILL",
        libc::SIGHUP => "SIGHUP",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGALRM => "SIGALRM",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGUSR2 => "SIGUSR2",
        _ => "see kill -l",
    }
}

/// Why a job ends; on several nodes the one cause that all of them report. `node` is the node that says so, as "node 1 (beta)"; none in a job of one node.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// All ranks ended well.
    Done,
    /// A rank failed first. `output`: the last lines of its stderr, where they went through the tool; `log`: where all of it is.
    Rank { ended: Ended, host: Option<String>, output: String, log: Option<String> },
    /// The program could not be started.
    Start { code: u8, message: String, node: Option<String> },
    /// The tool got a signal.
    Signal { signal: i32, node: Option<String> },
    /// `--timeout` passed.
    Timeout { seconds: f64, node: Option<String> },
    /// A node's tool has gone without a word.
    Gone { node: String },
    /// The nodes do not fit together, or not all came.
    Refused { message: String },
    /// The store is out of reach.
    Lost { message: String },
}

/// `--timeout` passed: as timeout(1).
const TIMED_OUT: u8 = 124;

impl Cause {
    /// The tool's exit code.
    pub fn code(&self) -> u8 {
        match self {
            Cause::Done => 0,
            Cause::Rank { ended, .. } => ended.code(),
            Cause::Start { code, .. } => *code,
            Cause::Signal { signal, .. } => 128 + *signal as u8,
            Cause::Timeout { .. } => TIMED_OUT,
            Cause::Gone { .. } | Cause::Refused { .. } | Cause::Lost { .. } => 1,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let says = |node: &Option<String>| node.as_ref().map_or(String::new(), |node| format!("{node}: "));
        match self {
            Cause::Done => f.write_str("all ranks ended well"),
            Cause::Rank { ended, host: None, .. } => ended.fmt(f),
            Cause::Rank { ended: Ended { rank, pid, how }, host: Some(host), .. } => {
                write!(f, "rank {rank} (pid {pid}) on {host} {how}")
            }
            Cause::Start { message, node, .. } => write!(f, "{}{message}", says(node)),
            Cause::Signal { signal, node } => write!(f, "{}got signal {signal} ({})", says(node), signal_name(*signal)),
            Cause::Timeout { seconds, node } => write!(f, "{}not done after {seconds} s (--timeout)", says(node)),
            Cause::Gone { node } => {
                write!(f, "{node} has gone: its devicemesh run was killed, or its host is down or out of reach")
            }
            Cause::Refused { message } | Cause::Lost { message } => f.write_str(message),
        }
    }
}
