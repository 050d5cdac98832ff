//! The options with which a process joins a world.

use crate::rendezvous::JoinOptions;

/// How a process joins a world.
#[derive(Default)]
#[non_exhaustive]
pub struct WorldOptions {
    /// Where the ranks meet.
    pub join: JoinOptions,
    /// A library with NCCL's C API, instead of the default for the device type. The program that
    /// sets this field has vouched for the library.
    pub(crate) library: Option<String>,
    /// The device on which the communicators are made. `None` stands for the current device of the
    /// thread that joins. Where that thread has none, it is the device whose number is the rank's
    /// number on its host.
    pub device: Option<usize>,
}

impl WorldOptions {
    /// Options that say where the ranks meet. The rest is the default.
    pub fn new(join: JoinOptions) -> WorldOptions {
        WorldOptions { join, library: None, device: None }
    }

    /// Sets the device on which the communicators are made, by its number among the devices that
    /// this process sees.
    #[must_use]
    pub fn device(mut self, device: usize) -> WorldOptions {
        self.device = Some(device);
        self
    }

    /// Sets a library that has NCCL's C API, by path or SONAME, instead of the default for the
    /// device type. `python` is the wheel of a Python environment.
    ///
    /// # Safety
    /// The conditions of [`ccl::open`](crate::ccl::open) hold for the library.
    #[must_use]
    pub unsafe fn library(mut self, name: impl Into<String>) -> WorldOptions {
        self.library = Some(name.into());
        self
    }
}
