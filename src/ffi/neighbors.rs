//! Other ranks as seen from this one along a dimension.

use std::ffi::c_char;

use super::arguments::natural;
use super::dim::mesh_along;
use super::guard::ask;
use super::pointers::out;
use super::types::{DM_RANK_NONE, dm_mesh, dm_status};

/// Gives the world rank of the rank dim_rank along dim, in this rank's group along dim.
///
/// Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
/// gets 4 for dim_rank 0 of tp and 2 for dim_rank 0 of dp. dm_translate_world_rank does the
/// reverse. Errors: DM_STATUS_INVALID_ARGUMENT (dim_rank is negative or not below the dimension's
/// size), DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim is NULL or NUL-terminated; world_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_translate_rank(
    mesh: *const dm_mesh,
    dim: *const c_char,
    dim_rank: i32,
    world_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let world_rank_out = out("world_rank_out", world_rank_out)?;
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { mesh_along(mesh, dim)? };
        let rank = view.translate_rank(index, natural("dim_rank", dim_rank)?)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { world_rank_out.write(rank) };
        Ok(())
    })
}

/// Gives the rank along dim of a world rank in this rank's group along dim: the number that
/// dm_send, dm_recv and root arguments take.
///
/// Local. dim NULL is allowed on a 1-D mesh. On mesh (dp=2, tp=4) over ranks 0..7, world rank 6
/// gets 0 for world rank 4 along tp, and DM_STATUS_NOT_MEMBER for world rank 3, which lies in the
/// other group along tp. Errors: DM_STATUS_NOT_MEMBER (this rank is not in the view, or the world
/// rank is not in its group), DM_STATUS_NOT_FOUND, DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; dim_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_translate_world_rank(
    mesh: *const dm_mesh,
    dim: *const c_char,
    world_rank: i32,
    dim_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let dim_rank_out = out("dim_rank_out", dim_rank_out)?;
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { mesh_along(mesh, dim)? };
        let rank = view.dim_rank(index, world_rank)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { dim_rank_out.write(rank as i32) };
        Ok(())
    })
}

/// Gives the rank along dim that lies offset steps from this rank: offset 1 is the next stage of a
/// pipeline, -1 the one before. dm_send and dm_recv take the result as it is, unless it is
/// DM_RANK_NONE; dm_translate_rank makes a world rank of it.
///
/// Local. Past the edge the result is DM_RANK_NONE, or with wrap the rank at (this rank along dim +
/// offset) modulo the dimension's size. offset 0 is this rank. dim NULL is allowed on a 1-D mesh.
/// Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; dim_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_neighbor(
    mesh: *const dm_mesh,
    dim: *const c_char,
    offset: i32,
    wrap: bool,
    dim_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let dim_rank_out = out("dim_rank_out", dim_rank_out)?;
        // SAFETY: the caller's contract.
        let (view, index) = unsafe { mesh_along(mesh, dim)? };
        let rank = view.neighbor(index, i64::from(offset), wrap)?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { dim_rank_out.write(rank.map_or(DM_RANK_NONE, |rank| rank as i32)) };
        Ok(())
    })
}
