//! Large all-reduce, reduce and reduce-scatter over several hosts.

use std::ops::Range;

use super::work::{FIRST, SECOND, Temporary, Work, chunks, cut, uniform};
use crate::blocks::Block;
use crate::collective::{Reduction, part};
use crate::error::Result;
use crate::reduce::{self, Target};
use crate::transfers::Transfers;
use crate::types::ReduceOp;

/// How many bytes of an all-reduce are on their way at a time.
const CHUNK_BYTES: usize = if cfg!(test) { 48 << 10 } else { 4 << 20 };

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
    /// What the ranks of this host have together.
    partial: *const u8,
    /// Where the result goes.
    result: *mut u8,
    /// The messages under way. They end before their memory goes.
    transfers: Transfers,
    /// What the other hosts have together: for each rail that this rank serves, a piece of each
    /// other host.
    pieces: Temporary<'a>,
}

impl<'a> Reducing<'a> {
    fn op(&self) -> ReduceOp {
        match self.reduction {
            Reduction::Plain(op) => op,
            Reduction::PreMulSum(_) => ReduceOp::Sum,
        }
    }

    /// Returns the elements of this rank to reduce. Where no part among the seats scales them, they
    /// are scaled to `room`.
    ///
    /// # Safety
    /// `send` holds the elements, and `room` has room for them where they are scaled.
    unsafe fn scaled(&self, send: *const u8, room: *mut u8, elements: usize) -> *const u8 {
        match self.reduction {
            Reduction::PreMulSum(scalar) => {
                // SAFETY: this function's contract.
                unsafe { reduce::scale(self.work.dtype, scalar, send, room, elements) };
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
        let each = CHUNK_BYTES / size;
        // Only the root has a receive buffer in a reduce. So the chunks go through temporary
        // memory, of which two are under way.
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
                    Some(unsafe { self.exchange(send.add(range.start * size), result, range).await? })
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
    async unsafe fn exchange(&self, send: *const u8, result: *mut u8, range: Range<usize>) -> Result<Chunk<'a>> {
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
        for rail in self.served() {
            for host in work.other_hosts() {
                let Block { start, count } = self.piece(rail, host, length);
                // SAFETY: the piece lies in the chunk, which nobody changes before the messages have
                // gone.
                unsafe { transfers.send(self.server(rail, host), FIRST, partial.add(start * size), count * size) };
            }
        }
        Ok(Chunk { range, partial, result, transfers, pieces })
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
                reduce::reduce(work.dtype, self.op(), &inputs, &[target], count);
            }
        }
        let gets = |host: usize| root.is_none_or(|root| span.host_of[root] == host);
        for rail in self.served() {
            for host in work.other_hosts() {
                let (theirs, mine) = (self.piece(rail, host, length), self.piece(rail, me, length));
                let server = self.server(rail, host);
                // SAFETY: the pieces lie in the result, and their partial sums have gone.
                unsafe {
                    if gets(me) {
                        let to = chunk.result.add(theirs.start * size);
                        chunk.transfers.recv(server, SECOND, to, theirs.count * size);
                    }
                    if gets(host) {
                        let from = chunk.result.add(mine.start * size);
                        chunk.transfers.send(server, SECOND, from, mine.count * size);
                    }
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
        work.over(&mut chunk.transfers).await?;
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
            reduce::reduce(work.dtype, self.op(), &inputs, &[Target::cached(mine)], blocks[me].count);
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

    /// Reduces the blocks of all ranks: each rank gets its own to `recv`.
    ///
    /// Each host sends a rank what its own ranks have together. The seat with that rank's seat's
    /// number, modulo the host's seats, does so.
    ///
    /// # Safety
    /// `send` holds the blocks, and `recv` has room for this rank's.
    pub(super) async unsafe fn reduce_scatter(&self, send: *const u8, recv: *mut u8, blocks: &[Block]) -> Result<()> {
        let (work, size) = (&self.work, self.work.size());
        let n = work.span().nranks;
        let most = blocks.iter().map(|block| block.count).max().unwrap_or(0);
        let each = (CHUNK_BYTES / n / size).max((64 << 10) / size);
        let mut last = None;
        for range in chunks(most, each).map(Some).chain([None]) {
            // SAFETY: the caller's contract.
            let next = match range {
                Some(range) if self.is_flat => {
                    // SAFETY: this function's contract.
                    unsafe { self.reduce_scatter_flat(send, recv, blocks, &range).await? };
                    None
                }
                // SAFETY: this function's contract.
                Some(range) => Some(unsafe { self.begin_scatter(send, recv, blocks, range).await? }),
                None => None,
            };
            if let Some(scattering) = std::mem::replace(&mut last, next) {
                // SAFETY: this function's contract.
                unsafe { self.finish_scatter(scattering).await? };
            }
        }
        Ok(())
    }

    /// Reduces a chunk of each block among the seats of this host, and begins to send the other
    /// hosts theirs.
    ///
    /// # Safety
    /// The contract of [`reduce_scatter`](Reducing::reduce_scatter).
    async unsafe fn begin_scatter(
        &self,
        send: *const u8,
        recv: *mut u8,
        blocks: &[Block],
        range: Range<usize>,
    ) -> Result<Scattering<'a>> {
        let (work, size) = (&self.work, self.work.size());
        let (span, seat, seats) = (work.span(), work.comm.rank, work.comm.nranks);
        let none = Block { start: 0, count: 0 };
        let of = |rank: Option<&usize>| rank.map_or(none, |rank| cut(blocks[*rank], &range));
        let mine = of(Some(&span.rank));
        let hosts = span.hosts.len();
        let pieces = work.temporary(mine.count * size * (hosts - 1));
        let scales = matches!(self.reduction, Reduction::PreMulSum(_));
        let served = |host: usize| span.hosts[host].iter().skip(seat).step_by(seats);
        let staged: usize = work.other_hosts().flat_map(served).map(|rank| of(Some(rank)).count).sum();
        let partials = work.temporary(if seats > 1 || scales { staged * size } else { 0 });
        let mut transfers = work.transfers();
        let mut at = pieces.at();
        for host in (0..hosts).filter(|host| *host != span.host()) {
            let ranks = &span.hosts[host];
            // SAFETY: the temporary has room for a piece of each host.
            unsafe {
                transfers.recv(ranks[seat % ranks.len()], FIRST, at, mine.count * size);
                at = at.add(mine.count * size);
            }
        }
        let mut at = partials.at();
        for host in work.other_hosts() {
            for ranks in span.hosts[host].chunks(seats) {
                let theirs: Vec<Block> = (0..seats).map(|seat| of(ranks.get(seat))).collect();
                let Block { start, count } = theirs[seat];
                // SAFETY: this function's contract, and the temporary has room for all blocks that
                // this rank serves.
                unsafe {
                    let mut from = send.add(start * size);
                    if seats > 1 {
                        work.reduce_here(self.reduction, send, theirs, at).await?;
                        from = at;
                    } else {
                        from = self.scaled(from, at, count);
                    }
                    if let Some(&rank) = ranks.get(seat) {
                        transfers.send(rank, FIRST, from, count * size);
                    }
                    at = at.wrapping_add(count * size);
                }
            }
        }
        let here: Vec<Block> = span.here().iter().map(|rank| of(Some(rank))).collect();
        let result = recv.wrapping_add((mine.start - blocks[span.rank].start) * size);
        // SAFETY: this function's contract.
        let own = unsafe {
            if seats > 1 {
                work.reduce_here(self.reduction, send, here, result).await?;
                result
            } else {
                self.scaled(send.add(mine.start * size), result, mine.count).cast_mut()
            }
        };
        Ok(Scattering { own, result, count: mine.count, pieces, _partials: partials, transfers })
    }

    /// Reduces what all hosts have of this rank's block.
    ///
    /// # Safety
    /// The contract of [`reduce_scatter`](Reducing::reduce_scatter).
    async unsafe fn finish_scatter(&self, mut chunk: Scattering<'a>) -> Result<()> {
        let (work, size) = (&self.work, self.work.size());
        work.over(&mut chunk.transfers).await?;
        let mut at = chunk.pieces.at().cast_const();
        let mut inputs = Vec::new();
        for host in 0..work.span().hosts.len() {
            if host == work.span().host() {
                inputs.push(chunk.own.cast_const());
            } else {
                inputs.push(at);
                at = at.wrapping_add(chunk.count * size);
            }
        }
        // SAFETY: all pieces have come.
        unsafe { reduce::reduce(work.dtype, self.op(), &inputs, &[Target::cached(chunk.result)], chunk.count) };
        Ok(())
    }

    /// Reduces a chunk of the blocks, of which each rank gets those of all ranks.
    ///
    /// # Safety
    /// The contract of [`reduce_scatter`](Reducing::reduce_scatter).
    async unsafe fn reduce_scatter_flat(
        &self,
        send: *const u8,
        recv: *mut u8,
        blocks: &[Block],
        range: &Range<usize>,
    ) -> Result<()> {
        let (work, size, n) = (&self.work, self.work.size(), self.work.span().nranks);
        let me = work.span().rank;
        let sends: Vec<Block> = blocks.iter().map(|block| cut(*block, range)).collect();
        let mine = sends[me];
        let pieces = work.temporary(mine.count * n * size);
        // SAFETY: this function's contract.
        unsafe {
            let (_room, from, sends) = match self.reduction {
                Reduction::Plain(_) => (None, send, sends),
                Reduction::PreMulSum(scalar) => {
                    let total: usize = sends.iter().map(|block| block.count).sum();
                    let room = work.temporary(total * size);
                    let mut start = 0;
                    let mut packed = Vec::with_capacity(n);
                    for block in &sends {
                        let (from, to) = (send.add(block.start * size), room.at().add(start * size));
                        reduce::scale(work.dtype, scalar, from, to, block.count);
                        packed.push(Block { start, count: block.count });
                        start += block.count;
                    }
                    let from = room.at().cast_const();
                    (Some(room), from, packed)
                }
            };
            work.exchange(from, &sends, pieces.at(), &uniform(mine.count, n), false).await?;
            let inputs: Vec<*const u8> =
                (0..n).map(|rank| pieces.at().add(rank * mine.count * size).cast_const()).collect();
            let to = recv.add((mine.start - blocks[me].start) * size);
            reduce::reduce(work.dtype, self.op(), &inputs, &[Target::cached(to)], mine.count);
        }
        Ok(())
    }
}

/// One chunk of a reduce-scatter under way.
struct Scattering<'a> {
    /// What the ranks of this host have together of this rank's block.
    own: *mut u8,
    /// Where the result goes.
    result: *mut u8,
    /// How many elements there are.
    count: usize,
    /// The messages under way. They end before their memory goes.
    transfers: Transfers,
    /// What each other host has of this rank's block.
    pieces: Temporary<'a>,
    /// What this rank sends to other hosts.
    _partials: Temporary<'a>,
}
