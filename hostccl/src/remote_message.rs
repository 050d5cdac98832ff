//! Messages from one rank to a rank of another host.
//!
//! | from | to | tag | content |
//! |---|---|---|---|
//! | sender | receiver | the tag of the name | a head with count, type and name, and behind it a short message's bytes |
//! | sender | receiver | the tag of the name | the bytes of a longer message |
//! | receiver | sender | [`of_question`] | the count and the type that the receiver expects |
//!
//! So messages of one name arrive in order, and messages of different names do not wait for each
//! other. The receiver sends its question at the beginning of its call, before it has the message.
//! A send ends when the question has come and the message has gone. So a send of any size waits
//! for the receiver's call. Where the receiver waits already, its question is already here, and the
//! send loses no time. When the sizes differ, the receiver ends the communicator. The sender sees
//! the difference, too, and waits until the communicator has ended.

mod head;

use std::sync::Arc;
use std::time::Duration;

#[cfg(any(test, fuzzing))]
pub(crate) use self::head::any_bytes;
use self::head::{HEAD_BYTES, Head, INLINE_BYTES, QUESTION_BYTES, Unread, inline_bytes, inline_data};
use crate::blame::Blame;
use crate::call_name::{NO_TAG, Name};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::message::{Side, describe, fail_mismatch};
use crate::operation::Operation;
use crate::poll::{Blocker, Poll};
use crate::remote::RemoteCall;
use crate::span::Span;
use crate::types::{DataType, ncclInternalError, ncclInvalidUsage};
use crate::wire::request::{Failed, Transfer, poll_all};
use crate::wire::{Broken, Peer, Tag};

/// Returns the tag of a receiver's question. Its other parts are those of a message in the same
/// direction under the same name.
fn of_question(tag: Tag) -> Tag {
    Tag { from: tag.from | Tag::QUESTION, ..tag }
}

/// The stages of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The call has not begun.
    Start,
    /// A send waits until the receiver's question has come and the message has gone. A receive
    /// waits for the head.
    First,
    /// A receive waits until the bytes have come and its question has gone.
    Bytes,
    /// A send waits for the failure of the communicator, because the receiver expects something
    /// else.
    Refused,
}

/// A send or receive under way, between this rank and one of another host.
pub(crate) struct RemoteMessage {
    /// The requests of the stage. The requests are cancelled before the buffers are freed.
    transfers: Vec<Transfer>,
    /// The head, and the bytes of a short message behind it.
    head: Box<[u8]>,
    /// The question by which the receiver says what it expects.
    question: Box<[u8; QUESTION_BYTES]>,
    /// The communicator.
    comm: Arc<Comm>,
    /// Whether this rank sends or receives, and its buffer.
    side: Side,
    /// The other rank, in the whole communicator.
    peer: usize,
    /// How many elements the caller's buffer has.
    count: usize,
    /// The element type.
    dtype: DataType,
    /// The name under which the call is issued.
    name: Name,
    /// The present stage of the message.
    stage: Stage,
    /// Whether the communicator lists this message as under way.
    listed: bool,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
}

impl RemoteMessage {
    /// Returns a message that has not begun. Fails when the communicator takes no more calls.
    ///
    /// # Safety
    /// The buffer holds `count` elements, and stays valid until the operation is dropped.
    pub(crate) unsafe fn new(
        comm: Arc<Comm>,
        side: Side,
        peer: usize,
        count: usize,
        dtype: DataType,
        name: Name,
    ) -> Result<RemoteMessage> {
        comm.check_open()?;
        let question = Box::new(Head { count: count as u64, dtype: dtype as i32, text: name.text }.question());
        Ok(RemoteMessage {
            transfers: Vec::new(),
            head: Box::default(),
            question,
            comm,
            side,
            peer,
            count,
            dtype,
            name,
            stage: Stage::Start,
            listed: false,
            call_timeout: None,
        })
    }

    pub(crate) fn communicator(&self) -> &Arc<Comm> {
        &self.comm
    }

