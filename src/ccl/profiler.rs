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
//! - A call begins when NCCL launches it, on the thread of the program ([`COLLECTIVE`],
//!   [`MESSAGE`], [`COPY_COLLECTIVE`]). When the launch is over, the call is
//!   [`EntryState::Issued`]: its stream has it.
//! - The kernel of a call runs in several channels of NCCL. NCCL tells when each channel begins and
//!   ends ([`KERNEL`]), on its proxy thread. When all channels have ended, the call is
//!   [`EntryState::Done`].
//! - A replay of a CUDA graph launches nothing, so NCCL tells of its first launch alone.
//! - NCCL does not tell the reduction.
//!
//! # Handles
//!
//! NCCL keeps a handle for each event and gives it back later, also as the parent of other events.
//! NCCL does not say when it is done with a handle. So a handle is a number and owns no memory: the
//! number of the call in this module, and the kind of the event. [`CALLS`] keeps what belongs to
//! the last calls. A handle whose call is not kept any more is ignored.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use recording::{Call, Channel, ChannelFacts, ChannelState, Entry, EntryState, NO_PEER, Operation, Recorder};

use super::types::{DATA_TYPES, NcclResult, result};
use crate::digest::Fnv1a;

/// The kinds of events, as NCCL numbers them.
const COLLECTIVE: u64 = 1 << 1;
const MESSAGE: u64 = 1 << 2;
const KERNEL: u64 = 1 << 6;
const COPY_COLLECTIVE: u64 = 1 << 12;

/// How many launched calls are kept until their kernels have ended.
const CALLS: usize = 4096;

/// How many communicators tell this plugin of their calls.
static COMMUNICATORS: AtomicUsize = AtomicUsize::new(0);
/// The number of the next call. 0 is no call.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The calls that were launched last. Call `n` stands at place `n % 4096`.
static LAUNCHED: Mutex<Vec<Launched>> = Mutex::new(Vec::new());

/// A call whose kernels have not ended.
#[derive(Clone, Copy)]
struct Launched {
    /// The number of the call; 0 for none.
    number: u64,
    /// The call in the recording.
    entry: Entry,
    /// How many of NCCL's channels have not ended the call.
    channels: u8,
}

/// A communicator of NCCL, as the context of its events.
struct Context {
    /// The group in the recording. With version 3 it is opened at the first event, because `init`
    /// is not told which communicator it is for.
    channel: OnceLock<Channel>,
}

/// Whether NCCL tells this plugin of the calls on its communicators. Then nobody else needs to
/// record them.
pub(crate) fn records_its_calls() -> bool {
    COMMUNICATORS.load(Ordering::Relaxed) > 0
}

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
pub static ncclProfiler_v5: Profiler<InitV5> =
    Profiler { name: c"libdevicemesh".as_ptr(), init: init_v5, start_event, stop_event, record_event_state, finalize };

/// The plugin for NCCL 2.29 and later.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL looks for this name")]
pub static ncclProfiler_v6: Profiler<InitV5> =
    Profiler { name: c"libdevicemesh".as_ptr(), init: init_v6, start_event, stop_event, record_event_state, finalize };

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
    unsafe { begin(context, events, COLLECTIVE | MESSAGE | KERNEL, Some((borrowed(name), hash, rank, ranks))) }
}

unsafe extern "C" fn init_v5(
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
    unsafe { begin(context, events, COLLECTIVE | MESSAGE | KERNEL, Some((borrowed(name), hash, rank, ranks))) }
}

unsafe extern "C" fn init_v6(
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
        let kinds = COLLECTIVE | MESSAGE | KERNEL | COPY_COLLECTIVE;
        begin(context, events, kinds, Some((borrowed(name), hash, rank, ranks)))
    }
}

/// Prepares the recording of a communicator that NCCL makes. `group` is what `init` was told of
/// the communicator: its name, hash, rank and size. Without a recording NCCL is told to do without
/// the plugin, so it loses no time.
///
/// # Safety
/// `context` and `events` can be written.
unsafe fn begin(
    context: *mut *mut c_void,
    events: *mut c_int,
    kinds: u64,
    group: Option<(&CStr, u64, c_int, c_int)>,
) -> NcclResult {
    if hostccl::recorder::open().is_err() {
        return result::SYSTEM_ERROR;
    }
    let Some(recorder) = hostccl::recorder::get() else { return result::SYSTEM_ERROR };
    let channel = OnceLock::new();
    if let Some((name, hash, rank, size)) = group {
        let _ = channel.set(open(recorder, name, hash, rank, size));
    }
    COMMUNICATORS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's contract.
    unsafe {
        *context = Box::into_raw(Box::new(Context { channel })).cast();
        *events = kinds as c_int;
    }
    result::SUCCESS
}

