//! The wire: messages between processes that share no memory.
//!
//! A wire belongs to a process. Each message has a [`Tag`] and goes from one process to another.
//! Messages of one tag between two processes arrive in the order in which they were sent. Messages
//! of different tags do not wait for each other. A message may be sent before the receiver asks for
//! it: the wire keeps a short one (at most [`EAGER_BYTES`]) at the receiver, and holds a longer one
//! back at the sender until the receiver asks.
//!
//! No function of a wire blocks, except [`Wire::sleep`] and [`Wire::sleep_on_wire`].
//! [`Wire::close`], [`Wire::close_all`] and [`Wire::cancel`] of the wire over UCX may wait for a
//! moment. A thread that waits calls [`Wire::progress`] while it polls, and then sleeps. The word
//! [`Wire::moved`] changes whenever a request ends, a notice arrives, or a peer is lost.

pub(crate) mod address;
#[cfg(test)]
mod contract;
pub(crate) mod here;
#[cfg(test)]
pub(crate) mod memory;
pub(crate) mod request;
pub(crate) mod tcp;
pub(crate) mod ucx;

use std::fmt::Debug;
use std::time::Duration;

use crate::event::{Event, Watch};

/// The longest message that a wire delivers before the receiver asks for it, in bytes: 128 KiB of
/// data, and a head with which a collective begins.
pub(crate) const EAGER_BYTES: usize = (128 << 10) + 256;

/// The longest notice, in bytes.
pub(crate) const NOTICE_BYTES: usize = 1 << 10;

/// The longest address of a wire, in bytes. UCX's address grows with the number of its devices.
pub(crate) const ADDRESS_BYTES: usize = 16 << 10;

/// How other processes reach the wire of a process. The contact travels through the join of a
/// communicator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Contact {
    /// The random number of the process's wire. The number tells the process from a later one at
    /// the same address.
    pub(crate) id: [u8; 16],
    /// The address, in the wire's own format; at most [`ADDRESS_BYTES`].
    pub(crate) address: Vec<u8>,
}

/// A process with which this one exchanges messages. The peer is a number that [`Wire::meet`]
/// gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Peer(pub(crate) u32);

/// A secret that both processes know before they connect: the token of the communicator through
/// which they met.
pub(crate) type Token = [u8; 16];

/// The tag that tells messages between two processes from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Tag {
    /// The communicator's number, which is random and equal on all of its ranks.
    pub(crate) comm: u64,
    /// The stream: 0 or `NO_TAG` for collectives, the tag of the name for a message, and a number
    /// made from the excluded ranks for the letters of a shrink.
    pub(crate) stream: u64,
    /// The rank that sends, in the communicator. One of the bits below may be set in it, too.
    pub(crate) from: u32,
    /// The rank that receives, in the communicator.
    pub(crate) to: u32,
}

impl Tag {
    /// The bit of `from` that tells the questions of receivers from the messages of senders. It is
    /// above the numbers of all ranks.
    pub(crate) const QUESTION: u32 = 1 << 31;
    /// The bit of `from` that tells the letters of a shrink from the messages of `ncclSend`. It is
    /// above the numbers of all ranks.
    pub(crate) const LETTER: u32 = 1 << 30;

    /// The rank that sends, without the bits that say what kind of message it sends.
    pub(crate) fn sender(&self) -> u32 {
        self.from & !(Tag::QUESTION | Tag::LETTER)
    }
}

/// A send or receive under way.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request(pub(crate) u64);

/// The reason why a peer cannot be reached any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    /// Whether the peer's process has ended, as far as its host says: it closed the connection or
    /// refuses a new one. If not, the peer or its host has fallen silent, or has sent garbage.
    pub(crate) ended: bool,
    /// The reason in words, with values: "10.77.0.2:41733 closed the connection".
    pub(crate) why: String,
}

/// The reason why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The peer is lost.
    Lost(Lost),
    /// The message is longer than the receiver's buffer. The number is its length in bytes.
    TooLong(usize),
}

/// A notice that came from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The process that sent it.
    pub(crate) from: Peer,
    /// The communicator that it is about.
    pub(crate) comm: u64,
    /// The text of the notice.
    pub(crate) text: Vec<u8>,
}

/// Messages between this process and others.
pub(crate) trait Wire: Debug + Send + Sync {
    /// How other processes reach this wire.
    fn contact(&self) -> Contact;

    /// Returns the number of the process with that contact. Makes no connection yet. Equal contacts
    /// get one number until [`close`](Wire::close) was called as often as `meet`, or until the
    /// process is lost. The process may be within reach again, so the next `meet` returns another
    /// number, while the first one stays lost. `token` lets the two processes prove to each other
    /// that they belong together.
    fn meet(&self, contact: &Contact, token: &Token) -> Peer;

    /// Ends one use of a peer, namely a use that began with `token`. Without uses the wire may
    /// close the connection. TCP closes it once both sides have no use and all sends have gone. UCX
    /// keeps a ready connection for the next use.
    fn close(&self, peer: Peer, token: &Token);

    /// Ends one use of each of these peers, namely uses that began with `token`. If
    /// [`close`](Wire::close) of a wire may wait for the peer, this function waits for all peers at
    /// the same time.
    fn close_all(&self, peers: &[Peer], token: &Token) {
        peers.iter().for_each(|peer| self.close(*peer, token));
    }