    /// The other rank, in the whole communicator.
    pub(crate) fn peer(&self) -> usize {
        self.peer
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    fn sends(&self) -> bool {
        matches!(self.side, Side::Send(_))
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    fn call(&self) -> RemoteCall {
        RemoteCall { sends: self.sends(), peer: self.peer, name: self.name }
    }

    fn route(&self) -> (&Span, Peer) {
        let span = self.comm.span.as_ref().expect("a message to another host has a span");
        (span, span.peers[self.peer].expect("the rank is on another host"))
    }

    /// Lists this message as under way, and posts its first requests.
    fn begin(&mut self) -> Result<()> {
        let remote = self.comm.remote.as_ref().expect("a message to another host has a span");
        if !remote.begin(self.call()) {
            let message = format!(
                "two threads of {} call{} at the same time, one of them {}: nobody can know which call of the other ranks belongs to which thread; let one thread at a time call, or give each a dimension of its own (DM_DIM_OWN_COMM)",
                self.comm.label(self.comm.rank),
                self.name.along(),
                self.describe()
            );
            return Err(self.comm.fail(ncclInvalidUsage, Blame::of([self.comm.rank]), &message));
        }
        self.listed = true;
        let (bytes, tag) = (self.bytes(), self.name.tag);
        let inline = inline_bytes(bytes);
        let question = self.question.as_mut_ptr();
        let (span, peer) = self.route();
        let (there, back) = (span.to(self.peer, tag), span.from(self.peer, tag));
        let mut transfers = Vec::with_capacity(3);
        if let Side::Recv(to) = self.side {
            // The buffer has room for the longest head, so that a head with more bytes than this
            // rank expects arrives, too.
            let mut head: Box<[u8]> = vec![0; HEAD_BYTES + INLINE_BYTES].into();
            // SAFETY: the head, the question and the caller's buffer outlive the transfers, and
            // nobody touches them before their end.
            unsafe {
                transfers.push(Transfer::recv(&span.wire, peer, back, head.as_mut_ptr(), head.len()));
                if inline < bytes {
                    transfers.push(Transfer::recv(&span.wire, peer, back, to, bytes));
                }
                transfers.push(Transfer::send(&span.wire, peer, of_question(there), question, QUESTION_BYTES));
            }
            (self.head, self.transfers) = (head, transfers);
            return Ok(());
        }
        let Side::Send(from) = self.side else { return Ok(()) };
        let head = Head { count: self.count as u64, dtype: self.dtype as i32, text: self.name.text };
        // SAFETY: the caller's buffer holds that many bytes.
        let data = unsafe { std::slice::from_raw_parts(from, inline) };
        let head: Box<[u8]> = [&head.encode()[..], data].concat().into();
        let is_whole = inline == bytes;
        // SAFETY: the head, the question and the caller's buffer outlive the transfers, and nobody
        // else touches them.
        unsafe {
            transfers.push(Transfer::recv(&span.wire, peer, of_question(back), question, QUESTION_BYTES));
            let send = if is_whole { Transfer::send } else { Transfer::send_soon };
            transfers.push(send(&span.wire, peer, there, head.as_ptr(), head.len()));
            if !is_whole {
                transfers.push(Transfer::send(&span.wire, peer, there, from, bytes));
            }
        }
        (self.head, self.transfers) = (head, transfers);
        Ok(())
    }

    /// Reads the head that has come, and a short message's bytes behind it.
    fn open(&mut self, to: *mut u8) -> Result<()> {
        let length = self.transfers[0].test().ok().flatten().unwrap_or(0);
        let arrived = &self.head[..length.min(self.head.len())];
        let data = match inline_data(arrived, self.count, self.dtype) {
            Ok(data) => data,
            Err(Unread::Length(expected)) => return Err(self.malformed(length, expected)),
            Err(Unread::Other(sent)) => {
                return Err(fail_mismatch(&self.comm, self.peer, sent, (self.count, self.dtype)));
            }
        };
        self.stage = Stage::Bytes;
        // SAFETY: the caller's buffer holds a short message. There is nothing to copy of a long
        // one.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    /// Ends a receive whose bytes have come.
    fn close(&mut self) -> Result<()> {
        if inline_bytes(self.bytes()) < self.bytes() {
            let length = self.transfers[1].test().ok().flatten().unwrap_or(0);
            if length != self.bytes() {
                return Err(self.malformed(length, self.bytes()));
            }
        }
        Ok(())
    }

    /// Ends a send whose message has gone, if the receiver's question is for this message.
    fn conclude(&mut self) -> Result<()> {
        let length = self.transfers[0].test().ok().flatten().unwrap_or(0);
        let mine = Head { count: self.count as u64, dtype: self.dtype as i32, text: self.name.text }.question();
        if length != QUESTION_BYTES {
            return Err(self.malformed(length, QUESTION_BYTES));
        }
        if *self.question != mine {
            self.stage = Stage::Refused;
        }
        Ok(())
    }

    /// Tests the requests of the stage. Returns what to wait for while a request is under way.
    fn wait(&mut self) -> Result<Option<Poll>> {
        let (peer, sends, tag) = (self.peer, self.sends(), self.name.tag);
        let span = self.comm.span.as_ref().expect("a message to another host has a span");
        let blocker = Blocker::RemoteMessage { peer, sends, tag };
        // The head may say why the other messages never come, so it is awaited first.
        let count = if self.stage == Stage::First && !sends { 1 } else { self.transfers.len() };
        match poll_all(&*span.wire, &mut self.transfers[..count]) {
            Ok(Some(Poll::Blocked { seen, .. })) => Ok(Some(Poll::Blocked { seen, blocker })),
            Ok(_) => Ok(None),
            Err(Failed { why: Broken::Lost(lost), .. }) => Err(self.comm.fail_lost(peer, &lost, &self.describe())),
            Err(Failed { why: Broken::TooLong(length), .. }) => {
                let room = match (sends, self.stage) {
                    (true, _) => QUESTION_BYTES,
                    (false, Stage::First) => HEAD_BYTES + INLINE_BYTES,
                    (false, _) => self.bytes(),
                };
                Err(self.malformed(length, room))
            }
        }
    }

    /// Returns what to wait for where the receiver is about to end the communicator.
    fn until_refused(&self) -> Result<Poll> {
        let (peer, sends, tag) = (self.peer, self.sends(), self.name.tag);
        let seen = self.route().0.wire.moved().value();
        self.comm.check()?;
        Ok(Poll::Blocked { seen, blocker: Blocker::RemoteMessage { peer, sends, tag } })
    }

    /// Ends the communicator because the peer's process does not keep to this protocol.
    fn malformed(&self, length: usize, expected: usize) -> Error {
        let message = format!(
            "{} sent {length} bytes where {expected} belong: do all ranks run the same release?",
            self.comm.labels.rank(self.peer, None)
        );
        self.comm.fail_whole(ncclInternalError, Blame::of([self.peer]), &message, &self.describe())
    }
}

impl Operation for RemoteMessage {
    fn poll(&mut self) -> Result<Poll> {
        if self.stage == Stage::Start {
            self.comm.check()?;
            self.begin()?;
            self.stage = Stage::First;
        }
        loop {
            if let Some(blocked) = self.wait()? {
                return self.comm.check_waiting(blocked);
            }
            match (self.stage, self.side) {
                (Stage::First, Side::Recv(to)) => self.open(to)?,
                (Stage::Refused, _) => return self.until_refused(),
                (Stage::First, Side::Send(_)) => {
                    self.conclude()?;
                    if self.stage == Stage::First {
                        return Ok(Poll::Done);
                    }
                }
                _ => return self.close().map(|()| Poll::Done),
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.comm)
    }

    fn call_timeout(&self) -> Option<Duration> {
        self.call_timeout
    }

    fn is_matched(&self) -> bool {
        !matches!(self.stage, Stage::Start | Stage::First)
    }

    fn describe(&self) -> String {
        describe(&self.comm, self.side, self.count, self.dtype, self.peer)
    }
}

impl Drop for RemoteMessage {
    fn drop(&mut self) {
        self.transfers.clear();
        if let (true, Some(remote)) = (self.listed, &self.comm.remote) {
            remote.end(self.call());
            self.comm.places.tell();
        }
    }
}

/// The reason why the messages of two ranks do not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Both ranks send, and neither receives.
    BothSend,
    /// The peer sends under another name than this rank receives. The number is the stream of the
    /// peer's message.
    OtherName(u64),
}

/// Returns why a message of this rank does not fit the messages of `peer`, as far as this rank can
/// see. `sends` and `tag` are those of [`Blocker::RemoteMessage`].
pub(crate) fn unfit(comm: &Comm, peer: usize, sends: bool, tag: u64) -> Option<Unfit> {
    let (span, remote) = comm.span.as_ref().zip(comm.remote.as_ref())?;
    let to_me = messages_to_me(span, peer);
    if sends {
        return to_me.contains(&tag).then_some(Unfit::BothSend);
    }
    let calls = &remote.lock().calls;
    let is_taken = |stream: u64| calls.iter().any(|call| call.is(false, peer, stream));
    to_me.into_iter().find(|stream| !is_taken(*stream)).map(Unfit::OtherName)
}

/// The streams of collectives. No name has such a tag.
const COLLECTIVES: [u64; 2] = [0, NO_TAG];

/// Returns the streams of the messages that `peer` has sent to this rank, and that no receive has
/// taken.
fn streams_to_me(span: &Span, peer: usize) -> Vec<u64> {
    let Some(process) = span.peers[peer] else { return Vec::new() };
    let waiting = span.wire.waiting(process, span.comm).into_iter();
    let to_me = waiting.filter(|tag| (tag.from as usize, tag.to as usize) == (peer, span.rank));
    to_me.map(|tag| tag.stream).collect()
}

/// Returns the streams of the messages of `ncclSend` that `peer` has sent to this rank, and that no
/// receive has taken. Questions and the letters of a shrink have other tags, so these streams are
/// tags of names.
pub(crate) fn messages_to_me(span: &Span, peer: usize) -> Vec<u64> {
    let mut streams = streams_to_me(span, peer);
    streams.retain(|stream| !COLLECTIVES.contains(stream));
    streams
}

/// Whether a message of a collective of `peer` waits for this rank.
pub(crate) fn is_in_collective(span: &Span, peer: usize) -> bool {
    streams_to_me(span, peer).iter().any(|stream| COLLECTIVES.contains(stream))
}

/// Returns "rank 0 sends to rank 1 along pp, where rank 1 receives along all". This rank receives
/// under the name with that tag, and `peer` has sent a message in `stream`. This function takes
/// the message, so the caller has to end the communicator.
pub(crate) fn different_names(comm: &Comm, peer: usize, tag: u64, stream: u64) -> String {
    let (me, from) = (comm.labels.rank(comm.whole().0, None), comm.labels.rank(peer, None));
    let sent = comm.span.as_ref().and_then(|span| peek(span, peer, stream));
    let mine = comm
        .remote
        .as_ref()
        .and_then(|remote| remote.lock().calls.iter().find(|call| call.is(false, peer, tag)).map(|call| call.name));
    let of = |name: Option<Name>| match name.map(|name| name.along()) {
        None => " under another name".to_owned(),
        Some(along) if along.is_empty() => " without a name".to_owned(),
        Some(along) => along,
    };
    format!("{from} sends to {me}{}, where {me} receives{}", of(sent), of(mine))
}

/// Takes a message that waits at this rank, and returns the name in its head.
fn peek(span: &Span, peer: usize, stream: u64) -> Option<Name> {
    let mut head = vec![0_u8; HEAD_BYTES + INLINE_BYTES];
    // SAFETY: the buffer outlives the transfer.
    let mut transfer = unsafe {
        Transfer::recv(&span.wire, span.peers[peer]?, span.from(peer, stream), head.as_mut_ptr(), head.len())
    };
    span.wire.progress();
    let length = transfer.test().ok().flatten();
    drop(transfer);
    Head::decode(&head[..length?.min(head.len())]).map(|head| Name { tag: stream, text: head.text })
}

#[cfg(test)]
mod tests;
