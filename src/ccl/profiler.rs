//! NCCL's profiler plugin interface: with `NCCL_PROFILER_PLUGIN=/path/to/libdevicemesh.so` NCCL
//! tells this library of each collective and message that it launches, also of those that a program
//! calls itself. They go into the recording of the process, as the calls of this library do.
//!
//! The interface is that of NCCL's sources (plugins/profiler, Apache-2.0). A release looks for
//! the newest version of the interface that it knows first, and then for older ones:
//!
//! | NCCL | version | what is new |
//! |---|---|---|
//! | 2.26 | 3 | |
//! | 2.27 | 4 | the communicator's name, hash, size and rank go to `init`, and no longer into each event |
//! | 2.28 | 5 | the type of an event has 64 bits; events of the API |
//! | 2.29 and later | 6 | events of copy engines |
//!
//! # What is recorded
//!
//! - A call begins when NCCL launches it ([`COLLECTIVE`], [`MESSAGE`], [`COPY_COLLECTIVE`]), on the
//!   thread of the program. When the launch is over, the call is [`EntryState::Issued`]: its stream
//!   has it.
//! - The kernel of a call runs in several channels of NCCL. NCCL tells when each channel begins and
//!   ends ([`KERNEL`]), on its proxy thread. When all channels have ended, the call is
//!   [`EntryState::Done`]. A message is done when all of the channels that have begun have ended,
//!   because NCCL announces more channels than it uses for a small message (nccl#2056).
//! - A call of a CUDA graph begins each time that the graph is replayed, on a thread of CUDA. NCCL
//!   tells of it because this plugin asks for the ends of kernels. Version 3 cannot ask for them,
//!   so there NCCL may tell of such calls on some of the ranks only.
//! - NCCL does not tell the reduction.
//! - The calls of a communicator that a mesh has made belong to the dimension's group of the
//!   recording, which has its name (`mesh/tp`) and its ranks (the module `expected`). Version 3
//!   describes no communicator while it is made. With version 3, and for communicators that no
//!   mesh has made, the group has the name of the communicator, and no ranks.
//!
//! # Handles
//!
//! NCCL keeps a handle for each event and gives it back later, also as the parent of other events.
//! NCCL does not say when it is done with a handle. So a handle is a number and owns no memory:
//! the number of the call in `recorder::launched`, and whether the handle is that of the call's
//! launch or of one of its channels. A handle whose call is not kept any more is ignored.

mod calls;
mod expected;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use recording::{Call, NO_PEER, Operation};

pub(crate) use self::calls::records_its_calls;
use self::calls::{Communicator, Described};
pub(crate) use self::expected::{Expected, expect};
use super::types::{DATA_TYPES, NcclResult, result};
use crate::recorder::launched::{Left, begin_channel, end_channel, end_launch};

/// The kinds of events, as NCCL numbers them.
const COLLECTIVE: u64 = 1 << 1;
const MESSAGE: u64 = 1 << 2;
const KERNEL: u64 = 1 << 6;
const COPY_COLLECTIVE: u64 = 1 << 12;

/// The beginning of every event, as version 5 and 6 have it. Version 3 and 4 have one byte in the
/// place of `kind`; the other seven bytes say nothing there.
#[repr(C)]
struct Event<B> {
    /// One of the kinds of events.
    kind: u64,
    /// The handle of the event to which this one belongs.
    parent: *mut c_void,
    /// The rank in the communicator.
    rank: c_int,
    /// What only this kind of event has.
    body: B,
}

/// A collective, from version 4 on. Version 3 has it after a name and a hash. More fields follow
/// behind these.
#[repr(C)]
#[derive(Clone, Copy)]
struct Collective {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    channels: u8,
}

/// A message, from version 4 on. Version 3 has it after a name and a hash, and without `channels`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    function: *const c_char,
    buffer: *mut c_void,
    datatype: *const c_char,
    count: usize,
    peer: c_int,
    channels: u8,
}

