//! The CUDA driver, as far as communicators need it: is it there, how many devices, which one is mine.
//!
//! NCCL must not be called without a working driver: without one a failed initialisation leaves some releases' thread
//! state broken. So this runs before any communicator of device type cuda is made.

use cudarc::driver::{DriverError, result, sys};

use crate::error::{Error, Result, Status};

/// Makes a device current on this thread unless one is: local rank modulo the number of devices, as PyTorch chooses.
pub fn select_device(local_rank: usize) -> Result<()> {
    // SAFETY: only looks whether libcuda can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::new(
            Status::Device,
            "no CUDA driver: libcuda.so.1 is not installed on this machine; use device type cpu, or install the driver",
        ));
    }
    result::init().map_err(|error| driver_error("cuInit", error))?;
    let current = result::ctx::get_current().map_err(|error| driver_error("cuCtxGetCurrent", error))?;
    if current.is_some() {
        return Ok(());
    }
    let count = result::device::get_count().map_err(|error| driver_error("cuDeviceGetCount", error))?;
    if count < 1 {
        return Err(Error::new(Status::Device, "the CUDA driver sees 0 devices; is CUDA_VISIBLE_DEVICES empty?"));
    }
    let ordinal = i32::try_from(local_rank % count as usize).unwrap_or(0);
    let device = result::device::get(ordinal).map_err(|error| driver_error("cuDeviceGet", error))?;
    // SAFETY: `device` came from the driver a line above; the primary context is retained for the process's life, which
    // is what the runtime API does too.
    let context = unsafe { result::primary_ctx::retain(device) }
        .map_err(|error| driver_error("cuDevicePrimaryCtxRetain", error))?;
    // SAFETY: the context was just retained and is never released.
    unsafe { result::ctx::set_current(context) }.map_err(|error| driver_error("cuCtxSetCurrent", error))
}

/// The device that is current on a thread, to make it current on another one.
pub struct CurrentDevice(Option<sys::CUcontext>);

// SAFETY: a context belongs to the process; the driver takes it on any thread.
unsafe impl Send for CurrentDevice {}
// SAFETY: as above.
unsafe impl Sync for CurrentDevice {}

impl CurrentDevice {
    /// Where no device is involved.
    pub(super) const NONE: CurrentDevice = CurrentDevice(None);

    /// The calling thread's.
    pub(super) fn of_this_thread() -> Result<CurrentDevice> {
        // SAFETY: only looks whether libcuda can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Ok(CurrentDevice::NONE);
        }
        result::ctx::get_current().map(CurrentDevice).map_err(|error| driver_error("cuCtxGetCurrent", error))
    }

    /// Makes it current on the calling thread.
    pub fn select(&self) -> Result<()> {
        let Some(context) = self.0 else { return Ok(()) };
        // SAFETY: the context is current on a thread that is inside a call of this library meanwhile.
        unsafe { result::ctx::set_current(context) }.map_err(|error| driver_error("cuCtxSetCurrent", error))
    }
}

/// Whether there is a driver that sees at least one device.
pub fn has_device() -> bool {
    // SAFETY: only looks whether libcuda can be opened.
    let present = unsafe { sys::is_culib_present() };
    present && result::init().is_ok() && result::device::get_count().is_ok_and(|count| count > 0)
}

fn driver_error(call: &str, error: DriverError) -> Error {
    let code = error.0 as i32;
    Error::new(Status::Device, format!("{call} gives {code} ({error})")).with_device_error(code)
}
