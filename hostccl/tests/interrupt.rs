//! A library that embeds the engine may end blocked calls by a reason of its own (`set_interrupt`).

mod common;

use std::ffi::{c_char, c_int, c_void};
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
    let (begin, seen) = (Barrier::new(4), Barrier::new(4));
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
        let before = asked.load(Ordering::SeqCst);
        // The reason comes only when no rank is in one of these sums any more.
        begin.wait();
        match rank {
            // Only rank 0 asks, and the failure reaches the others.
            0 | 1 => assert_eq!(try_sum(comm), ncclRemoteError, "{}", last_error()),
            2 => assert_eq!(try_receive(comm, 3), ncclRemoteError, "{}", last_error()),
            _ => {
                let end = Instant::now() + DEADLINE;
                while asked.load(Ordering::SeqCst) < before + 3 {
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

/// The one rank waits for the other one until it has asked three times, and the call then succeeds.
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
        while rank == 0 && asked.load(Ordering::SeqCst) < 3 {
            assert!(began.elapsed() < DEADLINE, "rank 1 does not ask");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(sum(comm, 1), 2);
        began.elapsed()
    });
    // Ten times a second, from 250 ms on. A busy machine may look less often.
    let most = waited[1].as_millis() as usize / 100;
    assert!((3..=most).contains(&asked.load(Ordering::SeqCst)), "{asked:?} in {waited:?}");
}

/// The data of a question by the C interface: whether there is a reason, and how often it was
/// released.
struct Data {
    has_reason: AtomicBool,
    released: AtomicUsize,
}

unsafe extern "C" fn question(data: *mut c_void, reason: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: the data is this test's, and lives longer than the communicators.
    let data = unsafe { &*data.cast::<Data>() };
    if !data.has_reason.load(Ordering::SeqCst) {
        return 0;
    }
    assert!(capacity > WHY.len());
    // SAFETY: there is room for the text and its end.
    unsafe {
        std::ptr::copy_nonoverlapping(WHY.as_ptr().cast(), reason, WHY.len());
        reason.add(WHY.len()).write(0);
    }
    1
}

unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: as above.
    unsafe { &*data.cast::<Data>() }.released.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_question_by_the_c_interface_ends_blocked_calls_and_is_released_once() {
    let data = Data { has_reason: AtomicBool::new(false), released: AtomicUsize::new(0) };
    let place = (&raw const data) as usize;
    let set = |comm, question| {
        // SAFETY: the data lives longer than the communicators, and all of it is atomic.
        unsafe { hostcclCommSetInterrupt(comm, question, Some(release), place as *mut c_void) }
    };
    assert_eq!(set(null_mut(), Some(question)), ncclInvalidArgument);
    assert_eq!(data.released.load(Ordering::SeqCst), 1, "a call that fails releases the data");
    let both_came = Barrier::new(2);
    ranks(2, |comm, rank| {
        assert_eq!(sum(comm, 1), 2);
        if rank == 0 {
            assert_eq!(set(**comm, None), ncclInvalidArgument);
            assert_eq!(last_error(), "hostcclCommSetInterrupt: question is NULL");
            ok(set(**comm, Some(question)));
            assert_eq!(data.released.load(Ordering::SeqCst), 2);
            data.has_reason.store(true, Ordering::SeqCst);
            assert_eq!(try_sum(comm), ncclRemoteError);
            assert!(last_error().contains(WHY), "{}", last_error());
        }
        both_came.wait();
    });
    assert_eq!(data.released.load(Ordering::SeqCst), 3, "the end of the communicator releases the data");
}

/// Writes a reason that takes the whole capacity.
unsafe extern "C" fn long_reason(_: *mut c_void, reason: *mut c_char, capacity: usize) -> c_int {
    // SAFETY: there is room for so many bytes.
    unsafe {
        reason.write_bytes(b'y', capacity - 1);
        reason.add(capacity - 1).write(0);
    }
    assert_eq!(capacity, 1024, "as hostccl.h says");
    1
}

#[test]
fn a_reason_of_the_whole_capacity_is_whole_on_its_rank_and_marked_as_cut_on_others() {
    let both_failed = Barrier::new(2);
    ranks(2, |comm, rank| {
        assert_eq!(sum(comm, 1), 2);
        if rank == 0 {
            // SAFETY: the question needs no data.
            ok(unsafe { hostcclCommSetInterrupt(**comm, Some(long_reason), None, null_mut()) });
            assert_eq!(try_sum(comm), ncclRemoteError);
        } else {
            let end = Instant::now() + DEADLINE;
            let mut state = ncclSuccess;
            while state == ncclSuccess {
                assert!(Instant::now() < end, "rank 0 has not ended the communicator");
                std::thread::sleep(Duration::from_millis(1));
                // SAFETY: there is a place for the answer.
                ok(unsafe { ncclCommGetAsyncError(**comm, &raw mut state) });
            }
            assert_eq!(try_sum(comm), ncclRemoteError);
        }
        let reason = if rank == 0 { "y".repeat(1023) } else { "y".repeat(509) + "…" };
        assert!(last_error().ends_with(&format!(": {reason}")), "{}", last_error());
        both_failed.wait();
    });
}

#[test]
fn a_communicator_that_is_none_has_no_interrupt() {
    set_interrupt(null_mut(), Arc::new(|| None));
    let comm = Comm::init_all(1).remove(0);
    // SAFETY: the token is live.
    ok(unsafe { ncclCommDestroy(*comm) });
    set_interrupt(*comm, Arc::new(|| None));
}
