//! Calls with wrong arguments: each gets its code and one line with the values, and the
//! communicator stays usable.

mod common;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};

use common::{Comm, last_error, ok, ranks, unique_id};
use hostccl::types::*;
use hostccl::*;

const F32: c_int = DataType::Float32 as c_int;
const I64: c_int = DataType::Int64 as c_int;
const SUM: c_int = ReduceOp::Sum as c_int;

/// Expects that code and a one-line message that begins with the function and holds `words`.
#[track_caller]
fn refused(result: ncclResult_t, code: ncclResult_t, function: &str, words: &str) {
    let message = last_error();
    assert_eq!(result, code, "{message}");
    assert!(message.starts_with(function), "{message} does not name {function}");
    assert!(message.contains(words), "{message} does not say {words}");
    assert!(!message.contains('\n'), "{message} has more than one line");
}

/// Returns a valid buffer of eight elements.
fn buffer() -> [f32; 8] {
    [1.0; 8]
}

#[test]
fn communicators_that_are_none() {
    let destroyed = Comm::init_all(1).remove(0).0;
    let mut local = 0_usize;
    let garbage: [(&str, ncclComm_t); 5] = [
        ("is NULL", null_mut()),
        ("no live communicator", destroyed),
        ("no live communicator", (&raw mut local).cast()),
        ("no live communicator", without_provenance_mut(0xdead_beef)),
        ("no live communicator", without_provenance_mut(usize::MAX)),
    ];
    for (words, comm) in garbage {
        let mut data = buffer();
        let at = data.as_mut_ptr().cast::<c_void>();
        let mut int = -7;
        let mut other = null_mut();
        // SAFETY: the buffers have eight elements, and there are places for the answers. The
        // communicators are tokens, which are looked up.
        unsafe {
            refused(ncclAllReduce(at, at, 1, F32, SUM, comm, null_mut()), 4, "ncclAllReduce", words);
            refused(ncclReduce(at, at, 1, F32, SUM, 0, comm, null_mut()), 4, "ncclReduce", words);
            refused(ncclBroadcast(at, at, 1, F32, 0, comm, null_mut()), 4, "ncclBroadcast", words);
            refused(ncclBcast(at, 1, F32, 0, comm, null_mut()), 4, "ncclBcast", words);
            refused(ncclAllGather(at, at, 1, F32, comm, null_mut()), 4, "ncclAllGather", words);
            refused(ncclReduceScatter(at, at, 1, F32, SUM, comm, null_mut()), 4, "ncclReduceScatter", words);
            refused(ncclAlltoAll(at, at, 1, F32, comm, null_mut()), 4, "ncclAlltoAll", words);
            refused(ncclGather(at, at, 1, F32, 0, comm, null_mut()), 4, "ncclGather", words);
            refused(ncclScatter(at, at, 1, F32, 0, comm, null_mut()), 4, "ncclScatter", words);
            refused(ncclSend(at, 1, F32, 0, comm, null_mut()), 4, "ncclSend", words);
            refused(ncclRecv(at, 1, F32, 0, comm, null_mut()), 4, "ncclRecv", words);
            refused(ncclCommSplit(comm, 0, 0, &raw mut other, null_mut()), 4, "ncclCommSplit", words);
            refused(ncclCommFinalize(comm), 4, "ncclCommFinalize", words);
            refused(ncclCommGetAsyncError(comm, &raw mut int), 4, "ncclCommGetAsyncError", words);
            refused(ncclCommCount(comm, &raw mut int), 4, "ncclCommCount", words);
            refused(ncclCommUserRank(comm, &raw mut int), 4, "ncclCommUserRank", words);
            refused(ncclCommCuDevice(comm, &raw mut int), 4, "ncclCommCuDevice", words);
            refused(hostcclCommLostRank(comm, &raw mut int), 4, "hostcclCommLostRank", words);
            refused(hostcclCommWait(comm, 1, &raw mut int), 4, "hostcclCommWait", words);
            refused(ncclRedOpDestroy(5, comm), 4, "ncclRedOpDestroy", words);
            let made = ncclRedOpCreatePreMulSum(&raw mut int, at, F32, ncclScalarHostImmediate, comm);
            refused(made, 4, "ncclRedOpCreatePreMulSum", words);
            if comm.is_null() {
                ok(ncclCommDestroy(comm));
                ok(ncclCommAbort(comm));
            } else {
                refused(ncclCommDestroy(comm), 4, "ncclCommDestroy", words);
                refused(ncclCommAbort(comm), 4, "ncclCommAbort", words);
            }
        }
        assert_eq!(int, -7, "an out-parameter is written only on success");
    }
}

