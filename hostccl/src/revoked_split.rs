//! `ncclCommSplit` of a communicator that this rank has revoked.
//!
//! The calls of such a communicator have ended in the middle, so its ranks cannot take the steps
//! of a split in it. The ranks first make a new communicator in the same way as a shrink that
//! excludes nobody, because such a shrink needs only the memory of the old communicator. They
//! split the new communicator, and then leave it.

use std::sync::Arc;

use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::poll::Poll;
use crate::setup::ChildOperation;
use crate::turn::Pass;

/// Makes a split of a communicator.
pub(crate) type MakeSplit = Box<dyn Fn(Arc<Comm>) -> Result<Box<dyn ChildOperation>> + Send>;

/// A split of a revoked communicator under way.
pub(crate) struct RevokedSplit {
    /// The operation that makes the communicator over all ranks.
    renewal: Box<dyn ChildOperation>,
    /// Makes the split of that communicator.
    make_split: MakeSplit,
    /// The split, once the communicator over all ranks is made. In that communicator the ranks
    /// have the numbers that they have in the revoked communicator.
    split: Option<Box<dyn ChildOperation>>,
    /// The name of the call.
    call: Name,
    /// Describes the call with its values, for messages.
    described: String,
}

impl RevokedSplit {
    /// Returns a split that has not begun. `renewal` makes a communicator over all ranks.
    /// `described` describes the call.
    pub(crate) fn new(
        renewal: Box<dyn ChildOperation>,
        make_split: MakeSplit,
        call: Name,
        described: String,
    ) -> RevokedSplit {
        RevokedSplit { renewal, make_split, split: None, call, described }
    }

    fn now(&self) -> &dyn ChildOperation {
        self.split.as_deref().unwrap_or(&*self.renewal)
    }
}

impl ChildOperation for RevokedSplit {
    fn name(&self) -> Option<Name> {
        Some(self.call)
    }

    fn joined(&self) -> Option<Arc<Comm>> {
        self.split.as_ref()?.joined()
    }

    fn for_parent(&self, error: Error) -> Error {
        self.now().for_parent(error)
    }

    fn withdraw(&mut self) {
        self.renewal.withdraw();
    }
}

impl Operation for RevokedSplit {
    fn poll(&mut self) -> Result<Poll> {
        if self.split.is_none() {
            let polled = self.renewal.poll()?;
            let (Poll::Done, Some(whole)) = (polled, self.renewal.joined()) else { return Ok(polled) };
            self.split = Some((self.make_split)(whole)?);
        }
        self.split.as_mut().map_or(Ok(Poll::Done), |split| split.poll())
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.now().comm()
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        self.split.as_mut()?.pass()
    }

    fn describe(&self) -> String {
        self.described.clone()
    }
}

impl Drop for RevokedSplit {
    fn drop(&mut self) {
        // The split holds the communicator too, and may have to end its turn there.
        self.split = None;
        if let Some(whole) = self.renewal.joined() {
            whole.leave();
        }
    }
}
