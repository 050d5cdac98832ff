//! The extensions of the host engine. In other libraries these calls do nothing.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use recording::Wait;

use super::call_name::CallName;
use super::functions::RawComm;
use super::library::Library;
use super::types::result;
use crate::error::Result;

impl Library {
    /// Names the calling thread's next operation or split.
    #[inline]
    pub(crate) fn name_next_call(&self, name: &CallName) {
        if let Some(set) = self.functions.host_next_call_name {
            // SAFETY: the text has 32 bytes.
            unsafe { set(name.tag(), name.text()) };
        }
    }

    /// Sets how long the calling thread's next operation or split on this communicator may wait for
    /// its peers, in milliseconds and at least one. Returns whether the time holds for that call
    /// alone. In an older engine it holds for all later calls on the communicator.
    pub(crate) fn limit_next_call(&self, comm: RawComm, millis: u64) -> bool {
        let Some(set) = self.functions.host_next_call_timeout else {
            // Where the engine refuses the time, the communicator has failed, and so does the call.
            let _ = self.set_timeout(comm, millis);
            return false;
        };
        // SAFETY: the function has no requirements.
        unsafe { set(engine_millis(millis)) };
        true
    }

    /// Whether a call of this thread has waited for another rank since the last call of this
    /// function. Only the embedded engine knows.
    #[inline]
    pub(crate) fn take_wait(&self) -> Wait {
        if self.is_embedded() { hostccl::recorder::take_wait() } else { Wait::Unknown }
    }

    /// Sets how long a call on this communicator may wait for its peers, in milliseconds and at
    /// least one, where no time goes with the call. The limit holds for the making of the
    /// communicator too.
    pub(crate) fn set_timeout(&self, comm: RawComm, millis: u64) -> Result<()> {
        match self.functions.host_set_timeout {
            // SAFETY: the communicator is live.
            Some(set) => self.check("hostcclCommSetTimeout", comm, unsafe { set(comm, engine_millis(millis)) }),
            None => Ok(()),
        }
    }

    /// Makes blocked calls on this communicator ask `question` whether they should end. Only the
    /// host engine asks it.
    pub(crate) fn set_interrupt(&self, comm: RawComm, question: Arc<hostccl::Question>) {
        if self.is_embedded() {
            return hostccl::set_interrupt(comm.0.cast(), question);
        }
        if let Some(set) = self.functions.host_set_interrupt {
            let data = Box::into_raw(Box::new(question)).cast();
            // SAFETY: both functions expect a question as their data. Where the communicator has
            // ended meanwhile, the engine refuses the question and releases the data.
            unsafe { set(comm, Some(ask), Some(release), data) };
        }
    }

    /// Sets the numbers by which the host engine's messages call the ranks of this communicator,
    /// one for each rank.
    pub fn set_names(&self, comm: RawComm, names: &[i32]) -> Result<()> {
        match (self.functions.host_set_names, c_int::try_from(names.len())) {
            (Some(set), Ok(count)) => {
                // SAFETY: the communicator is live, and there are as many names as it says.
                let code = unsafe { set(comm, names.as_ptr(), count) };
                self.check("hostcclCommSetNames", comm, code)
            }
            _ => Ok(()),
        }
    }

    /// Says that this rank is inside `call` and makes no more collectives on this communicator.
    /// When another rank waits in one, the host engine ends the communicator. Fails when the
    /// communicator was ended in this way, or has failed before.
    pub fn refuse(&self, comm: RawComm, call: &str) -> Result<()> {
        let Some(refuse) = self.functions.host_refuse else { return Ok(()) };
        let text = CString::new(call.replace('\0', "")).unwrap_or_default();
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the text
        // outlives the call.
        self.check(call, comm, unsafe { refuse(comm, text.as_ptr()) })
    }

    /// Lets `pause` pass between two polls of a communicator. The host engine uses this time to
    /// make the communicator, and ends the pause when nothing is in progress any more. On the host
    /// engine the pause is ten times as long, at least 2 ms and at most 20 ms. So a deadline may be
    /// overrun by 20 ms.
    pub(crate) fn rest(&self, comm: RawComm, pause: Duration) {
        let mut state = result::SUCCESS;
        let millis = (pause.as_millis() as i64 * 10).clamp(2, 20);
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the
        // out-parameter is valid.
        match self.functions.host_wait.map(|wait| unsafe { wait(comm, millis, &mut state) }) {
            Some(result::SUCCESS) => {}
            _ => std::thread::sleep(pause),
        }
    }
}

/// Returns a time as the engine takes it. Zero would stand for no time.
fn engine_millis(millis: u64) -> i64 {
    i64::try_from(millis.max(1)).unwrap_or(i64::MAX)
}

/// Writes the answer of the question `data` as a C string, and returns whether there is one.
unsafe extern "C" fn ask(data: *mut c_void, reason: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the data is that of `set_interrupt`, and is not released yet.
    let question = unsafe { &*data.cast::<Arc<hostccl::Question>>() };
    // A panic must not get into the C library.
    let Some(text) = catch_unwind(AssertUnwindSafe(|| question())).ok().flatten() else { return 0 };
    let Some(room) = capacity.checked_sub(1) else { return 0 };
    let mut end = text.len().min(room);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let bytes = &text.as_bytes()[..end];
    // SAFETY: the library gives room for `capacity` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), reason, bytes.len());
        reason.add(bytes.len()).write(0);
    }
    1
}

/// Frees the question `data`.
unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: the data is that of `set_interrupt`, which nobody uses any more.
    drop(unsafe { Box::from_raw(data.cast::<Arc<hostccl::Question>>()) });
}
