//! The CUDA driver, found in libcuda at run time, with the functions for choosing a device.
//!
//! This is a table of our own, as for NCCL. cudarc's table takes all 483 functions of the CUDA
//! release that it was made for, and panics where the driver lacks one of them. So under an older
//! driver it could not even tell whether there is a driver.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

use crate::error::{Error, Result, Status};

/// `CUresult`.
pub(super) type Code = c_int;

/// `CUcontext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Context(*mut c_void);

// SAFETY: a context belongs to the process; the driver takes it on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The CUDA release of the oldest driver that works with any NCCL which the loader takes: NCCL
/// 2.14 was built for CUDA 10.2 and later.
const OLDEST: c_int = 10_020;

/// `CUresult` values for which a message has advice (cuda.h).
const STUB_LIBRARY: Code = 34;
const NO_DEVICE: Code = 100;
const SYSTEM_NOT_READY: Code = 802;
const SYSTEM_DRIVER_MISMATCH: Code = 803;
const UNKNOWN: Code = 999;

/// The driver, initialised.
pub(super) struct Driver {
    get_version: unsafe extern "C" fn(*mut c_int) -> Code,
    get_count: unsafe extern "C" fn(*mut c_int) -> Code,
    get_device: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    get_uuid: Option<unsafe extern "C" fn(*mut [u8; 16], c_int) -> Code>,
    get_pci_address: Option<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code>,
    retain_primary: unsafe extern "C" fn(*mut Context, c_int) -> Code,
    get_current: unsafe extern "C" fn(*mut Context) -> Code,
    set_current: unsafe extern "C" fn(Context) -> Code,
    current_device: unsafe extern "C" fn(*mut c_int) -> Code,
    error_name: Option<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>,
    error_string: Option<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>,
    /// Keeps the functions in the process, and finds further ones.
    library: Library,
}

