//! The groups of operations that a program begins on a view.

use std::sync::Arc;
use std::thread::sleep;

use super::communicator::{Communicator, State};
use super::groups::{self, Failed, Used};
use super::polling::poll_until_done;
use super::root::RootComms;
use super::view::View;
use crate::ccl::nvtx;
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

    /// Ends the group. The operations of the group run together, and this call fails with the
    /// first error of any of them.
    pub fn group_end(&self) -> Result<()> {
        let _range = nvtx::range(|| "dm_group_end".to_owned(), 0);
        if self.root_comms().checks_collectives() {
            self.check_group_order()?;
        }
        // The group may hold nothing of this mesh, so an end of the mesh is no error of the group.
        match groups::end(self.library()?) {
            // Operations of the host engine are done when the group has ended.
            Ok(_) if self.library()?.is_host_engine() => Ok(()),
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

/// Waits until nothing is in progress on the communicators of a group. The communicators are those
/// that the group's operations have `used`, which may belong to other meshes, and those of the
/// root, on which the program may have issued operations itself. There is something to wait for
/// only on non-blocking communicators.
fn wait_until_idle(root: &RootComms, used: &[Used]) -> Result<()> {
    // The end of the root is no reason to give up. An abort of the communicator ends the wait.
    let wait = Wait::after(root.timeout());
    let ready = root.communicators().into_iter().filter(|communicator| communicator.state() == State::Ready);
    for communicator in used.iter().map(|one| Arc::clone(&one.communicator)).chain(ready) {
        let poll = || communicator.poll_here()?.map_err(|error| communicator.explain_as(error, true));
        poll_until_done(&wait, || "dm_group_end".to_owned(), sleep, poll)?;
    }
    Ok(())
}

/// The error of a group that failed, with its reason. A library does not say which communicator
/// failed. So the communicators are asked in turn, first those in `used`, which have operations in
/// the group, and then those of the root. The first one that knows of a failure explains the error.
fn explain(root: &RootComms, used: &[Used], error: Error) -> Error {
    let of_group = used.iter().map(|one| (Arc::clone(&one.communicator), one.recorded.clone()));
    for (communicator, recorded) in of_group.chain(root.communicators().into_iter().map(|other| (other, None))) {
        let is_reason = match communicator.state() {
            State::Ready => communicator.poll().is_err(),
            // The communicator was ended here, by this root or by another one that shares it.
            State::Aborted | State::Finalized => true,
            State::Unmade | State::Absent => false,
        };
        if is_reason {
            let error = along(&communicator, communicator.explain(communicator.raw(), error));
            let Some(group) = recorded else { return error };
            if communicator.earlier_failure().is_some() {
                group.fail();
            }
            return root.explained(error, &group);
        }
    }
    error
}

/// The error with the name of the dimension for which the communicator was made.
fn along(communicator: &Communicator, error: Error) -> Error {
    error.along(communicator.group().dim_name(0))
}
