//! Calls that cannot be paired fail on all ranks, with both sides in the message.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Comm, last_error, ok, ranks};
use crate::named::{I64, all_reduce, name};
use hostccl::types::*;
use hostccl::*;

/// Runs `body` on two ranks and returns their errors, each a code and its text. The calls have a
/// time of so many milliseconds.
fn errors_within(millis: i64, body: impl Fn(&Comm, usize) -> ncclResult_t + Sync) -> Vec<(ncclResult_t, String)> {
    ranks(2, |comm, rank| {
        // SAFETY: the communicator is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, millis) });
        let code = body(comm, rank);
        (code, if code == ncclSuccess { String::new() } else { last_error() })
    })
}

/// Returns the errors of calls that cannot be paired before any deadline.
fn errors_of(body: impl Fn(&Comm, usize) -> ncclResult_t + Sync) -> Vec<(ncclResult_t, String)> {
    errors_within(60_000, body)
}

/// Returns the errors of calls that cannot be paired at a deadline, and its milliseconds. On a busy
/// machine, a rank may come later than that. The other one says so, and the ranks get more time.
fn errors_at_the_deadline(body: impl Fn(&Comm, usize) -> ncclResult_t + Sync) -> (i64, Vec<(ncclResult_t, String)>) {
    let (mut millis, mut errors) = (1500, errors_within(1500, &body));
    while millis < 24_000 && errors.iter().any(|(_, message)| message.contains(" did not come within ")) {
        millis *= 4;
        errors = errors_within(millis, &body);
    }
    (millis, errors)
}

#[test]
fn ranks_that_stay_with_different_names_hear_of_both() {
    let (millis, errors) = errors_at_the_deadline(all_reduce);
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected = format!(
            "rank 0 is in ncclAllReduce(4 x int64, sum) along dim0, rank 1 in ncclAllReduce(4 x int64, sum) along dim1: no matching call came within {millis} ms; the two names share one communicator"
        );
        assert!(message.contains(&expected) && message.contains("DM_DIM_OWN_COMM"), "{message}");
    }
}

/// Calls along other names go on while one call waits for a partner that never comes. Each such
/// call changes the words for which the lonely call waits.
#[test]
fn a_call_that_no_other_rank_makes_ends_although_calls_under_other_names_go_on() {
    let is_over = AtomicUsize::new(0);
    let began = Instant::now();
    let errors = errors_within(1500, |comm, rank| {
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let mut code = ncclSuccess;
                while code == ncclSuccess {
                    assert!(began.elapsed() < Duration::from_secs(60), "the lonely call does not end");
                    code = all_reduce(comm, 1);
                }
                (code, last_error())
            });
            if rank == 0 {
                let code = all_reduce(comm, 0);
                assert_ne!(code, ncclSuccess);
                let message = last_error();
                assert!(message.contains("within 1500 ms"), "{message}");
                is_over.store(1, Ordering::SeqCst);
            }
            let (code, _) = others.join().unwrap();
            code
        })
    });
    assert_eq!(is_over.load(Ordering::SeqCst), 1);
    assert!(errors.iter().all(|(code, _)| *code != ncclSuccess), "{errors:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "the lonely call has waited for {:?}", began.elapsed());
}

#[test]
fn a_message_that_nobody_receives_ends_although_messages_under_other_names_go_on() {
    let began = Instant::now();
    let message = |comm: &Comm, rank: usize, under: usize| {
        let mut data = [0_i64; 4];
        let at = data.as_mut_ptr().cast();
        match rank {
            0 => called!(under, ncclSend(at, 4, I64, 1, **comm, null_mut())),
            _ => called!(under, ncclRecv(at, 4, I64, 0, **comm, null_mut())),
        }
    };
    let errors = errors_within(1500, |comm, rank| {
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                while message(comm, rank, 1) == ncclSuccess {
                    assert!(began.elapsed() < Duration::from_secs(60), "the lonely message does not end");
                }
            });
            let code = if rank == 0 { message(comm, rank, 0) } else { ncclTimeout };
            assert_ne!(code, ncclSuccess);
            others.join().unwrap();
            code
        })
    });
    assert_eq!(errors.len(), 2);
    assert!(began.elapsed() < Duration::from_secs(20), "the lonely message has waited for {:?}", began.elapsed());
}

