//! `ncclCommGrow`: new ranks come to those of a communicator, which keep their numbers. The ranks
//! are threads.

mod common;

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use common::*;
use hostccl::types::*;
use hostccl::*;

type Outcome = Result<Comm, (ncclResult_t, String)>;

/// Makes an id for the growth of a communicator.
fn id_of(comm: &Comm) -> Result<ncclUniqueId, (ncclResult_t, String)> {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: the token is live, and there is a place for the id.
    match unsafe { ncclCommGetUniqueId(**comm, &raw mut id) } {
        0 => Ok(id),
        code => Err((code, last_error())),
    }
}

/// Grows `parent`, or comes to its growth where there is no parent.
fn grow(parent: Option<&Comm>, nranks: c_int, id: Option<&ncclUniqueId>, rank: c_int) -> Outcome {
    let mut grown = std::ptr::dangling_mut();
    let parent = parent.map_or(null_mut(), |comm| **comm);
    // SAFETY: the token is live or NULL, and there is a place for the communicator.
    let code = unsafe { ncclCommGrow(parent, nranks, id.map_or(null(), |id| id), rank, &raw mut grown, null_mut()) };
    match code {
        0 => Ok(Comm(grown)),
        _ => {
            assert!(grown.is_null());
            Err((code, last_error()))
        }
    }
}

/// Comes as rank 2 of 3 to a growth that has failed. The rank learns why, unless another test of
/// this process has made an id meanwhile, which closes those of growths that are over.
fn late(id: &ncclUniqueId, why: &str) {
    let (_, message) = grow(None, 3, Some(id), 2).err().unwrap();
    assert!(message.contains(why) || message.contains("used up or its segment is gone"), "{message}");
}

/// Grows a communicator of `old` ranks to `all`. `maker` makes the id. Each rank
/// runs `then` with the outcome.
fn grow_with<R: Send>(old: usize, all: usize, maker: usize, then: impl Fn(Outcome, usize) -> R + Sync) {
    let (give, taken) = channel();
    let give = Mutex::new(give);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ranks(old, |comm, rank| {
                assert_eq!(sum(comm, 1), old as i64);
                let id = (rank == maker).then(|| id_of(comm).unwrap());
                if let Some(id) = &id {
                    (old..all).for_each(|_| give.lock().unwrap().send(*id).unwrap());
                }
                then(grow(Some(comm), all as c_int, id.as_ref(), -1), rank);
                // The parent can be used afterwards.
                assert_eq!(sum(comm, 1), old as i64);
            });
        });
        let then = &then;
        for rank in old..all {
            let id = taken.recv().unwrap();
            scope.spawn(move || then(grow(None, all as c_int, Some(&id), rank as c_int), rank));
        }
    });
}

#[test]
fn old_ranks_keep_their_numbers_and_new_ones_are_appended() {
    for (old, all, maker) in [(1, 2, 0), (2, 3, 1), (3, 6, 1), (4, 5, 3)] {
        grow_with(old, all, maker, |grown, rank| {
            let grown = grown.unwrap_or_else(|(code, message)| panic!("rank {rank}: {code} {message}"));
            assert_eq!((grown.rank(), grown.size()), (rank, all));
            assert_eq!(gather(&grown, rank as i64), (0..all as i64).collect::<Vec<_>>());
            let half = grown.split((rank % 2) as c_int, 0).unwrap();
            assert_eq!(sum(&half, 1), ((all + 1 - rank % 2) / 2) as i64);
        });
    }
}

#[test]
fn a_communicator_grows_again_and_again() {
    let (give, taken) = channel();
    let give = Mutex::new(give);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ranks(2, |comm, rank| {
                for _ in 0..5 {
                    let id = (rank == 1).then(|| id_of(comm).unwrap());
                    if let Some(id) = id {
                        give.lock().unwrap().send(id).unwrap();
                    }
                    // The id is known without the program's help, as NCCL's guide shows it.
                    let grown = grow(Some(comm), 3, None, -1).unwrap();
                    assert_eq!(sum(&grown, 1), 3);
                }
            });
        });
        for _ in 0..5 {
            let id = taken.recv().unwrap();
            let grown = grow(None, 3, Some(&id), 2).unwrap();
            assert_eq!(sum(&grown, 1), 3);
        }
    });
}

