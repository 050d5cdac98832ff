//! Refuses host memory and memory of another device where NCCL expects memory of its own device.
//! Its kernel would fault on such memory, which breaks the device for the whole process.
//!
//! The driver is asked once for each range of memory: each thread remembers ranges that were right.
//! A range that was wrong is never remembered, so memory that is freed and used for something else
//! is never refused by mistake. At worst a wrong buffer at the address of an earlier right one is
//! not found, as without this check. `DM_CHECK_POINTERS=1` asks for every call, and
//! `DM_CHECK_POINTERS=0` never asks.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};

use once_cell::sync::OnceCell;

use super::cuda::{Code, Driver};
use super::functions::RawComm;
use super::library::Library;
use super::types::result;
use crate::error::{Error, Result};

/// The environment variable that sets how often the driver is asked.
const VARIABLE: &str = "DM_CHECK_POINTERS";

/// How many ranges a thread remembers.
const SLOTS: usize = 64;
/// Addresses that differ by less than this share a slot: the driver gives out memory in pieces of
/// 2 MiB.
const SLOT_BITS: u32 = 21;

/// A range of memory that is right for a communicator. An empty range fits no address.
#[derive(Clone, Copy)]
struct Known {
    /// The first address.
    start: usize,
    /// The number of bytes.
    len: usize,
    /// The communicator, whose device has the memory.
    comm: usize,
}

thread_local! {
    static KNOWN: [Cell<Known>; SLOTS] =
        const { [const { Cell::new(Known { start: 0, len: 0, comm: 0 }) }; SLOTS] };
}

