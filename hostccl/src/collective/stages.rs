//! The work of one rank in each stage of a collective.

use std::sync::Arc;

use super::call::{Call, Kind};
use super::moves::Moves;
use super::pipeline::Pipeline;
use super::ragged::Ragged;
use crate::comm::Comm;
use crate::error::Result;

/// The work of one rank in a collective.
pub(super) struct Stages {
    /// The arguments, the buffers, and the functions that move and reduce this rank's data.
    pub(super) moves: Moves,
    /// The number of the stage in which the rank is.
    pub(super) stage: usize,
    /// The counts, where each rank has its own.
    ragged: Option<Box<Ragged>>,
}

// SAFETY: the buffers are the caller's, who promises that they are valid while the call is under
// way, on whatever thread.
unsafe impl Send for Stages {}

impl Stages {
    /// Returns the work of a call in its first stage.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the work is dropped.
    #[inline(always)]
    pub(super) unsafe fn new(comm: Arc<Comm>, call: Call, ragged: Option<Box<Ragged>>) -> Stages {
        let pipeline = Pipeline::new(&call, comm.segment.layout(), comm.other_of_two().is_some());
        let moves = Moves { comm, call, pipeline, first_step: 0, inputs: Vec::new(), small: Default::default() };
        Stages { moves, stage: 0, ragged }
    }

    /// In a collective in which each rank has a count of its own: agrees on the counts and on the
    /// number of chunks, in the second stage. Ends the communicator when the counts do not fit
    /// together.
    ///
    /// # Safety
    /// All ranks have ended the steps of the stages before this one.
    #[inline]
    pub(super) unsafe fn agree(&mut self) -> Result<()> {
        let Some(ragged) = &mut self.ragged else { return Ok(()) };
        let moves = &mut self.moves;
        // SAFETY: this function's contract.
        let chunks = unsafe { ragged.agree(&moves.comm, &moves.call, |rank| moves.slot(rank, 0)) }?;
        (moves.pipeline.chunks, moves.pipeline.stages) = (chunks, chunks + 1);
        Ok(())
    }

    /// Whether the rank is in the last stage, which ends no step.
    #[inline]
    pub(super) fn is_last(&self) -> bool {
        self.stage + 1 == self.moves.pipeline.stages
    }

    /// Does the work of this stage for which the peers wait. It comes before the end of the step.
    ///
    /// # Safety
    /// All ranks have ended the steps of the stages before this one.
    #[inline]
    pub(super) unsafe fn critical(&mut self) {
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

    /// Copies or reduces a chunk of a collective in which each rank has a count of its own from the
    /// slots of the other ranks.
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
