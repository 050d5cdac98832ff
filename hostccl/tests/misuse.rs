//! Calls that do not fit together get an error with the values on every rank, and never hang.

mod common;

use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{config, init, last_error, ok, unique_id};
use hostccl::types::*;
use hostccl::*;

const F32: c_int = DataType::Float32 as c_int;
const SUM: c_int = ReduceOp::Sum as c_int;

/// Runs every rank on a thread of its own and returns what they return. No rank destroys its
/// communicator before all ranks are done, and every destroy succeeds.
fn ranks<T: Send>(size: c_int, body: impl Fn(c_int, ncclComm_t) -> T + Sync) -> Vec<T> {
    let done = Barrier::new(size as usize);
    common::ranks(size as usize, |comm, rank| {
        let answer = body(rank as c_int, **comm);
        done.wait();
        // SAFETY: the communicator is live.
        ok(unsafe { ncclCommDestroy(**comm) });
        answer
    })
}

/// Reduces that many ones. Returns the sums, or the code and message of the failure.
fn sum_of_ones(comm: ncclComm_t, count: usize) -> Result<Vec<f32>, (ncclResult_t, String)> {
    let mut data = vec![1.0_f32; count];
    // SAFETY: the buffer holds `count` elements.
    let result = unsafe {
        let buffer = data.as_mut_ptr().cast();
        ncclAllReduce(buffer, buffer, count, F32, SUM, comm, null_mut())
    };
    if result == ncclSuccess { Ok(data) } else { Err((result, last_error())) }
}

#[test]
fn different_counts_are_an_error_that_says_who_asked_for_what() {
    let answers = ranks(3, |rank, comm| sum_of_ones(comm, if rank == 2 { 5 } else { 4 }));
    for answer in answers {
        let (code, message) = answer.unwrap_err();
        assert_eq!(code, ncclInvalidUsage);
        assert!(
            message.ends_with(
                "rank 0 calls ncclAllReduce(4 x float32, sum), rank 2 calls ncclAllReduce(5 x float32, sum)"
            ),
            "{message}"
        );
    }
}

#[test]
fn different_collectives_are_an_error_on_all_ranks() {
    let answers = ranks(2, |rank, comm| {
        let mut data = [0.0_f32; 4];
        let buffer = data.as_mut_ptr().cast();
        // SAFETY: the buffer holds what each call touches.
        let result = unsafe {
            match rank {
                0 => ncclBroadcast(buffer, buffer, 4, F32, 1, comm, null_mut()),
                _ => ncclReduce(buffer, buffer, 4, F32, SUM, 1, comm, null_mut()),
            }
        };
        (result, last_error())
    });
    for (code, message) in answers {
        assert_eq!(code, ncclInvalidUsage);
        assert!(message.contains("ncclBroadcast(4 x float32, root 1)"), "{message}");
        assert!(message.contains("ncclReduce(4 x float32, sum, root 1)"), "{message}");
    }
}

/// Two ranks describe their calls to each other in two places, which they use in turn. The
/// description of an earlier call may still lie there. No rank takes it for the call that the other
/// rank makes now.
#[test]
fn an_earlier_call_of_the_other_rank_is_not_taken_for_its_next_one() {
    for earlier in 2..=5 {
        let answers = ranks(2, |rank, comm| {
            for _ in 0..earlier {
                assert_eq!(sum_of_ones(comm, 1).unwrap(), [2.0]);
            }
            if rank == 0 {
                return sum_of_ones(comm, 1).unwrap_err();
            }
            let mut part = null_mut();
            // SAFETY: there is a place for the communicator.
            let result = unsafe { ncclCommSplit(comm, 0, 0, &raw mut part, null_mut()) };
            (result, last_error())
        });
        for (code, message) in answers {
            assert_eq!(code, ncclInvalidUsage, "after {earlier} calls: {message}");
            assert!(
                message.contains("rank 0 calls ncclAllReduce(1 x float32, sum), rank 1 calls ncclCommSplit"),
                "{message}"
            );
        }
    }
}

#[test]
fn a_message_of_another_size_is_an_error_on_both_sides() {
    let answers = ranks(2, |rank, comm| {
        let mut data = [0.0_f32; 8];
        // SAFETY: the buffer holds eight elements.
        let result = unsafe {
            match rank {
                0 => ncclSend(data.as_ptr().cast(), 8, F32, 1, comm, null_mut()),
                _ => ncclRecv(data.as_mut_ptr().cast(), 7, F32, 0, comm, null_mut()),
            }
        };
        (result, last_error())
    });
    for (code, message) in answers {
        assert_eq!(code, ncclInvalidUsage);
        assert!(message.ends_with("rank 0 sends 8 x float32 where rank 1 receives 7 x float32"), "{message}");
    }
}

