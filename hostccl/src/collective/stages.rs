//! What one rank does in each stage of each collective.

use super::{Call, Collective, Kind, Reduction};
use crate::copy::{self, STREAM_BYTES};
use crate::reduce::{self, Target};
use crate::segment::{LINE, Layout, SLOTS};
use crate::types::ReduceOp;

/// How a call is cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) stages: usize,
    /// Elements of `count` in each chunk but the last.
    chunk: usize,
    chunks: usize,
    /// All-reduce in one exchange: every rank reduces everything.
    direct: bool,
    /// Results bypass the caches.
    stream: bool,
}

/// The most bytes that one rank reads to reduce everything by itself. Beyond it, sharing the work out and waiting once
/// more for the results is faster.
const DIRECT_BYTES: usize = 64 << 10;

impl Plan {
    pub(super) fn new(call: &Call, layout: &Layout) -> Plan {
        let size = call.dtype.size();
        let n = layout.nranks;
        if n == 1 {
            return Plan { stages: 1, chunk: call.count, chunks: 1, direct: true, stream: false };
        }
        let line = LINE / size;
        let whole = layout.slot_bytes / size;
        // As many elements for each rank as fit with every rank's part on lines of its own.
        let part = layout.slot_bytes / n / LINE * line;
        let direct = matches!(call.kind, Kind::AllReduce | Kind::Reduce)
            && call.count.saturating_mul(size * n) <= DIRECT_BYTES.min(layout.slot_bytes);
        let (most, depth) = match call.kind {
            Kind::AllReduce | Kind::Reduce if direct => (whole, 2),
            Kind::AllReduce | Kind::Reduce => (part * n, 3),
            Kind::ReduceScatter | Kind::AllToAll => (part, 2),
            Kind::Broadcast | Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::Split => (whole, 2),
        };
        let chunks = call.count.div_ceil(most).max(1);
        // Chunks of one size rather than a short last one.
        let chunk = call.count.div_ceil(chunks).next_multiple_of(line).min(most);
        // The longest result: each rank's own, or one rank's of all.
        let stream = call.count.saturating_mul(size * n) >= STREAM_BYTES;
        Plan { stages: chunks + depth - 1, chunk, chunks, direct, stream }
    }

    /// First element and length of a chunk.
    fn range(&self, chunk: usize, count: usize) -> (usize, usize) {
        let start = (chunk * self.chunk).min(count);
        (start, self.chunk.min(count - start))
    }
}

/// First element and length of the part of `rank` in a chunk of `length` elements. Parts start on cache lines, so that no
/// two ranks write to one.
fn part(length: usize, rank: usize, nranks: usize, size: usize) -> (usize, usize) {
    let each = length.div_ceil(nranks).next_multiple_of(LINE / size);
    let start = (rank * each).min(length);
    (start, each.min(length - start))
}

impl Collective {
    /// What the others wait for in this stage.
    ///
    /// # Safety
    /// The call's buffers are valid, and all ranks have ended the steps of the stages before this one.
    pub(super) unsafe fn front(&mut self) {
        let (stage, chunks) = (self.stage, self.plan.chunks);
        // SAFETY: passed on; each function touches the slots as the step protocol says.
        unsafe {
            if self.comm.nranks == 1 {
                return self.alone();
            }
            match self.call.kind {
                Kind::AllReduce | Kind::Reduce if self.plan.direct && stage > 0 => self.reduce_all(),
                Kind::AllReduce | Kind::Reduce => {
                    if stage == 0 {
                        self.stage_all(0);
                    } else if stage <= chunks {
                        self.reduce_part(stage - 1);
                    } else {
                        self.collect_parts(chunks - 1);
                    }
                }
                Kind::Split => {}
                _ if stage == 0 => self.give(0),
                _ if stage == chunks => self.take(chunks - 1),
                _ => {}
            }
        }
    }

