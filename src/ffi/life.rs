//! How a mesh fails, ends, and goes on without lost ranks.

use std::ffi::{c_char, c_void};

use super::arguments::{give_list, list, timeout};
use super::dim::dim_text;
use super::guard::guard;
use super::make::{find, give};
use super::options::read_call_options;
use super::pointers::out;
use super::structs::dm_call_options;
use super::types::{dm_mesh, dm_status};
use crate::error::Error;

/// Returns the asynchronous error of dim's communicator: DM_STATUS_OK while it works, while it is
/// being made, and before it is made (DM_INIT_LAZY). dim NULL: all communicators of the mesh that
/// have no rank outside the view. These are those of its dimensions, and flattened ones. The first
/// error counts.
///
/// Local: it makes no communicator, and waits for no rank and for no work. On cuda it waits for the
/// answer of ncclCommGetAsyncError, five seconds at most for each communicator; where NCCL works,
/// the answer is there at once. It does not ask the store, so DM_STATUS_OK does not say that all
/// ranks live: dm_lost_ranks and dm_stream_wait ask the store.
///
/// Errors: DM_STATUS_PEER_LOST (a rank is lost, or has aborted; named where known),
/// DM_STATUS_MISMATCH (an earlier collective failed), DM_STATUS_TIMEOUT (an earlier collective
/// failed, or NCCL does not answer), DM_STATUS_CCL, DM_STATUS_ABORTED, DM_STATUS_NOT_FOUND,
/// DM_STATUS_NOT_MEMBER, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_ARGUMENT (dim
/// is empty or not UTF-8), DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim is NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_check(mesh: *const dm_mesh, dim: *const c_char) -> dm_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let dim = unsafe { dim_text(dim)? };
        let view = find(mesh)?;
        dim.map_or_else(|| view.check_all(), |name| view.check_along(name))
    })
}

/// Waits until the work on a stream is done, or until it is clear that a lost rank or a failed
/// communicator holds it up. (cudaStreamSynchronize would wait for ever.) DM_STATUS_OK says that
/// the work is done, and that no communicator has failed and no rank was lost or has aborted by
/// then.
///
/// Local: it makes no communicator, and may be called from several threads. The waiting thread
/// sleeps, and asks the stream (cuStreamQuery) with growing pauses of at most 10 ms. Every 100 ms
/// it asks the communicators for their asynchronous errors. It asks the store for lost ranks after
/// 250 ms, then with growing pauses of at most two seconds, and once more when the work is done.
/// dim names the dimension whose communicator and ranks it asks about. dim NULL stands for the
/// communicators of dm_check with dim NULL, and for the ranks of the view. A communicator that is
/// not made yet is left out. timeout_ms 0: the mesh's timeout. The stream may hold other work, too.
/// A stream that is being captured is refused. On cpu a collective is done when it returns: stream
/// is NULL there, and the call asks the communicators once and returns.
///
/// When the call fails, the work stays on the stream: dm_abort ends the work. When a rank is lost,
/// the call waits one second more, because work that does not need the rank may end by itself.
/// After that it gives DM_STATUS_PEER_LOST, whether or not the work waits for that rank. So a rank
/// ends its process only after dm_finalize. When another rank of the world is in dm_recover and the
/// work is not done, the call gives DM_STATUS_PEER_LOST with that rank, within about half a second.
///
/// The call gives DM_STATUS_PEER_LOST also when the work is done, but a rank is lost or has ended
/// the mesh by dm_abort, dm_recover or dm_shrink. Use no result then: when a rank aborts, NCCL may
/// let the other ranks' kernels end with wrong data and without an error, which
/// cudaStreamSynchronize cannot show. Do not use the results either when the work is done and the
/// call gives DM_STATUS_STORE or DM_STATUS_TIMEOUT, because the store does not say whether a rank
/// has ended the mesh. A mesh without a world has no store: there only a communicator can tell of a
/// lost rank. dm_last_error_info has the lost ranks, the dimension and the time that passed.
///
/// Errors: DM_STATUS_PEER_LOST, DM_STATUS_TIMEOUT (no rank is known to be lost; or as in dm_check;
/// or the store does not answer when the work is done), DM_STATUS_STORE (the store cannot be
/// reached when the work is done), DM_STATUS_CCL (a communicator has failed), DM_STATUS_DEVICE
/// (work on the stream has failed), DM_STATUS_ABORTED (also when dm_abort on another thread ends
/// the wait), DM_STATUS_MISMATCH (cpu: an earlier collective failed), DM_STATUS_NOT_FOUND,
/// DM_STATUS_NOT_MEMBER, DM_STATUS_UNSUPPORTED (an offline world), DM_STATUS_INVALID_HANDLE,
/// DM_STATUS_INVALID_ARGUMENT (a negative timeout, a stream on cpu), DM_STATUS_INVALID_STATE (the
/// stream is being captured, or operations wait in a group of this thread), DM_STATUS_DEVICE also
/// where stream is a default stream and another device than the communicators' is current on this
/// thread.
///
/// # Safety
/// dim is NULL or NUL-terminated; stream is NULL or a live stream of the program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_stream_wait(
    mesh: *const dm_mesh,
    dim: *const c_char,
    stream: *mut c_void,
    timeout_ms: i64,
) -> dm_status {
    guard(|| {
        let view = find(mesh)?;
        let timeout = timeout("timeout_ms", timeout_ms)?;
        // SAFETY: the caller's contract.
        unsafe { view.stream_wait(dim_text(dim)?, stream, timeout) }
    })
}

