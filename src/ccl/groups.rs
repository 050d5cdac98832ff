//! The groups of the calling thread.

use std::ffi::CString;

use super::functions::RawComm;
use super::library::Library;
use crate::error::Result;

impl Library {
    /// `ncclGroupStart`, for the calling thread. Programs come here through
    /// [`View::group_start`](crate::comm::View::group_start), which counts the open groups.
    pub(crate) fn group_start(&self) -> Result<()> {
        // SAFETY: no arguments.
        self.check("ncclGroupStart", RawComm::NULL, unsafe { (self.functions.group_start)() })
    }

    /// `ncclGroupEnd`, for the calling thread.
    pub(crate) fn group_end(&self) -> Result<()> {
        // SAFETY: no arguments.
        self.check("ncclGroupEnd", RawComm::NULL, unsafe { (self.functions.group_end)() })
    }

    /// Makes the group that the calling thread has open in the host engine fail at its end, before
    /// any of its operations runs. `why` goes into the error. Other libraries have no such call,
    /// and their group is left as it is.
    pub(crate) fn fail_group(&self, why: &str) {
        let Some(fail) = self.functions.host_group_fail else { return };
        let why = CString::new(why.replace('\0', "")).unwrap_or_default();
        // SAFETY: the text outlives the call, which copies it.
        unsafe { fail(why.as_ptr()) };
    }
}
