//! Events and counters. The layout of the structs and the numbers are part of the ABI: a struct
//! grows only at its end.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::null;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use super::arguments::{
    check_flags, check_reserved, check_struct, give_text, milliseconds, read_struct, timeout, write_struct,
};
use super::guard::{free, guard};
use super::handles::Table;
use super::kinds::HandleKind;
use super::pointers::out;
use super::types::{dm_events, dm_status};
use crate::error::{Error, Result};
use crate::events::{self, Event, Events, Handler, Kind, Options};
use crate::metrics;

static QUEUES: Table<(), Events> = Table::new(HandleKind::Events.number(), "dm_events");

/// The kind of an event.
pub type dm_event_kind = i32;
/// There is no event: dm_events_next has found none.
pub const DM_EVENT_NONE: dm_event_kind = 0;
/// This rank has joined its world, or ranks have joined in a recovery and need the state of the
/// training (dm_recovery.joined_ranks).
pub const DM_EVENT_JOINED: dm_event_kind = 1;
/// A call of this rank has waited for dm_event_options.slow_ms.
pub const DM_EVENT_SLOW: dm_event_kind = 2;
/// Ranks are lost (see "lost" at the head of this file).
pub const DM_EVENT_LOST: dm_event_kind = 3;
/// A rank has ended a mesh by dm_abort, or this rank has ended its world by dm_world_abort. On cuda
/// the event also tells of another rank that has ended a mesh by dm_recover or dm_shrink.
pub const DM_EVENT_ABORTED: dm_event_kind = 4;
/// dm_recover or dm_shrink has given the mesh with which the job goes on.
pub const DM_EVENT_RECOVERED: dm_event_kind = 5;

/// One event. Initialise with DM_EVENT_INIT before dm_events_next. The library owns the strings
/// and the array.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_event {
    /// sizeof(dm_event): set by the caller of dm_events_next, and by the library for a handler.
    pub struct_size: usize,
    /// A DM_EVENT_ number. A later release may have further ones.
    pub kind: dm_event_kind,
    /// This process's rank in the world. For a slow call that belongs to no world, its rank in the
    /// communicator.
    pub rank: i32,
    /// The number of ranks of the world, or of that communicator.
    pub world_size: i32,
    /// Always 0.
    pub reserved: u32,
    /// The epoch of the world, or of the mesh that the event is about.
    pub epoch: i64,
    /// When this process noticed what has happened, in nanoseconds since 1970-01-01 (UTC).
    pub time_ns: i64,
    /// The world ranks that the event is about, in ascending order. JOINED: the ranks that have
    /// joined. SLOW: the ranks for which the call waits, as far as this process knows them. LOST:
    /// the lost ranks. ABORTED: the ranks that have aborted. RECOVERED: the ranks that were lost or
    /// left out. NULL when there are none.
    pub ranks: *const i32,
    /// The number of elements of ranks.
    pub num_ranks: usize,
    /// The name of a group of ranks, as `devicemesh why` shows it. SLOW: the group of the call,
    /// for example "mesh/tp", or "the world" for a call like dm_init. Other kinds: the name of the
    /// mesh, for example "mesh". NULL where the event is about the world, and where a SLOW event is
    /// about dm_recover.
    pub group: *const c_char,
    /// SLOW: the dimension of the call; NULL where it has none.
    pub dim: *const c_char,
    /// SLOW: the name of the operation ("all-reduce"), or the text of a call like dm_flatten; NULL
    /// otherwise.
    pub operation: *const c_char,
    /// SLOW: the number of the call in its group, from 1; -1 for dm_recover and dm_stream_wait.
    /// Sends and receives are counted apart. Other kinds: -1.
    pub call: i64,
    /// SLOW: how long the call has waited, in seconds; negative otherwise.
    pub waited_seconds: f64,
    /// How many events were left out before this one because the queue was full.
    pub dropped: u64,
    /// A description of the event in one line, which begins with the rank ("rank 3 ..."). Never
    /// NULL.
    pub message: *const c_char,
}

