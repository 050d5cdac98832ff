//! The mailbox, in which UCX reports operations that are over and peers that are gone.
//!
//! UCX calls the functions of this file back only while a thread is inside UCX. They write to the
//! [`Mailbox`] and to nothing else. The thread reads the mailbox once it has left UCX.

use std::ffi::c_void;

use super::api::Status;

/// The reports of UCX that no thread has handled yet.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    /// The operations that are over: the number of each, and whether it succeeded. The number is
    /// that of an entry in the worker's table of flights.
    pub(super) over: Vec<(u64, Status)>,
    /// The addresses of the endpoints whose peers are gone, and the reasons.
    pub(super) broken: Vec<(usize, Status)>,
}

/// Runs when a send, a flush or a close is over.
pub(super) unsafe extern "C" fn on_sent(request: *mut c_void, status: Status, argument: *mut c_void) {
    // SAFETY: `argument` is a `Note`, which this call takes.
    unsafe { Note::take(argument, request, status) };
}

/// Runs when the data of a message have arrived.
pub(super) unsafe extern "C" fn on_received(request: *mut c_void, status: Status, _: usize, argument: *mut c_void) {
    // SAFETY: `argument` is a `Note`, which this call takes.
    unsafe { Note::take(argument, request, status) };
}

/// Runs when an endpoint's peer is gone.
pub(super) unsafe extern "C" fn on_error(argument: *mut c_void, endpoint: *mut c_void, status: Status) {
    // SAFETY: `argument` is the mailbox, which outlives the worker. The thread that is inside UCX
    // holds no reference to it.
    unsafe { (*argument.cast::<Mailbox>()).broken.push((endpoint as usize, status)) };
}

/// The argument of an operation's callback.
pub(super) struct Note {
    /// The mailbox that gets the outcome.
    pub(super) mailbox: *mut Mailbox,
    /// The function that frees the operation's request.
    pub(super) free: unsafe extern "C" fn(*mut c_void),
    /// The number of the operation.
    pub(super) flight: u64,
}

impl Note {
    /// Writes the outcome of an operation to the mailbox.
    ///
    /// # Safety
    /// `argument` comes from `Box::into_raw` and is not used again. `request` is over.
    unsafe fn take(argument: *mut c_void, request: *mut c_void, status: Status) {
        // SAFETY: the caller's contract. As for the mailbox, see `on_error`.
        unsafe {
            let note = Box::from_raw(argument.cast::<Note>());
            (*note.mailbox).over.push((note.flight, status));
            (note.free)(request);
        }
    }
}