    /// Begins to send a message.
    ///
    /// # Safety
    /// The buffer stays valid and unchanged until [`test`](Wire::test) says that the request is
    /// done or has failed, or [`cancel`](Wire::cancel) has returned.
    unsafe fn isend(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request;

    /// Does what [`isend`](Wire::isend) does. The wire may wait with the message until the next
    /// `isend` to the peer, or until this thread polls or sleeps, so that both go together.
    ///
    /// # Safety
    /// The contract of [`isend`](Wire::isend).
    unsafe fn isend_soon(&self, peer: Peer, tag: Tag, from: *const u8, bytes: usize) -> Request {
        // SAFETY: the caller's contract.
        unsafe { self.isend(peer, tag, from, bytes) }
    }

    /// Begins to receive a message of at most `bytes` bytes. A receive of a long message may wait
    /// as [`isend_soon`](Wire::isend_soon) may.
    ///
    /// # Safety
    /// The buffer stays valid, and nobody else touches it, for as long as in
    /// [`isend`](Wire::isend).
    unsafe fn irecv(&self, peer: Peer, tag: Tag, to: *mut u8, bytes: usize) -> Request;

    /// Returns the length of the message once the request is done, and `None` while the request is
    /// under way. A send is done when its buffer may be used again, which may be before the message
    /// has arrived. After an answer other than `None` the request is over.
    fn test(&self, request: &Request) -> Result<Option<usize>, Broken>;

    /// Ends a request. Afterwards the wire does not touch the request's buffer. The message of a
    /// cancelled send may still arrive as a whole. If the message does not arrive, the receive that
    /// waits for the message gets the tag's next message, unless several receives of the tag are
    /// under way. After a cancelled receive, the message meant for it may be lost. The next receive
    /// of the tag then gets the following message.
    fn cancel(&self, request: Request);

    /// Sends a notice about a communicator, which needs no receive at the peer. The wire uses the
    /// connection that exists, or makes one. This call never fails: a peer that is lost gets
    /// nothing.
    fn notify(&self, peer: Peer, comm: u64, text: &[u8]);

    /// Whether there is a connection to the peer, so that a notice to it makes none.
    fn connected(&self, peer: Peer) -> bool {
        let _ = peer;
        true
    }

    /// Whether this host's kernel has everything that was sent to the peer over the present
    /// connection. Bytes that wait for a connection do not count. The answer is yes where the peer
    /// is lost. A wire whose `close` waits for that always answers yes.
    fn is_flushed(&self, peer: Peer) -> bool {
        let _ = peer;
        true
    }

    /// Whether the other hosts have everything that this process has sent to any peer, so that
    /// nothing gets lost when this process ends now. Bytes that wait for a connection count. Lost
    /// peers do not count. A wire whose `close` waits for all of that always answers yes.
    fn has_all_arrived(&self) -> bool {
        true
    }

    /// How many bytes of the communicator's messages have moved from and to the peer so far. While
    /// the number grows, a long message makes progress.
    fn moved_bytes(&self, peer: Peer, comm: u64) -> u64 {
        let _ = (peer, comm);
        0
    }

    /// Returns the notices that have come and that nobody has taken yet, and the peers that were
    /// lost since the last call. Only one thread at a time may call this.
    fn news(&self) -> (Vec<Notice>, Vec<(Peer, Lost)>);

    /// Returns why a peer cannot be reached any more, or `None` while it is not known to be lost.
    fn lost(&self, peer: Peer) -> Option<Lost>;

    /// Returns why there is no connection to the peer yet, where the wire knows a reason that may
    /// pass. Errors name that reason when a call's time is up.
    fn trouble(&self, peer: Peer) -> Option<String> {
        let _ = peer;
        None
    }

    /// Returns the tags of this communicator's messages that `peer` has sent or announced, and
    /// that no receive has taken. Error messages name these tags.
    fn waiting(&self, peer: Peer, comm: u64) -> Vec<Tag>;

    /// Drops the messages to and from `rank`, a rank of this process that has left the
    /// communicator. Messages to it that arrive later are dropped, too.
    fn retire(&self, _peer: Peer, _comm: u64, _rank: u32) {}

    /// Moves what can be moved without waiting. Returns whether anything has moved.
    fn progress(&self) -> bool;

    /// The word that changes whenever a request ends, a notice comes, or a peer is lost.
    fn moved(&self) -> &Event;

    /// Sleeps until one of these words differs from what was seen, somebody wakes it, or the time
    /// is up. This function may return earlier. [`moved`](Wire::moved) is one of the words. The
    /// wire makes progress meanwhile.
    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration);

    /// Sleeps as [`sleep`](Wire::sleep) does, until [`moved`](Wire::moved) differs from `seen`. A
    /// thread that waits for nothing but messages wakes up sooner by this function. A change of one
    /// of the other words, which change seldom, may end the sleep 10 ms late.
    fn sleep_on_wire(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let moved = Watch { event: self.moved(), seen };
        let watches: Vec<Watch<'_>> = std::iter::once(moved).chain(others.iter().copied()).collect();
        self.sleep(&watches, timeout);
    }
}