/// The options of dm_set_event_handler and dm_events_open. Initialise with DM_EVENT_OPTIONS_INIT;
/// zero means the default everywhere.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_event_options {
    /// sizeof(dm_event_options), set by the caller.
    pub struct_size: usize,
    /// Must be 0: there are no flags yet.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
    /// The time in milliseconds after which a waiting call is slow. The call gives an event then,
    /// and another one whenever the time that it has waited has doubled. 0: 10000.
    pub slow_ms: i64,
}

/// Sets the handler of this process, in place of an earlier one: the library calls
/// handler(user_data, event) for each event. If handler is NULL, the process has no handler any
/// more.
///
/// Local. The library calls the handler on one thread of its own, "dm-events", which exists while
/// there is a handler or a dm_events, and which blocks all signals but those of faults. So the
/// handler gets one event at a time, in the order in which the library noticed the events. The
/// first events are JOINED, one for each world that this process is in. Then come the events that
/// wait for the earlier handler, but not SLOW, which comes again when a call has waited for the new
/// slow_ms. event and its strings are valid during the call. When 256 events wait because the
/// handler is slow, further ones are left out, and dm_event.dropped says how many. But an event of
/// another kind takes the place of the last SLOW.
///
/// A slow call is found while its thread is blocked: in a collective of the host engine, in a call
/// on which the ranks agree (dm_init, dm_barrier ...), in dm_recover or in dm_stream_wait. On cuda
/// a slow collective is found where NCCL reports its kernels (NCCL_PROFILER_PLUGIN). A group that
/// has several running calls gives events for the oldest one, because the others may wait for that
/// call. Ranks that end after dm_finalize of this rank's last mesh give no event. The event of
/// another rank's dm_abort comes within about two seconds.
///
/// The library holds no lock while the handler runs: it may call all local functions, dm_abort,
/// dm_world_abort and dm_set_event_handler among them. The handler should return soon and make no
/// collective call, because the thread notices nothing while the handler runs. A C++ exception
/// that leaves the handler ends the process, and longjmp out of the handler is not allowed. After
/// dm_set_event_handler has replaced the handler, user_data may be freed, unless
/// dm_set_event_handler was called from inside the handler. Remove the handler before its code is
/// unloaded and before main returns. While there is a handler, and until "dm-events" has ended, a
/// forked child may make no calls (see "Forks").
///
/// options NULL: the defaults. Without a handler and a queue there is no thread, and an event
/// costs one load of a flag.
///
/// Errors: DM_STATUS_TIMEOUT (the new handler is set, but an earlier one has been running for 5 s:
/// keep its user_data until a later call, which waits again, returns DM_STATUS_OK),
/// DM_STATUS_INVALID_ARGUMENT, DM_STATUS_EXHAUSTED (no thread).
///
/// # Safety
/// handler is NULL or may be called with user_data from another thread until it is replaced;
/// options is NULL or points to struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_set_event_handler(
    handler: Option<unsafe extern "C-unwind" fn(user_data: *mut c_void, event: *const dm_event)>,
    user_data: *mut c_void,
    options: *const dm_event_options,
) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let options = unsafe { read_event_options(options)? };
        let handler = handler.map(|handler| {
            let receiver = Receiver { handler, user_data };
            Arc::new(move |event: &Event| receiver.call(event)) as Handler
        });
        events::replace_handler(handler.map(|handler| (&options, handler)))
    })
}

/// Opens a queue that keeps the events of this process from now on, for programs with a loop of
/// their own. It works beside a handler and other queues, each of which gets every event.
///
/// Local. The first events are JOINED, one for each world that this process is in. The queue holds
/// 256 events. While it is full, later events are left out, and the next event that finds a place
/// has their number in dm_event.dropped. An event that is not SLOW takes the place of the last
/// SLOW. The thread "dm-events" fills it (see dm_set_event_handler). options NULL: the defaults.
/// The caller frees the handle with dm_events_free. Errors: DM_STATUS_INVALID_ARGUMENT,
/// DM_STATUS_EXHAUSTED (no descriptor or thread).
///
/// # Safety
/// options is NULL or points to struct_size bytes; events_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_events_open(
    options: *const dm_event_options,
    events_out: *mut *mut dm_events,
) -> dm_status {
    guard(|| {
        let events_out = out("events_out", events_out)?;
        // SAFETY: the caller's contract.
        let options = unsafe { read_event_options(options)? };
        let token = QUEUES.insert((), Arc::new(Events::open(&options)?))?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { events_out.write(token as *mut dm_events) };
        Ok(())
    })
}

