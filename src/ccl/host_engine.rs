//! The extensions of the host engine. In other libraries these calls do nothing.

use std::ffi::{CString, c_int};
use std::time::Duration;

use super::call_name::CallName;
use super::functions::RawComm;
use super::library::Library;
use super::types::result;
use crate::error::Result;

impl Library {
    /// Names the calling thread's next operation or split, where the library wants that.
    #[inline]
    pub(crate) fn name_next_call(&self, name: &CallName) {
        if let Some(set) = self.functions.host_next_call_name {
            // SAFETY: the text has 32 bytes.
            unsafe { set(name.tag(), name.text()) };
        }
    }

    /// The rank of the communicator that the host engine found dead, where known; `None` in other libraries.
    pub(crate) fn lost_rank(&self, comm: RawComm) -> Option<usize> {
        let mut rank = -1;
        // SAFETY: the communicator is live, the out-parameter valid.
        let code = unsafe { (self.functions.host_lost_rank?)(comm, &mut rank) };
        if code == result::SUCCESS { usize::try_from(rank).ok() } else { None }
    }

    /// How long a call on this communicator, its making included, may wait for its peers, at least a millisecond; only the host engine
    /// blocks in them.
    pub(crate) fn set_timeout(&self, comm: RawComm, millis: u64) -> Result<()> {
        let millis = i64::try_from(millis.max(1)).unwrap_or(i64::MAX);
        match self.functions.host_set_timeout {
            // SAFETY: the communicator is live.
            Some(set) => self.check("hostcclCommSetTimeout", comm, unsafe { set(comm, millis) }),
            None => Ok(()),
        }
    }

    /// What the host engine's messages call the ranks of this communicator, one number for each.
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

    /// For a rank that is inside `call` and makes no collectives on this communicator any more: the host engine ends it where another rank waits in one.
    /// Fails where it has done so, or the communicator has failed before.
    pub fn refuse(&self, comm: RawComm, call: &str) -> Result<()> {
        let Some(refuse) = self.functions.host_refuse else { return Ok(()) };
        let text = CString::new(call.replace('\0', "")).unwrap_or_default();
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the text outlives the call.
        self.check(call, comm, unsafe { refuse(comm, text.as_ptr()) })
    }

    /// Lets `pause` pass between two looks at a communicator. The host engine can tell when nothing is in progress on it any more: there it waits for
    /// that, for two milliseconds at most whatever `pause` is, so that a deadline may be overrun by as much.
    pub(crate) fn rest(&self, comm: RawComm, pause: Duration) {
        let mut state = result::SUCCESS;
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the out-parameter is valid.
        match self.functions.host_wait.map(|wait| unsafe { wait(comm, 2, &mut state) }) {
            Some(result::SUCCESS) => {}
            _ => std::thread::sleep(pause),
        }
    }
}
