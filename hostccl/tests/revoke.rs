//! `ncclCommRevoke`: it ends the calls of all ranks, and then the ranks make other communicators of
//! the revoked one.

mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Barrier;

use common::*;
use hostccl::types::*;
use hostccl::*;

fn revoke(comm: &Comm) -> ncclResult_t {
    // SAFETY: the token is live.
    unsafe { ncclCommRevoke(**comm, NCCL_REVOKE_DEFAULT) }
}

/// Adds up one number of each rank. Returns the result of the call.
fn try_sum(comm: &Comm) -> ncclResult_t {
    let (sent, mut got) = (1_i64, 0_i64);
    let (dtype, op) = (DataType::Int64 as c_int, ReduceOp::Sum as c_int);
    // SAFETY: each buffer has one element.
    unsafe { ncclAllReduce((&raw const sent).cast(), (&raw mut got).cast(), 1, dtype, op, **comm, null_mut()) }
}

fn state(comm: &Comm) -> ncclResult_t {
    let mut state = -1;
    // SAFETY: the token is live, and there is a place for the answer.
    ok(unsafe { ncclCommGetAsyncError(**comm, &raw mut state) });
    state
}

fn shrink(comm: &Comm, excluded: c_int) -> Comm {
    let (mut list, mut shrunk) = ([excluded], null_mut());
    // SAFETY: the list has one rank, and there is a place for the communicator.
    ok(unsafe { ncclCommShrink(**comm, list.as_mut_ptr(), 1, &raw mut shrunk, null_mut(), NCCL_SHRINK_DEFAULT) });
    Comm(shrunk)
}

#[test]
fn it_wakes_all_ranks_and_then_they_split_and_shrink() {
    let seen = Barrier::new(4);
    ranks(4, |comm, rank| {
        assert_eq!(sum(comm, 1), 4);
        match rank {
            // These ranks are in the same call, a step of which rank 3 never takes, and rank 2 in
            // a message that nobody sends.
            0 | 1 => assert_eq!(try_sum(comm), ncclRemoteError, "{}", last_error()),
            2 => {
                let mut got = 0_i64;
                // SAFETY: the buffer has one element.
                let result = unsafe { ncclRecv((&raw mut got).cast(), 1, 4, 3, **comm, null_mut()) };
                assert_eq!(result, ncclRemoteError, "{}", last_error());
            }
            _ => {
                // The others most likely are in their calls by then. If not, the outcome is the
                // same.
                std::thread::sleep(std::time::Duration::from_millis(100));
                ok(revoke(comm));
            }
        }
        if rank != 3 {
            assert!(last_error().contains("rank 3 (pid"), "{}", last_error());
            assert!(last_error().contains("revoked the communicator"), "{}", last_error());
            assert_eq!(state(comm), ncclRemoteError);
        }
        seen.wait();
        if rank != 3 {
            ok(revoke(comm));
        }
        assert_eq!(state(comm), ncclSuccess);
        let odd = comm.split((rank % 2) as c_int, 0).unwrap();
        assert_eq!(gather(&odd, rank as i64), [rank as i64 % 2, rank as i64 % 2 + 2]);
        let none = comm.split(if rank == 1 { NCCL_SPLIT_NOCOLOR } else { 7 }, -(rank as c_int));
        assert_eq!(none.map(|comm| gather(&comm, rank as i64)), (rank != 1).then(|| vec![3, 2, 0]));
        if rank != 0 {
            let fewer = shrink(comm, 0);
            assert_eq!(gather(&fewer, rank as i64), [1, 2, 3]);
        }
    });
}