/// What version 3 has before the fields of a collective or a message.
#[repr(C)]
#[derive(Clone, Copy)]
struct Named<B> {
    name: *const c_char,
    hash: u64,
    body: B,
}

/// The functions that all versions have in common. `I` is the type of `init`.
#[repr(C)]
pub struct Profiler<I> {
    name: *const c_char,
    init: I,
    start_event: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> NcclResult,
    stop_event: extern "C" fn(*mut c_void) -> NcclResult,
    record_event_state: extern "C" fn(*mut c_void, c_int, *const c_void) -> NcclResult,
    finalize: unsafe extern "C" fn(*mut c_void) -> NcclResult,
}

// SAFETY: nobody changes the text and the functions to which it points.
unsafe impl<I> Sync for Profiler<I> {}

/// `init` of version 3: the place for the context, and that for the kinds of events.
type InitV3 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> NcclResult;
/// `init` of version 4: in addition the communicator's name, hash, number of hosts, size and rank,
/// and NCCL's function for its log.
type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> NcclResult;
/// `init` of version 5 and 6: the hash comes before the kinds of events.
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> NcclResult;

/// The plugin for NCCL 2.26.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclProfiler_v3: Profiler<InitV3> = Profiler {
    name: c"libdevicemesh".as_ptr(),
    init: init_v3,
    start_event: start_event_v3,
    stop_event,
    record_event_state,
    finalize,
};

/// The plugin for NCCL 2.27.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclProfiler_v4: Profiler<InitV4> = Profiler {
    name: c"libdevicemesh".as_ptr(),
    init: init_v4,
    start_event: start_event_v4,
    stop_event,
    record_event_state,
    finalize,
};

/// The plugin for NCCL 2.28.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclProfiler_v5: Profiler<InitV5> = Profiler {
    name: c"libdevicemesh".as_ptr(),
    init: init_v5::<{ COLLECTIVE | MESSAGE | KERNEL }>,
    start_event,
    stop_event,
    record_event_state,
    finalize,
};

/// The plugin for NCCL 2.29 and later.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclProfiler_v6: Profiler<InitV5> = Profiler {
    name: c"libdevicemesh".as_ptr(),
    init: init_v5::<{ COLLECTIVE | MESSAGE | KERNEL | COPY_COLLECTIVE }>,
    start_event,
    stop_event,
    record_event_state,
    finalize,
};

unsafe extern "C" fn init_v3(context: *mut *mut c_void, events: *mut c_int) -> NcclResult {
    // SAFETY: NCCL's pointers are valid for the call.
    unsafe { begin(context, events, COLLECTIVE | MESSAGE, None) }
}

unsafe extern "C" fn init_v4(
    context: *mut *mut c_void,
    events: *mut c_int,
    name: *const c_char,
    hash: u64,
    _hosts: c_int,
    ranks: c_int,
    rank: c_int,
    _log: *const c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers are valid for the call.
    unsafe {
        let described = Described { name: borrowed(name), hash, rank, size: ranks };
        begin(context, events, COLLECTIVE | MESSAGE | KERNEL, Some(described))
    }
}

/// `init` of version 5 and 6, which differ in the kinds of events.
unsafe extern "C" fn init_v5<const KINDS: u64>(
    context: *mut *mut c_void,
    hash: u64,
    events: *mut c_int,
    name: *const c_char,
    _hosts: c_int,
    ranks: c_int,
    rank: c_int,
    _log: *const c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers are valid for the call.
    unsafe {
        let described = Described { name: borrowed(name), hash, rank, size: ranks };
        begin(context, events, KINDS, Some(described))
    }
}

