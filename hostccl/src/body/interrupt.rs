//! The interrupt of a communicator: a question that blocked calls ask.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fork;
use crate::handle;
use crate::interrupt::{Interrupt, Question};
use crate::types::*;

/// The room for a reason with its final 0, in bytes.
const CAPACITY: usize = 1024;

/// Makes the blocked calls of this rank on `comm` ask `question`: for the first time when they
/// have waited for a quarter of a second without progress, and then ten times per second. When the
/// answer is a reason, the engine ends the communicator for all of its ranks, with
/// `ncclRemoteError` and the reason as the message. The other ranks get at most 512 bytes of it.
/// Where a question is set already, that question stays, and `question` is dropped.
///
/// The waiting thread asks the question. So the question must answer soon, and must call no
/// function of the engine. This function does nothing where `comm` is not ready or has failed.
pub fn set_interrupt(comm: ncclComm_t, question: Arc<Question>) {
    // A communicator that has ended meanwhile has no blocked calls.
    let _ = set(comm, question);
}

fn set(comm: ncclComm_t, question: Arc<Question>) -> Result<()> {
    handle::find(comm)?.ready()?.set_interrupt(Interrupt::new(question));
    Ok(())
}

pub(crate) unsafe fn hostcclCommSetInterrupt(
    comm: ncclComm_t,
    question: hostcclQuestion_t,
    release: hostcclRelease_t,
    data: *mut c_void,
) -> Result<ncclResult_t> {
    // `data` is released when nobody uses it any more. Where this call fails, that is at once.
    let data = Data { data, release };
    if fork::is_child() {
        return Err(Error::usage(fork::refusal()));
    }
    let Some(question) = question else { return Err(Error::argument("question is NULL")) };
    set(comm, Arc::new(move || data.ask(question)))?;
    Ok(ncclSuccess)
}

/// The data of a question that a C caller has set.
struct Data {
    data: *mut c_void,
    release: hostcclRelease_t,
}

// SAFETY: the caller of hostcclCommSetInterrupt allows any thread to use the data.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

impl Data {
    /// Returns the answer to the question.
    fn ask(
        &self,
        question: unsafe extern "C" fn(data: *mut c_void, reason: *mut c_char, capacity: usize) -> c_int,
    ) -> Option<String> {
        let mut reason = [0 as c_char; CAPACITY + 1];
        // SAFETY: the function is the caller's, and the data is not released yet. The reason has
        // that much room, and its last byte stays 0.
        let has_reason = unsafe { question(self.data, reason.as_mut_ptr(), CAPACITY) } != 0;
        // SAFETY: the last byte is 0.
        has_reason.then(|| unsafe { CStr::from_ptr(reason.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the function is the caller's, and nobody uses the data any more.
            unsafe { release(self.data) }
        }
    }
}
