//! How the bytes of one client come and go: on a socket of its own, or in a channel of a trunk.

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;

use hostccl::fork::Private;

use super::super::channels::Window;
use super::super::frame::Malformed;
use super::super::table::Client;

/// How the bytes of one client come and go.
pub(super) enum Link {
    /// The client has a socket, which does not block.
    Socket(Private<TcpStream>),
    /// The client has a channel of a trunk.
    Channel(Channel),
}

/// A channel of a trunk, as its client's connection.
pub(super) struct Channel {
    /// The trunk's connection.
    pub(super) trunk: Client,
    /// The number of the channel in the trunk.
    pub(super) number: u32,
    /// How much may be sent, and how much has come.
    pub(super) window: Window,
    /// Bytes that have come and were not read yet.
    inbox: Vec<u8>,
    /// How many bytes of `inbox` were read.
    read: usize,
    /// Whether the other side has ended the channel.
    has_ended: bool,
    /// Whether the client is in the trunk's queue [`Trunk::waiting`].
    pub(super) waits_for_trunk: bool,
}

impl Channel {
    pub(super) fn new(trunk: Client, number: u32) -> Channel {
        let window = Window::new();
        Channel { trunk, number, window, inbox: Vec::new(), read: 0, has_ended: false, waits_for_trunk: false }
    }

    /// Adds bytes that have come. Fails where there are more than the channel's window allows.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        self.window.came(bytes.len())?;
        self.inbox.extend_from_slice(bytes);
        Ok(())
    }

    /// Notes that the other side has ended the channel. Bytes that came before the end are still
    /// read.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Whether the other side has ended the channel.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reads what has come.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> ReadOutcome {
        let there = &self.inbox[self.read..];
        if there.is_empty() {
            return if self.has_ended { ReadOutcome::End } else { ReadOutcome::Nothing };
        }
        let count = there.len().min(buffer.len());
        buffer[..count].copy_from_slice(&there[..count]);
        self.window.took(count);
        self.read += count;
        if self.read == self.inbox.len() {
            (self.inbox, self.read) = (Vec::new(), 0);
        }
        ReadOutcome::Bytes(count)
    }

    /// Returns how many bytes of memory the channel keeps.
    pub(super) fn memory(&self) -> usize {
        self.inbox.capacity()
    }
}

/// The part of a connection that only a trunk has.
#[derive(Default)]
pub(super) struct Trunk {
    /// The clients of the channels that are open, by the channels' numbers.
    pub(super) channels: BTreeMap<u32, Client>,
    /// The highest number that a channel has had.
    pub(super) last: Option<u32>,
    /// Clients that have something to send, and wait until the trunk has sent what it has.
    pub(super) waiting: VecDeque<Client>,
}

/// The result of an attempt to read.
pub(super) enum ReadOutcome {
    /// This many bytes were read.
    Bytes(usize),
    /// There is nothing to read now.
    Nothing,
    /// The client has closed its connection, or the connection has failed.
    End,
}
