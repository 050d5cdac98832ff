//! The signals that the tool gets, as something to wait for beside pipes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::flag;
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::failure::{Failure, advice_on_limits};

/// The signals that do not end a job. The front holds these signals back until the keeper catches
/// them. The keeper's preparations may take seconds, so it catches them before.
const EARLY: [i32; 4] = [SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2];
/// The other signals. During the preparations these signals end this process, as they end any
/// program. So the user can end a tool whose hostfile or driver does not answer.
const REST: [i32; 5] = [SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Signals that come within this time of the first one are the same wish: timeout(1) signals the
/// tool and its process group, and Slurm signals a step and the processes in it.
pub const ONE_WISH: Duration = Duration::from_millis(500);

/// The signals that have come and are not handled yet.
pub struct Signals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl Signals {
    /// Catches all signals that the tool handles.
    pub fn catch() -> Result<Signals, Failure> {
        let signals = Signals::catch_early()?;
        signals.catch_rest()?;
        Ok(signals)
    }

    /// Catches the signals that do not end a job.
    pub fn catch_early() -> Result<Signals, Failure> {
        let signals = Signals::catch_none()?;
        signals.add(&EARLY)?;
        Ok(signals)
    }

    /// Catches the other signals, too.
    pub fn catch_rest(&self) -> Result<(), Failure> {
        self.add(&REST)
    }

    /// Catches no signal.
    pub fn catch_none() -> Result<Signals, Failure> {
        let none: [i32; 0] = [];
        let delivery =
            UnixStream::pair().and_then(|(read, write)| SignalDelivery::with_pipe(read, write, SignalOnly, none));
        Ok(Signals { delivery: delivery.map_err(cannot_catch)? })
    }

    /// Catches these signals, too. A signal that the tool's parent has set to be ignored, as nohup
    /// does with SIGHUP, stays ignored in the tool and in the ranks.
    fn add(&self, signals: &[i32]) -> Result<(), Failure> {
        let (ignored, handle) = (ignored(), self.delivery.handle());
        let mut caught = signals.iter().filter(|signal| **signal == SIGCHLD || !is_in(ignored, **signal));
        caught.try_for_each(|signal| handle.add_signal(*signal)).map_err(cannot_catch)
    }

    /// The signals that have come since the last time, in the order of their numbers. Nobody knows
    /// in which order they came. Where SIGTSTP and SIGCONT are among them, SIGTSTP is left out, as
    /// the kernel drops it when SIGCONT comes: a job that nobody continues would stay stopped.
    pub fn take(&mut self) -> Vec<i32> {
        let mut signals: Vec<i32> = self.delivery.pending().collect();
        if signals.contains(&SIGCONT) {
            signals.retain(|signal| *signal != SIGTSTP);
        }
        signals
    }
}

fn cannot_catch(error: io::Error) -> Failure {
    let advice = advice_on_limits(&error);
    Failure::new(1, format!("cannot catch signals: {error}{advice}"))
}

impl AsFd for Signals {
    /// A descriptor that is readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.delivery.get_read().as_fd()
    }
}

/// Turns writes beyond the limit on the size of files (`ulimit -f`) into errors, as on a full disk.
/// The kernel sends SIGXFSZ for such a write, which would end the tool. The signal is caught and
/// forgotten. It is not ignored, because the ranks would inherit that, while exec resets what is
/// caught.
pub fn survive_too_large_files() {
    let too_large = Signal::XFSZ.as_raw();
    if !is_ignored(too_large) {
        // Where it cannot be caught, such a write ends the tool.
        let _ = flag::register(too_large, Arc::<AtomicBool>::default());
    }
}

/// Whether a signal is a second wish to end, where the first one came at that moment.
pub fn is_impatient(first: Instant, signal: Signal) -> bool {
    // A terminal that closes sends SIGHUP, and that is no sign of impatience.
    Instant::now() >= first + ONE_WISH && signal != Signal::HUP
}

/// The message for a user at a terminal about a second key that came too early to count. `None` for
/// a signal that is no key, because it comes from a program, which may send one signal twice.
pub fn too_early(signal: Signal) -> Option<String> {
    let key = match signal {
        Signal::INT => "Ctrl-C",
        Signal::QUIT => "Ctrl-\\",
        _ => return None,
    };
    let text = format!("{key} again within {} s of the first does not count", ONE_WISH.as_secs_f64());
    Some(format!("{text}; press it once more to kill the ranks at once"))
}

/// Whether this process ignores a signal.
pub fn is_ignored(signal: i32) -> bool {
    is_in(ignored(), signal)
}

fn is_in(mask: u64, signal: i32) -> bool {
    mask & (1 << (signal - 1)) != 0
}

/// The signals that this process ignores, signal n at bit n - 1, from `/proc`. None where that
/// cannot be read.
fn ignored() -> u64 {
    mask("self", "SigIgn:").unwrap_or(0)
}

/// Whether the front may pass this signal on to the keeper: the keeper catches the signal, or the
/// signal may end the keeper. The answer is yes, too, where `/proc` cannot be read.
pub fn is_ready_for(keeper: Pid, signal: Signal) -> bool {
    let caught = || mask(&keeper.as_raw_nonzero().to_string(), "SigCgt:");
    !EARLY.contains(&signal.as_raw()) || caught().is_none_or(|caught| is_in(caught, signal.as_raw()))
}

/// A set of signals of a process, as its status in `/proc` has it.
fn mask(pid: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}
