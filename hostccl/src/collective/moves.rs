//! Moves and reduces one rank's data in each chunk of a collective, between the caller's buffers
//! and the slots.

use std::cell::Cell;
use std::sync::Arc;

use hostccl_reduce::{Target, reduce, scale};

use super::call::{Call, Kind, Reduction};
use super::copy::{copy_own, copy_result, copy_twice};
use super::descriptor::{Descriptor, Small};
use super::pipeline::{Pipeline, part};
use crate::comm::Comm;
use crate::segment::SLOTS;

/// Among at most this many ranks, the list of a small reduction's inputs is on the stack, so
/// nothing is allocated.
const FEW: usize = 16;

/// The arguments of a collective, how it is cut, and where its slots are.
pub(super) struct Moves {
    /// The communicator.
    pub(super) comm: Arc<Comm>,
    /// The arguments, among them the caller's buffers.
    pub(super) call: Call,
    /// How the call is cut into chunks.
    pub(super) pipeline: Pipeline,
    /// The communicator's step in which the first stage took place.
    pub(super) first_step: u64,
    /// Where the inputs of a reduction lie. The list is kept, so that only the first reduction of
    /// a call allocates.
    pub(super) inputs: Vec<*const u8>,
    /// This rank's data, where [`Pipeline::small`] says that two ranks hand their data over. It
    /// goes out at the end of the first stage.
    pub(super) small: Cell<Small>,
}

impl Moves {
    fn element_size(&self) -> usize {
        self.call.dtype.size()
    }

    /// Whether this rank gets or gives the whole data. In a collective without a root, every rank
    /// does.
    fn is_root(&self) -> bool {
        self.call.root.is_none_or(|root| root == self.comm.rank)
    }

    /// Returns where the data of `rank` lies for a chunk: in its slot, or, where the data is small,
    /// among the bytes that `rank` hands over.
    pub(super) fn slot(&self, rank: usize, chunk: usize) -> *mut u8 {
        let step = self.first_step + chunk as u64;
        match self.pipeline.small {
            true if rank == self.comm.rank => self.small.as_ptr().cast(),
            true => Descriptor::small_data(&self.comm, rank, step + 1),
            false => self.comm.segment.data(rank, (step % SLOTS as u64) as usize),
        }
    }

    /// Returns the place of this rank's result at an offset in bytes. A rank that gets no result
    /// does not write there.
    fn result(&self, offset: usize) -> Target {
        Target { at: self.call.recv.wrapping_add(offset), stream: self.pipeline.stream }
    }

    /// Copies this rank's elements to staging memory, scaled where the reduction says so.
    unsafe fn stage_elements(&self, from: *const u8, to: *mut u8, elements: usize) {
        // SAFETY: both sides hold that many elements. They do not overlap, because one is the
        // caller's buffer, and the other is in the segment or is `small`.
        unsafe {
            match self.call.reduction {
                Some(Reduction::PreMulSum(scalar)) => scale(self.call.dtype, scalar, from, to, elements),
                _ => std::ptr::copy_nonoverlapping(from, to, elements * self.element_size()),
            }
        }
    }

    /// Copies or scales the input to the result, in a communicator of one rank.
    pub(super) unsafe fn copy_alone(&self) {
        let bytes = self.call.count * self.element_size();
        // SAFETY: the caller's buffers hold that much, and are either one buffer or apart.
        unsafe {
            match self.call.reduction {
                Some(Reduction::PreMulSum(scalar)) => {
                    scale(self.call.dtype, scalar, self.call.send, self.call.recv, self.call.count);
                }
                _ if self.call.send != self.call.recv => std::ptr::copy(self.call.send, self.call.recv, bytes),
                _ => {}
            }
        }
    }

    /// In an all-reduce or reduce: copies a chunk to this rank's slot, except the part that only
    /// this rank reads.
    #[inline]
    pub(super) unsafe fn stage_for_reduction(&self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (size, slot) = (self.element_size(), self.slot(self.comm.rank, chunk));
        let (own, own_length) = if self.call.own_from_send() && !self.pipeline.direct {
            part(length, self.comm.rank, self.comm.nranks, size)
        } else {
            (length, 0)
        };
        let rest = own + own_length;
        // SAFETY: the chunk lies in the send buffer, and fits the slot.
        unsafe {
            let from = self.call.send.add(start * size);
            self.stage_elements(from, slot, own);
            self.stage_elements(from.add(rest * size), slot.add(rest * size), length - rest);
        }
    }

    /// In a small all-reduce or reduce: reduces everything from the slots, in the order of the
    /// ranks.
    #[inline]
    pub(super) unsafe fn reduce_whole(&self) {
        if !self.is_root() {
            return;
        }
        let nranks = self.comm.nranks;
        let (mut few, mut many) = ([std::ptr::null::<u8>(); FEW], Vec::new());
        let inputs = match few.get_mut(..nranks) {
            Some(few) => few,
            None => {
                many.resize(nranks, std::ptr::null());
                &mut many[..]
            }
        };
        inputs.iter_mut().enumerate().for_each(|(rank, input)| *input = self.slot(rank, 0));
        // SAFETY: every slot holds `count` elements, and all ranks have ended the step in which
        // they wrote them.
        unsafe { reduce(self.call.dtype, self.call.op(), inputs, &[Target::cached(self.call.recv)], self.call.count) };
    }