/// Ends the root mesh of this view on this rank, without an agreement with other ranks, and wakes
/// every call of this rank that is blocked in any of its views. With the host engine it also wakes
/// such calls on the other ranks, where they get DM_STATUS_PEER_LOST.
///
/// Local, from any thread; takes no lock that a blocked call holds. On cpu it returns at once. On
/// cuda it waits for calls of this library that are inside NCCL on these communicators, and then
/// for NCCL's own abort, which waits for captured CUDA graphs with work of the communicator and for
/// ranks of this host. The limit for both together is the mesh's timeout, but not less than one
/// second and not more than five. At the limit the call gives DM_STATUS_TIMEOUT, and the
/// communicator ends later. On cuda the call first tells the store, which takes half a second at
/// most and does not count for this limit.
///
/// The mesh has ended (see "ended" at the head of this file) from the beginning of the call on,
/// also when the call fails. A communicator that another root mesh of this world shares ends for
/// that one as well; a mesh that is made afterwards has new ones. Raw communicators from
/// dm_get_comm must not be used any more. A second abort, or one after dm_finalize, only waits for
/// communicators that have not ended yet; one after dm_shrink does nothing. A dm_init in progress
/// has no mesh yet: dm_world_abort ends it.
///
/// NCCL's abort returns when the work of this root has left the streams. Where this work lies
/// behind stuck work of another mesh, dm_world_abort ends both. NCCL forbids ending a communicator
/// while a thread is inside a call on it. The library sees to this for its own calls, and the
/// program for its calls on raw communicators.
///
/// Another rank may wait for this one through the store alone, in a call on this mesh: dm_flatten
/// and the like, the making of a communicator of a DM_INIT_LAZY mesh, or a call of the control
/// plane. Its call ends with DM_STATUS_PEER_LOST, and so does each later one that needs this rank.
/// dm_shrink waits, because this rank may still call dm_shrink, too.
///
/// Errors: DM_STATUS_TIMEOUT (cuda: a communicator has not ended yet), DM_STATUS_CCL (NCCL's abort
/// failed), DM_STATUS_INVALID_HANDLE. After DM_STATUS_TIMEOUT and DM_STATUS_CCL the mesh has ended,
/// too.
#[unsafe(no_mangle)]
pub extern "C" fn dm_abort(mesh: *const dm_mesh) -> dm_status {
    guard(|| find(mesh)?.root_comms().abort())
}

