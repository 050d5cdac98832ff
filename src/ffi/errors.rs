//! Errors and versions.

use std::ffi::c_char;
use std::ptr::null;

use super::arguments::write_struct;
use super::guard::{NO_ERROR, ask, with_last};
use super::structs::dm_error_info;
use super::types::{DM_STATUS_OK, dm_status};
use crate::error::Status;

/// The name of a status, for example "DM_STATUS_TIMEOUT"; "DM_STATUS_UNKNOWN" for a number that is
/// no status.
///
/// Local. The string is static and never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn dm_status_name(status: dm_status) -> *const c_char {
    let name = Status::from_code(status).map_or(c"DM_STATUS_UNKNOWN", Status::c_name);
    name.as_ptr()
}

/// Returns the message of this thread's last failing call: one line with the values, or "" when no
/// call has failed yet.
///
/// Local. Borrowed: valid until this thread's next failing call. A call that succeeds does not
/// clear the message.
#[unsafe(no_mangle)]
pub extern "C" fn dm_last_error() -> *const c_char {
    with_last(|last| last.map_or(NO_ERROR.as_ptr(), |last| last.message.as_ptr()))
}

/// Tells all about this thread's last failing call: its status and message, the codes of the layers
/// below, and which ranks, dimension and call the failure is about. So a program need not read the
/// message to learn which ranks are lost (dm_lost_ranks has the whole list for dm_shrink).
///
/// Local. `info_out->struct_size` is set by the caller (DM_ERROR_INFO_INIT). Before any failure the
/// status is DM_STATUS_OK and the message "". Errors: DM_STATUS_INVALID_ARGUMENT when info_out is
/// NULL or its struct_size is wrong.
///
/// # Safety
/// `info_out` is NULL or points to `info_out->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_last_error_info(info_out: *mut dm_error_info) -> dm_status {
    let mut info = dm_error_info {
        struct_size: size_of::<dm_error_info>(),
        status: DM_STATUS_OK,
        ccl_result: 0,
        device_error: 0,
        os_error: 0,
        message: NO_ERROR.as_ptr(),
        ranks: null(),
        num_ranks: 0,
        lost_ranks: null(),
        num_lost: 0,
        dim: null(),
        waited_seconds: -1.0,
        call: -1,
    };
    // Read before the guard, whose own failure would replace the answer.
    with_last(|last| {
        if let Some(last) = last {
            info.status = last.error.status() as dm_status;
            info.ccl_result = last.error.ccl_result();
            info.device_error = last.error.device_error();
            info.os_error = last.error.os_error();
            info.message = last.message.as_ptr();
            (info.ranks, info.num_ranks) = borrowed(last.error.ranks());
            (info.lost_ranks, info.num_lost) = borrowed(last.error.lost());
            info.dim = last.dimension.as_ref().map_or(null(), |name| name.as_ptr());
            info.waited_seconds = last.error.waited().map_or(-1.0, |waited| waited.as_secs_f64());
            info.call = last.error.call().and_then(|call| i64::try_from(call).ok()).unwrap_or(-1);
        }
    });
    // SAFETY: the caller's contract.
    ask(|| unsafe { write_struct("info_out", info_out, info) })
}

/// A list that the caller may read until this thread's next failing call; NULL when it is empty.
fn borrowed(ranks: &[i32]) -> (*const i32, usize) {
    (if ranks.is_empty() { null() } else { ranks.as_ptr() }, ranks.len())
}

/// The version of the loaded library: 10000 * major + 100 * minor + patch, so 200 is 0.2.0.
///
/// Local. A program that loads the library by dlopen checks the version first: another major
/// version, and below 1.0 another minor version, has other functions and types. Where a file name
/// of such a version (libdevicemesh.so.0.1) has loaded this library, dm_world_init, dm_init,
/// dm_from_comms, dm_deserialize and dm_plan_ranks fail with DM_STATUS_UNSUPPORTED.
#[unsafe(no_mangle)]
pub extern "C" fn dm_version() -> u32 {
    const VERSION: u32 = 10_000 * number(env!("CARGO_PKG_VERSION_MAJOR"))
        + 100 * number(env!("CARGO_PKG_VERSION_MINOR"))
        + number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}

const fn number(digits: &str) -> u32 {
    let (digits, mut value, mut at) = (digits.as_bytes(), 0, 0);
    while at < digits.len() {
        value = 10 * value + (digits[at] - b'0') as u32;
        at += 1;
    }
    value
}
