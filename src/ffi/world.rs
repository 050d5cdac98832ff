//! The world: joining it and asking it.

use std::ffi::{CString, c_char};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::arguments::{optional_text, timeout};
use super::guard::{ask, free, guard};
use super::handles::Table;
use super::kinds::HandleKind;
use super::options::read_world_options;
use super::pointers::out;
use super::release;
use super::structs::dm_world_options;
use super::types::{dm_status, dm_world};
use crate::ccl;
use crate::comm::{self, World};
use crate::error::Result;
use crate::logging;
use crate::wait::Cancel;

static WORLDS: Table<(), World> = Table::new(HandleKind::World.number(), "dm_world");

/// The flags that end a join in progress, by the token in dm_world_options.joining_out.
static JOINING: Table<(), Cancel> = Table::new(HandleKind::Joining.number(), "dm_world");

/// Joins the world: finds out which rank this process is, reaches the store, and agrees with the
/// other ranks on the members of the world.
///
/// Collective over the world, except with DM_WORLD_OFFLINE. device_type is "cuda", "cpu", or NULL
/// for cuda where a driver with a device and NCCL (or RCCL) are present and cpu elsewhere. options
/// NULL: everything from the launcher's environment (torchrun, Open MPI, PALS, PMI, PMIx, Slurm, a
/// Kubernetes indexed job, or alone; docs/launchers.md has their variables). A process with several
/// devices joins one world per device, each with an explicit rank, from one thread per device.
/// *world_out is a handle, which the caller frees with dm_world_free.
///
/// With init_method "tcp://host:port" or an environment without a launcher's store, rank 0 serves
/// the store until its handle and meshes are freed or its process ends. The other ranks need the
/// store for every call that makes or ends something, and for the control plane. Rank 0 listens
/// only on the addresses of the host that is named. With DM_STORE_SECRET set in the environment of
/// all ranks, it serves only connections that prove to have the secret (PyTorch's clients cannot).
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (options, partial or contradictory environment variables),
/// DM_STATUS_STORE (unreachable, port in use), DM_STATUS_TIMEOUT (names the ranks that never came),
/// DM_STATUS_MISMATCH (world size, device type or library version differ), DM_STATUS_PEER_LOST (a
/// rank is lost; it is named), DM_STATUS_LIBRARY and DM_STATUS_DEVICE (no communicator library, no
/// device driver), DM_STATUS_ABORTED (dm_world_abort with the token of options->joining_out),
/// DM_STATUS_UNSUPPORTED (device type cpu on several hosts, with an older libhostccl.so),
/// DM_STATUS_INVALID_STATE (the job that this process was to join has ended).
///
/// A process that takes the place of a lost one in a running job (options->join, DM_JOIN) waits for
/// nobody here: it compares itself with the job, and its dm_init waits for the place. Until then
/// collective calls of the world other than dm_init give DM_STATUS_INVALID_STATE, and
/// dm_world_finalize only ends the world on this rank.
///
/// # Safety
/// Strings are NULL or NUL-terminated; options is NULL or points to struct_size bytes; world_out is
/// NULL or writable, and so is options.joining_out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_init(
    device_type: *const c_char,
    options: *const dm_world_options,
    world_out: *mut *mut dm_world,
) -> dm_status {
    guard(|| {
        logging::init_from_environment();
        release::check()?;
        let world_out = out("world_out", world_out)?;
        // SAFETY: the caller's contract.
        let device_type = unsafe { optional_text("device_type", device_type)? };
        // SAFETY: the caller's contract.
        let options = unsafe { read_world_options(options)? };
        // SAFETY: the caller's contract.
        let joining = unsafe { Joining::begin(&options.world.join.cancel, options.joining_out)? };
        let joined = World::join(ccl::device_type(device_type)?, &options.world);
        drop(joining);
        // From here on the token is dead. A dm_world_abort that came at the last moment means the
        // world.
        let world = joined.and_then(|world| options.world.join.cancel.check().map(|()| world));
        let world = world.inspect_err(|_| options.let_callbacks_go())?;
        // Where there is no handle for the world, it is dropped by now.
        give(Arc::new(world), world_out).inspect_err(|_| options.let_callbacks_go())?;
        if let Some(callbacks) = &options.callbacks {
            callbacks.keep();
        }
        Ok(())
    })
}

/// Gives a new handle of a world to the caller.
pub(super) fn give(world: Arc<World>, world_out: NonNull<*mut dm_world>) -> Result<()> {
    let token = WORLDS.insert((), world)?;
    // SAFETY: not NULL, and writable by the caller's word.
    unsafe { world_out.write(token as *mut dm_world) };
    Ok(())
}

/// A token in `JOINING`, for as long as this lives.
struct Joining(Option<usize>);