/// `CUpointer_attribute` values (cuda.h), in the order in which [`Answer`] has them.
const ATTRIBUTES: [c_uint; 5] = [MEMORY_TYPE, 8, 9, 11, 12];
const MEMORY_TYPE: c_uint = 2;
/// `CU_MEMORYTYPE_DEVICE`.
const ON_DEVICE: c_uint = 2;
/// `CUDA_ERROR_INVALID_VALUE`: the driver does not know the address.
const INVALID_VALUE: Code = 1;
/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`: the device reads any memory of the process.
const PAGEABLE_ACCESS: c_int = 88;

/// The facts that the driver tells about an address.
struct Answer {
    /// The `CUmemorytype`; 0 for memory that the driver does not know.
    memory_type: c_uint,
    /// Whether the memory is managed, so that every device may use it.
    is_managed: bool,
    /// The device to which the memory belongs.
    device: c_int,
    /// The first address of the allocation, and its length in bytes.
    range: (usize, usize),
}

/// The functions of the driver that tell about addresses.
struct Asker {
    get_all: unsafe extern "C" fn(c_uint, *const c_uint, *const *mut c_void, u64) -> Code,
    get_one: unsafe extern "C" fn(*mut c_void, c_uint, u64) -> Code,
    get_attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code,
    /// Whether the driver is asked for every call.
    is_each: bool,
}

/// The functions, unless nobody is to be asked or the driver lacks one of them.
fn asker() -> Option<&'static Asker> {
    static ASKER: OnceCell<Option<Asker>> = OnceCell::new();
    let find = || {
        let mode = std::env::var(VARIABLE).unwrap_or_default();
        let driver = Driver::get().ok().filter(|_| mode != "0")?;
        // SAFETY: cuda.h fixes the signature of the function of each name, and the type of the
        // field repeats it.
        unsafe {
            Some(Asker {
                get_all: driver.function("cuPointerGetAttributes").ok()?,
                get_one: driver.function("cuPointerGetAttribute").ok()?,
                get_attribute: driver.function("cuDeviceGetAttribute").ok()?,
                is_each: mode == "1",
            })
        }
    };
    ASKER.get_or_init(find).as_ref()
}

fn slot(address: usize, comm: RawComm) -> usize {
    ((address >> SLOT_BITS) ^ (comm.0.addr() >> 6)) % SLOTS
}

impl Library {
    /// Fails when one of the buffers of a call on `comm` is host memory or lies on another device.
    /// NULL is left to the library.
    #[inline]
    pub(crate) fn check_pointers(&self, comm: RawComm, buffers: &[(&str, *const c_void)]) -> Result<()> {
        for (name, pointer) in buffers {
            let address = pointer.addr();
            let known = KNOWN.try_with(|known| known[slot(address, comm)].get()).ok();
            let is_known = known.is_some_and(|it| it.comm == comm.0.addr() && address.wrapping_sub(it.start) < it.len);
            if !is_known && address != 0 {
                self.ask_about(comm, name, address)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn ask_about(&self, comm: RawComm, name: &str, address: usize) -> Result<()> {
        let Some(asker) = asker() else { return Ok(()) };
        let Some(answer) = asker.ask(address) else { return Ok(()) };
        let device = self.device_of(comm);
        if answer.memory_type == 0 {
            // Some devices read all memory of the process (pageable memory access).
            return match device.is_some_and(|device| asker.reads_all_memory(device)) {
                true => Ok(()),
                false => Err(Error::invalid(format!(
                    "{name} is {address:#x}, which is host memory that the CUDA driver does not know, but device type cuda takes device memory: copy the data to device {}, or make the mesh on device type cpu ({VARIABLE}=0 leaves this check out)",
                    device.map_or_else(|| "memory".to_owned(), |device| device.to_string())
                ))),
            };
        }
        match device.filter(|device| answer.memory_type == ON_DEVICE && !answer.is_managed && *device != answer.device)
        {
            Some(device) => Err(Error::invalid(format!(
                "{name} is {address:#x}, which is memory of device {theirs}, but the communicator was made on device {device}: join the world with dm_world_options.device = {theirs} (DM_WORLD_DEVICE), or call cudaSetDevice({theirs}) before the world is joined, or let CUDA_VISIBLE_DEVICES show each rank one device ({VARIABLE}=0 leaves this check out)",
                theirs = answer.device
            ))),
            None => {
                let (start, len) = answer.range;
                if !asker.is_each {
                    let known = Known { start, len, comm: comm.0.addr() };
                    let _ = KNOWN.try_with(|all| all[slot(address, comm)].set(known));
                }
                Ok(())
            }
        }
    }

    /// The device on which a communicator was made; `None` where the library does not tell it.
    pub(crate) fn device_of(&self, comm: RawComm) -> Option<c_int> {
        let device_of = self.functions.device?;
        let mut device = 0;
        // SAFETY: the communicator is live, because a call on it is being made or it is being
        // asked, and the out-parameter is valid.
        (unsafe { device_of(comm, &mut device) } == result::SUCCESS).then_some(device)
    }
}

impl Asker {
    /// Returns the facts that the driver tells about an address; `None` where it tells none.
    fn ask(&self, address: usize) -> Option<Answer> {
        let (mut memory_type, mut is_managed, mut device): (c_uint, c_uint, c_int) = (0, 0, 0);
        let (mut start, mut len) = (0u64, 0usize);
        let places: [*mut c_void; 5] = [
            (&raw mut memory_type).cast(),
            (&raw mut is_managed).cast(),
            (&raw mut device).cast(),
            (&raw mut start).cast(),
            (&raw mut len).cast(),
        ];
        // SAFETY: there are five attributes, and each place has the type that cuda.h gives for its
        // attribute.
        let code = unsafe { (self.get_all)(5, ATTRIBUTES.as_ptr(), places.as_ptr(), address as u64) };
        let is_unknown = code == INVALID_VALUE && {
            // SAFETY: the place has the type of the attribute.
            let code = unsafe { (self.get_one)((&raw mut memory_type).cast(), MEMORY_TYPE, address as u64) };
            code == INVALID_VALUE
        };
        match (code, is_unknown) {
            (0, _) => {
                Some(Answer { memory_type, is_managed: is_managed & 1 == 1, device, range: (start as usize, len) })
            }
            (_, true) => Some(Answer { memory_type: 0, is_managed: false, device: 0, range: (0, 0) }),
            _ => None,
        }
    }

    fn reads_all_memory(&self, device: c_int) -> bool {
        let mut value = 0;
        // SAFETY: the out-parameter is valid.
        unsafe { (self.get_attribute)(&mut value, PAGEABLE_ACCESS, device) == 0 && value == 1 }
    }
}
