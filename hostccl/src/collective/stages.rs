//! The work of one rank in each stage of a collective.

use std::sync::Arc;

use super::call::{Call, Kind, Reduction};
use super::direct::{Direct, Piece, keep_rest, piece_of};
use super::pipeline::{Pipeline, part};
use super::ragged::Ragged;
use crate::comm::Comm;
use crate::copy;
use crate::error::Result;
use crate::reduce::{self, Target};
use crate::segment::SLOTS;

/// The work of one rank in a collective.
pub(super) struct Stages {
    /// The communicator.
    pub(super) comm: Arc<Comm>,
    /// The arguments, among them the caller's buffers.
    call: Call,
    /// How the call is cut into chunks.
    pipeline: Pipeline,
    /// The number of the stage in which the rank is.
    pub(super) stage: usize,
    /// The communicator's step in which the first stage took place.
    pub(super) first_step: u64,
    /// Where the inputs of a reduction lie. The list is kept, so that a reduction allocates
    /// nothing.
    inputs: Vec<*const u8>,
    /// The counts, where each rank has its own.
    ragged: Option<Box<Ragged>>,
    /// The reads of the other ranks' buffers.
    pub(super) direct: Direct,
}

// SAFETY: the buffers are the caller's, who promises that they are valid while the call is under
// way, on whatever thread.
unsafe impl Send for Stages {}

impl Drop for Stages {
    fn drop(&mut self) {
        self.direct.take_back(&self.comm);
    }
}

impl Stages {
    /// Returns the work of a call in its first stage.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the work is dropped.
    #[inline(always)]
    pub(super) unsafe fn new(comm: Arc<Comm>, call: Call, ragged: Option<Box<Ragged>>) -> Stages {
        let pipeline = Pipeline::new(&call, comm.segment.layout());
        let inputs = Vec::with_capacity(comm.nranks);
        let direct = Direct::new(&call, ragged.is_none() && pipeline.chunks < 2);
        Stages { comm, call, pipeline, stage: 0, first_step: 0, inputs, ragged, direct }
    }

    /// Agrees with the other ranks, in the second stage, on whether the ranks read each other's
    /// buffers. In a collective in which each rank has a count of its own, the ranks first agree on
    /// the counts and on the number of chunks. Ends the communicator when the counts do not fit
    /// together.
    ///
    /// # Safety
    /// All ranks have ended the steps of the stages before this one.
    #[inline]
    pub(super) unsafe fn agree(&mut self) -> Result<()> {
        let Some(mut ragged) = self.ragged.take() else {
            if self.direct.is_lending() {
                // SAFETY: this function's contract.
                unsafe { self.decide() };
            }
            return Ok(());
        };
        // SAFETY: this function's contract.
        let agreed = unsafe { ragged.agree(&self.comm, &self.call, |rank| self.slot(rank, 0)) };
        let most = ragged.most_read();
        self.ragged = Some(ragged);
        self.pipeline.chunks = agreed?;
        self.pipeline.stages = self.pipeline.chunks + 1;
        if self.pipeline.chunks > 1 {
            self.direct.decide(&self.comm, most);
        }
        Ok(())
    }

    /// Decides whether the ranks read each other's buffers, where all ranks have one count.
    ///
    /// # Safety
    /// The contract of [`agree`](Stages::agree).
    #[cold]
    unsafe fn decide(&mut self) {
        let pieces =
            (0..self.comm.nranks).filter(|rank| *rank != self.comm.rank).filter_map(|rank| self.piece_of(rank));
        self.direct.decide(&self.comm, pieces.map(|piece| piece.bytes).sum());
        if !self.direct.is_agreed() && self.pipeline.chunks > 1 {
            // The rank has not staged the second chunk yet.
            // SAFETY: the rank has not ended the second step.
            unsafe { self.stage_outgoing(1) };
        }
    }

    /// Returns what this rank reads from the memory of `rank`: all but the first chunk.
    fn piece_of(&self, rank: usize) -> Option<Piece> {
        match &self.ragged {
            Some(ragged) => Some(ragged.piece_of(rank, &self.call)),
            None => piece_of(&self.comm, &self.call, rank, self.pipeline.chunk_len),
        }
    }

