//! The state of the wire: its peers, and the requests with each peer.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::api::{ENDED, NO_ANSWER, Status};
use super::frame::{Greeting, HEADER, Header};
use super::notices::Notices;
use super::remote::{Remote, Stage};
use super::worker::Worker;
use crate::wire::{Broken, Contact, Lost, Peer, Tag};

/// A peer from which something was heard within this time counts as having been alive.
const RECENTLY: Duration = Duration::from_secs(3);

/// A request.
#[derive(Debug)]
pub(super) enum Op {
    /// A send.
    Send(Send),
    /// A receive.
    Receive(Receive),
    /// A request that is over.
    Over(Result<usize, Broken>),
}

/// A send under way.
#[derive(Debug)]
pub(super) struct Send {
    /// The receiver.
    pub(super) peer: u32,
    /// The tag.
    pub(super) tag: Tag,
    /// The caller's buffer.
    pub(super) from: *const u8,
    /// The length of the message in bytes.
    pub(super) bytes: usize,
    /// How many bytes were handed to UCX. `None` until the receiver asks.
    pub(super) gone: Option<usize>,
    /// The number of the receive at the peer.
    pub(super) receive: u64,
    /// How many pieces are under way.
    pub(super) in_flight: u32,
    /// The reason why the request fails once no piece is under way.
    pub(super) failing: Option<Lost>,
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Receive {
    /// The sender.
    pub(super) peer: u32,
    /// The tag.
    pub(super) tag: Tag,
    /// The caller's buffer.
    pub(super) to: *mut u8,
    /// The size of the buffer in bytes.
    pub(super) room: usize,
    /// The send that this receive has met: its number, and the length of the message in bytes.
    pub(super) met: Option<(u64, usize)>,
    /// Whether the sender has given up the message while a piece was under way. Then the receive
    /// waits again once no piece is under way.
    pub(super) again: bool,
    /// How many bytes have arrived.
    pub(super) got: usize,
    /// How many pieces are under way.
    pub(super) in_flight: u32,
    /// The reason why the request fails once no piece is under way.
    pub(super) failing: Option<Lost>,
}

/// The state of the wire. Only the holder of the wire's lock uses it.
#[derive(Debug)]
pub(super) struct Core {
    /// The peers, by the numbers that `meet` gave.
    pub(super) peers: HashMap<u32, Remote>,
    /// UCX's side. This field stands after `peers`, so the peers are dropped before the worker that
    /// owns their endpoints.
    pub(super) worker: Worker,
    /// How other processes reach this one.
    pub(super) contact: Contact,
    /// The number of each peer, by the random number of its wire.
    pub(super) by_id: HashMap<[u8; 16], u32>,
    /// The number of each peer that has proven itself, by the cookie that the peer's messages
    /// carry.
    pub(super) by_cookie: HashMap<u64, u32>,
    /// The number that the last peer got.
    pub(super) last_peer: u32,
    /// The requests.
    pub(super) requests: HashMap<u64, Op>,
    /// The number that the last request got.
    last_request: u64,
    /// The notices that have come and that nobody has taken.
    pub(super) notices: Notices,
    /// The notices that wait for connections.
    pub(super) unsent: Notices,
    /// The losses that nobody has taken.
    pub(super) losses: Vec<(Peer, Lost)>,
    /// The peers to be lost once no function of UCX runs.
    pub(super) losing: Vec<(u32, Lost)>,
    /// The greetings that wait until no function of UCX runs.
    pub(super) greetings: VecDeque<Greeting>,
    /// The first greetings of processes that this one has not met yet.
    pub(super) strangers: VecDeque<Greeting>,
    /// The peers that need a connection. Some of these connections may exist already.
    pub(super) connecting: Vec<u32>,
    /// Whether a request has ended, a notice has come, or a peer was lost.
    pub(super) changed: bool,
}

impl Core {
    /// Returns what the wire knows at its beginning.
    pub(super) fn new(worker: Worker, contact: Contact) -> Core {
        Core {
            peers: HashMap::new(),
            worker,
            contact,
            by_id: HashMap::new(),
            by_cookie: HashMap::new(),
            last_peer: 0,
            requests: HashMap::new(),
            last_request: 0,
            notices: Notices::default(),
            unsent: Notices::default(),
            losses: Vec::new(),
            losing: Vec::new(),
            greetings: VecDeque::new(),
            strangers: VecDeque::new(),
            connecting: Vec::new(),
            changed: false,
        }
    }

