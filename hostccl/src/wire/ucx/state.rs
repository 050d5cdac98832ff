//! The state of the wire: its peers, and the requests with each.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::api::{ENDED, NO_ANSWER, Status};
use super::frame::{self, Greeting, HEADER, Header, Kind};
use super::remote::{Arrived, COST, Remote, Stage, WINDOW};
use super::worker::Worker;
use crate::wire::{Broken, Contact, Lost, Notice, Peer, Tag};

/// The receiver says what it has taken at the latest when it is this much.
const CREDIT: usize = WINDOW / 4;
/// A peer of which something was heard within this time was alive.
const RECENTLY: Duration = Duration::from_secs(3);
/// How many notices wait for [`Core::news`] at most. Further ones are dropped.
pub(super) const NOTICES: usize = 1 << 14;

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
    /// How many bytes UCX has got. `None` until the receiver asks.
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
    /// UCX's side. It comes after the peers, so that a failed drop leaves no dangling endpoint.
    pub(super) worker: Worker,
    /// How other processes reach this one.
    pub(super) contact: Contact,
    /// The number of each peer, by the random number of its wire.
    pub(super) by_id: HashMap<[u8; 16], u32>,
    /// The number of each peer that has proven itself, by what its messages carry.
    pub(super) by_cookie: HashMap<u64, u32>,
    /// The number that the last peer got.
    pub(super) last_peer: u32,
    /// The requests.
    pub(super) requests: HashMap<u64, Op>,
    /// The number that the last request got.
    last_request: u64,
    /// The notices that nobody has taken.
    pub(super) notices: Vec<Notice>,
    /// The losses that nobody has taken.
    pub(super) losses: Vec<(Peer, Lost)>,
    /// The peers to be lost once no function of UCX runs.
    pub(super) losing: Vec<(u32, Lost)>,
    /// The greetings that wait until no function of UCX runs.
    pub(super) greetings: VecDeque<Greeting>,
    /// The first greetings of processes that this one has not met yet.
    pub(super) strangers: VecDeque<Greeting>,
    /// The peers to which a connection is needed, and may exist already.
    pub(super) connecting: Vec<u32>,
    /// Whether a request has ended, a notice has come, or a peer was lost.
    pub(super) changed: bool,
}

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
            notices: Vec::new(),
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
        // A peer that was heard a moment ago and does not answer now has ended. Of a host without a
        // network nothing is heard for longer.
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
    /// copied. To a peer that is not ready only answers are sent, which have no data.
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

    /// Notes that the peer may send that much more, and says so where it is much.
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

    /// Takes the receive that is next for a message.
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

    /// Drops the messages of one rank of an ended communicator, and those that still come.
    pub(super) fn retire(&mut self, peer: u32, comm: u64, rank: u32) {
        if let Some(freed) = self.peers.get_mut(&peer).map(|remote| remote.retire(comm, rank)) {
            self.owe(peer, freed);
        }
    }

    /// Takes back an announcement that its sender has given up. A receive that met it waits again.
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
        receive.again = false;
        let (peer, tag) = (receive.peer, receive.tag);
        let Some(remote) = self.peers.get_mut(&peer) else { return };
        match pop(&mut remote.arrived, tag) {
            Some(Arrived::Eager(data)) => self.deliver(request, &data),
            Some(Arrived::Announced(send, bytes)) => self.want(request, send, bytes),
            None => remote.wanted.entry(tag).or_default().push_front(request),
        }
    }

    /// Notes that a piece of a receive is over.
    pub(super) fn piece_landed(&mut self, request: u64, bytes: usize, status: Status) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        receive.in_flight -= 1;
        let peer = receive.peer;
        match (&receive.failing, receive.in_flight) {
            (Some(lost), 0) => {
                let lost = lost.clone();
                self.end(request, Err(Broken::Lost(lost)));
            }
            (Some(_), _) => {}
            (None, _) if status != super::api::OK => self.failed(peer, status),
            (None, _) => {
                self.hear(peer);
                self.piece_there(request, bytes);
            }
        }
    }

    /// Notes that a piece of a receive is in the caller's buffer.
    pub(super) fn piece_there(&mut self, request: u64, bytes: usize) {
        let Some(Op::Receive(receive)) = self.requests.get_mut(&request) else { return };
        if receive.again && receive.in_flight == 0 {
            return self.wait_again(request);
        }
        receive.got += bytes;
        if let Some((_, length)) = receive.met.filter(|met| met.1 <= receive.got && receive.in_flight == 0) {
            self.end(request, Ok(length));
        }
    }

    /// Notes that the peer lives.
    pub(super) fn hear(&mut self, peer: u32) {
        if let Some(remote) = self.peers.get_mut(&peer) {
            remote.heard = Instant::now();
        }
    }

    /// Takes a notice that came from a peer.
    pub(super) fn noticed(&mut self, peer: u32, comm: u64, text: &[u8]) {
        if self.notices.len() < NOTICES {
            self.notices.push(Notice { from: Peer(peer), comm, text: text.to_vec() });
            self.changed = true;
        }
    }

    /// Forgets what waits for a peer that is lost.
    pub(super) fn fail_requests(&mut self, peer: u32, lost: &Lost) {
        if let Some(remote) = self.peers.get_mut(&peer) {
            remote.backlog.clear();
            remote.notices.clear();
            remote.answers.clear();
            remote.wanted.clear();
            remote.early.clear();
        }
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
}

/// The loss of a peer that nobody has met.
pub(super) fn unknown() -> Lost {
    Lost { ended: true, why: "the connection was closed here".to_owned() }
}
