//! Chooses the CUDA device on which this process makes communicators.
//!
//! NCCL must not be called without a working driver: in some releases the initialisation then
//! fails and leaves the thread's state broken. So this runs before any communicator of device type
//! cuda is made.

use std::ffi::c_int;

use super::cuda::{Context, Driver, dotted};
use crate::error::{Error, Result, Status};

/// The device that a thread's communicators are made on.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its number among the devices of this process.
    pub(crate) number: usize,
    /// How many devices this process sees.
    pub(crate) count: usize,
    /// Its identity, where the driver tells it. No other device or part of a device, on any host,
    /// has the same.
    pub(crate) uuid: Option<String>,
    /// The context that makes the device current on a thread.
    context: Context,
    /// Whether the program named the device, which then counts before a thread's current device.
    is_named: bool,
}

/// Which device a world's communicators are made on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DeviceChoice {
    /// The device of this number, which the program has named.
    Named(usize),
    /// The calling thread's current device, or else the one that belongs to this rank in the host.
    LocalRank(usize),
}

impl Device {
    /// Makes the device current on the calling thread. A thread that has chosen none would make
    /// communicators on device 0. Fails where the thread has chosen another device than this one,
    /// unless the program has named this one, which then counts before the thread's choice.
    pub(crate) fn select(&self) -> Result<()> {
        let driver = Driver::get()?;
        if driver.current()?.is_some() {
            let current = driver.current_device()?;
            if current == driver.device(self.number)? {
                return Ok(());
            }
            if !self.is_named {
                return Err(Error::new(Status::Device, another_device(current, self.number)));
            }
        }
        driver.set_current(self.context)
    }
}

/// Checks that the ranks of a world can have devices of this host, before anybody waits for this
/// rank. The program has `named` a device, or the ranks of each host take theirs in order.
///
/// Like PyTorch's DeviceMesh, refuses a number of ranks that is larger than this host's number of
/// devices and no multiple of it. Then the hosts differ, or some devices are left out, and the
/// inner dimensions of a mesh would not stay inside a host. A program that names devices may leave
/// some out.
pub(crate) fn check_devices(named: Option<usize>, world_size: usize) -> Result<()> {
    let count = Driver::get()?.count()?;
    if count == 0 {
        let message = "the CUDA driver sees 0 devices; is CUDA_VISIBLE_DEVICES empty?";
        return Err(Error::new(Status::Device, message));
    }
    if let Some(named) = named {
        return if named < count { Ok(()) } else { Err(beyond(named, count)) };
    }
    if world_size > count && world_size % count != 0 {
        return Err(Error::new(
            Status::Device,
            format!(
                "uneven hardware: {world_size} ranks cannot be spread evenly over hosts with {count} devices, as this one has: start the same number of ranks on each host, or let CUDA_VISIBLE_DEVICES show only the devices that are used"
            ),
        ));
    }
    Ok(())
}

/// Makes a device current on this thread and returns it. For a local rank, the device that the
/// thread has already comes first. Otherwise the device's number is the local rank modulo the
/// number of devices, as in PyTorch.
pub(crate) fn select_device(choice: DeviceChoice) -> Result<Device> {
    let driver = Driver::get()?;
    let count = driver.count()?;
    let current = match driver.current()? {
        Some(context) => Some((driver.current_device()?, context)),
        None => None,
    };
    let (wanted, is_named) = match choice {
        DeviceChoice::Named(number) if number >= count => return Err(beyond(number, count)),
        DeviceChoice::Named(number) => (driver.device(number)?, true),
        DeviceChoice::LocalRank(local_rank) => match current {
            Some((device, _)) => (device, false),
            None => (driver.device(local_rank % count.max(1))?, false),
        },
    };
    let context = match current.filter(|(device, _)| *device == wanted) {
        Some((_, context)) => context,
        None => {
            let context = driver.primary_context(wanted)?;
            driver.set_current(context)?;
            context
        }
    };
    let number = usize::try_from(wanted).unwrap_or(0);
    Ok(Device { number, count, uuid: driver.uuid(wanted), context, is_named })
}

/// The message that a thread's current device is not the device of the world.
fn another_device(current: c_int, world: usize) -> String {
    format!(
        "device {current} is current on this thread, but the world was joined on device {world}: its communicators would lie on two devices; name the device in dm_world_options.device (DM_WORLD_DEVICE), or call cudaSetDevice({current}) before the world is joined, or let CUDA_VISIBLE_DEVICES show each rank one device"
    )
}

/// Returns the error that the program has named a device that is not there.
fn beyond(number: usize, count: usize) -> Error {
    Error::new(
        Status::Device,
        format!("device {number} does not exist: the CUDA driver sees {count} devices, numbered from 0"),
    )
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

/// The PCI address of each device that the driver sees, by the device's number in this process
/// (CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER count), in the form that Linux uses, as
/// "0000:17:00.0". `None` for a device whose address the driver does not tell.
/// `DM_STATUS_DEVICE` with the reason where there is no driver that works.
pub fn device_addresses() -> Result<Vec<Option<String>>> {
    let driver = Driver::get()?;
    (0..driver.count()?).map(|number| Ok(driver.pci_address(driver.device(number)?))).collect()
}

/// The CUDA release that the driver supports, for messages; `None` without a driver.
pub(super) fn supported() -> Option<String> {
    Driver::get().and_then(Driver::version).ok().map(dotted)
}
