//! What a wire knows about one other process: the messages to and from it that are under way.
//!
//! Sender and receiver number the messages of each tag from 0, so a frame names its message by tag
//! and number, and frames of different messages may come in any order. A cancelled receive keeps
//! its number: the message of that number is dropped when it comes.
//!
//! A short message goes at once, as long as the sender has credit. The credit is what the receiver
//! is ready to keep. A message that is long or lacks credit is announced, and goes when the
//! receiver asks for it. A receive with room for a long message asks at once. So the receiver never
//! has to stop reading, and keeps a bounded number of bytes.

use std::collections::{HashMap, VecDeque};

use super::connection::{Connection, Sink};
use super::frame::{Header, Kind};
use crate::wire::{Broken, Contact, EAGER_BYTES, Lost, Notice, Peer, Tag, Token};

/// What short messages may cost that the receiver has not taken, in bytes.
pub(super) const CREDIT: usize = 4 << 20;
/// What each short message costs besides its bytes.
pub(super) const COST: usize = 128;
/// The most messages that a peer may announce or ask for ahead of this side.
const MOST_AHEAD: usize = 1 << 20;

/// The tag and the number of a message.
pub(super) type Key = (Tag, u64);

/// A send under way.
#[derive(Debug)]
pub(super) struct Send {
    /// The request's number.
    pub(super) request: u64,
    /// The message.
    pub(super) key: Key,
    /// The address of the caller's buffer.
    pub(super) from: usize,
    /// The message's length.
    pub(super) bytes: usize,
    /// How many bytes are in frames that were sent or are being sent.
    pub(super) sent: usize,
    /// Whether the message goes without having been asked for.
    pub(super) eager: bool,
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Receive {
    /// The request's number; `None` once it was cancelled.
    pub(super) request: Option<u64>,
    /// The address of the caller's buffer.
    pub(super) to: usize,
    /// The room of the buffer in bytes.
    pub(super) room: usize,
    /// How many bytes of the message have frames that came.
    pub(super) got: usize,
    /// Whether the sender was asked for the message.
    pub(super) asked: bool,
}

/// A message that has come before its receive.
#[derive(Debug)]
pub(super) enum Arrived {
    /// The whole message.
    Kept(Vec<u8>),
    /// The sender holds the message back.
    Announced,
}

/// What a request waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    /// The peer's number.
    pub(super) peer: u32,
    /// The message.
    pub(super) key: Key,
    /// Whether the request is a send.
    pub(super) is_send: bool,
}

/// The requests of a wire, and what it has to tell.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The number of the last request.
    pub(super) last: u64,
    /// The requests under way.
    pub(super) open: HashMap<u64, Open>,
    /// The outcomes that nobody has taken.
    pub(super) ended: HashMap<u64, Result<usize, Broken>>,
    /// The notices that nobody has taken.
    pub(super) notices: Vec<Notice>,
    /// The losses that nobody has taken.
    pub(super) losses: Vec<(Peer, Lost)>,
    /// Whether something has changed for which a thread may wait.
    pub(super) changed: bool,
}

impl Ledger {
    /// Begins a request that has no outcome yet.
    fn begin(&mut self, open: Open) -> u64 {
        self.last += 1;
        self.open.insert(self.last, open);
        self.last
    }

    /// Begins a request whose outcome is known.
    pub(super) fn begin_ended(&mut self, outcome: Result<usize, Broken>) -> u64 {
        self.last += 1;
        self.ended.insert(self.last, outcome);
        self.last
    }

    /// Ends a request.
    pub(super) fn end(&mut self, request: u64, outcome: Result<usize, Broken>) {
        if self.open.remove(&request).is_some() {
            self.ended.insert(request, outcome);
            self.changed = true;
        }
    }
}

