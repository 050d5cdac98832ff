//! The interrupt of a communicator, which has no C function: only a library that embeds the engine
//! sets it.

use std::sync::Arc;

use crate::error::Result;
use crate::handle;
use crate::interrupt::{Interrupt, Question};
use crate::types::ncclComm_t;

/// Makes the blocked calls of this rank on `comm` ask `question`: for the first time when they
/// have waited for a quarter of a second without progress, and then ten times per second. When the
/// answer is a reason, the engine ends the communicator for all of its ranks, with
/// `ncclRemoteError` and the reason as the message. The first question that is set stays.
///
/// The waiting thread asks the question. So the question must answer soon, and must call no
/// function of the engine. This function does nothing where `comm` is not ready or has failed.
pub fn set_interrupt(comm: ncclComm_t, question: Arc<Question>) {
    let set = || -> Result<()> {
        handle::find(comm)?.ready()?.set_interrupt(Interrupt::new(question));
        Ok(())
    };
    // A communicator that has ended meanwhile has no blocked calls.
    let _ = set();
}
