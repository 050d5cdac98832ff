//! The incoming side: receives, the messages that they meet, and the pieces of long messages.

use std::collections::{HashMap, VecDeque};

use super::api::{self, Status};
use super::frame::{self, Header, Kind};
use super::remote::{Arrived, COST, Stage, WINDOW};
use super::state::{Core, Op, Receive, unknown};
use crate::wire::{Broken, Tag};

/// The most bytes of short messages that a receiver takes before it tells the sender so.
const CREDIT: usize = WINDOW / 4;

/// Takes the first element of a list, and removes the list with its last element.
fn pop<T>(lists: &mut HashMap<Tag, VecDeque<T>>, tag: Tag) -> Option<T> {
    let list = lists.get_mut(&tag)?;
    let first = list.pop_front();
    if list.is_empty() {
        lists.remove(&tag);
    }
    first
}

impl Core {
    /// Begins a receive.
    ///
    /// # Safety
    /// The contract of `Wire::irecv`.
    pub(super) unsafe fn receive(&mut self, peer: u32, tag: Tag, to: *mut u8, room: usize) -> u64 {
        let receive = Receive { peer, tag, to, room, met: None, again: false, got: 0, in_flight: 0, failing: None };
        let request = self.enter(Op::Receive(receive));
        let Some(remote) = self.peers.get_mut(&peer) else {
            self.end(request, Err(Broken::Lost(unknown())));
            return request;
        };
        let arrived = match &remote.stage {
            // The sender of an announced message is gone, and the message with it.
            Stage::Lost(_) => remote.arrived.get(&tag).is_some_and(|list| matches!(list[0], Arrived::Eager(_))),
            _ => true,
        };
        match arrived.then(|| pop(&mut remote.arrived, tag)).flatten() {
            Some(Arrived::Eager(data)) => self.deliver(request, &data),
            Some(Arrived::Announced(send, bytes)) => self.want(request, send, bytes),
            None => match &remote.stage {
                Stage::Lost(lost) => {
                    let lost = lost.clone();
                    self.end(request, Err(Broken::Lost(lost)));
                }
                _ => {
                    remote.wanted.entry(tag).or_default().push_back(request);
                    self.connecting.push(peer);
                }
            },
        }
        request
    }

    /// Copies a short message into the buffer of a receive.
    pub(super) fn deliver(&mut self, request: u64, data: &[u8]) {
        let Some(Op::Receive(receive)) = self.requests.get(&request) else { return };
        let peer = receive.peer;
        let outcome = if data.len() > receive.room {
            Err(Broken::TooLong(data.len()))
        } else {
            // SAFETY: the contract of `irecv`; the buffer is long enough.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), receive.to, data.len()) };
            Ok(data.len())
        };
        self.end(request, outcome);
        self.owe(peer, data.len() + COST);
    }

    /// Notes that the peer may send `cost` more bytes of short messages. Tells the peer so once
    /// there are [`CREDIT`] such bytes; otherwise the next header to the peer says so.
    fn owe(&mut self, peer: u32, cost: usize) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        remote.owed += cost;
        if remote.owed >= CREDIT {
            self.say(peer, Header::new(Kind::Alive, frame::NO_TAG, 0, 0), &[]);
        }
    }

    /// Asks for an announced message, or refuses it.
    fn want(&mut self, request: u64, send: u64, bytes: usize) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        let peer = receive.peer;
        if bytes > receive.room {
            self.say(peer, Header::new(Kind::Refuse, frame::NO_TAG, send, 0), &[]);
            return self.end(request, Err(Broken::TooLong(bytes)));
        }
        receive.met = Some((send, bytes));
        self.say(peer, Header::new(Kind::Want, frame::NO_TAG, send, request), &[]);
        if bytes == 0 {
            self.end(request, Ok(0));
        }
    }

    /// Takes an announcement that came from a peer.
    pub(super) fn announced(&mut self, peer: u32, tag: Tag, send: u64, bytes: usize) {
        match self.next_wanted(peer, tag) {
            Some(request) => self.want(request, send, bytes),
            None => self.keep(peer, tag, Arrived::Announced(send, bytes)),
        }
    }

    /// Takes the oldest receive that waits for a message with that tag.
    pub(super) fn next_wanted(&mut self, peer: u32, tag: Tag) -> Option<u64> {
        pop(&mut self.peers.get_mut(&peer)?.wanted, tag)
    }

    /// Keeps a message until a receive takes it.
    pub(super) fn keep(&mut self, peer: u32, tag: Tag, message: Arrived) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if !remote.is_retired(tag) {
            remote.arrived.entry(tag).or_default().push_back(message);
        } else if let Arrived::Eager(data) = message {
            self.owe(peer, data.len() + COST);
        }
    }

    /// Drops the messages for one rank that has left its communicator. Messages for the rank that
    /// come later are dropped, too.
    pub(super) fn retire(&mut self, peer: u32, comm: u64, rank: u32) {
        if let Some(freed) = self.peers.get_mut(&peer).map(|remote| remote.retire(comm, rank)) {
            self.owe(peer, freed);
        }
    }

    /// Removes an announced message that its sender has cancelled. A receive that has met the
    /// message waits again.
    pub(super) fn withdrawn(&mut self, peer: u32, tag: Tag, send: u64) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if let Some(list) = remote.arrived.get_mut(&tag) {
            list.retain(|message| !matches!(message, Arrived::Announced(number, _) if *number == send));
            if list.is_empty() {
                remote.arrived.remove(&tag);
            }
        }
        let met = self.requests.iter_mut().find_map(|(number, op)| match op {
            Op::Receive(receive) if receive.peer == peer && receive.met.is_some_and(|met| met.0 == send) => {
                (receive.met, receive.got) = (None, 0);
                receive.again = receive.in_flight > 0;
                Some((*number, receive.again))
            }
            _ => None,
        });
        if let Some((request, false)) = met {
            self.wait_again(request);
        }
    }

    /// Lets a receive whose message was withdrawn take the next message of its tag.
    fn wait_again(&mut self, request: u64) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        (receive.again, receive.got) = (false, 0);
        let (peer, tag) = (receive.peer, receive.tag);
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        match pop(&mut remote.arrived, tag) {
            Some(Arrived::Eager(data)) => self.deliver(request, &data),
            Some(Arrived::Announced(send, bytes)) => self.want(request, send, bytes),
            None => remote.wanted.entry(tag).or_default().push_front(request),
        }
    }

    /// Notes that UCX has ended the operation that receives a piece.
    pub(super) fn piece_landed(&mut self, request: u64, bytes: usize, status: Status) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        receive.in_flight -= 1;
        let (peer, tag) = (receive.peer, receive.tag);
        match (&receive.failing, receive.in_flight) {
            (Some(lost), 0) => {
                let lost = lost.clone();
                self.end(request, Err(Broken::Lost(lost)));
            }
            (Some(_), _) => {}
            (None, _) if status != api::OK => self.failed(peer, status),
            (None, _) => {
                self.moved(peer, tag, bytes);
                self.piece_there(request, bytes);
            }
        }
    }

    /// Notes that a piece of a receive is in the caller's buffer.
    pub(super) fn piece_there(&mut self, request: u64, bytes: usize) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        if receive.again {
            // The piece belongs to a message that its sender has cancelled.
            if receive.in_flight == 0 {
                self.wait_again(request);
            }
            return;
        }
        receive.got += bytes;
        if let Some((_, length)) = receive.met.filter(|met| met.1 <= receive.got && receive.in_flight == 0) {
            self.end(request, Ok(length));
        }
    }
}