#[test]
fn values_out_of_range_leave_the_communicator_usable() {
    ranks(2, |comm, _| {
        let mut data = buffer();
        let at = data.as_mut_ptr().cast::<c_void>();
        let none = null_mut::<c_void>();
        let comm = **comm;
        // SAFETY: the buffers have eight elements. A value out of range is refused before a buffer
        // is used.
        unsafe {
            for dtype in [-1, 12, 13, c_int::MAX] {
                let words = format!("datatype {dtype}");
                refused(ncclAllReduce(at, at, 1, dtype, SUM, comm, null_mut()), 4, "ncclAllReduce", &words);
                refused(ncclAllGather(at, at, 1, dtype, comm, null_mut()), 4, "ncclAllGather", &words);
                refused(ncclSend(at, 1, dtype, 0, comm, null_mut()), 4, "ncclSend", &words);
            }
            for op in [-1, 5, 6, c_int::MAX] {
                let words = op.to_string();
                refused(ncclAllReduce(at, at, 1, F32, op, comm, null_mut()), 4, "ncclAllReduce", &words);
                refused(ncclReduceScatter(at, at, 1, F32, op, comm, null_mut()), 4, "ncclReduceScatter", &words);
            }
            for root in [-1, 2, c_int::MIN, c_int::MAX] {
                let words = format!("root {root} is not a rank of 2");
                refused(ncclReduce(at, at, 1, F32, SUM, root, comm, null_mut()), 4, "ncclReduce", &words);
                refused(ncclBroadcast(at, at, 1, F32, root, comm, null_mut()), 4, "ncclBroadcast", &words);
                refused(ncclGather(at, at, 1, F32, root, comm, null_mut()), 4, "ncclGather", &words);
                refused(ncclScatter(at, at, 1, F32, root, comm, null_mut()), 4, "ncclScatter", &words);
                let words = format!("peer {root} is not a rank of 2");
                refused(ncclSend(at, 1, F32, root, comm, null_mut()), 4, "ncclSend", &words);
                refused(ncclRecv(at, 1, F32, root, comm, null_mut()), 4, "ncclRecv", &words);
            }
            refused(ncclAllReduce(none, at, 1, F32, SUM, comm, null_mut()), 4, "ncclAllReduce", "sendbuff is NULL");
            refused(ncclAllReduce(at, none, 1, F32, SUM, comm, null_mut()), 4, "ncclAllReduce", "recvbuff is NULL");
            refused(ncclRecv(none, 1, F32, 0, comm, null_mut()), 4, "ncclRecv", "recvbuff is NULL");
            for count in [usize::MAX, usize::MAX / 4, usize::MAX / 8 + 1] {
                let words = format!("count {count}");
                refused(ncclAllReduce(at, at, count, F32, SUM, comm, null_mut()), 4, "ncclAllReduce", &words);
                refused(ncclAllGather(at, at, count, F32, comm, null_mut()), 4, "ncclAllGather", &words);
            }
            let mut other = without_provenance_mut(1);
            refused(ncclCommSplit(comm, -2, 0, &raw mut other, null_mut()), 4, "ncclCommSplit", "color -2");
            refused(ncclCommSplit(comm, 0, 0, null_mut(), null_mut()), 4, "ncclCommSplit", "NULL");
            // None of these calls has reached the other rank.
            ok(ncclAllReduce(at, at, 8, F32, SUM, comm, null_mut()));
            ok(ncclAllReduce(none, none, 0, F32, SUM, comm, null_mut()));
        }
        assert_eq!(data, [2.0; 8]);
    });
}

