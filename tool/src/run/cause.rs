//! The ways in which ranks end, and the causes for which a job ends.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

/// A rank that has ended.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Its rank in the world.
    pub rank: u32,
    /// Its process id on its own host, by which users find it in logs.
    pub pid: i32,
    pub how: How,
    /// Whether it left a core dump. Only a process that a signal killed does.
    #[serde(default)]
    pub has_dumped_core: bool,
}

/// The way in which a process ended.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// It exited with this code.
    Exited(i32),
    /// This signal killed it.
    Signalled(i32),
}

impl Ended {
    pub fn failed(&self) -> bool {
        self.how != How::Exited(0)
    }

    /// Whether it was killed by one of the signals that the tool sends to end ranks.
    pub fn was_ended(&self) -> bool {
        [Signal::TERM, Signal::KILL].iter().any(|signal| self.how == How::Signalled(signal.as_raw()))
    }

    /// Says what happened to it: "rank 1 (pid 7) on beta was killed by signal 6 (SIGABRT) (core
    /// dumped)". `on_host` is " on beta", or it is empty.
    pub fn told(&self, on_host: &str) -> String {
        format!("rank {} (pid {}){on_host} {}{}", self.rank, self.pid, self.how, self.core())
    }

    /// The words for a core dump, behind the signal's name.
    pub fn core(&self) -> &'static str {
        if self.has_dumped_core { " (core dumped)" } else { "" }
    }
}

impl How {
    /// The exit code that a shell would give for it.
    pub fn code(self) -> u8 {
        match self {
            How::Exited(code) => u8::try_from(code).unwrap_or(1),
            How::Signalled(signal) => code_of_signal(signal),
        }
    }
}

/// Returns the exit code that a shell would give for a process that this signal has ended. Another
/// node may have sent a number that is no signal; the code is then 1.
fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(signal).ok().filter(|signal| (1..=64).contains(signal)).map_or(1, |signal| 128 + signal)
}

impl From<ExitStatus> for How {
    fn from(status: ExitStatus) -> How {
        // A process that has ended has one of the two.
        status.signal().map_or_else(|| How::Exited(status.code().unwrap_or(1)), How::Signalled)
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

/// The name of a signal, for messages. The real-time signals have numbers only.
pub fn signal_name(signal: i32) -> &'static str {
    match Signal::from_named_raw(signal) {
        Some(Signal::HUP) => "SIGHUP",
        Some(Signal::INT) => "SIGINT",
        Some(Signal::QUIT) => "SIGQUIT",
        Some(Signal::ILL) => "SIGILL",
        Some(Signal::TRAP) => "SIGTRAP",
        Some(Signal::ABORT) => "SIGABRT",
        Some(Signal::BUS) => "SIGBUS",
        Some(Signal::FPE) => "SIGFPE",
        Some(Signal::KILL) => "SIGKILL",
        Some(Signal::USR1) => "SIGUSR1",
        Some(Signal::SEGV) => "SIGSEGV",
        Some(Signal::USR2) => "SIGUSR2",
        Some(Signal::PIPE) => "SIGPIPE",
        Some(Signal::ALARM) => "SIGALRM",
        Some(Signal::TERM) => "SIGTERM",
        Some(Signal::STKFLT) => "SIGSTKFLT",
        Some(Signal::CHILD) => "SIGCHLD",
        Some(Signal::CONT) => "SIGCONT",
        Some(Signal::STOP) => "SIGSTOP",
        Some(Signal::TSTP) => "SIGTSTP",
        Some(Signal::TTIN) => "SIGTTIN",
        Some(Signal::TTOU) => "SIGTTOU",
        Some(Signal::URG) => "SIGURG",
        Some(Signal::XCPU) => "SIGXCPU",
        Some(Signal::XFSZ) => "SIGXFSZ",
        Some(Signal::VTALARM) => "SIGVTALRM",
        Some(Signal::PROF) => "SIGPROF",
        Some(Signal::WINCH) => "SIGWINCH",
        Some(Signal::IO) => "SIGIO",
        Some(Signal::POWER) => "SIGPWR",
        Some(Signal::SYS) => "SIGSYS",
        _ => "see kill -l",
    }
}

/// Why a job ends. In a job of several nodes all of them report the same cause. `node` is the node
/// that reported it first, as "node 1 (beta)". It is `None` in a job of one node.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// All ranks ended well.
    Done,
    /// A rank failed first. `host` is its host, in a job of several nodes. `output` holds the last
    /// lines of its standard error, or nothing where they did not go through the tool. `reason` is
    /// the text after its exit code, which comes from those lines. `log` names the file with all
    /// of its output, for messages. `restarts` is the end of the last line about the restarts
    /// before, or nothing.
    Rank {
        ended: Ended,
        host: Option<Box<str>>,
        output: String,
        reason: String,
        log: Option<String>,
        #[serde(default)]
        restarts: Box<str>,
    },
    /// The program could not be started.
    Start { code: u8, message: String, node: Option<String> },
    /// The tool got a signal.
    Signal { signal: i32, node: Option<String> },
    /// The `devicemesh run` that started the job on several hosts ends it, and has said why.
    Ordered,
    /// `--timeout` passed.
    Timeout { seconds: f64, node: Option<String> },
    /// Some of the ranks' output is lost or may be lost, as the message says.
    Output { message: String, node: Option<String> },
    /// The tool of another node has ended without a report. `number` is the node's number, where it
    /// is known. `is_killed` is `Some(true)` where the tool was killed, `Some(false)` where its
    /// host or the network is down, and `None` where nobody knows which.
    Gone {
        node: String,
        number: Option<u32>,
        #[serde(default)]
        is_killed: Option<bool>,
    },
    /// The nodes do not fit together, or some did not come.
    Refused { message: String },
    /// The node with that number has lost its connection to the starter, or it serves the store and
    /// is out of reach, so that this node knows nothing of the others.
    Lost { message: String, number: Option<u32> },
}