#[test]
fn wrong_arguments_are_refused_with_their_values() {
    let id = unique_id();
    let made = Mutex::new(None);
    ranks(2, |comm, rank| {
        let refuse = |outcome: Outcome, value: &str| {
            let (code, message) = outcome.err().unwrap();
            assert_eq!(code, ncclInvalidArgument, "{message}");
            assert!(message.contains(value), "{message}");
        };
        refuse(grow(Some(comm), 3, None, rank as c_int), &format!("rank {rank}: a rank of the communicator"));
        refuse(grow(Some(comm), 2, None, -1), "nranks 2: the communicator has 2 ranks already");
        refuse(grow(Some(comm), 0, None, -1), "nranks 0 is not in 1..=1024");
        refuse(grow(Some(comm), 1025, None, -1), "nranks 1025 is not in 1..=1024");
        refuse(grow(Some(comm), 3, Some(&id), -1), "made by ncclGetUniqueId");
        refuse(grow(None, 3, Some(&id), 2), "made by ncclGetUniqueId");
        refuse(grow(None, 3, None, 2), "unique_id is NULL");
        // SAFETY: a NULL place is refused, and the tokens are live.
        unsafe {
            let (comm, id) = (**comm, null_mut());
            assert_eq!(ncclCommGrow(comm, 3, null(), -1, null_mut(), null_mut()), ncclInvalidArgument);
            assert_eq!(ncclCommGetUniqueId(comm, id), ncclInvalidArgument);
            assert!(last_error().contains("unique_id is NULL"), "{}", last_error());
        }
        if rank == 0 {
            let mine = id_of(comm).unwrap();
            let (code, message) = id_of(comm).err().unwrap();
            assert_eq!(code, ncclInvalidUsage);
            assert!(message.contains("not used yet"), "{message}");
            for (nranks, rank, value) in [(3, 1, "rank 1 is not in 2..3"), (3, 3, "rank 3 is not"), (2, 2, "nranks 2")]
            {
                refuse(grow(None, nranks, Some(&mine), rank), value);
            }
            refuse(grow(None, 3, Some(&mine), -1), "rank -1 is not in 2..3");
            let (code, _) = init(3, mine, 2);
            assert_eq!(code, ncclInvalidArgument);
            assert!(last_error().contains("pass it to ncclCommGrow"), "{}", last_error());
            *made.lock().unwrap() = Some(mine);
        }
        assert_eq!(sum(comm, 1), 2);
        let other = comm.split(0, 0).unwrap();
        let mine = made.lock().unwrap().unwrap();
        // An id of another communicator.
        let (code, message) = grow(Some(&other), 3, (rank == 0).then_some(&mine), -1).err().unwrap();
        assert_eq!(code, ncclInvalidUsage, "{message}");
        assert!(message.contains("rank 0 passes a unique id that no rank of"), "{message}");
        // Both communicators can be used.
        assert_eq!((sum(comm, 1), sum(&other, 1)), (2, 2));
    });
}

#[test]
fn ranks_that_do_not_fit_together_all_learn_it() {
    let both = Barrier::new(2);
    ranks(2, |comm, rank| {
        let refuse = |outcome: Outcome, value: &str| {
            let (code, message) = outcome.err().unwrap();
            assert_eq!(code, ncclInvalidUsage, "{message}");
            assert!(message.contains(value), "{message}");
        };
        refuse(grow(Some(comm), 3, None, -1), "no rank has a unique id");
        let id = (rank == 0).then(|| id_of(comm).unwrap());
        refuse(grow(Some(comm), 3 + rank as c_int, None, -1), "rank 0 asks for 3 ranks, rank 1 for 4");
        if let Some(id) = id {
            late(&id, "rank 1 for 4");
        }
        both.wait();
        id_of(comm).unwrap();
        refuse(grow(Some(comm), 3, None, -1), "ranks 0, 1 have different unique ids");
        assert_eq!(sum(comm, 1), 2);
    });
}

#[test]
fn a_new_rank_does_not_wait_for_a_communicator_that_has_ended() {
    let all = Barrier::new(3);
    let given = Mutex::new(None);
    type End = fn(ncclComm_t) -> ncclResult_t;
    let endings: [(&str, End); 3] = [
        // SAFETY: each is given a live token once.
        ("destroyed", |comm| unsafe { ncclCommDestroy(comm) }),
        // SAFETY: as above.
        ("aborted", |comm| unsafe { ncclCommAbort(comm) }),
        // SAFETY: as above.
        ("revoked", |comm| unsafe { ncclCommRevoke(comm, 0) }),
    ];
    for (what, end) in endings {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                all.wait();
                let id = given.lock().unwrap().take().unwrap();
                let began = Instant::now();
                let (code, message) = grow(None, 3, Some(&id), 2).err().unwrap();
                assert_eq!(code, ncclRemoteError, "{message}");
                assert!(message.contains("that was to grow"), "{what}: {message}");
                assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
            });
            ranks(2, |comm, rank| {
                if rank == 0 {
                    *given.lock().unwrap() = Some(id_of(comm).unwrap());
                }
                all.wait();
                if rank == 0 {
                    std::thread::sleep(Duration::from_millis(50));
                    ok(end(**comm));
                }
            });
        });
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    // The old rank 1 does not come. It leaves once rank 0 has named it, or has failed.
    let (naming, named) = channel::<()>();
    let (naming, named) = (Mutex::new(Some(naming)), Mutex::new(named));
    ranks(2, |comm, rank| {
        if rank == 1 {
            assert!(named.lock().unwrap().recv().is_err(), "rank 0 sends nothing");
            return;
        }
        let _naming = naming.lock().unwrap().take();
        // SAFETY: the token is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 300) });
        let id = id_of(comm).unwrap();
        let (code, message) = grow(Some(comm), 3, Some(&id), -1).err().unwrap();
        assert_eq!(code, ncclTimeout, "{message}");
        assert!(message.contains("rank 1"), "{message}");
        late(&id, "rank 1");
    });
    // The new rank 2 does not come. On a busy machine, one of the others may come a second later.
    ranks(2, |comm, rank| {
        // SAFETY: the token is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 2000) });
        let id = (rank == 0).then(|| id_of(comm).unwrap());
        let (code, message) = grow(Some(comm), 3, id.as_ref(), -1).err().unwrap();
        assert!([ncclTimeout, ncclRemoteError].contains(&code), "{message}");
        assert!(message.contains("rank 2"), "{message}");
        // SAFETY: as above.
        ok(unsafe { hostcclCommSetTimeout(**comm, 0) });
        assert_eq!(sum(comm, 1), 2);
    });
}

