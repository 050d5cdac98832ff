//! Sends replies, on sockets and in the channels of trunks, and ends connections.

use std::net::Shutdown;
use std::time::Instant;

use super::super::channels;
use super::super::table::Client;
use super::client::Connection;
use super::clients::{LEAST, SMALL_SEND, Serving};
use super::link::{Channel, Link, Trunk};
use super::shared::MAX_BUFFERED;

/// How many clients are answered in the time in which a client is forgotten that has left many last
/// words.
const WOKEN_FOR_ORPHAN: usize = 16;

impl Serving {
    /// Sends what the socket takes, up to `limit` bytes, and returns how many. Nothing is sent to a
    /// client in the queue for a larger turn.
    pub(super) fn flush(&mut self, client: Client, limit: usize) -> usize {
        let Some(connection) = self.clients.get_mut(&client) else { return 0 };
        if matches!(connection.link, Link::Channel(_)) {
            return self.flush_channel(client, limit);
        }
        let flushed = if connection.busy { Ok(0) } else { connection.flush(limit) };
        let Ok(sent) = flushed else {
            self.lost.push(client);
            return 0;
        };
        if connection.ending && connection.outgoing.left() == 0 {
            self.lost.push(client);
            return sent;
        }
        let is_trunk = connection.trunk.is_some();
        self.update_interest(client);
        self.account_memory(client);
        if is_trunk {
            self.resume_channels(client);
        }
        sent
    }

    /// Counts the memory that a client makes the server keep. When the memory for all clients, with
    /// the values that only unread replies keep, is too much, clients are dropped until it is not.
    /// A client that is not admitted goes first, then one that does not read, then the client that
    /// keeps the most memory.
    pub(super) fn account_memory(&mut self, client: Client) {
        let Some(connection) = self.clients.get_mut(&client) else { return };
        let now = connection.buffered();
        self.buffered = self.buffered + now - connection.counted;
        connection.counted = now;
        while self.buffered + self.table.loose() > MAX_BUFFERED {
            let weight = |connection: &Connection| {
                // A trunk keeps what is for its clients.
                let sharing = connection.trunk.as_ref().map_or(1, |trunk| trunk.channels.len().max(1));
                let kept = (connection.counted + connection.outgoing.left()) / sharing;
                (kept > 0 && !connection.is_admitted(), kept > 0 && connection.is_stalled(), kept)
            };
            let most = self.clients.iter_mut().filter(|(_, connection)| !connection.ending);
            let Some((most, connection)) = most.max_by_key(|(_, connection)| weight(connection)) else { return };
            self.buffered -= connection.counted;
            connection.release();
            self.lost.push(*most);
        }
    }

    /// Hands out the table's replies. The replies to `asking` are sent at the end of the turn,
    /// those to other clients soon after. Returns how much work that was.
    pub(super) fn answer(&mut self, asking: Client) -> usize {
        let mut replies = std::mem::take(&mut self.replies);
        let mut handed = 0;
        for reply in replies.drain(..) {
            let Some(connection) = self.clients.get_mut(&reply.to).filter(|connection| !connection.ending) else {
                continue;
            };
            if connection.outgoing.left() == 0 {
                connection.active = Instant::now();
            }
            connection.outgoing.push(&reply.bytes);
            handed += reply.bytes.len();
            if let Some(value) = reply.value {
                handed += value.len().min(LEAST);
                connection.outgoing.push_value(value);
            }
            if reply.to != asking && !connection.answered {
                connection.answered = true;
                self.answered.push_back(reply.to);
            }
        }
        self.replies = replies;
        handed
    }

    /// Finishes the turn of a client: sends replies to the other clients that the turn woke, at
    /// most `woken` of them now, and drops the clients whose sockets have failed.
    pub(super) fn finish_turn(&mut self, woken: usize) {
        for _ in 0..woken {
            let Some(client) = self.answered.pop_front() else { break };
            let Some(connection) = self.clients.get_mut(&client) else { continue };
            connection.answered = false;
            self.flush(client, SMALL_SEND);
        }
        while let Some(client) = self.lost.pop() {
            self.leave(client);
        }
        // A trunk may have had many clients, and each of them may have left many last words.
        for _ in 0..woken.div_ceil(WOKEN_FOR_ORPHAN) {
            let Some(client) = self.orphans.pop_front() else { break };
            self.leave(client);
        }
    }

