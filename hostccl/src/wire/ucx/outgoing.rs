//! The messages that go out: sends, notices, and the end of requests that are cancelled.

use super::api::{self, Status};
use super::frame::{self, Header, Kind};
use super::remote::{COST, Stage, WINDOW};
use super::state::{Core, Op, Receive, Send, unknown};
use crate::wire::{Broken, EAGER_BYTES, Lost, Tag};

/// The length of a piece of a long message in bytes.
pub(super) const PIECE: usize = 2 << 20;
/// How many pieces of a message are under way at a time.
const PIECES: u32 = 2;

impl Core {
    /// Begins a send.
    ///
    /// # Safety
    /// The contract of `Wire::isend`.
    pub(super) unsafe fn send(&mut self, peer: u32, tag: Tag, from: *const u8, bytes: usize) -> u64 {
        let send = Send { peer, tag, from, bytes, gone: None, receive: 0, in_flight: 0, failing: None };
        let request = self.enter(Op::Send(send));
        let Some(remote) = self.peers.get_mut(&peer) else {
            self.end(request, Err(Broken::Lost(unknown())));
            return request;
        };
        match &remote.stage {
            Stage::Lost(lost) => {
                let lost = lost.clone();
                self.end(request, Err(Broken::Lost(lost)));
            }
            Stage::Ready => self.start(request),
            Stage::Idle | Stage::Greeting => {
                remote.backlog.push_back(request);
                self.connecting.push(peer);
            }
        }
        request
    }

    /// Sends a message to a peer that is ready, or announces it.
    fn start(&mut self, request: u64) {
        let Some(Op::Send(send)) = self.requests.get(&request) else { return };
        let (peer, tag, from, bytes) = (send.peer, send.tag, send.from, send.bytes);
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if bytes > EAGER_BYTES || remote.used + bytes + COST > WINDOW {
            return self.say(peer, Header::new(Kind::Announce, tag, request, bytes as u64), &[]);
        }
        remote.used += bytes + COST;
        // SAFETY: the contract of `isend`. A message of no bytes may come with a NULL pointer.
        let data = if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(from, bytes) } };
        self.say(peer, Header::new(Kind::Eager, tag, 0, 0), data);
        self.end(request, Ok(bytes));
    }

    /// Sends what has waited for the connection.
    pub(super) fn start_backlog(&mut self, peer: u32) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        let (backlog, answers) = (std::mem::take(&mut remote.backlog), std::mem::take(&mut remote.answers));
        for header in answers {
            self.say(peer, header, &[]);
        }
        for notice in self.unsent.take_of(peer) {
            self.notify(peer, notice.comm, &notice.text);
        }
        for request in backlog {
            self.start(request);
        }
    }

    /// Sends a notice, or keeps it until the connection is ready.
    pub(super) fn notify(&mut self, peer: u32, comm: u64, text: &[u8]) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        match remote.stage {
            Stage::Lost(_) => {}
            Stage::Ready => self.say(peer, Header::new(Kind::Notice, Tag { comm, ..frame::NO_TAG }, 0, 0), text),
            Stage::Idle | Stage::Greeting => {
                self.unsent.push(peer, comm, text);
                self.connecting.push(peer);
            }
        }
    }

    /// Takes the answer to an announcement: the receiver asks for the message, or refuses it.
    pub(super) fn answered(&mut self, peer: u32, send: u64, receive: Option<u64>) {
        let Some(Op::Send(op)) = self.requests.get_mut(&send) else { return };
        if op.peer != peer || op.gone.is_some() {
            return;
        }
        let bytes = op.bytes;
        match receive {
            Some(receive) if bytes > 0 => {
                (op.gone, op.receive) = (Some(0), receive);
                self.pump(send);
            }
            _ => self.end(send, Ok(bytes)),
        }
    }

    /// Hands the next pieces of a send to UCX.
    fn pump(&mut self, request: u64) {
        loop {
            let Some(Op::Send(send)) = self.requests.get_mut(&request) else { return };
            let Some(gone) = send.gone.filter(|_| send.failing.is_none()) else { return };
            if gone == send.bytes && send.in_flight == 0 {
                let bytes = send.bytes;
                return self.end(request, Ok(bytes));
            }
            if gone == send.bytes || send.in_flight == PIECES {
                return;
            }
            let (peer, piece) = (send.peer, (send.bytes - gone).min(PIECE));
            let Some(remote) = self.peers.get_mut(&peer) else { return };
            // A piece has no tag, so the number of the send takes the place of the communicator's.
            let tag = Tag { comm: request, ..frame::NO_TAG };
            let header = remote.seal(Header::new(Kind::Piece, tag, send.receive, gone as u64));
            // SAFETY: the contract of `isend`; `cancel` and losses wait for pieces under way.
            let begun = unsafe { self.worker.send_piece(remote.endpoint, request, header, send.from.add(gone), piece) };
            send.gone = Some(gone + piece);
            match begun {
                Ok(true) => send.in_flight += 1,
                Ok(false) => {
                    let tag = send.tag;
                    self.moved(peer, tag, piece);
                }
                Err(status) => return self.failed(peer, status),
            }
        }
    }

    /// Notes that a piece of a send is over.
    pub(super) fn piece_gone(&mut self, request: u64, bytes: usize, status: Status) {
        let Some(Op::Send(send)) = self.requests.get_mut(&request) else { return };
        send.in_flight -= 1;
        let (peer, tag) = (send.peer, send.tag);
        match (&send.failing, send.in_flight) {
            (Some(lost), 0) => {
                let lost = lost.clone();
                self.say(peer, Header::new(Kind::Withdraw, tag, request, 0), &[]);
                self.end(request, Err(Broken::Lost(lost)));
            }
            (Some(_), _) => {}
            (None, _) if status != api::OK => self.failed(peer, status),
            (None, _) => {
                self.moved(peer, tag, bytes);
                self.pump(request);
            }
        }
    }

    /// Removes a request. Returns whether UCX still uses its buffer: then the request stays, begins
    /// nothing new, and is over once UCX is done with the buffer.
    pub(super) fn remove(&mut self, request: u64) -> bool {
        let given_up = || Lost { ended: false, why: "the request was given up".to_owned() };
        match self.requests.get_mut(&request) {
            Some(Op::Send(send)) if send.in_flight > 0 => send.failing = Some(given_up()),
            Some(Op::Receive(receive)) if receive.in_flight > 0 => receive.failing = Some(given_up()),
            _ => {
                match self.requests.remove(&request) {
                    Some(Op::Send(send)) => self.withdraw(request, &send),
                    Some(Op::Receive(Receive { peer, tag, met: None, .. })) => self.unpost(peer, tag, request),
                    _ => {}
                }
                return false;
            }
        }
        true
    }

    /// Tells the receiver that a send was given up, if the receiver knows of the send.
    pub(super) fn withdraw(&mut self, request: u64, send: &Send) {
        let Some(remote) = self.peers.get_mut(&send.peer) else { return };
        let before = remote.backlog.len();
        remote.backlog.retain(|waiting| *waiting != request);
        if remote.backlog.len() == before {
            self.say(send.peer, Header::new(Kind::Withdraw, send.tag, request, 0), &[]);
        }
    }

    fn unpost(&mut self, peer: u32, tag: Tag, request: u64) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if let Some(list) = remote.wanted.get_mut(&tag) {
            list.retain(|waiting| *waiting != request);
            if list.is_empty() {
                remote.wanted.remove(&tag);
            }
        }
    }
}
