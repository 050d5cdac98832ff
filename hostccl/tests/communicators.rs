//! Splits, several communicators at once, groups, one thread that drives all ranks, and
//! non-blocking calls.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::Instant;

use common::{Comm, DEADLINE, config, gather, group, last_error, ok, ranks, sum, unique_id};
use hostccl::types::*;
use hostccl::*;

const I64: c_int = DataType::Int64 as c_int;
const F32: c_int = DataType::Float32 as c_int;
const SUM: c_int = ReduceOp::Sum as c_int;

#[test]
fn a_split_groups_by_color_and_orders_by_key() {
    ranks(6, |world, rank| {
        let part = world.split(rank as c_int % 2, 0).unwrap();
        let expected: Vec<i64> = (0..6).filter(|other| other % 2 == rank as i64 % 2).collect();
        assert_eq!(gather(&part, rank as i64), expected, "equal keys keep the parent's order");
        assert_eq!((part.size(), part.rank()), (3, rank / 2));

        let reversed = world.split(7, -(rank as c_int)).unwrap();
        assert_eq!(gather(&reversed, rank as i64), [5, 4, 3, 2, 1, 0]);
        assert_eq!(reversed.rank(), 5 - rank);

        let keys = [3, c_int::MAX, -5, 3, c_int::MIN, 0];
        let mixed = world.split(0, keys[rank]).unwrap();
        assert_eq!(gather(&mixed, rank as i64), [4, 2, 5, 0, 3, 1]);
    });
}

#[test]
fn a_rank_without_color_takes_part_and_gets_null() {
    ranks(5, |world, rank| {
        let part = world.split(if rank == 2 { NCCL_SPLIT_NOCOLOR } else { c_int::MAX }, 0);
        assert_eq!(part.is_none(), rank == 2);
        if let Some(part) = part {
            assert_eq!(gather(&part, rank as i64), [0, 1, 3, 4]);
        }
        assert!(world.split(NCCL_SPLIT_NOCOLOR, 0).is_none(), "nobody may have one");
        assert_eq!(sum(world, 1), 5);
    });
}

#[test]
fn splits_can_be_split_and_outlive_their_parent() {
    ranks(8, |world, rank| {
        let half = world.split(rank as c_int / 4, 0).unwrap();
        let quarter = half.split(half.rank() as c_int / 2, -(rank as c_int)).unwrap();
        drop(half);
        let pair = rank as i64 / 2 * 2;
        assert_eq!(gather(&quarter, rank as i64), [pair + 1, pair]);
        let alone = quarter.split(quarter.rank() as c_int, 0).unwrap();
        assert_eq!((alone.size(), sum(&alone, 42)), (1, 42));
        assert_eq!(sum(world, rank as i64), 28);
    });
}

#[test]
fn many_splits_in_a_row() {
    ranks(3, |world, rank| {
        for round in 0..200 {
            let part = world.split(0, if round % 2 == 0 { 0 } else { -(rank as c_int) }).unwrap();
            assert_eq!(sum(&part, round), 3 * round);
        }
    });
}

#[test]
fn several_communicators_live_side_by_side() {
    // The rows and columns of a 2 x 3 mesh, and a second communicator of all.
    let second = unique_id();
    ranks(6, |world, rank| {
        let again = Comm::init(second, 6, 5 - rank);
        let row = world.split(rank as c_int / 3, rank as c_int).unwrap();
        let column = world.split(rank as c_int % 3, rank as c_int).unwrap();
        for round in 0..50 {
            let value = rank as i64 + round;
            let in_row = sum(&row, value);
            let in_column = sum(&column, value);
            assert_eq!(in_row, (0..6).filter(|other| other / 3 == rank as i64 / 3).map(|other| other + round).sum());
            assert_eq!(in_column, (0..6).filter(|other| other % 3 == rank as i64 % 3).map(|other| other + round).sum());
            assert_eq!(sum(&column, in_row), sum(world, value));
            assert_eq!(gather(&again, rank as i64), [5, 4, 3, 2, 1, 0]);
        }
    });
}

#[test]
fn two_communicators_may_be_used_from_two_threads_at_once() {
    ranks(3, |world, rank| {
        let other = world.split(0, 0).unwrap();
        std::thread::scope(|scope| {
            for comm in [world, &other] {
                scope.spawn(move || {
                    (0..200).for_each(|round| assert_eq!(sum(comm, rank as i64 + round), 3 + 3 * round))
                });
            }
        });
    });
}

