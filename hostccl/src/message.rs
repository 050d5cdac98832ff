//! Messages from one rank to another.
//!
//! Each ordered pair of ranks has a ring of bytes with two counters. A message is a header line and
//! its bytes, padded to whole cache lines. A long message flows through the ring piece by piece.
//!
//! A short message has only its header in the ring. Its bytes lie beside `head`, the counter for
//! which the receiver waits, and come with its cache line. For every message, the count, the type
//! and the name's tag lie there, too, and the receiver compares these.
//!
//! A send ends when the receiver has taken the whole message. So both sides learn of sizes that
//! disagree, and the sender may leave the communicator afterwards.

use std::sync::Arc;
use std::time::Duration;

use crate::blame::Blame;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::event::BESIDE;
use crate::operation::Operation;
use crate::places::Place;
use crate::plain;
use crate::poll::{Blocker, Poll};
use crate::segment::LINE;
use crate::turn::Pass;
use crate::types::{DataType, ncclInvalidUsage};

// The first line of a message in the ring has the name under which the sender sends.
const _: () = assert!(size_of::<Name>() <= LINE);

/// The bytes that the sender writes beside `head`. The receiver compares them with its own call,
/// and does not read the header.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Brief {
    /// How many elements the sender sends.
    count: u64,
    /// The tag of the name under which the sender sends.
    tag: u64,
    /// The sender's element type.
    dtype: i32,
    /// The message, if it has at most [`SHORT`] bytes.
    bytes: [u8; SHORT],
}

/// The most bytes of a short message.
const SHORT: usize = 16;

const _: () = assert!(size_of::<Brief>() <= BESIDE && align_of::<Brief>() == 8);

/// The length of a message's first pieces in bytes: half of a small first-level cache.
const PIECE: usize = 16 << 10;

/// The side of a message on which this rank is, with the caller's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// This rank sends from the buffer.
    Send(*const u8),
    /// This rank receives into the buffer.
    Recv(*mut u8),
}

// SAFETY: the buffer is the caller's, who promises that it is valid while the call is under way,
// on whatever thread.
unsafe impl Send for Side {}

/// A send or receive under way.
pub(crate) struct Message {
    /// The communicator.
    comm: Arc<Comm>,
    /// Whether this rank sends or receives, and its buffer.
    side: Side,
    /// The other rank's seat.
    peer: usize,
    /// How many elements the caller's buffer has.
    count: usize,
    /// The element type.
    dtype: DataType,
    /// The call's turn at its place.
    pass: Pass,
    /// Whether this side has begun the message: a sender has written the header, and a receiver has
    /// found that the sender's count, type and name fit its own call.
    opened: bool,
    /// Where in the ring the message starts, as a value of the head. The sender sets it when it
    /// writes the header.
    start: u32,
    /// The value of the channel's `order` when this receive wrote its name to the channel's
    /// `expects`. `None` while it has not.
    asked: Option<u32>,
    /// How many bytes of the message this side has written or read.
    done: usize,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
}