#[test]
fn everything_else_is_refused_afterwards() {
    ranks(2, |comm, _| {
        ok(revoke(comm));
        assert_eq!(try_sum(comm), ncclInvalidUsage);
        assert!(last_error().contains("was revoked by ncclCommRevoke"), "{}", last_error());
        // SAFETY: the token is live, and there are places for the answers.
        unsafe {
            let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
            assert_eq!(ncclCommGetUniqueId(**comm, &raw mut id), ncclInvalidUsage);
            let mut grown = std::ptr::dangling_mut();
            let result = ncclCommGrow(**comm, 3, std::ptr::null(), -1, &raw mut grown, null_mut());
            assert_eq!((result, grown.is_null()), (ncclInvalidUsage, true), "{}", last_error());
            assert_eq!(ncclCommFinalize(**comm), ncclInvalidArgument);
            assert!(last_error().contains("revoked"), "{}", last_error());
            assert_eq!(ncclCommRevoke(**comm, NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
            assert!(last_error().contains("revoked before"), "{}", last_error());
        }
        assert_eq!(state(comm), ncclSuccess);
    });
}

#[test]
fn wrong_arguments_are_refused_and_null_is_not() {
    ranks(2, |comm, rank| {
        // SAFETY: the token is live, or NULL.
        unsafe {
            ok(ncclCommRevoke(null_mut(), 5));
            assert_eq!(ncclCommRevoke(**comm, 5), ncclInvalidArgument);
            assert!(last_error().contains("flags 0x5"), "{}", last_error());
            assert_eq!(sum(comm, 1), 2);
            // Rank 1 revokes no sooner than rank 0 has finalized, because it needs rank 0 here.
            if rank == 0 {
                ok(ncclCommFinalize(**comm));
                assert_eq!(revoke(comm), ncclInvalidArgument);
                assert!(last_error().contains("finalized before"), "{}", last_error());
            }
        }
    });
}

#[test]
fn a_communicator_that_a_death_has_ended_can_be_revoked() {
    let (aborted, both) = (Barrier::new(3), Barrier::new(2));
    ranks(3, |comm, rank| {
        assert_eq!(sum(comm, 1), 3);
        if rank == 1 {
            // SAFETY: the token is live. Its Comm destroys nothing after this.
            ok(unsafe { ncclCommAbort(**comm) });
            aborted.wait();
            return;
        }
        aborted.wait();
        assert_eq!(try_sum(comm), ncclRemoteError);
        ok(revoke(comm));
        let fewer = shrink(comm, 1);
        assert_eq!(gather(&fewer, rank as i64), [0, 2]);
        // A split needs all ranks.
        let mut child = null_mut();
        // SAFETY: there is a place for the communicator.
        let split = unsafe { ncclCommSplit(**comm, 0, 0, &raw mut child, null_mut()) };
        assert_eq!(split, ncclRemoteError);
        let message = last_error();
        assert!(message.contains("ncclCommSplit(color 0, key 0)") && message.contains("rank 1 "), "{message}");
        both.wait();
    });
}

#[test]
fn a_split_in_the_background_ends_and_is_forgotten() {
    let id = unique_id();
    let both = Barrier::new(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let both = &both;
            scope.spawn(move || {
                let mut nonblocking = config(0);
                let mut comm = null_mut();
                // SAFETY: there is a place for the communicator, and the configuration is whole.
                unsafe { ncclCommInitRankConfig(&raw mut comm, 2, id, rank, &raw mut nonblocking) };
                let comm = Comm(comm);
                while state(&comm) == ncclInProgress {}
                both.wait();
                let mut child = null_mut();
                if rank == 0 {
                    // SAFETY: the place stays valid until the split has ended.
                    let split = unsafe { ncclCommSplit(*comm, 0, 0, &raw mut child, null_mut()) };
                    assert_eq!(split, ncclInProgress);
                }
                both.wait();
                ok(revoke(&comm));
                assert_eq!(state(&comm), ncclSuccess);
                both.wait();
                // SAFETY: the place stays valid until the split has ended.
                unsafe { ncclCommSplit(*comm, 0, 0, &raw mut child, null_mut()) };
                while state(&comm) == ncclInProgress {}
                assert_eq!(state(&comm), ncclSuccess, "{}", last_error());
                assert_eq!(sum(&Comm(child), 1), 2);
            });
        }
    });
}
