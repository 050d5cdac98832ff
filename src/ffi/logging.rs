//! The log: its level, and the program's callback.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use super::guard::guard;
use super::types::dm_status;
use crate::error::Error;
use crate::logging::{self, Level, LevelFilter};

/// A level of the log. A record is logged when its level is at most the level that is set.
pub type dm_log_level = i32;
/// Nothing is logged.
pub const DM_LOG_OFF: dm_log_level = 0;
/// A failure of which no caller is told.
pub const DM_LOG_ERROR: dm_log_level = 1;
/// A rank that is lost, an abort, a communicator that has failed, a deadline that comes near.
pub const DM_LOG_WARN: dm_log_level = 2;
/// Joining and leaving a world, and each communicator with its cost.
pub const DM_LOG_INFO: dm_log_level = 3;
/// Each step of joining, each agreement of the ranks, each error that a caller gets.
pub const DM_LOG_DEBUG: dm_log_level = 4;

/// Sets what the library logs, and where. The level replaces the one that the environment variable
/// DM_LOG (error, warn, info or debug) has set. Without the call and the variable nothing is
/// logged.
///
/// Local. log NULL: each record is one line on stderr, with time (UTC), level and rank. Otherwise
/// the library calls log(user_data, level, message) for each record, and writes nothing to stderr.
/// message is one line of UTF-8 without a newline, which begins with the rank ("rank 3: ..."); it
/// is valid during the call.
///
/// log is called from threads of the library too, and from several threads at once. The library
/// holds no lock then that a local function needs: log may call dm_abort, dm_rank, dm_set_log and
/// other local functions, but no collective ones. Records of such calls on this thread are dropped.
/// log must return: a C++ exception that leaves it ends the process, and longjmp out of it is not
/// allowed. After dm_set_log has replaced log, user_data may be freed, unless dm_set_log was called
/// from inside log. In a forked child of a process with a world nothing is logged.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (level is no DM_LOG_ value), DM_STATUS_TIMEOUT (the new log
/// is set, but another thread has been inside an earlier one for 5 s: keep what the earlier ones
/// use until a later call returns DM_STATUS_OK), DM_STATUS_UNSUPPORTED (a Rust program has a logger
/// of its own).
///
/// # Safety
/// log is NULL or may be called with user_data from any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_set_log(
    level: dm_log_level,
    log: Option<unsafe extern "C-unwind" fn(user_data: *mut c_void, level: dm_log_level, message: *const c_char)>,
    user_data: *mut c_void,
) -> dm_status {
    guard(|| {
        let filter = match level {
            DM_LOG_OFF => LevelFilter::Off,
            DM_LOG_ERROR => LevelFilter::Error,
            DM_LOG_WARN => LevelFilter::Warn,
            DM_LOG_INFO => LevelFilter::Info,
            DM_LOG_DEBUG => LevelFilter::Debug,
            _ => {
                return Err(Error::invalid(format!(
                    "level is {level}, not DM_LOG_OFF ({DM_LOG_OFF}) to DM_LOG_DEBUG ({DM_LOG_DEBUG})"
                )));
            }
        };
        let callback = log.map(|log| {
            let receiver = Receiver { log, user_data };
            Arc::new(move |level, text: &str| receiver.call(level, text)) as logging::Callback
        });
        logging::set(filter, callback)
    })
}

/// The program's callback.
struct Receiver {
    /// The function of the program. An exception that leaves it ends the process, and is not
    /// undefined, because the function may unwind.
    log: unsafe extern "C-unwind" fn(user_data: *mut c_void, level: dm_log_level, message: *const c_char),
    /// The argument that the program wants back.
    user_data: *mut c_void,
}

// SAFETY: by the contract of dm_set_log the callback may be called with user_data from any thread.
unsafe impl Send for Receiver {}
// SAFETY: as above.
unsafe impl Sync for Receiver {}

impl Receiver {
    fn call(&self, level: Level, text: &str) {
        let level = match level {
            Level::Error => DM_LOG_ERROR,
            Level::Warn => DM_LOG_WARN,
            Level::Info => DM_LOG_INFO,
            Level::Debug | Level::Trace => DM_LOG_DEBUG,
        };
        // The text has no NUL, because control characters are escaped.
        let text = CString::new(text).unwrap_or_default();
        // SAFETY: the caller's word; the text lives through the call.
        unsafe { (self.log)(self.user_data, level, text.as_ptr()) };
    }
}