impl Driver {
    /// The driver of this machine; `DM_STATUS_DEVICE` with the reason where there is none that
    /// works. After a failure, the next call tries again.
    pub(super) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceCell<Driver> = OnceCell::new();
        DRIVER.get_or_try_init(|| {
            // SAFETY: libcuda's initialisers are run by dlopen as in any program that links it.
            let opened = unsafe { Library::new("libcuda.so.1") };
            let library = opened.map_err(|error| {
                let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                let why = why.replace('\n', " ");
                no_driver(&format!("{why}; use device type cpu, or install the driver"))
            })?;
            Driver::load(library)
        })
    }

    fn load(library: Library) -> Result<Driver> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the address is that of the C function of this name, whose signature
                // cuda.h fixes and the field it goes into repeats.
                unsafe { library.get(concat!($name, "\0").as_bytes()) }.ok().map(|function| *function)
            };
            ($name:literal, core) => {
                symbol!($name).ok_or_else(|| lacks($name))?
            };
        }
        let init: unsafe extern "C" fn(c_uint) -> Code = symbol!("cuInit", core);
        let driver = Driver {
            get_version: symbol!("cuDriverGetVersion", core),
            get_count: symbol!("cuDeviceGetCount", core),
            get_device: symbol!("cuDeviceGet", core),
            // The second version of the function (CUDA 11.4) tells the parts of a shared device
            // (MIG) apart.
            get_uuid: symbol!("cuDeviceGetUuid_v2").or_else(|| symbol!("cuDeviceGetUuid")),
            get_pci_address: symbol!("cuDeviceGetPCIBusId"),
            retain_primary: symbol!("cuDevicePrimaryCtxRetain", core),
            get_current: symbol!("cuCtxGetCurrent", core),
            set_current: symbol!("cuCtxSetCurrent", core),
            current_device: symbol!("cuCtxGetDevice", core),
            error_name: symbol!("cuGetErrorName"),
            error_string: symbol!("cuGetErrorString"),
            library,
        };
        let version = driver.version()?;
        if version < OLDEST {
            let (this, oldest) = (dotted(version), dotted(OLDEST));
            return Err(no_driver(&format!(
                "the installed one supports CUDA {this}, and NCCL needs {oldest} at the least; install a newer one"
            )));
        }
        // SAFETY: cuInit knows no flag but 0.
        driver.check("cuInit", unsafe { init(0) })?;
        Ok(driver)
    }

    /// The CUDA release that the driver supports: 12020 is CUDA 12.2.
    pub(super) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: the out-parameter is valid, here and below.
        self.check("cuDriverGetVersion", unsafe { (self.get_version)(&mut version) }).map(|()| version)
    }

    /// Number of devices that this process may use.
    pub(super) fn count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: as above.
        self.check("cuDeviceGetCount", unsafe { (self.get_count)(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device of that number.
    pub(super) fn device(&self, number: usize) -> Result<c_int> {
        let (mut device, number) = (0, c_int::try_from(number).unwrap_or(c_int::MAX));
        // SAFETY: as above.
        self.check("cuDeviceGet", unsafe { (self.get_device)(&mut device, number) }).map(|()| device)
    }

    /// The device's identity, which no other device or part of a device on any host has; `None`
    /// where the driver does not tell it.
    pub(super) fn uuid(&self, device: c_int) -> Option<String> {
        let mut uuid = [0; 16];
        // SAFETY: as above.
        let code = unsafe { (self.get_uuid?)(&mut uuid, device) };
        (code == 0).then(|| uuid.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The device's PCI address in the form that Linux uses, as "0000:17:00.0"; `None` where the
    /// driver does not tell it.
    pub(super) fn pci_address(&self, device: c_int) -> Option<String> {
        let mut text = [0; 32];
        // SAFETY: the driver writes at most the length that it is given, with a zero at the end.
        let code = unsafe { (self.get_pci_address?)(text.as_mut_ptr().cast(), text.len() as c_int, device) };
        let text = CStr::from_bytes_until_nul(&text).ok().filter(|_| code == 0)?;
        Some(text.to_str().ok()?.to_ascii_lowercase())
    }

    /// The context that the runtime API uses on that device. It is kept until the process ends, as
    /// the runtime API does too.
    pub(super) fn primary_context(&self, device: c_int) -> Result<Context> {
        let mut context = Context(std::ptr::null_mut());
        // SAFETY: as above.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (self.retain_primary)(&mut context, device) })?;
        Ok(context)
    }

    /// The calling thread's context, if it has one.
    pub(super) fn current(&self) -> Result<Option<Context>> {
        let mut context = Context(std::ptr::null_mut());
        // SAFETY: as above.
        self.check("cuCtxGetCurrent", unsafe { (self.get_current)(&mut context) })?;
        Ok((!context.0.is_null()).then_some(context))
    }

    /// The device of the calling thread's context.
    pub(super) fn current_device(&self) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: as above.
        self.check("cuCtxGetDevice", unsafe { (self.current_device)(&mut device) }).map(|()| device)
    }

    /// Makes a context the calling thread's.
    pub(super) fn set_current(&self, context: Context) -> Result<()> {
        // SAFETY: contexts come from this driver and are never released here.
        self.check("cuCtxSetCurrent", unsafe { (self.set_current)(context) })
    }

    /// A further function of the driver, by its name in cuda.h.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller's contract.
        let found = unsafe { self.library.get::<F>(name.as_bytes()) };
        found.map(|function| *function).map_err(|_| lacks(name))
    }

    /// Turns a result code into an error with the driver's own words, and advice where there is
    /// some.
    pub(super) fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: Option<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>| {
            let mut text = std::ptr::null();
            // SAFETY: the out-parameter is valid; what is written there is a static string or NULL.
            unsafe {
                let known = function.is_some_and(|function| function(code, &mut text) == 0) && !text.is_null();
                known.then(|| CStr::from_ptr(text).to_string_lossy().trim().to_owned())
            }
        };
        let meaning: Vec<String> = [text(self.error_name), text(self.error_string)].into_iter().flatten().collect();
        let meaning = if meaning.is_empty() { String::new() } else { format!(" ({})", meaning.join(": ")) };
        let advice = match code {
            STUB_LIBRARY => "; libcuda.so.1 is the stub of the CUDA toolkit: take its folder out of LD_LIBRARY_PATH",
            NO_DEVICE => "; the driver sees no device: is CUDA_VISIBLE_DEVICES right, and does nvidia-smi list one?",
            SYSTEM_NOT_READY => "; is the fabric manager running?",
            SYSTEM_DRIVER_MISMATCH => {
                "; libcuda and the kernel's driver are of different releases: restart after the update"
            }
            UNKNOWN => "; does nvidia-smi work here? after a suspend, or in a container, nvidia_uvm may be missing",
            _ => "",
        };
        let message = format!("{call} of the CUDA driver gives {code}{meaning}{advice}");
        Err(Error::new(Status::Device, message).with_device_error(code))
    }
}

/// A CUDA version as people write it: 12020 is 12.2.
pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn lacks(symbol: &str) -> Error {
    no_driver(&format!("libcuda.so.1 has no symbol {symbol}"))
}

fn no_driver(why: &str) -> Error {
    Error::new(Status::Device, format!("no CUDA driver that works: {why}"))
}