/// Waits for the outstanding work of this view's root mesh, destroys those of its communicators
/// that no other root mesh of this world shares, and ends the mesh (see "ended" at the head of this
/// file). On cuda it does not wait for work on a communicator that another root mesh shares, or
/// that the program made (dm_from_comms): dm_stream_wait does.
///
/// Collective over the root mesh; local on a rank outside it, and for a mesh without a world.
/// options NULL: the mesh's timeout. options->num_dim_options must be 0. Errors: DM_STATUS_TIMEOUT
/// and DM_STATUS_MISMATCH as in dm_init (when a rank never made the call, the mesh is as before,
/// and dm_abort ends it; when all ranks made the call and one did not get through it, the mesh has
/// ended here), DM_STATUS_CCL, DM_STATUS_PEER_LOST, DM_STATUS_ABORTED (it has ended already),
/// DM_STATUS_INVALID_STATE (operations wait in a group of this thread, or a CUDA graph is being
/// captured), DM_STATUS_INVALID_ARGUMENT, DM_STATUS_INVALID_HANDLE.
///
/// A communicator that has failed has no work to wait for: it is aborted, and the call gives the
/// failure on all ranks. Then the call waits one second at most for ranks that have not come. When
/// a rank waits in a collective of the host engine for a rank that has called dm_finalize, both get
/// DM_STATUS_MISMATCH after about a second.
///
/// When the ranks of a dimension have made different collectives along it, the call gives
/// DM_STATUS_MISMATCH on all ranks of the mesh. The error has the ranks of the group and the
/// dimension, and the message has the first collective that differs, as far as the recordings of
/// the processes show it. The mesh has ended then.
///
/// # Safety
/// options is NULL or points to struct_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_finalize(mesh: *const dm_mesh, options: *const dm_call_options) -> dm_status {
    guard(|| {
        let view = find(mesh)?;
        view.tell_root_if_refused("dm_finalize", || {
            // SAFETY: the caller's contract.
            let options = unsafe { read_call_options(options, 0)? };
            view.root_comms().finalize_within(options.timeout)
        })
    })
}

/// Gives the world ranks of this view that are known to be lost by now (see "lost" at the head of
/// this file), in ascending order, without a limit of their number. dm_shrink takes this list.
///
/// Local: it asks the store and the communicators, and waits for half a second at most where they
/// do not answer. *len_out is the number of lost ranks. Other ranks may learn of a loss a moment
/// earlier or later. The call also answers after the mesh has ended. On a mesh without a world
/// (dm_from_comms) it knows only losses that a communicator of the mesh has met. Errors:
/// DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_INVALID_HANDLE, DM_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// ranks is NULL or has room for capacity elements; len_out is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_lost_ranks(
    mesh: *const dm_mesh,
    ranks: *mut i32,
    capacity: usize,
    len_out: *mut usize,
) -> dm_status {
    guard(|| {
        let lost = find(mesh)?.lost_ranks()?;
        // SAFETY: the caller's contract.
        unsafe { give_list("ranks", &lost, ranks, capacity, len_out) }
    })
}