    /// What this rank does in this stage after it has counted itself in.
    ///
    /// # Safety
    /// As for [`Self::front`].
    pub(super) unsafe fn behind(&mut self) {
        let (stage, chunks) = (self.stage, self.plan.chunks);
        // SAFETY: passed on, as in `front`.
        unsafe {
            match self.call.kind {
                Kind::AllReduce | Kind::Reduce => {
                    // What is longest in the caches first.
                    if stage >= 2 {
                        self.collect_parts(stage - 2);
                    }
                    if stage + 1 < chunks {
                        self.stage_all(stage + 1);
                    }
                }
                Kind::Split => {}
                _ => {
                    if stage >= 1 {
                        self.take(stage - 1);
                    }
                    if stage + 1 < chunks {
                        self.give(stage + 1);
                    }
                }
            }
        }
    }

    fn size(&self) -> usize {
        self.call.dtype.size()
    }

    fn is_root(&self) -> bool {
        self.call.root.is_none_or(|root| root == self.comm.rank)
    }

    /// Data of `rank`'s slot for a chunk.
    fn slot(&self, rank: usize, chunk: usize) -> *mut u8 {
        self.comm.segment.data(rank, ((self.first + chunk as u64) % SLOTS as u64) as usize)
    }

    /// Copies this rank's elements to staging memory, scaled where the reduction says so.
    unsafe fn stage(&self, from: *const u8, to: *mut u8, elements: usize) {
        // SAFETY: both sides hold that many elements and do not overlap: one is the caller's, the other the segment.
        unsafe {
            match self.call.reduction {
                Some(Reduction::PreMulSum(scalar)) => reduce::scale(self.call.dtype, scalar, from, to, elements),
                _ => std::ptr::copy_nonoverlapping(from, to, elements * self.size()),
            }
        }
    }

