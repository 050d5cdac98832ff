//! Memory that collectives work on: the host's, or a GPU's with a stream of ours, through the few functions of the CUDA driver that this takes.

use std::alloc::{Layout, alloc_zeroed};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use devicemesh::comm::View;
use devicemesh::error::{Error, Result, Status};
use libloading::os::unix::Library;

/// As GPUs align what they allocate.
const ALIGNMENT: usize = 256;

/// Where buffers are made.
pub enum Memory {
    Host,
    Device(Box<Driver>),
}

/// Bytes there, until the process ends: after a failure a library may still be at work on them, and freeing memory of a device waits for that.
pub struct Buffer<'a> {
    memory: &'a Memory,
    at: *mut u8,
    bytes: usize,
}

type Code = c_int;

/// Addresses in device memory are `CUdeviceptr`, a u64; results are `CUresult`.
pub struct Driver {
    stream: *mut c_void,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> Code,
    upload: unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> Code,
    download: unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> Code,
    copy: unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> Code,
    query: unsafe extern "C" fn(*mut c_void) -> Code,
    device: Option<String>,
    _library: Library,
}

/// `CUDA_ERROR_NOT_READY`: the stream has still work.
const NOT_READY: Code = 600;

/// A wait for a stream asks without pause at first, then with a rest between.
const EAGER: Duration = Duration::from_millis(2);
const REST: Duration = Duration::from_micros(100);

impl Memory {
    /// For that device type. On cuda the world has made a device current on this thread; where its library needed none, one is chosen here as it would.
    pub fn open(device_type: &str, local_rank: usize) -> Result<Memory> {
        if device_type == "cpu" {
            return Ok(Memory::Host);
        }
        // SAFETY: libcuda's initialisers are run by dlopen as in any program that links it; the library has it open already.
        let library = unsafe { Library::new("libcuda.so.1") }
            .map_err(|error| Error::new(Status::Device, format!("libcuda.so.1: {error}")))?;
        Driver::load(library, local_rank).map(|driver| Memory::Device(Box::new(driver)))
    }

    pub fn stream(&self) -> *mut c_void {
        match self {
            Memory::Host => std::ptr::null_mut(),
            Memory::Device(driver) => driver.stream,
        }
    }

    /// What the device is called; `None` in host memory.
    pub fn device(&self) -> Option<String> {
        match self {
            Memory::Host => None,
            Memory::Device(driver) => driver.device.clone(),
        }
    }

    pub fn buffer(&self, bytes: usize) -> Result<Buffer<'_>> {
        let bytes = bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let at = match self {
            Memory::Host => {
                // SAFETY: the layout has a size.
                let at = unsafe { alloc_zeroed(layout(bytes)) };
                if at.is_null() {
                    return Err(Error::new(
                        Status::Device,
                        format!("no memory for {bytes} bytes; take smaller --sizes"),
                    ));
                }
                at
            }
            Memory::Device(driver) => {
                let mut address = 0;
                // SAFETY: the out-parameter is valid.
                check("cuMemAlloc", unsafe { (driver.allocate)(&mut address, bytes) }).map_err(|error| {
                    Error::new(Status::Device, format!("{} for {bytes} bytes; take smaller --sizes", error.message()))
                })?;
                address as *mut u8
            }
        };
        Ok(Buffer { memory: self, at, bytes })
    }

    /// Returns when what was put on the stream is done: the collectives of dimension `index` of `view`, which may fail meanwhile.
    pub fn settle(&self, view: &View, index: usize, patience: Duration) -> Result<()> {
        self.wait(patience, || view.check(index))
    }

    /// The same for copies.
    pub fn drain(&self) -> Result<()> {
        self.wait(Duration::from_secs(60), || Ok(()))
    }

    fn wait(&self, patience: Duration, check_up: impl Fn() -> Result<()>) -> Result<()> {
        let Memory::Device(driver) = self else { return Ok(()) };
        let began = Instant::now();
        loop {
            // SAFETY: the stream is ours.
            match unsafe { (driver.query)(driver.stream) } {
                NOT_READY => {}
                code => return check("cuStreamQuery", code),
            }
            let waited = began.elapsed();
            if waited > patience {
                return Err(Error::timeout(format!("the GPU has not done it after {} s", patience.as_secs_f64())));
            }
            if waited > EAGER {
                check_up()?;
                std::thread::sleep(REST);
            }
        }
    }

    /// Copies bytes from one buffer to another `times` times; done when the stream is.
    pub fn copy(&self, to: &Buffer<'_>, from: &Buffer<'_>, bytes: usize, times: usize) -> Result<()> {
        assert!(bytes <= to.bytes && bytes <= from.bytes);
        for _ in 0..times {
            match self {
                // SAFETY: both hold that many bytes; two buffers never overlap.
                Memory::Host => unsafe { std::ptr::copy_nonoverlapping(from.at, to.at, bytes) },
                Memory::Device(driver) => {
                    // SAFETY: as above, on the device.
                    let code = unsafe { (driver.copy)(to.at as u64, from.at as u64, bytes, driver.stream) };
                    check("cuMemcpyDtoDAsync", code)?;
                }
            }
            // So that no copy is left out as being for nothing.
            std::hint::black_box(to.at);
        }
        self.drain()
    }
}

