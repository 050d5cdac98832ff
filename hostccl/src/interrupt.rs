//! Reasons from outside that end a wait: a library that embeds the engine may know that the other
//! ranks of a communicator will not make their calls any more.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

/// A question that the blocked calls of a communicator ask. The answer is the reason why they end,
/// or `None` while they go on waiting.
pub type Question = dyn Fn() -> Option<String> + Send + Sync;

/// The interrupt of a communicator.
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<Question>);

impl Interrupt {
    pub(crate) fn new(question: Arc<Question>) -> Interrupt {
        Interrupt(question)
    }

    /// Returns why the calls of the communicator end; `None` while they go on waiting.
    pub(crate) fn reason(&self) -> Option<String> {
        (self.0)()
    }
}

impl Debug for Interrupt {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str("Interrupt")
    }
}
