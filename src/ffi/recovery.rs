//! Recovery: how a job goes on after ranks were lost (docs/recovery.md). The layout of the structs
//! and the numbers are part of the ABI: a struct grows only at its end.

use std::ffi::c_char;
use std::ptr::null;
use std::time::Duration;

use super::arguments::{
    check_flags, check_reserved, check_struct, milliseconds, natural, optional_text, read_struct, timeout, write_struct,
};
use super::guard::guard;
use super::make::{find, give};
use super::options::{GivenDims, read_dim_options};
use super::pointers::out;
use super::registry;
use super::structs::dm_dim_options;
use super::types::{DM_RANK_NONE, dm_mesh, dm_status};
use crate::comm::{RecoverOptions, Recovered};
use crate::error::{Error, Result};

/// Recover flag: this rank, which has joined (dm_recovery.has_joined), has received the state of
/// the training. A rank that has never joined has the state anyway. The flag counts for nothing on
/// a rank that is not in the mesh, because the others train on while it waits.
pub const DM_RECOVER_HAS_STATE: u32 = 1;

/// Recover flag: the job goes on also where no rank that is left has the state of some shard, for
/// example because the program will read a checkpoint.
pub const DM_RECOVER_ANY_STATE: u32 = 2;

/// Recover flag: the mesh may get more indices of its outermost dimension, when new processes fill
/// them (dm_world_options.join). dm_recover_options.max_size bounds them. dim must be the outermost
/// dimension. With DM_RECOVER_ANY_STATE dim may be another one. (New indices along another
/// dimension have no replica that has their state.)
pub const DM_RECOVER_GROW: u32 = 4;

/// How a job recovers. Initialise with DM_RECOVER_OPTIONS_INIT; zero means the default everywhere.
/// All fields but DM_RECOVER_HAS_STATE and timeout_ms must be the same on every rank that calls.
/// Where they differ on ranks of the mesh, the call fails on all of them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_recover_options {
    /// sizeof(dm_recover_options), set by the caller.
    pub struct_size: usize,
    /// DM_RECOVER_ flags.
    pub flags: u32,
    /// The least size of dim with which the job goes on. 0: 1.
    pub min_size: i32,
    /// The dimension of replicas: an index of it that cannot be filled is left out with all its
    /// ranks. It is the same in all recoveries of a job. NULL: the outermost dimension.
    pub dim: *const c_char,
    /// How long the call may take, in milliseconds. 0: as long as the mesh's calls. A rank that is
    /// not in the mesh waits without a limit, until it gets a place or the job ends.
    pub timeout_ms: i64,
    /// How long to wait for processes that can take the places of lost ranks, in milliseconds, once
    /// all living ranks are here. 0: take those that wait already.
    pub replace_ms: i64,
    /// After how many milliseconds the ranks that are not known to be lost and have not called are
    /// left out. They get DM_STATUS_NOT_MEMBER when they call. 0: never; the call then fails with
    /// DM_STATUS_TIMEOUT on all ranks. When it is not 0, min_size must not be 0 either, because an
    /// impatient rank could go on alone otherwise.
    pub silent_ms: i64,
    /// NULL: the options that the dimensions had. Otherwise one element for each dimension.
    pub dim_options: *const dm_dim_options,
    /// The number of elements of dim_options; 0 where dim_options is NULL.
    pub num_dim_options: usize,
    /// The greatest size to which the outermost dimension may grow, with DM_RECOVER_GROW. It does
    /// not make the mesh smaller. 0: no limit.
    pub max_size: i32,
    /// Must be 0.
    pub reserved: u32,
}

/// What a recovery has come to. Initialise with DM_RECOVERY_INIT. The arrays are borrowed from the
/// mesh that the recovery made: valid until its last handle is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct dm_recovery {
    /// sizeof(dm_recovery), set by the caller.
    pub struct_size: usize,
    /// The epoch of the mesh. The job starts in epoch 0, and every recovery that gives a mesh
    /// begins a later one.
    pub epoch: i64,
    /// The epoch of the mesh that this rank had before; -1 where it had none. For a mesh that no
    /// recovery made it is the mesh's own epoch.
    pub previous_epoch: i64,
    /// The world ranks that were lost or left out since previous_epoch, in ascending order, also
    /// those whose place another process has taken under the same rank. NULL when there are none.
    pub lost_ranks: *const i32,
    /// The number of elements of lost_ranks.
    pub num_lost: usize,
    /// The world ranks of the mesh that need the state: new processes, spares that got a place, and
    /// ranks that come back from a replica that was left out. In ascending order. NULL when there
    /// are none.
    pub joined_ranks: *const i32,
    /// The number of elements of joined_ranks.
    pub num_joined: usize,
    /// This rank's coordinate in the mesh before; NULL when this rank had none.
    pub old_coordinate: *const i32,
    /// This rank's coordinate in the new mesh; NULL when this rank is not in it.
    pub new_coordinate: *const i32,
    /// The number of elements of the coordinates that are not NULL.
    pub ndim: usize,
    /// The rank along dm_recover_options.dim that has the state of this rank's shard: the root of
    /// the broadcast along dim by which the joined ranks get the state. DM_RANK_NONE where no rank
    /// has it (DM_RECOVER_ANY_STATE), and where this rank is not in the mesh.
    pub state_root: i32,
    /// 1 if this rank is one of joined_ranks, otherwise 0.
    pub has_joined: i32,
}

