//! `ncclCommShrink`: the remaining ranks continue, whatever has happened to the others and to the
//! communicator.

mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::*;
use hostccl::types::*;
use hostccl::*;

/// Returns the communicator without the excluded ranks, or the code and message of the failure.
fn shrink(comm: &Comm, excluded: &[c_int], flags: c_int) -> Result<Comm, (ncclResult_t, String)> {
    let mut list = excluded.to_vec();
    let mut shrunk = std::ptr::dangling_mut();
    // SAFETY: the list has as many ranks as its count says, and there is a place for the
    // communicator.
    let result =
        unsafe { ncclCommShrink(**comm, list.as_mut_ptr(), list.len() as c_int, &raw mut shrunk, null_mut(), flags) };
    match result {
        0 => Ok(Comm(shrunk)),
        _ => Err((result, last_error())),
    }
}

#[test]
fn the_ranks_left_are_numbered_in_their_order_and_the_parent_goes_on() {
    ranks(6, |comm, rank| {
        for excluded in [&[1, 3][..], &[0], &[5, 4, 3, 2, 1], &[3, 3, 0]] {
            if !excluded.contains(&(rank as c_int)) {
                let left: Vec<i64> = (0..6).filter(|rank| !excluded.contains(&(*rank as c_int))).collect();
                let shrunk = shrink(comm, excluded, NCCL_SHRINK_DEFAULT).unwrap();
                assert_eq!(shrunk.rank(), left.iter().position(|other| *other == rank as i64).unwrap());
                assert_eq!(gather(&shrunk, rank as i64), left);
            }
        }
        assert_eq!(sum(comm, 1), 6);
    });
}

#[test]
fn a_communicator_whose_rank_aborted_shrinks_and_its_blocked_calls_end() {
    let aborted = Barrier::new(4);
    ranks(4, |comm, rank| {
        assert_eq!(sum(comm, 1), 4);
        if rank == 2 {
            // SAFETY: the token is live. Its Comm destroys nothing after this.
            ok(unsafe { ncclCommAbort(**comm) });
            aborted.wait();
            return;
        }
        aborted.wait();
        let (result, message) = shrink(comm, &[2], NCCL_SHRINK_DEFAULT).err().unwrap();
        assert_eq!(result, ncclRemoteError, "{message}");
        let mut total = 0i64;
        let (from, to) = ((&raw const total).cast(), (&raw mut total).cast());
        // SAFETY: each buffer has one element.
        let blocked = unsafe { ncclAllReduce(from, to, 1, 4, 0, **comm, null_mut()) };
        assert_eq!(blocked, ncclRemoteError);
        let shrunk = shrink(comm, &[2], NCCL_SHRINK_ABORT).unwrap();
        assert_eq!(sum(&shrunk, 10), 30);
        // A shrunk communicator can be shrunk again.
        if rank != 0 {
            let pair = shrink(&shrunk, &[0], NCCL_SHRINK_DEFAULT).unwrap();
            assert_eq!(gather(&pair, rank as i64), [1, 3]);
        }
    });
}

#[test]
fn a_call_that_is_blocked_in_the_parent_is_ended_by_shrinking_with_abort() {
    ranks(3, |comm, rank| {
        if rank == 0 {
            // The other ranks never make this call.
            let mut total = 0i64;
            let (from, to) = ((&raw const total).cast(), (&raw mut total).cast());
            // SAFETY: each buffer has one element.
            assert_eq!(unsafe { ncclAllReduce(from, to, 1, 4, 0, **comm, null_mut()) }, ncclRemoteError);
            assert!(last_error().contains("shrinks"), "{}", last_error());
            return;
        }
        let shrunk = shrink(comm, &[0], NCCL_SHRINK_ABORT).unwrap();
        assert_eq!(sum(&shrunk, 1), 2);
    });
}

