//! Thin calls of the communicator library along one dimension.
//!
//! Buffers are device memory on cuda and host memory on cpu. `stream` is a `cudaStream_t` on cuda,
//! where the call returns when the work is enqueued; on cpu it is NULL and the call returns when
//! its result is there. `dim` NULL is allowed on a 1-D mesh.

use std::ffi::{c_char, c_void};

use super::dim::dim_text;
use super::guard::guard;
use super::make::find;
use super::operation::operation;
use super::types::{dm_dtype, dm_mesh, dm_op, dm_status};
use crate::comm::{BufferShape, Operands, end_group_in_vain};
use crate::recorder::{Operation, What};

/// Reduces count elements over all ranks of dim; every rank gets the result, bitwise the same.
///
/// Collective over this rank's group along dim. In place when send == recv.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_reduce(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: dm_dtype,
    op: dm_op,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_all_reduce", mesh, dim, |call, index| {
        call.view.check_operator(call.name, op)?;
        let operands = Operands::new(count, dtype, stream).of(What::of(Operation::AllReduce).reducing(op));
        call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::Same)?;
        call.run(index, operands, &[("send", send), ("recv", recv.cast_const())], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.all_reduce(send, recv, count, dtype, op, comm, stream) }
        })
        .map_err(|error| call.view.judge_operator(call.name, op, error))
    })
}

/// Reduces count elements over all ranks of dim, and gives the result to the rank root along dim.
///
/// Collective over this rank's group along dim. recv is used on the root only and may be NULL
/// elsewhere. In place when send == recv on the root.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_reduce(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: dm_dtype,
    op: dm_op,
    root: i32,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_reduce", mesh, dim, |call, index| {
        call.view.check_operator(call.name, op)?;
        call.view.check_peer(call.name, index, "root", root)?;
        let at_root = call.view.mesh().local_rank(index)? == root as usize;
        let buffers = [("send", send), ("recv", recv.cast_const())];
        let buffers = if at_root { &buffers[..] } else { &buffers[..1] };
        let operands = Operands::new(count, dtype, stream).of(What::of(Operation::Reduce).reducing(op).with(root));
        if at_root {
            call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::Same)?;
        }
        call.run(index, operands, buffers, |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.reduce(send, recv, count, dtype, op, root, comm, stream) }
        })
        .map_err(|error| call.view.judge_operator(call.name, op, error))
    })
}

/// Copies count elements from the rank root along dim to all ranks of dim.
///
/// Collective over this rank's group along dim. send is used on the root only and may be NULL
/// elsewhere. In place when send == recv on the root.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_broadcast(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: dm_dtype,
    root: i32,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_broadcast", mesh, dim, |call, index| {
        call.view.check_peer(call.name, index, "root", root)?;
        let at_root = call.view.mesh().local_rank(index)? == root as usize;
        let buffers = [("recv", recv.cast_const()), ("send", send)];
        let buffers = if at_root { &buffers[..] } else { &buffers[..1] };
        let operands = Operands::new(count, dtype, stream).of(What::of(Operation::Broadcast).with(root));
        if at_root {
            call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::Same)?;
        }
        call.run(index, operands, buffers, |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.broadcast(send, recv, count, dtype, root, comm, stream) }
        })
    })
}

/// Gathers send_count elements of every rank of dim, in rank order, on every rank.
///
/// Collective over this rank's group along dim. recv has room for send_count times the size of dim.
/// In place when send == recv + (my rank in dim) * send_count.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_gather(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: dm_dtype,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_all_gather", mesh, dim, |call, index| {
        let operands = Operands::new(send_count, dtype, stream).of(What::of(Operation::AllGather));
        call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::Gather)?;
        call.run(index, operands, &[("send", send), ("recv", recv.cast_const())], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.all_gather(send, recv, send_count, dtype, comm, stream) }
        })
    })
}

/// Reduces over all ranks of dim and leaves block i of recv_count elements on rank i.
///
/// Collective over this rank's group along dim. send has recv_count times the size of dim elements.
/// In place when recv == send + (my rank in dim) * recv_count.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_reduce_scatter(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    recv_count: usize,
    dtype: dm_dtype,
    op: dm_op,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_reduce_scatter", mesh, dim, |call, index| {
        call.view.check_operator(call.name, op)?;
        let operands = Operands::new(recv_count, dtype, stream).of(What::of(Operation::ReduceScatter).reducing(op));
        call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::Scatter)?;
        call.run(index, operands, &[("send", send), ("recv", recv.cast_const())], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.reduce_scatter(send, recv, recv_count, dtype, op, comm, stream) }
        })
        .map_err(|error| call.view.judge_operator(call.name, op, error))
    })
}

/// Sends block i of send to rank i of dim, and receives block i of recv from rank i.
///
/// Collective over this rank's group along dim. send and recv have count_per_peer times the size of
/// dim elements each. On cpu the call works in place when send == recv; on cuda send and recv must
/// not overlap.
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_all_to_all(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count_per_peer: usize,
    dtype: dm_dtype,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_all_to_all", mesh, dim, |call, index| {
        call.view.check_all_to_all(call.name, dtype)?;
        let operands = Operands::new(count_per_peer, dtype, stream).of(What::of(Operation::AllToAll));
        call.view.check_overlap(call.name, index, operands, send, recv, BufferShape::AllToAll)?;
        call.run(index, operands, &[("send", send), ("recv", recv.cast_const())], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.all_to_all(send, recv, count_per_peer, dtype, comm, stream) }
        })
    })
}

