//! The rails of a communicator over several hosts: which ranks exchange data between the hosts.
//!
//! A rail is a part of the data, and one rank of each host exchanges that part with the other
//! hosts. The number of rails is the number of seats of the host that has the most seats. Each seat
//! serves consecutive rails, and two seats of a host differ by at most one in how many rails they
//! serve. So where all hosts have equally many seats, seat `j` serves rail `j`.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::scratch::Scratch;
use crate::span::Span;

/// The sizes in bytes that decide which way a collective takes and how it cuts its data. All ranks
/// must have the same sizes. The tests set smaller sizes, so that collectives cut small data as
/// well.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The most bytes that a rank may contribute to a small call.
    pub(crate) contribution: usize,
    /// How many bytes of each block go to another host in one message, so that the ranks of a host
    /// work on one piece while the next piece is on its way.
    pub(crate) message: usize,
    /// How many bytes of a reduction are on their way at a time.
    pub(crate) reduction: usize,
    /// How many bytes of a broadcast a host passes on at a time.
    pub(crate) broadcast: usize,
    /// A broadcast of this many bytes or more goes from each host to one other host, so that each
    /// host sends the data only once. A smaller broadcast goes down a tree with more branches,
    /// because the tree ends earlier for little data.
    pub(crate) chain: usize,
}

impl Limits {
    /// The sizes outside of tests.
    pub(crate) const PRODUCT: Limits =
        Limits { contribution: 128 << 10, message: 1 << 20, reduction: 4 << 20, broadcast: 1 << 20, chain: 512 << 10 };
}

/// The rails of a communicator, and the state that its calls keep from one call to the next.
#[derive(Debug)]
pub(crate) struct Rails {
    /// For each rank, its seat on its host.
    seats: Vec<usize>,
    /// How many rails there are.
    pub(crate) count: usize,
    /// Whether all hosts have equally many seats.
    pub(crate) is_even: bool,
    /// The sizes that decide how collectives cut their data.
    pub(crate) limits: Limits,
    /// Temporary memory for calls.
    pub(crate) scratch: Scratch,
    /// How many gatherings of the hosts this rank has been in.
    gatherings: AtomicU32,
    /// How many messages of collectives are under way.
    pub(crate) transfers: AtomicUsize,
    /// Whether this rank is in the meeting with which a collective begins.
    meets: AtomicBool,
}

/// A rank's stay in a meeting, which ends when this value is dropped.
pub(crate) struct Stay<'a>(&'a Rails);

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.0.meets.store(false, Ordering::Relaxed);
    }
}

impl Rails {
    pub(crate) fn new(span: &Span) -> Rails {
        let mut seats = vec![0; span.nranks];
        for ranks in &span.hosts {
            ranks.iter().enumerate().for_each(|(seat, &rank)| seats[rank] = seat);
        }
        let count = span.hosts.iter().map(Vec::len).max().unwrap_or(1);
        Rails {
            seats,
            count,
            is_even: span.hosts.iter().all(|ranks| ranks.len() == count),
            limits: Limits::PRODUCT,
            scratch: Scratch::default(),
            gatherings: AtomicU32::new(0),
            transfers: AtomicUsize::new(0),
            meets: AtomicBool::new(false),
        }
    }

    /// Notes that this rank is in a meeting.
    pub(crate) fn meet(&self) -> Stay<'_> {
        self.meets.store(true, Ordering::Relaxed);
        Stay(self)
    }

    /// Whether this rank is in a meeting.
    pub(crate) fn is_meeting(&self) -> bool {
        self.meets.load(Ordering::Relaxed)
    }

    /// The seat of a rank on its host.
    pub(crate) fn seat(&self, rank: usize) -> usize {
        self.seats[rank]
    }

    /// The seat that serves `rail` on a host of `seats` seats.
    pub(crate) fn server(&self, rail: usize, seats: usize) -> usize {
        rail * seats / self.count
    }

    /// The rails that `seat` serves on a host of `seats` seats.
    pub(crate) fn served(&self, seat: usize, seats: usize) -> Range<usize> {
        (seat * self.count).div_ceil(seats)..((seat + 1) * self.count).div_ceil(seats)
    }

    /// Returns the number of the next gathering. Only the call whose turn it is may call this
    /// function.
    pub(crate) fn next_gathering(&self) -> u32 {
        self.gatherings.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts_of_threads::communicators;

    #[test]
    fn every_host_serves_every_rail_once() {
        let (ends, _) = communicators(&[&[0, 3, 4], &[1], &[2, 5]]);
        let rails = Rails::new(ends[0].span.as_ref().unwrap());
        assert_eq!((rails.count, rails.is_even, rails.seat(4), rails.seat(5)), (3, false, 2, 1));
        for seats in 1..=3 {
            let served: Vec<usize> = (0..seats).flat_map(|seat| rails.served(seat, seats)).collect();
            assert_eq!(served, [0, 1, 2], "{seats} seats");
            for rail in 0..3 {
                assert!(rails.served(rails.server(rail, seats), seats).contains(&rail), "rail {rail} of {seats}");
            }
        }
    }
}
