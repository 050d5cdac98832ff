//! The state of a process that has joined a running job (come_in.rs).

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::agreement::AtDoor;
use super::running::Running;

/// A process's knowledge of the running job that it has joined.
pub(super) struct Newcomer {
    /// The facts of the job when it started.
    pub(super) running: Running,
    /// The newcomer's way into the job; `None` before the first try to come in, and when this
    /// process is in.
    pub(super) at_door: Mutex<Option<AtDoor>>,
    /// Whether this process has come in.
    pub(super) is_in: AtomicBool,
}

impl Newcomer {
    /// Returns the state of a process that has joined that job, and has not come in.
    pub(super) fn new(running: Running) -> Newcomer {
        Newcomer { running, at_door: Mutex::default(), is_in: AtomicBool::new(false) }
    }
}