    /// Does the work of a stage in which the ranks read each other's buffers, or of the last one.
    /// Returns false where some rank could not read, so that the work begins again.
    ///
    /// # Safety
    /// The contract of [`critical`](Stages::critical).
    #[cold]
    unsafe fn read(&mut self) -> bool {
        if !self.direct.reads_in(self.stage) {
            let is_done = self.direct.finish(&self.comm);
            if !is_done {
                (self.stage, self.first_step) = (0, self.comm.step());
            }
            return is_done;
        }
        // SAFETY: this function's contract; the pieces lie in this rank's receive buffer.
        unsafe {
            if self.stage == 1 {
                match &self.ragged {
                    Some(_) => self.take_ragged(0),
                    None => self.take_incoming(0),
                }
                keep_rest(self.comm.rank, &self.call, self.pipeline.chunk_len, |from, to, bytes| {
                    self.copy_result(from, to, bytes);
                });
            }
            let mut direct = self.direct;
            direct.read(&self.comm, self.stage, |rank| self.piece_of(rank));
            self.direct = direct;
        }
        true
    }

    /// Whether the rank is in the last stage, which ends no step.
    #[inline]
    pub(super) fn is_last(&self) -> bool {
        match self.direct.is_agreed() {
            true => !self.direct.reads_in(self.stage),
            false => self.stage + 1 == self.pipeline.stages,
        }
    }

    /// Does the work of this stage for which the peers wait. It comes before the end of the step.
    ///
    /// # Safety
    /// All ranks have ended the steps of the stages before this one.
    #[inline]
    pub(super) unsafe fn critical(&mut self) {
        // SAFETY: this function's contract.
        if self.direct.is_agreed() && unsafe { self.read() } {
            return;
        }
        let (stage, chunks) = (self.stage, self.pipeline.chunks);
        // SAFETY: this function's contract; each function touches the slots as the module
        // documentation says.
        unsafe {
            if self.comm.nranks == 1 {
                return self.copy_alone();
            }
            if stage == 0 {
                let (ragged, call) = (&self.ragged, &self.call);
                let is_apart = || ragged.as_ref().is_none_or(|ragged| ragged.is_apart(call));
                self.direct.lend(&self.comm, call, is_apart);
            }
            if self.ragged.is_some() {
                if stage == 0 {
                    let slot = self.slot(self.comm.rank, 0);
                    if let Some(ragged) = &mut self.ragged {
                        ragged.post(&self.comm, &self.call, slot);
                    }
                    self.stage_ragged(0);
                } else if stage == 1 && chunks > 1 {
                    self.stage_ragged(1);
                } else if stage == chunks {
                    self.take_ragged(chunks - 1);
                }
                return;
            }
            match self.call.kind {
                Kind::AllReduce | Kind::Reduce if self.pipeline.direct && stage > 0 => self.reduce_whole(),
                Kind::AllReduce | Kind::Reduce => {
                    if stage == 0 {
                        self.stage_for_reduction(0);
                    } else if stage <= chunks {
                        self.reduce_own_part(stage - 1);
                    } else {
                        self.copy_reduced_parts(chunks - 1);
                    }
                }
                Kind::Split | Kind::Grow => {}
                _ if stage == 0 => self.stage_outgoing(0),
                _ if stage == chunks => self.take_incoming(chunks - 1),
                _ => {}
            }
        }
    }

