//! Large all-reduce and reduce over several hosts.
//!
//! The ranks of a host first reduce each chunk together: each seat gets the elements of the rails
//! that it serves. Then the seats that serve the same rail exchange its elements: each host reduces
//! a piece of the rail and gives the result to the other hosts. In the end the seats of each host
//! give each other the elements of their rails. Three chunks are under way at a time.

use std::ops::Range;

use hostccl_reduce::{Target, reduce, scale};

use super::work::{FIRST, SECOND, Temporary, Work, chunks, uniform};
use crate::blocks::Block;
use crate::collective::{Reduction, part};
use crate::error::Result;
use crate::span::Span;
use crate::transfers::Transfers;
use crate::types::ReduceOp;

/// A large reduction over several hosts.
pub(super) struct Reducing<'a> {
    /// The parts and exchanges.
    pub(super) work: Work<'a>,
    /// How the elements are reduced.
    pub(super) reduction: Reduction,
    /// Whether the elements of all ranks are reduced at once.
    pub(super) is_flat: bool,
}

/// One chunk of an all-reduce under way.
struct Chunk<'a> {
    /// The elements of the chunk.
    range: Range<usize>,
    /// The reduction over the ranks of this host.
    partial: *const u8,
    /// Where the result goes.
    result: *mut u8,
    /// The messages that carry partial results: from this host to the others, and from the others
    /// to this host. This field stands before `pieces`, so the drop ends the messages before it
    /// gives their memory back.
    transfers: Transfers,
    /// The messages with the results. They, too, end before the memory at `result` is given back.
    results: Transfers,
    /// The reductions of the other hosts: for each rail that this rank serves, a piece from each
    /// other host.
    pieces: Temporary<'a>,
}

/// Whether a host gets the result: all hosts do, or the root's alone.
fn gets(span: &Span, root: Option<usize>, host: usize) -> bool {
    root.is_none_or(|root| span.host_of[root] == host)
}

impl<'a> Reducing<'a> {
    pub(super) fn op(&self) -> ReduceOp {
        match self.reduction {
            Reduction::Plain(op) => op,
            Reduction::PreMulSum(_) => ReduceOp::Sum,
        }
    }

    /// Returns the elements of this rank to reduce. In a reduction with a scalar, they are first
    /// scaled into `room`. This function is for callers for which no collective among the seats of
    /// this host scales the elements.
    ///
    /// # Safety
    /// `send` holds the elements, and `room` has room for them where they are scaled.
    pub(super) unsafe fn scaled(&self, send: *const u8, room: *mut u8, elements: usize) -> *const u8 {
        match self.reduction {
            Reduction::PreMulSum(scalar) => {
                // SAFETY: this function's contract.
                unsafe { scale(self.work.dtype, scalar, send, room, elements) };
                room
            }
            Reduction::Plain(_) => send,
        }
    }

    /// The elements of `rail` in a chunk of `length` elements.
    fn rail(&self, rail: usize, length: usize) -> Range<usize> {
        let (start, count) = part(length, rail, self.work.rails().count, self.work.size());
        start..start + count
    }

    /// The elements that a host reduces, in a rail of a chunk.
    fn piece(&self, rail: usize, host: usize, length: usize) -> Block {
        let rail = self.rail(rail, length);
        let (start, count) = part(rail.len(), host, self.work.span().hosts.len(), self.work.size());
        Block { start: rail.start + start, count }
    }

    /// The elements of each seat of this host: those of the rails that it serves.
    fn blocks_here(&self, length: usize) -> Vec<Block> {
        let (rails, seats) = (self.work.rails(), self.work.comm.nranks);
        let of = |seat: usize| {
            let served = rails.served(seat, seats);
            let start = self.rail(served.start, length).start;
            let end = if served.is_empty() { start } else { self.rail(served.end - 1, length).end };
            Block { start, count: end - start }
        };
        (0..seats).map(of).collect()
    }

    /// Returns the rank that serves a rail on a host.
    fn server(&self, rail: usize, host: usize) -> usize {
        let ranks = &self.work.span().hosts[host];
        ranks[self.work.rails().server(rail, ranks.len())]
    }

    fn served(&self) -> Range<usize> {
        self.work.rails().served(self.work.comm.rank, self.work.comm.nranks)
    }

