//! The parts of the large collectives over several hosts: collectives among the seats of this host,
//! and exchanges among all ranks.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::blocks::Block;
use crate::collective::{Call, Descriptor, Kind, Part, Ragged, Reduction};
use crate::comm::Comm;
use crate::error::Result;
use crate::flow::wait;
use crate::gathering::span_of;
use crate::rails::{Limits, Rails};
use crate::scratch::Memory;
use crate::span::Span;
use crate::transfers::Transfers;
use crate::types::DataType;

/// The stream of a collective's first messages between two ranks.
pub(super) const FIRST: u64 = 0;
/// The stream of a collective's later messages, which do not wait for the first ones. No name has
/// this tag.
pub(super) const SECOND: u64 = u64::MAX;

/// A large collective under way, after its meeting.
pub(super) struct Work<'a> {
    /// The communicator.
    pub(super) comm: &'a Arc<Comm>,
    /// The description of the call, for errors.
    pub(super) descriptor: Descriptor,
    /// The element type.
    pub(super) dtype: DataType,
}

/// Temporary memory of the communicator. The communicator gets it back when this value is dropped.
pub(super) struct Temporary<'a> {
    /// The memory; `None` once it was given back.
    memory: Option<Memory>,
    /// The owner.
    rails: &'a Rails,
}

impl Temporary<'_> {
    pub(super) fn at(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::at)
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.rails.scratch.give(memory);
        }
    }
}

/// Returns the part of a block that belongs to one chunk. `range` is the chunk's range of elements,
/// counted from the start of each block.
pub(super) fn cut(block: Block, range: &Range<usize>) -> Block {
    let start = range.start.min(block.count);
    Block { start: block.start + start, count: range.end.min(block.count) - start }
}

/// Returns the chunks of `each` elements of blocks with at most `most` elements.
pub(super) fn chunks(most: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    let each = each.max(1);
    (0..most.div_ceil(each)).map(move |chunk| chunk * each..(chunk + 1) * each)
}

/// Returns `n` blocks of `count` elements, one behind the other.
pub(super) fn uniform(count: usize, n: usize) -> Vec<Block> {
    (0..n).map(|index| Block { start: index * count, count }).collect()
}