/// Gives a mesh without those indices along dim that hold a lost rank, so that the job goes on
/// after a rank has died. Each such index is left out with all its ranks (a whole replica).
///
/// Collective over the ranks of the mesh that are not lost (where the mesh is a range, over those
/// of the range), also over living ranks whose replica is left out: calls on their handle that need
/// a member give DM_STATUS_NOT_MEMBER. A rank that has called dm_abort is not lost. mesh has all
/// ranks of its root mesh or its range (a view of some of them is refused). dim NULL is allowed on
/// a 1-D mesh. On a mesh (dp=4, tp=2) over ranks 0 .. 7, rank 5 lost and dim "dp" give (dp=3, tp=2)
/// over ranks 0, 1, 2, 3, 6, 7.
///
/// With num_lost 0, whatever lost_ranks is, the ranks that are left agree on who is lost: all of
/// them leave out the same ranks, whatever each of them knew. The call waits until every rank has
/// made it or is lost. Ranks that are lost meanwhile are left out too. When no rank is lost, all
/// ranks get DM_STATUS_INVALID_STATE; the mesh has ended all the same, so make it anew with
/// dm_init. A rank that lives and that the others take for lost gets DM_STATUS_NOT_MEMBER. When a
/// rank neither calls nor is known to be lost, the others get DM_STATUS_TIMEOUT at the deadline,
/// and dm_last_error_info has the rank.
///
/// Otherwise lost_ranks are num_lost world ranks of the mesh, the same set on every rank. A rank
/// that is named may be alive: it calls dm_abort, and not dm_shrink. Ranks that name different lost
/// ranks get DM_STATUS_MISMATCH if they wait for each other, and so do ranks with a list and ranks
/// without one. Two sets of ranks that name each other as lost go on apart. A list that is wrong in
/// itself is refused on its caller alone.
///
/// The call ends the root mesh on this rank as dm_abort does, whether or not it succeeds, unless
/// this rank itself refuses it: calls that are blocked in any of its views return. dm_shrink may
/// therefore be called from any thread (one at a time), and after dm_abort on some or all ranks,
/// but not after dm_finalize. Only dm_world_abort ends the call early. When it fails with
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT or the refusal of a rank, the ranks
/// may call it again on the same handle. The result is a root mesh of its own; its dimensions have
/// the names of this one's, and share no communicator with meshes made before. The caller frees the
/// handle with dm_free.
///
/// The new mesh inherits this one's timeout, whether it is lazy, and the dm_dim_options of its
/// dimensions. options->dim_options has one element for each dimension of the mesh, and replaces
/// the inherited ones; options->timeout_ms bounds this call. options NULL: the inherited options,
/// and the timeout of the mesh.
///
/// ncclCommShrink makes the new communicators from those of the mesh. Errors: DM_STATUS_UNSUPPORTED
/// (the library has none: NCCL before 2.27; a mesh without a world), DM_STATUS_INVALID_ARGUMENT (a
/// rank outside the mesh, this rank, nothing left), DM_STATUS_INVALID_STATE (no rank is lost, or a
/// CUDA graph is being captured), DM_STATUS_ABORTED (after dm_finalize, dm_world_finalize or
/// dm_world_abort, and when a dm_recover has given the job another mesh), DM_STATUS_NOT_MEMBER,
/// DM_STATUS_NOT_FOUND, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT, DM_STATUS_PEER_LOST (a further rank
/// is lost; or the lost rank served the store, as rank 0 may do, and then no call succeeds any
/// more), DM_STATUS_CCL, DM_STATUS_INVALID_HANDLE.
///
/// # Safety
/// dim is NULL or NUL-terminated; lost_ranks is NULL or has num_lost elements; mesh_out is NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_shrink(
    mesh: *const dm_mesh,
    dim: *const c_char,
    lost_ranks: *const i32,
    num_lost: usize,
    options: *const dm_call_options,
    mesh_out: *mut *mut dm_mesh,
) -> dm_status {
    guard(|| {
        let view = find(mesh)?;
        let size = view.mesh().size();
        if num_lost > size {
            return Err(Error::invalid(format!("num_lost is {num_lost}, but the mesh has {size} ranks")));
        }
        // SAFETY: the caller's contract.
        let lost = unsafe { list("lost_ranks", lost_ranks, num_lost)? };
        view.tell_shrink_if_refused(lost, || {
            let mesh_out = out("mesh_out", mesh_out)?;
            // SAFETY: the caller's contract.
            let (dim, options) = unsafe { (dim_text(dim)?, read_call_options(options, view.mesh().ndim())?) };
            give(view.shrink(dim, lost, &options)?, mesh_out)
        })
    })
}