    /// Does the work of this stage for which nobody waits yet. It comes after the end of the step.
    ///
    /// # Safety
    /// All ranks have ended the steps of the stages before this one.
    #[inline]
    pub(super) unsafe fn overlapped(&mut self) {
        let (stage, chunks) = (self.stage, self.pipeline.chunks);
        // A rank that has lent its buffer stages no second chunk before the ranks have agreed.
        if self.direct.is_agreed() || stage == 0 && self.direct.is_lending() {
            return;
        }
        // SAFETY: as in `critical`.
        unsafe {
            if self.ragged.is_some() {
                if stage >= 1 {
                    self.take_ragged(stage - 1);
                    if stage + 1 < chunks {
                        self.stage_ragged(stage + 1);
                    }
                }
                return;
            }
            match self.call.kind {
                Kind::AllReduce | Kind::Reduce => {
                    // The older chunk comes first, because it leaves the caches first.
                    if stage >= 2 {
                        self.copy_reduced_parts(stage - 2);
                    }
                    if stage + 1 < chunks {
                        self.stage_for_reduction(stage + 1);
                    }
                }
                Kind::Split | Kind::Grow => {}
                _ => {
                    if stage >= 1 {
                        self.take_incoming(stage - 1);
                    }
                    if stage + 1 < chunks {
                        self.stage_outgoing(stage + 1);
                    }
                }
            }
        }
    }

    /// Copies a chunk of a collective in which each rank has a count of its own to this rank's
    /// slot.
    unsafe fn stage_ragged(&self, chunk: usize) {
        let Some(ragged) = &self.ragged else { return };
        // SAFETY: as in `critical`.
        unsafe { ragged.stage(&self.comm, &self.call, chunk, self.slot(self.comm.rank, chunk)) }
    }

    /// Copies or reduces a chunk of such a collective from the slots of the other ranks.
    unsafe fn take_ragged(&mut self, chunk: usize) {
        let mut inputs = std::mem::take(&mut self.inputs);
        if let Some(ragged) = &self.ragged {
            // SAFETY: as in `critical`.
            unsafe { ragged.take(&self.comm, &self.call, chunk, |rank| self.slot(rank, chunk), &mut inputs) }
        }
        self.inputs = inputs;
    }

    fn element_size(&self) -> usize {
        self.call.dtype.size()
    }

    /// Whether this rank gets or gives the whole data. In a collective without a root, every rank
    /// does.
    fn is_root(&self) -> bool {
        self.call.root.is_none_or(|root| root == self.comm.rank)
    }

    /// Returns the data of `rank`'s slot for a chunk.
    fn slot(&self, rank: usize, chunk: usize) -> *mut u8 {
        self.comm.segment.data(rank, ((self.first_step + chunk as u64) % SLOTS as u64) as usize)
    }

    /// Copies this rank's elements to staging memory, scaled where the reduction says so.
    unsafe fn stage_elements(&self, from: *const u8, to: *mut u8, elements: usize) {
        // SAFETY: both sides hold that many elements. They do not overlap, because one is the
        // caller's buffer and the other is in the segment.
        unsafe {
            match self.call.reduction {
                Some(Reduction::PreMulSum(scalar)) => reduce::scale(self.call.dtype, scalar, from, to, elements),
                _ => std::ptr::copy_nonoverlapping(from, to, elements * self.element_size()),
            }
        }
    }