#[test]
fn ranks_and_ids_that_cannot_start_a_communicator() {
    let id = unique_id();
    let foreign = ncclUniqueId { internal: [1; NCCL_UNIQUE_ID_BYTES] };
    let mut comm = null_mut();
    // SAFETY: there is a place for the communicator.
    unsafe {
        for (size, rank) in [(0, 0), (-1, 0), (2, 2), (2, -1), (c_int::MAX, 0)] {
            let words = if size == 2 { format!("rank {rank}") } else { format!("nranks {size}") };
            refused(ncclCommInitRank(&raw mut comm, size, id, rank), 4, "ncclCommInitRank", &words);
            assert!(comm.is_null());
        }
        refused(ncclCommInitRank(null_mut(), 1, id, 0), 4, "ncclCommInitRank", "NULL");
        refused(ncclCommInitRank(&raw mut comm, 1, foreign, 0), 4, "ncclCommInitRank", "unique id");
        refused(ncclGetUniqueId(null_mut()), 4, "ncclGetUniqueId", "NULL");
        refused(ncclCommInitAll(null_mut(), 1, null()), 4, "ncclCommInitAll", "NULL");
        refused(ncclCommInitAll(&raw mut comm, 0, null()), 4, "ncclCommInitAll", "ndev 0");
        refused(ncclGetVersion(null_mut()), 4, "ncclGetVersion", "NULL");
        refused(ncclMemAlloc(null_mut(), 1), 4, "ncclMemAlloc", "NULL");
        refused(ncclGroupEnd(), ncclInvalidUsage, "ncclGroupEnd", "ncclGroupStart");
        let mut memory = null_mut();
        let result = ncclMemAlloc(&raw mut memory, isize::MAX as usize);
        refused(result, ncclSystemError, "ncclMemAlloc", &isize::MAX.to_string());
    }
    // The id still starts one communicator.
    let comm = Comm::init(id, 1, 0);
    let mut again = null_mut();
    // SAFETY: there is a place for the communicator.
    refused(unsafe { ncclCommInitRank(&raw mut again, 1, id, 0) }, ncclInvalidUsage, "ncclCommInitRank", "id");
    drop(comm);
}

#[test]
fn a_wrong_call_inside_a_group_fails_the_group_and_ends_it() {
    let comm = &Comm::init_all(1)[0];
    let mut data = buffer();
    let at = data.as_mut_ptr().cast::<c_void>();
    // SAFETY: the buffer has eight elements.
    unsafe {
        ok(ncclGroupStart());
        ok(ncclGroupStart());
        refused(ncclAllReduce(at, at, 1, 99, SUM, **comm, null_mut()), 4, "ncclAllReduce", "datatype 99");
        ok(ncclGroupEnd());
        refused(ncclGroupEnd(), 4, "ncclGroupEnd", "datatype 99");
        refused(ncclGroupEnd(), ncclInvalidUsage, "ncclGroupEnd", "ncclGroupStart");
        ok(ncclAllReduce(at, at, 8, F32, SUM, **comm, null_mut()));
    }
}

/// The calls of [`call`], as messages spell them. No two of them fit together.
const DIFFERENT: [&str; 8] = [
    "ncclAllReduce(8 x float32, sum)",
    "ncclAllReduce(7 x float32, sum)",
    "ncclAllReduce(8 x int32, sum)",
    "ncclAllReduce(8 x float32, max)",
    "ncclBroadcast(8 x float32, root 0)",
    "ncclBroadcast(8 x float32, root 1)",
    "ncclAlltoAll(4 x float32)",
    "ncclCommSplit",
];

