//! Reads the orders of the starter, which reach a node over standard input.

use std::io::{Stdin, stdin};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::SIGTSTP;

use super::words::{Said, Share, Word};
use crate::run::cause::Cause;
use crate::run::guard;

/// A starter that says nothing for this long has gone, for example because its host lost the network.
/// It says something every few seconds ([`Word::Alive`]).
pub const SILENCE: Duration = Duration::from_secs(60);

/// An order for a node.
pub enum Order {
    /// Handle this signal, which the starter got.
    Signal(i32),
    /// Kill the ranks, because the starter got this signal as a second one.
    AtOnce(i32),
    /// End the job without a message, because the starter has said why. `lost` is the number of
    /// the node that is lost, where that is why.
    End { lost: Option<u32> },
    /// The connection to the starter, on the named host, has ended.
    StarterGone(String),
}

/// The connection to the starter.
pub struct Control {
    starter: String,
    input: Stdin,
    /// The bytes of a line that has not ended.
    line: Vec<u8>,
    is_open: bool,
    /// When the starter was heard last.
    heard: Instant,
    /// Whether the starter is stopped (Ctrl-Z), so that it says nothing.
    is_stopped: bool,
}

impl Control {
    /// The control of a node that `--hosts` has started. Tells the starter that the node has begun.
    pub fn of(share: Option<&Share>) -> Option<Control> {
        let share = share?;
        Said::Begun.say();
        // ssh ends with one code for a killed node and for a failed connection, so the keeper of a
        // node whose front was killed tells the starter.
        let gone = Cause::Gone { node: share.name_of(share.node), number: None, is_killed: Some(true) };
        guard::set_last_word(Said::Gone { node: share.node, text: gone.to_string() }.mark().into_bytes());
        Some(Control {
            starter: share.starter.clone(),
            input: stdin(),
            line: Vec::new(),
            is_open: true,
            heard: Instant::now(),
            is_stopped: false,
        })
    }

    /// The descriptor to wait for. `None` when the connection has ended.
    pub fn entry(&self) -> Option<BorrowedFd<'_>> {
        self.is_open.then(|| self.input.as_fd())
    }

    /// When the starter counts as gone, unless it says something before. `None` while that cannot be.
    pub fn deadline(&self) -> Option<Instant> {
        (self.is_open && !self.is_stopped).then_some(self.heard + SILENCE)
    }

    /// Returns the orders that have come since the last call.
    pub fn orders(&mut self) -> Vec<Order> {
        let mut orders = Vec::new();
        while self.is_open && self.is_readable() {
            let mut buffer = [0; 4096];
            match rustix::io::retry_on_intr(|| rustix::io::read(&self.input, &mut buffer[..])) {
                Ok(0) | Err(_) => {
                    self.is_open = false;
                    orders.push(Order::StarterGone(self.starter.clone()));
                }
                Ok(count) => {
                    self.line.extend_from_slice(&buffer[..count]);
                    self.heard = Instant::now();
                }
            }
            while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(Word::Signal(signal)) => {
                        self.is_stopped = signal == SIGTSTP;
                        orders.push(Order::Signal(signal));
                    }
                    Ok(Word::AtOnce(signal)) => orders.push(Order::AtOnce(signal)),
                    Ok(Word::Alive) => {}
                    Ok(Word::End { lost }) => orders.push(Order::End { lost }),
                    // Only a starter of another version has other words, and such a starter ends
                    // the job at the agent's hello.
                    Err(_) => {}
                }
            }
        }
        if self.deadline().is_some_and(|deadline| Instant::now() >= deadline) {
            self.is_open = false;
            orders.push(Order::StarterGone(self.starter.clone()));
        }
        orders
    }

    fn is_readable(&self) -> bool {
        let mut entry = [PollFd::new(&self.input, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut entry, Some(&now)).is_ok() && !entry[0].revents().is_empty()
    }
}

/// Tells the starter that a node has gone.
pub fn say_gone(node: u32, text: String) {
    Said::Gone { node, text }.say();
}

/// Tells the starter that the job ends for this cause. This node also says the cause to the user.
pub fn say_ending(cause: String) {
    Said::Ending { cause }.say();
}

/// Tells the starter that this node has met all the others.
pub fn say_met() {
    Said::Met.say();
}

/// Tells the starter that this node has ended.
pub fn say_ended(code: u8) {
    Said::Ended { code }.say();
}