    /// Copies from staging memory to the result.
    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: both sides hold that many bytes and do not overlap, as in `stage`.
        unsafe {
            if self.plan.stream {
                copy::stream(from, to, bytes);
            } else {
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    }

    /// Whether this rank's own elements can be read from its send buffer rather than from its slot.
    fn own_from_send(&self) -> bool {
        !matches!(self.call.reduction, Some(Reduction::PreMulSum(_)))
    }

    fn op(&self) -> ReduceOp {
        match self.call.reduction {
            Some(Reduction::Plain(op)) => op,
            _ => ReduceOp::Sum,
        }
    }

    /// A communicator of one rank: the result is the input.
    unsafe fn alone(&self) {
        let bytes = self.call.count * self.size();
        // SAFETY: the caller's buffers hold that much and are the same or apart.
        unsafe {
            match self.call.reduction {
                Some(Reduction::PreMulSum(scalar)) => {
                    reduce::scale(self.call.dtype, scalar, self.call.send, self.call.recv, self.call.count);
                }
                _ if self.call.send != self.call.recv => std::ptr::copy(self.call.send, self.call.recv, bytes),
                _ => {}
            }
        }
    }

    /// All-reduce and reduce: copies a chunk in, but for what only this rank will read.
    unsafe fn stage_all(&self, chunk: usize) {
        let (start, length) = self.plan.range(chunk, self.call.count);
        let (size, slot) = (self.size(), self.slot(self.comm.rank, chunk));
        let (own, own_length) = if self.own_from_send() && !self.plan.direct {
            part(length, self.comm.rank, self.comm.nranks, size)
        } else {
            (length, 0)
        };
        let rest = own + own_length;
        // SAFETY: the chunk lies in the send buffer and fits the slot.
        unsafe {
            let from = self.call.send.add(start * size);
            self.stage(from, slot, own);
            self.stage(from.add(rest * size), slot.add(rest * size), length - rest);
        }
    }

    /// Small all-reduce and reduce: reduces everything from the slots, in rank order.
    unsafe fn reduce_all(&mut self) {
        if !self.is_root() {
            return;
        }
        self.inputs.clear();
        for rank in 0..self.comm.nranks {
            self.inputs.push(self.slot(rank, 0));
        }
        // SAFETY: every slot holds `count` elements, and all ranks have ended that step.
        unsafe {
            reduce::reduce(self.call.dtype, self.op(), &self.inputs, &[Target::cached(self.call.recv)], self.call.count)
        };
    }

    /// All-reduce and reduce: reduces this rank's part of a chunk and leaves it in its slot for the others.
    unsafe fn reduce_part(&mut self, chunk: usize) {
        let (start, length) = self.plan.range(chunk, self.call.count);
        let (rank, size) = (self.comm.rank, self.size());
        let (own, own_length) = part(length, rank, self.comm.nranks, size);
        if own_length == 0 {
            return;
        }
        // SAFETY: the part lies inside every slot, the send buffer and, where there is one, the receive buffer. In this
        // step only this rank touches its part in any slot.
        unsafe {
            let mine = self.slot(rank, chunk).add(own * size);
            let own_input = if self.own_from_send() { self.call.send.add((start + own) * size) } else { mine };
            self.gather_inputs(chunk, own * size, own_input);
            let result = Target { at: self.call.recv.wrapping_add((start + own) * size), stream: self.plan.stream };
            let targets = match self.call.kind {
                Kind::AllReduce => &[result, Target::cached(mine)][..],
                _ if self.is_root() => &[result],
                _ => &[Target::cached(mine)],
            };
            reduce::reduce(self.call.dtype, self.op(), &self.inputs, targets, own_length);
        }
    }

    /// The same place in every rank's slot of a chunk, but for this rank's own input.
    unsafe fn gather_inputs(&mut self, chunk: usize, offset: usize, own: *const u8) {
        self.inputs.clear();
        for rank in 0..self.comm.nranks {
            // SAFETY: the offset is inside a slot.
            let input = if rank == self.comm.rank { own } else { unsafe { self.slot(rank, chunk).add(offset) } };
            self.inputs.push(input);
        }
    }

    /// All-reduce and reduce: copies out the parts that the other ranks have reduced.
    unsafe fn collect_parts(&self, chunk: usize) {
        if !self.is_root() {
            return;
        }
        let (start, length) = self.plan.range(chunk, self.call.count);
        let (n, size) = (self.comm.nranks, self.size());
        // Each rank starts with another, so that they do not all read the same lines at once.
        for rank in (1..n).map(|k| (self.comm.rank + k) % n) {
            let (first, elements) = part(length, rank, n, size);
            // SAFETY: the part lies in the slot and, being of the chunk, in the receive buffer.
            unsafe {
                let to = self.call.recv.add((start + first) * size);
                self.copy_out(self.slot(rank, chunk).add(first * size), to, elements * size);
            }
        }
    }

    /// The other collectives: copies a chunk of this rank's data to where its readers look.
    unsafe fn give(&self, chunk: usize) {
        let (start, length) = self.plan.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.size(), self.call.count);
        let pitch = self.plan.chunk * size;
        let (send, recv) = (self.call.send, self.call.recv);
        // SAFETY: every range lies in the caller's buffers and the slots by the plan; own parts are the same memory or
        // apart, and `copy` allows both. Slots are written by their owner, in a scatter by the root alone.
        unsafe {
            let keep = |from: usize, to: usize| {
                let (from, to) = (send.add((from + start) * size), recv.add((to + start) * size));
                if from != to {
                    std::ptr::copy(from, to, length * size);
                }
            };
            match self.call.kind {
                Kind::Broadcast if self.is_root() => {
                    self.stage(send.add(start * size), self.slot(me, chunk), length);
                    keep(0, 0);
                }
                Kind::AllGather => {
                    self.stage(send.add(start * size), self.slot(me, chunk), length);
                    keep(0, me * count);
                }
                Kind::Gather if self.is_root() => keep(0, me * count),
                Kind::Gather => self.stage(send.add(start * size), self.slot(me, chunk), length),
                Kind::AllToAll | Kind::ReduceScatter => {
                    for rank in 0..n {
                        if rank == me && self.own_from_send() {
                            continue;
                        }
                        let from = send.add((rank * count + start) * size);
                        self.stage(from, self.slot(me, chunk).add(rank * pitch), length);
                    }
                    if self.call.kind == Kind::AllToAll {
                        keep(me * count, me * count);
                    }
                }
                Kind::Scatter if self.is_root() => {
                    for rank in (0..n).filter(|&rank| rank != me) {
                        self.stage(send.add((rank * count + start) * size), self.slot(rank, chunk), length);
                    }
                    keep(me * count, 0);
                }
                _ => {}
            }
        }
    }