/// Makes the call of that index in [`DIFFERENT`].
fn call(which: usize, comm: ncclComm_t) -> ncclResult_t {
    // The all-to-all has four elements for each of three ranks.
    let mut data = [1.0_f32; 12];
    let at = data.as_mut_ptr().cast::<c_void>();
    let mut other = null_mut();
    let (int32, max) = (DataType::Int32 as c_int, ReduceOp::Max as c_int);
    // SAFETY: the buffer is large enough for each call, and there is a place for a communicator.
    unsafe {
        match which {
            0 => ncclAllReduce(at, at, 8, F32, SUM, comm, null_mut()),
            1 => ncclAllReduce(at, at, 7, F32, SUM, comm, null_mut()),
            2 => ncclAllReduce(at, at, 8, int32, SUM, comm, null_mut()),
            3 => ncclAllReduce(at, at, 8, F32, max, comm, null_mut()),
            4 => ncclBroadcast(at, at, 8, F32, 0, comm, null_mut()),
            5 => ncclBroadcast(at, at, 8, F32, 1, comm, null_mut()),
            6 => ncclAlltoAll(at, at, 4, F32, comm, null_mut()),
            _ => ncclCommSplit(comm, 0, 0, &raw mut other, null_mut()),
        }
    }
}

#[test]
fn ranks_that_make_different_calls_all_hear_of_both() {
    for (first, of_first) in DIFFERENT.iter().enumerate() {
        for (second, of_second) in DIFFERENT.iter().enumerate().filter(|(second, _)| *second != first) {
            ranks(3, |comm, rank| {
                // Rank 1 makes the second call, and the other ranks make the first one.
                let result = call(if rank == 1 { second } else { first }, **comm);
                let message = last_error();
                assert_eq!(result, ncclInvalidUsage, "rank {rank}: {message}");
                let both = [format!("rank 0 calls {of_first}"), format!("rank 1 calls {of_second}")];
                assert!(both.iter().all(|call| message.contains(call)), "rank {rank}: {message}");
                let mut state = ncclSuccess;
                // SAFETY: there is a place for the answer.
                ok(unsafe { ncclCommGetAsyncError(**comm, &raw mut state) });
                assert_eq!(state, ncclInvalidUsage, "the communicator stays failed");
            });
        }
    }
}

#[test]
fn a_receive_of_another_size_than_its_send_fails_on_both_sides() {
    ranks(2, |comm, rank| {
        let mut data = vec![0.0_f32; 1 << 20];
        let at = data.as_mut_ptr().cast::<c_void>();
        // SAFETY: the buffer has 2^20 elements. All are sent, and fewer are received.
        let result = unsafe {
            match rank {
                0 => ncclSend(at, 1 << 20, F32, 1, **comm, null_mut()),
                _ => ncclRecv(at, 17, F32, 0, **comm, null_mut()),
            }
        };
        let message = last_error();
        assert_eq!(result, ncclInvalidUsage, "{message}");
        assert!(message.contains("1048576 x float32") && message.contains("17 x float32"), "rank {rank}: {message}");
    });
}

#[test]
fn every_result_has_its_sentence() {
    let sentence = |result| {
        // SAFETY: the string is static.
        unsafe { CStr::from_ptr(ncclGetErrorString(result)) }.to_str().unwrap()
    };
    let all: Vec<&str> = (0..=7).map(sentence).collect();
    assert!(all.iter().all(|text| !text.is_empty()));
    for (i, text) in all.iter().enumerate() {
        assert!(!all[..i].contains(text), "{text}");
    }
    assert!(!sentence(-1).is_empty() && !sentence(1000).is_empty());
}

