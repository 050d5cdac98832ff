//! Finds out whether a CUDA graph is being captured, as far as the driver tells.
//!
//! Making and ending a communicator allocates and frees device memory and uses streams of its own.
//! While a stream is captured, CUDA forbids parts of that, and a forbidden call invalidates the
//! capture. No function of the driver says whether the calling thread captures. These questions
//! have an answer, and they leave a capture as it is:
//!
//! - whether one given stream is being captured
//! - whether the per-thread default stream of the calling thread is being captured
//! - whether any stream of the current context is being captured that waits for the legacy default
//!   stream: then the legacy stream cannot be used, and asking about it gives
//!   `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`
//!
//! A stream that was made with `CU_STREAM_NON_BLOCKING`, as PyTorch's are, is found only where a
//! call names it.

use std::ffi::{c_int, c_void};

use super::cuda::{Code, Driver};
use super::library::Library;
use crate::error::{Error, Result};

/// `CU_STREAM_LEGACY` of cuda.h.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD` of cuda.h.
const PER_THREAD: usize = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE` of cuda.h.
const NOT_CAPTURED: c_int = 0;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` of cuda.h.
pub(super) const CAPTURE_IMPLICIT: Code = 906;

impl Library {
    /// Fails where `call`, which makes or ends communicators, would meet the capture of a CUDA
    /// graph: with [`Status::InvalidState`](crate::error::Status), because the arguments are right
    /// and the call may be made after the capture. `stream` is the stream on which the call was
    /// asked to work, if there is one.
    pub(crate) fn check_no_capture(&self, call: &str, stream: Option<*mut c_void>) -> Result<()> {
        if !self.has_streams() || self.is_rccl() {
            return Ok(());
        }
        let found = match stream {
            Some(stream) if !stream.is_null() && is_captured(stream) => Some(format!("stream {stream:p}")),
            _ if is_captured(PER_THREAD as *mut c_void) => Some("the per-thread default stream".to_owned()),
            _ if is_captured(LEGACY as *mut c_void) => {
                Some("a stream of this device that waits for the legacy default stream".to_owned())
            }
            _ => None,
        };
        match found {
            None => Ok(()),
            Some(found) => Err(Error::invalid_state(format!(
                "{call}: {found} is being captured into a CUDA graph, and making or ending a communicator would break the capture: make communicators before cudaStreamBeginCapture, and end them when the graph is destroyed"
            ))),
        }
    }
}

/// Whether that stream is being captured, or cannot be used because another one is.
fn is_captured(stream: *mut c_void) -> bool {
    let Ok(driver) = Driver::get() else { return false };
    // Without a current context this thread cannot have begun a capture.
    if !driver.current().is_ok_and(|context| context.is_some()) {
        return false;
    }
    // SAFETY: cuda.h fixes the signature of the function of this name, and the type repeats it.
    let asked: Result<unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code> =
        unsafe { driver.function("cuStreamIsCapturing") };
    let Ok(ask) = asked else { return false };
    let mut status = NOT_CAPTURED;
    // SAFETY: the stream is one of the two that always exist, or the caller's, and the
    // out-parameter is valid.
    match unsafe { ask(stream, &mut status) } {
        0 => status != NOT_CAPTURED,
        code => code == CAPTURE_IMPLICIT,
    }
}