impl Message {
    /// Returns a message that has not begun. The caller has checked that the communicator takes
    /// calls ([`Comm::check_open`]).
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
    ) -> Message {
        let place = if matches!(side, Side::Send(_)) { Place::To(peer) } else { Place::From(peer) };
        let pass = Pass::new(place, name);
        Message {
            comm,
            side,
            peer,
            count,
            dtype,
            pass,
            opened: false,
            start: 0,
            asked: None,
            done: 0,
            call_timeout: None,
        }
    }

    pub(crate) fn communicator(&self) -> &Arc<Comm> {
        &self.comm
    }

    pub(crate) fn peer(&self) -> usize {
        self.peer
    }

    pub(crate) fn place(&self) -> Place {
        match self.side {
            Side::Send(_) => Place::To(self.peer),
            Side::Recv(_) => Place::From(self.peer),
        }
    }

    pub(crate) fn name(&self) -> &Name {
        self.pass.name()
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    /// Copies a message of a rank to itself. `self` is the send and `other` the receive.
    pub(crate) fn deliver(&self, other: &Message) -> Result<()> {
        let (Side::Send(from), Side::Recv(to)) = (self.side, other.side) else { return Ok(()) };
        if (self.count, self.dtype) != (other.count, other.dtype) {
            return Err(other.mismatch(self.count as u64, self.dtype as i32));
        }
        // SAFETY: both buffers hold that many bytes, as `new` requires.
        unsafe { std::ptr::copy(from, to, self.bytes()) };
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether the bytes of the message lie beside the counter, and only its header is in the ring.
    fn is_short(&self) -> bool {
        self.bytes() <= SHORT
    }

    /// Returns what the sender, whose buffer is `from`, writes beside `head`.
    fn brief(&self, from: *const u8) -> Brief {
        let (count, tag, dtype) = (self.count as u64, self.pass.name().tag, self.dtype as i32);
        let mut bytes = [0; SHORT];
        if self.is_short() {
            // SAFETY: the buffer and the field hold as many bytes as the message has.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), self.bytes()) };
        }
        Brief { count, tag, dtype, bytes }
    }

    fn mismatch(&self, count: u64, dtype: i32) -> Error {
        let peer = self.comm.labels.of_seat(self.peer);
        fail_mismatch(&self.comm, peer, (count, dtype), (self.count, self.dtype))
    }

    /// Returns how many bytes to copy next, where `free` bytes of the ring are available from `at`
    /// on. A piece ends at the end of the ring or of the message.
    fn piece(&self, at: u32, free: usize) -> usize {
        let ring = self.comm.segment.layout().ring_bytes;
        let to_end = ring - at as usize % ring;
        // The other side begins to copy after the first piece, so the first pieces are short. Where
        // each rank has a processor, later pieces are longer, because each piece costs one exchange
        // of a word between two caches. A piece is a quarter of the ring at most, so that both
        // sides copy at the same time.
        let most = match self.comm.is_crowded() {
            true => PIECE.min(ring / 4),
            false => self.done.max(PIECE).min(ring / 4),
        };
        (self.bytes() - self.done).min(free).min(to_end).min(most)
    }

    fn poll_send(&mut self, from: *const u8) -> Poll {
        let memory = self.comm.segment.ring(self.comm.rank, self.peer);
        let ring = self.comm.segment.layout().ring_bytes;
        // Only this rank moves the head.
        let mut head = self.comm.segment.channel(self.comm.rank, self.peer).head.value();
        loop {
            let channel = self.comm.segment.channel(self.comm.rank, self.peer);
            let order = channel.order.value();
            let tail = channel.tail.value();
            let free = ring - head.wrapping_sub(tail) as usize;
            let is_written = self.opened && self.done == self.bytes();
            if is_written && head == tail {
                // The next send to that rank writes to this cache line first, so it is fetched now.
                channel.head.fetch();
                return Poll::Done;
            }
            if is_written || free < LINE {
                if self.opened && tail == self.start {
                    if let Some(blocked) = self.let_other_send() {
                        return blocked;
                    }
                    // The send that was to go first has ended meanwhile, so this message is
                    // written again.
                    if !self.opened {
                        head = self.start;
                        continue;
                    }
                }
                return Poll::Blocked { seen: tail, blocker: Blocker::To { peer: self.peer, order } };
            }
            let start = head;
            let mut room = free;
            let begins = !self.opened;
            if begins {
                // SAFETY: a line is free at the head. The head is a multiple of the line's size,
                // and the ring's size is, too.
                unsafe { plain::write(memory.add(head as usize % ring).cast::<Name>(), *self.pass.name()) };
                (self.opened, self.start) = (true, head);
                head = head.wrapping_add(LINE as u32);
                room -= LINE;
            }
            if self.is_short() {
                self.done = self.bytes();
            } else {
                let bytes = self.piece(head, room);
                // SAFETY: `piece` keeps to the buffer and to the free bytes of the ring, which the
                // receiver does not touch.
                unsafe { plain::copy_in(from.add(self.done), memory.add(head as usize % ring), bytes) };
                self.done += bytes;
                head = head.wrapping_add(bytes.next_multiple_of(LINE) as u32);
            }
            debug_assert!(head != start);
            if begins {
                // The receiver polls this cache line. So the writes to it follow each other without
                // other work between them.
                // SAFETY: there is room, as asserted above. The receiver does not read the bytes
                // now: either it has taken the message before this one, or this rank has taken its
                // own message back, and the receiver does not look at such a message
                // ([`Expected`](crate::segment::Expected)).
                unsafe { plain::write(channel.head.beside().cast(), self.brief(from)) };
            }
            channel.head.set(head);
        }
    }

    /// Lets another send of this rank go first, if the receiver waits for that send's name. To do
    /// so, the function takes this message back, from which the receiver has taken nothing yet.
    /// Returns `None` when this message has to wait in the ring, or has to be written again.
    #[cold]
    fn let_other_send(&mut self) -> Option<Poll> {
        let comm = &self.comm;
        let channel = comm.segment.channel(comm.rank, self.peer);
        channel.expects.name()?;
        let seen = comm.places.changed.value();
        let waiting = self.pass.waiting_tags(comm);
        let tag = channel.expects.take_back(|tag| waiting.contains(&tag))?;
        channel.head.store(self.start);
        (self.opened, self.done) = (false, 0);
        channel.expects.took_back();
        channel.order.change();
        self.pass.hand_over(comm, tag).then_some(Poll::Blocked { seen, blocker: Blocker::Turn })
    }

    /// Handles a message in the ring that has another name than this receive. `tag` is the tag of
    /// the message's name. If this rank has a receive of that name, the function lets that receive
    /// go first. Otherwise it tells the sender the names for which this rank waits. Returns `None`
    /// when something has changed meanwhile.
    #[cold]
    fn wait_for_other(&mut self, tag: u64) -> Option<Poll> {
        let comm = &self.comm;
        let channel = comm.segment.channel(self.peer, comm.rank);
        let (order, seen) = (channel.order.value(), comm.places.changed.value());
        if self.pass.hand_over(comm, tag) {
            return Some(Poll::Blocked { seen, blocker: Blocker::Turn });
        }
        channel.expects.publish(self.pass.name(), self.pass.waiting_tags(comm).into_iter());
        let seen = channel.order.change();
        // If something else has changed the word since it was read, that change may be the one for
        // which this call would wait. Then the call looks again at once.
        self.asked = (seen == order.wrapping_add(1)).then_some(seen);
        self.asked.map(|seen| Poll::Blocked { seen, blocker: Blocker::OtherCall(self.peer) })
    }

    /// Withdraws the names that this receive has told the sender, so that the receive may look at
    /// the ring. Returns what to wait for while the receive may not look.
    #[inline]
    fn look_again(&mut self) -> Option<Poll> {
        let channel = self.comm.segment.channel(self.peer, self.comm.rank);
        if !channel.expects.is_in_use() {
            return None;
        }
        let seen = channel.order.value();
        let blocked = Poll::Blocked { seen, blocker: Blocker::OtherCall(self.peer) };
        if self.asked == Some(seen) {
            return Some(blocked);
        }
        self.asked = None;
        (!channel.expects.withdraw()).then_some(blocked)
    }

    fn poll_recv(&mut self, to: *mut u8) -> Result<Poll> {
        let memory = self.comm.segment.ring(self.peer, self.comm.rank);
        let ring = self.comm.segment.layout().ring_bytes;
        // Only this rank moves the tail.
        let mut tail = self.comm.segment.channel(self.peer, self.comm.rank).tail.value();
        loop {
            if self.opened && self.done == self.bytes() {
                return Ok(Poll::Done);
            }
            if !self.opened {
                if let Some(blocked) = self.look_again() {
                    return Ok(blocked);
                }
            }
            let channel = self.comm.segment.channel(self.peer, self.comm.rank);
            let head = channel.head.value();
            if head == tail {
                if !self.opened {
                    // This rank writes to `tail` as soon as the message has come, so the line is
                    // fetched now.
                    channel.tail.fetch();
                }
                return Ok(Poll::Blocked { seen: head, blocker: Blocker::From(self.peer) });
            }
            if !self.opened {
                // SAFETY: the sender wrote the brief when its message began, and then published it
                // through `head`.
                let brief = unsafe { plain::read(channel.head.beside().cast::<Brief>()) };
                if brief.tag != self.pass.name().tag {
                    match self.wait_for_other(brief.tag) {
                        Some(blocked) => return Ok(blocked),
                        None => continue,
                    }
                }
                if (brief.count, brief.dtype) != (self.count as u64, self.dtype as i32) {
                    return Err(self.mismatch(brief.count, brief.dtype));
                }
                self.opened = true;
                tail = tail.wrapping_add(LINE as u32);
                if self.is_short() {
                    // SAFETY: the buffer and the field hold as many bytes as the message has.
                    unsafe { std::ptr::copy_nonoverlapping(brief.bytes.as_ptr(), to, self.bytes()) };
                    self.done = self.bytes();
                    channel.tail.set(tail);
                    return Ok(Poll::Done);
                }
            }
            let bytes = self.piece(tail, head.wrapping_sub(tail) as usize);
            // SAFETY: `piece` keeps to the buffer and to the published bytes of the ring, which
            // the sender leaves alone.
            unsafe { plain::copy_out(memory.add(tail as usize % ring), to.add(self.done), bytes) };
            self.done += bytes;
            tail = tail.wrapping_add(bytes.next_multiple_of(LINE) as u32);
            channel.tail.set(tail);
        }
    }
}

impl Operation for Message {
    fn poll(&mut self) -> Result<Poll> {
        if !self.opened {
            self.comm.check()?;
            let (comm, side, peer) = (&self.comm, self.side, self.peer);
            let call = || describe(comm, side, self.count, self.dtype, comm.labels.of_seat(peer));
            if let Some(blocked) = self.pass.enter(comm, call)? {
                return Ok(blocked);
            }
        }
        let poll = match self.side {
            Side::Send(from) => self.poll_send(from),
            Side::Recv(to) => self.poll_recv(to)?,
        };
        if poll == Poll::Done { Ok(poll) } else { self.comm.check_waiting(poll) }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.comm)
    }

    fn call_timeout(&self) -> Option<Duration> {
        self.call_timeout
    }

    fn is_matched(&self) -> bool {
        let has_taken = || self.comm.segment.channel(self.comm.rank, self.peer).tail.value() != self.start;
        self.opened && (matches!(self.side, Side::Recv(_)) || has_taken())
    }

    fn describe(&self) -> String {
        describe(&self.comm, self.side, self.count, self.dtype, self.comm.labels.of_seat(self.peer))
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        Some(&mut self.pass)
    }

    fn end(&mut self) -> Result<()> {
        self.pass.leave(&self.comm)
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // A failure of this communicator has been reported already.
        let _ = self.pass.leave(&self.comm);
    }
}

