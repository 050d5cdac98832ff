//! Chooses the CUDA device on which this process makes communicators.
//!
//! NCCL must not be called without a working driver: in some releases the initialisation then
//! fails and leaves the thread's state broken. So this runs before any communicator of device type
//! cuda is made.

use super::cuda::{Context, Driver, dotted};
use crate::error::{Error, Result, Status};

/// The device that a thread's communicators are made on.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its number in this process, for messages.
    pub(crate) number: usize,
    /// How many devices this process sees.
    pub(crate) count: usize,
    /// Its identity, where the driver tells it. No other device or part of a device, on any host,
    /// has the same.
    pub(crate) uuid: Option<String>,
    /// The context that makes the device current on a thread.
    context: Context,
}

impl Device {
    /// Makes the device current on the calling thread, unless the thread has a current device. A
    /// thread that has chosen none would make communicators on device 0.
    pub(crate) fn select_unless_chosen(&self) -> Result<()> {
        let driver = Driver::get()?;
        if driver.current()?.is_none() { driver.set_current(self.context) } else { Ok(()) }
    }
}

/// Makes a device current on this thread, unless the thread has one. The device's number is the
/// local rank modulo the number of devices, as in PyTorch.
///
/// Like PyTorch's DeviceMesh, refuses a number of ranks that is larger than this host's number of
/// devices and no multiple of it. Then the hosts differ, or some devices are left out, and the
/// inner dimensions of a mesh would not stay inside a host.
pub(crate) fn select_device(local_rank: usize, world_size: usize) -> Result<Device> {
    let driver = Driver::get()?;
    let count = driver.count()?;
    if count == 0 {
        let message = "the CUDA driver sees 0 devices; is CUDA_VISIBLE_DEVICES empty?";
        return Err(Error::new(Status::Device, message));
    }
    if world_size > count && world_size % count != 0 {
        return Err(Error::new(
            Status::Device,
            format!(
                "uneven hardware: {world_size} ranks are not the same number on each host, where this one has {count} devices; start as many on each, or let CUDA_VISIBLE_DEVICES show only those that are used"
            ),
        ));
    }
    let (device, context) = match driver.current()? {
        Some(context) => (driver.current_device()?, context),
        None => {
            let device = driver.device(local_rank % count)?;
            let context = driver.primary_context(device)?;
            driver.set_current(context)?;
            (device, context)
        }
    };
    Ok(Device { number: usize::try_from(device).unwrap_or(0), count, uuid: driver.uuid(device), context })
}

/// The device that is current on a thread, to make it current on another one.
#[derive(Debug)]
pub(crate) struct CurrentDevice(Option<Context>);

impl CurrentDevice {
    /// The value where no device is involved.
    pub(super) const NONE: CurrentDevice = CurrentDevice(None);

    /// The device of the calling thread.
    pub(super) fn of_this_thread() -> Result<CurrentDevice> {
        // A library that works without this driver (RCCL) has devices that are not this module's.
        Driver::get().map_or(Ok(CurrentDevice::NONE), |driver| driver.current().map(CurrentDevice))
    }

    /// Makes the device current on the calling thread.
    pub(crate) fn select(&self) -> Result<()> {
        self.0.map_or(Ok(()), |context| Driver::get()?.set_current(context))
    }
}

/// Whether there is a driver that sees at least one device.
pub fn has_device() -> bool {
    Driver::get().and_then(Driver::count).is_ok_and(|count| count > 0)
}

/// How many devices the driver sees, and the CUDA release that it supports; `DM_STATUS_DEVICE`
/// with the reason where there is no driver that works.
pub fn devices() -> Result<(usize, String)> {
    let driver = Driver::get()?;
    Ok((driver.count()?, dotted(driver.version()?)))
}

/// The CUDA release that the driver supports, for messages; `None` without a driver.
pub(super) fn supported() -> Option<String> {
    Driver::get().and_then(Driver::version).ok().map(dotted)
}
