//! Functions that ask a mesh about its shape and its ranks.

use std::ffi::c_char;

use super::arguments::{check_room, give_each, give_len, give_list, give_text, optional_text};
use super::dim::dim_text;
use super::guard::{ask, guard_or};
use super::make::{MESHES, find};
use super::pointers::out;
use super::types::{dm_mesh, dm_status};

/// The number of dimensions. 0 stands for a view without dimensions, and for an invalid handle
/// (dm_last_error then says so).
///
/// Local.
#[unsafe(no_mangle)]
pub extern "C" fn dm_ndim(mesh: *const dm_mesh) -> usize {
    guard_or(0, || MESHES.with(mesh as usize, |quick| quick.mesh.ndim()))
}

/// The name of the dimension at that index; NULL for an index past the end and for an invalid
/// handle.
///
/// Local. Borrowed from the handle: valid until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn dm_dim_name(mesh: *const dm_mesh, index: usize) -> *const c_char {
    guard_or(std::ptr::null(), || {
        MESHES.with(mesh as usize, |quick| quick.names.get(index).map_or(std::ptr::null(), |name| name.as_ptr()))
    })
}

/// The sizes of the dimensions, in order.
///
/// Local. *len_out is the number of dimensions, always written for a valid handle. Errors:
/// DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// sizes is NULL or has room for capacity elements; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_shape(
    mesh: *const dm_mesh,
    sizes: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let shape = MESHES.with(mesh as usize, |quick| quick.mesh.shape())?;
        // SAFETY: the caller's contract.
        unsafe { give_each("sizes", shape.len(), shape.iter().map(|size| *size as i32), sizes, capacity, len_out) }
    })
}

/// The size of a dimension in ranks; dim NULL: the number of ranks of the whole view.
///
/// Local. Errors: DM_STATUS_NOT_FOUND, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; size_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_size(mesh: *const dm_mesh, dim: *const c_char, size_out: *mut i32) -> dm_status {
    ask(|| {
        let size_out = out("size_out", size_out)?;
        // SAFETY: the caller's contract.
        let dim = unsafe { optional_text("dim", dim)? };
        let size = MESHES.with(mesh as usize, |quick| match dim {
            None => Ok(quick.mesh.size()),
            Some(dim) => quick.mesh.layout_along(Some(dim)).map(|layout| layout.size()),
        })??;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { size_out.write(size as i32) };
        Ok(())
    })
}

/// The device type of the mesh, "cuda" or "cpu": the kind of memory in which the buffers of its
/// collectives lie. NULL for an invalid handle (dm_last_error then says so).
///
/// Local. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn dm_device_type(mesh: *const dm_mesh) -> *const c_char {
    guard_or(std::ptr::null(), || {
        MESHES.with(mesh as usize, |quick| if quick.mesh.device_type() == "cpu" { c"cpu" } else { c"cuda" }.as_ptr())
    })
}

/// Whether this process's rank is in the view. The call never gives DM_STATUS_NOT_MEMBER, and it
/// also answers when the mesh has ended.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (member_out is NULL).
///
/// # Safety
/// member_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_is_member(mesh: *const dm_mesh, member_out: *mut bool) -> dm_status {
    ask(|| {
        let member_out = out("member_out", member_out)?;
        let is_member = MESHES.with(mesh as usize, |quick| quick.mesh.is_member())?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { member_out.write(is_member) };
        Ok(())
    })
}

/// This process's rank in the world, whether or not it is in the mesh.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// world_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_rank(mesh: *const dm_mesh, world_rank_out: *mut i32) -> dm_status {
    ask(|| {
        let world_rank_out = out("world_rank_out", world_rank_out)?;
        let rank = MESHES.with(mesh as usize, |quick| quick.mesh.rank())?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { world_rank_out.write(rank) };
        Ok(())
    })
}

/// This process's rank along a dimension: its coordinate there, and its rank in the dimension's
/// communicator. PyTorch calls this number the local rank. (dm_world_info.local_rank is another
/// number: the rank on the host.)
///
/// Local. dim NULL is allowed on a 1-D mesh. Errors: DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER,
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (dim is NULL on a mesh of several
/// dimensions).
///
/// # Safety
/// dim is NULL or NUL-terminated; dim_rank_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_local_rank(
    mesh: *const dm_mesh,
    dim: *const c_char,
    dim_rank_out: *mut i32,
) -> dm_status {
    ask(|| {
        let dim_rank_out = out("dim_rank_out", dim_rank_out)?;
        // SAFETY: the caller's contract.
        let rank = MESHES.with(mesh as usize, |quick| match unsafe { quick.index(dim) } {
            Some(index) => quick.coordinate.get(index).map_or_else(|| quick.mesh.local_rank(index), |rank| Ok(*rank)),
            None => {
                // SAFETY: the caller's contract.
                let (view, index) = quick.mesh.along(unsafe { dim_text(dim)? })?;
                view.local_rank(index)
            }
        })??;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { dim_rank_out.write(rank as i32) };
        Ok(())
    })
}

/// This rank's coordinate in the view, one number per dimension.
///
/// Local. *len_out is the number of dimensions. Errors: DM_STATUS_NOT_MEMBER,
/// DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// coordinate is NULL or has room for capacity elements; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_coordinate(
    mesh: *const dm_mesh,
    coordinate: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        MESHES.with(mesh as usize, |quick| {
            let ndim = quick.mesh.ndim();
            // SAFETY: the caller's contract. The length is known also where this rank has no place.
            unsafe { give_len(ndim, len_out)? };
            if !quick.mesh.is_member() {
                return quick.mesh.coordinate().map(drop);
            }
            let place = quick.coordinate.iter().map(|index| *index as i32);
            // SAFETY: the caller's contract.
            unsafe { give_each("coordinate", ndim, place, coordinate, capacity, len_out) }
        })?
    })
}