#[test]
fn ranks_that_exclude_different_ones_do_not_meet() {
    ranks(4, |comm, rank| {
        // SAFETY: the token is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 500) });
        let excluded = match rank {
            0 => 3,
            1 => 2,
            _ => return,
        };
        let (result, message) = shrink(comm, &[excluded], NCCL_SHRINK_DEFAULT).err().unwrap();
        assert!([ncclTimeout, ncclRemoteError].contains(&result), "{message}");
    });
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_no_longer_than_allowed() {
    ranks(3, |comm, rank| {
        if rank == 1 {
            // SAFETY: the token is live.
            ok(unsafe { hostcclCommSetTimeout(**comm, 300) });
            let began = Instant::now();
            let (result, message) = shrink(comm, &[2], NCCL_SHRINK_DEFAULT).err().unwrap();
            assert_eq!(result, ncclTimeout, "{message}");
            assert!(message.contains("rank 0 did not come"), "{message}");
            assert!(began.elapsed() >= Duration::from_millis(300));
            // SAFETY: as above.
            ok(unsafe { hostcclCommSetTimeout(**comm, 0) });
        }
        // The parent is usable afterwards.
        assert_eq!(sum(comm, 1), 3);
    });
}

#[test]
fn a_rank_that_aborts_instead_of_shrinking_is_not_waited_for() {
    for quitter in [0, 1] {
        ranks(4, |comm, rank| {
            match rank {
                3 => return,
                _ if rank == quitter => {
                    // The others most likely wait for this rank by then. If not, the outcome is the
                    // same.
                    std::thread::sleep(Duration::from_millis(100));
                    // SAFETY: the token is live. Its Comm destroys nothing after this.
                    return ok(unsafe { ncclCommAbort(**comm) });
                }
                _ => {}
            }
            let began = Instant::now();
            let (result, message) = shrink(comm, &[3], NCCL_SHRINK_ABORT).err().unwrap();
            assert_eq!(result, ncclRemoteError, "{message}");
            assert!(message.contains(&format!("rank {quitter} ")), "{message}");
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        });
    }
}

/// Runs four ranks. Rank 3 does nothing, `quitter` aborts, and then rank 0 and `late` shrink the
/// communicator without rank 3. Rank 0 gives up first, and does `afterwards`. Then `late` calls.
fn gives_up_before(late: usize, quitter: usize, afterwards: impl Fn(&Comm) + Sync) {
    let (aborted, gave_up, both) = (Barrier::new(3), Barrier::new(2), Barrier::new(2));
    ranks(4, |comm, rank| {
        if rank == 3 {
            return;
        }
        if rank == quitter {
            // SAFETY: the token is live. Its Comm destroys nothing after this.
            ok(unsafe { ncclCommAbort(**comm) });
        }
        aborted.wait();
        if rank == quitter {
            return;
        }
        if rank == late {
            gave_up.wait();
        }
        let began = Instant::now();
        let (result, message) = shrink(comm, &[3], NCCL_SHRINK_ABORT).err().unwrap();
        if rank == 0 {
            afterwards(comm);
            gave_up.wait();
        }
        assert_eq!(result, ncclRemoteError, "{message}");
        assert!(message.contains(&format!("rank {quitter} ")), "{message}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        both.wait();
    });
}

#[test]
fn a_rank_that_comes_after_the_first_one_gave_up_does_not_wait_for_it() {
    gives_up_before(2, 1, |_| {});
}

#[test]
fn the_rank_that_ended_first_is_named_and_not_one_that_gave_up_because_of_it() {
    // SAFETY: the token is live. Its Comm destroys nothing after this.
    gives_up_before(1, 2, |comm| ok(unsafe { ncclCommDestroy(**comm) }));
}

#[test]
fn wrong_arguments_are_refused_with_their_values() {
    ranks(2, |comm, rank| {
        let refuse = |excluded: &[c_int], flags: c_int, value: &str| {
            let (result, message) = shrink(comm, excluded, flags).err().unwrap();
            assert_eq!(result, ncclInvalidArgument, "{message}");
            assert!(message.contains(value), "{message}");
        };
        refuse(&[], 0, "0 excluded");
        refuse(&[2], 0, "2 is not in 0..2");
        refuse(&[-1], 0, "-1");
        refuse(&[rank as c_int], 0, &format!("rank {rank} calls"));
        refuse(&[1 - rank as c_int], 6, "0x6");
        assert_eq!(sum(comm, 1), 2);
    });
}

#[test]
fn a_child_of_a_non_blocking_parent_comes_in_the_background() {
    let (id, all_made) = (unique_id(), std::sync::Barrier::new(3));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let all_made = &all_made;
            scope.spawn(move || {
                let mut config = config(0);
                let mut comm = null_mut();
                // SAFETY: there is a place for the communicator, and the configuration is whole.
                unsafe { ncclCommInitRankConfig(&raw mut comm, 3, id, rank, &raw mut config) };
                let comm = Comm(comm);
                wait_until_made(&comm);
                // A shrink with abort would end the communicator for a rank that has not seen yet
                // that it is made.
                all_made.wait();
                if rank == 1 {
                    return;
                }
                let (mut list, mut shrunk) = ([1], null_mut());
                // SAFETY: the list has one rank, and the place stays valid until the parent is
                // done.
                let started = unsafe {
                    ncclCommShrink(*comm, list.as_mut_ptr(), 1, &raw mut shrunk, null_mut(), NCCL_SHRINK_ABORT)
                };
                assert_eq!(started, ncclInProgress);
                let began = Instant::now();
                let mut status = ncclInProgress;
                while status == ncclInProgress && began.elapsed() < DEADLINE {
                    // SAFETY: the token is live, and there is a place for the answer.
                    unsafe { ncclCommGetAsyncError(*comm, &raw mut status) };
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The shrink has failed the parent, and the child is made.
                assert_eq!(status, ncclRemoteError);
                let shrunk = Comm(shrunk);
                wait_until_made(&shrunk);
                assert_eq!(gather(&shrunk, i64::from(rank)), [0, 2]);
            });
        }
    });
}

