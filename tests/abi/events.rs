//! Calls about events and counters. What a session opens it also frees, in the same call.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use devicemesh::ffi::*;

use super::memory::Room;
use super::worlds::sized;
use super::{Call, Given, Session};

pub const CALLS: &[Call] = &[queue, handler, counters];

/// Options, and whether they are refused.
fn options(session: &mut Session<'_>) -> (Room<dm_event_options>, bool) {
    let size = session.struct_size(size_of::<dm_event_options>());
    let slow_ms = if session.rarely(4) { session.number() as i64 } else { 60_000 };
    let flags = if session.rarely(8) { session.number() as u32 } else { 0 };
    let given = dm_event_options { struct_size: 0, flags, reserved: 0, slow_ms };
    let wrong = !(24..=4096).contains(&size) || size % 8 != 0 || slow_ms < 0 || flags != 0;
    (sized(size, given), wrong)
}

fn queue(session: &mut Session<'_>) {
    let ((options, refused), out) = (options(session), session.out::<*mut dm_events>());
    let wrong = refused || out.is_null();
    // SAFETY: the options have as many bytes as they say, and `out` is writable or NULL.
    let status = unsafe { dm_events_open(options.as_ptr(), out.as_ptr()) };
    if !session.ended("dm_events_open", status, Given { wrong, ..Given::default() }, &[out.untouched()]) {
        return;
    }
    let events = out.get(0);
    let fd = session.out::<i32>();
    // SAFETY: `fd` is writable or NULL.
    let status = unsafe { dm_events_fd(events, fd.as_ptr()) };
    if session.ended("dm_events_fd", status, Given { wrong: fd.is_null(), ..Given::default() }, &[fd.untouched()]) {
        assert!(fd.get(0) >= 0);
    }
    let dead = session.rarely(4);
    let token = if dead { session.number() as usize as *mut dm_events } else { events };
    next(session, token, dead);
    dm_events_free(events);
    dm_events_free(events);
    next(session, events, true);
}

fn next(session: &mut Session<'_>, events: *mut dm_events, dead: bool) {
    let size = session.struct_size(size_of::<dm_event>());
    let place = Room::<dm_event>::of_bytes(size.clamp(8, 8 + 4096));
    place.put(0, size);
    let wrong = !(112..=4096).contains(&size) || size % 8 != 0;
    // SAFETY: as many bytes as it says, or a size that is refused.
    let status = unsafe { dm_events_next(events, 0, place.as_ptr()) };
    if session.ended("dm_events_next", status, Given { dead, wrong, ..Given::default() }, &[]) {
        look(&place.get(0));
    }
}

/// Looks at everything that an event points to.
fn look(event: &dm_event) {
    assert!((DM_EVENT_NONE..=DM_EVENT_RECOVERED).contains(&event.kind));
    let texts = [event.group, event.dim, event.operation, event.message];
    for text in texts.into_iter().filter(|text| !text.is_null()) {
        // SAFETY: the event's strings live until the thread's next call.
        let text = unsafe { CStr::from_ptr(text) }.to_str().unwrap();
        assert!(!text.contains('\n'), "{text:?}");
    }
    assert!(!event.message.is_null() && event.ranks.is_null() == (event.num_ranks == 0));
    if event.num_ranks > 0 {
        // SAFETY: not NULL, and as many ranks as the event says.
        let ranks = unsafe { std::slice::from_raw_parts(event.ranks, event.num_ranks) };
        assert!(ranks.is_sorted());
    }
}

/// Sets a handler, and takes it away.
fn handler(session: &mut Session<'_>) {
    unsafe extern "C-unwind" fn on_event(_user_data: *mut c_void, event: *const dm_event) {
        // SAFETY: the library's event lives through the call.
        look(unsafe { &*event });
    }
    let (options, wrong) = options(session);
    // SAFETY: the handler may be called from any thread; the options have as many bytes as they
    // say.
    let status = unsafe { dm_set_event_handler(Some(on_event), null_mut(), options.as_ptr()) };
    session.ended("dm_set_event_handler", status, Given { wrong, ..Given::default() }, &[]);
    // SAFETY: no handler, and the defaults.
    assert_eq!(unsafe { dm_set_event_handler(None, null_mut(), std::ptr::null()) }, DM_STATUS_OK);
}

fn counters(session: &mut Session<'_>) {
    let (capacity, length) = (if session.rarely(2) { session.below(64) } else { 1 << 16 }, session.out::<usize>());
    let text = Room::<c_char>::new(capacity);
    // SAFETY: the buffer has room for `capacity` bytes, and `length` is writable or NULL.
    let status = unsafe { dm_metrics(text.as_ptr(), capacity, length.as_ptr()) };
    let given = Given { wrong: length.is_null(), unsure: true, ..Given::default() };
    if session.ended("dm_metrics", status, given, &[text.untouched()]) {
        assert!(length.get(0) <= capacity);
    }
}
