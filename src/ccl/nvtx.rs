//! NVTX ranges for the operations of a mesh, where a tool such as Nsight Systems listens.
//!
//! NVTX is a protocol between a library that marks ranges and a tool that records them. Version 3
//! has no library of its own between the two: each library that marks ranges loads the tool, which
//! `NVTX_INJECTION64_PATH` names, and calls its `InitializeInjectionNvtx2`. The tool asks back for
//! tables of function pointers, and fills in its own functions. (NVIDIA/NVTX,
//! nvtxDetail/nvtxInit.h and nvtxTypes.h, which also have the numbers below.)
//!
//! Without the variable nothing is loaded, and an operation costs one look at a flag.

use std::cell::UnsafeCell;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use crate::logging::Me;

/// The variable that names the tool.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// The name of the tool's function that attaches it.
const ATTACH: &[u8] = b"InitializeInjectionNvtx2\0";
/// The name of the domain, under which a tool shows the ranges.
const DOMAIN: &std::ffi::CStr = c"libdevicemesh";
/// The version of the protocol.
const VERSION: u16 = 3;

/// The tables that a tool can ask for: callbacks, and the version.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

/// The number of places for functions in each module, including the place 0, which holds no
/// function. The first module is number 1.
const FUNCTIONS: [usize; 6] = [16, 9, 15, 7, 16, 7];
/// The index of the module whose functions take a domain, counted from 0.
const CORE2: usize = 4;
/// The places of three functions of that module.
const RANGE_PUSH: usize = 4;
const RANGE_POP: usize = 5;
const DOMAIN_CREATE: usize = 12;
/// The largest number of places in a module, including the NULL behind the last function.
const MOST: usize = 17;

/// The values of [`STATE`]: before the first operation, without a tool, and with a tool.
const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
static ATTACHING: Once = Once::new();
static TOOL: Tool = Tool(UnsafeCell::new(Functions {
    slots: [[ptr::null_mut(); MOST]; 6],
    tables: [[ptr::null_mut(); MOST]; 6],
    domain: ptr::null_mut(),
}));

/// The functions that the tool has filled in.
struct Functions {
    /// The functions of each module. The place 0 stays NULL.
    slots: [[*mut c_void; MOST]; 6],
    /// The address of each slot, as a tool asks for them.
    tables: [[*mut *mut c_void; MOST]; 6],
    /// The tool's handle of the domain.
    domain: *mut c_void,
}

struct Tool(UnsafeCell<Functions>);

// SAFETY: only the thread that attaches the tool writes, and the other threads read after it is
// done.
unsafe impl Sync for Tool {}

/// A range of the calling thread. It ends when it is dropped.
pub(crate) struct Range(());

/// How an event is described to the tool (`nvtxEventAttributes_t`).
#[repr(C)]
struct Event {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

/// The payload is an unsigned number of 64 bits, and the message is bytes of text.
const UNSIGNED: i32 = 1;
const TEXT: i32 = 1;

#[repr(C)]
struct Callbacks {
    size: usize,
    module: unsafe extern "C" fn(c_uint, *mut *mut *mut *mut c_void, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_tool_version: extern "C" fn(u32),
}

static EXPORTED_CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), module: functions_of };
static EXPORTED_VERSION: VersionInfo =
    VersionInfo { size: size_of::<VersionInfo>(), version: VERSION as u32, reserved: 0, set_tool_version };

/// Begins a range. The tool shows `name` and `number`. Returns `None` where no tool listens.
#[inline]
pub(crate) fn range(name: impl FnOnce() -> String, number: u64) -> Option<Range> {
    match STATE.load(Ordering::Acquire) {
        OFF => None,
        _ => begin(&name(), number),
    }
}

