//! A stream of the CUDA driver and memory beside it, through the few functions that this takes.
//! They are found in libcuda at run time, as in `ccl`.

use std::ffi::{c_int, c_uint, c_void};

use libloading::os::unix::Library;

use crate::error::{Error, Result, Status};

/// `CUresult`.
type Code = c_int;

/// `CUDA_ERROR_NOT_READY`: the stream still has work.
const NOT_READY: Code = 600;
/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the null stream.
const NON_BLOCKING: c_uint = 1;

/// A stream of the device that was current on the thread that made it, and the driver's functions
/// on it. An address in device memory (`CUdeviceptr`, a u64) is kept as a pointer that is never
/// followed.
pub(super) struct Stream {
    stream: *mut c_void,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> Code,
    free: unsafe extern "C" fn(u64) -> Code,
    upload: unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> Code,
    download: unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> Code,
    copy: unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> Code,
    query: unsafe extern "C" fn(*mut c_void) -> Code,
    /// The device's name, where the driver tells it.
    device_name: Option<String>,
    /// Keeps the functions in the process.
    _library: Library,
}

impl Stream {
    /// A new stream on the device that is current on this thread.
    pub(super) fn new() -> Result<Stream> {
        // SAFETY: libcuda's initialisers are run by dlopen as in any program that links it.
        let library = unsafe { Library::new("libcuda.so.1") }
            .map_err(|error| Error::new(Status::Device, format!("libcuda.so.1: {error}")))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: this is the address of the C function of that name, whose signature
                // cuda.h fixes and the variable or field repeats.
                unsafe { library.get(concat!($name, "\0").as_bytes()) }.ok().map(|function| *function)
            };
            ($name:literal, core) => {
                symbol!($name)
                    .ok_or_else(|| Error::new(Status::Device, concat!("libcuda.so.1 has no symbol ", $name)))?
            };
        }
        let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> Code = symbol!("cuStreamCreate", core);
        let device: unsafe extern "C" fn(*mut c_int) -> Code = symbol!("cuCtxGetDevice", core);
        let name: Option<unsafe extern "C" fn(*mut u8, c_int, c_int) -> Code> = symbol!("cuDeviceGetName");
        let mut stream = Stream {
            stream: std::ptr::null_mut(),
            allocate: symbol!("cuMemAlloc_v2", core),
            free: symbol!("cuMemFree_v2", core),
            upload: symbol!("cuMemcpyHtoDAsync_v2", core),
            download: symbol!("cuMemcpyDtoHAsync_v2", core),
            copy: symbol!("cuMemcpyDtoDAsync_v2", core),
            query: symbol!("cuStreamQuery", core),
            device_name: None,
            _library: library,
        };
        // SAFETY: the out-parameter is valid.
        check("cuStreamCreate", unsafe { create(&mut stream.stream, NON_BLOCKING) })?;
        let (mut number, mut text) = (0, [0u8; 256]);
        // SAFETY: the out-parameters are valid, and the text is as long as the call is told.
        let is_named = unsafe {
            device(&mut number) == 0
                && name.is_some_and(|name| name(text.as_mut_ptr(), text.len() as c_int, number) == 0)
        };
        let length = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        stream.device_name = is_named.then(|| String::from_utf8_lossy(&text[..length]).into_owned());
        Ok(stream)
    }

    /// The `CUstream`.
    pub(super) fn raw(&self) -> *mut c_void {
        self.stream
    }

    pub(super) fn device_name(&self) -> Option<&str> {
        self.device_name.as_deref()
    }

    /// Whether all work on the stream is done. Fails where some of it failed.
    pub(super) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as the process.
        match unsafe { (self.query)(self.stream) } {
            NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        let mut address = 0;
        // SAFETY: the out-parameter is valid.
        check("cuMemAlloc", unsafe { (self.allocate)(&mut address, bytes) })
            .map_err(|error| error.within(&format!("no memory for {bytes} bytes")))?;
        Ok(address as *mut u8)
    }

    /// Gives memory back that [`allocate`](Stream::allocate) gave, when the stream is idle.
    pub(super) fn free(&self, address: *mut u8) {
        // SAFETY: the driver allocated it, and no work on the stream uses it any more.
        unsafe { (self.free)(address as u64) };
    }

    /// Queues a copy from the host. The bytes must stay until the stream is idle.
    pub(super) fn upload(&self, to: *mut u8, from: &[u8]) -> Result<()> {
        // SAFETY: `to` lies in a buffer with room for them; the caller waits for the stream.
        let code = unsafe { (self.upload)(to as u64, from.as_ptr().cast(), from.len(), self.stream) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Queues a copy to the host. `to` must stay until the stream is idle.
    pub(super) fn download(&self, to: &mut [u8], from: *mut u8) -> Result<()> {
        // SAFETY: as in `upload`, the other way.
        let code = unsafe { (self.download)(to.as_mut_ptr().cast(), from as u64, to.len(), self.stream) };
        check("cuMemcpyDtoHAsync", code)
    }

    /// Queues a copy between two buffers.
    pub(super) fn copy(&self, to: *mut u8, from: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: both buffers hold that many bytes, and are kept until the stream is idle.
        let code = unsafe { (self.copy)(to as u64, from as u64, bytes, self.stream) };
        check("cuMemcpyDtoDAsync", code)
    }
}

fn check(call: &str, code: Code) -> Result<()> {
    match code {
        0 => Ok(()),
        code => {
            Err(Error::new(Status::Device, format!("{call} of the CUDA driver gives {code}")).with_device_error(code))
        }
    }
}
