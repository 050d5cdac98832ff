//! The interrupt of a communicator, which has no C function: only a library that embeds the engine
//! sets it.

use std::sync::Arc;

use crate::error::Result;
use crate::handle;
use crate::interrupt::{Interrupt, Question};
use crate::types::ncclComm_t;

/// Has the blocked calls of this rank on `comm` ask `question`: when they have waited for a quarter
/// of a second without progress, and then ten times a second. A reason ends the communicator for
/// all of its ranks, with `ncclRemoteError` and the reason as the message. The first question that
/// is set stays.
///
/// The question is asked on the waiting thread, so it answers soon, and it calls no function of the
/// engine. Does nothing where `comm` is not ready or has failed.
pub fn set_interrupt(comm: ncclComm_t, question: Arc<Question>) {
    let set = || -> Result<()> {
        handle::find(comm)?.ready()?.set_interrupt(Interrupt::new(question));
        Ok(())
    };
    // A communicator that has ended meanwhile has no blocked calls.
    let _ = set();
}
