//! The groups of operations that a program begins on a view.

use std::sync::Arc;
use std::thread::sleep;

use super::communicator::{Communicator, State};
use super::groups::{self, Failed};
use super::polling::poll_until_done;
use super::root::RootComms;
use super::view::View;
use crate::error::{Error, Result};
use crate::wait::Wait;

impl View {
    /// Begins a group of operations of the calling thread.
    pub fn group_start(&self) -> Result<()> {
        self.root_comms().alive()?;
        let library = self.library()?;
        groups::check_usable(library)?;
        library.group_start()?;
        groups::begin(library);
        Ok(())
    }

    /// Ends the group: its operations run together, and this call fails with the first error of any
    /// of them.
    pub fn group_end(&self) -> Result<()> {
        // The group may hold nothing of this mesh, so an end of the mesh is no error of the group.
        match groups::end(self.library()?) {
            Ok(used) => wait_until_idle(self.root_comms(), &used),
            Err(Failed::NotBegun(error)) => {
                // The end of the mesh on this thread has ended the group, too.
                self.root_comms().alive()?;
                Err(error)
            }
            Err(Failed::Known(error)) => Err(error),
            Err(Failed::OfLibrary(error, used)) => Err(self.with_losses(explain(self.root_comms(), &used, error))),
        }
    }
}

/// Waits until nothing is in progress on the communicators of a group. These are the communicators
/// `used` by the group's operations, which may belong to other meshes, and those of the root, on
/// which the program may have issued operations itself. Only on non-blocking communicators there is
/// something to wait for.
fn wait_until_idle(root: &RootComms, used: &[Arc<Communicator>]) -> Result<()> {
    // The end of the root is no reason to give up. An abort of the communicator ends the wait.
    let wait = Wait::after(root.timeout());
    let ready = root.communicators().into_iter().filter(|communicator| communicator.state() == State::Ready);
    for communicator in used.iter().cloned().chain(ready) {
        // Operations of the host engine are done when they return.
        if !communicator.library().is_host_engine() {
            let poll = || communicator.poll_here()?.map_err(|error| communicator.explain_as(error, true));
            poll_until_done(&wait, || "dm_group_end".to_owned(), sleep, poll)?;
        }
    }
    Ok(())
}

/// The error of a group that failed, with its reason. A library does not say which communicator
/// failed. So the communicators are asked in turn, first those in `used`, which have operations in
/// the group, and then those of the root. The first one that knows of a failure explains the error.
fn explain(root: &RootComms, used: &[Arc<Communicator>], error: Error) -> Error {
    for communicator in used.iter().cloned().chain(root.communicators()) {
        match communicator.state() {
            State::Ready if communicator.poll().is_err() => {
                return along(&communicator, communicator.explain(communicator.raw(), error));
            }
            // The communicator was ended here, by this root or by another one that shares it.
            State::Aborted | State::Finalized => {
                return along(&communicator, communicator.explain(communicator.raw(), error));
            }
            State::Ready | State::Unmade | State::Absent => {}
        }
    }
    error
}

/// The error with the name of the dimension for which the communicator was made.
fn along(communicator: &Communicator, error: Error) -> Error {
    error.along(communicator.group().dim_name(0))
}
