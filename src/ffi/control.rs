//! The control plane: barriers, and bytes that travel through the store.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::arguments::{list, natural, timeout};
use super::dim::dim_text;
use super::guard::{ask, free, guard, guard_or};
use super::handles::Table;
use super::kinds::HandleKind;
use super::make::find;
use super::pointers::out;
use super::types::{dm_buffers, dm_mesh, dm_status, dm_world};
use super::world::find as find_world;
use crate::comm::View;
use crate::error::{Error, Result};

/// Each buffer ends with a NUL that does not count.
static BUFFERS: Table<usize, Vec<Vec<u8>>> = Table::new(HandleKind::Buffers.number(), "dm_buffers");

/// Returns when every rank of this rank's group along dim has called it.
///
/// Collective over this rank's group along dim. dim NULL is allowed on a 1-D mesh. timeout_ms 0:
/// the mesh's timeout. The call goes through the store and uses no communicator. So it works on
/// every device type, makes no communicator on a mesh with DM_INIT_LAZY, and costs some round
/// trips. It does not wait for work on devices. It takes its turn among the calls of the world that
/// make or end something (see "Order" at the head of this file).
///
/// Errors: DM_STATUS_TIMEOUT (names the ranks that did not come), DM_STATUS_MISMATCH (names a rank
/// that made another call), DM_STATUS_PEER_LOST (a rank of the group is lost), DM_STATUS_ABORTED,
/// DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_INVALID_ARGUMENT (a negative timeout),
/// DM_STATUS_INVALID_STATE (operations wait in a group of this thread), DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_UNSUPPORTED (an offline world, or a mesh of dm_from_comms without a world),
/// DM_STATUS_STORE.
///
/// # Safety
/// dim is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_barrier(mesh: *const dm_mesh, dim: *const c_char, timeout_ms: i64) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            along("dm_barrier", mesh, dim, |view, index| view.barrier_along(index, timeout("timeout_ms", timeout_ms)?))
        }
    })
}

/// Gathers len bytes of every rank of dim on every rank: element i of the result is what the rank
/// i along dim gave.
///
/// Collective over this rank's group along dim. len may differ from rank to rank and may be 0; data
/// is NULL then, or anything. A rank gives at most 8 MiB, all ranks of the group together 64 MiB.
/// dim NULL is allowed on a 1-D mesh. timeout_ms 0: the mesh's timeout. The bytes travel through
/// the store, which dm_barrier uses, too. So the call is for small things: seeds, IPC handles,
/// names of files, configuration. The caller frees the result with dm_buffers_free.
///
/// ```c
/// dm_all_gather_bytes(mesh, "tp", &handle, sizeof handle, 0, &handles);
/// dm_buffers_get(handles, peer, &bytes, &len);
/// ```
///
/// Errors: those of dm_barrier; DM_STATUS_INVALID_ARGUMENT also for too many bytes (when one rank
/// gives too many, all ranks get the error).
///
/// # Safety
/// dim is NULL or NUL-terminated; data is NULL or points to len bytes; buffers_out is NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_gather_bytes(
    mesh: *const dm_mesh,
    dim: *const c_char,
    data: *const c_void,
    len: usize,
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            along("dm_all_gather_bytes", mesh, dim, |view, index| {
                gather((data, len), timeout_ms, buffers_out, |data, timeout| {
                    view.all_gather_bytes_along(index, data, timeout)
                })
            })
        }
    })
}

/// Gives every rank of dim the len bytes of its rank root: the result has one element.
///
/// Collective over this rank's group along dim. data and len are used on the root only; len is at
/// most 8 MiB and may be 0. dim NULL is allowed on a 1-D mesh. timeout_ms 0: the mesh's timeout.
/// The bytes travel through the store, which dm_barrier uses, too. The caller frees the result with
/// dm_buffers_free. Errors: those of dm_all_gather_bytes; DM_STATUS_MISMATCH also when ranks give
/// different roots.
///
/// # Safety
/// dim is NULL or NUL-terminated; on the root, data is NULL or points to len bytes; buffers_out is
/// NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_broadcast_bytes(
    mesh: *const dm_mesh,
    dim: *const c_char,
    data: *const c_void,
    len: usize,
    root: i32,
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            along("dm_broadcast_bytes", mesh, dim, |view, index| {
                let me = || view.mesh().local_rank(index);
                broadcast((data, len), root, me, timeout_ms, buffers_out, |data, root, timeout| {
                    view.broadcast_bytes_along(index, data, root, timeout)
                })
            })
        }
    })
}

/// Gathers len bytes of every rank of the world on every rank, as dm_all_gather_bytes does along a
/// dimension: element i of the result is what world rank i gave.
///
/// Collective over the world. timeout_ms 0: the world's timeout. The caller frees the result with
/// dm_buffers_free. Errors: those of dm_world_barrier; DM_STATUS_INVALID_ARGUMENT also for more
/// than 8 MiB of this rank, or 64 MiB of all ranks.
///
/// # Safety
/// data is NULL or points to len bytes; buffers_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_all_gather_bytes(
    world: *const dm_world,
    data: *const c_void,
    len: usize,
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
) -> dm_status {
    guard(|| {
        let world = find_world(world)?;
        world.tell_if_refused("dm_world_all_gather_bytes", || {
            let all_gather = |data: &[u8], timeout| world.all_gather_bytes(data, timeout);
            // SAFETY: the caller's contract.
            unsafe { gather((data, len), timeout_ms, buffers_out, all_gather) }
        })
    })
}

