//! Messages from one rank to another.
//!
//! Each ordered pair of ranks has a ring of bytes with two counters. A message is a header line and its bytes, padded to
//! whole lines; long ones flow through the ring piece by piece. A send ends when the receiver has taken everything, so that
//! both sides hear of sizes that disagree, and so that the sender may leave afterwards.

use std::sync::Arc;

use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::Result;
use crate::operation::Operation;
use crate::places::Place;
use crate::poll::{Blocker, Poll};
use crate::segment::LINE;
use crate::turn::Pass;
use crate::types::{DataType, ncclInvalidUsage};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Header {
    count: u64,
    dtype: i32,
    name: Name,
}

const _: () = assert!(size_of::<Header>() <= LINE);

/// Which side of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Send(*const u8),
    Recv(*mut u8),
}

/// A send or receive under way.
pub(crate) struct Message {
    comm: Arc<Comm>,
    side: Side,
    peer: usize,
    count: usize,
    dtype: DataType,
    pass: Pass,
    /// Whether the header has passed.
    opened: bool,
    /// Bytes of the message that have passed.
    done: usize,
}

// SAFETY: the buffer is the caller's, who promises it for as long as the call is under way, on whatever thread.
unsafe impl Send for Message {}

impl Message {
    /// # Safety
    /// The buffer holds `count` elements and stays there until the operation is dropped.
    pub(crate) unsafe fn new(
        comm: Arc<Comm>,
        side: Side,
        peer: usize,
        count: usize,
        dtype: DataType,
        name: Name,
    ) -> Result<Message> {
        comm.check_open()?;
        let place = if matches!(side, Side::Send(_)) { Place::To(peer) } else { Place::From(peer) };
        let pass = Pass::new(place, name);
        Ok(Message { comm, side, peer, count, dtype, pass, opened: false, done: 0 })
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

    /// Copies from a rank to itself: `self` sends what `other` receives.
    pub(crate) fn deliver(&self, other: &Message) -> Result<()> {
        let (Side::Send(from), Side::Recv(to)) = (self.side, other.side) else { return Ok(()) };
        if (self.count, self.dtype) != (other.count, other.dtype) {
            return Err(other.mismatch(self.count as u64, self.dtype as i32));
        }
        // SAFETY: both buffers hold that many bytes, as `new` demands.
        unsafe { std::ptr::copy(from, to, self.bytes()) };
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    fn mismatch(&self, count: u64, dtype: i32) -> crate::error::Error {
        let sent = DataType::from_raw(dtype).map_or("unknown elements", DataType::name);
        let message = format!(
            "{} sends {count} x {sent} where {} receives {} x {}",
            self.comm.label(self.peer),
            self.comm.label(self.comm.rank),
            self.count,
            self.dtype.name()
        );
        self.comm.fail(ncclInvalidUsage, None, &message)
    }

    /// Bytes to pass next, of `free` in the ring: up to its end, and to the end of the message.
    fn piece(&self, at: u32, free: usize) -> usize {
        let ring = self.comm.segment.layout().ring_bytes;
        let to_end = ring - at as usize % ring;
        // A quarter of a ring at a time, so that both sides work at once.
        (self.bytes() - self.done).min(free).min(to_end).min(ring / 4)
    }

    fn poll_send(&mut self, from: *const u8) -> Poll {
        let channel = self.comm.segment.channel(self.comm.rank, self.peer);
        let memory = self.comm.segment.ring(self.comm.rank, self.peer);
        let ring = self.comm.segment.layout().ring_bytes;
        // Only this rank moves the head.
        let mut head = channel.head.value();
        loop {
            let tail = channel.tail.value();
            let free = ring - head.wrapping_sub(tail) as usize;
            let blocked = Poll::Blocked { seen: tail, blocker: Blocker::To(self.peer) };
            if self.opened && self.done == self.bytes() {
                return if head == tail { Poll::Done } else { blocked };
            }
            if free < LINE {
                return blocked;
            }
            let start = head;
            let mut room = free;
            if !self.opened {
                let header = Header { count: self.count as u64, dtype: self.dtype as i32, name: *self.pass.name() };
                // SAFETY: a line is free at the head; heads are multiples of lines, which divide the ring.
                unsafe { memory.add(head as usize % ring).cast::<Header>().write(header) };
                self.opened = true;
                head = head.wrapping_add(LINE as u32);
                room -= LINE;
            }
            let bytes = self.piece(head, room);
            // SAFETY: `piece` keeps to the buffer and to the free bytes of the ring, which the receiver does not touch.
            unsafe { std::ptr::copy_nonoverlapping(from.add(self.done), memory.add(head as usize % ring), bytes) };
            self.done += bytes;
            head = head.wrapping_add(bytes.next_multiple_of(LINE) as u32);
            debug_assert!(head != start);
            channel.head.set(head);
        }
    }

    /// The next message is for a call of another name: lets that one of this rank go first, once it has come.
    fn wait_for_other(&mut self, name: &Name) -> Poll {
        let seen = self.comm.places.changed.value();
        if self.pass.hand_over(&self.comm, name.tag) {
            return Poll::Blocked { seen, blocker: Blocker::Turn };
        }
        self.comm.segment.channel(self.peer, self.comm.rank).expects.set(self.pass.name());
        Poll::Blocked { seen, blocker: Blocker::OtherCall(self.peer) }
    }

    fn poll_recv(&mut self, to: *mut u8) -> Result<Poll> {
        let channel = self.comm.segment.channel(self.peer, self.comm.rank);
        let memory = self.comm.segment.ring(self.peer, self.comm.rank);
        let ring = self.comm.segment.layout().ring_bytes;
        // Only this rank moves the tail.
        let mut tail = channel.tail.value();
        loop {
            if self.opened && self.done == self.bytes() {
                return Ok(Poll::Done);
            }
            let head = channel.head.value();
            if head == tail {
                return Ok(Poll::Blocked { seen: head, blocker: Blocker::From(self.peer) });
            }
            if !self.opened {
                // SAFETY: the sender put a header at the start of its message and published it.
                let header = unsafe { memory.add(tail as usize % ring).cast::<Header>().read() };
                if header.name.tag != self.pass.name().tag {
                    return Ok(self.wait_for_other(&header.name));
                }
                channel.expects.clear();
                if (header.count, header.dtype) != (self.count as u64, self.dtype as i32) {
                    return Err(self.mismatch(header.count, header.dtype));
                }
                self.opened = true;
                tail = tail.wrapping_add(LINE as u32);
            }
            let bytes = self.piece(tail, head.wrapping_sub(tail) as usize);
            // SAFETY: `piece` keeps to the buffer and to the published bytes of the ring, which the sender leaves alone.
            unsafe { std::ptr::copy_nonoverlapping(memory.add(tail as usize % ring), to.add(self.done), bytes) };
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
            let call = || describe(comm, side, self.count, self.dtype, peer);
            if let Some(blocked) = self.pass.enter(comm, call)? {
                return Ok(blocked);
            }
        }
        let poll = match self.side {
            Side::Send(from) => self.poll_send(from),
            Side::Recv(to) => self.poll_recv(to)?,
        };
        if poll != Poll::Done {
            self.comm.check()?;
        }
        Ok(poll)
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        Some(&self.comm)
    }

    fn describe(&self) -> String {
        describe(&self.comm, self.side, self.count, self.dtype, self.peer)
    }

    fn take_pass(&mut self) -> Option<Pass> {
        let fresh = Pass::new(self.place(), *self.pass.name());
        Some(std::mem::replace(&mut self.pass, fresh))
    }

    fn give_pass(&mut self, pass: Pass) {
        self.pass = pass;
    }

    fn end(&mut self) -> Result<()> {
        self.pass.leave(&self.comm)
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // What failed here has its error already.
        let _ = self.pass.leave(&self.comm);
    }
}

fn describe(comm: &Comm, side: Side, count: usize, dtype: DataType, peer: usize) -> String {
    let (call, way) = match side {
        Side::Send(_) => ("ncclSend", "to"),
        Side::Recv(_) => ("ncclRecv", "from"),
    };
    format!("{call}({count} x {}, {way} {}) on {}", dtype.name(), comm.label(peer), comm.own_label())
}

/// "rank 0 sends to rank 1 along pp, where rank 1 receives along all", for a message that the receiver's call is not for.
pub(crate) fn different_names(comm: &Comm, from: usize, to: usize) -> String {
    let (channel, ring) = (comm.segment.channel(from, to), comm.segment.layout().ring_bytes);
    let at = channel.tail.value() as usize % ring;
    // SAFETY: there is a header at the tail: the receiver leaves it there for a call of another name.
    let header = unsafe { comm.segment.ring(from, to).add(at).cast::<Header>().read() };
    let expected = channel.expects.name().unwrap_or(Name::NONE);
    let of = |name: &Name| if name.along().is_empty() { " without a name".to_owned() } else { name.along() };
    let (from, to) = (comm.label(from), comm.label(to));
    format!("{from} sends to {to}{}, where {to} receives{}", of(&header.name), of(&expected))
}