/// Returns "ncclSend(3 x float32, to rank 1) on rank 0 of mesh_tp". `peer` is a rank of the whole
/// communicator.
pub(crate) fn describe(comm: &Comm, side: Side, count: usize, dtype: DataType, peer: usize) -> String {
    let (call, way) = match side {
        Side::Send(_) => ("ncclSend", "to"),
        Side::Recv(_) => ("ncclRecv", "from"),
    };
    let peer = comm.labels.rank(peer, None);
    format!("{call}({count} x {}, {way} {peer}) on {}", dtype.name(), comm.own_label())
}

/// Ends the communicator because `peer`, a rank of the whole communicator, sends another count or
/// type than this rank expects.
pub(crate) fn fail_mismatch(comm: &Comm, peer: usize, sent: (u64, i32), expected: (usize, DataType)) -> Error {
    let me = comm.whole().0;
    let message = format!(
        "{} sends {} x {} where {} receives {} x {}",
        comm.labels.rank(peer, None),
        sent.0,
        DataType::from_raw(sent.1).map_or("unknown elements", DataType::name),
        comm.labels.rank(me, None),
        expected.0,
        expected.1.name()
    );
    comm.fail_whole(ncclInvalidUsage, Blame::of([peer, me]), &message, "")
}

/// Returns "rank 0 sends to rank 1 along pp, where rank 1 receives along all", for a message that
/// is for none of the receiver's calls. This rank is one of the two, and its call has waited for
/// too long.
pub(crate) fn different_names(comm: &Comm, from: usize, to: usize) -> String {
    let (channel, ring) = (comm.segment.channel(from, to), comm.segment.layout().ring_bytes);
    let expected = channel.expects.name().unwrap_or(Name::NONE);
    let tail = channel.tail.value();
    // The sender reads its own message. The receiver first forbids the sender to take the message
    // back.
    let is_there = (comm.rank == from || channel.expects.withdraw()) && channel.head.value() != tail;
    // SAFETY: there is a header at the tail, which the receiver has left there because its calls
    // have other names.
    let sent =
        is_there.then(|| unsafe { plain::read(comm.segment.ring(from, to).add(tail as usize % ring).cast::<Name>()) });
    let of = |name: &Name| if name.along().is_empty() { " without a name".to_owned() } else { name.along() };
    let sent = sent.map_or_else(|| " under another name".to_owned(), |name| of(&name));
    let (from, to) = (comm.label(from), comm.label(to));
    format!("{from} sends to {to}{sent}, where {to} receives{}", of(&expected))
}