impl Buffer<'_> {
    /// The address of byte `offset`.
    pub fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset < self.bytes);
        // SAFETY: inside the buffer.
        unsafe { self.at.add(offset).cast() }
    }

    pub fn put(&self, offset: usize, from: &[u8]) -> Result<()> {
        assert!(offset + from.len() <= self.bytes);
        match self.memory {
            // SAFETY: inside the buffer, which nobody else uses: the calls on it are done.
            Memory::Host => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at.add(offset), from.len()) },
            Memory::Device(driver) => {
                let to = self.at as u64 + offset as u64;
                // SAFETY: as above; the bytes stay until the stream is done, which is waited for.
                check("cuMemcpyHtoDAsync", unsafe {
                    (driver.upload)(to, from.as_ptr().cast(), from.len(), driver.stream)
                })?;
                self.memory.drain()?;
            }
        }
        Ok(())
    }

    pub fn get(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        assert!(offset + to.len() <= self.bytes);
        match self.memory {
            // SAFETY: as in put.
            Memory::Host => unsafe { std::ptr::copy_nonoverlapping(self.at.add(offset), to.as_mut_ptr(), to.len()) },
            Memory::Device(driver) => {
                let from = self.at as u64 + offset as u64;
                // SAFETY: as in put.
                check("cuMemcpyDtoHAsync", unsafe {
                    (driver.download)(to.as_mut_ptr().cast(), from, to.len(), driver.stream)
                })?;
                self.memory.drain()?;
            }
        }
        Ok(())
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGNMENT).unwrap_or_else(|_| Layout::new::<u8>())
}

impl Driver {
    fn load(library: Library, local_rank: usize) -> Result<Driver> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the address is that of the C function of this name, whose signature cuda.h fixes and the variable it goes into repeats.
                unsafe { library.get(concat!($name, "\0").as_bytes()) }.ok().map(|function| *function)
            };
            ($name:literal, core) => {
                symbol!($name)
                    .ok_or_else(|| Error::new(Status::Device, concat!("libcuda.so.1 has no symbol ", $name)))?
            };
        }
        let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> Code = symbol!("cuStreamCreate", core);
        let current: unsafe extern "C" fn(*mut *mut c_void) -> Code = symbol!("cuCtxGetCurrent", core);
        let device: unsafe extern "C" fn(*mut c_int) -> Code = symbol!("cuCtxGetDevice", core);
        let name: Option<unsafe extern "C" fn(*mut u8, c_int, c_int) -> Code> = symbol!("cuDeviceGetName");
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid. Before cuInit this is an error, and there is no context.
        if unsafe { current(&mut context) } != 0 || context.is_null() {
            let init: unsafe extern "C" fn(c_uint) -> Code = symbol!("cuInit", core);
            let count: unsafe extern "C" fn(*mut c_int) -> Code = symbol!("cuDeviceGetCount", core);
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> Code = symbol!("cuDeviceGet", core);
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Code =
                symbol!("cuDevicePrimaryCtxRetain", core);
            let make_current: unsafe extern "C" fn(*mut c_void) -> Code = symbol!("cuCtxSetCurrent", core);
            let (mut devices, mut device) = (0, 0);
            // SAFETY: the out-parameters are valid, and the context is kept for the process's life.
            unsafe {
                check("cuInit", init(0))?;
                check("cuDeviceGetCount", count(&mut devices))?;
                check("cuDeviceGet", get(&mut device, local_rank as c_int % devices.max(1)))?;
                check("cuDevicePrimaryCtxRetain", retain(&mut context, device))?;
                check("cuCtxSetCurrent", make_current(context))?;
            }
        }
        let mut driver = Driver {
            stream: std::ptr::null_mut(),
            allocate: symbol!("cuMemAlloc_v2", core),
            upload: symbol!("cuMemcpyHtoDAsync_v2", core),
            download: symbol!("cuMemcpyDtoHAsync_v2", core),
            copy: symbol!("cuMemcpyDtoDAsync_v2", core),
            query: symbol!("cuStreamQuery", core),
            device: None,
            _library: library,
        };
        // 1: it does not wait for the null stream (CU_STREAM_NON_BLOCKING).
        // SAFETY: the out-parameters are valid, here and below.
        check("cuStreamCreate", unsafe { create(&mut driver.stream, 1) })?;
        let (mut number, mut text) = (0, [0u8; 256]);
        // SAFETY: as above; the text is as long as said.
        let named = unsafe {
            device(&mut number) == 0
                && name.is_some_and(|name| name(text.as_mut_ptr(), text.len() as c_int, number) == 0)
        };
        let length = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        driver.device = named.then(|| String::from_utf8_lossy(&text[..length]).into_owned());
        Ok(driver)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_buffers_hold_what_is_put() {
        let memory = Memory::open("cpu", 0).unwrap();
        let (one, other) = (memory.buffer(1000).unwrap(), memory.buffer(1000).unwrap());
        one.put(3, &[1, 2, 3]).unwrap();
        memory.copy(&other, &one, 1000, 2).unwrap();
        let mut got = [9; 5];
        other.get(2, &mut got).unwrap();
        assert_eq!(got, [0, 1, 2, 3, 0]);
        assert_eq!(other.at(0) as usize % ALIGNMENT, 0);
    }
}