    /// Ends a connection, and forgets its client.
    pub(super) fn leave(&mut self, client: Client) {
        let Some(mut connection) = self.clients.remove(&client) else { return };
        let is_silent = connection.is_silent();
        if is_silent {
            self.table.note_silent(client);
        }
        match &connection.link {
            Link::Socket(stream) => {
                // Closing the socket takes it out of the poll and shuts it down, unless a process
                // made by `clone` has a copy of the socket.
                self.poll.remove(&**stream);
                let _ = stream.shutdown(Shutdown::Both);
            }
            Link::Channel(channel) => self.end_channel(channel.trunk, channel.number),
        }
        if let Some(trunk) = connection.trunk.take() {
            self.end_trunk(*trunk, is_silent);
        }
        self.buffered -= connection.counted;
        self.connections.left(client, connection.address, self.sockets());
        self.table.leave(client, &mut self.replies);
        self.answer(client);
    }

    /// Adds frames to what a trunk sends soon.
    pub(super) fn send_on_trunk(&mut self, trunk: Client, frames: &[u8]) {
        let Some(connection) = self.clients.get_mut(&trunk).filter(|connection| !connection.ending) else { return };
        connection.outgoing.push(frames);
        if !connection.answered {
            connection.answered = true;
            self.answered.push_back(trunk);
        }
    }

    /// Moves bytes that the client of a channel has to send to what its trunk sends: about as many
    /// as `limit` units of work allow, and at most as many as the channel's window allows. Returns
    /// how much work that was.
    fn flush_channel(&mut self, client: Client, limit: usize) -> usize {
        let Some(connection) = self.clients.get(&client) else { return 0 };
        let Link::Channel(Channel { trunk, number, .. }) = connection.link else { return 0 };
        // A trunk that has much to send lets its channels wait, so they fill no memory.
        let is_clear = self.clients.get(&trunk).is_some_and(|trunk| !trunk.is_backlogged());
        let Some(connection) = self.clients.get_mut(&client) else { return 0 };
        let is_stuck = connection.outgoing.left() > 0 && !connection.busy && !is_clear;
        let limit = if connection.busy || !is_clear { 0 } else { limit };
        let Ok((bytes, work)) = connection.take_outgoing(limit) else {
            self.lost.push(client);
            return 0;
        };
        let Link::Channel(channel) = &mut connection.link else { return 0 };
        let mut frames = Vec::with_capacity(bytes.len() + channels::HEADER);
        channels::put_bytes(&mut frames, number, &bytes);
        channel.window.sent(bytes.len());
        if let Some(taken) = channel.window.take_untold() {
            frames.extend_from_slice(&channels::taken(number, taken));
        }
        let waits = is_stuck && !std::mem::replace(&mut channel.waits_for_trunk, true);
        let goes_on = channel.window.room() > 0 && !connection.busy && is_clear && connection.outgoing.left() > 0;
        if connection.ending && connection.outgoing.left() == 0 {
            self.lost.push(client);
        }
        if !frames.is_empty() {
            self.send_on_trunk(trunk, &frames);
        }
        if waits {
            if let Some(trunk) = self.clients.get_mut(&trunk).and_then(|connection| connection.trunk.as_mut()) {
                trunk.waiting.push_back(client);
            }
        }
        if goes_on {
            self.queue_turn(client);
        }
        self.account_memory(client);
        work
    }

    /// Lets the clients go on that wait until this trunk has sent what it has.
    fn resume_channels(&mut self, trunk: Client) {
        let Some(connection) = self.clients.get_mut(&trunk).filter(|connection| connection.is_clear()) else {
            return;
        };
        let Some(state) = &mut connection.trunk else { return };
        for client in std::mem::take(&mut state.waiting) {
            if let Some(Link::Channel(channel)) = self.clients.get_mut(&client).map(|connection| &mut connection.link) {
                channel.waits_for_trunk = false;
                self.queue_turn(client);
            }
        }
    }

    /// Ends a channel whose client has left the server, and tells the other side.
    fn end_channel(&mut self, trunk: Client, number: u32) {
        self.channel_count -= 1;
        let Some(connection) = self.clients.get_mut(&trunk) else { return };
        let Some(state) = &mut connection.trunk else { return };
        state.channels.remove(&number);
        self.send_on_trunk(trunk, &channels::end(number));
    }

    /// Ends the clients of a trunk that has ended. `is_silent` says that nothing comes from the
    /// trunk's host any more.
    fn end_trunk(&mut self, trunk: Trunk, is_silent: bool) {
        for client in trunk.channels.into_values() {
            if let Some(connection) = self.clients.get_mut(&client) {
                (connection.is_silent, connection.ending) = (is_silent, true);
                self.orphans.push_back(client);
            }
        }
    }
}