/// Prepares the recording of a communicator that NCCL makes, and asks for these kinds of events.
/// Without a recording NCCL is told to do without the plugin, so it loses no time.
///
/// # Safety
/// `context` and `events` can be written.
unsafe fn begin(
    context: *mut *mut c_void,
    events: *mut c_int,
    kinds: u64,
    described: Option<Described<'_>>,
) -> NcclResult {
    let Some(communicator) = Communicator::new(described) else { return result::SYSTEM_ERROR };
    // SAFETY: the caller's contract.
    unsafe {
        *context = Box::into_raw(Box::new(communicator)).cast();
        *events = kinds as c_int;
    }
    result::SUCCESS
}

/// # Safety
/// The context is one of `begin`, or NULL. `event` is an event of version 3.
unsafe extern "C" fn start_event_v3(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *const c_void,
) -> NcclResult {
    // SAFETY: the caller's contract. The kind is the byte at the beginning.
    unsafe {
        let communicator = communicator(context);
        // Nobody says how large the communicator is.
        let open = |name, hash, rank| {
            communicator.inspect(|it| it.open_later(&Described { name: borrowed(name), hash, rank, size: 0 }))
        };
        *handle = match u64::from(*event.cast::<u8>()) {
            COLLECTIVE => {
                let Event { rank, body: Named { name, hash, body }, .. } = &*event.cast::<Event<Named<Collective>>>();
                launched(open(*name, *hash, *rank), &body.call(), Left::Unknown)
            }
            MESSAGE => {
                let Event { rank, body: Named { name, hash, body }, .. } = &*event.cast::<Event<Named<Message>>>();
                launched(open(*name, *hash, *rank), &body.call(), Left::Unknown)
            }
            _ => ptr::null_mut(),
        };
    }
    result::SUCCESS
}

/// # Safety
/// The context is one of `begin`, or NULL. `event` is an event of version 4.
unsafe extern "C" fn start_event_v4(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *const c_void,
) -> NcclResult {
    // SAFETY: the caller's contract. The kind is the byte at the beginning.
    unsafe { start(context, handle, event, u64::from(*event.cast::<u8>())) }
}

/// # Safety
/// The context is one of `begin`, or NULL. `event` is an event of version 5 or 6.
unsafe extern "C" fn start_event(context: *mut c_void, handle: *mut *mut c_void, event: *const c_void) -> NcclResult {
    // SAFETY: the caller's contract.
    unsafe { start(context, handle, event, *event.cast::<u64>()) }
}

/// # Safety
/// The contract of [`start_event`]. The event is of that kind.
unsafe fn start(context: *mut c_void, handle: *mut *mut c_void, event: *const c_void, kind: u64) -> NcclResult {
    // SAFETY: the caller's contract.
    unsafe {
        let communicator = communicator(context);
        *handle = match kind {
            COLLECTIVE => {
                let of = &(*event.cast::<Event<Collective>>()).body;
                let left = if of.channels == 0 { Left::Unknown } else { Left::Channels(of.channels) };
                launched(communicator, &of.call(), left)
            }
            // A copy engine has no kernel, and its event ends when its work is handed over.
            COPY_COLLECTIVE => {
                let of = &(*event.cast::<Event<Collective>>()).body;
                launched(communicator, &of.call(), Left::Unknown)
            }
            MESSAGE => {
                let of = &(*event.cast::<Event<Message>>()).body;
                let left = if of.channels == 0 { Left::Unknown } else { Left::Begun(0) };
                launched(communicator, &of.call(), left)
            }
            KERNEL => {
                let (number, _) = number_of((*event.cast::<Event<u8>>()).parent);
                begin_channel(number);
                handle_of(number, true)
            }
            _ => ptr::null_mut(),
        };
    }
    result::SUCCESS
}

