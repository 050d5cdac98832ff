//! A timeout that a caller hands over with a call concerns this call alone.

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::time::Duration;

use crate::common::{Comm, last_error, ok, ranks, state_of};
use crate::named::{I64, SUM, name};
use hostccl::types::*;
use hostccl::*;

/// Sets the timeout of the communicator.
fn of_comm(comm: &Comm, millis: i64) {
    // SAFETY: the communicator is live.
    ok(unsafe { hostcclCommSetTimeout(**comm, millis) });
}

/// Sets the timeout of the calling thread's next call.
fn of_next(millis: i64) {
    // SAFETY: the function has no requirements.
    ok(unsafe { hostcclNextCallTimeout(millis) });
}

/// Sums one number of each rank.
fn sum(comm: &Comm) {
    let mut number = 1_i64;
    let at = (&raw mut number).cast();
    // SAFETY: the number stays where it is during the call.
    ok(unsafe { ncclAllReduce(at, at.cast(), 1, I64, SUM, **comm, null_mut()) });
    assert_eq!(number, comm.size() as i64);
}

#[test]
fn a_call_with_a_longer_timeout_than_its_communicator_waits_longer() {
    ranks(2, |comm, rank| {
        of_comm(comm, 50);
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        of_next(60_000);
        sum(comm);
    });
}

#[test]
fn a_call_with_a_shorter_timeout_than_its_communicator_ends_sooner() {
    type Call = fn(ncclComm_t) -> ncclResult_t;
    // SAFETY: the buffers have as many elements as the calls need, and outlive the calls.
    let calls: [Call; 4] = unsafe {
        [
            |comm| {
                let (mine, mut all) = (1i64, [0i64; 2]);
                ncclAllGather((&raw const mine).cast(), all.as_mut_ptr().cast(), 1, I64, comm, null_mut())
            },
            |comm| {
                let mut value = 0i64;
                ncclRecv((&raw mut value).cast(), 1, I64, 1, comm, null_mut())
            },
            |comm| {
                let mut value = 0i64;
                ok(ncclGroupStart());
                ok(ncclRecv((&raw mut value).cast(), 1, I64, 1, comm, null_mut()));
                ncclGroupEnd()
            },
            |comm| {
                let mut child = null_mut();
                ncclCommSplit(comm, 0, 0, &raw mut child, null_mut())
            },
        ]
    };
    for call in calls {
        ranks(2, |comm, rank| {
            of_comm(comm, 60_000);
            if rank == 1 {
                // This rank makes no call.
                while state_of(comm) == ncclSuccess {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return;
            }
            of_next(100);
            let (code, error) = (call(**comm), last_error());
            assert_eq!(code, ncclTimeout, "{error}");
            assert!(error.contains("rank 1 did not come within 100 ms"), "{error}");
        });
    }
}

#[test]
fn a_timeout_goes_with_one_call_even_if_that_call_is_refused() {
    ranks(2, |comm, rank| {
        of_comm(comm, 60_000);
        of_next(50);
        // SAFETY: the call is refused before it uses a buffer.
        let code = unsafe { ncclAllGather(null(), null_mut(), 1, 99 as c_int, **comm, null_mut()) };
        assert_eq!(code, ncclInvalidArgument);
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        sum(comm);
    });
    // SAFETY: the function has no requirements.
    assert_eq!(unsafe { hostcclNextCallTimeout(-1) }, ncclInvalidArgument);
}

/// The library names each call, and does not make all of them.
#[test]
fn the_name_of_a_call_takes_back_the_timeout_of_one_that_was_not_made() {
    ranks(2, |comm, rank| {
        of_comm(comm, 60_000);
        of_next(50);
        let (tag, text) = name(1);
        // SAFETY: the name has 32 bytes.
        ok(unsafe { hostcclNextCallName(tag, text.as_ptr().cast()) });
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        sum(comm);
    });
}
