//! The segment: the shared memory of one communicator. The segment is an anonymous file (`memfd`),
//! so no file is left behind when a rank is killed. Every rank maps the whole segment.
//!
//! | part | content | size |
//! |---|---|---|
//! | header | magic, token, number of ranks, failure, arrivals, steps, verdict, doorbells | one page |
//! | seats | the process of each rank, its steps, its tags and its offer | 768 bytes for each rank |
//! | descriptors | the call of each rank in a step | [`SLOTS`] lines for each rank |
//! | slots | staging areas for the data of collectives | [`SLOTS`] for each rank |
//! | channels | the state of the messages from one rank to another | one for each ordered pair |
//! | rings | the bytes of the messages from one rank to another | one for each ordered pair |
//!
//! The kernel allocates a page when it is first touched. So the rings of a communicator that sends
//! no messages take no memory.

mod channel;
mod file;
mod header;
mod layout;
mod lobby;
mod seat;
mod steps;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

pub(crate) use self::channel::Channel;
use self::file::Mapping;
#[cfg(test)]
pub(crate) use self::file::VERSION_AT;
pub(crate) use self::file::{LAYOUT_VERSION, create, create_split, open};
pub(crate) use self::header::Header;
use self::header::RankBits;
use self::layout::HEADER_BYTES;
pub(crate) use self::layout::{LINE, Layout, MAX_RANKS, SLOTS};
pub(crate) use self::lobby::Lobby;
pub(crate) use self::seat::{Offer, Seat};
use crate::blame::Blame;
use crate::error::{Error, Result};
use crate::event::Bell;
use crate::labels::{self, Labels};
use crate::memory_file::{resize, seal};
use crate::process::ProcessId;
use crate::types::ncclInvalidUsage;

/// How long a rank waits for a third rank, if its number of ranks differs from that of the rank
/// that came first.
const THIRD_RANK: Duration = Duration::from_millis(250);
const _: () = assert!(RankBits::RANKS >= MAX_RANKS as usize);

/// How the making of a communicator in a segment has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// All ranks have arrived, in this segment or in others. Nobody needs the segment's descriptor
    /// any more.
    Started,
    /// The segment has failed. Ranks that come late read the reason in it.
    Failed,
}

/// Returns how the making of a communicator in this segment has ended; `None` while it has not.
pub(crate) fn end_of(fd: &OwnedFd) -> Option<End> {
    let mapping = Mapping::new(fd.as_raw_fd(), HEADER_BYTES).ok()?;
    let header = mapping.header();
    match header.started().is_some() || header.is_closed() {
        true => Some(End::Started),
        false => header.failure.is_set().then_some(End::Failed),
    }
}

/// Ends a segment because rank `rank` cannot join, so that the ranks that come later read the
/// reason, which names that rank. Returns whether the segment holds a failure now. If all ranks
/// have arrived already, this rank is one too many, and the segment does not fail.
pub(crate) fn fail(fd: &OwnedFd, rank: u32, error: &Error) -> bool {
    Mapping::new(fd.as_raw_fd(), HEADER_BYTES).is_ok_and(|mapping| {
        let header = mapping.header();
        if header.started().is_some() {
            return false;
        }
        let blame = if error.blame().ranks.is_empty() { &Blame::of([rank as usize]) } else { error.blame() };
        header.fail(error.code(), blame, error.message(), "");
        header.failure.is_set()
    })
}