#[test]
fn device_numbers_are_those_of_the_list() {
    let mut comms = [null_mut(); 3];
    // SAFETY: there are three places and three devices.
    ok(unsafe { ncclCommInitAll(comms.as_mut_ptr(), 3, [4, 0, 9].as_ptr()) });
    let devices = comms.map(Comm).map(|comm| {
        let mut device = -1;
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommCuDevice(*comm, &raw mut device) });
        device
    });
    assert_eq!(devices, [4, 0, 9]);
}

#[test]
fn one_thread_joins_as_all_ranks_inside_a_group() {
    let id = unique_id();
    let mut comms = [null_mut(); 3];
    group(|| {
        for (rank, comm) in comms.iter_mut().enumerate() {
            // SAFETY: a place for the communicator, which outlives the group.
            ok(unsafe { ncclCommInitRank(comm, 3, id, rank as c_int) });
        }
    });
    assert_eq!(comms.map(Comm).map(|comm| (comm.size(), comm.rank())), [(3, 0), (3, 1), (3, 2)]);
}

#[test]
fn several_ids_serve_as_well_as_one() {
    let mut ids = [unique_id(), unique_id()];
    let mut comms = [null_mut(); 2];
    group(|| {
        for (rank, comm) in comms.iter_mut().enumerate() {
            // SAFETY: there are a place for the communicator, and two ids.
            ok(unsafe { ncclCommInitRankScalable(comm, 2, rank as c_int, 2, ids.as_mut_ptr(), null_mut()) });
        }
    });
    assert_eq!(comms.map(Comm).map(|comm| comm.rank()), [0, 1]);
}

/// Polls until the communicator is ready, as the documentation of NCCL describes.
fn wait(comm: ncclComm_t) {
    let started = Instant::now();
    let mut state = ncclInProgress;
    while state == ncclInProgress {
        assert!(started.elapsed() < DEADLINE);
        std::thread::yield_now();
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommGetAsyncError(comm, &raw mut state) });
    }
    assert_eq!(state, ncclSuccess, "{}", last_error());
}

#[test]
fn communicators_can_be_made_without_blocking() {
    let id = unique_id();
    let sums: Vec<i64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    let mut config = ncclConfig_t { commName: c"pipeline".as_ptr(), ..config(0) };
                    let mut comm = null_mut();
                    // SAFETY: there is a place for the communicator, and the configuration is
                    // whole.
                    let result = unsafe { ncclCommInitRankConfig(&raw mut comm, 3, id, rank, &raw mut config) };
                    assert!(result == ncclInProgress || result == ncclSuccess, "{}", last_error());
                    wait(comm);
                    let comm = Comm(comm);
                    // The split inherits `blocking`. So the parent is polled, and then the new
                    // communicator is there.
                    let mut part = null_mut();
                    // SAFETY: a place for the communicator, which lives until the split is done.
                    let result = unsafe { ncclCommSplit(*comm, 0, -rank, &raw mut part, null_mut()) };
                    assert!(result == ncclInProgress || result == ncclSuccess, "{}", last_error());
                    wait(*comm);
                    let part = Comm(part);
                    wait(*part);
                    assert_eq!(part.rank(), 2 - rank as usize);
                    sum(&part, i64::from(rank)) + sum(&comm, 10)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sums, [33; 3]);
}