    /// Reduces `count` elements of all ranks. All ranks get the result, or `root` alone.
    ///
    /// # Safety
    /// `send` holds the elements. `recv` has room for them where this rank gets the result.
    pub(super) async unsafe fn all_reduce(
        &self,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        root: Option<usize>,
    ) -> Result<()> {
        let size = self.work.size();
        let each = self.work.limits().reduction / size;
        // Only the root has a receive buffer in a reduce. So the chunks go through temporary
        // memory. There are three pieces of it, because three chunks are under way.
        let whole = if root.is_some() || self.is_flat { each.min(count) * size } else { 0 };
        let rooms = [self.work.temporary(whole), self.work.temporary(whole), self.work.temporary(whole)];
        if self.is_flat {
            for range in chunks(count, each) {
                let range = range.start..range.end.min(count);
                // SAFETY: the range lies in the buffers.
                unsafe { self.all_reduce_flat(send, recv, range, root, &rooms).await? };
            }
            return Ok(());
        }
        // Three chunks are under way: the first one is exchanged, the second one is given to all
        // hosts, and the third one is given to all ranks of the host.
        let (mut reducing, mut spreading) = (None, None);
        let ranges = chunks(count, each).map(|range| range.start..range.end.min(count));
        for (index, range) in ranges.map(Some).chain([None]).enumerate() {
            let next = match range {
                None => None,
                Some(range) => {
                    let result = match root {
                        Some(_) => rooms[index % 3].at(),
                        // SAFETY: the range lies in the buffer.
                        None => unsafe { recv.add(range.start * size) },
                    };
                    // SAFETY: the range lies in the buffers.
                    Some(unsafe { self.exchange(send.add(range.start * size), result, range, root).await? })
                }
            };
            if let Some(chunk) = std::mem::replace(&mut reducing, next) {
                // SAFETY: the buffers are still there.
                let chunk = unsafe { self.reduce_pieces(chunk, root).await? };
                if let Some(chunk) = spreading.replace(chunk) {
                    // SAFETY: as above.
                    unsafe { self.finish(chunk, recv, root).await? };
                }
            }
        }
        match spreading {
            // SAFETY: as above.
            Some(chunk) => unsafe { self.finish(chunk, recv, root).await },
            None => Ok(()),
        }
    }

