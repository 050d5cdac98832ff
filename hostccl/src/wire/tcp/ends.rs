//! Ends requests that are cancelled, and drops the messages of ranks that have left their
//! communicators.
//!
//! A receiver that has asked for a message gets exactly one answer: the message, `TooLong` or
//! `Void`. The answer removes the receiver's entry for the message, even if the receive was
//! cancelled.

use super::frame::{Judged, Kind, OVER};
use super::ledger::{Key, Ledger, Open};
use super::remote::{Arrived, COST, Receive, Remote, deliver};
use crate::wire::Tag;

impl Remote {
    /// Ends a request. `reading` is used for a receive: it holds the length of the message if the
    /// connection was reading a frame of the message. `is_cut` is used for a send: it says whether
    /// the connection has written or is writing a frame of the message, and further frames would
    /// follow.
    pub(super) fn cancel(&mut self, request: u64, open: Open, reading: Option<usize>, is_cut: bool) {
        let key = open.key;
        if !open.is_send {
            if let Some(receive) = self.posted.get_mut(&key) {
                (receive.request, receive.to, receive.room) = (None, 0, 0);
                if reading == Some(receive.got) {
                    self.posted.remove(&key);
                }
            }
            return;
        }
        let mut will_not_come = is_cut || self.held.remove(&key).is_some();
        if let Some(send) =
            self.queue.iter().position(|send| send.request == request).and_then(|at| self.queue.remove(at))
        {
            if send.eager {
                self.credit += send.bytes + COST;
            }
            will_not_come = true;
        }
        match will_not_come {
            true if self.is_self => drop(self.arrived.insert(key, Arrived::Void)),
            true if self.lost.is_none() => self.say_about(Kind::Void, key, 0),
            _ => {}
        }
    }

    /// Notes that a message will not come. The receive that waits for it gets the next message of
    /// the tag instead. If the sender has left the communicator (`is_over`), there is no next
    /// message.
    pub(super) fn take_void(&mut self, key: Key, is_over: bool, ledger: &mut Ledger) -> Judged<()> {
        let next = self.received.get(&key.0).copied().unwrap_or(0);
        match self.posted.remove(&key) {
            Some(Receive { request: Some(request), to, room, .. }) => {
                if is_over || key.1 + 1 < next {
                    // The next message belongs to a later receive already, or there is no next
                    // message. This receive gets no message, and stays under way until its owner
                    // cancels it.
                    return Ok(());
                }
                let (key, arrived) = self.next_received(key.0);
                let asked = matches!(arrived, Some(Arrived::Announced));
                let receive = Receive { request: Some(request), to, room, got: 0, asked };
                if let Some(Arrived::Kept(data)) = arrived {
                    self.taken(data.len());
                    // SAFETY: the receiver's buffer is valid, and `data` is none of the caller's.
                    unsafe { deliver(receive, data.as_ptr() as usize, data.len(), ledger) };
                    return Ok(());
                }
                ledger.open.entry(request).and_modify(|open| open.key = key);
                self.post(key, receive);
            }
            // The receive was cancelled.
            Some(_) => {}
            None if key.1 < next => {}
            None if ledger.retired.has(key.0.comm, key.0.to) => {}
            None => {
                if !matches!(self.arrived.get(&key), Some(Arrived::Announced)) {
                    self.is_new(key)?;
                }
                self.arrived.insert(key, Arrived::Void);
            }
        }
        Ok(())
    }

    /// Drops the messages to and from one rank of this process, which has left its communicator.
    /// Messages for the rank that come later are dropped, too.
    pub(super) fn retire(&mut self, comm: u64, rank: u32, ledger: &mut Ledger) {
        ledger.retired.note(comm, rank);
        let is_from = |tag: &Tag| (tag.comm, tag.sender()) == (comm, rank);
        let is_to = |tag: &Tag| (tag.comm, tag.to) == (comm, rank);
        let over: Vec<Key> = self.arrived.keys().filter(|key| is_to(&key.0)).copied().collect();
        for key in over {
            if let Some(Arrived::Kept(data)) = self.arrived.remove(&key) {
                self.taken(data.len());
            }
        }
        self.sent.retain(|tag, _| !is_from(tag));
        self.received.retain(|tag, _| !is_to(tag));
        self.moved.remove(&comm);
        let asked: Vec<Key> = self.wanted.keys().filter(|key| is_from(&key.0)).copied().collect();
        for key in asked {
            self.wanted.remove(&key);
            self.say_about(Kind::Void, key, OVER);
        }
        // A cancelled receive that has asked for its message stays until the answer comes. Without
        // the entry the answer would look like garbage, and end the connection.
        self.posted
            .retain(|key, receive| !is_to(&key.0) || receive.asked || receive.got > 0 || receive.request.is_some());
    }

    /// The number of entries in each table.
    #[cfg(test)]
    pub(super) fn entries(&self) -> Vec<usize> {
        let messages = [self.queue.len(), self.held.len(), self.wanted.len(), self.posted.len(), self.arrived.len()];
        let counts = [self.sent.len(), self.received.len(), self.moved.len()];
        [&messages[..], &counts].concat()
    }
}
