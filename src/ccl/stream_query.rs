//! Asks whether the work on a stream of the program is done.

use std::ffi::{c_int, c_uint, c_void};

use super::capture::CAPTURE_IMPLICIT;
use super::cuda::{Code, Driver};
use super::hip::Hip;
use super::library::Library;
use crate::error::{Error, Result, Status};

/// `CUDA_ERROR_NOT_READY` and `hipErrorNotReady`: the stream still has work.
const NOT_READY: Code = 600;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the calling thread may make calls that another thread's
/// capture would forbid.
const RELAXED: c_uint = 2;

/// The functions by which streams are asked, from the driver that the library itself uses.
pub(crate) struct StreamQuery {
    /// Says whether all work on a stream is done.
    query: unsafe extern "C" fn(*mut c_void) -> Code,
    /// Says whether a stream is being captured into a graph; `None` where the driver cannot say.
    is_capturing: Option<unsafe extern "C" fn(*mut c_void, *mut c_int) -> Code>,
    /// Sets how captures of other threads restrict the calling thread, and gives the mode that
    /// held before; `None` where the driver has no such mode.
    exchange_mode: Option<unsafe extern "C" fn(*mut c_uint) -> Code>,
    /// Where the functions are from, which explains their codes.
    source: Source,
}

/// The driver to which the functions belong.
enum Source {
    Cuda(&'static Driver),
    Hip(Hip),
}

impl Source {
    /// The platform's name in messages.
    fn platform(&self) -> &'static str {
        match self {
            Source::Cuda(_) => "CUDA",
            Source::Hip(_) => "HIP",
        }
    }
}

impl StreamQuery {
    /// The functions for streams of the devices on which `library` works.
    pub(crate) fn of(library: &Library) -> Result<StreamQuery> {
        if let Some(hip) = library.hip() {
            return hip.stream_query().map(|query| StreamQuery {
                query,
                is_capturing: hip.stream_is_capturing(),
                exchange_mode: hip.exchange_mode(),
                source: Source::Hip(hip),
            });
        }
        let driver = Driver::get()?;
        // SAFETY: cuda.h fixes the signature of the function of each name, and the type of the
        // field repeats it.
        unsafe {
            Ok(StreamQuery {
                query: driver.function("cuStreamQuery")?,
                is_capturing: driver.function("cuStreamIsCapturing").ok(),
                exchange_mode: driver.function("cuThreadExchangeStreamCaptureMode").ok(),
                source: Source::Cuda(driver),
            })
        }
    }

    /// Whether the calling thread has a current device, without which it cannot ask.
    pub(crate) fn has_device(&self) -> Result<bool> {
        match &self.source {
            Source::Cuda(driver) => driver.current().map(|current| current.is_some()),
            Source::Hip(_) => Ok(true),
        }
    }

    /// Fails when the stream is being captured into a graph: its work does not run, and a question
    /// would spoil the capture.
    ///
    /// # Safety
    /// `stream` is NULL or a live stream.
    pub(crate) unsafe fn check_not_captured(&self, stream: *mut c_void) -> Result<()> {
        let Some(is_capturing) = self.is_capturing else { return Ok(()) };
        let mut status = 0;
        // SAFETY: the caller's contract, and the out-parameter is valid.
        let code = unsafe { is_capturing(stream, &mut status) };
        match (code, status) {
            (0, 0) => Ok(()),
            // The legacy stream cannot be asked while a stream that waits for it is captured.
            (0 | CAPTURE_IMPLICIT, _) => Err(Error::new(
                Status::InvalidState,
                format!(
                    "the stream {stream:p} is being captured into a {} graph, so its work does not run: end the capture, launch the graph, and wait for the stream on which it was launched",
                    self.source.platform()
                ),
            )),
            (code, _) => self.check("StreamIsCapturing", code),
        }
    }

    /// Whether all work on the stream is done. Fails where some of it failed.
    ///
    /// # Safety
    /// `stream` is NULL or a live stream.
    pub(crate) unsafe fn is_done(&self, stream: *mut c_void) -> Result<bool> {
        // A capture of another thread in the mode "global" forbids the question to every thread
        // whose own mode is not relaxed, and the question would spoil that capture.
        let mut mode = RELAXED;
        // SAFETY: the parameter is valid, here and below.
        let is_relaxed = self.exchange_mode.is_some_and(|exchange| unsafe { exchange(&mut mode) } == 0);
        // SAFETY: the caller's contract.
        let code = unsafe { (self.query)(stream) };
        if let Some(exchange) = self.exchange_mode.filter(|_| is_relaxed) {
            // SAFETY: as above.
            unsafe { exchange(&mut mode) };
        }
        match code {
            NOT_READY => Ok(false),
            code => self.check("StreamQuery", code).map(|()| true),
        }
    }

    /// Turns the code of a call into an error. The call's name is `name` after the prefix of the
    /// driver.
    fn check(&self, name: &str, code: Code) -> Result<()> {
        match &self.source {
            Source::Cuda(driver) => driver.check(&format!("cu{name}"), code),
            Source::Hip(hip) => hip.check(&format!("hip{name}"), code),
        }
    }
}
