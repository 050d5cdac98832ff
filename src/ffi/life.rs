//! Life and death of a mesh.

use std::ffi::c_char;

use super::communicators::view_along;
use super::guard::guard;
use super::make::find;
use super::types::{dm_mesh, dm_status};

/// The asynchronous error of dim's communicator: DM_STATUS_OK while it is well.
///
/// Local, does not wait. dim NULL is allowed on a 1-D mesh. Errors: DM_STATUS_PEER_LOST (a rank died; named where known), DM_STATUS_CCL,
/// DM_STATUS_ABORTED, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_check(mesh: *const dm_mesh, dim: *const c_char) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { view_along(mesh, dim)? };
        view.check(index)
    })
}

/// Ends the root mesh of this view on this rank, at once: wakes every call that is blocked in any of its views, here and, with the host
/// engine, on the other ranks, where they get DM_STATUS_PEER_LOST.
///
/// Local, from any thread; takes no lock that a blocked call holds. Every view of this root answers DM_STATUS_ABORTED from then on. A
/// communicator that another root mesh of this world shares ends for that one as well. Raw communicators from dm_get_comm must not be used
/// any more. A second abort, or one after dm_finalize, does nothing. What has no mesh yet, dm_init, is ended by dm_world_abort. With NCCL it returns when
/// this root's work has left the streams: where that lies behind a stuck call of another mesh, dm_world_abort ends both.
#[unsafe(no_mangle)]
pub extern "C" fn dm_abort(mesh: *const dm_mesh) -> dm_status {
    guard(|| find(mesh)?.root_comms().abort())
}

/// Waits for the outstanding work of this view's root mesh and destroys those of its communicators that no other root mesh of this world
/// shares. Every view of this root answers DM_STATUS_ABORTED from then on; handles are still to be freed.
///
/// Collective over the root mesh; on a rank outside it, local. Errors: DM_STATUS_TIMEOUT and DM_STATUS_MISMATCH as in dm_init (where a rank never
/// made the call the mesh is then as before: dm_abort ends it; where one did not get through it, the mesh has ended here), DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (it has ended already).
#[unsafe(no_mangle)]
pub extern "C" fn dm_finalize(mesh: *const dm_mesh) -> dm_status {
    guard(|| find(mesh)?.root_comms().finalize())
}