    /// Copies from staging memory to the caller's buffer.
    unsafe fn copy_result(&self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: both sides hold that many bytes and do not overlap, as in `stage_elements`.
        unsafe {
            if self.pipeline.stream {
                copy::stream(from, to, bytes);
            } else {
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    }

    /// Copies or scales the input to the result, in a communicator of one rank.
    unsafe fn copy_alone(&self) {
        if let Some(ragged) = &self.ragged {
            // SAFETY: the caller's buffers hold the blocks.
            return unsafe { ragged.copy_alone(&self.call) };
        }
        let bytes = self.call.count * self.element_size();
        // SAFETY: the caller's buffers hold that much, and are either one buffer or apart.
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

    /// In an all-reduce or reduce: copies a chunk to this rank's slot, except the part that only
    /// this rank reads.
    #[inline]
    unsafe fn stage_for_reduction(&self, chunk: usize) {
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
    unsafe fn reduce_whole(&mut self) {
        if !self.is_root() {
            return;
        }
        self.inputs.clear();
        for rank in 0..self.comm.nranks {
            self.inputs.push(self.slot(rank, 0));
        }
        // SAFETY: every slot holds `count` elements, and all ranks have ended the step in which
        // they wrote them.
        unsafe {
            reduce::reduce(
                self.call.dtype,
                self.call.op(),
                &self.inputs,
                &[Target::cached(self.call.recv)],
                self.call.count,
            )
        };
    }

    /// In an all-reduce or reduce: reduces this rank's part of a chunk, and leaves the result in
    /// this rank's slot for the others.
    unsafe fn reduce_own_part(&mut self, chunk: usize) {
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
            let own_input = if self.call.own_from_send() { self.call.send.add((start + own) * size) } else { mine };
            self.gather_inputs(chunk, own * size, own_input);
            let result = Target { at: self.call.recv.wrapping_add((start + own) * size), stream: self.pipeline.stream };
            let targets = match self.call.kind {
                Kind::AllReduce => &[result, Target::cached(mine)][..],
                _ if self.is_root() => &[result],
                _ => &[Target::cached(mine)],
            };
            reduce::reduce(self.call.dtype, self.call.op(), &self.inputs, targets, own_length);
        }
    }

    /// Lists the inputs of a reduction: the bytes at `offset` of every rank's slot of a chunk, and
    /// `own` in place of this rank's slot.
    unsafe fn gather_inputs(&mut self, chunk: usize, offset: usize, own: *const u8) {
        self.inputs.clear();
        for rank in 0..self.comm.nranks {
            // SAFETY: the caller passes an offset inside the slot.
            let input = if rank == self.comm.rank { own } else { unsafe { self.slot(rank, chunk).add(offset) } };
            self.inputs.push(input);
        }
    }

    /// In an all-reduce or reduce: copies out the parts that the other ranks have reduced.
    unsafe fn copy_reduced_parts(&self, chunk: usize) {
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
                let to = self.call.recv.add((start + first) * size);
                self.copy_result(self.slot(rank, chunk).add(first * size), to, elements * size);
            }
        }
    }

    /// In the other collectives: copies a chunk of this rank's data to the slots where the readers
    /// look.
    unsafe fn stage_outgoing(&self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.element_size(), self.call.count);
        let pitch = self.pipeline.chunk_len * size;
        let (send, recv) = (self.call.send, self.call.recv);
        // SAFETY: the pipeline's ranges lie in the caller's buffers and in the slots. A rank's own
        // part of the two buffers is one memory or apart, and `copy` allows both. Only the owner
        // writes a slot, and in a scatter only the root does.
        unsafe {
            // Copies this rank's own data from its send buffer to its receive buffer.
            let keep = |from: usize, to: usize| {
                let (from, to) = (send.add((from + start) * size), recv.add((to + start) * size));
                if from != to {
                    std::ptr::copy(from, to, length * size);
                }
            };
            match self.call.kind {
                Kind::Broadcast if self.is_root() => {
                    self.stage_elements(send.add(start * size), self.slot(me, chunk), length);
                    keep(0, 0);
                }
                Kind::AllGather => {
                    self.stage_elements(send.add(start * size), self.slot(me, chunk), length);
                    keep(0, me * count);
                }
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
    unsafe fn take_incoming(&mut self, chunk: usize) {
        let (start, length) = self.pipeline.range(chunk, self.call.count);
        let (me, n, size, count) = (self.comm.rank, self.comm.nranks, self.element_size(), self.call.count);
        let pitch = self.pipeline.chunk_len * size;
        let recv = self.call.recv;
        // SAFETY: as in `stage_outgoing`, and all ranks have ended the step in which they wrote the
        // chunk.
        unsafe {
            let copy = |from: *mut u8, to: usize| {
                self.copy_result(from, recv.add((to + start) * size), length * size);
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
                    let own =
                        if self.call.own_from_send() { self.call.send.add((me * count + start) * size) } else { mine };
                    self.gather_inputs(chunk, me * pitch, own);
                    let out = Target { at: recv.add(start * size), stream: self.pipeline.stream };
                    reduce::reduce(self.call.dtype, self.call.op(), &self.inputs, &[out], length);
                }
                _ => {}
            }
        }
    }
}
