//! Asks whether the communicators of a view work, as far as this rank knows.

use std::sync::Arc;

use super::communicator::{Communicator, State};
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

    /// The first asynchronous error among all communicators inside the view: those of its
    /// dimensions, in their order, and then those of other dimensions of the mesh all of whose
    /// ranks are ranks of the view, such as flattened ones. **Local**. Communicators that are not
    /// made yet have no error.
    pub fn check_all(&self) -> Result<()> {
        self.root_comms().alive()?;
        let ndim = self.mesh().ndim();
        (0..ndim).try_for_each(|index| self.check(index))?;
        let of_dims = || (0..ndim).filter_map(|index| self.planned_communicator(index).ok());
        let mut others = self.communicators_inside();
        others.retain(|other| other.state() == State::Ready && !of_dims().any(|one| Arc::ptr_eq(one, other)));
        others.iter().try_for_each(|other| other.poll().map(drop))
    }

    /// The communicators on which the root mesh makes calls and all of whose ranks are ranks of
    /// this view.
    pub(super) fn communicators_inside(&self) -> Vec<Arc<Communicator>> {
        let mut communicators = self.root_comms().dim_communicators();
        if self.mesh().size() < self.root_comms().mesh().size() {
            let mut ranks = self.mesh().ranks();
            ranks.sort_unstable();
            let inside = |rank: i32| ranks.binary_search(&rank).is_ok();
            communicators.retain(|communicator| communicator.group().each_rank().all(inside));
        }
        communicators
    }

    /// Does what [`check`](View::check) does, along the dimension of that name, which may be a
    /// flattened one. This function makes no communicator. So after an unknown name this rank need
    /// not note that it may be behind the other ranks (lazy.rs).
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