#[test]
fn buffers_that_overlap_otherwise_than_in_place_are_refused() {
    ranks(3, |comm, rank| {
        const N: usize = 20_000;
        let mut memory = vec![1_i64; 4 * N * 3];
        let base = memory.as_mut_ptr();
        // SAFETY: all offsets are inside the vector.
        let at = |element: usize| unsafe { base.add(element) };
        let (root, stream) = (rank as c_int, null_mut());
        let (a, b) = (at(0).cast::<std::ffi::c_void>(), at(7).cast::<std::ffi::c_void>());
        let own = at(rank * N).cast::<std::ffi::c_void>();
        // SAFETY: all buffers are inside the vector.
        let refused = unsafe {
            [
                ncclAllReduce(a, b, N, I64, SUM, **comm, stream),
                ncclReduce(a, b, N, I64, SUM, root, **comm, stream),
                ncclBroadcast(a, b, N, I64, root, **comm, stream),
                ncclAllGather(b, a, N, I64, **comm, stream),
                ncclGather(b, a, N, I64, root, **comm, stream),
                ncclReduceScatter(a, b, N, I64, SUM, **comm, stream),
                ncclScatter(a, b, N, I64, root, **comm, stream),
                ncclAlltoAll(a, b, N, I64, **comm, stream),
            ]
        };
        assert_eq!(refused, [ncclInvalidArgument; 8]);
        assert!(
            last_error().contains("overlap, but not at the exact addresses of an in-place call"),
            "{}",
            last_error()
        );
        // SAFETY: as above. The buffers are exactly in place, so no call is refused.
        unsafe {
            ok(ncclAllReduce(a, a, N, I64, SUM, **comm, stream));
            ok(ncclAllGather(own, a, N, I64, **comm, stream));
            ok(ncclReduceScatter(a, own, N, I64, SUM, **comm, stream));
            ok(ncclAlltoAll(a, a, N, I64, **comm, stream));
            ok(ncclGather(own, a, N, I64, 0, **comm, stream));
            ok(ncclScatter(a, own, N, I64, 0, **comm, stream));
        }
    });
}

#[test]
fn the_place_of_a_new_communicator_is_null_after_a_failure() {
    let other = Comm::init_all(1).remove(0);
    let failed = Comm::init_all(2);
    // SAFETY: the token is live, and its Comm destroys nothing after this.
    ok(unsafe { ncclCommAbort(*failed[1]) });
    let (no_id, mut list) = (ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] }, [1]);
    let mut wrong = ncclConfig_t { blocking: 7, ..NCCL_CONFIG_INITIALIZER };
    let (alone, default) = (null_mut(), NCCL_SHRINK_DEFAULT);
    let mut call = |what: &str, place: *mut ncclComm_t| {
        // SAFETY: there is a place for the communicator, and each argument that is not NULL is
        // valid.
        unsafe {
            match what {
                "a bad id" => ncclCommInitRank(place, 1, no_id, 0),
                "a bad configuration" => ncclCommInitRankConfig(place, 1, unique_id(), 0, &raw mut wrong),
                "no ids" => ncclCommInitRankScalable(place, 1, 0, 0, null_mut(), null_mut()),
                "no list" => ncclCommShrink(*failed[0], null_mut(), 1, place, null_mut(), default),
                "a split of a failed one" => ncclCommSplit(*failed[0], 0, 0, place, null_mut()),
                "a shrink of a failed one" => {
                    ncclCommShrink(*failed[0], list.as_mut_ptr(), 1, place, null_mut(), default)
                }
                _ => ncclCommSplit(alone, 0, 0, place, null_mut()),
            }
        }
    };
    let all = [
        "a bad id",
        "a bad configuration",
        "no ids",
        "no list",
        "a split of a failed one",
        "a shrink of a failed one",
        "a split of nothing",
    ];
    for what in all {
        let mut place = *other;
        assert_ne!(call(what, &raw mut place), ncclSuccess, "{what}");
        assert!(place.is_null(), "{what}: the place still has another communicator");
    }
    // SAFETY: the token is live.
    ok(unsafe { ncclCommAbort(*failed[0]) });
}