#[test]
fn an_id_starts_one_communicator() {
    let id = unique_id();
    let (result, comm) = init(1, id, 0);
    assert_eq!(result, ncclSuccess);
    let (again, none) = init(1, id, 0);
    assert_eq!(again, ncclInvalidUsage);
    assert!(none.is_null());
    assert!(last_error().contains("one id starts one communicator"), "{}", last_error());
    assert_eq!(sum_of_ones(comm, 3).unwrap(), [1.0; 3], "the first one is unharmed");
    // SAFETY: the communicator is live.
    assert_eq!(unsafe { ncclCommDestroy(comm) }, ncclSuccess);
}

#[test]
fn ranks_that_disagree_at_init_all_hear_of_it() {
    for (second, expected) in [((3, 1), "nranks"), ((2, 0), "rank 0 was taken twice")] {
        let id = unique_id();
        let messages: Vec<_> = std::thread::scope(|scope| {
            let threads = [(2, 0), second].map(|(size, rank)| {
                scope.spawn(move || {
                    let (result, comm) = init(size, id, rank);
                    assert!(comm.is_null());
                    (result, last_error())
                })
            });
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (code, message) in messages {
            assert_eq!(code, ncclInvalidUsage, "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }
}

#[test]
fn messages_of_a_group_pass_each_other_in_any_order() {
    const COUNT: usize = 300_000;
    ranks(3, |rank, comm| {
        let send: Vec<Vec<f32>> = (0..3).map(|peer| vec![(10 * rank + peer) as f32; COUNT]).collect();
        let mut recv = vec![vec![0.0_f32; COUNT]; 3];
        // SAFETY: the buffers hold `COUNT` elements and outlive the group.
        unsafe {
            assert_eq!(ncclGroupStart(), ncclSuccess);
            // Every rank first sends all its messages, also to itself, far more than the rings
            // hold. Then it receives in reverse order.
            for peer in 0..3 {
                let from = send[peer as usize].as_ptr().cast();
                assert_eq!(ncclSend(from, COUNT, F32, peer, comm, null_mut()), ncclSuccess);
            }
            for peer in (0..3).rev() {
                let to = recv[peer as usize].as_mut_ptr().cast();
                assert_eq!(ncclRecv(to, COUNT, F32, peer, comm, null_mut()), ncclSuccess);
            }
            assert_eq!(ncclGroupEnd(), ncclSuccess, "{}", last_error());
        }
        for (peer, got) in recv.iter().enumerate() {
            assert!(got.iter().all(|&value| value == (10 * peer as c_int + rank) as f32), "from {peer}");
        }
    });
}

#[test]
fn a_send_to_oneself_alone_is_refused() {
    ranks(1, |_, comm| {
        // SAFETY: the buffer holds one element.
        let result = unsafe { ncclSend([1.0_f32].as_ptr().cast(), 1, F32, 0, comm, null_mut()) };
        assert_eq!(result, ncclInvalidUsage);
        assert_eq!(sum_of_ones(comm, 1).unwrap(), [1.0]);
    });
}

#[test]
fn a_bad_call_fails_its_group_and_leaves_no_group_behind() {
    ranks(1, |_, comm| {
        // SAFETY: the calls are refused before they touch the buffers.
        unsafe {
            assert_eq!(ncclGroupStart(), ncclSuccess);
            let refused = ncclAllReduce(null_mut(), null_mut(), 4, F32, SUM, comm, null_mut());
            assert_eq!(refused, ncclInvalidArgument);
            assert_eq!(ncclGroupEnd(), ncclInvalidArgument);
            assert_eq!(ncclGroupEnd(), ncclInvalidUsage);
        }
        assert_eq!(sum_of_ones(comm, 1).unwrap(), [1.0]);
    });
}

#[test]
fn a_non_blocking_split_is_done_when_the_parent_says_so() {
    ranks(4, |rank, comm| {
        let mut config = config(0);
        let mut part = null_mut();
        // SAFETY: the places outlive the call, because the test waits for its end.
        unsafe {
            let color = if rank == 3 { NCCL_SPLIT_NOCOLOR } else { 7 };
            assert_eq!(ncclCommSplit(comm, color, -rank, &raw mut part, &raw mut config), ncclInProgress);
            let started = Instant::now();
            let mut state = ncclInProgress;
            while state == ncclInProgress {
                assert!(started.elapsed() < Duration::from_secs(60));
                assert_eq!(ncclCommGetAsyncError(comm, &raw mut state), ncclSuccess);
                std::thread::yield_now();
            }
            assert_eq!(state, ncclSuccess);
            assert_eq!(part.is_null(), rank == 3);
            if rank != 3 {
                let (mut count, mut mine) = (0, 0);
                assert_eq!(ncclCommCount(part, &raw mut count), ncclSuccess);
                assert_eq!(ncclCommUserRank(part, &raw mut mine), ncclSuccess);
                assert_eq!((count, mine), (3, 2 - rank), "ordered by key");
                assert_eq!(sum_of_ones(part, 2).unwrap(), [3.0; 2]);
                assert_eq!(ncclCommDestroy(part), ncclSuccess);
            }
        }
        assert_eq!(sum_of_ones(comm, 2).unwrap(), [4.0; 2]);
    });
}

#[test]
fn one_thread_drives_all_ranks_of_a_process() {
    let mut comms = [null_mut(); 5];
    let mut data = vec![vec![1.0_f32; 100_000]; 5];
    // SAFETY: there are places for the communicators, and the buffers outlive the group.
    unsafe {
        assert_eq!(ncclCommInitAll(comms.as_mut_ptr(), 5, std::ptr::null()), ncclSuccess, "{}", last_error());
        assert_eq!(ncclGroupStart(), ncclSuccess);
        for (comm, data) in comms.iter().zip(&mut data) {
            let buffer = data.as_mut_ptr().cast();
            for _ in 0..2 {
                assert_eq!(ncclAllReduce(buffer, buffer, data.len(), F32, SUM, *comm, null_mut()), ncclSuccess);
            }
        }
        assert_eq!(ncclGroupEnd(), ncclSuccess, "{}", last_error());
        assert!(data.iter().flatten().all(|&sum| sum == 25.0));
        for comm in comms {
            assert_eq!(ncclCommDestroy(comm), ncclSuccess);
        }
    }
}

#[test]
fn sixty_four_ranks_agree() {
    for sums in ranks(64, |_, comm| [1, 1000, 300_000].map(|count| sum_of_ones(comm, count).unwrap())) {
        assert!(sums.iter().flatten().all(|&sum| sum == 64.0));
    }
}

#[test]
fn a_finalized_communicator_takes_no_more_calls() {
    ranks(2, |_, comm| {
        sum_of_ones(comm, 1).unwrap();
        // SAFETY: the communicator is live.
        assert_eq!(unsafe { ncclCommFinalize(comm) }, ncclSuccess);
        assert_eq!(sum_of_ones(comm, 1).unwrap_err().0, ncclInvalidUsage);
        // SAFETY: the communicator is live.
        assert_eq!(unsafe { ncclCommFinalize(comm) }, ncclInvalidUsage);
    });
}

#[test]
fn arguments_out_of_range_are_named() {
    ranks(2, |_, comm| {
        let mut data = [1.0_f32; 4];
        let buffer = data.as_mut_ptr().cast();
        let refused = |result: ncclResult_t, named: &str| {
            assert_eq!(result, ncclInvalidArgument);
            assert!(last_error().contains(named), "{}", last_error());
        };
        // SAFETY: the calls are refused before they touch anything.
        unsafe {
            refused(ncclAllReduce(buffer, buffer, 4, 12, SUM, comm, null_mut()), "datatype 12");
            refused(ncclAllReduce(buffer, buffer, 4, F32, 9, comm, null_mut()), "op 9");
            refused(ncclAllReduce(buffer, null_mut(), 4, F32, SUM, comm, null_mut()), "recvbuff is NULL");
            refused(ncclAllReduce(buffer, buffer, usize::MAX / 2, F32, SUM, comm, null_mut()), "beyond any memory");
            refused(ncclBroadcast(buffer, buffer, 4, F32, 2, comm, null_mut()), "root 2");
            refused(ncclSend(buffer, 4, F32, -1, comm, null_mut()), "peer -1");
            refused(ncclAllReduce(buffer, buffer, 4, F32, SUM, null_mut(), null_mut()), "NULL");
            refused(ncclAllReduce(buffer, buffer, 4, F32, SUM, 0x1234 as ncclComm_t, null_mut()), "0x1234");
            refused(ncclCommSplit(comm, -2, 0, &mut null_mut(), null_mut()), "color -2");
        }
        refused(init(2, unique_id(), 2).0, "rank 2 is not in 0..2");
        refused(init(0, unique_id(), 0).0, "nranks 0");
        refused(init(5000, unique_id(), 0).0, "nranks 5000");
        refused(init(2, ncclUniqueId { internal: [1; NCCL_UNIQUE_ID_BYTES] }, 0).0, "not made by hostccl");
    });
}

#[test]
fn a_string_stays_readable_when_a_later_question_finds_a_failed_communicator() {
    common::ranks(2, |comm, rank| {
        sum_of_ones(**comm, 1 + rank).unwrap_err();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the strings are valid until this thread's next failing call, and none
                // fails.
                let [before, after] = unsafe {
                    let before = ncclGetLastError(null_mut());
                    [before, ncclGetLastError(**comm)].map(|text| CStr::from_ptr(text))
                };
                assert!(after.to_str().unwrap().contains("ncclAllReduce"), "{after:?}");
                assert_eq!(before, c"");
            });
        });
    });
}
