//! A wire's state of one other process: the messages to and from it that are under way.
//!
//! Sender and receiver number the messages of each tag from 0, so a frame names its message by tag
//! and number, and frames of different messages may come in any order. A cancelled receive keeps
//! its number: the message of that number is dropped when it comes. A cancelled send whose message
//! has not gone leaves a number without a message. A `Void` frame tells the receiver so.
//!
//! A short message goes at once, as long as the sender has credit. The credit is the number of
//! bytes that the receiver is ready to keep. A message that is long or lacks credit is announced,
//! and goes when the receiver asks for it. A receive with room for a long message asks at once. So
//! the receiver never has to stop reading, and keeps a bounded number of bytes.

use std::collections::{HashMap, VecDeque};

use super::frame::{Header, Kind};
use super::ledger::{Key, Ledger, Open, Table};
use crate::wire::{Broken, Contact, EAGER_BYTES, Lost, Peer, Tag, Token};

/// The most that all short messages which no receive has taken may cost together, in bytes.
pub(super) const CREDIT: usize = 4 << 20;
/// The cost of each short message besides its bytes, in bytes.
pub(super) const COST: usize = 128;
/// The smallest piece of a message that counts as progress, in bytes.
const LEAST_COUNTED: usize = 1 << 10;
/// The most messages that a peer may announce or ask for ahead of this side.
pub(super) const MOST_AHEAD: usize = 1 << 20;

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
    /// How many bytes of the message are in frames that were sent or are being sent.
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
    /// How many bytes of the message belong to frames whose headers have come.
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
    /// The message will not come.
    Void,
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
    /// The tokens of the peer's uses, the newest last, and how many uses have each token. Either
    /// side may know tokens that the other side does not know yet.
    pub(super) tokens: Vec<(Token, usize)>,
    /// The reason why the process cannot be reached any more.
    pub(super) lost: Option<Lost>,
    /// The number of messages that were sent under each tag. The entry of a tag stays until the
    /// rank leaves the communicator, because the other side counts on. So a program that gives each
    /// message a name of its own needs more and more memory here.
    pub(super) sent: Table<Tag, u64>,
    /// The number of receives that were posted under each tag. The entries stay like those of
    /// `sent`.
    pub(super) received: Table<Tag, u64>,
    /// The messages that may go. The messages take turns after each piece.
    pub(super) queue: VecDeque<Send>,
    /// The messages that wait until the receiver asks.
    pub(super) held: Table<Key, Send>,
    /// For each message that the peer has asked for before this side sends it: the room of the
    /// receiver's buffer, in bytes.
    pub(super) wanted: Table<Key, usize>,
    /// The receives whose messages have not come as a whole.
    pub(super) posted: Table<Key, Receive>,
    /// The messages for which no receive was posted yet.
    pub(super) arrived: Table<Key, Arrived>,
    /// The bytes of frames that use no buffer of a caller. They are written before the messages in
    /// `queue`.
    pub(super) control: Vec<u8>,
    /// How much further short messages to the process may cost together, in bytes.
    pub(super) credit: usize,
    /// The cost of the short messages that came from the process and that no receive has taken, in
    /// bytes.
    pub(super) kept: usize,
    /// The cost of the short messages that receives have taken since the last `Credit` frame, in
    /// bytes.
    pub(super) owed: usize,
    /// How many bytes of each communicator's messages have moved in both directions. Small pieces
    /// do not count.
    pub(super) moved: HashMap<u64, u64>,
    /// Whether a notice has come that the kernel may not have acknowledged yet. The sender of the
    /// notice may be about to end, and waits for the acknowledgement.
    pub(super) has_notice: bool,
    /// Whether the other side has said that it has no use for the connection.
    pub(super) is_idle_there: bool,
    /// Whether this side has said that it has no use for the connection.
    pub(super) is_idle_here: bool,
    /// How many `Idle` frames this side has said for the connection.
    pub(super) idles_here: u64,
    /// How many `Idle` frames this side has read from the connection.
    pub(super) idles_there: u64,
    /// Whether this side has sent `Close` and waits for the answer. This side sends nothing
    /// meanwhile.
    pub(super) is_closing: bool,
    /// Frames that go although the connection is closing: `Close` and what was said before.
    pub(super) last_frames: Vec<u8>,
    /// Whether the connection ends: the other side has answered `Close`, or this side's answer to
    /// `Close` is about to go.
    pub(super) is_closed: bool,
}

impl Remote {
    pub(super) fn new(number: u32, contact: Contact, is_self: bool) -> Remote {
        Remote {
            number,
            contact,
            is_self,
            uses: 0,
            tokens: Vec::new(),
            lost: None,
            sent: Table::default(),
            received: Table::default(),
            queue: VecDeque::new(),
            held: Table::default(),
            wanted: Table::default(),
            posted: Table::default(),
            arrived: Table::default(),
            control: Vec::new(),
            credit: CREDIT,
            kept: 0,
            owed: 0,
            moved: HashMap::new(),
            has_notice: false,
            is_idle_there: false,
            is_idle_here: false,
            idles_here: 0,
            idles_there: 0,
            is_closing: false,
            last_frames: Vec::new(),
            is_closed: false,
        }
    }