/// Opens the group of a communicator in the recording.
fn open(recorder: &Recorder, name: &CStr, hash: u64, rank: c_int, size: c_int) -> Channel {
    let name = name.to_string_lossy();
    recorder.open_channel(&ChannelFacts {
        kind: 2,
        // The hash is equal on all ranks of a communicator, and so is the name.
        key: Fnv1a::default().text("NCCL's profiler").number(hash).text(&name).value(),
        world: None,
        rank: rank.max(0) as usize,
        members: &[],
        size: size.max(0) as usize,
        name: if name.is_empty() { "a communicator without name" } else { &name },
    })
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
        *handle = match u64::from(*event.cast::<u8>()) {
            COLLECTIVE => {
                let Event { rank, body, .. } = &*event.cast::<Event<Named<Collective>>>();
                open_named(context, body.name, body.hash, *rank);
                handle_of(launch(context, &body.body.call(), 0), false)
            }
            MESSAGE => {
                let Event { rank, body, .. } = &*event.cast::<Event<Named<Message>>>();
                open_named(context, body.name, body.hash, *rank);
                handle_of(launch(context, &body.body.call(), 0), false)
            }
            _ => ptr::null_mut(),
        };
    }
    result::SUCCESS
}

/// Opens the group of a communicator at its first event, which has its name and its hash. Nobody
/// says how large it is.
///
/// # Safety
/// The context is one of `begin`, or NULL. `name` is a text, or NULL.
unsafe fn open_named(context: *mut c_void, name: *const c_char, hash: u64, rank: c_int) {
    // SAFETY: the caller's contract.
    let (context, name) = unsafe { (context.cast::<Context>().as_ref(), borrowed(name)) };
    if let (Some(context), Some(recorder)) = (context, hostccl::recorder::get()) {
        context.channel.get_or_init(|| open(recorder, name, hash, rank, 0));
    }
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
/// As [`start_event`], for an event of that kind.
unsafe fn start(context: *mut c_void, handle: *mut *mut c_void, event: *const c_void, kind: u64) -> NcclResult {
    // SAFETY: the caller's contract.
    unsafe {
        *handle = match kind {
            COLLECTIVE => {
                let of = &(*event.cast::<Event<Collective>>()).body;
                handle_of(launch(context, &of.call(), of.channels), false)
            }
            // A copy engine has no kernel, and its event ends when its work is handed over.
            COPY_COLLECTIVE => {
                let of = &(*event.cast::<Event<Collective>>()).body;
                handle_of(launch(context, &of.call(), 0), false)
            }
            MESSAGE => {
                let of = &(*event.cast::<Event<Message>>()).body;
                handle_of(launch(context, &of.call(), of.channels), false)
            }
            KERNEL => handle_of(number_of((*event.cast::<Event<u8>>()).parent).0, true),
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

/// Records that a call is launched. Returns its number; 0 where it is not recorded.
///
/// # Safety
/// The context is one of `begin`, or NULL.
unsafe fn launch(context: *mut c_void, call: &Call, channels: u8) -> u64 {
    // SAFETY: the caller's contract.
    let context = unsafe { context.cast::<Context>().as_ref() };
    let (Some(context), Some(recorder)) = (context, hostccl::recorder::get()) else { return 0 };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let entry = recorder.begin(*context.channel.get().unwrap_or(&Channel::NONE), call);
    let mut launched = launched();
    launched[number as usize % CALLS] = Launched { number, entry, channels };
    number
}

/// Ends a launch, or what one of NCCL's channels does of a call.
extern "C" fn stop_event(handle: *mut c_void) -> NcclResult {
    let (number, is_kernel) = number_of(handle);
    let Some(recorder) = hostccl::recorder::get() else { return result::SUCCESS };
    let mut launched = launched();
    let call = &mut launched[number as usize % CALLS];
    if number == 0 || call.number != number {
        return result::SUCCESS;
    }
    if !is_kernel {
        recorder.end(call.entry, EntryState::Issued);
        return result::SUCCESS;
    }
    call.channels = call.channels.saturating_sub(1);
    if call.channels == 0 {
        call.number = 0;
        recorder.end(call.entry, EntryState::Done);
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
    if context.is_null() {
        return result::SUCCESS;
    }
    // SAFETY: the caller's contract.
    let context = unsafe { Box::from_raw(context.cast::<Context>()) };
    COMMUNICATORS.fetch_sub(1, Ordering::Relaxed);
    if let (Some(recorder), Some(channel)) = (hostccl::recorder::get(), context.channel.get()) {
        recorder.set_channel_state(*channel, ChannelState::Closed);
    }
    result::SUCCESS
}

/// The calls that were launched last. The table is made at the first call.
fn launched() -> MutexGuard<'static, Vec<Launched>> {
    let mut launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if launched.is_empty() {
        launched.resize(CALLS, Launched { number: 0, entry: Entry::NONE, channels: 0 });
    }
    launched
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
