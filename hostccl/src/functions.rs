//! The one list of the functions of the C API.

/// Calls the macro `$with` with every function of the C API, as items of the form
/// `$(#[doc...])* fn name(arg: type, ...) -> type;`.
///
/// This crate makes its functions and [`symbol`](crate::symbol) from the list. A library that
/// exports the functions under their C names makes its exports from it. The file that expands the
/// macro needs `use hostccl::types::*` and `use std::ffi::{c_char, c_int, c_void}`.
#[macro_export]
macro_rules! for_each_function {
    ($with:ident) => {
        $with! {
            /// Writes the version of NCCL whose API this one follows: 10000 * major + 100 * minor +
            /// patch. Local.
            fn ncclGetVersion(version: *mut c_int) -> ncclResult_t;
            /// Makes an id that starts one communicator. The calling process must live until
            /// `ncclCommInitRank` is done on every rank. Local.
            fn ncclGetUniqueId(unique_id: *mut ncclUniqueId) -> ncclResult_t;
            /// Extension: makes an id as `ncclGetUniqueId` does, where the caller knows whether
            /// all ranks are on one host. With `hosts` 0 all ranks share memory, and no socket is
            /// opened. With `hosts` 1 they do not, and the ranks meet over the network at once.
            /// Local.
            fn hostcclGetUniqueIdFor(unique_id: *mut ncclUniqueId, hosts: c_int) -> ncclResult_t;
            /// Joins the communicator of that id as `rank` of `nranks`. Collective over these
            /// ranks.
            fn ncclCommInitRank(
                comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int
            ) -> ncclResult_t;
            /// Joins as `ncclCommInitRank` does, with a configuration or NULL. With `blocking = 0`
            /// it returns `ncclInProgress` at once, and `ncclCommGetAsyncError` tells when it is
            /// done. Collective.
            fn ncclCommInitRankConfig(
                comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Joins as `ncclCommInitRankConfig` does, with `id_count` ids, of which the first is
            /// used. Collective.
            fn ncclCommInitRankScalable(
                comm: *mut ncclComm_t, nranks: c_int, rank: c_int, id_count: c_int, ids: *mut ncclUniqueId,
                config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Makes all `ndev` ranks of a communicator in this process. `devlist` has the answers
            /// of `ncclCommCuDevice`, or is NULL. Local.
            fn ncclCommInitAll(comms: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) -> ncclResult_t;
            /// Makes a communicator of the ranks of `comm` that pass one `color`, ordered by `key`,
            /// then by rank. A rank that passes `color` -1 takes part and gets NULL. Collective
            /// over `comm`.
            fn ncclCommSplit(
                comm: ncclComm_t, color: c_int, key: c_int, new_comm: *mut ncclComm_t, config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Makes a communicator of the ranks of `comm` that are not listed, in their order.
            /// Collective over these ranks. With `NCCL_SHRINK_ABORT` (1) the calls under way on
            /// `comm` are ended first, and `comm` may have failed, for example by the death of a
            /// listed rank. After a shrink with `NCCL_SHRINK_ABORT`, `comm` takes no operations: it
            /// can be freed, revoked, or shrunk again with `NCCL_SHRINK_ABORT`. Without the flag,
            /// `comm` can be used as before.
            fn ncclCommShrink(
                comm: ncclComm_t, excluded: *mut c_int, excluded_count: c_int, new_comm: *mut ncclComm_t,
                config: *mut ncclConfig_t, flags: c_int
            ) -> ncclResult_t;
            /// Ends the calls under way on `comm`, on all ranks. Blocked calls return
            /// `ncclRemoteError`. It returns when no call of this rank is under way. Afterwards
            /// this rank may split, shrink, destroy and abort `comm`. A second `ncclCommRevoke` and
            /// `ncclCommFinalize` are refused with `ncclInvalidArgument`. All other operations are
            /// refused with `ncclInvalidUsage`. The other ranks call it as well before they split
            /// or shrink `comm`. `flags` is 0. Does not wait for other ranks.
            fn ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> ncclResult_t;
            /// Makes the id by which new ranks join the next `ncclCommGrow` of `comm`. One rank
            /// of `comm` calls this, and lives until the growth is done. The rank can make another
            /// id when the growth has used this one. Local.
            fn ncclCommGetUniqueId(comm: ncclComm_t, unique_id: *mut ncclUniqueId) -> ncclResult_t;
            /// Makes a communicator of the ranks of `comm` and of new ones, `nranks` together. The
            /// ranks of `comm` pass `rank` -1 and keep their ranks; the rank that has made the id
            /// passes it, and the others NULL. New ranks pass NULL as `comm`, the id, and a rank
            /// that is not less than the size of `comm`. With `blocking = 0` it returns
            /// `ncclInProgress` at once, and `ncclCommGetAsyncError` of `new_comm` tells when it is
            /// done. `comm` can be used afterwards. Collective over all ranks.
            fn ncclCommGrow(
                comm: ncclComm_t, nranks: c_int, unique_id: *const ncclUniqueId, rank: c_int,
                new_comm: *mut ncclComm_t, config: *mut ncclConfig_t
            ) -> ncclResult_t;
            /// Ends the use of `comm`. It returns when no call of this rank is under way, and later
            /// operations are refused. Local, because every operation has its result when it
            /// returns.
            fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
            /// Frees `comm`, and waits for no call of a peer. Over several hosts it waits until
            /// its last messages are safe, for two seconds at most. A peer that still needs this
            /// rank gets `ncclRemoteError`. Local.
            fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
            /// Frees `comm` and ends its calls on every rank. Blocked calls of this process return
            /// `ncclInternalError`, and blocked calls of the peers return `ncclRemoteError`. Local.
            fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
            /// Writes the state of `comm`: `ncclSuccess`, `ncclInProgress`, or the error that ended
            /// it. Local.
            fn ncclCommGetAsyncError(comm: ncclComm_t, async_error: *mut ncclResult_t) -> ncclResult_t;
            /// Returns a static sentence for a result code. Local.
            fn ncclGetErrorString(result: ncclResult_t) -> *const c_char;
            /// Returns this thread's last error in one line with its values, or the error of a
            /// `comm` that failed in the background, or "". The string is valid until this thread's
            /// next failing call. Local.
            fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;
            /// Writes the number of ranks. Local.
            fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
            /// Writes the device number that `ncclCommInitAll` got for this rank, or 0. Local.
            fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
            /// Writes this handle's rank. Local.
            fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
            /// Extension: writes the rank of `comm` that was found dead or gone, or the first rank
            /// that did not come in time. It writes -1 when none is known. Local.
            fn hostcclCommLostRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
            /// Extension: says which ranks the calling thread's last error is about, as ranks of
            /// the communicator of the failed call. `ranks` and `lost` have room for `capacity`
            /// numbers, and `count` gets how many ranks there are. A place of `lost` is 1 where the
            /// rank's process has ended. `waited_ms` gets how long the call waited for its peers
            /// without any progress, or -1. `code` gets the error's code, or `ncclSuccess` when
            /// the thread had no error since its last `hostcclNextCallName`. Local.
            fn hostcclLastErrorRanks(
                code: *mut ncclResult_t, ranks: *mut c_int, lost: *mut c_int, capacity: c_int, count: *mut c_int,
                waited_ms: *mut i64
            ) -> ncclResult_t;
            /// Extension: sets how long an operation of this rank may wait for its peers without
            /// any progress, in milliseconds. After that time the communicator ends with
            /// `ncclTimeout`. With 0 the value of `HOSTCCL_TIMEOUT_MS` applies. The time also holds
            /// for splits and shrinks of `comm` while they are made. For a growth of `comm`, it is
            /// the time for the whole making of the new communicator, unless that one has a time of
            /// its own. Where it is set while `comm` itself is being made, it is the time for the
            /// whole making, with or without progress. Local.
            fn hostcclCommSetTimeout(comm: ncclComm_t, timeout_ms: i64) -> ncclResult_t;
            /// Extension: sets the numbers by which messages name the ranks of `comm`: their ranks
            /// in a larger set, one for each rank. A second call for `comm` changes nothing.
            /// Communicators that are split or shrunk from `comm` inherit them. Local.
            fn hostcclCommSetNames(comm: ncclComm_t, names: *const c_int, count: c_int) -> ncclResult_t;
            /// Extension: fails when `comm` has failed. It looks once whether another rank waits in
            /// a collective that this rank has not begun and will not begin, because this rank is
            /// in `call` instead. If so, it ends `comm`, and both sides get `ncclInvalidUsage`.
            /// Local.
            fn hostcclCommRefuse(comm: ncclComm_t, call: *const c_char) -> ncclResult_t;
            /// Extension: makes the blocked calls of this rank on `comm` ask `question`, for the
            /// first time when they have waited for a quarter of a second without progress, and
            /// then ten times per second. When the answer is a reason, the communicator ends for
            /// all of its ranks, with `ncclRemoteError` and the reason as the message. Only the
            /// first question that is set counts. The question must answer soon, and call no
            /// function of this library. `release` is called with `data` once, on any thread, when
            /// nobody asks any more, and also where this call fails. Local.
            fn hostcclCommSetInterrupt(
                comm: ncclComm_t, question: hostcclQuestion_t, release: hostcclRelease_t, data: *mut c_void
            ) -> ncclResult_t;
            /// Extension: answers as `ncclCommGetAsyncError` does, but does not check whether the
            /// processes of the other ranks live. Before that it waits while the answer would be
            /// `ncclInProgress`, for `timeout_ms` milliseconds at most. Local.
            fn hostcclCommWait(comm: ncclComm_t, timeout_ms: i64, async_error: *mut ncclResult_t) -> ncclResult_t;
            /// Extension: names the calling thread's next operation, split or growth. `tag` is the
            /// same on all ranks that take part, and 0 stands for no name. The two largest tags are
            /// refused with `ncclInvalidArgument`. `name` is for messages: NULL, or 32 bytes that
            /// are filled up with zeros. Several threads may issue operations of one communicator
            /// under different tags in any order. Each operation pairs with those of its tag, as if
            /// each tag had a communicator of its own. Two threads in operations of one tag at the
            /// same time are refused. Between hosts, each tag of messages takes some memory until
            /// the communicator ends, so use few tags. It also takes back the time of
            /// `hostcclNextCallTimeout`, which therefore comes after it. Local.
            fn hostcclNextCallName(tag: u64, name: *const c_char) -> ncclResult_t;
            /// Extension: sets how long the calling thread's next operation or split may wait for
            /// its peers without any progress, in milliseconds. For this one call it replaces the
            /// communicator's time, so calls of several threads on one communicator may have
            /// different times. 0 means no replacement. The next call uses it up, even if that call
            /// is refused. Local.
            fn hostcclNextCallTimeout(timeout_ms: i64) -> ncclResult_t;
            /// Reduces `count` elements of all ranks. Every rank gets the same bits. In place when
            /// `sendbuff == recvbuff`. Collective.
            fn ncclAllReduce(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Reduces `count` elements of all ranks into `recvbuff` of `root`. Other ranks may
            /// pass NULL there. Collective.
            fn ncclReduce(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Copies `count` elements from `sendbuff` of `root` to every `recvbuff`. Only the root
            /// reads `sendbuff`. Collective.
            fn ncclBroadcast(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Broadcasts in place: `buff` is both buffers of `ncclBroadcast`. Collective.
            fn ncclBcast(
                buff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Gathers `sendcount` elements of each rank, in the order of the ranks, on every rank.
            /// In place when `sendbuff == recvbuff + rank * sendcount`. Collective.
            fn ncclAllGather(
                sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
                comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Reduces `nranks * recvcount` elements of all ranks and gives each rank its part. In
            /// place when `recvbuff == sendbuff + rank * recvcount`. Collective.
            fn ncclReduceScatter(
                sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
                op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Sends `count` elements to each rank, and receives as many from each. In place when
            /// `sendbuff == recvbuff`. Collective.
            fn ncclAlltoAll(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Extension: sends `sendcounts[r]` elements from element `sdispls[r]` of `sendbuff` on
            /// to each rank `r`, and receives `recvcounts[r]` elements from it at element
            /// `rdispls[r]` of `recvbuff`. The arrays have one number for each rank, and are
            /// copied. Without `sdispls` or `rdispls` the blocks follow each other. The count
            /// that one rank sends must be the count that the other rank expects. Otherwise all
            /// ranks get `ncclInvalidUsage`. The blocks that are received overlap nothing.
            /// Collective.
            fn hostcclAlltoAllv(
                sendbuff: *const c_void, sendcounts: *const usize, sdispls: *const usize, recvbuff: *mut c_void,
                recvcounts: *const usize, rdispls: *const usize, datatype: ncclDataType_t, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Extension: gathers `recvcounts[r]` elements of each rank `r` at element `rdispls[r]`
            /// of every `recvbuff`. Each rank sends as many elements as its own `recvcounts` says.
            /// The arrays are as in `hostcclAlltoAllv`. In place when `sendbuff == recvbuff +
            /// rdispls[rank]`. Collective.
            fn hostcclAllGatherv(
                sendbuff: *const c_void, recvbuff: *mut c_void, recvcounts: *const usize, rdispls: *const usize,
                datatype: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Extension: reduces a block for each rank, and gives each rank its block. The block
            /// of rank `r` has `sendcounts[r]` elements from element `sdispls[r]` of `sendbuff` on.
            /// The arrays are as in `hostcclAlltoAllv`. In place when `recvbuff == sendbuff +
            /// sdispls[rank]`. Collective.
            fn hostcclReduceScatterv(
                sendbuff: *const c_void, sendcounts: *const usize, sdispls: *const usize, recvbuff: *mut c_void,
                datatype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Gathers `count` elements of each rank in `recvbuff` of `root`. Other ranks may pass
            /// NULL there. Collective.
            fn ncclGather(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Gives each rank its `count` elements of `sendbuff` of `root`. Other ranks may pass
            /// NULL there. Collective.
            fn ncclScatter(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
                root: c_int, comm: ncclComm_t, stream: cudaStream_t
            ) -> ncclResult_t;
            /// Sends `count` elements to `peer`. It returns when the peer has taken them all. If
            /// the peer is on another host, it returns when the peer has made its call and the
            /// kernel of this host has taken all elements; the crate's documentation has an
            /// exception.
            fn ncclSend(
                sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Receives `count` elements from `peer`. Counts and types must be the same on both
            /// sides.
            fn ncclRecv(
                recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
                stream: cudaStream_t
            ) -> ncclResult_t;
            /// Starts a group. This thread's operations up to the matching `ncclGroupEnd` make
            /// progress together. Local.
            fn ncclGroupStart() -> ncclResult_t;
            /// Ends a group. The end of the outermost group performs its operations and reports the
            /// first error of any of them.
            fn ncclGroupEnd() -> ncclResult_t;
            /// Extension: makes the calling thread's open group fail at its end with `why`, before
            /// any of its operations runs. It does nothing when no group is open. Local.
            fn hostcclGroupFail(why: *const c_char) -> ncclResult_t;
            /// Makes a reduction that multiplies each rank's elements by that rank's scalar, then
            /// sums them. Local.
            fn ncclRedOpCreatePreMulSum(
                op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t,
                residence: ncclScalarResidence_t, comm: ncclComm_t
            ) -> ncclResult_t;
            /// Frees a reduction made by `ncclRedOpCreatePreMulSum`. Local.
            fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t;
            /// Allocates `size` bytes of host memory, aligned to a page. Local.
            fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t;
            /// Frees memory that `ncclMemAlloc` returned. NULL is allowed and does nothing. Local.
            fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t;
            /// Does nothing: the call is accepted because programs for NCCL make it, and host
            /// buffers need no registration. Local.
            fn ncclCommRegister(
                comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void
            ) -> ncclResult_t;
            /// Ends a registration of `ncclCommRegister`. Local.
            fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t;
        }
    };
}
