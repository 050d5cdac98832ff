//! Reads the orders of the starter, which reach a node over standard input.

use std::io::{Stdin, stdin};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::words::{Said, Share, Word};
use crate::run::cause::Cause;
use crate::run::ending::TERM_TO_KILL;
use crate::run::guard;

/// A starter that says nothing for this long has gone, for example because its host lost the
/// network. It says something every few seconds ([`Word::Alive`]).
pub const SILENCE: Duration = Duration::from_secs(60);

/// Says when ranks are killed whose node has lost its connection to the starter.
pub fn when_without_starter() -> String {
    let (soon, late) = (TERM_TO_KILL.as_secs(), (SILENCE + TERM_TO_KILL).as_secs());
    format!("within {soon} s, on a host that is out of reach within {late} s")
}

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
}

impl Control {
    /// The control of a node that `--hosts` has started. Tells the starter that the node has begun.
    pub fn of(share: Option<&Share>) -> Option<Control> {
        let share = share?;
        Said::Begun.say();
        // ssh ends with one code for a killed node and for a failed connection, so the keeper of a
        // node whose front was killed tells the starter.
        let gone = Cause::Gone { node: share.name_of(share.node), number: None, is_killed: Some(true) };
        guard::set_last_word(Said::Killed { text: gone.to_string() }.mark().into_bytes());
        Some(Control {
            starter: share.starter.clone(),
            input: stdin(),
            line: Vec::new(),
            is_open: true,
            heard: Instant::now(),
        })
    }

    /// The descriptor to wait for. `None` when the connection has ended.
    pub fn entry(&self) -> Option<BorrowedFd<'_>> {
        self.is_open.then(|| self.input.as_fd())
    }

    /// When the starter counts as gone, unless it says something before. Ctrl-Z stops the front of
    /// the starter only, and the keeper goes on saying something. `None` when the connection has
    /// ended.
    pub fn deadline(&self) -> Option<Instant> {
        self.is_open.then_some(self.heard + SILENCE)
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
                Ok(count) => self.hear(&buffer[..count], &mut orders),
            }
        }
        if self.deadline().is_some_and(|deadline| Instant::now() >= deadline) {
            self.is_open = false;
            orders.push(Order::StarterGone(self.starter.clone()));
        }
        orders
    }

    /// Adds the orders of a piece of the input.
    fn hear(&mut self, bytes: &[u8], orders: &mut Vec<Order>) {
        self.line.extend_from_slice(bytes);
        self.heard = Instant::now();
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(Word::Signal(signal)) => orders.push(Order::Signal(signal)),
                Ok(Word::AtOnce(signal)) => orders.push(Order::AtOnce(signal)),
                Ok(Word::Alive) => {}
                Ok(Word::End { lost }) => orders.push(Order::End { lost }),
                // Only a starter of another version has other words, and such a starter ends
                // the job at the agent's hello.
                Err(_) => {}
            }
        }
    }

    fn is_readable(&self) -> bool {
        let mut entry = [PollFd::new(&self.input, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut entry, Some(&now)).is_ok() && !entry[0].revents().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_starter_that_is_stopped_must_be_heard() {
        let starter = "alpha".to_owned();
        let mut control = Control { starter, input: stdin(), line: Vec::new(), is_open: true, heard: Instant::now() };
        let mut orders = Vec::new();
        // SIGTSTP. The network may fail before SIGCONT.
        control.hear(b"{\"signal\":20}\n", &mut orders);
        assert!(matches!(orders[..], [Order::Signal(20)]));
        assert!(control.deadline().is_some_and(|deadline| deadline <= Instant::now() + SILENCE));
    }
}