/// The coordinate in the view of any of its ranks, by world rank: one number per dimension.
///
/// Local. *len_out is the number of dimensions. Errors: DM_STATUS_NOT_MEMBER (the rank is not in
/// this view), DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// coordinate is NULL or has room for capacity elements; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_coordinate_of(
    mesh: *const dm_mesh,
    world_rank: i32,
    coordinate: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        MESHES.with(mesh as usize, |quick| {
            let ndim = quick.mesh.ndim();
            // SAFETY: the caller's contract. The length is known also where that rank has no place.
            unsafe { give_len(ndim, len_out)? };
            let place = quick.mesh.coordinate_of(world_rank)?;
            // SAFETY: the caller's contract.
            unsafe {
                give_each("coordinate", ndim, place.iter().map(|index| *index as i32), coordinate, capacity, len_out)
            }
        })?
    })
}

/// The world ranks of the view, row-major in its shape.
///
/// Local. *len_out is their number, the product of the shape. Errors: DM_STATUS_BUFFER_TOO_SMALL,
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// ranks is NULL or has room for capacity elements; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_ranks(
    mesh: *const dm_mesh,
    ranks: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let view = find(mesh)?;
        // SAFETY: the caller's contract.
        unsafe { give_each("ranks", view.mesh().size(), view.mesh().each_rank(), ranks, capacity, len_out) }
    })
}

/// The world ranks of this rank's group along a dimension, in the order of their ranks in its
/// communicator.
///
/// Local. dim NULL is allowed on a 1-D mesh. *len_out is the size of the dimension. Errors:
/// DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; ranks is NULL or has room for capacity elements; len_out is NULL
/// or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_group_ranks(
    mesh: *const dm_mesh,
    dim: *const c_char,
    ranks: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let view = find(mesh)?;
        // SAFETY: the caller's contract.
        let dim = unsafe { dim_text(dim)? };
        // SAFETY: the caller's contract. The length is known also where this rank has no place.
        unsafe { give_len(view.mesh().layout_along(dim)?.size(), len_out)? };
        let (mesh, index) = view.mesh().along(dim)?;
        // A rank outside the mesh has no group along the dimension, of whatever size.
        mesh.local_rank(index)?;
        // SAFETY: the caller's contract.
        unsafe { give_each("ranks", mesh.dim_size(index), mesh.each_group_rank(index)?, ranks, capacity, len_out) }
    })
}

/// All groups along a dimension, in the form that XLA wants: an array of shape [groups, size of
/// dim], row-major, that holds each rank of the root mesh once.
///
/// Local. dim NULL is allowed on a 1-D mesh. *len_out is groups times size, the number of ranks of
/// the root mesh. Groups are ordered by the row-major position of their first rank. Errors:
/// DM_STATUS_NOT_FOUND, DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// dim is NULL or NUL-terminated; ranks is NULL or has room for capacity elements; len_out is NULL
/// or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_replica_groups(
    mesh: *const dm_mesh,
    dim: *const c_char,
    ranks: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        // SAFETY: the caller's contract.
        let dim = unsafe { optional_text("dim", dim)? };
        let view = find(mesh)?;
        // The groups of the whole root mesh do not depend on the view's own ranks.
        let layout = view.mesh().layout_along(dim)?;
        // SAFETY: the caller's contract.
        unsafe {
            check_room("ranks", view.mesh().root_size(), ranks, capacity, len_out)?;
            give_list("ranks", &view.mesh().groups_along(&layout), ranks, capacity, len_out)
        }
    })
}

/// Whether two views have the same ranks, shape, dimension names and device type.
///
/// Local. The call compares values, so views of different root meshes can be equal. Errors:
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// equal_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_equal(a: *const dm_mesh, b: *const dm_mesh, equal_out: *mut bool) -> dm_status {
    ask(|| {
        let equal_out = out("equal_out", equal_out)?;
        let equal = MESHES.with(a as usize, |a| MESHES.with(b as usize, |b| a.mesh.equals(&b.mesh)))??;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { equal_out.write(equal) };
        Ok(())
    })
}

/// A hash of the properties that dm_equal compares. Within one release of the library, equal views
/// have equal hashes on every rank, in every run and on every machine. Another release may compute
/// other hashes, so a program stores the text of dm_serialize, not the hash.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// hash_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_hash(mesh: *const dm_mesh, hash_out: *mut u64) -> dm_status {
    ask(|| {
        let hash_out = out("hash_out", hash_out)?;
        let hash = MESHES.with(mesh as usize, |quick| quick.mesh.hash())?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { hash_out.write(hash) };
        Ok(())
    })
}

/// The view as text, as PyTorch prints it: DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1)). It is
/// for people and may change between releases; dm_serialize is for programs.
///
/// Local. *len_out is the length in bytes with the NUL. Errors: DM_STATUS_BUFFER_TOO_SMALL,
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// text is NULL or has room for capacity bytes; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_describe(
    mesh: *const dm_mesh,
    text: *mut c_char,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let description = MESHES.with(mesh as usize, |quick| quick.mesh.describe())?;
        // SAFETY: the caller's contract.
        unsafe { give_text("text", &description, text, capacity, len_out) }
    })
}