/// Ends a segment because the call of rank `rank` names `nranks` ranks, and the call of the rank
/// that came first names `agreed` ranks. Waits a moment for a third rank, because two ranks cannot
/// tell which of them is wrong.
fn differ(header: &Header, (nranks, rank): (u32, u32), agreed: u32) -> Error {
    header.differ.set(&[rank as usize]);
    let end = Instant::now() + THIRD_RANK;
    let (came, differ) = loop {
        let (came, differ) = (header.came.get(), header.differ.get());
        // The rank that came first has set its bit, or is just about to.
        let is_decided = came.len() != differ.len() && !came.is_empty();
        if is_decided || header.failure.is_set() || Instant::now() >= end {
            break (came, differ);
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let blame = Blame::of(match came.len().cmp(&differ.len()) {
        Ordering::Less => came.clone(),
        Ordering::Equal => [came.clone(), differ].concat(),
        Ordering::Greater => differ,
    });
    let message = format!(
        "rank {rank} (pid {}) passed nranks {nranks}, but {} passed {agreed}",
        std::process::id(),
        labels::list(came.iter().map(|rank| *rank as i32))
    );
    header.fail(ncclInvalidUsage, &blame, &message, "");
    // There is no error to read while another rank is writing down its own failure.
    header.failure.error().unwrap_or_else(|| Error::usage(message).by(blame))
}

/// A segment that is mapped whole.
#[derive(Debug)]
pub(crate) struct Segment {
    /// The memory.
    mapping: Mapping,
    /// Where the parts of the segment lie in the memory.
    layout: Layout,
}

impl Segment {
    /// The token of the segment, which no other segment has.
    pub(crate) fn token(&self) -> [u8; 16] {
        self.mapping.header().token
    }

    /// Maps the segment for a communicator of `nranks` ranks. The rank that comes first decides
    /// the number of ranks, which decides the size of the segment. A rank that names another
    /// number ends the communicator, but does not resize the segment, because other ranks may have
    /// mapped it already. `labels` names the ranks in messages.
    pub(crate) fn map(fd: &OwnedFd, nranks: u32, rank: u32, labels: &Labels) -> Result<Segment> {
        // The segment's creator wrote `among` before any other rank could see the segment.
        let layout = Layout::split(nranks, file::among(fd)?);
        let map_whole = || Mapping::new(fd.as_raw_fd(), layout.total);
        // A rank maps the whole segment at once, unless it comes before the file has its size.
        // POSIX does not say what a mapping beyond the end of a file shows when the file grows.
        // qemu-user puts other memory there where its pages are larger than the kernel's.
        let (whole, refused) = match file::has(fd, layout.total)? {
            false => (None, None),
            true => match map_whole() {
                Ok(mapping) => (Some(mapping), None),
                Err(error) => (None, Some(error)),
            },
        };
        let mapping = whole.map_or_else(|| Mapping::new(fd.as_raw_fd(), HEADER_BYTES), Ok)?;
        let header = mapping.header();
        if header.is_closed() {
            return Err(Error::usage(
                "the unique id has started a communicator already; make one id for each communicator",
            ));
        }
        if let Err(agreed) = header.agree(nranks) {
            if header.arrived.value() == agreed {
                return Err(Error::usage(format!(
                    "the unique id has started a communicator of {agreed} ranks already; make one id for each communicator"
                )));
            }
            if agreed != nranks {
                return Err(differ(header, (nranks, rank), agreed));
            }
        }
        header.came.set(&[rank as usize]);
        if let Some(error) = header.failure.error() {
            return Err(error);
        }
        // Every rank sets the same size, so only the first resize and the first seal change
        // anything.
        let sized = refused.map_or(Ok(()), Err).and_then(|()| resize(fd, layout.total));
        let sized = sized.and_then(|()| seal(fd, libc::F_SEAL_GROW));
        let is_whole = mapping.bytes == layout.total;
        let whole = sized.and_then(|()| if is_whole { Ok(None) } else { map_whole().map(Some) });
        match whole {
            Ok(whole) => Ok(Segment { mapping: whole.unwrap_or(mapping), layout }),
            Err(error) => {
                // `rank` is the seat in this segment. Messages and blame have ranks of the
                // communicator.
                let rank = labels.of_seat(rank as usize);
                let error = labels.refused(rank, error);
                header.fail(error.code(), &Blame::of([rank]), error.message(), "");
                Err(error)
            }
        }
    }

    /// The number `among` of [`Layout::split`], by which a split sizes the slots of this segment. 0
    /// where no split made it. Equal on all hosts of a communicator.
    pub(crate) fn among(&self) -> u32 {
        self.header().among
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn header(&self) -> &Header {
        self.mapping.header()
    }

    /// The doorbell of `rank`.
    pub(crate) fn bell(&self, rank: usize) -> Bell<'_> {
        Bell { all: &self.header().bells, rank }
    }

    /// The seat of `rank`.
    pub(crate) fn seat(&self, rank: usize) -> &Seat {
        assert!(rank < self.layout.nranks);
        // SAFETY: the layout puts the seat inside the mapping and aligns it, and it consists of
        // atomics and of bytes in an `UnsafeCell`.
        unsafe { &*self.at(HEADER_BYTES + rank * size_of::<Seat>()).cast() }
    }

    /// The address of the line in which `rank` describes its call in a step. `index` is the number
    /// of the step modulo [`SLOTS`].
    pub(crate) fn descriptor(&self, rank: usize, index: usize) -> *mut u8 {
        self.at(self.layout.descriptors + self.slot(rank, index) * LINE)
    }

    /// The address of a slot of `rank`. `index` is the number of a step modulo [`SLOTS`].
    pub(crate) fn data(&self, rank: usize, index: usize) -> *mut u8 {
        self.at(self.layout.slots + self.slot(rank, index) * self.layout.slot_pitch)
    }

    /// Returns the number of a slot, and of the descriptor that goes with it.
    fn slot(&self, rank: usize, index: usize) -> usize {
        assert!(rank < self.layout.nranks && index < SLOTS);
        index * self.layout.nranks + rank
    }

    /// The channel of the messages from `source` to `destination`.
    pub(crate) fn channel(&self, source: usize, destination: usize) -> &Channel {
        // SAFETY: the layout puts the channel inside the mapping and aligns it, and it consists of
        // atomics and of bytes in an `UnsafeCell`.
        unsafe { &*self.at(self.layout.channels + self.pair(source, destination) * size_of::<Channel>()).cast() }
    }

    /// The address of the ring of the messages from `source` to `destination`.
    pub(crate) fn ring(&self, source: usize, destination: usize) -> *mut u8 {
        self.at(self.layout.rings + self.pair(source, destination) * self.layout.ring_bytes)
    }

    /// Returns the process of `rank`, or `None` while that rank has not taken its seat.
    pub(crate) fn process(&self, rank: usize) -> Option<ProcessId> {
        self.seat(rank).process()
    }

    /// Returns the number of an ordered pair of ranks.
    fn pair(&self, source: usize, destination: usize) -> usize {
        assert!(source < self.layout.nranks && destination < self.layout.nranks);
        source * self.layout.nranks + destination
    }

    /// Returns the address at an offset from the segment's start.
    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.mapping.bytes);
        // SAFETY: the offset is inside the mapping.
        unsafe { self.mapping.base.as_ptr().add(offset) }
    }
}