/// Gives a descriptor that is readable while the queue has events, for poll, select and epoll.
///
/// Local. Borrowed: the descriptor is closed by dm_events_free. Read nothing from it; call
/// dm_events_next until it gives DM_EVENT_NONE. Errors: DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT (fd_out is NULL).
///
/// # Safety
/// fd_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_events_fd(events: *const dm_events, fd_out: *mut i32) -> dm_status {
    guard(|| {
        let events = QUEUES.get(events as usize)?;
        let fd_out = out("fd_out", fd_out)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { fd_out.write(events.as_fd().as_raw_fd()) };
        Ok(())
    })
}

/// Takes the next event of the queue. Where there is no event, event_out->kind is DM_EVENT_NONE.
///
/// Local. The call waits for an event for timeout_ms milliseconds at most; with 0 it does not
/// wait. `event_out->struct_size` is set by the caller (DM_EVENT_INIT). The strings and the array
/// are borrowed: valid until this thread's next dm_events_next on any queue. A queue may be read
/// by several threads, and each event goes to one of them. Errors: DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT (event_out is NULL, its struct_size is wrong, a negative timeout),
/// DM_STATUS_INVALID_STATE (the calling thread ends, and its thread-locals are gone).
///
/// # Safety
/// event_out is NULL or points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_events_next(
    events: *const dm_events,
    timeout_ms: i64,
    event_out: *mut dm_event,
) -> dm_status {
    guard(|| {
        let events = QUEUES.get(events as usize)?;
        // SAFETY: the caller's contract. Nothing is taken for a caller who cannot get it.
        unsafe { check_struct("event_out", event_out)? };
        let meaning = "a timeout is in milliseconds, 0 to take an event without waiting";
        let timeout = milliseconds("timeout_ms", timeout_ms, meaning)?.unwrap_or(Duration::ZERO);
        let is_ending = |_| {
            Error::invalid_state("dm_events_next: this thread ends, so it can keep no event: call from another thread")
        };
        LAST.try_with(|_| ()).map_err(is_ending)?;
        let next = events.next_within(timeout)?;
        let kept = next.map(Kept::new);
        let event = kept.as_ref().map_or(NO_EVENT, Kept::event);
        // The strings lie on the heap, so they stay where they are.
        LAST.try_with(|last| last.replace(kept)).map_err(is_ending)?;
        // SAFETY: the caller's contract.
        unsafe { write_struct("event_out", event_out, event) }
    })
}

/// Frees a queue with the events in it, and closes its descriptor. NULL, and a handle that was
/// freed, do nothing.
///
/// Local. A dm_events_next that waits on another thread ends at its timeout.
#[unsafe(no_mangle)]
pub extern "C" fn dm_events_free(events: *mut dm_events) {
    if !events.is_null() {
        free(|| drop(QUEUES.remove(events as usize)));
    }
}

/// Gives the counters of this process as text in Prometheus' format (version 0.0.4, for an HTTP
/// answer of the type "text/plain; version=0.0.4"): its worlds, and for each group of ranks how
/// many calls this rank has begun, the number of the last call that has ended, and for how long
/// the oldest running call has run. docs/events.md lists the counters.
///
/// Local. *len_out counts the NUL. The counters are those of the recording (docs/recording.md).
/// Between two calls the text may grow, so ask again after DM_STATUS_BUFFER_TOO_SMALL. Errors:
/// DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_UNSUPPORTED (DM_RECORDER=0), DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// buffer is NULL or has room for capacity bytes; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_metrics(buffer: *mut c_char, capacity: usize, len_out: *mut usize) -> dm_status {
    guard(|| {
        let text = metrics::text()?;
        // SAFETY: the caller's contract.
        unsafe { give_text("buffer", &text, buffer, capacity, len_out) }
    })
}

