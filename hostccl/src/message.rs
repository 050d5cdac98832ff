//! Messages from one rank to another.
//!
//! Each ordered pair of ranks has a ring of bytes with two counters. A message is a header line and its bytes, padded to
//! whole lines; long ones flow through the ring piece by piece. A send ends when the receiver has taken everything, so that
//! both sides hear of sizes that disagree, and so that the sender may leave afterwards.

use std::sync::Arc;

use crate::comm::{Blocker, Comm};
use crate::error::Result;
use crate::operation::{Operation, Poll};
use crate::segment::LINE;
use crate::types::{DataType, ncclInvalidUsage};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Header {
    count: u64,
    dtype: i32,
}

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
    ) -> Result<Message> {
        comm.check_open()?;
        Ok(Message { comm, side, peer, count, dtype, opened: false, done: 0 })
    }

    pub(crate) fn communicator(&self) -> &Arc<Comm> {
        &self.comm
    }

    pub(crate) fn peer(&self) -> usize {
        self.peer
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    /// Copies from a rank to itself: `self` sends what `other` receives.
    pub(crate) fn deliver(&self, other: &Message) -> Result<()> {
        let (Side::Send(from), Side::Recv(to)) = (self.side, other.side) else { return Ok(()) };
        if self.bytes() != other.bytes() {
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
                let header = Header { count: self.count as u64, dtype: self.dtype as i32 };
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
                let size = DataType::from_raw(header.dtype).map_or(0, DataType::size) as u64;
                if header.count.checked_mul(size) != Some(self.bytes() as u64) {
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
        let (call, way) = match self.side {
            Side::Send(_) => ("ncclSend", "to"),
            Side::Recv(_) => ("ncclRecv", "from"),
        };
        format!(
            "{call}({} x {}, {way} {}) on {}",
            self.count,
            self.dtype.name(),
            self.comm.label(self.peer),
            self.comm.place()
        )
    }
}
