//! What the wire knows: its peers, and the requests with each.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::time::{Duration, Instant};

use super::api::{ENDED, NO_ANSWER, Status};
use super::frame::{self, Greeting, HEADER, Header, Kind};
use super::worker::Worker;
use crate::wire::{Broken, Contact, EAGER_BYTES, Lost, Notice, Peer, Tag, Token};

/// How many bytes of short messages may be at a receiver that has not asked for them. Further ones
/// are announced like long ones.
pub(super) const WINDOW: usize = 1 << 20;
/// What a short message costs of the window beyond its bytes.
pub(super) const COST: usize = 128;
/// The receiver says what it has taken at the latest when it is this much.
const CREDIT: usize = WINDOW / 4;
/// The length of a piece of a long message in bytes.
pub(super) const PIECE: usize = 2 << 20;
/// How many pieces of a message are under way at a time.
const PIECES: u32 = 2;
/// How many ended communicators a peer's list has. The oldest ones are forgotten.
const RETIRED: usize = 256;
/// A peer of which something was heard within this time was alive.
const RECENTLY: Duration = Duration::from_secs(3);
/// How many notices wait for [`Core::news`] at most. Further ones are dropped.
const NOTICES: usize = 1 << 14;

/// How far the connection to a peer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nobody has needed the connection yet.
    Idle,
    /// The two wires prove to each other that they know the token.
    Greeting,
    /// Messages may go.
    Ready,
    /// The peer is lost.
    Lost(Lost),
}

/// A message that has come and that no receive has taken.
#[derive(Debug)]
pub(super) enum Arrived {
    /// A short message.
    Eager(Vec<u8>),
    /// A long message is at the sender: the number of the send, and its length in bytes.
    Announced(u64, usize),
}

/// A process with which this one exchanges messages.
#[derive(Debug)]
pub(super) struct Remote {
    /// How the process is reached.
    pub(super) contact: Contact,
    /// What messages call the process.
    pub(super) place: String,
    /// How many times `meet` was called, less the number of calls of `close`.
    pub(super) uses: u32,
    /// The tokens through which the processes met, the newest last.
    pub(super) tokens: Vec<Token>,
    /// How far the connection is.
    pub(super) stage: Stage,
    /// The endpoint; NULL where there is none.
    pub(super) endpoint: *mut c_void,
    /// The number that this wire made for the connection.
    pub(super) nonce: [u8; 16],
    /// The number that the peer made, once the peer has proven that it knows the token.
    pub(super) their_nonce: Option<[u8; 16]>,
    /// The peer's number to which this wire has sent a proof, and how many proofs it has sent.
    pub(super) proved: ([u8; 16], usize),
    /// The token by which this wire has proven itself the last time.
    pub(super) proved_by: Token,
    /// The token by which the peer has proven itself.
    pub(super) token: Option<Token>,
    /// What the peer's messages carry, once the peer has proven that it knows the token.
    pub(super) cookie_in: u64,
    /// What this wire's messages carry.
    pub(super) cookie_out: u64,
    /// When this wire last heard of the peer.
    pub(super) heard: Instant,
    /// When this wire last sent something to the peer.
    pub(super) spoke: Instant,
    /// When this wire last sent its first greeting.
    pub(super) greeted: Instant,
    /// The index of the next ordered message that goes out.
    next_out: u64,
    /// The index of the next ordered message to take.
    pub(super) next_in: u64,
    /// Ordered messages that came before their time, with their data.
    pub(super) early: BTreeMap<u64, (Header, Vec<u8>)>,
    /// The sends that wait for the connection.
    backlog: VecDeque<u64>,
    /// The answers to messages of the peer that wait for the connection.
    answers: VecDeque<Header>,
    /// The notices that wait for the connection.
    notices: VecDeque<(u64, Vec<u8>)>,
    /// How much of the peer's window this wire has used.
    pub(super) used: usize,
    /// How much of this wire's window the peer uses, as far as it knows.
    pub(super) held: usize,
    /// How much of what the peer sent was taken since the last credit.
    owed: usize,
    /// The messages that no receive has taken.
    pub(super) arrived: HashMap<Tag, VecDeque<Arrived>>,
    /// The receives that no message has met.
    wanted: HashMap<Tag, VecDeque<u64>>,
    /// The communicators that this process has ended, and its ranks in them. Their messages are
    /// dropped.
    retired: VecDeque<(u64, u32)>,
}

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
    tag: Tag,
    /// The caller's buffer.
    from: *const u8,
    /// The length of the message in bytes.
    bytes: usize,
    /// How many bytes UCX has got. `None` until the receiver asks.
    gone: Option<usize>,
    /// The number of the receive at the peer.
    receive: u64,
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
    tag: Tag,
    /// The caller's buffer.
    pub(super) to: *mut u8,
    /// The size of the buffer in bytes.
    room: usize,
    /// The send that this receive has met: its number, and the length of the message in bytes.
    pub(super) met: Option<(u64, usize)>,
    /// Whether the sender has given up the message while a piece was under way. Then the receive
    /// waits again once no piece is under way.
    again: bool,
    /// How many bytes have arrived.
    pub(super) got: usize,
    /// How many pieces are under way.
    pub(super) in_flight: u32,
    /// The reason why the request fails once no piece is under way.
    pub(super) failing: Option<Lost>,
}

