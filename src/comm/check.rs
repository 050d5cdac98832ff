//! How the communicators of a view are, as far as this rank knows.

use super::communicator::State;
use super::view::View;
use crate::error::Result;

impl View {
    /// The asynchronous error of the communicator along dimension `index`. **Local**. A
    /// communicator that is not made yet has no error.
    pub fn check(&self, index: usize) -> Result<()> {
        let checked = self.planned_communicator(index).and_then(|communicator| match communicator.state() {
            State::Unmade => Ok(()),
            _ => communicator.poll().map(drop),
        });
        checked.map_err(|error| self.with_dim(error, index))
    }

    /// The first asynchronous error among the communicators of the view's dimensions, in the order
    /// of the dimensions. **Local**. Communicators that are not made yet have no error.
    pub fn check_all(&self) -> Result<()> {
        self.root_comms().alive()?;
        (0..self.mesh().ndim()).try_for_each(|index| self.check(index))
    }

    /// Does what [`check`](View::check) does, along the dimension of that name, which may be a
    /// flattened one. An unknown name is no refused first use of a lazy communicator, because this
    /// call makes none.
    pub(crate) fn check_along(&self, name: &str) -> Result<()> {
        match self.mesh().dim_index_or_only(Some(name)) {
            Ok(index) => self.check(index),
            Err(_) => {
                let (mesh, index) = self.mesh().along(Some(name))?;
                self.with(mesh).check(index)
            }
        }
    }
}