/// Gives the mesh with which the job goes on after ranks were lost: agrees with all living ranks on
/// who is lost, lets spares and new processes take the places, and makes the communicators anew.
///
/// Collective over the ranks of the world that live, also those that are not in the mesh: spares,
/// and ranks whose replica was left out. Such a rank waits in the call until it gets a place. mesh
/// is the root mesh of the last dm_recover. Before the first dm_recover it may be any root mesh,
/// but the same one on all ranks. All other root meshes of the world end, too: make them anew by
/// dm_init. The call ends the meshes on this rank as dm_abort does, unless this rank refuses the
/// call: calls that are blocked in any of their views return. On the other ranks, calls that are
/// blocked in the store, in the host engine or in dm_stream_wait give DM_STATUS_PEER_LOST with this
/// rank, also where they wait for another rank, which hangs. Dimensions that were made (dm_flatten
/// ...) exist in the new mesh under their names, as long as their sizes still fit, and names of
/// dm_register lead to its views.
///
/// A rank that holds a place and lives keeps it. A process that has come back as a lost rank (see
/// dm_world_options.join) takes its place. A spare, a rank of the world that is not in the
/// mesh, takes an empty place where its replica becomes whole by that. A place that is still empty
/// after options->replace_ms leaves its whole index of options->dim out of the mesh, and the living
/// ranks of that index get a handle for which calls that need a member give DM_STATUS_NOT_MEMBER.
/// They call dm_recover again, and come back when the index is whole again. A world rank belongs to
/// a process for its life; the coordinate belongs to the place.
///
/// With DM_RECOVER_GROW new processes under ranks that the job did not have fill further indices of
/// the outermost dimension, when an index gets all of its ranks. The ranks that are there keep
/// their coordinates, and dm_world_size grows. dm_waiting counts such processes when an index is
/// complete.
///
/// All ranks get the same epoch, or the same error. A rank that was taken for lost or left out gets
/// DM_STATUS_NOT_MEMBER: the others go on without it, and it ends. Losses during the call begin it
/// anew within its timeout. After an error the ranks may call it again on the same handle. The new
/// mesh has the timeout of this one, is lazy where this one is, and its dimensions have the
/// dm_dim_options of this one's.
///
/// From the first recovery on, collective calls of the world (dm_init, dm_world_barrier ...) are
/// those of the ranks of the mesh. dm_world_finalize of these ranks ends the job: the ranks that
/// wait in dm_recover get DM_STATUS_ABORTED, and their world has ended.
///
/// options NULL: the defaults. recovery_out may be NULL; dm_get_recovery gives the same later. The
/// caller frees the handle with dm_free.
///
/// Errors: DM_STATUS_INVALID_STATE (nothing is to be recovered: this rank knows of no lost rank, of
/// no failed communicator and of nobody who waits to join, and then the mesh stays as it is; too
/// few ranks are left; no rank has the state of some shard; another thread is in the call; a CUDA
/// graph is being captured), DM_STATUS_TIMEOUT (names the ranks that did not come),
/// DM_STATUS_MISMATCH (the ranks' options or meshes differ; says which rank asked for what),
/// DM_STATUS_NOT_MEMBER, DM_STATUS_PEER_LOST (the store went with a lost rank: no call goes on),
/// DM_STATUS_ABORTED (the job has ended; dm_world_abort; a mesh of an earlier epoch),
/// DM_STATUS_UNSUPPORTED (a mesh without a world, an offline world, a world over
/// dm_store_callbacks without compare_set), DM_STATUS_NOT_FOUND (dim), DM_STATUS_INVALID_ARGUMENT
/// (also another dim than before, and a root mesh that no recovery gave), DM_STATUS_CCL,
/// DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// options is NULL or points to struct_size bytes; its dim is NULL or NUL-terminated; mesh_out is
/// NULL or writable; recovery_out is NULL or points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_recover(
    mesh: *const dm_mesh,
    options: *const dm_recover_options,
    mesh_out: *mut *mut dm_mesh,
    recovery_out: *mut dm_recovery,
) -> dm_status {
    guard(|| {
        let view = find(mesh)?;
        view.tell_recover_if_refused(|| {
            let mesh_out = out("mesh_out", mesh_out)?;
            // SAFETY: the caller's contract.
            let options = unsafe { read_recover_options(options, view.mesh().ndim())? };
            if !recovery_out.is_null() {
                // SAFETY: not NULL, and the caller's contract.
                unsafe { check_struct("recovery_out", recovery_out)? };
            }
            let next = view.recover(&options)?;
            registry::follow(&view, &next);
            let answer = answer(next.root_comms().recovered());
            give(next, mesh_out)?;
            match recovery_out.is_null() {
                true => Ok(()),
                // SAFETY: not NULL, and the caller's contract.
                false => unsafe { write_struct("recovery_out", recovery_out, answer) },
            }
        })
    })
}

