//! Which world a mesh is in, and what there is to know about a world.

use std::ffi::c_char;
use std::sync::Arc;

use super::arguments::{optional_text, timeout, write_struct};
use super::guard::{ask, guard};
use super::make;
use super::pointers::out;
use super::structs::dm_world_info;
use super::types::{dm_mesh, dm_status, dm_world};
use super::world::{find, give};
use crate::ccl;
use crate::comm;
use crate::wait::Deadline;

/// Gives the world that the mesh belongs to, also when dm_init joined the world by itself.
///
/// Local; it works for each view of the mesh, also after the mesh has ended. *world_out is a new
/// handle, which the caller frees with dm_world_free. The world lives on as long as one of its
/// handles or meshes does. Errors: DM_STATUS_UNSUPPORTED (a mesh of dm_from_comms without a world),
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (world_out is NULL).
///
/// # Safety
/// world_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_world(mesh: *const dm_mesh, world_out: *mut *mut dm_world) -> dm_status {
    guard(|| {
        let world_out = out("world_out", world_out)?;
        give(Arc::clone(make::find(mesh)?.world()?), world_out)
    })
}

/// Gives the default world: the one that dm_init joins when its options name no world. Where this
/// process is not in it yet, the call joins it first.
///
/// Collective over the world where this process is not in it, local otherwise. device_type is as
/// for dm_world_init; each device type has a default world of its own. The ranks and their store
/// come from the launcher's environment. timeout_ms bounds the joining; 0: 600000. *world_out is a
/// new handle, which the caller frees with dm_world_free; this process stays in the default world.
/// After dm_default_world_abort, dm_default_world_finalize, or a dm_world_abort or
/// dm_world_finalize of this world, the next call joins anew, with all ranks. Errors: those of
/// dm_world_init; DM_STATUS_ABORTED also when dm_default_world_abort has ended the joining.
///
/// # Safety
/// device_type is NULL or NUL-terminated; world_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_default_world(
    device_type: *const c_char,
    timeout_ms: i64,
    world_out: *mut *mut dm_world,
) -> dm_status {
    guard(|| {
        let world_out = out("world_out", world_out)?;
        // SAFETY: the caller's contract.
        let device_type = unsafe { optional_text("device_type", device_type)? };
        let deadline = timeout("timeout_ms", timeout_ms)?.map(Deadline::after);
        give(comm::default_world(ccl::device_type(device_type)?, deadline)?, world_out)
    })
}

/// Tells which rank this process is in the world, where it runs, and which library makes its
/// communicators.
///
/// Local; it answers also after the world has ended. `info_out->struct_size` is set by the caller
/// (DM_WORLD_INFO_INIT). A program needs no environment variable to choose its device: the library
/// has chosen `device` for this rank, and uses it also on threads that have no current device.
/// Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (info_out is NULL, or its
/// struct_size is wrong).
///
/// ```c
/// dm_world *world;
/// dm_world_info info = DM_WORLD_INFO_INIT;
/// dm_get_world(mesh, &world);
/// dm_world_get_info(world, &info);
/// cudaSetDevice(info.device);
/// dm_world_free(world);
/// ```
///
/// # Safety
/// info_out is NULL or points to `info_out->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_get_info(world: *const dm_world, info_out: *mut dm_world_info) -> dm_status {
    ask(|| {
        let world = find(world)?;
        let (local, library) = (world.local_place(), world.library().ok());
        let info = dm_world_info {
            struct_size: size_of::<dm_world_info>(),
            rank: world.rank() as i32,
            size: world.size() as i32,
            local_rank: local.local_rank as i32,
            local_size: local.local_size as i32,
            host: local.host as i32,
            num_hosts: local.num_hosts as i32,
            device: world.device().map_or(-1, |device| device as i32),
            ccl_version: library.map_or(0, |library| library.version()),
            device_type: if world.device_type() == "cpu" { c"cpu" } else { c"cuda" }.as_ptr(),
            library: library.map_or(c"", |library| library.c_name()).as_ptr(),
            epoch: i64::try_from(world.rendezvous().epoch()).unwrap_or(i64::MAX),
            ticket: i64::from(world.ticket()),
        };
        // SAFETY: the caller's contract.
        unsafe { write_struct("info_out", info_out, info) }
    })
}

/// Gives the number of processes that wait to join the running job. The next dm_recover lets them
/// in where there is a place for them.
///
/// Local, and cheap enough for every step: it makes no store operation while nobody waits, and
/// looks at a socket at most once in 10 ms (in a folder and with dm_store_callbacks: at the store,
/// once a second). A process for which the last recovery had no place does not count. A process
/// that would be beyond the mesh counts when all ranks of its index of the outermost dimension
/// wait. Ranks may get different numbers for a moment. So the ranks agree before they call
/// dm_recover for it, for example by the sum of a reduction that they make anyway. Errors:
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (count_out is NULL), DM_STATUS_UNSUPPORTED
/// (an offline world), DM_STATUS_ABORTED (the world has ended).
///
/// # Safety
/// count_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_waiting(world: *const dm_world, count_out: *mut i32) -> dm_status {
    ask(|| {
        let count_out = out("count_out", count_out)?;
        let count = find(world)?.num_waiting()?;
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { count_out.write(count) };
        Ok(())
    })
}
