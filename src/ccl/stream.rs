//! A stream of a CUDA device, with copies and memory beside it.

use std::ffi::{c_int, c_uint, c_void};

use super::cuda::{Code, Driver};
use super::current_device::CurrentDevice;
use crate::error::Result;

/// `CUDA_ERROR_NOT_READY`: the stream still has work.
const NOT_READY: Code = 600;
/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the null stream.
const NON_BLOCKING: c_uint = 1;

/// A stream of the device that was current on the thread that made it, and the driver's functions
/// on it. An address in device memory (`CUdeviceptr`, a u64) is kept as a pointer that is never
/// followed.
pub(crate) struct Stream {
    /// The driver, which explains the codes of its functions.
    driver: &'static Driver,
    /// The `CUstream`.
    stream: *mut c_void,
    /// The device of the stream. The program may have made another one current meanwhile.
    device: CurrentDevice,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> Code,
    free: unsafe extern "C" fn(u64) -> Code,
    upload: unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> Code,
    download: unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> Code,
    copy: unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> Code,
    query: unsafe extern "C" fn(*mut c_void) -> Code,
    /// The device's name, where the driver tells it.
    device_name: Option<String>,
}

impl Stream {
    /// A new stream on the device that is current on this thread.
    pub(crate) fn new() -> Result<Stream> {
        let driver = Driver::get()?;
        // SAFETY: cuda.h fixes the signature of the function of each name, and the type of the
        // variable or field repeats it, here and below.
        let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> Code =
            unsafe { driver.function("cuStreamCreate")? };
        // SAFETY: as above.
        let mut stream = unsafe {
            Stream {
                driver,
                stream: std::ptr::null_mut(),
                device: CurrentDevice::of_this_thread(None)?,
                allocate: driver.function("cuMemAlloc_v2")?,
                free: driver.function("cuMemFree_v2")?,
                upload: driver.function("cuMemcpyHtoDAsync_v2")?,
                download: driver.function("cuMemcpyDtoHAsync_v2")?,
                copy: driver.function("cuMemcpyDtoDAsync_v2")?,
                query: driver.function("cuStreamQuery")?,
                device_name: None,
            }
        };
        // SAFETY: the out-parameter is valid.
        driver.check("cuStreamCreate", unsafe { create(&mut stream.stream, NON_BLOCKING) })?;
        stream.device_name = driver.current_device().ok().and_then(|device| device_name(driver, device));
        Ok(stream)
    }

    /// The `CUstream`.
    pub(crate) fn raw(&self) -> *mut c_void {
        self.stream
    }

    pub(crate) fn device_name(&self) -> Option<&str> {
        self.device_name.as_deref()
    }

    /// Whether all work on the stream is done. Fails where some of it failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as the process.
        match unsafe { (self.query)(self.stream) } {
            NOT_READY => Ok(false),
            code => self.driver.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Runs `work` with the stream's device current on this thread, and makes the thread's own
    /// device current again. A thread that had no current device has the stream's device
    /// afterwards.
    fn on_device(&self, work: impl FnOnce() -> Code) -> Result<Code> {
        let own = CurrentDevice::of_this_thread(None)?;
        self.device.select()?;
        let code = work();
        // The work is done. A device that cannot be selected is an error of the thread's next call.
        let _ = own.select();
        Ok(code)
    }

    /// Memory on the stream's device.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        let mut address = 0;
        // SAFETY: the out-parameter is valid.
        let code = self.on_device(|| unsafe { (self.allocate)(&mut address, bytes) })?;
        let allocated = self.driver.check("cuMemAlloc", code);
        allocated.map_err(|error| error.within(&format!("no memory for {bytes} bytes")))?;
        Ok(address as *mut u8)
    }

    /// Gives memory back that [`allocate`](Stream::allocate) gave, when the stream is idle.
    pub(crate) fn free(&self, address: *mut u8) {
        // SAFETY: the driver allocated it, and no work on the stream uses it any more.
        let free = || unsafe { (self.free)(address as u64) };
        // The memory of a device that fails is not needed any more.
        let _ = self.on_device(free);
    }

    /// Queues a copy from the host. The bytes must stay until the stream is idle.
    pub(crate) fn upload(&self, to: *mut u8, from: &[u8]) -> Result<()> {
        // SAFETY: `to` lies in a buffer with room for them; the caller waits for the stream.
        let upload = || unsafe { (self.upload)(to as u64, from.as_ptr().cast(), from.len(), self.stream) };
        let code = self.on_device(upload)?;
        self.driver.check("cuMemcpyHtoDAsync", code)
    }

    /// Queues a copy to the host. `to` must stay until the stream is idle.
    pub(crate) fn download(&self, to: &mut [u8], from: *mut u8) -> Result<()> {
        // SAFETY: as in `upload`, the other way.
        let download = || unsafe { (self.download)(to.as_mut_ptr().cast(), from as u64, to.len(), self.stream) };
        let code = self.on_device(download)?;
        self.driver.check("cuMemcpyDtoHAsync", code)
    }

    /// Queues a copy between two buffers.
    pub(crate) fn copy(&self, to: *mut u8, from: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: both buffers hold that many bytes, and are kept until the stream is idle.
        let code = self.on_device(|| unsafe { (self.copy)(to as u64, from as u64, bytes, self.stream) })?;
        self.driver.check("cuMemcpyDtoDAsync", code)
    }
}

/// The name of a device; `None` where the driver does not tell it.
fn device_name(driver: &Driver, device: c_int) -> Option<String> {
    // SAFETY: cuda.h fixes the signature of the function of this name, and the type repeats it.
    let name: unsafe extern "C" fn(*mut u8, c_int, c_int) -> Code = unsafe { driver.function("cuDeviceGetName").ok()? };
    let mut text = [0u8; 256];
    // SAFETY: the text is as long as the call is told.
    let code = unsafe { name(text.as_mut_ptr(), text.len() as c_int, device) };
    let length = text.iter().position(|byte| *byte == 0).unwrap_or(0);
    (code == 0).then(|| String::from_utf8_lossy(&text[..length]).into_owned())
}
