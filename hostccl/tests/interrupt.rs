//! A library that embeds the engine may end blocked calls by a reason of its own (`set_interrupt`).

mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::*;
use hostccl::types::*;
use hostccl::*;

const WHY: &str = "rank 9 has begun something else";

/// Adds up one number of each rank. Returns the result of the call.
fn try_sum(comm: &Comm) -> ncclResult_t {
    let (sent, mut got) = (1_i64, 0_i64);
    let (dtype, op) = (DataType::Int64 as c_int, ReduceOp::Sum as c_int);
    // SAFETY: each buffer has one element.
    unsafe { ncclAllReduce((&raw const sent).cast(), (&raw mut got).cast(), 1, dtype, op, **comm, null_mut()) }
}

/// Receives one number from `peer`, in a group. Returns the result of the group.
fn try_receive(comm: &Comm, peer: c_int) -> ncclResult_t {
    let mut got = 0_i64;
    // SAFETY: the buffer has one element, and outlives the group.
    unsafe {
        ok(ncclGroupStart());
        ok(ncclRecv((&raw mut got).cast(), 1, DataType::Int64 as c_int, peer, **comm, null_mut()));
        ncclGroupEnd()
    }
}

#[test]
fn a_reason_ends_the_blocked_calls_of_all_ranks() {
    let (has_reason, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let seen = Barrier::new(4);
    ranks(4, |comm, rank| {
        if rank == 0 {
            let (has_reason, asked) = (Arc::clone(&has_reason), Arc::clone(&asked));
            set_interrupt(
                **comm,
                Arc::new(move || {
                    asked.fetch_add(1, Ordering::SeqCst);
                    has_reason.load(Ordering::SeqCst).then(|| WHY.to_owned())
                }),
            );
            // The first question stays.
            set_interrupt(**comm, Arc::new(|| Some("the second question".to_owned())));
        }
        (0..100).for_each(|_| assert_eq!(sum(comm, 1), 4));
        match rank {
            // Only rank 0 asks, and the failure reaches the others.
            0 | 1 => assert_eq!(try_sum(comm), ncclRemoteError, "{}", last_error()),
            2 => assert_eq!(try_receive(comm, 3), ncclRemoteError, "{}", last_error()),
            _ => {
                let end = Instant::now() + DEADLINE;
                while asked.load(Ordering::SeqCst) < 3 {
                    assert!(Instant::now() < end, "rank 0 does not ask");
                    std::thread::sleep(Duration::from_millis(1));
                }
                has_reason.store(true, Ordering::SeqCst);
            }
        }
        if rank != 3 {
            assert!(last_error().contains(WHY), "{}", last_error());
            assert_eq!(try_sum(comm), ncclRemoteError);
            assert!(last_error().contains("failed earlier"), "{}", last_error());
        }
        seen.wait();
    });
}

/// The one rank waits for the other one for half a second, and the call then succeeds.
#[test]
fn a_question_without_a_reason_ends_nothing() {
    let asked = Arc::new(AtomicUsize::new(0));
    let waited = ranks(2, |comm, rank| {
        let count = Arc::clone(&asked);
        set_interrupt(
            **comm,
            Arc::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
                None
            }),
        );
        let began = Instant::now();
        while rank == 0 && began.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(sum(comm, 1), 2);
        began.elapsed()
    });
    // Ten times a second, from 250 ms on. A busy machine may look less often.
    let most = waited[1].as_millis() as usize / 100;
    assert!((1..=most).contains(&asked.load(Ordering::SeqCst)), "{asked:?} in {waited:?}");
}

#[test]
fn a_communicator_that_is_none_has_no_interrupt() {
    set_interrupt(null_mut(), Arc::new(|| None));
    let comm = Comm::init_all(1).remove(0);
    // SAFETY: the token is live.
    ok(unsafe { ncclCommDestroy(*comm) });
    set_interrupt(*comm, Arc::new(|| None));
}