impl Joining {
    /// Writes a token for `cancel` to `place`, unless that is NULL.
    ///
    /// # Safety
    /// `place` is NULL or writable.
    unsafe fn begin(cancel: &Cancel, place: *mut *mut dm_world) -> Result<Joining> {
        if place.is_null() {
            return Ok(Joining(None));
        }
        let token = JOINING.insert((), Arc::new(cancel.clone()))?;
        // SAFETY: not NULL, and writable by the caller's word; whoever reads it meanwhile does so
        // atomically.
        unsafe { AtomicPtr::from_ptr(place) }.store(token as *mut dm_world, Ordering::Release);
        Ok(Joining(Some(token)))
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.0.take().map(|token| JOINING.remove(token));
    }
}

/// This process's rank in the world, 0 to size - 1.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (rank_out is NULL).
///
/// # Safety
/// `rank_out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_rank(world: *const dm_world, rank_out: *mut i32) -> dm_status {
    ask(|| {
        let rank_out = out("rank_out", rank_out)?;
        let rank = find(world)?.rank();
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { rank_out.write(rank as i32) };
        Ok(())
    })
}

/// The number of ranks in the world.
///
/// Local. Errors: DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT (size_out is NULL).
///
/// # Safety
/// `size_out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_size(world: *const dm_world, size_out: *mut i32) -> dm_status {
    ask(|| {
        let size_out = out("size_out", size_out)?;
        let size = find(world)?.size();
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { size_out.write(size as i32) };
        Ok(())
    })
}

/// Returns when every rank of the world has called it.
///
/// Collective over the world. timeout_ms 0: the world's timeout. The call goes through the store,
/// so it costs some round trips. It does not wait for work on devices. Errors: DM_STATUS_TIMEOUT
/// (names the ranks that did not come), DM_STATUS_MISMATCH (names a rank that made another call),
/// DM_STATUS_PEER_LOST (names a rank that is lost), DM_STATUS_ABORTED (this rank has ended its part
/// by dm_world_abort, or the world was finalized), DM_STATUS_INVALID_STATE (operations wait in a
/// group of this thread), DM_STATUS_INVALID_ARGUMENT (a negative timeout),
/// DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_STORE.
#[unsafe(no_mangle)]
pub extern "C" fn dm_world_barrier(world: *const dm_world, timeout_ms: i64) -> dm_status {
    guard(|| {
        let world = find(world)?;
        world.tell_if_refused("dm_world_barrier", || world.barrier(timeout("timeout_ms", timeout_ms)?))
    })
}

/// Gives the location of every rank of the world as dm_plan_ranks takes it: world_size paths in
/// rank order.
///
/// Collective over the world. location is the path of this rank, from far to near
/// ("rack1/host3/nvl0"). NULL stands for the name of its host. On device type cuda that is the same
/// for all containers of one machine. On device type cpu ranks that share no memory have hosts of
/// their own, so two containers of one machine that are both called "a" get the names "a" and
/// "a#2". Each rank gives its own path. Paths may have different numbers of levels, but a plan is
/// best when all have the same ones. timeout_ms 0: the world's timeout. *locations_out is borrowed
/// from the world: valid until the world's last handle and mesh are freed.
///
/// ```c
/// dm_plan_options plan = DM_PLAN_OPTIONS_INIT;
/// dm_world_locations(world, NULL, 0, &plan.locations);
/// plan.world_size = world_size;
/// plan.shape = shape;
/// plan.ndim = ndim;
/// dm_plan_ranks(&plan, ranks, NULL, 0, NULL);
/// ```
///
/// The library owns the list and its strings: the caller copies what must live longer, and frees
/// nothing. Calls with equal answers give one list, so repeated calls need no further memory.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT (also a location of more than 4096 bytes, a negative
/// timeout), DM_STATUS_UNSUPPORTED (an offline world), and those of dm_world_barrier.
///
/// # Safety
/// location is NULL or NUL-terminated; locations_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_world_locations(
    world: *const dm_world,
    location: *const c_char,
    timeout_ms: i64,
    locations_out: *mut *const *const c_char,
) -> dm_status {
    guard(|| {
        let world = find(world)?;
        let (locations_out, locations) = world.tell_if_refused("dm_world_locations", || {
            let locations_out = out("locations_out", locations_out)?;
            // SAFETY: the caller's contract.
            let location = unsafe { optional_text("location", location)? };
            Ok((locations_out, world.locations(location, timeout("timeout_ms", timeout_ms)?)?))
        })?;
        let Borrowed(first) = world.lend(&locations, || {
            let texts: Vec<CString> =
                locations.iter().map(|text| CString::new(text.as_str()).unwrap_or_default()).collect();
            let pointers: Vec<Borrowed<c_char>> = texts.iter().map(|text| Borrowed(text.as_ptr())).collect();
            // The strings and the list stay where they are when their owners move.
            (Borrowed(pointers.as_ptr().cast()), Box::new((texts, pointers)))
        });
        // SAFETY: not NULL, and writable by the caller's word.
        unsafe { locations_out.write(first) };
        Ok(())
    })
}

