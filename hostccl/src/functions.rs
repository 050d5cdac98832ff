//! The one list of the C API's functions.

/// Calls the macro `$with` with every function of the C API, as
/// `$(#[doc...])* fn name(arg: type, ...) -> type;` items.
///
/// This crate makes its own functions and [`symbol`](crate::symbol) from the list; a library that exports them under
/// their C names makes its exports from it. The place that expands it needs `use hostccl::types::*` and
/// `use std::ffi::{c_char, c_int, c_void}`.
#[macro_export]
macro_rules! for_each_function {
    ($with:ident) => {
        $with! {
            /// Writes NCCL's version that this API follows: 10000 * major + 100 * minor + patch. Local.
            fn ncclGetVersion(version: *mut c_int) -> ncclResult_t;
            /// Makes an id that starts one communicator. Local; the calling process lives until every rank's
            /// `ncclCommInitRank` is done. One id, one communicator.
            fn ncclGetUniqueId(unique_id: *mut ncclUniqueId) -> ncclResult_t;
            /// Joins as `rank` of `nranks` the communicator of that id. Collective over the `nranks`.
            fn ncclCommInitRank(
                comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int
            ) -> ncclResult_t;
            /// `ncclCommInitRank` with a configuration, or NULL. With `blocking = 0` it returns `ncclInProgress` at
            /// once and `ncclCommGetAsyncError` tells when it is done. Collective.
            fn ncclCommInitRankConfig(
                comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// `ncclCommInitRankConfig` with `id_count` ids, of which the first is used. Collective.
            fn ncclCommInitRankScalable(
                comm: *mut ncclComm_t, nranks: c_int, rank: c_int, id_count: c_int, ids: *mut ncclUniqueId,
                config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Makes all `ndev` ranks of a communicator in this process. `devlist` (or NULL) gives what
            /// `ncclCommCuDevice` answers. Local.
            fn ncclCommInitAll(comms: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> ncclResult_t;
            /// Makes a communicator of the ranks of `comm` with the same `color`, ordered by `key`, then by rank.
            /// `color` -1 takes part and gets NULL. Collective over `comm`.
            fn ncclCommSplit(
                comm: ncclComm_t, color: c_int, key: c_int, new_comm: *mut ncclComm_t, config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Makes a communicator of the ranks of `comm` that are not listed, in their order. Collective over those. With
            /// `NCCL_SHRINK_ABORT` (1) the calls under way on `comm` are ended first, and it may have failed, as by the death of a
            /// listed rank; it can only be freed afterwards.
            fn ncclCommShrink(
                comm: ncclComm_t, excluded: *mut c_int, excluded_count: c_int, new_comm: *mut ncclComm_t,
                config: *mut ncclConfig_t, flags: c_int
            ) -> ncclResult_t;
            /// Ends the use of `comm`: returns when no call of this rank is under way; later operations are
            /// refused. Local, since every operation has its result when it returns.
            fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
            /// Frees `comm`. Local: never waits for peers. A peer that still needs this rank gets `ncclRemoteError`.
            fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
            /// Frees `comm` and ends its calls on every rank: blocked calls of this process return
            /// `ncclInternalError`, those of the peers `ncclRemoteError`. Local.
            fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
            /// Writes how `comm` stands: `ncclSuccess`, `ncclInProgress`, or the error that ended it. Local.
            fn ncclCommGetAsyncError(comm: ncclComm_t, async_error: *mut ncclResult_t) -> ncclResult_t;
            /// A static sentence for a result code. Local.
            fn ncclGetErrorString(result: ncclResult_t) -> *const c_char;
            /// This thread's last error in one line with its values, "" when none; with a `comm` that failed
            /// in the background, its error. Valid until this thread's next failing call. Local.
            fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;
            /// Writes the number of ranks. Local.
            fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
            /// Writes the device number that `ncclCommInitAll` was given, else 0. Local.
            fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
            /// Writes this handle's rank. Local.
            fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
            /// Extension: writes the rank of `comm` that was found dead or gone, or the first one
            /// that did not come in time; -1 when none is known. Local.
            fn hostcclCommLostRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
            /// Extension: how long an operation of this rank may wait for its peers without any progress before the
            /// communicator ends with `ncclTimeout`, in milliseconds; 0: as `HOSTCCL_TIMEOUT_MS` says. Also
            /// while the communicator is still being made. What is split off it begins with the same. Local.
            fn hostcclCommSetTimeout(comm: ncclComm_t, timeout_ms: i64) -> ncclResult_t;
            /// Extension: what messages about `comm` call its ranks, one number for each of them: their ranks in a larger set.
            /// The first numbers stand. What is split off `comm` or shrunk from it inherits them. Local.
            fn hostcclCommSetNames(comm: ncclComm_t, names: *const c_int, count: c_int) -> ncclResult_t;
            /// Extension: fails when `comm` has failed, and ends it when another rank waits in a collective that this rank
            /// has not begun and does not begin, because it is in `call` instead: `ncclInvalidUsage` on both sides. Local.
            fn hostcclCommRefuse(comm: ncclComm_t, call: *const c_char) -> ncclResult_t;
            /// Extension: `ncclCommGetAsyncError` that waits, for at most `timeout_ms` milliseconds, while it would answer
            /// `ncclInProgress`. Local.
            fn hostcclCommWait(comm: ncclComm_t, timeout_ms: i64, async_error: *mut ncclResult_t) -> ncclResult_t;
            /// Extension: names the calling thread's next operation or split. `tag` is the same on all ranks that take part, 0 for none;
            /// `name`, for messages, is NULL or has 32 bytes, filled up with zeros. Operations of one communicator under
            /// different tags may come in any order from several threads: each pairs with those of its tag, as if each had
            /// a communicator of its own. Two threads in operations of one tag at the same time are refused. Local.
            fn hostcclNextCallName(tag: u64, name: *const c_char) -> ncclResult_t;
            /// Reduces `count` elements of all ranks; every rank gets the same bits. In place when
            /// `sendbuff == recvbuff`. Collective.
            fn ncclAllReduce(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Reduces `count` elements of all ranks into `recvbuff` of `root`; others may pass NULL there.
            /// Collective.
            fn ncclReduce(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Copies `count` elements from `sendbuff` of `root` to every `recvbuff`; `sendbuff` is read on the root
            /// only. Collective.
            fn ncclBroadcast(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// `ncclBroadcast` in place. Collective.
            fn ncclBcast(
                buff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Gathers `sendcount` elements of each rank, by rank, on every rank. In place when
            /// `sendbuff == recvbuff + rank * sendcount`. Collective.
            fn ncclAllGather(
                sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
                comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Reduces `nranks * recvcount` elements and leaves each rank its part. In place when
            /// `recvbuff == sendbuff + rank * recvcount`. Collective.
            fn ncclReduceScatter(
                sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Sends `count` elements to each rank and receives as many from each. In place when
            /// `sendbuff == recvbuff`. Collective.
            fn ncclAlltoAll(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Gathers `count` elements of each rank in `recvbuff` of `root`; others may pass NULL there. Collective.
            fn ncclGather(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Hands each rank its `count` elements of `sendbuff` of `root`; others may pass NULL there. Collective.
            fn ncclScatter(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Sends `count` elements to `peer`; returns when the peer has taken them all.
            fn ncclSend(
                sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Receives `count` elements from `peer`; counts and types on both sides agree.
            fn ncclRecv(
                recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Starts a group: this thread's operations up to the matching `ncclGroupEnd` progress together. Local.
            fn ncclGroupStart() -> ncclResult_t;
            /// Ends a group: the outermost one performs its operations and reports the first error of any of them.
            fn ncclGroupEnd() -> ncclResult_t;
            /// Extension: the calling thread's open group fails at its end with `why`, before any of its operations runs. Does
            /// nothing when no group is open. Local.
            fn hostcclGroupFail(why: *const c_char) -> ncclResult_t;
            /// Makes a reduction that multiplies each rank's elements by that rank's scalar and sums. Local.
            fn ncclRedOpCreatePreMulSum(
                op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t,
                residence: ncclScalarResidence_t, comm: ncclComm_t
            ) -> ncclResult_t;
            /// Frees a reduction made by `ncclRedOpCreatePreMulSum`. Local.
            fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t;
            /// Allocates `size` bytes of host memory, aligned to a page. Local.
            fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t;
            /// Frees memory of `ncclMemAlloc`; NULL is a no-op. Local.
            fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t;
            /// Accepted for compatibility: host buffers need no registration. Local.
            fn ncclCommRegister(
                comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void
            ) -> ncclResult_t;
            /// Ends a registration of `ncclCommRegister`. Local.
            fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t;
        }
    };
}