/// Gives what the recovery that made this mesh has come to.
///
/// Local; it answers also after the mesh has ended. `recovery_out->struct_size` is set by the
/// caller (DM_RECOVERY_INIT). For a mesh that no recovery made, nobody was lost and nobody has
/// joined. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// recovery_out is NULL or points to struct_size writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_get_recovery(mesh: *const dm_mesh, recovery_out: *mut dm_recovery) -> dm_status {
    guard(|| {
        let view = find(mesh)?;
        // SAFETY: the caller's contract.
        unsafe { write_struct("recovery_out", recovery_out, answer(view.root_comms().recovered())) }
    })
}

/// # Safety
/// The conditions of `dm_recover` hold for `options`, for a mesh of `ndim` dimensions.
unsafe fn read_recover_options(options: *const dm_recover_options, ndim: usize) -> Result<RecoverOptions> {
    if options.is_null() {
        return Ok(RecoverOptions::default());
    }
    // SAFETY: not NULL, and the caller's contract.
    let given = unsafe { read_struct("options", options)? };
    check_flags("options", given.flags, DM_RECOVER_HAS_STATE | DM_RECOVER_ANY_STATE | DM_RECOVER_GROW)?;
    check_reserved("options", &[given.reserved])?;
    let (grows, max_size) = (given.flags & DM_RECOVER_GROW != 0, natural("options.max_size", given.max_size)?);
    if max_size > 0 && !grows {
        return Err(Error::invalid(format!(
            "options.max_size is {max_size}, but options.flags has no DM_RECOVER_GROW: the mesh grows only with it"
        )));
    }
    // SAFETY: the caller's contract.
    let dim = unsafe { optional_text("options.dim", given.dim)? };
    let dims = GivenDims { options: given.dim_options, number: given.num_dim_options };
    // SAFETY: the caller's contract.
    let dims = unsafe { read_dim_options(dims, ndim, "the mesh has")? };
    Ok(RecoverOptions {
        dim: dim.map(str::to_owned),
        timeout: timeout("options.timeout_ms", given.timeout_ms)?,
        replace: milliseconds(
            "options.replace_ms",
            given.replace_ms,
            "this time is in milliseconds, 0 to take the processes that wait already",
        )?
        .unwrap_or(Duration::ZERO),
        silent: milliseconds(
            "options.silent_ms",
            given.silent_ms,
            "this time is in milliseconds, 0 to leave out no silent rank",
        )?,
        min_size: natural("options.min_size", given.min_size)?,
        has_state: given.flags & DM_RECOVER_HAS_STATE != 0,
        any_state: given.flags & DM_RECOVER_ANY_STATE != 0,
        // Ranks are 32-bit, so no dimension is larger.
        max_size: grows.then_some(if max_size == 0 { i32::MAX as usize } else { max_size }),
        dims,
    })
}

/// The answer to a C caller, whose arrays are those of `recovered`.
fn answer(recovered: &Recovered) -> dm_recovery {
    let array = |list: &[i32]| if list.is_empty() { null() } else { list.as_ptr() };
    let (old, new) = (&recovered.old_coordinate, &recovered.new_coordinate);
    let number = |epoch: u64| i64::try_from(epoch).unwrap_or(i64::MAX);
    dm_recovery {
        struct_size: size_of::<dm_recovery>(),
        epoch: number(recovered.epoch),
        previous_epoch: recovered.previous_epoch.map_or(-1, number),
        lost_ranks: array(&recovered.lost_ranks),
        num_lost: recovered.lost_ranks.len(),
        joined_ranks: array(&recovered.joined_ranks),
        num_joined: recovered.joined_ranks.len(),
        old_coordinate: old.as_deref().map_or(null(), array),
        new_coordinate: new.as_deref().map_or(null(), array),
        ndim: new.as_ref().or(old.as_ref()).map_or(0, Vec::len),
        state_root: recovered.state_root.map_or(DM_RANK_NONE, |root| root as i32),
        has_joined: i32::from(recovered.has_joined),
    }
}
