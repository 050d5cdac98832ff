//! The facts that an error gives to programs: its ranks, its dimension, the time that the call
//! waited, and the call.

use std::time::Duration;

use super::Error;
use super::facts::Facts;

/// The facts that the error tells.
impl Error {
    /// The ranks of the world that the error is about, in ascending order: those that were lost,
    /// aborted, did not come, failed, or made another call than the others. At most 512, the
    /// lowest ones. Empty where no rank is known to be at fault.
    ///
    /// ```
    /// use devicemesh::error::{Error, Status};
    /// let error = Error::new(Status::PeerLost, "ranks 3 and 7 were lost").with_ranks(&[7, 3]);
    /// assert_eq!(error.ranks(), [3, 7]);
    /// ```
    pub fn ranks(&self) -> &[i32] {
        self.facts.as_ref().map_or(&[], |facts| &facts.ranks)
    }

    /// Those of [`ranks`](Error::ranks) that are lost, in ascending order: their processes have
    /// ended, they have left the world, or their hosts fell silent. A rank that only aborted a
    /// mesh, did not come or made another call is not lost.
    ///
    /// ```
    /// use devicemesh::error::{Error, Status};
    /// let error = Error::new(Status::PeerLost, "rank 3 was lost, and rank 1 aborted").with_ranks(&[1]).with_lost(&[3]);
    /// assert_eq!((error.ranks(), error.lost()), (&[1, 3][..], &[3][..]));
    /// ```
    pub fn lost(&self) -> &[i32] {
        self.facts.as_ref().map_or(&[], |facts| &facts.lost)
    }

    /// The name of the dimension along which the failed call was made; `None` for a call that has
    /// no dimension.
    pub fn dimension(&self) -> Option<&str> {
        self.facts.as_ref()?.dimension.as_deref()
    }

    /// How long the failed call waited for other ranks. `None` where it did not wait, or where
    /// nobody measured it.
    pub fn waited(&self) -> Option<Duration> {
        self.facts.as_ref()?.waited
    }

    /// The number of the failed collective call, as the message shows it ("as call 7"). `None`
    /// where the call has no number.
    pub fn call(&self) -> Option<u64> {
        self.facts.as_ref()?.call
    }
}

/// Setting the facts.
impl Error {
    fn with_facts(mut self, set: impl FnOnce(&mut Facts)) -> Error {
        set(self.facts.get_or_insert_default());
        self
    }

    /// Adds ranks of the world that the error is about: those that were lost, that did not come,
    /// or that failed.
    #[must_use]
    pub fn with_ranks(self, ranks: &[i32]) -> Error {
        if ranks.is_empty() { self } else { self.with_facts(|facts| facts.add_ranks(ranks)) }
    }

    /// Adds ranks of the world that are lost. The error is about these ranks.
    #[must_use]
    pub fn with_lost(self, lost: &[i32]) -> Error {
        if lost.is_empty() { self } else { self.with_facts(|facts| facts.add_lost(lost)) }
    }

    /// Sets the dimension along which the call was made.
    #[must_use]
    pub(crate) fn along(self, dimension: &str) -> Error {
        self.with_facts(|facts| facts.dimension = Some(dimension.to_owned()))
    }

    /// Sets how long the call waited for other ranks, unless it is known.
    #[must_use]
    pub(crate) fn after_waiting(self, waited: Duration) -> Error {
        self.with_facts(|facts| facts.waited = facts.waited.or(Some(waited)))
    }

    /// Sets the number of the collective call, unless it is known.
    #[must_use]
    pub(crate) fn in_call(self, number: u64) -> Error {
        self.with_facts(|facts| facts.call = facts.call.or(Some(number)))
    }

    /// Sets the ranks of a communicator that its library blames, and whether each is lost.
    #[must_use]
    pub(crate) fn blaming(self, blamed: Vec<(usize, bool)>) -> Error {
        if blamed.is_empty() { self } else { self.with_facts(|facts| facts.blamed = blamed) }
    }

    /// The ranks of a communicator that its library blames, and whether each is lost.
    pub(crate) fn blamed(&self) -> &[(usize, bool)] {
        self.facts.as_ref().map_or(&[], |facts| &facts.blamed)
    }

    /// Takes over what `other` tells beside its status, message and codes.
    #[must_use]
    pub(crate) fn with_facts_of(mut self, other: &Error) -> Error {
        self.facts = other.facts.clone();
        self
    }
}