#[cold]
fn begin(name: &str, number: u64) -> Option<Range> {
    ATTACHING.call_once(|| STATE.store(if attach() { ON } else { OFF }, Ordering::Release));
    if STATE.load(Ordering::Acquire) != ON {
        return None;
    }
    // SAFETY: the tool is attached, so nobody writes any more.
    let tool = unsafe { &*TOOL.0.get() };
    let name = CString::new(name.replace('\0', "")).ok()?;
    let event = Event {
        version: VERSION,
        size: size_of::<Event>() as u16,
        category: 0,
        color_type: 0,
        color: 0,
        payload_type: UNSIGNED,
        reserved: 0,
        payload: number,
        message_type: TEXT,
        message: name.as_ptr(),
    };
    type Push = unsafe extern "C" fn(*mut c_void, *const Event) -> c_int;
    // SAFETY: `attach` has found the function, which the tool gave for this place of the table.
    // The event and its message outlive the call, and a tool copies what it keeps.
    unsafe { std::mem::transmute::<*mut c_void, Push>(tool.slots[CORE2][RANGE_PUSH])(tool.domain, &raw const event) };
    Some(Range(()))
}

impl Drop for Range {
    fn drop(&mut self) {
        type Pop = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: there is a range, so the tool is attached.
        let tool = unsafe { &*TOOL.0.get() };
        // SAFETY: as in `begin`.
        unsafe { std::mem::transmute::<*mut c_void, Pop>(tool.slots[CORE2][RANGE_POP])(tool.domain) };
    }
}

/// Loads the tool and attaches it. Returns whether it listens to ranges.
fn attach() -> bool {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else { return false };
    // SAFETY: whoever sets the variable wants the tool to run in this process.
    let library = match unsafe { Library::open(Some(&path), RTLD_LAZY | RTLD_LOCAL) } {
        Ok(library) => library,
        Err(why) => {
            log::warn!("{Me}: marks no NVTX ranges, because {VARIABLE} cannot be loaded: {why}");
            return false;
        }
    };
    type Attach = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
    // SAFETY: the protocol gives the function this type.
    let Ok(function) = (unsafe { library.get::<Attach>(ATTACH) }) else {
        log::warn!("{Me}: marks no NVTX ranges, because {} has no InitializeInjectionNvtx2", path.to_string_lossy());
        return false;
    };
    // SAFETY: only this thread attaches the tool, and no thread reads before the state says that
    // it is attached.
    let tool = unsafe { &mut *TOOL.0.get() };
    for (slots, (table, count)) in tool.slots.iter_mut().zip(tool.tables.iter_mut().zip(FUNCTIONS)) {
        for place in 1..count {
            table[place] = &raw mut slots[place];
        }
    }
    // SAFETY: the tool reads the tables by `exported`, and writes to their slots.
    if unsafe { (*function)(exported) } == 0 {
        return false;
    }
    // The tool's functions are used until the process ends.
    std::mem::forget(library);
    // SAFETY: the tool has written through the tables, so the slots are read anew.
    let tool = unsafe { &mut *TOOL.0.get() };
    let [create, push, pop] = [DOMAIN_CREATE, RANGE_PUSH, RANGE_POP].map(|place| tool.slots[CORE2][place]);
    if push.is_null() || pop.is_null() {
        return false;
    }
    if !create.is_null() {
        type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
        // SAFETY: the tool gave the function for this place, and the name is a text.
        tool.domain = unsafe { std::mem::transmute::<*mut c_void, Create>(create)(DOMAIN.as_ptr()) };
    }
    true
}

/// Gives the tool the table of that number.
extern "C" fn exported(table: u32) -> *const c_void {
    match table {
        CALLBACKS => (&raw const EXPORTED_CALLBACKS).cast(),
        VERSION_INFO => (&raw const EXPORTED_VERSION).cast(),
        _ => ptr::null(),
    }
}

/// Gives the tool the places for its functions of a module, and returns 1. Returns 0 for an
/// unknown module.
///
/// # Safety
/// The two pointers are NULL or can be written.
unsafe extern "C" fn functions_of(module: c_uint, table: *mut *mut *mut *mut c_void, count: *mut c_uint) -> c_int {
    let Some(at) = (module as usize).checked_sub(1).filter(|at| *at < FUNCTIONS.len()) else { return 0 };
    // SAFETY: the address alone is taken. The tool asks while it is attached, and may keep it.
    let first = unsafe { (&raw mut (*TOOL.0.get()).tables[at]).cast::<*mut *mut c_void>() };
    // SAFETY: the caller's contract.
    unsafe {
        if !table.is_null() {
            table.write(first);
        }
        if !count.is_null() {
            count.write(FUNCTIONS[at] as c_uint);
        }
    }
    1
}

extern "C" fn set_tool_version(_version: u32) {}