/// Another process, or this one.
#[derive(Debug)]
pub(super) struct Remote {
    /// The number under which the users of the wire know the process.
    pub(super) number: u32,
    /// How to reach the process.
    pub(super) contact: Contact,
    /// Whether the process is this one.
    pub(super) is_self: bool,
    /// How many uses the peer has: calls of `meet` without their `close`.
    pub(super) uses: usize,
    /// The tokens that both processes know.
    pub(super) tokens: Vec<Token>,
    /// The reason why the process cannot be reached any more.
    pub(super) lost: Option<Lost>,
    /// The connection, once both sides have proved themselves.
    pub(super) connection: Option<Box<Connection>>,
    /// Whether the wire's thread is making a connection.
    pub(super) is_connecting: bool,
    /// The number of messages that were sent under each tag.
    sent: HashMap<Tag, u64>,
    /// The number of receives that were posted under each tag.
    received: HashMap<Tag, u64>,
    /// The messages that may go. They take turns after each piece.
    pub(super) queue: VecDeque<Send>,
    /// The messages that wait until the receiver asks.
    held: HashMap<Key, Send>,
    /// The receivers' rooms for messages that are not sent yet.
    wanted: HashMap<Key, usize>,
    /// The receives whose messages have not come as a whole.
    pub(super) posted: HashMap<Key, Receive>,
    /// The messages for which no receive was posted yet.
    arrived: HashMap<Key, Arrived>,
    /// Frames without a buffer of the caller, which go before others.
    pub(super) control: Vec<u8>,
    /// What short messages may still cost.
    credit: usize,
    /// What the short messages cost that are kept here.
    kept: usize,
    /// What the short messages cost that were taken here and that the sender was not told of.
    owed: usize,
    /// Whether the other side has said that it has no use for the connection.
    pub(super) is_idle_there: bool,
    /// Whether this side has said that it has no use for the connection.
    pub(super) is_idle_here: bool,
    /// Whether this side has sent `Close` and waits for the answer. It sends nothing meanwhile.
    pub(super) is_closing: bool,
}

/// The outcome of a frame: an error is the reason why the connection cannot go on.
pub(super) type Judged<T> = Result<T, String>;

impl Remote {
    pub(super) fn new(number: u32, contact: Contact, is_self: bool) -> Remote {
        Remote {
            number,
            contact,
            is_self,
            uses: 0,
            tokens: Vec::new(),
            lost: None,
            connection: None,
            is_connecting: false,
            sent: HashMap::new(),
            received: HashMap::new(),
            queue: VecDeque::new(),
            held: HashMap::new(),
            wanted: HashMap::new(),
            posted: HashMap::new(),
            arrived: HashMap::new(),
            control: Vec::new(),
            credit: CREDIT,
            kept: 0,
            owed: 0,
            is_idle_there: false,
            is_idle_here: false,
            is_closing: false,
        }
    }

    /// Appends a frame that has no buffer of the caller.
    pub(super) fn say(&mut self, header: Header, payload: &[u8]) {
        self.control.extend_from_slice(&Header { bytes: payload.len(), ..header }.to_bytes());
        self.control.extend_from_slice(payload);
    }

    fn say_about(&mut self, kind: Kind, key: Key, extra: usize) {
        self.say(Header { kind, bytes: 0, tag: key.0, index: key.1, extra: extra as u64 }, &[]);
    }

    /// Begins to send a message.
    pub(super) fn send(&mut self, tag: Tag, from: usize, bytes: usize, ledger: &mut Ledger) -> u64 {
        if let Some(lost) = &self.lost {
            return ledger.begin_ended(Err(Broken::Lost(lost.clone())));
        }
        let next = self.sent.entry(tag).or_insert(0);
        let key = (tag, *next);
        *next += 1;
        if self.is_self {
            return self.send_here(key, from, bytes, ledger);
        }
        let room = self.wanted.remove(&key);
        if room.is_some_and(|room| bytes > room) {
            self.say_about(Kind::TooLong, key, bytes);
            return ledger.begin_ended(Ok(bytes));
        }
        let request = ledger.begin(Open { peer: self.number, key, is_send: true });
        let cost = bytes + COST;
        let eager = bytes <= EAGER_BYTES && cost <= self.credit;
        let send = Send { request, key, from, bytes, sent: 0, eager };
        if eager {
            self.credit -= cost;
            self.queue.push_back(send);
        } else if room.is_some() {
            self.queue.push_back(send);
        } else {
            self.say_about(Kind::Announce, key, bytes);
            self.held.insert(key, send);
        }
        request
    }