/// Waits until the communicator is made.
fn wait_until_made(comm: &Comm) {
    let began = Instant::now();
    let mut status = ncclInProgress;
    while status == ncclInProgress && began.elapsed() < DEADLINE {
        // SAFETY: the token is live, and there is a place for the answer.
        ok(unsafe { ncclCommGetAsyncError(**comm, &raw mut status) });
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(status, ncclSuccess, "{}", last_error());
}

#[test]
fn a_group_makes_several_communicators_by_shrinking() {
    ranks(4, |comm, rank| {
        for _ in 0..20 {
            let (mut lists, mut places) = ([[3], [2]], [null_mut(); 2]);
            group(|| {
                for ((list, place), excluded) in lists.iter_mut().zip(&mut places).zip([3, 2]) {
                    if rank != excluded {
                        // SAFETY: the list has one rank, and the places outlive the group.
                        ok(unsafe {
                            ncclCommShrink(**comm, list.as_mut_ptr(), 1, place, null_mut(), NCCL_SHRINK_DEFAULT)
                        });
                    }
                }
            });
            for (place, excluded) in places.into_iter().zip([3, 2]) {
                let left: Vec<i64> = (0..4).filter(|other| *other != excluded).collect();
                match rank as i64 == excluded {
                    true => assert!(place.is_null()),
                    false => assert_eq!(gather(&Comm(place), rank as i64), left),
                }
            }
        }
    });
}

#[test]
fn a_failed_split_in_the_background_does_not_keep_a_rank_from_shrinking_with_abort() {
    let split = Barrier::new(3);
    ranks(3, |comm, rank| {
        if rank == 2 {
            // The others have begun to split.
            split.wait();
            // SAFETY: the token is live. Its Comm destroys nothing after this.
            ok(unsafe { ncclCommAbort(**comm) });
            return;
        }
        let (mut part, mut in_background) = (null_mut(), config(0));
        // SAFETY: the place outlives the call, because the test waits for it.
        let begun = unsafe { ncclCommSplit(**comm, 0, 0, &raw mut part, &raw mut in_background) };
        assert_eq!(begun, ncclInProgress, "{}", last_error());
        split.wait();
        assert_eq!(state_of(comm), ncclRemoteError);
        for blocking in [1, 0] {
            let (mut list, mut shrunk, mut config) = ([2], null_mut(), config(blocking));
            let (list, place) = (list.as_mut_ptr(), &raw mut shrunk);
            // SAFETY: the list has one rank, and the place outlives the call.
            let begun = unsafe { ncclCommShrink(**comm, list, 1, place, &raw mut config, NCCL_SHRINK_ABORT) };
            assert_eq!(begun, if blocking == 1 { ncclSuccess } else { ncclInProgress }, "{}", last_error());
            // After the shrink the parent's state is that it has ended.
            assert_eq!(state_of(comm), ncclRemoteError);
            assert_eq!(sum(&Comm(shrunk), 10), 20);
        }
    });
}

#[test]
fn a_rank_that_does_not_come_to_a_shrink_is_named_with_its_number_in_the_parent() {
    let (all_have_failed, at_once) = (Barrier::new(4), Barrier::new(2));
    let blamed = ranks(4, |comm, rank| {
        // SAFETY: the communicator is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 1500) });
        let failed = [1, 2].contains(&rank).then(|| {
            at_once.wait();
            shrink(comm, &[0], NCCL_SHRINK_DEFAULT).err()
        });
        let (mut code, mut ranks, mut lost, mut count, mut waited) = (0, [-1; 4], [-1; 4], 0, 0);
        let (code, lost, waited) = (&raw mut code, lost.as_mut_ptr(), &raw mut waited);
        // SAFETY: there is room for four ranks, and there are places for the other answers.
        ok(unsafe { hostcclLastErrorRanks(code, ranks.as_mut_ptr(), lost, 4, &raw mut count, waited) });
        all_have_failed.wait();
        failed.map(|failure| (failure.map(|(code, _)| code), ranks[..count as usize].to_vec()))
    });
    let expected = Some((Some(ncclTimeout), vec![3]));
    assert_eq!(blamed, [None, expected.clone(), expected, None]);
}

#[test]
fn a_shrink_that_fails_leaves_the_next_one_of_its_group() {
    ranks(4, |comm, rank| {
        // SAFETY: the communicator is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 20_000) });
        if rank == 2 {
            // SAFETY: the token is live. Its Comm destroys nothing after this.
            ok(unsafe { ncclCommAbort(**comm) });
            return;
        }
        let (mut lists, mut places) = ([[3], [2]], [null_mut(); 2]);
        // SAFETY: the lists have one rank each, and the places outlive the group.
        let ended = unsafe {
            ok(ncclGroupStart());
            for ((list, place), excluded) in lists.iter_mut().zip(&mut places).zip([3, 2]) {
                if rank != excluded {
                    ok(ncclCommShrink(**comm, list.as_mut_ptr(), 1, place, null_mut(), NCCL_SHRINK_ABORT));
                }
            }
            ncclGroupEnd()
        };
        // Rank 2 does not come to the first shrink, which is not rank 3's.
        assert_eq!(ended, if rank == 3 { ncclSuccess } else { ncclRemoteError }, "{}", last_error());
        assert!(places[0].is_null());
        assert_eq!(gather(&Comm(places[1]), rank as i64), [0, 1, 3]);
    });
}