/// Something that the world holds: a string, or a list of strings.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Borrowed<T>(*const T);

// SAFETY: what it points to is never changed, and lives as long as the world that holds this.
unsafe impl<T> Send for Borrowed<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Borrowed<T> {}

/// Ends this rank's part in the world, without waiting for other ranks: wakes every call of the
/// world that is blocked on this rank (dm_init, dm_world_barrier, dm_flatten ...) and aborts all
/// its root meshes, as dm_abort does. To the other ranks this rank is lost from then on.
///
/// Local, from any thread; takes no lock that a blocked call holds. From then on every collective
/// call of the world gives DM_STATUS_ABORTED, its meshes have ended, and their raw communicators
/// must not be used any more; handles are still to be freed. Other ranks that wait for this one get
/// DM_STATUS_PEER_LOST, which names it. A second abort only waits for what has not ended yet. With
/// a token of dm_world_options.joining_out the call ends the dm_world_init that wrote the token.
/// dm_default_world_abort ends the worlds that dm_init joins by itself. Errors: those of dm_abort.
#[unsafe(no_mangle)]
pub extern "C" fn dm_world_abort(world: *const dm_world) -> dm_status {
    guard(|| match JOINING.get(world as usize) {
        Ok(cancel) => {
            cancel.raise();
            Ok(())
        }
        Err(_) => find(world)?.abort(),
    })
}

/// Ends this rank's part in the default worlds, those that dm_init joins by itself, as
/// dm_world_abort does. It also ends the joining of a default world.
///
/// Local, from any thread; takes no lock that a blocked call holds. A dm_init that begins after
/// that joins the default world anew, so the ranks can meet again once all of them have aborted
/// theirs. Without a default world it does nothing. Errors: DM_STATUS_TIMEOUT and DM_STATUS_CCL, as
/// in dm_abort.
#[unsafe(no_mangle)]
pub extern "C" fn dm_default_world_abort() -> dm_status {
    guard(comm::abort_default_worlds)
}

/// Ends the world in order: waits for the outstanding work of all its meshes on all ranks, destroys
/// their communicators, also those of meshes whose handles were freed, and ends the meshes and the
/// world. PyTorch's destroy_process_group() does the same.
///
/// Collective over the world; local in an offline world. timeout_ms 0: the world's timeout. From
/// then on every collective call of the world gives DM_STATUS_ABORTED, its meshes have ended, and
/// their raw communicators must not be used any more; handles are still to be freed. Communicators
/// that dm_from_comms took without DM_INIT_OWN_COMMS stay the caller's. Where dm_init joined the
/// world by itself, the next dm_init joins it anew. Errors: DM_STATUS_TIMEOUT and
/// DM_STATUS_MISMATCH as in dm_init (when a rank never made the call, the world is as before, and
/// dm_world_abort ends it), DM_STATUS_CCL and DM_STATUS_PEER_LOST (a communicator had failed, or
/// fails now: it is aborted, and the world has ended all the same), DM_STATUS_ABORTED (it has ended
/// already), DM_STATUS_INVALID_ARGUMENT (a negative timeout), DM_STATUS_INVALID_STATE (operations
/// wait in a group of this thread, or a CUDA graph is being captured), DM_STATUS_INVALID_HANDLE.
#[unsafe(no_mangle)]
pub extern "C" fn dm_world_finalize(world: *const dm_world, timeout_ms: i64) -> dm_status {
    guard(|| {
        let world = find(world)?;
        world.tell_if_refused("dm_world_finalize", || world.finalize(timeout("timeout_ms", timeout_ms)?))
    })
}

/// Ends the default worlds in order, those that dm_init joins by itself, as dm_world_finalize does.
///
/// Collective over the default worlds that this process is in: all of them have the same ranks.
/// timeout_ms bounds the whole call, also where the process is in two of them; 0: the longest of
/// their timeouts. Where the process is in none, this does nothing. A dm_init that begins after
/// that joins the default world anew. Errors: those of dm_world_finalize.
#[unsafe(no_mangle)]
pub extern "C" fn dm_default_world_finalize(timeout_ms: i64) -> dm_status {
    guard(|| comm::finalize_default_worlds(timeout("timeout_ms", timeout_ms)))
}

/// Frees a world handle. Local; NULL is a no-op, and so are a handle that was freed before and any
/// handle in a forked child.
///
/// Meshes keep alive what they need of the world, and communicators live on as dm_get_comm says.
/// Where this was the last handle of the world and no mesh is left, the call returns when the
/// connection to the store is closed, and on rank 0 when the store's server has ended.
#[unsafe(no_mangle)]
pub extern "C" fn dm_world_free(world: *mut dm_world) {
    if !world.is_null() {
        free(|| drop(WORLDS.remove(world as usize)));
    }
}

/// Returns the world that a handle names.
pub(super) fn find(world: *const dm_world) -> Result<Arc<World>> {
    WORLDS.get(world as usize)
}