    /// The other collectives: copies or reduces out what the others gave.
    unsafe fn take(&mut self, chunk: usize) {
        let (start, length) = self.plan.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.size(), self.call.count);
        let pitch = self.plan.chunk * size;
        let recv = self.call.recv;
        // SAFETY: as in `give`; all ranks have ended the chunk's step.
        unsafe {
            let copy = |from: *mut u8, to: usize| {
                self.copy_out(from, recv.add((to + start) * size), length * size);
            };
            let others = (1..n).map(|k| (me + k) % n);
            match self.call.kind {
                Kind::Broadcast if !self.is_root() => copy(self.slot(self.call.root.unwrap_or(0), chunk), 0),
                Kind::AllGather => others.for_each(|rank| copy(self.slot(rank, chunk), rank * count)),
                Kind::Gather if self.is_root() => others.for_each(|rank| copy(self.slot(rank, chunk), rank * count)),
                Kind::AllToAll => others.for_each(|rank| copy(self.slot(rank, chunk).add(me * pitch), rank * count)),
                Kind::Scatter if !self.is_root() => copy(self.slot(me, chunk), 0),
                Kind::ReduceScatter if length > 0 => {
                    let mine = self.slot(me, chunk).add(me * pitch);
                    let own = if self.own_from_send() { self.call.send.add((me * count + start) * size) } else { mine };
                    self.gather_inputs(chunk, me * pitch, own);
                    let out = Target { at: recv.add(start * size), stream: self.plan.stream };
                    reduce::reduce(self.call.dtype, self.op(), &self.inputs, &[out], length);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_chunk_without_sharing_a_line() {
        for size in [1, 2, 4, 8] {
            for nranks in 1..=9 {
                for length in [0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096] {
                    let mut next = 0;
                    for rank in 0..nranks {
                        let (start, elements) = part(length, rank, nranks, size);
                        assert_eq!(start, next);
                        assert!(elements == 0 || start * size % LINE == 0);
                        next = start + elements;
                    }
                    assert_eq!(next, length);
                }
            }
        }
    }

    #[test]
    fn chunks_cover_any_count_and_fit_their_slots() {
        for nranks in [2, 3, 8, 64, 1024] {
            let layout = Layout::new(nranks);
            let n = nranks as usize;
            for kind in [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll] {
                for dtype in crate::types::DataType::ALL {
                    for count in [0, 1, 1000, 65_537, 10_000_001] {
                        let call = Call {
                            kind,
                            send: std::ptr::null(),
                            recv: std::ptr::null_mut(),
                            count,
                            dtype,
                            reduction: None,
                            root: None,
                        };
                        let plan = Plan::new(&call, &layout);
                        let covered: usize = (0..plan.chunks).map(|chunk| plan.range(chunk, count).1).sum();
                        assert_eq!(covered, count, "{kind:?} {nranks} ranks");
                        let parts = if matches!(kind, Kind::ReduceScatter | Kind::AllToAll) { n } else { 1 };
                        assert!(plan.chunk * parts * dtype.size() <= layout.slot_bytes);
                        if kind == Kind::AllReduce && !plan.direct {
                            let (start, elements) = part(plan.chunk, n - 1, n, dtype.size());
                            assert!((start + elements) * dtype.size() <= layout.slot_bytes);
                        }
                        assert!(plan.stages >= 2, "every call meets its peers at least once");
                    }
                }
            }
        }
    }
}