impl Collective {
    /// The call as it is recorded.
    ///
    /// # Safety
    /// The texts are texts, or NULL.
    unsafe fn call(&self) -> Call {
        // SAFETY: the caller's contract.
        let (function, datatype) = unsafe { (borrowed(self.function), borrowed(self.datatype)) };
        let operation = match function.to_bytes() {
            b"AllReduce" => Operation::AllReduce,
            b"Reduce" => Operation::Reduce,
            b"Broadcast" => Operation::Broadcast,
            b"AllGather" => Operation::AllGather,
            b"ReduceScatter" => Operation::ReduceScatter,
            b"AlltoAll" => Operation::AllToAll,
            b"Gather" => Operation::Gather,
            b"Scatter" => Operation::Scatter,
            _ => Operation::Exchange,
        };
        let has_root =
            matches!(operation, Operation::Reduce | Operation::Broadcast | Operation::Gather | Operation::Scatter);
        let peer = if has_root { self.root } else { NO_PEER };
        Call { operation, dtype: dtype(datatype), reduction: 0, count: self.count as u64, peer, stream: 0 }
    }
}

impl Message {
    /// The call as it is recorded.
    ///
    /// # Safety
    /// The texts are texts, or NULL.
    unsafe fn call(&self) -> Call {
        // SAFETY: the caller's contract.
        let (function, datatype) = unsafe { (borrowed(self.function), borrowed(self.datatype)) };
        let operation = if function.to_bytes() == b"Recv" { Operation::Recv } else { Operation::Send };
        let (dtype, count) = (dtype(datatype), self.count as u64);
        Call { operation, dtype, reduction: 0, count, peer: self.peer, stream: 0 }
    }
}

/// The communicator of a context.
///
/// # Safety
/// The context is one of `begin`, or NULL.
unsafe fn communicator<'a>(context: *mut c_void) -> Option<&'a Communicator> {
    // SAFETY: the caller's contract.
    unsafe { context.cast::<Communicator>().as_ref() }
}

/// The handle of a call that is launched on a communicator.
fn launched(communicator: Option<&Communicator>, call: &Call, left: Left) -> *mut c_void {
    handle_of(communicator.map_or(0, |communicator| communicator.launch(call, left)), false)
}

/// Ends a launch, or what one of NCCL's channels does of a call.
extern "C" fn stop_event(handle: *mut c_void) -> NcclResult {
    match number_of(handle) {
        (number, false) => end_launch(number),
        (number, true) => end_channel(number),
    }
    result::SUCCESS
}

/// The events that are recorded have no states in between.
extern "C" fn record_event_state(_handle: *mut c_void, _state: c_int, _values: *const c_void) -> NcclResult {
    result::SUCCESS
}

/// Closes the group of a communicator that ends.
///
/// # Safety
/// The context is one of `begin` and was not given here before, or NULL.
unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    if !context.is_null() {
        // SAFETY: the caller's contract.
        drop(unsafe { Box::from_raw(context.cast::<Communicator>()) });
    }
    result::SUCCESS
}

/// The handle of a call's launch, or of what a channel does of it. NULL for call 0.
fn handle_of(number: u64, is_kernel: bool) -> *mut c_void {
    ptr::without_provenance_mut((number as usize) << 1 | usize::from(is_kernel && number != 0))
}

/// The number of the call, and whether the handle is that of a channel.
fn number_of(handle: *mut c_void) -> (u64, bool) {
    (handle.addr() as u64 >> 1, handle.addr() & 1 == 1)
}

/// The number of a type by NCCL's name for it, such as `ncclFloat32`. 255 for an unknown one.
fn dtype(name: &CStr) -> u8 {
    let name = name.to_str().ok().and_then(|name| name.strip_prefix("nccl")).unwrap_or_default();
    let known = DATA_TYPES.iter().position(|(known, _)| known.eq_ignore_ascii_case(name));
    known.map_or(u8::MAX, |number| number as u8)
}

/// The text, or an empty one for NULL.
///
/// # Safety
/// The pointer is NULL, or a text that lives as long as the result is used.
unsafe fn borrowed<'a>(text: *const c_char) -> &'a CStr {
    // SAFETY: the caller's contract.
    if text.is_null() { c"" } else { unsafe { CStr::from_ptr(text) } }
}