    /// In an all-reduce or reduce: reduces this rank's part of a chunk, and leaves the result in
    /// this rank's slot for the others.
    pub(super) unsafe fn reduce_own_part(&mut self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (rank, size) = (self.comm.rank, self.element_size());
        let (own, own_length) = part(length, rank, self.comm.nranks, size);
        if own_length == 0 {
            return;
        }
        // SAFETY: the part lies inside every slot, the send buffer and, where there is one, the
        // receive buffer. In this step only this rank touches its part in any slot.
        unsafe {
            let mine = self.slot(rank, chunk).add(own * size);
            let own_input = self.call.own_from_send().then(|| self.call.send.add((start + own) * size));
            self.gather_inputs(chunk, own * size, own_input);
            let result = self.result((start + own) * size);
            let targets = match self.call.kind {
                Kind::AllReduce => &[result, Target::cached(mine)][..],
                _ if self.is_root() => &[result],
                _ => &[Target::cached(mine)],
            };
            reduce(self.call.dtype, self.call.op(), &self.inputs, targets, own_length);
        }
    }

    /// Lists the inputs of a reduction: the bytes at `offset` of every rank's slot of a chunk, with
    /// `own`, where there is one, in place of this rank's slot.
    unsafe fn gather_inputs(&mut self, chunk: usize, offset: usize, own: Option<*const u8>) {
        self.inputs.clear();
        self.inputs.reserve_exact(self.comm.nranks);
        for rank in 0..self.comm.nranks {
            // SAFETY: the caller passes an offset inside the slot.
            let staged = unsafe { self.slot(rank, chunk).add(offset).cast_const() };
            self.inputs.push(own.filter(|_| rank == self.comm.rank).unwrap_or(staged));
        }
    }

    /// In an all-reduce or reduce: copies out the parts that the other ranks have reduced.
    pub(super) unsafe fn copy_reduced_parts(&self, chunk: usize) {
        if !self.is_root() {
            return;
        }
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (n, size) = (self.comm.nranks, self.element_size());
        // Each rank begins with another part, so that the ranks do not all read the same cache
        // lines at once.
        for rank in (1..n).map(|k| (self.comm.rank + k) % n) {
            let (first, elements) = part(length, rank, n, size);
            // SAFETY: the part lies in the slot. It lies in the receive buffer, too, because the
            // chunk does.
            unsafe {
                let to = self.result((start + first) * size);
                copy_result(self.slot(rank, chunk).add(first * size), to, elements * size);
            }
        }
    }

    /// In the other collectives: copies a chunk of this rank's data to the slots from which the
    /// other ranks read it.
    pub(super) unsafe fn stage_outgoing(&self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.element_size(), self.call.count);
        let pitch = self.pipeline.chunk_len * size;
        let send = self.call.send;
        // SAFETY: the pipeline's ranges lie in the caller's buffers and in the slots. A rank's own
        // part of the two buffers is one memory or apart. Only the owner writes a slot, and in a
        // scatter only the root does.
        unsafe {
            // Copies this rank's own data from its send buffer to its receive buffer.
            let keep = |from: usize, to: usize| {
                copy_own(send.add((from + start) * size), self.result((to + start) * size), length * size);
            };
            // Copies this rank's chunk to its slot and to its receive buffer.
            let stage_and_keep = |to: usize| {
                let own = self.result((to + start) * size);
                copy_twice(send.add(start * size), self.slot(me, chunk), own, length * size);
            };
            match self.call.kind {
                Kind::Broadcast if self.is_root() => stage_and_keep(0),
                Kind::AllGather => stage_and_keep(me * count),
                Kind::Gather if self.is_root() => keep(0, me * count),
                Kind::Gather => self.stage_elements(send.add(start * size), self.slot(me, chunk), length),
                Kind::AllToAll | Kind::ReduceScatter => {
                    for rank in 0..n {
                        if rank == me && self.call.own_from_send() {
                            continue;
                        }
                        let from = send.add((rank * count + start) * size);
                        self.stage_elements(from, self.slot(me, chunk).add(rank * pitch), length);
                    }
                    if self.call.kind == Kind::AllToAll {
                        keep(me * count, me * count);
                    }
                }
                Kind::Scatter if self.is_root() => {
                    for rank in (0..n).filter(|&rank| rank != me) {
                        self.stage_elements(send.add((rank * count + start) * size), self.slot(rank, chunk), length);
                    }
                    keep(me * count, 0);
                }
                _ => {}
            }
        }
    }

    /// In the other collectives: copies or reduces a chunk of the other ranks' data from their
    /// slots.
    pub(super) unsafe fn take_incoming(&mut self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.element_size(), self.call.count);
        let pitch = self.pipeline.chunk_len * size;
        // SAFETY: as in `stage_outgoing`, and all ranks have ended the step in which they wrote
        // the chunk.
        unsafe {
            let copy = |from: *mut u8, to: usize| {
                copy_result(from, self.result((to + start) * size), length * size);
            };
            let others = (1..n).map(|k| (me + k) % n);
            match self.call.kind {
                Kind::Broadcast if !self.is_root() => copy(self.slot(self.call.root.unwrap_or(0), chunk), 0),
                Kind::AllGather => others.for_each(|rank| copy(self.slot(rank, chunk), rank * count)),
                Kind::Gather if self.is_root() => others.for_each(|rank| copy(self.slot(rank, chunk), rank * count)),
                Kind::AllToAll => others.for_each(|rank| copy(self.slot(rank, chunk).add(me * pitch), rank * count)),
                Kind::Scatter if !self.is_root() => copy(self.slot(me, chunk), 0),
                Kind::ReduceScatter if length > 0 => {
                    let own = self.call.own_from_send().then(|| self.call.send.add((me * count + start) * size));
                    self.gather_inputs(chunk, me * pitch, own);
                    reduce(self.call.dtype, self.call.op(), &self.inputs, &[self.result(start * size)], length);
                }
                _ => {}
            }
        }
    }
}
