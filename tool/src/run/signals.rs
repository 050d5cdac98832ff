//! The signals that the tool gets, as something to wait for beside pipes.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

use crate::failure::Failure;

const CAUGHT: [i32; 7] = [SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// The signals that have come and are not handled yet.
pub struct Signals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl Signals {
    /// Catches the signals. A signal that the tool's parent has set to be ignored, as nohup does
    /// with SIGHUP, stays ignored in the tool and in the ranks.
    pub fn catch() -> Result<Signals, Failure> {
        let ignored = ignored();
        let caught = CAUGHT.iter().filter(|signal| **signal == SIGCHLD || ignored & (1 << (**signal - 1)) == 0);
        let delivery =
            UnixStream::pair().and_then(|(read, write)| SignalDelivery::with_pipe(read, write, SignalOnly, caught));
        match delivery {
            Ok(delivery) => Ok(Signals { delivery }),
            Err(error) => Err(Failure::new(1, format!("cannot catch signals: {error}"))),
        }
    }

    /// The signals that have come since the last time.
    pub fn take(&mut self) -> Vec<i32> {
        self.delivery.pending().collect()
    }
}

impl AsFd for Signals {
    /// A descriptor that is readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.delivery.get_read().as_fd()
    }
}

/// The signals that this process ignores, signal n at bit n - 1, from `/proc`. None where that
/// cannot be read.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