#[test]
fn a_rank_multiplies_by_its_own_scalar_before_the_sum() {
    let of_size = |size: usize| {
        move |comm: &Comm, rank: usize| {
            let value = &[3_i64, 5, -7][..size];
            let expected: Vec<i64> = value.iter().map(|value| value * (1..=size as i64).sum::<i64>()).collect();
            let mut scalar = rank as i64 + 1;
            for residence in [ncclScalarHostImmediate, ncclScalarDevice] {
                let mut op = -1;
                let place = (&raw mut scalar).cast();
                // SAFETY: there is a place for the operator, and the scalar outlives it.
                ok(unsafe { ncclRedOpCreatePreMulSum(&raw mut op, place, I64, residence, **comm) });
                let mut total = vec![0_i64; size];
                let (from, to) = (value.as_ptr().cast(), total.as_mut_ptr().cast());
                // SAFETY: each buffer has `size` elements.
                ok(unsafe { ncclAllReduce(from, to, size, I64, op, **comm, null_mut()) });
                assert_eq!(total, expected);
                let mut part = 0_i64;
                // SAFETY: the send buffer has an element for every rank, and the receive buffer has
                // one.
                ok(unsafe { ncclReduceScatter(from, (&raw mut part).cast(), 1, I64, op, **comm, null_mut()) });
                assert_eq!(part, total[rank]);
                // SAFETY: the operator is live.
                ok(unsafe { ncclRedOpDestroy(op, **comm) });
            }
        }
    };
    ranks(2, of_size(2));
    ranks(3, of_size(3));
    // One rank multiplies as well. In f32 the scalar need not be an integer.
    ranks(1, |comm, _| {
        let (mut scalar, value, mut op, mut result) = (0.25_f32, 6.0_f32, -1, 0.0_f32);
        // SAFETY: there are places for the operator, the scalar and the elements.
        unsafe {
            let place = (&raw mut scalar).cast();
            ok(ncclRedOpCreatePreMulSum(&raw mut op, place, F32, ncclScalarHostImmediate, **comm));
            let (from, to) = ((&raw const value).cast(), (&raw mut result).cast());
            ok(ncclAllReduce(from, to, 1, F32, op, **comm, null_mut()));
        }
        assert_eq!(result, 1.5);
    });
}

#[test]
fn memory_comes_aligned_and_registration_is_accepted() {
    let comm = &Comm::init_all(1)[0];
    let (mut memory, mut handle) = (null_mut(), null_mut());
    // SAFETY: there are places for the answers, and the memory has the size that was asked for.
    unsafe {
        ok(ncclMemAlloc(&raw mut memory, 10_000));
        assert_eq!(memory.addr() % libc::sysconf(libc::_SC_PAGESIZE) as usize, 0);
        memory.cast::<u8>().write_bytes(1, 10_000);
        ok(ncclCommRegister(**comm, memory, 10_000, &raw mut handle));
        ok(ncclCommDeregister(**comm, handle));
        ok(ncclMemFree(memory));
        ok(ncclMemFree(null_mut()));
    }
}

#[test]
fn a_finalized_communicator_is_only_destroyed() {
    ranks(2, |comm, _| {
        assert_eq!(sum(comm, 1), 2);
        // SAFETY: the communicator is live, and the buffer has one element.
        unsafe {
            ok(ncclCommFinalize(**comm));
            let mut value = 1_i64;
            let place = (&raw mut value).cast::<c_void>();
            assert_ne!(ncclAllReduce(place, place, 1, I64, SUM, **comm, null_mut()), ncclSuccess);
            assert!(last_error().contains("finalized"), "{}", last_error());
        }
    });
}

/// A split begins as soon as the non-blocking init of its parent is done. The end of the init must
/// not be taken for the end of the split.
#[test]
fn a_split_may_follow_a_non_blocking_init_at_once() {
    for _ in 0..50 {
        let id = unique_id();
        std::thread::scope(|scope| {
            for rank in 0..4 {
                scope.spawn(move || {
                    let mut config = config(0);
                    let (mut comm, mut part) = (null_mut(), null_mut());
                    // SAFETY: the places and the configuration outlive the calls, because the test
                    // waits for their end.
                    unsafe {
                        ncclCommInitRankConfig(&raw mut comm, 4, id, rank, &raw mut config);
                        wait(comm);
                        ncclCommSplit(comm, rank % 2, rank, &raw mut part, null_mut());
                    }
                    wait(comm);
                    let (comm, part) = (Comm(comm), Comm(part));
                    assert_eq!((comm.size(), part.size()), (4, 2));
                });
            }
        });
    }
}

#[test]
fn a_communicator_in_the_making_has_a_timeout_too_and_names_who_is_missing() {
    let mut config = config(0);
    let (mut comm, mut state, mut lost) = (null_mut(), ncclInProgress, -1);
    let started = Instant::now();
    // SAFETY: the communicator is live, and there are places for the answers.
    unsafe {
        assert_eq!(ncclCommInitRankConfig(&raw mut comm, 3, unique_id(), 1, &raw mut config), ncclInProgress);
        ok(hostcclCommSetTimeout(comm, 200));
        while state == ncclInProgress && started.elapsed() < DEADLINE {
            std::thread::sleep(std::time::Duration::from_millis(1));
            ok(ncclCommGetAsyncError(comm, &raw mut state));
        }
        ok(hostcclCommLostRank(comm, &raw mut lost));
        assert_eq!((state, lost), (ncclTimeout, 0));
        assert!(last_error().ends_with("ranks 0, 2 did not come within 200 ms"), "{}", last_error());
        assert!((200..20_000).contains(&started.elapsed().as_millis()), "{:?}", started.elapsed());
        ok(ncclCommAbort(comm));
    }
}