    /// Sends a message to this process itself.
    fn send_here(&mut self, key: Key, from: usize, bytes: usize, ledger: &mut Ledger) -> u64 {
        if let Some(receive) = self.posted.remove(&key) {
            // SAFETY: the sender's and the receiver's buffers are valid and differ.
            unsafe { deliver(receive, from, bytes, ledger) };
            return ledger.begin_ended(Ok(bytes));
        }
        if bytes <= EAGER_BYTES && self.kept + bytes + COST <= CREDIT {
            self.kept += bytes + COST;
            // SAFETY: the sender's buffer has that many bytes.
            let kept = unsafe { slice(from, bytes) }.to_vec();
            self.arrived.insert(key, Arrived::Kept(kept));
            return ledger.begin_ended(Ok(bytes));
        }
        let request = ledger.begin(Open { peer: self.number, key, is_send: true });
        self.held.insert(key, Send { request, key, from, bytes, sent: 0, eager: false });
        request
    }

    /// Begins to receive a message.
    pub(super) fn receive(&mut self, tag: Tag, to: usize, room: usize, ledger: &mut Ledger) -> u64 {
        let next = self.received.entry(tag).or_insert(0);
        let key = (tag, *next);
        *next += 1;
        let mut asked = false;
        match self.arrived.remove(&key) {
            Some(Arrived::Kept(data)) => {
                self.taken(data.len());
                let outcome = if data.len() <= room { Ok(data.len()) } else { Err(Broken::TooLong(data.len())) };
                if outcome.is_ok() {
                    // SAFETY: the receiver's buffer has that room.
                    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
                }
                return ledger.begin_ended(outcome);
            }
            Some(Arrived::Announced) => asked = true,
            None => {}
        }
        if let Some(lost) = &self.lost {
            return ledger.begin_ended(Err(Broken::Lost(lost.clone())));
        }
        let request = ledger.begin(Open { peer: self.number, key, is_send: false });
        let mut receive = Receive { request: Some(request), to, room, got: 0, asked };
        if self.is_self {
            match self.held.remove(&key) {
                Some(send) => {
                    // SAFETY: the sender's and the receiver's buffers are valid and differ.
                    unsafe { deliver(receive, send.from, send.bytes, ledger) };
                    ledger.end(send.request, Ok(send.bytes));
                }
                None => drop(self.posted.insert(key, receive)),
            }
            return request;
        }
        receive.asked |= room > EAGER_BYTES;
        if receive.asked {
            self.say_about(Kind::Want, key, room);
        }
        self.posted.insert(key, receive);
        request
    }

    /// Counts a short message that was kept as taken.
    fn taken(&mut self, bytes: usize) {
        self.kept = self.kept.saturating_sub(bytes + COST);
        if !self.is_self {
            self.owe(bytes);
        }
    }

    /// Notes that the sender has its credit for a short message again.
    fn owe(&mut self, bytes: usize) {
        self.owed += bytes + COST;
        if self.owed >= CREDIT / 4 {
            self.say(Header::plain(Kind::Credit, self.owed as u64), &[]);
            self.owed = 0;
        }
    }

    /// Ends a request. Afterwards nobody touches its buffer.
    pub(super) fn cancel(&mut self, request: u64, open: Open) {
        let key = open.key;
        if !open.is_send {
            let total = self.connection.as_mut().and_then(|connection| connection.forget(key));
            if let Some(receive) = self.posted.get_mut(&key) {
                (receive.request, receive.to, receive.room) = (None, 0, 0);
                if total == Some(receive.got) {
                    self.posted.remove(&key);
                }
            }
            return;
        }
        self.held.remove(&key);
        if let Some(at) = self.queue.iter().position(|send| send.request == request) {
            let send = self.queue.remove(at);
            if let Some(send) = send.filter(|send| send.eager) {
                self.credit += send.bytes + COST;
            }
        }
        if let Some(connection) = &mut self.connection {
            connection.detach(request);
        }
    }

