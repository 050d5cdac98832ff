//! The work of one rank in each stage of a collective.

use std::sync::Arc;

use super::call::{Call, Kind};
use super::direct::{Direct, Piece, piece_of};
use super::moves::Moves;
use super::pipeline::Pipeline;
use super::ragged::Ragged;
use crate::comm::Comm;
use crate::error::Result;

/// The work of one rank in a collective.
pub(super) struct Stages {
    /// The rank moves and reduces its data by these.
    pub(super) moves: Moves,
    /// The number of the stage in which the rank is.
    pub(super) stage: usize,
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
        self.direct.take_back(&self.moves.comm);
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
        // A call of one chunk has nothing left to read.
        let block = match (&ragged, pipeline.chunks) {
            (Some(_), _) => comm.segment.layout().slot_bytes / comm.nranks,
            (None, 1) => 0,
            (None, _) => call.count * call.dtype.size(),
        };
        let direct = Direct::new(&comm, &call, block);
        let moves = Moves { comm, call, pipeline, first_step: 0, inputs };
        Stages { moves, stage: 0, ragged, direct }
    }

    /// Agrees with the other ranks, in the second stage, on whether the ranks read each other's
    /// buffers. In a collective in which each rank has a count of its own, the ranks first agree
    /// on the counts and on the number of chunks. Ends the communicator when the counts do not fit
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
        let agreed = unsafe { ragged.agree(&self.moves.comm, &self.moves.call, |rank| self.moves.slot(rank, 0)) };
        let most = ragged.most_read();
        self.ragged = Some(ragged);
        self.moves.pipeline.chunks = agreed?;
        self.moves.pipeline.stages = self.moves.pipeline.chunks + 1;
        if self.moves.pipeline.chunks > 1 {
            self.direct.decide(&self.moves.comm, most);
        }
        Ok(())
    }

    /// Decides whether the ranks read each other's buffers, where all ranks have one count.
    ///
    /// # Safety
    /// The contract of [`agree`](Stages::agree).
    #[cold]
    unsafe fn decide(&mut self) {
        let others = (0..self.moves.comm.nranks).filter(|rank| *rank != self.moves.comm.rank);
        let most = others.map(|rank| self.piece_of(rank).bytes).sum();
        self.direct.decide(&self.moves.comm, most);
        if !self.direct.is_agreed() {
            // The rank has not staged its second chunk yet, because its buffer was lent.
            // SAFETY: the rank has not ended the second step.
            unsafe { self.moves.stage_outgoing(1) };
        }
    }

    /// Returns what this rank reads from the memory of `rank`: all but the first chunk.
    fn piece_of(&self, rank: usize) -> Piece {
        let moves = &self.moves;
        match &self.ragged {
            Some(ragged) => ragged.piece_of(rank, &moves.call),
            None => piece_of(&moves.comm, &moves.call, rank, moves.pipeline.chunk_len),
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
            let is_done = self.direct.finish(&self.moves.comm);
            if !is_done {
                (self.stage, self.moves.first_step) = (0, self.moves.comm.step());
            }
            return is_done;
        }
        // SAFETY: this function's contract; the pieces lie in this rank's receive buffer.
        unsafe {
            if self.stage == 1 {
                match &self.ragged {
                    Some(_) => self.take_ragged(0),
                    None => {
                        self.moves.take_incoming(0);
                        self.moves.keep_rest();
                    }
                }
            }
            let mut direct = self.direct;
            direct.read(&self.moves.comm, self.stage, |rank| self.piece_of(rank));
            self.direct = direct;
        }
        true
    }

    /// Whether the rank is in the last stage, which ends no step.
    #[inline]
    pub(super) fn is_last(&self) -> bool {
        match self.direct.is_agreed() {
            true => !self.direct.reads_in(self.stage),
            false => self.stage + 1 == self.moves.pipeline.stages,
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
        let (stage, chunks) = (self.stage, self.moves.pipeline.chunks);
        // SAFETY: this function's contract; each function touches the slots as the module
        // documentation says.
        unsafe {
            if self.moves.comm.nranks == 1 {
                return match &self.ragged {
                    Some(ragged) => ragged.copy_alone(&self.moves.call),
                    None => self.moves.copy_alone(),
                };
            }
            if stage == 0 {
                let (ragged, call) = (&self.ragged, &self.moves.call);
                let is_apart = || ragged.as_ref().is_none_or(|ragged| ragged.is_apart(call));
                self.direct.lend(&self.moves.comm, call, is_apart);
            }
            if self.ragged.is_some() {
                if stage == 0 {
                    let slot = self.moves.slot(self.moves.comm.rank, 0);
                    if let Some(ragged) = &mut self.ragged {
                        ragged.post(&self.moves.comm, &self.moves.call, slot);
                    }
                    self.stage_ragged(0);
                } else if stage == 1 && chunks > 1 {
                    self.stage_ragged(1);
                } else if stage == chunks {
                    self.take_ragged(chunks - 1);
                }
                return;
            }
            match self.moves.call.kind {
                Kind::AllReduce | Kind::Reduce if self.moves.pipeline.direct && stage > 0 => self.moves.reduce_whole(),
                Kind::AllReduce | Kind::Reduce => {
                    if stage == 0 {
                        self.moves.stage_for_reduction(0);
                    } else if stage <= chunks {
                        self.moves.reduce_own_part(stage - 1);
                    } else {
                        self.moves.copy_reduced_parts(chunks - 1);
                    }
                }
                Kind::Split | Kind::Grow => {}
                _ if stage == 0 => self.moves.stage_outgoing(0),
                _ if stage == chunks => self.moves.take_incoming(chunks - 1),
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
        let (stage, chunks) = (self.stage, self.moves.pipeline.chunks);
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
            match self.moves.call.kind {
                Kind::AllReduce | Kind::Reduce => {
                    // The older chunk comes first, because it leaves the caches first.
                    if stage >= 2 {
                        self.moves.copy_reduced_parts(stage - 2);
                    }
                    if stage + 1 < chunks {
                        self.moves.stage_for_reduction(stage + 1);
                    }
                }
                Kind::Split | Kind::Grow => {}
                _ => {
                    if stage >= 1 {
                        self.moves.take_incoming(stage - 1);
                    }
                    if stage + 1 < chunks {
                        self.moves.stage_outgoing(stage + 1);
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
        unsafe { ragged.stage(&self.moves.comm, &self.moves.call, chunk, self.moves.slot(self.moves.comm.rank, chunk)) }
    }

    /// Copies or reduces a chunk of such a collective from the slots of the other ranks.
    unsafe fn take_ragged(&mut self, chunk: usize) {
        let mut inputs = std::mem::take(&mut self.moves.inputs);
        if let Some(ragged) = &self.ragged {
            // SAFETY: as in `critical`.
            unsafe {
                ragged.take(&self.moves.comm, &self.moves.call, chunk, |rank| self.moves.slot(rank, chunk), &mut inputs)
            }
        }
        self.moves.inputs = inputs;
    }
}