    /// Appends a frame. Its payload is copied.
    pub(super) fn say(&mut self, header: Header, payload: &[u8]) {
        self.control.extend_from_slice(&Header { bytes: payload.len(), ..header }.to_bytes());
        self.control.extend_from_slice(payload);
    }

    pub(super) fn say_about(&mut self, kind: Kind, key: Key, extra: usize) {
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
        if bytes <= EAGER_BYTES && ledger.retired.has(key.0.comm, key.0.to) {
            return ledger.begin_ended(Ok(bytes));
        }
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
        let (key, arrived) = self.next_received(tag);
        if let Some(Arrived::Kept(data)) = arrived {
            self.taken(data.len());
            let outcome = if data.len() <= room { Ok(data.len()) } else { Err(Broken::TooLong(data.len())) };
            if outcome.is_ok() {
                // SAFETY: the receiver's buffer has that room.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
            }
            return ledger.begin_ended(outcome);
        }
        if let Some(lost) = &self.lost {
            return ledger.begin_ended(Err(Broken::Lost(lost.clone())));
        }
        let request = ledger.begin(Open { peer: self.number, key, is_send: false });
        let receive = Receive { request: Some(request), to, room, got: 0, asked: arrived.is_some() };
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
        self.post(key, receive);
        request
    }

    /// Returns the key of the tag's next message, and the part of the message that has come. Skips
    /// the numbers whose messages will not come.
    pub(super) fn next_received(&mut self, tag: Tag) -> (Key, Option<Arrived>) {
        let next = self.received.entry(tag).or_insert(0);
        loop {
            let key = (tag, *next);
            *next += 1;
            match self.arrived.remove(&key) {
                Some(Arrived::Void) => {}
                arrived => return (key, arrived),
            }
        }
    }

    /// Lets a receive wait for its message. Asks the sender for the message if it may be a long
    /// one.
    pub(super) fn post(&mut self, key: Key, mut receive: Receive) {
        receive.asked |= receive.room > EAGER_BYTES;
        if receive.asked {
            self.say_about(Kind::Want, key, receive.room);
        }
        self.posted.insert(key, receive);
    }

    /// Notes that a receive has taken a short message that was kept here.
    pub(super) fn taken(&mut self, bytes: usize) {
        self.kept = self.kept.saturating_sub(bytes + COST);
        if !self.is_self {
            self.owe(bytes);
        }
    }

    /// Gives the credit for a short message back to the sender. A frame does this once a quarter
    /// of all credit has accumulated.
    pub(super) fn owe(&mut self, bytes: usize) {
        self.owed += bytes + COST;
        if self.owed >= CREDIT / 4 {
            self.say(Header::plain(Kind::Credit, self.owed as u64), &[]);
            self.owed = 0;
        }
    }

    /// Fails everything that is under way.
    pub(super) fn lose(&mut self, lost: Lost, ledger: &mut Ledger) {
        if self.lost.is_some() {
            return;
        }
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
        self.arrived.retain(|_, arrived| !matches!(arrived, Arrived::Announced));
        if self.uses > 0 {
            ledger.losses.push((Peer(number), lost.clone()));
            ledger.changed = true;
        }
        self.lost = Some(lost);
    }

    /// Counts bytes of a message that have moved. Small pieces do not count, because a message of
    /// small pieces ends soon.
    pub(super) fn count_moved(&mut self, key: Key, bytes: usize) {
        if bytes >= LEAST_COUNTED {
            *self.moved.entry(key.0.comm).or_insert(0) += bytes as u64;
        }
    }

    /// How many bytes of a communicator's messages have moved.
    pub(super) fn moved(&self, comm: u64) -> u64 {
        self.moved.get(&comm).copied().unwrap_or(0)
    }

    /// Whether something waits to be sent.
    pub(super) fn has_output(&self) -> bool {
        !self.queue.is_empty() || !self.control.is_empty()
    }

    /// Returns the tags of this communicator's messages for which no receive was posted.
    pub(super) fn waiting(&self, comm: u64) -> Vec<Tag> {
        let of_comm =
            self.arrived.iter().filter(|(key, arrived)| key.0.comm == comm && !matches!(arrived, Arrived::Void));
        let mut tags: Vec<Tag> = of_comm.map(|(key, _)| key.0).collect();
        tags.sort_unstable();
        tags.dedup();
        tags
    }
}

/// Returns the bytes of a caller's buffer.
///
/// # Safety
/// The buffer is valid and unchanged for as long as the slice is used.
pub(super) unsafe fn slice<'a>(from: usize, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's contract. An empty buffer may have any address, so the empty slice has
    // an address of its own.
    if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(from as *const u8, bytes) } }
}

/// Copies a whole message to its receiver, and ends the receive.
///
/// # Safety
/// `from` has `bytes` bytes, and the receiver's buffer is another one.
pub(super) unsafe fn deliver(receive: Receive, from: usize, bytes: usize, ledger: &mut Ledger) {
    let Some(request) = receive.request else { return };
    if bytes > receive.room {
        return ledger.end(request, Err(Broken::TooLong(bytes)));
    }
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, receive.to as *mut u8, bytes) };
    ledger.end(request, Ok(bytes));
}
