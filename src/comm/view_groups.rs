//! The groups of operations that a program begins on a view.

use std::thread::sleep;

use super::communicator::{Communicator, State};
use super::groups;
use super::polling::poll_until_done;
use super::root::RootComms;
use super::view::View;
use crate::error::{Error, Result};

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
        let ended = groups::end(self.library()?);
        self.root_comms().alive()?;
        match ended {
            Ok(()) => wait_until_idle(self.root_comms()),
            Err((error, true)) => Err(explain(self.root_comms(), error)),
            Err((error, false)) => Err(error),
        }
    }
}

/// Waits until nothing is in progress on any communicator of the root: the operations of a group on
/// non-blocking communicators.
fn wait_until_idle(root: &RootComms) -> Result<()> {
    let wait = root.wait(None);
    for communicator in root.communicators().iter().filter(|communicator| communicator.state() == State::Ready) {
        // Operations of the host engine are done when they return.
        if !communicator.library().is_host_engine() {
            let poll = || communicator.poll_here()?.map_err(|error| communicator.explain_as(error, true));
            poll_until_done(&wait, || "dm_group_end".to_owned(), sleep, poll)?;
        }
    }
    Ok(())
}

/// The error of a group that failed, with its reason. A library does not say which communicator
/// failed, so the first one that knows of a failure explains the error.
fn explain(root: &RootComms, error: Error) -> Error {
    for communicator in root.communicators() {
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
