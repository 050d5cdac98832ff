//! A segment whose parts are the engine's own, in memory of this process.

#[path = "../../../../hostccl/src/segment/channel.rs"]
mod channel;
#[path = "../../../../hostccl/src/segment/header.rs"]
mod header;
#[path = "../../../../hostccl/src/segment/seat.rs"]
mod seat;
#[path = "../../../../hostccl/src/segment/steps.rs"]
mod steps;

use std::cell::UnsafeCell;
use std::sync::Arc;

pub(crate) use self::channel::{Channel, Expected};
pub(crate) use self::header::Header;
pub(crate) use self::seat::{Offer, Seat};
pub(crate) use self::steps::Steps;
use crate::event::{BESIDE, Bell};
use crate::plain;

/// The length of a cache line.
pub(crate) const LINE: usize = 64;
/// The number of lines in the ring of the messages from rank 0 to rank 1.
const RING_LINES: usize = 2;

/// The sizes that the protocols need.
pub(crate) struct Layout {
    pub(crate) ring_bytes: usize,
}

#[repr(C, align(64))]
struct Line(UnsafeCell<[u8; LINE]>);

/// The memory that all ranks share.
struct Shared {
    header: Header,
    seats: [Seat; 2],
    /// The messages from rank 0 to rank 1.
    channel: Channel,
    ring: [Line; RING_LINES],
}

/// One rank's mapping of the segment of two ranks.
#[derive(Clone)]
pub(crate) struct Segment(Arc<Shared>);

impl Segment {
    pub(crate) fn new() -> Segment {
        let line = || Line(UnsafeCell::new([0; LINE]));
        let shared = Arc::new(Shared {
            header: Header::default(),
            seats: Default::default(),
            channel: Channel::default(),
            ring: std::array::from_fn(|_| line()),
        });
        plain::share(shared.ring.as_ptr().cast(), size_of_val(&shared.ring));
        // In that cache line, loom checks only the bytes beside the counter. The rest are loom's
        // own atomics.
        plain::share(shared.channel.head.beside(), BESIDE);
        Segment(shared)
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout { ring_bytes: RING_LINES * LINE }
    }

    pub(crate) fn header(&self) -> &Header {
        &self.0.header
    }

    pub(crate) fn bell(&self, rank: usize) -> Bell<'_> {
        Bell { all: &self.header().bells, rank }
    }

    pub(crate) fn seat(&self, rank: usize) -> &Seat {
        &self.0.seats[rank]
    }

    pub(crate) fn channel(&self, source: usize, destination: usize) -> &Channel {
        assert_eq!((source, destination), (0, 1));
        &self.0.channel
    }

    pub(crate) fn ring(&self, source: usize, destination: usize) -> *mut u8 {
        assert_eq!((source, destination), (0, 1));
        self.0.ring.as_ptr().cast_mut().cast()
    }
}

/// Names the number of ranks. Returns another rank's number where that rank came first.
pub(crate) fn agree(header: &Header, nranks: u32) -> Option<u32> {
    header.agree(nranks).err()
}

/// Returns the number of ranks once all of them have arrived.
pub(crate) fn started(header: &Header) -> Option<u32> {
    header.started()
}
