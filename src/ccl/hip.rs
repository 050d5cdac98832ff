//! The functions of AMD's HIP runtime that are needed beside RCCL.
//!
//! RCCL is linked to the runtime, so its functions are found through RCCL's own handle: the copy
//! that RCCL itself calls. None of this has run on an AMD device yet (docs/nccl.md).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use super::cuda::Code;
use crate::error::{Error, Result, Status};

/// The HIP runtime that a communicator library uses.
#[derive(Clone, Copy)]
pub(super) struct Hip {
    get_device: unsafe extern "C" fn(*mut c_int) -> Code,
    set_device: unsafe extern "C" fn(c_int) -> Code,
    get_count: unsafe extern "C" fn(*mut c_int) -> Code,
    stream_query: Option<unsafe extern "C" fn(*mut c_void) -> Code>,
    stream_is_capturing: Option<unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code>,
    exchange_mode: Option<unsafe extern "C" fn(*mut c_uint) -> Code>,
    error_string: Option<unsafe extern "C" fn(Code) -> *const c_char>,
}

impl std::fmt::Debug for Hip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hip")
    }
}

impl Hip {
    /// The runtime of the library whose symbols `lookup` finds; `None` where that library is not
    /// linked to HIP.
    pub(super) fn of(lookup: impl Fn(&str) -> Option<*const c_void>) -> Option<Hip> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the address is that of the C function of this name, whose signature
                // hip_runtime_api.h fixes and the field it goes into repeats.
                lookup($name).map(|address| unsafe { std::mem::transmute(address) })
            };
        }
        Some(Hip {
            get_device: symbol!("hipGetDevice")?,
            set_device: symbol!("hipSetDevice")?,
            get_count: symbol!("hipGetDeviceCount")?,
            stream_query: symbol!("hipStreamQuery"),
            stream_is_capturing: symbol!("hipStreamIsCapturing"),
            exchange_mode: symbol!("hipThreadExchangeStreamCaptureMode"),
            error_string: symbol!("hipGetErrorString"),
        })
    }

    /// Whether this machine may have an AMD device: the kernel's driver is there.
    pub(super) fn may_have_device() -> bool {
        Path::new("/dev/kfd").exists()
    }

    /// The calling thread's device.
    pub(super) fn current_device(&self) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: the out-parameter is valid.
        self.check("hipGetDevice", unsafe { (self.get_device)(&mut device) }).map(|()| device)
    }

    /// Makes a device the calling thread's.
    pub(super) fn set_device(&self, device: c_int) -> Result<()> {
        // SAFETY: the runtime refuses a device that is not there.
        self.check("hipSetDevice", unsafe { (self.set_device)(device) })
    }

    /// Whether the runtime sees at least one device.
    pub(super) fn has_device(&self) -> bool {
        let mut count = 0;
        // SAFETY: the out-parameter is valid.
        unsafe { (self.get_count)(&mut count) == 0 && count > 0 }
    }

    /// `hipStreamQuery`.
    pub(super) fn stream_query(&self) -> Result<unsafe extern "C" fn(*mut c_void) -> Code> {
        self.stream_query.ok_or_else(|| Error::new(Status::Device, "the HIP runtime has no symbol hipStreamQuery"))
    }

    /// `hipStreamIsCapturing`; `None` where the runtime lacks it.
    pub(super) fn stream_is_capturing(&self) -> Option<unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code> {
        self.stream_is_capturing
    }

    /// `hipThreadExchangeStreamCaptureMode`; `None` where the runtime lacks it.
    pub(super) fn exchange_mode(&self) -> Option<unsafe extern "C" fn(*mut c_uint) -> Code> {
        self.exchange_mode
    }

    /// Turns a result code into an error with the runtime's own words.
    pub(super) fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let meaning = self.error_string.map_or(std::ptr::null(), |text| {
            // SAFETY: the runtime gives a static string for every code.
            unsafe { text(code) }
        });
        let meaning = match meaning.is_null() {
            true => String::new(),
            // SAFETY: not NULL, and a C string by the runtime's documentation.
            false => format!(" ({})", unsafe { CStr::from_ptr(meaning) }.to_string_lossy().trim()),
        };
        let message = format!("{call} of the HIP runtime gives {code}{meaning}");
        Err(Error::new(Status::Device, message).with_device_error(code))
    }
}
