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
    /// The revoked communicator.
    parent: Arc<Comm>,
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
    /// Returns a split of `parent` that has not begun. `renewal` makes a communicator over all
    /// ranks. `described` describes the call.
    pub(crate) fn new(
        parent: Arc<Comm>,
        renewal: Box<dyn ChildOperation>,
        make_split: MakeSplit,
        call: Name,
        described: String,
    ) -> RevokedSplit {
        RevokedSplit { parent, renewal, make_split, split: None, call, described }
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

    fn child_failed(&mut self, error: Error) -> Error {
        let whole = self.renewal.joined();
        let is_of_whole = |split: &dyn ChildOperation| {
            split.comm().zip(whole.as_ref()).is_some_and(|(comm, whole)| Arc::ptr_eq(comm, whole))
        };
        match &mut self.split {
            None => self.renewal.child_failed(error),
            // The ranks have the same numbers in the revoked communicator.
            Some(split) if is_of_whole(&**split) => error,
            Some(split) => split.child_failed(error),
        }
    }

    fn withdraw(&mut self) {
        self.split.iter_mut().for_each(|split| split.withdraw());
        self.renewal.withdraw();
    }

    fn refuse(&mut self, error: &Error) {
        self.renewal.refuse(error);
    }
}

impl Operation for RevokedSplit {
    fn poll(&mut self) -> Result<Poll> {
        if self.split.is_none() {
            let polled = self.renewal.poll()?;
            let (Poll::Done, Some(whole)) = (polled, self.renewal.joined()) else { return Ok(polled) };
            self.split = Some((self.make_split)(whole)?);
        }
        let polled = self.split.as_mut().map_or(Ok(Poll::Done), |split| split.poll())?;
        if polled != Poll::Done {
            // The split does not notice an abort of the revoked communicator.
            self.parent.check_aborted()?;
        }
        Ok(polled)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts_of_threads::on_one_host;
    use crate::types::ncclInternalError;

    /// An operation that has this communicator, or that waits for ever.
    struct Fake(Option<Arc<Comm>>);

    impl Operation for Fake {
        fn poll(&mut self) -> Result<Poll> {
            Ok(if self.0.is_some() { Poll::Done } else { Poll::Outside })
        }

        fn comm(&self) -> Option<&Arc<Comm>> {
            self.0.as_ref()
        }

        fn describe(&self) -> String {
            "fake".to_owned()
        }
    }

    impl ChildOperation for Fake {
        fn joined(&self) -> Option<Arc<Comm>> {
            self.0.clone()
        }

        fn for_parent(&self, error: Error) -> Error {
            error
        }
    }

    #[test]
    fn an_abort_of_the_revoked_communicator_ends_the_split() {
        let (parent, whole) = (on_one_host(2, 2).swap_remove(0), on_one_host(2, 2).swap_remove(0));
        let make: MakeSplit = Box::new(|_| Ok(Box::new(Fake(None))));
        let renewal = Box::new(Fake(Some(whole)));
        let mut split = RevokedSplit::new(parent.clone(), renewal, make, Name::NONE, "a split".to_owned());
        assert_eq!(split.poll(), Ok(Poll::Outside));
        parent.raise_abort();
        assert_eq!(split.poll().unwrap_err().code(), ncclInternalError);
    }
}
