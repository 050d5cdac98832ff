//! Other ranks as seen from this one along a dimension.

use std::ffi::c_char;

use super::ask::mesh_along;
use super::guard::ask;
use super::pointers::out;
use super::types::{dm_mesh, dm_status};
use crate::error::Error;

/// The world rank of member local_rank of this rank's group along dim: of rank local_rank in
/// dm_get_comm's communicator.
///
/// Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, rank 6 gets 4
/// for member 0 of tp and 2 for member 0 of dp. Errors: DM_STATUS_INVALID_ARGUMENT (local_rank is
/// negative or not below the dimension's size), DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim is NULL or NUL-terminated; world_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_translate_rank(
    mesh: *const dm_mesh,
    dim: *const c_char,
    local_rank: i32,
    world_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let world_rank_out = out("world_rank_out", world_rank_out)?;
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { mesh_along(mesh, dim)? };
        let local_rank =
            usize::try_from(local_rank).map_err(|_| Error::invalid(format!("local_rank is {local_rank}")))?;
        let rank = view.translate_rank(index, local_rank)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { world_rank_out.write(rank) };
        Ok(())
    })
}

/// The world rank that lies offset steps along dim from this rank: 1 is the next stage of a
/// pipeline, -1 the one before.
///
/// Local. Past the edge: -1, or with wrap the rank at (coordinate + offset) modulo the dimension's
/// size. offset 0 is this rank. dim NULL is allowed on a 1-D mesh. Errors: DM_STATUS_NOT_FOUND,
/// DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; world_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_neighbor(
    mesh: *const dm_mesh,
    dim: *const c_char,
    offset: i64,
    wrap: bool,
    world_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let world_rank_out = out("world_rank_out", world_rank_out)?;
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { mesh_along(mesh, dim)? };
        let rank = view.neighbor(index, offset, wrap)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { world_rank_out.write(rank.unwrap_or(-1)) };
        Ok(())
    })
}