#[test]
fn a_message_under_another_name_is_told_to_both_sides() {
    let (millis, errors) = errors_at_the_deadline(|comm, rank| {
        let mut data = [0_i64; 4];
        let at = data.as_mut_ptr().cast();
        match rank {
            0 => called!(0, ncclSend(at, 4, I64, 1, **comm, null_mut())),
            _ => called!(1, ncclRecv(at, 4, I64, 0, **comm, null_mut())),
        }
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected = format!(
            "rank 0 sends to rank 1 along dim0, where rank 1 receives along dim1: no matching call came within {millis} ms; the two names share one communicator"
        );
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn two_threads_under_one_name_are_refused_on_all_ranks() {
    // Rank 1 calls only when rank 0 has two threads in the call, so that neither of them can be
    // done before.
    let inside = AtomicUsize::new(0);
    let errors = errors_of(|comm, rank| {
        if rank == 1 {
            while inside.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            return all_reduce(comm, 0);
        }
        std::thread::scope(|scope| {
            let other = scope.spawn(|| all_reduce(comm, 0));
            let mine = all_reduce(comm, 0);
            assert_eq!((mine, other.join().unwrap()), (ncclInvalidUsage, ncclInvalidUsage));
            inside.store(1, Ordering::SeqCst);
            mine
        })
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage);
        assert!(message.contains("two threads of rank 0 call along dim0 at the same time"), "{message}");
    }
}

#[test]
fn both_sides_that_send_first_are_told_to_use_a_group() {
    let (millis, errors) = errors_at_the_deadline(|comm, rank| {
        let data = [0_i64; 4];
        called!(0, ncclSend(data.as_ptr().cast(), 4, I64, 1 - rank as c_int, **comm, null_mut()))
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected = format!("have both been sending to each other for {millis} ms, and neither receives");
        assert!(message.contains(&expected), "{message}");
        assert!(message.contains("group"), "{message}");
    }
}

#[test]
fn messages_compare_their_types_not_only_their_bytes() {
    let errors = errors_of(|comm, rank| {
        let mut data = [0_i64; 4];
        let at = data.as_mut_ptr().cast();
        match rank {
            0 => called!(0, ncclSend(at, 2, DataType::Float64 as c_int, 1, **comm, null_mut())),
            _ => called!(0, ncclRecv(at, 4, DataType::Float32 as c_int, 0, **comm, null_mut())),
        }
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        assert!(message.contains("rank 0 sends 2 x float64 where rank 1 receives 4 x float32"), "{message}");
    }
}

#[test]
fn a_thread_that_ends_inside_a_group_fails_its_communicators() {
    let errors = errors_of(|comm, rank| {
        if rank == 0 {
            // The group begins on a thread that ends. Joining the thread waits until it has dropped
            // its group.
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    // SAFETY: the call has no arguments.
                    ok(unsafe { ncclGroupStart() });
                    ok(all_reduce(comm, 0));
                });
                thread.join().unwrap();
            });
        }
        all_reduce(comm, 0)
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        assert!(message.contains("ended inside a group, with 1 operations queued"), "{message}");
    }
}

#[test]
fn a_thread_that_ends_inside_a_group_with_a_split_fails_the_parent() {
    let errors = errors_of(|comm, rank| {
        let split = || {
            let mut child = null_mut();
            // SAFETY: the communicator is live. There is a place for the new one while the call
            // waits; a call that was collected and not performed does not write to it later.
            unsafe { ncclCommSplit(**comm, 0, 0, &raw mut child, null_mut()) }
        };
        if rank == 0 {
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    // SAFETY: the call has no arguments.
                    ok(unsafe { ncclGroupStart() });
                    ok(split());
                });
                thread.join().unwrap();
            });
        }
        split()
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected = "ended inside a group, with 1 operations queued and not done, among them ncclCommSplit(";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn the_two_largest_tags_are_refused() {
    for tag in [u64::MAX - 1, u64::MAX] {
        // SAFETY: NULL stands for a name without a text.
        assert_eq!(unsafe { hostcclNextCallName(tag, std::ptr::null()) }, ncclInvalidArgument);
        assert!(last_error().contains(&format!("tag {tag:#x} is reserved")), "{}", last_error());
    }
}