/// Gives every rank of the world the len bytes of the world rank root, as dm_broadcast_bytes does
/// along a dimension: the result has one element.
///
/// Collective over the world. data and len are used on the root only; len is at most 8 MiB and may
/// be 0. timeout_ms 0: the world's timeout. The caller frees the result with dm_buffers_free.
/// Errors: those of dm_world_all_gather_bytes; DM_STATUS_MISMATCH also when ranks give different
/// roots.
///
/// # Safety
/// On the root, data is NULL or points to len bytes; buffers_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_broadcast_bytes(
    world: *const dm_world,
    data: *const c_void,
    len: usize,
    root: i32,
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
) -> dm_status {
    guard(|| {
        let world = find_world(world)?;
        world.tell_if_refused("dm_world_broadcast_bytes", || {
            let send = |data: &[u8], root, timeout| world.broadcast_bytes(data, root, timeout);
            // SAFETY: the caller's contract.
            unsafe { broadcast((data, len), root, || Ok(world.rank()), timeout_ms, buffers_out, send) }
        })
    })
}

/// The number of elements of the result: the number of ranks for an all-gather, 1 for a broadcast.
/// 0 stands for an invalid handle (dm_last_error then says so).
///
/// Local.
#[unsafe(no_mangle)]
pub extern "C" fn dm_buffers_count(buffers: *const dm_buffers) -> usize {
    guard_or(0, || BUFFERS.with(buffers as usize, |count| *count))
}

/// Gives one element of the result: its bytes and their number.
///
/// Local. *data_out is borrowed from the handle: valid until dm_buffers_free. It is never NULL. A
/// NUL, which *len_out does not count, follows the bytes. So text that was sent without a NUL is a
/// string. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (no such element).
///
/// # Safety
/// data_out and len_out are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_buffers_get(
    buffers: *const dm_buffers,
    index: usize,
    data_out: *mut *const c_void,
    len_out: *mut usize,
) -> dm_status {
    ask(|| {
        let (data_out, len_out) = (out("data_out", data_out)?, out("len_out", len_out)?);
        let buffers = BUFFERS.get(buffers as usize)?;
        let bytes = buffers.get(index).ok_or_else(|| {
            Error::invalid(format!("index is {index}, but the result has {} elements", buffers.len()))
        })?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe {
            data_out.write(bytes.as_ptr().cast());
            len_out.write(bytes.len() - 1);
        }
        Ok(())
    })
}

/// Frees the result of a call. Local; NULL is a no-op, and so are a handle that was freed before
/// and any handle in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn dm_buffers_free(buffers: *mut dm_buffers) {
    if !buffers.is_null() {
        free(|| drop(BUFFERS.remove(buffers as usize)));
    }
}

/// Runs `call` for the view and the index of the dimension. If this rank refuses the call, the
/// other ranks of its group are told.
///
/// # Safety
/// `dim` is NULL or NUL-terminated.
unsafe fn along(
    function: &str,
    mesh: *const dm_mesh,
    dim: *const c_char,
    call: impl FnOnce(&View, usize) -> Result<()>,
) -> Result<()> {
    let view = find(mesh)?;
    // SAFETY: the caller's contract.
    let (view, index) = view.along_for_control(unsafe { dim_text(dim) })?;
    view.tell_group_if_refused(function, index, || call(&view, index)).map_err(|error| view.with_dim(error, index))
}

/// Reads the arguments of an all-gather, makes it, and gives its result to the caller.
///
/// # Safety
/// `data` points to as many readable bytes as stand beside it; `buffers_out` is NULL or writable.
unsafe fn gather(
    (data, len): (*const c_void, usize),
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
    all_gather: impl FnOnce(&[u8], Option<Duration>) -> Result<Vec<Vec<u8>>>,
) -> Result<()> {
    let buffers_out = out("buffers_out", buffers_out)?;
    // SAFETY: this function's contract.
    let data = unsafe { list("data", data.cast::<u8>(), len)? };
    let all = all_gather(data, timeout("timeout_ms", timeout_ms)?)?;
    // SAFETY: not NULL, and writable by the caller's word.
    unsafe { give(all, buffers_out.as_ptr()) }
}

/// Reads the arguments of a broadcast, makes it, and gives its result to the caller. `me` is this
/// rank among those of the call; only the root's `data` is read.
///
/// # Safety
/// `data` points to as many readable bytes as stand beside it; `buffers_out` is NULL or writable.
unsafe fn broadcast(
    (data, len): (*const c_void, usize),
    root: i32,
    me: impl FnOnce() -> Result<usize>,
    timeout_ms: i64,
    buffers_out: *mut *mut dm_buffers,
    send: impl FnOnce(&[u8], usize, Option<Duration>) -> Result<Vec<u8>>,
) -> Result<()> {
    let buffers_out = out("buffers_out", buffers_out)?;
    let root = natural("root", root)?;
    // SAFETY: this function's contract.
    let data = if root == me()? { unsafe { list("data", data.cast::<u8>(), len)? } } else { &[] };
    let bytes = send(data, root, timeout("timeout_ms", timeout_ms)?)?;
    // SAFETY: not NULL, and writable by the caller's word.
    unsafe { give(vec![bytes], buffers_out.as_ptr()) }
}

/// Gives the caller a handle of a result.
///
/// # Safety
/// `place` is writable.
unsafe fn give(mut all: Vec<Vec<u8>>, place: *mut *mut dm_buffers) -> Result<()> {
    all.iter_mut().for_each(|bytes| bytes.push(0));
    let token = BUFFERS.insert(all.len(), Arc::new(all))?;
    // SAFETY: the caller's contract.
    unsafe { place.write(token as *mut dm_buffers) };
    Ok(())
}
