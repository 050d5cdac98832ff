//! Large reduce-scatter over several hosts.
//!
//! The ranks of a host reduce the blocks of all ranks together, and send each rank of another host
//! the result for its block. Each rank then reduces the results of all hosts for its own block. Two
//! chunks of the blocks are under way at a time.

use std::ops::Range;

use hostccl_reduce::{Target, reduce, scale};

use super::reduction::Reducing;
use super::work::{FIRST, Temporary, chunks, cut, uniform};
use crate::blocks::Block;
use crate::collective::Reduction;
use crate::error::Result;
use crate::transfers::Transfers;

/// One chunk of a reduce-scatter under way.
struct Scattering<'a> {
    /// The reduction of this rank's block over the ranks of this host.
    own: *mut u8,
    /// Where the result goes.
    result: *mut u8,
    /// How many elements there are.
    count: usize,
    /// The messages under way. This field stands before `pieces` and `_partials`, so the drop ends
    /// the messages before it gives their memory back.
    transfers: Transfers,
    /// The reduction of this rank's block over the ranks of each other host.
    pieces: Temporary<'a>,
    /// The data that this rank sends to other hosts.
    _partials: Temporary<'a>,
}

impl<'a> Reducing<'a> {
    /// Reduces the blocks of all ranks: each rank gets its own to `recv`.
    ///
    /// Each host reduces a rank's block over its own ranks and sends the rank the result. The
    /// sender is the seat of the sending host whose number is the receiver's seat number modulo the
    /// number of seats of the sending host.
    ///
    /// # Safety
    /// `send` holds the blocks, and `recv` has room for this rank's.
    pub(super) async unsafe fn reduce_scatter(&self, send: *const u8, recv: *mut u8, blocks: &[Block]) -> Result<()> {
        let (work, size) = (&self.work, self.work.size());
        let n = work.span().nranks;
        let most = blocks.iter().map(|block| block.count).max().unwrap_or(0);
        let each = (work.limits().reduction / n / size).max((64 << 10) / size);
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

    /// Reduces the results of all hosts for this rank's block.
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
        unsafe { reduce(work.dtype, self.op(), &inputs, &[Target::cached(chunk.result)], chunk.count) };
        Ok(())
    }

    /// Reduces a chunk of the blocks. Each rank gets the elements of its block from all ranks, and
    /// reduces them at once.
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
                        scale(work.dtype, scalar, from, to, block.count);
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
            reduce(work.dtype, self.op(), &inputs, &[Target::cached(to)], mine.count);
        }
        Ok(())
    }
}