    /// Enters a request and returns its number.
    pub(super) fn enter(&mut self, op: Op) -> u64 {
        self.last_request += 1;
        self.requests.insert(self.last_request, op);
        self.last_request
    }

    /// Ends a request.
    pub(super) fn end(&mut self, request: u64, outcome: Result<usize, Broken>) {
        self.requests.insert(request, Op::Over(outcome));
        self.changed = true;
    }

    /// Notes that UCX cannot reach a peer any more.
    pub(super) fn failed(&mut self, peer: u32, status: Status) {
        let said = self.worker.library.text(status);
        let Some(remote) = self.peers.get(&peer) else { return };
        // A peer that was heard a moment ago and does not answer now has ended. When a host loses
        // its network, more time has passed since it was last heard.
        let ended = ENDED.contains(&status) || status == NO_ANSWER && remote.heard.elapsed() < RECENTLY;
        let what = match (ended, &remote.stage) {
            (true, Stage::Ready) => "closed the connection",
            (true, _) => "refuses the connection",
            (false, _) => "cannot be reached over UCX",
        };
        let lost = Lost { ended, why: format!("{} {what}: {said}", remote.place) };
        self.losing.push((peer, lost));
    }

    /// Sends a message that has at most [`EAGER_BYTES`] to a peer that is ready. The data are
    /// copied. While the two wires still greet each other, the header is kept and sent later. The
    /// caller then passes only answers, which have no data.
    pub(super) fn say(&mut self, peer: u32, header: Header, data: &[u8]) {
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        if remote.stage == Stage::Greeting {
            // The peer may send as soon as it knows this wire. The answers wait until this wire may
            // send as well.
            return remote.answers.push_back(header);
        }
        if remote.stage != Stage::Ready {
            return;
        }
        let header = remote.seal(header).to_bytes();
        let mut block = Vec::with_capacity(HEADER + data.len());
        block.extend_from_slice(&header);
        block.extend_from_slice(data);
        if let Err(status) = self.worker.send_block(remote.endpoint, block.into_boxed_slice()) {
            self.failed(peer, status);
        }
    }

    /// Notes that a piece of a long message has moved, so the peer is alive.
    pub(super) fn moved(&mut self, peer: u32, tag: Tag, bytes: usize) {
        if let Some(remote) = self.peers.get_mut(&peer) {
            remote.heard = Instant::now();
            *remote.moved.entry(tag.comm).or_default() += bytes as u64;
        }
    }

    /// Takes a notice that came from a peer.
    pub(super) fn noticed(&mut self, peer: u32, comm: u64, text: &[u8]) {
        self.changed |= self.notices.push(peer, comm, text);
    }

    /// Fails the requests with a peer that is lost, and drops the messages that wait for the peer.
    pub(super) fn fail_requests(&mut self, peer: u32, lost: &Lost) {
        if let Some(remote) = self.peers.get_mut(&peer) {
            remote.backlog.clear();
            remote.answers.clear();
            remote.wanted.clear();
            remote.early.clear();
        }
        self.unsent.take_of(peer);
        let mut over = Vec::new();
        for (number, op) in &mut self.requests {
            let (with, in_flight, failing) = match op {
                Op::Send(send) => (send.peer, send.in_flight, &mut send.failing),
                Op::Receive(receive) => (receive.peer, receive.in_flight, &mut receive.failing),
                Op::Over(_) => continue,
            };
            if with == peer && in_flight == 0 {
                over.push(*number);
            } else if with == peer && failing.is_none() {
                *failing = Some(lost.clone());
            }
        }
        for number in over {
            self.end(number, Err(Broken::Lost(lost.clone())));
        }
    }

    /// Ends the requests that are under way. This function is called after UCX's worker has ended,
    /// so UCX uses no buffer any more.
    pub(super) fn release_all(&mut self, lost: &Lost) {
        self.worker.flights.clear();
        let mut over = Vec::new();
        for (number, op) in &mut self.requests {
            match op {
                Op::Send(Send { failing, .. }) | Op::Receive(Receive { failing, .. }) => {
                    over.push((*number, failing.take().unwrap_or_else(|| lost.clone())));
                }
                Op::Over(_) => {}
            }
        }
        for (number, lost) in over {
            self.end(number, Err(Broken::Lost(lost)));
        }
    }
}

/// The loss of a peer that nobody has met.
pub(super) fn unknown() -> Lost {
    Lost { ended: true, why: "the connection was closed here".to_owned() }
}