/// What the wire knows. Whoever holds the wire's lock uses it.
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
    /// Whether a request has ended, a notice has come, or a peer was lost.
    pub(super) changed: bool,
}

impl Remote {
    /// Returns a peer without a connection.
    pub(super) fn new(contact: Contact, place: String, nonce: [u8; 16]) -> Remote {
        let now = Instant::now();
        Remote {
            contact,
            place,
            uses: 0,
            tokens: Vec::new(),
            stage: Stage::Idle,
            endpoint: std::ptr::null_mut(),
            nonce,
            their_nonce: None,
            proved: ([0; 16], 0),
            proved_by: [0; 16],
            token: None,
            cookie_in: 0,
            cookie_out: 0,
            heard: now,
            spoke: now,
            greeted: now,
            next_out: 0,
            next_in: 0,
            early: BTreeMap::new(),
            backlog: VecDeque::new(),
            answers: VecDeque::new(),
            notices: VecDeque::new(),
            used: 0,
            held: 0,
            owed: 0,
            arrived: HashMap::new(),
            wanted: HashMap::new(),
            retired: VecDeque::new(),
        }
    }

    /// Fills in what every header carries.
    fn seal(&mut self, mut header: Header) -> Header {
        header.cookie = self.cookie_out;
        if header.kind.is_ordered() {
            header.index = self.next_out;
            self.next_out += 1;
        }
        header.credit = self.owed as u32;
        self.held = self.held.saturating_sub(self.owed);
        self.owed = 0;
        self.spoke = Instant::now();
        header
    }

    /// Drops the messages of an ended communicator. Returns what they cost.
    fn retire(&mut self, comm: u64, rank: u32) -> usize {
        if self.retired.len() >= RETIRED {
            self.retired.pop_front();
        }
        self.retired.push_back((comm, rank));
        let mut freed = 0;
        self.arrived.retain(|tag, list| {
            let old = (tag.comm, tag.to) == (comm, rank);
            let cost = |message: &Arrived| match message {
                Arrived::Eager(data) => data.len() + COST,
                Arrived::Announced(..) => 0,
            };
            freed += if old { list.iter().map(cost).sum() } else { 0 };
            !old
        });
        freed
    }

    /// Whether messages of that tag are dropped.
    fn is_retired(&self, tag: Tag) -> bool {
        self.retired.iter().any(|old| *old == (tag.comm, tag.to))
    }
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
            changed: false,
        }
    }

    /// Enters a request and returns its number.
    fn enter(&mut self, op: Op) -> u64 {
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
                self.connect(peer);
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
        let (backlog, notices) = (std::mem::take(&mut remote.backlog), std::mem::take(&mut remote.notices));
        for header in std::mem::take(&mut remote.answers) {
            self.say(peer, header, &[]);
        }
        for (comm, text) in notices {
            self.notify(peer, comm, &text);
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
                if remote.notices.len() < NOTICES {
                    remote.notices.push_back((comm, text.to_vec()));
                }
                self.connect(peer);
            }
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
                    self.connect(peer);
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
                Ok(under_way) => send.in_flight += u32::from(under_way),
                Err(status) => return self.failed(peer, status),
            }
        }
    }

    /// Notes that a piece of a send is over.
    pub(super) fn piece_gone(&mut self, request: u64, status: Status) {
        let Some(Op::Send(send)) = self.requests.get_mut(&request) else { return };
        send.in_flight -= 1;
        let peer = send.peer;
        match (&send.failing, send.in_flight) {
            (Some(lost), 0) => {
                let (tag, lost) = (send.tag, lost.clone());
                self.say(peer, Header::new(Kind::Withdraw, tag, request, 0), &[]);
                self.end(request, Err(Broken::Lost(lost)));
            }
            (Some(_), _) => {}
            (None, _) if status != super::api::OK => self.failed(peer, status),
            (None, _) => {
                self.hear(peer);
                self.pump(request);
            }
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
fn unknown() -> Lost {
    Lost { ended: true, why: "the connection was closed here".to_owned() }
}