impl<'a> Work<'a> {
    pub(super) fn span(&self) -> &'a Span {
        span_of(self.comm)
    }

    pub(super) fn rails(&self) -> &'a Rails {
        self.comm.rails.as_ref().expect("a communicator with a span has rails")
    }

    pub(super) fn limits(&self) -> Limits {
        self.rails().limits
    }

    /// The size of an element in bytes.
    pub(super) fn size(&self) -> usize {
        self.dtype.size()
    }

    /// Returns the hosts after this one in the ring, without this one.
    pub(super) fn other_hosts(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let (host, hosts) = (self.span().host(), self.span().hosts.len());
        (1..hosts).map(move |step| (host + step) % hosts)
    }

    pub(super) fn transfers(&self) -> Transfers {
        Transfers::new(self.comm, self.descriptor)
    }

    pub(super) fn temporary(&self, bytes: usize) -> Temporary<'a> {
        let rails = self.rails();
        Temporary { memory: Some(rails.scratch.take(bytes)), rails }
    }

    /// Waits until all messages of the set have been sent and received, and empties the set.
    pub(super) async fn over(&self, transfers: &mut Transfers) -> Result<()> {
        wait(|| transfers.poll()).await?;
        transfers.clear();
        Ok(())
    }

    /// Performs a collective among the seats of this host.
    ///
    /// # Safety
    /// The contract of [`Part::new`].
    pub(super) async unsafe fn part(&self, call: Call, ragged: Option<Ragged>) -> Result<()> {
        // SAFETY: the caller's contract.
        let mut part = unsafe { Part::new(self.comm.clone(), call, ragged) };
        wait(|| match part.poll()? {
            None => Ok(None),
            Some(blocked) => self.comm.check_waiting(blocked).map(Some),
        })
        .await
    }

    fn call(&self, kind: Kind, send: *const u8, recv: *mut u8, reduction: Option<Reduction>) -> Call {
        Call { kind, send, recv, count: 0, dtype: self.dtype, reduction, root: None }
    }

    /// Gives all seats of this host the blocks that each seat has: `blocks` has the place in `recv`
    /// of each seat's block, and `own` is the data of this seat's block.
    ///
    /// # Safety
    /// The buffers hold the blocks.
    pub(super) async unsafe fn gather_here(&self, own: *const u8, recv: *mut u8, blocks: Vec<Block>) -> Result<()> {
        if blocks.iter().all(|block| block.count == 0) {
            return Ok(());
        }
        let mine = Block { start: 0, count: blocks[self.comm.rank].count };
        let ragged = Ragged::new(vec![mine; blocks.len()], blocks);
        // SAFETY: this function's contract.
        unsafe { self.part(self.call(Kind::AllGatherV, own, recv, None), Some(ragged)).await }
    }

    /// Reduces blocks of `send` over the seats of this host: each seat gets its block to `recv`.
    ///
    /// # Safety
    /// The buffers hold the blocks.
    pub(super) async unsafe fn reduce_here(
        &self,
        reduction: Reduction,
        send: *const u8,
        blocks: Vec<Block>,
        recv: *mut u8,
    ) -> Result<()> {
        if blocks.iter().all(|block| block.count == 0) {
            return Ok(());
        }
        let mine = Block { start: 0, count: blocks[self.comm.rank].count };
        let recvs = vec![mine; blocks.len()];
        let call = self.call(Kind::ReduceScatterV, send, recv, Some(reduction));
        // SAFETY: this function's contract.
        unsafe { self.part(call, Some(Ragged::new(blocks, recvs))).await }
    }

    /// Exchanges blocks among the seats of this host: the block `sends[s]` goes to seat `s`, and
    /// `recvs[s]` is filled from there.
    ///
    /// # Safety
    /// The buffers hold the blocks.
    pub(super) async unsafe fn exchange_here(
        &self,
        send: *const u8,
        sends: Vec<Block>,
        recv: *mut u8,
        recvs: Vec<Block>,
    ) -> Result<()> {
        let call = self.call(Kind::AllToAllV, send, recv, None);
        // SAFETY: this function's contract.
        unsafe { self.part(call, Some(Ragged::new(sends, recvs))).await }
    }

    /// Exchanges blocks among all ranks: `sends[r]` goes to rank `r`, and `recvs[r]` is filled from
    /// there. Every rank knows how much it gets.
    ///
    /// # Safety
    /// The buffers hold the blocks. No block that is filled is one that is sent, except that both
    /// blocks of each rank are one memory where `in_place` says so.
    pub(super) async unsafe fn exchange(
        &self,
        send: *const u8,
        sends: &[Block],
        recv: *mut u8,
        recvs: &[Block],
        in_place: bool,
    ) -> Result<()> {
        let (span, size) = (self.span(), self.size());
        let ranks = || self.other_hosts().flat_map(|host| span.hosts[host].iter().copied());
        let most = ranks().map(|rank| sends[rank].count.max(recvs[rank].count)).max().unwrap_or(0);
        // All ranks cut the blocks into chunks of this length.
        let message = self.limits().message;
        let each = message.max(4 * message / span.nranks) / size;
        // A block that is received to the place from which it is sent goes through temporary
        // memory.
        let others = span.nranks - self.comm.nranks;
        let room = self.temporary(if in_place { others * each.min(most) * size } else { 0 });
        let mut waiting = VecDeque::new();
        let mut is_first = true;
        for range in chunks(most.max(1), each) {
            let mut transfers = self.transfers();
            // The receives come first: a rank whose long message has been asked for sends it
            // without announcing it.
            // SAFETY: the blocks lie in the buffers, and the temporary has room for a chunk of
            // each.
            unsafe {
                let mut at = room.at();
                for rank in ranks().filter(|_| in_place) {
                    let Block { start, count } = cut(sends[rank], &range);
                    std::ptr::copy_nonoverlapping(send.add(start * size), at, count * size);
                    at = at.add(count * size);
                }
                for rank in ranks() {
                    let Block { start, count } = cut(recvs[rank], &range);
                    transfers.recv(rank, FIRST, recv.add(start * size), count * size);
                }
                let mut at = room.at().cast_const();
                for rank in ranks() {
                    let Block { start, count } = cut(sends[rank], &range);
                    let from = if in_place { at } else { send.add(start * size) };
                    at = at.wrapping_add(count * size);
                    transfers.send(rank, FIRST, from, count * size);
                }
            }
            waiting.push_back(transfers);
            if std::mem::take(&mut is_first) {
                // SAFETY: the caller's contract.
                unsafe { self.exchange_with_host(send, sends, recv, recvs).await? };
            }
            while let Some(transfers) = waiting.front_mut().filter(|_| in_place) {
                self.over(transfers).await?;
                waiting.pop_front();
            }
        }
        for mut transfers in waiting {
            self.over(&mut transfers).await?;
        }
        Ok(())
    }

    /// Exchanges the blocks for the ranks of this host.
    ///
    /// # Safety
    /// The contract of [`exchange`](Work::exchange).
    async unsafe fn exchange_with_host(
        &self,
        send: *const u8,
        sends: &[Block],
        recv: *mut u8,
        recvs: &[Block],
    ) -> Result<()> {
        let of = |blocks: &[Block]| self.span().here().iter().map(|rank| blocks[*rank]).collect();
        // SAFETY: the caller's contract.
        unsafe { self.exchange_here(send, of(sends), recv, of(recvs)).await }
    }

    /// Gives all ranks the blocks that each rank has: `blocks` has the place in `recv` of each
    /// rank's block, and `own` is the data of this rank's block.
    ///
    /// A rank sends its block once to each other host: to the seat whose number is the rank's own
    /// seat number modulo the number of seats of that host. The seats of a host then give each
    /// other what they have.
    ///
    /// # Safety
    /// The buffers hold the blocks. The data at `own` lies apart from the other blocks.
    pub(super) async unsafe fn spread(&self, own: *const u8, recv: *mut u8, blocks: &[Block]) -> Result<()> {
        let (span, rails, size) = (self.span(), self.rails(), self.size());
        let (seat, seats) = (self.comm.rank, self.comm.nranks);
        let most = blocks.iter().map(|block| block.count).max().unwrap_or(0);
        let mut sends = self.transfers();
        let mut receives = Vec::new();
        for range in chunks(most, self.limits().message / size) {
            let mut receive = self.transfers();
            // SAFETY: the blocks lie in the buffers.
            unsafe {
                for host in self.other_hosts() {
                    for &rank in span.hosts[host].iter().filter(|rank| rails.seat(**rank) % seats == seat) {
                        let Block { start, count } = cut(blocks[rank], &range);
                        receive.recv(rank, FIRST, recv.add(start * size), count * size);
                    }
                    let to = span.hosts[host][seat % span.hosts[host].len()];
                    let Block { start, count } = cut(blocks[span.rank], &range);
                    let from = own.add((start - blocks[span.rank].start) * size);
                    sends.send(to, FIRST, from, count * size);
                }
            }
            receives.push((range, receive));
        }
        let here: Vec<Block> = span.here().iter().map(|rank| blocks[*rank]).collect();
        // SAFETY: the caller's contract.
        unsafe { self.gather_here(own, recv, here).await? };
        for (range, mut receive) in receives {
            self.over(&mut receive).await?;
            if seats == 1 {
                continue;
            }
            for host in self.other_hosts() {
                for ranks in span.hosts[host].chunks(seats) {
                    let of = |seat: usize| match ranks.get(seat) {
                        Some(rank) => cut(blocks[*rank], &range),
                        None => Block { start: 0, count: 0 },
                    };
                    let theirs: Vec<Block> = (0..seats).map(of).collect();
                    let from = recv.wrapping_add(theirs[seat].start * size).cast_const();
                    // SAFETY: the blocks lie in the buffer, and this seat has received its own.
                    unsafe { self.gather_here(from, recv, theirs).await? };
                }
            }
        }
        self.over(&mut sends).await
    }
}