/// The exit code when `--timeout` has passed. It is timeout(1)'s.
pub const TIMED_OUT: u8 = 124;

impl Cause {
    /// The tool's exit code.
    pub fn code(&self) -> u8 {
        match self {
            Cause::Done => 0,
            Cause::Rank { ended, .. } => ended.how.code(),
            Cause::Start { code, .. } => *code,
            Cause::Signal { signal, .. } => code_of_signal(*signal),
            Cause::Ordered => 128 + Signal::TERM.as_raw() as u8,
            Cause::Timeout { .. } => TIMED_OUT,
            Cause::Output { .. } | Cause::Gone { .. } | Cause::Refused { .. } | Cause::Lost { .. } => 1,
        }
    }
}

impl Cause {
    /// The number of the node that the job has lost.
    pub fn lost_node(&self) -> Option<u32> {
        match self {
            Cause::Gone { number, .. } | Cause::Lost { number, .. } => *number,
            _ => None,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reporter = |node: &Option<String>| node.as_ref().map_or(String::new(), |node| format!("{node}: "));
        match self {
            Cause::Done => f.write_str("all ranks ended well"),
            Cause::Rank { ended, host, .. } => {
                let on_host = host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
                f.write_str(&ended.told(&on_host))
            }
            Cause::Start { message, node, .. } | Cause::Output { message, node } => {
                write!(f, "{}{message}", reporter(node))
            }
            Cause::Signal { signal, node } => {
                write!(f, "{}got signal {signal} ({})", reporter(node), signal_name(*signal))
            }
            Cause::Ordered => f.write_str("the devicemesh run that started the job ends it"),
            Cause::Timeout { seconds, node } => write!(f, "{}not done after {seconds} s (--timeout)", reporter(node)),
            Cause::Gone { node, is_killed, .. } => {
                let why = match is_killed {
                    Some(true) => "its devicemesh run was killed",
                    Some(false) => "its host or the network is down",
                    None => "its devicemesh run was killed, or its host is down or out of reach",
                };
                write!(f, "{node} has gone: {why}")
            }
            Cause::Refused { message } | Cause::Lost { message, .. } => f.write_str(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cause, Ended, How, signal_name};

    /// A node of another version, or a stranger in a store without a secret, may send any number.
    #[test]
    fn numbers_of_other_nodes_are_failures_whatever_they_are() {
        for signal in [i32::MIN, -1, 0, 65, 128, 256, i32::MAX] {
            assert_eq!(How::Signalled(signal).code(), 1);
            assert_eq!(Cause::Signal { signal, node: None }.code(), 1);
        }
        assert_eq!([How::Exited(-1).code(), How::Exited(256).code(), How::Exited(255).code()], [1, 1, 255]);
        assert_eq!([How::Signalled(9).code(), How::Signalled(64).code()], [137, 192]);
    }

    #[test]
    fn all_signals_but_real_time_ones_have_names() {
        assert!((1..=31).all(|signal| signal_name(signal).starts_with("SIG")));
        assert_eq!((signal_name(24), signal_name(25)), ("SIGXCPU", "SIGXFSZ"));
        assert_eq!(signal_name(40), "see kill -l");
    }

    /// A node compares its own cause with the one that it reads from the store.
    #[test]
    fn seconds_do_not_change_on_their_way() {
        for millis in 0..20_000 {
            let seconds = std::time::Duration::from_millis(millis).as_secs_f64();
            let cause = Cause::Timeout { seconds, node: None };
            let text = serde_json::to_vec(&cause).unwrap();
            assert!(serde_json::from_slice::<Cause>(&text).unwrap() == cause, "{millis} ms");
        }
    }

    #[test]
    fn a_core_dump_is_told() {
        let mut ended = Ended { rank: 1, pid: 7, how: How::Signalled(6), has_dumped_core: true };
        assert_eq!(ended.told(""), "rank 1 (pid 7) was killed by signal 6 (SIGABRT) (core dumped)");
        ended.has_dumped_core = false;
        assert_eq!(ended.told(""), "rank 1 (pid 7) was killed by signal 6 (SIGABRT)");
        // Tools of other versions say nothing of core dumps.
        let other: Ended = serde_json::from_str(r#"{"rank":1,"pid":7,"how":{"signalled":6}}"#).unwrap();
        assert_eq!(other.told(""), ended.told(""));
    }
}