    /// Fails everything that is under way.
    pub(super) fn lose(&mut self, lost: Lost, ledger: &mut Ledger) {
        if self.lost.is_some() {
            return;
        }
        self.connection = None;
        self.control = Vec::new();
        let number = self.number;
        let requests: Vec<u64> =
            ledger.open.iter().filter(|(_, open)| open.peer == number).map(|(request, _)| *request).collect();
        for request in requests {
            ledger.end(request, Err(Broken::Lost(lost.clone())));
        }
        self.queue.clear();
        self.held.clear();
        self.wanted.clear();
        self.posted.clear();
        self.arrived.retain(|_, arrived| matches!(arrived, Arrived::Kept(_)));
        if self.uses > 0 {
            ledger.losses.push((Peer(number), lost.clone()));
            ledger.changed = true;
        }
        self.lost = Some(lost);
    }

    /// Whether something waits to be sent.
    pub(super) fn has_output(&self) -> bool {
        !self.queue.is_empty() || !self.control.is_empty()
    }

    /// Whether neither side has a use for the connection, and nothing is left to send.
    pub(super) fn may_close(&self) -> bool {
        self.uses == 0 && self.is_idle_there && !self.is_closing && !self.has_output()
    }

    /// Returns the tags of this communicator's messages for which no receive was posted.
    pub(super) fn waiting(&self, comm: u64) -> Vec<Tag> {
        let mut tags: Vec<Tag> = self.arrived.keys().map(|key| key.0).filter(|tag| tag.comm == comm).collect();
        tags.sort_unstable();
        tags.dedup();
        tags
    }

    /// Takes the header of a frame from the connection. Returns where its bytes belong.
    pub(super) fn take_header(&mut self, header: Header, ledger: &mut Ledger) -> Judged<Sink> {
        let key = (header.tag, header.index);
        match header.kind {
            Kind::Eager => return self.take_eager(key, header.bytes, ledger),
            Kind::Data => return self.take_data(key, &header),
            Kind::Notice => {
                if ledger.notices.len() < MOST_AHEAD {
                    return Ok(Sink::Notice { comm: header.tag.comm, text: Vec::with_capacity(header.bytes) });
                }
                return Ok(Sink::Drop);
            }
            Kind::Announce => match self.posted.get_mut(&key) {
                Some(receive) if receive.asked => {}
                Some(receive) => {
                    receive.asked = true;
                    let room = receive.room;
                    self.say_about(Kind::Want, key, room);
                }
                None => {
                    self.is_new(key)?;
                    self.arrived.insert(key, Arrived::Announced);
                }
            },
            Kind::Want => self.take_want(key, header.extra as usize, ledger)?,
            Kind::TooLong => match self.posted.remove(&key) {
                Some(Receive { request: Some(request), .. }) => {
                    ledger.end(request, Err(Broken::TooLong(header.extra as usize)));
                }
                Some(_) => {}
                None => return Err("an answer to no question".to_owned()),
            },
            Kind::Credit => {
                self.credit = self.credit.saturating_add(header.extra as usize);
                if self.credit > CREDIT {
                    return Err(format!("a credit of {} bytes, more than was used", header.extra));
                }
            }
            Kind::Idle => self.is_idle_there = true,
            Kind::Busy => (self.is_idle_there, self.is_closing) = (false, false),
            Kind::Close | Kind::Closed => {}
        }
        Ok(Sink::None)
    }

    /// Checks that a message without a receive has not come before, and may be noted.
    fn is_new(&self, key: Key) -> Judged<()> {
        if self.arrived.len() >= MOST_AHEAD {
            return Err(format!("more than {MOST_AHEAD} messages without receives"));
        }
        let is_old = self.arrived.contains_key(&key) || self.received.get(&key.0).is_some_and(|next| key.1 < *next);
        if is_old { Err("a message that has come before".to_owned()) } else { Ok(()) }
    }