#[test]
fn waiting_for_what_is_in_progress_ends_when_it_has_ended_or_the_time_is_up() {
    let (id, over) = (unique_id(), std::sync::Barrier::new(2));
    let join = |rank| {
        let mut config = config(0);
        let mut comm = null_mut();
        // SAFETY: there is a place for the communicator.
        unsafe { assert_eq!(ncclCommInitRankConfig(&raw mut comm, 2, id, rank, &raw mut config), ncclInProgress) };
        comm
    };
    // SAFETY: the communicators are live, and there are places for the answers.
    let wait = |comm, millis| unsafe {
        let (mut state, started) = (-1, Instant::now());
        ok(hostcclCommWait(comm, millis, &raw mut state));
        (state, started.elapsed())
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let comm = join(0);
            let (state, took) = wait(comm, 50);
            assert_eq!(state, ncclInProgress);
            assert!(took.as_millis() >= 50, "{took:?}");
            assert_eq!(wait(comm, 0).0, ncclInProgress);
            over.wait();
            let (state, took) = wait(comm, 2 * DEADLINE.as_millis() as i64);
            assert_eq!(state, ncclSuccess);
            assert!(took < DEADLINE, "{took:?}: its time, not the end of the work, ended the wait");
            over.wait();
            // SAFETY: the communicator is live.
            ok(unsafe { ncclCommDestroy(comm) });
        });
        over.wait();
        let comm = join(1);
        assert_eq!(wait(comm, 60_000).0, ncclSuccess);
        over.wait();
        let mut state = -1;
        // SAFETY: the communicator is live, and there is a place for the answer.
        unsafe {
            assert_eq!(hostcclCommWait(comm, -1, &raw mut state), ncclInvalidArgument);
            assert!(last_error().contains("timeout_ms -1 is negative"), "{}", last_error());
            ok(ncclCommDestroy(comm));
        }
    });
}

/// Ranks 0 and 1 of three receive with a time of so many milliseconds, and rank 2 makes no call.
/// Rank 0 waits for rank 2, and rank 1 waits for rank 0. Returns the result, the lost rank and the
/// message of each rank.
fn in_vain(millis: i64) -> Vec<(ncclResult_t, c_int, String)> {
    let (begin, over) = (std::sync::Barrier::new(3), std::sync::Barrier::new(3));
    ranks(3, |comm, rank| {
        let (mut value, mut lost, mut told) = (0.0_f32, -1, String::new());
        let mut result = ncclTimeout;
        // SAFETY: the communicator is live.
        ok(unsafe { hostcclCommSetTimeout(comm.0, millis) });
        begin.wait();
        if rank < 2 {
            // SAFETY: the communicator is live, the buffer has one element, and there is a place
            // for the answer.
            unsafe {
                result = ncclRecv((&raw mut value).cast(), 1, F32, (rank as c_int + 2) % 3, comm.0, null_mut());
                told = last_error();
                ok(hostcclCommLostRank(comm.0, &raw mut lost));
            }
        }
        // No rank leaves while others wait for it.
        over.wait();
        (result, lost, told)
    })
}

/// On a busy machine, a rank may begin its call when the time of the other one is up already. It is
/// told then that the communicator has failed earlier, and the ranks get more time.
#[test]
fn when_the_time_is_up_each_rank_names_whom_it_waits_for_itself() {
    let has_come_late =
        |ranks: &[(ncclResult_t, c_int, String)]| ranks.iter().any(|(.., told)| told.contains("failed earlier"));
    let mut millis = 200;
    let mut ranks = in_vain(millis);
    while has_come_late(&ranks) && millis < 20_000 {
        millis *= 2;
        ranks = in_vain(millis);
    }
    for (rank, (result, lost, told)) in ranks.iter().enumerate() {
        assert_eq!(*result, ncclTimeout, "{told}");
        assert!(rank == 2 || told.contains(&format!(": rank {lost} ")), "{told}");
    }
    assert_eq!([ranks[0].1, ranks[1].1, ranks[2].1], [2, 0, -1]);
}