#[test]
fn a_parent_that_ends_before_all_ranks_have_come_ends_the_growth() {
    ranks(2, |comm, rank| {
        let id = (rank == 0).then(|| id_of(comm).unwrap());
        let began = Instant::now();
        std::thread::scope(|scope| {
            let revokes = scope.spawn(|| {
                // The growth most likely waits for the new rank by then. If not, the outcome is the
                // same.
                std::thread::sleep(Duration::from_millis(200));
                // SAFETY: the token is live.
                rank == 1 && unsafe { ncclCommRevoke(**comm, NCCL_REVOKE_DEFAULT) } == ncclSuccess
            });
            let (code, message) = grow(Some(comm), 3, None, -1).err().unwrap();
            assert_eq!(code, ncclRemoteError, "{message}");
            assert!(message.contains("rank 1 (pid") && message.contains("revoked"), "{message}");
            assert_eq!(revokes.join().unwrap(), rank == 1);
        });
        if let Some(id) = id {
            late(&id, "revoked");
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    });
}

#[test]
fn in_the_background_the_new_handle_tells_when_it_is_done() {
    let (give, taken) = channel();
    let give = Mutex::new(give);
    let finish = |parent: &Comm, rank: c_int, id: Option<&ncclUniqueId>| {
        let mut nonblocking = config(0);
        let mut grown = null_mut();
        let id = id.map_or(null(), |id| &raw const *id);
        // SAFETY: there is a place for the communicator, and the configuration is whole.
        let began = unsafe { ncclCommGrow(**parent, 4, id, rank, &raw mut grown, &raw mut nonblocking) };
        assert_eq!((began, grown.is_null()), (ncclInProgress, false));
        let grown = Comm(grown);
        let mut state = ncclInProgress;
        while state == ncclInProgress {
            // SAFETY: the token is live, and there is a place for the answer.
            ok(unsafe { ncclCommGetAsyncError(*grown, &raw mut state) });
        }
        assert_eq!(state, ncclSuccess, "{}", last_error());
        assert_eq!(sum(&grown, 1), 4);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ranks(2, |comm, rank| {
                let id = (rank == 0).then(|| id_of(comm).unwrap());
                if let Some(id) = id {
                    (0..2).for_each(|_| give.lock().unwrap().send(id).unwrap());
                }
                finish(comm, -1, id.as_ref());
            });
        });
        for rank in 2..4 {
            let id = taken.recv().unwrap();
            scope.spawn(move || finish(&Comm(null_mut()), rank, Some(&id)));
        }
    });
}

#[test]
fn one_thread_grows_all_ranks_in_a_group() {
    let comms = Comm::init_all(2);
    let id = id_of(&comms[1]).unwrap();
    let mut grown: [ncclComm_t; 4] = [null_mut(); 4];
    let places = grown.as_mut_ptr();
    group(|| {
        for (rank, comm) in comms.iter().enumerate() {
            // SAFETY: each rank has a place of its own, which outlives the group.
            ok(unsafe { ncclCommGrow(**comm, 4, null(), -1, places.add(rank), null_mut()) });
        }
        for rank in 2..4 {
            // SAFETY: as above.
            ok(unsafe { ncclCommGrow(null_mut(), 4, &raw const id, rank as c_int, places.add(rank), null_mut()) });
        }
    });
    let grown: Vec<Comm> = grown.into_iter().map(Comm).collect();
    let mut totals = [0_i64; 4];
    let ones = [1_i64; 4];
    group(|| {
        for (rank, comm) in grown.iter().enumerate() {
            let (from, to) = ((&raw const ones[rank]).cast(), (&raw mut totals[rank]).cast());
            // SAFETY: each buffer has one element.
            ok(unsafe { ncclAllReduce(from, to, 1, 4, 0, **comm, null_mut()) });
        }
    });
    assert_eq!(totals, [4; 4]);
}