/// Sends count elements to the rank peer along dim, which receives them with dm_recv.
///
/// Between two ranks: the peer makes the matching dm_recv. On a lazy mesh the first operation along
/// dim makes the communicator and is collective over the group. On cpu dm_send returns when the
/// receiver has taken everything; where the receiver is on another host, when it has made its call
/// and everything is on its way. So two ranks that both send before they receive block each other
/// until the deadline. The sends and receives of one exchange therefore belong in a group
/// (dm_group_start).
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_send(
    mesh: *const dm_mesh,
    dim: *const c_char,
    send: *const c_void,
    count: usize,
    dtype: dm_dtype,
    peer: i32,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_send", mesh, dim, |call, index| {
        call.view.check_message(call.name, index, peer, count > 0 && send.is_null())?;
        let operands = Operands::new(count, dtype, stream).of(What::of(Operation::Send).with(peer));
        call.run(index, operands, &[("send", send)], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.send(send, count, dtype, peer, comm, stream) }
        })
    })
}

/// Receives count elements from the rank peer along dim, which sends as many with dm_send.
///
/// Between two ranks: the peer makes the matching dm_send. On a lazy mesh the first operation along
/// dim makes the communicator and is collective over the group. Sends and receives of one
/// exchange belong in a group (dm_group_start).
///
/// Buffers: device memory on cuda, host memory on cpu. stream: a cudaStream_t on cuda (the call
/// returns when the work is enqueued); NULL on cpu (it returns when the result is there). dim NULL
/// is allowed on a 1-D mesh.
///
/// Errors: DM_STATUS_INVALID_ARGUMENT, DM_STATUS_NOT_FOUND, DM_STATUS_NOT_MEMBER, DM_STATUS_CCL,
/// DM_STATUS_PEER_LOST, DM_STATUS_MISMATCH (cpu: the ranks make different calls; also two threads
/// along dim, see "Order" at the head of this file), DM_STATUS_TIMEOUT (cpu: a peer did not come by
/// the mesh's timeout; cuda: a call of another thread kept the communicator so long),
/// DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
///
/// # Safety
/// dim is NULL or NUL-terminated; the buffers are as large as said and live until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dm_recv(
    mesh: *const dm_mesh,
    dim: *const c_char,
    recv: *mut c_void,
    count: usize,
    dtype: dm_dtype,
    peer: i32,
    stream: *mut c_void,
) -> dm_status {
    // SAFETY: the caller's contract.
    let dim = || unsafe { dim_text(dim) };
    operation("dm_recv", mesh, dim, |call, index| {
        call.view.check_message(call.name, index, peer, count > 0 && recv.is_null())?;
        let operands = Operands::new(count, dtype, stream).of(What::of(Operation::Recv).with(peer));
        call.run(index, operands, &[("recv", recv.cast_const())], |library, comm| {
            // SAFETY: the caller's contract is the library's.
            unsafe { library.recv(recv, count, dtype, peer, comm, stream) }
        })
    })
}

/// Begins a group: the calling thread's operations up to dm_group_end run together, so that no
/// order of sends and receives makes them block.
///
/// No operation of a group may write to a buffer that another operation of the group reads or
/// writes, because their order is not defined. The operations only run when the group ends. While
/// operations are queued in a group, dm_finalize, dm_world_finalize, dm_world_locations and the
/// control plane (dm_barrier, dm_all_gather_bytes ...) are refused on this thread
/// (DM_STATUS_INVALID_STATE). When a thread ends with such a group on cpu, the communicators of its
/// operations fail for all their ranks.
///
/// Local. Groups nest: only the outermost end runs the operations. A group has all operations of
/// the thread on meshes of one library, also those on raw communicators. Calls that make
/// communicators (dm_init, dm_flatten ...) do not join the group: they are done when they return.
/// Errors: DM_STATUS_ABORTED, DM_STATUS_INVALID_HANDLE, DM_STATUS_UNSUPPORTED (an offline world).
#[unsafe(no_mangle)]
pub extern "C" fn dm_group_start(mesh: *const dm_mesh) -> dm_status {
    guard(|| find(mesh)?.group_start())
}

/// Ends the group that this thread began, and runs its operations. On cpu it returns when all
/// results are there, and on cuda when all operations are on their streams. It waits for other
/// ranks as its operations do.
///
/// Errors: the first error of any operation of the group, also of one that was refused when it was
/// called (on cpu none of the group's operations runs then); DM_STATUS_INVALID_STATE (no group was
/// begun); DM_STATUS_UNSUPPORTED (an offline world). Call dm_group_end on every path of the
/// program, because operations of this thread only wait until then.
///
/// DM_STATUS_ABORTED says that another thread has aborted a mesh with operations in the group. On
/// cpu none of the group's operations runs then; when the abort comes while they run, those on
/// other meshes run to their end. The message says which. On cpu, dm_abort of a mesh also ends the
/// group that the thread of dm_abort has open, so that thread has no group to end after it. On cuda
/// NCCL cannot end a group that holds an operation of a communicator which dm_abort has ended: the
/// call gives DM_STATUS_ABORTED, and so does every later operation of this thread; make those from
/// another thread. A handle that is not live (DM_STATUS_INVALID_HANDLE) ends the group that this
/// thread has begun last; on cpu none of its operations runs.
#[unsafe(no_mangle)]
pub extern "C" fn dm_group_end(mesh: *const dm_mesh) -> dm_status {
    guard(|| find(mesh).inspect_err(end_group_in_vain)?.group_end())
}
