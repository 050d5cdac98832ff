//! A process with which this one exchanges messages, and the state of the connection to that
//! process.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::time::Instant;

use super::frame::Header;
use crate::wire::{Contact, Lost, Tag, Token};

/// How many bytes of short messages may be at a receiver that has not asked for them. Further ones
/// are announced like long ones.
pub(super) const WINDOW: usize = 1 << 20;
/// The part of the window that a short message takes beyond its own length, in bytes.
pub(super) const COST: usize = 128;
/// The most ended communicators that the list of a peer holds. The oldest ones are forgotten.
const RETIRED: usize = 256;

/// The stages of the connection to a peer.
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
    /// The name of the process in error messages.
    pub(super) place: String,
    /// How many times `meet` was called, less the number of calls of `close`.
    pub(super) uses: u32,
    /// The tokens through which the processes met, the newest last, and how many uses have each
    /// token. The list is empty once the connection is ready, because only `token` counts from
    /// then on.
    tokens: Vec<(Token, u32)>,
    /// The present stage of the connection.
    pub(super) stage: Stage,
    /// The endpoint; NULL where there is none.
    pub(super) endpoint: *mut c_void,
    /// The nonce that this wire made for the connection.
    pub(super) nonce: [u8; 16],
    /// The nonce that the peer made, once the peer has proven that it knows the token.
    pub(super) their_nonce: Option<[u8; 16]>,
    /// The peer's nonce over which this wire has made its last proof, and how many proofs over this
    /// nonce it has sent.
    pub(super) proved: ([u8; 16], usize),
    /// The token of the last proof that this wire has sent.
    pub(super) proved_by: Token,
    /// The token by which the peer has proven itself.
    pub(super) token: Option<Token>,
    /// The number that the peer's messages carry, once the peer has proven that it knows the token.
    pub(super) cookie_in: u64,
    /// The number that this wire's messages carry.
    pub(super) cookie_out: u64,
    /// When this wire last heard of the peer.
    pub(super) heard: Instant,
    /// When this wire last sent something to the peer.
    pub(super) spoke: Instant,
    /// When this wire last sent its first greeting.
    pub(super) greeted: Instant,
    /// The index of the next ordered message that goes out.
    pub(super) next_out: u64,
    /// The index of the next ordered message to take.
    pub(super) next_in: u64,
    /// Ordered messages that arrived before a message with a lower index, with their data.
    pub(super) early: BTreeMap<u64, (Header, Vec<u8>)>,
    /// The sends that wait for the connection.
    pub(super) backlog: VecDeque<u64>,
    /// The answers to messages of the peer that wait for the connection.
    pub(super) answers: VecDeque<Header>,
    /// How many bytes of the peer's window this wire has used.
    pub(super) used: usize,
    /// How many bytes of this wire's window the peer uses, as far as the peer knows.
    pub(super) held: usize,
    /// The cost, in bytes, of the peer's short messages that receives have taken since the last
    /// credit.
    pub(super) owed: usize,
    /// The messages that no receive has taken.
    pub(super) arrived: HashMap<Tag, VecDeque<Arrived>>,
    /// The receives that no message has met.
    pub(super) wanted: HashMap<Tag, VecDeque<u64>>,
    /// How many bytes of each communicator's long messages have moved from and to the peer.
    pub(super) moved: HashMap<u64, u64>,
    /// The communicators that this process has ended, and its ranks in them. The messages of these
    /// ranks are dropped.
    pub(super) retired: VecDeque<(u64, u32)>,
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
            used: 0,
            held: 0,
            owed: 0,
            arrived: HashMap::new(),
            wanted: HashMap::new(),
            moved: HashMap::new(),
            retired: VecDeque::new(),
        }
    }

    /// Notes a use of the peer by a communicator with that token.
    pub(super) fn begin_use(&mut self, token: &Token) {
        self.uses += 1;
        if self.is_ready() {
            return;
        }
        match self.tokens.iter_mut().find(|(known, _)| known == token) {
            Some((_, uses)) => *uses += 1,
            None => self.tokens.push((*token, 1)),
        }
    }

    /// Notes the end of a use. A token without uses is forgotten, unless the peer may be about to
    /// prove itself by the token.
    pub(super) fn end_use(&mut self, token: &Token) {
        self.uses = self.uses.saturating_sub(1);
        if let Some((_, uses)) = self.tokens.iter_mut().find(|(known, _)| known == token) {
            *uses = uses.saturating_sub(1);
        }
        if self.stage == Stage::Idle {
            self.tokens.retain(|(_, uses)| *uses > 0);
        }
    }

    /// The tokens by which the two wires may prove themselves to each other, the newest first.
    pub(super) fn newest_tokens(&self) -> impl ExactSizeIterator<Item = &Token> {
        self.tokens.iter().rev().map(|(token, _)| token)
    }

    /// Notes that messages may go to the peer, and carry that number.
    pub(super) fn make_ready(&mut self, cookie: u64) {
        (self.cookie_out, self.stage) = (cookie, Stage::Ready);
        self.tokens = Vec::new();
    }

    /// Fills in what every header carries.
    pub(super) fn seal(&mut self, mut header: Header) -> Header {
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
    pub(super) fn retire(&mut self, comm: u64, rank: u32) -> usize {
        if self.retired.len() >= RETIRED {
            self.retired.pop_front();
        }
        self.retired.push_back((comm, rank));
        self.moved.remove(&comm);
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
    pub(super) fn is_retired(&self, tag: Tag) -> bool {
        self.retired.iter().any(|old| *old == (tag.comm, tag.to))
    }

    /// Whether messages may go to the peer.
    pub(super) fn is_ready(&self) -> bool {
        self.stage == Stage::Ready
    }
}
