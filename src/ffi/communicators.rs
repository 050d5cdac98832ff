//! The raw communicators and the library they belong to.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::arguments::text;
use super::ask::dim_text;
use super::guard::guard;
use super::make::{MESHES, find};
use super::pointers::out;
use super::types::{dm_mesh, dm_status, ncclComm_t};
use crate::comm::View;
use crate::error::Result;

/// The raw communicator of this rank's group along a dimension; rank order in it is the coordinate
/// along the dimension.
///
/// Local; with DM_INIT_LAZY the first call for a dimension is collective over this rank's group
/// along it. dim NULL is allowed on a 1-D mesh. All dimensions of size 1 give one communicator,
/// which holds this rank alone and is made at the first such call.
///
/// The communicator is borrowed from the root mesh. It lives until dm_finalize, dm_abort or the
/// end of the process, whatever handles are freed. The caller never destroys it. It is valid only
/// in the library that made it: call it through dm_get_proc. On NCCL it is blocking, unless the
/// dimension's nccl_config says otherwise: operations are on the stream when they return. The call
/// takes no lock and lasts a few nanoseconds.
///
/// Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_ABORTED, DM_STATUS_UNSUPPORTED (an
/// offline world), DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; comm_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_comm(mesh: *const dm_mesh, dim: *const c_char, comm_out: *mut ncclComm_t) -> dm_status {
    guard(|| {
        let comm_out = out("comm_out", comm_out)?;
        let quick = MESHES.with(mesh as usize, |quick| {
            // SAFETY: the caller's contract.
            unsafe { quick.index(dim) }.and_then(|index| quick.comms.ready(index))
        })?;
        let raw = match quick {
            Some(raw) => raw,
            None => {
                // SAFETY: the caller's contract.
                let (view, index) = unsafe { view_along(mesh, dim)? };
                view.comm(index)?
            }
        };
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { comm_out.write(raw.0.cast()) };
        Ok(())
    })
}

/// The function of that name ("ncclAllReduce", ...) in the library that made this mesh's
/// communicators. It is of the right copy when the process has several NCCLs, and it also works on
/// cpu, where no NCCL is linked.
///
/// Local. Cast the result to the function's type, for example decltype(&ncclAllReduce). It stays
/// valid until the end of the process. Errors: DM_STATUS_NOT_FOUND (names the library and its
/// version), DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// symbol is NULL or NUL-terminated; proc_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_proc(
    mesh: *const dm_mesh,
    symbol: *const c_char,
    proc_out: *mut *mut c_void,
) -> dm_status {
    guard(|| {
        let proc_out = out("proc_out", proc_out)?;
        // SAFETY: the caller's contract.
        let symbol = unsafe { text("symbol", symbol)? };
        let address = find(mesh)?.symbol(symbol)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { proc_out.write(address.cast_mut()) };
        Ok(())
    })
}

/// The view in which the dimension of that name is, with its communicators, and the dimension's
/// index there.
///
/// # Safety
/// `dim` is NULL or NUL-terminated.
pub(super) unsafe fn view_along(mesh: *const dm_mesh, dim: *const c_char) -> Result<(Arc<View>, usize)> {
    let view = find(mesh)?;
    // SAFETY: the caller's contract.
    view.along(unsafe { dim_text(dim)? })
}