    /// Reduces a chunk among the seats of this host, and begins the exchange with the other hosts.
    ///
    /// # Safety
    /// `send` and `result` hold the chunk.
    async unsafe fn exchange(
        &self,
        send: *const u8,
        result: *mut u8,
        range: Range<usize>,
        root: Option<usize>,
    ) -> Result<Chunk<'a>> {
        let (work, size, length) = (&self.work, self.work.size(), range.len());
        let partial = if work.comm.nranks == 1 {
            // SAFETY: this function's contract.
            unsafe { self.scaled(send, result, length) }
        } else {
            let blocks = self.blocks_here(length);
            // SAFETY: this function's contract; the block lies in the chunk.
            unsafe {
                let mine = result.add(blocks[work.comm.rank].start * size);
                work.reduce_here(self.reduction, send, blocks, mine).await?;
            }
            result.cast_const()
        };
        let (span, me) = (work.span(), work.span().host());
        let own: usize = self.served().map(|rail| self.piece(rail, me, length).count).sum();
        let pieces = work.temporary(own * size * (span.hosts.len() - 1));
        let mut transfers = work.transfers();
        let mut at = pieces.at();
        for rail in self.served() {
            let own = self.piece(rail, me, length).count * size;
            for host in (0..span.hosts.len()).filter(|host| *host != me) {
                // SAFETY: the temporary has room for a piece of each host.
                unsafe {
                    transfers.recv(self.server(rail, host), FIRST, at, own);
                    at = at.add(own);
                }
            }
        }
        // A host that posts the receives of the results early gets each result as soon as it is
        // made.
        let mut results = work.transfers();
        for rail in self.served().filter(|_| gets(span, root, me)) {
            for host in work.other_hosts() {
                let Block { start, count } = self.piece(rail, host, length);
                // SAFETY: the piece lies in the result. The other host sends the result of this
                // piece when it has got all of this host's partial sums, so nobody reads them any
                // more.
                unsafe { results.recv(self.server(rail, host), SECOND, result.add(start * size), count * size) };
            }
        }
        for rail in self.served() {
            for host in work.other_hosts() {
                let Block { start, count } = self.piece(rail, host, length);
                // SAFETY: the piece lies in the chunk, which nobody changes before the messages
                // have gone.
                unsafe { transfers.send(self.server(rail, host), FIRST, partial.add(start * size), count * size) };
            }
        }
        Ok(Chunk { range, partial, result, transfers, results, pieces })
    }

    /// Reduces the pieces of all hosts, and begins to give them to the hosts that need them.
    ///
    /// # Safety
    /// The buffers hold the chunk.
    async unsafe fn reduce_pieces(&self, mut chunk: Chunk<'a>, root: Option<usize>) -> Result<Chunk<'a>> {
        let (work, size, length) = (&self.work, self.work.size(), chunk.range.len());
        let (span, me) = (work.span(), work.span().host());
        work.over(&mut chunk.transfers).await?;
        let mut at = chunk.pieces.at().cast_const();
        let mut inputs = Vec::with_capacity(span.hosts.len());
        for rail in self.served() {
            let Block { start, count } = self.piece(rail, me, length);
            inputs.clear();
            for host in 0..span.hosts.len() {
                if host == me {
                    inputs.push(chunk.partial.wrapping_add(start * size));
                } else {
                    inputs.push(at);
                    at = at.wrapping_add(count * size);
                }
            }
            // SAFETY: all pieces have come, and the result has room for the chunk.
            unsafe {
                let target = Target::cached(chunk.result.add(start * size));
                reduce(work.dtype, self.op(), &inputs, &[target], count);
            }
        }
        for rail in self.served() {
            for host in work.other_hosts().filter(|host| gets(span, root, *host)) {
                let Block { start, count } = self.piece(rail, me, length);
                // SAFETY: the piece lies in the result, and nobody changes it before the messages
                // have gone.
                unsafe {
                    let from = chunk.result.add(start * size);
                    chunk.results.send(self.server(rail, host), SECOND, from, count * size);
                }
            }
        }
        Ok(chunk)
    }

    /// Gives the seats of this host the chunk, or the root where there is one.
    ///
    /// # Safety
    /// The buffers hold the chunk.
    async unsafe fn finish(&self, mut chunk: Chunk<'a>, recv: *mut u8, root: Option<usize>) -> Result<()> {
        let (work, size, length) = (&self.work, self.work.size(), chunk.range.len());
        let span = work.span();
        work.over(&mut chunk.results).await?;
        let blocks = self.blocks_here(length);
        let mine = blocks[work.comm.rank];
        // SAFETY: this function's contract.
        unsafe {
            let Some(root) = root else {
                if work.comm.nranks == 1 {
                    return Ok(());
                }
                return work.gather_here(chunk.result.add(mine.start * size), chunk.result, blocks).await;
            };
            if span.host_of[root] != span.host() {
                return Ok(());
            }
            let none = Block { start: 0, count: 0 };
            let to_root = |rank: &usize| if *rank == root { mine } else { none };
            let sends = span.here().iter().map(to_root).collect();
            let recvs = if span.rank == root { blocks } else { vec![none; blocks.len()] };
            let to = if span.rank == root { recv.add(chunk.range.start * size) } else { recv };
            work.exchange_here(chunk.result, sends, to, recvs).await
        }
    }

    /// Reduces a chunk in which each rank's elements go to the rank that reduces them.
    ///
    /// # Safety
    /// The range lies in the buffers, and the rooms have room for it.
    async unsafe fn all_reduce_flat(
        &self,
        send: *const u8,
        recv: *mut u8,
        range: Range<usize>,
        root: Option<usize>,
        rooms: &[Temporary<'a>; 3],
    ) -> Result<()> {
        let (work, size, n) = (&self.work, self.work.size(), self.work.span().nranks);
        let me = work.span().rank;
        let block = |rank: usize| {
            let (start, count) = part(range.len(), rank, n, size);
            Block { start, count }
        };
        let blocks: Vec<Block> = (0..n).map(block).collect();
        let pieces = work.temporary(blocks[me].count * n * size);
        // SAFETY: this function's contract.
        unsafe {
            let from = self.scaled(send.add(range.start * size), rooms[0].at(), range.len());
            work.exchange(from, &blocks, pieces.at(), &uniform(blocks[me].count, n), false).await?;
            let result = rooms[1].at();
            let inputs: Vec<*const u8> =
                (0..n).map(|rank| pieces.at().add(rank * blocks[me].count * size).cast_const()).collect();
            let mine = result.add(blocks[me].start * size);
            reduce(work.dtype, self.op(), &inputs, &[Target::cached(mine)], blocks[me].count);
            let Some(root) = root else {
                return work.spread(mine, recv.add(range.start * size), &blocks).await;
            };
            let none = Block { start: 0, count: 0 };
            let sends: Vec<Block> = (0..n).map(|rank| if rank == root { blocks[me] } else { none }).collect();
            let is_root = me == root;
            let to = if is_root { recv.add(range.start * size) } else { recv };
            let recvs = if is_root { blocks } else { vec![none; n] };
            work.exchange(result, &sends, to, &recvs, false).await
        }
    }
}