thread_local! {
    /// The event to which the last dm_event of this thread points.
    static LAST: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// An event with its strings as C reads them.
struct Kept {
    event: Event,
    group: Option<CString>,
    dim: Option<CString>,
    operation: Option<CString>,
    message: CString,
}

impl Kept {
    fn new(event: Event) -> Kept {
        let text = |text: &str| CString::new(text.replace('\0', "\\0")).unwrap_or_default();
        Kept {
            group: event.group.as_deref().map(text),
            dim: event.dimension.as_deref().map(text),
            operation: event.operation.as_deref().map(text),
            message: text(&event.message),
            event,
        }
    }

    /// The event for C, which borrows from this value.
    fn event(&self) -> dm_event {
        let Event { kind, rank, world_size, epoch, time, ranks, call, waited, dropped, .. } = &self.event;
        let borrowed = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        let nanos = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        dm_event {
            struct_size: size_of::<dm_event>(),
            kind: number_of(*kind),
            rank: *rank,
            world_size: *world_size,
            reserved: 0,
            epoch: i64::try_from(*epoch).unwrap_or(i64::MAX),
            time_ns: i64::try_from(nanos).unwrap_or(i64::MAX),
            ranks: if ranks.is_empty() { null() } else { ranks.as_ptr() },
            num_ranks: ranks.len(),
            group: borrowed(&self.group),
            dim: borrowed(&self.dim),
            operation: borrowed(&self.operation),
            call: call.map_or(-1, |call| i64::try_from(call).unwrap_or(i64::MAX)),
            waited_seconds: waited.map_or(-1.0, |waited| waited.as_secs_f64()),
            dropped: *dropped,
            message: self.message.as_ptr(),
        }
    }
}

/// No event.
const NO_EVENT: dm_event = dm_event {
    struct_size: size_of::<dm_event>(),
    kind: DM_EVENT_NONE,
    rank: -1,
    world_size: 0,
    reserved: 0,
    epoch: 0,
    time_ns: 0,
    ranks: null(),
    num_ranks: 0,
    group: null(),
    dim: null(),
    operation: null(),
    call: -1,
    waited_seconds: -1.0,
    dropped: 0,
    message: c"".as_ptr(),
};

fn number_of(kind: Kind) -> dm_event_kind {
    match kind {
        Kind::Joined => DM_EVENT_JOINED,
        Kind::Slow => DM_EVENT_SLOW,
        Kind::Lost => DM_EVENT_LOST,
        Kind::Aborted => DM_EVENT_ABORTED,
        Kind::Recovered => DM_EVENT_RECOVERED,
    }
}

/// The program's handler.
struct Receiver {
    /// The function of the program. An exception that leaves the function ends the process. This
    /// is not undefined behaviour, because the type of the function allows it to unwind.
    handler: unsafe extern "C-unwind" fn(user_data: *mut c_void, event: *const dm_event),
    /// The argument that the program wants back.
    user_data: *mut c_void,
}

// SAFETY: by the contract of dm_set_event_handler the handler may be called with user_data from
// another thread.
unsafe impl Send for Receiver {}
// SAFETY: as above.
unsafe impl Sync for Receiver {}

impl Receiver {
    fn call(&self, event: &Event) {
        let kept = Kept::new(event.clone());
        let event = kept.event();
        // SAFETY: the caller's word; the event lives through the call.
        unsafe { (self.handler)(self.user_data, &raw const event) };
    }
}

/// # Safety
/// `options` is NULL or points to as many bytes as it says.
unsafe fn read_event_options(options: *const dm_event_options) -> Result<Options> {
    if options.is_null() {
        return Ok(Options::default());
    }
    // SAFETY: not NULL, and the caller's contract.
    let given = unsafe { read_struct("options", options)? };
    check_flags("options", given.flags, 0)?;
    check_reserved("options", &[given.reserved])?;
    let slow = timeout("options.slow_ms", given.slow_ms)?;
    Ok(slow.map_or_else(Options::default, |slow| Options::default().slow(slow)))
}
