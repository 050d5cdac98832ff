//! The device of the calling thread, for a thread of this library that works in its place.

use std::ffi::c_int;

use super::cuda::{Context, Driver};
use super::hip::Hip;
use crate::error::Result;

/// The device that is current on a thread, to make it current on another one.
#[derive(Debug)]
pub(crate) struct CurrentDevice(Current);

#[derive(Debug)]
enum Current {
    /// No device is involved, or the thread has none.
    None,
    /// The context of a CUDA device.
    Cuda(Context),
    /// The number of an AMD device. In HIP every thread begins with device 0.
    Hip(Hip, c_int),
}

impl CurrentDevice {
    /// The value where no device is involved.
    pub(super) const NONE: CurrentDevice = CurrentDevice(Current::None);

    /// The calling thread's device. `hip` is the runtime of the library that works on it, where
    /// that library is RCCL.
    pub(super) fn of_this_thread(hip: Option<Hip>) -> Result<CurrentDevice> {
        if let Some(hip) = hip {
            return hip.current_device().map(|device| CurrentDevice(Current::Hip(hip, device)));
        }
        // A library that works without this driver has devices that are not this module's.
        let Ok(driver) = Driver::get() else { return Ok(CurrentDevice::NONE) };
        Ok(driver.current()?.map_or(CurrentDevice::NONE, |context| CurrentDevice(Current::Cuda(context))))
    }

    /// Makes the device current on the calling thread.
    pub(crate) fn select(&self) -> Result<()> {
        match &self.0 {
            Current::None => Ok(()),
            Current::Cuda(context) => Driver::get()?.set_current(*context),
            Current::Hip(hip, device) => hip.set_device(*device),
        }
    }
}