    fn take_eager(&mut self, key: Key, bytes: usize, ledger: &mut Ledger) -> Judged<Sink> {
        let Some(receive) = self.posted.get(&key) else {
            self.is_new(key)?;
            if self.kept + bytes + COST > CREDIT {
                return Err(format!("short messages of more than {CREDIT} bytes that nobody asked for"));
            }
            self.kept += bytes + COST;
            return Ok(Sink::Keep { key, data: Vec::with_capacity(bytes) });
        };
        if receive.got > 0 {
            return Err("two messages of one number".to_owned());
        }
        let (request, to, room) = (receive.request, receive.to, receive.room);
        self.owe(bytes);
        if request.is_none() || bytes > room {
            self.posted.remove(&key);
            if let Some(request) = request {
                ledger.end(request, Err(Broken::TooLong(bytes)));
            }
            return Ok(Sink::Drop);
        }
        self.posted.entry(key).and_modify(|receive| receive.got = bytes);
        Ok(Sink::Direct { key, to, total: bytes })
    }

    fn take_data(&mut self, key: Key, header: &Header) -> Judged<Sink> {
        let total = header.extra as usize;
        let receive = self.posted.get_mut(&key).filter(|receive| receive.asked);
        let receive = receive.ok_or_else(|| "a message that was not asked for".to_owned())?;
        let left = total.checked_sub(receive.got).filter(|left| header.bytes <= *left);
        let is_empty = header.bytes == 0 && total > 0;
        if left.is_none() || is_empty || (receive.request.is_some() && total > receive.room) {
            return Err(format!("{} bytes of a message of {total} that do not fit", header.bytes));
        }
        let to = receive.to + receive.got;
        receive.got += header.bytes;
        if receive.request.is_none() {
            if receive.got == total {
                self.posted.remove(&key);
            }
            return Ok(Sink::Drop);
        }
        Ok(Sink::Direct { key, to, total })
    }

    fn take_want(&mut self, key: Key, room: usize, ledger: &mut Ledger) -> Judged<()> {
        if let Some(send) = self.held.remove(&key) {
            if send.bytes > room {
                self.say_about(Kind::TooLong, key, send.bytes);
                ledger.end(send.request, Ok(send.bytes));
            } else {
                self.queue.push_back(send);
            }
        } else if self.sent.get(&key.0).is_none_or(|next| key.1 >= *next) {
            if self.wanted.len() >= MOST_AHEAD {
                return Err(format!("more than {MOST_AHEAD} receives ahead of their messages"));
            }
            self.wanted.insert(key, room);
        }
        Ok(())
    }

    /// Ends what a frame was part of, once all of its bytes are in place.
    pub(super) fn finish(&mut self, sink: Sink, ledger: &mut Ledger) {
        match sink {
            Sink::Direct { key, total, .. } => {
                if self.posted.get(&key).is_some_and(|receive| receive.got == total) {
                    if let Some(Receive { request: Some(request), .. }) = self.posted.remove(&key) {
                        ledger.end(request, Ok(total));
                    }
                }
            }
            Sink::Keep { key, data } => match self.posted.remove(&key) {
                Some(receive) => {
                    self.taken(data.len());
                    // SAFETY: the receiver's buffer is valid, and `data` is none of the caller's.
                    unsafe { deliver(receive, data.as_ptr() as usize, data.len(), ledger) };
                }
                None => drop(self.arrived.insert(key, Arrived::Kept(data))),
            },
            Sink::Notice { comm, text } => {
                ledger.notices.push(Notice { from: Peer(self.number), comm, text });
                ledger.changed = true;
            }
            Sink::None | Sink::Drop => {}
        }
    }
}

/// Returns the bytes of a caller's buffer.
///
/// # Safety
/// The buffer is valid and unchanged for as long as the slice is used.
pub(super) unsafe fn slice<'a>(from: usize, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's contract. An empty buffer may have any address, so it needs another one.
    if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(from as *const u8, bytes) } }
}

/// Copies a whole message to its receiver, and ends the receive.
///
/// # Safety
/// `from` has `bytes` bytes, and the receiver's buffer is another one.
unsafe fn deliver(receive: Receive, from: usize, bytes: usize, ledger: &mut Ledger) {
    let Some(request) = receive.request else { return };
    if bytes > receive.room {
        return ledger.end(request, Err(Broken::TooLong(bytes)));
    }
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, receive.to as *mut u8, bytes) };
    ledger.end(request, Ok(bytes));
}
