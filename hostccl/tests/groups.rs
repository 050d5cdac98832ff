//! Messages and groups: orders that would deadlock without a group, and one thread that drives all
//! ranks.

mod common;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use common::{Comm, config, gather, group, last_error, ok, ranks, state_of, sum};
use hostccl::types::*;
use hostccl::*;

const I64: c_int = DataType::Int64 as c_int;
const F32: c_int = DataType::Float32 as c_int;
const SUM: c_int = ReduceOp::Sum as c_int;

/// Returns elements that name their sender, their receiver and their index.
fn letter(from: usize, to: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| (from * 1_000_000_000 + to * 100_000_000 + i) as i64).collect()
}

fn send(comm: &Comm, data: &[i64], to: usize) {
    // SAFETY: the slice holds that many elements.
    ok(unsafe { ncclSend(data.as_ptr().cast(), data.len(), I64, to as c_int, **comm, null_mut()) });
}

fn recv(comm: &Comm, data: &mut [i64], from: usize) {
    // SAFETY: the slice has room for that many elements.
    ok(unsafe { ncclRecv(data.as_mut_ptr().cast(), data.len(), I64, from as c_int, **comm, null_mut()) });
}

/// More elements than the ring buffer between two ranks holds, so that a send has to wait for its
/// receive.
const LONG: usize = 300_000;

#[test]
fn plain_sends_and_receives_pass_along_a_chain() {
    ranks(4, |comm, rank| {
        let mut data = letter(0, 1, LONG);
        if rank > 0 {
            data.fill(0);
            recv(comm, &mut data, rank - 1);
        }
        if rank < 3 {
            send(comm, &data, rank + 1);
        }
        assert_eq!(data, letter(0, 1, LONG));
    });
}

#[test]
fn all_pairs_exchange_in_orders_that_would_deadlock_one_by_one() {
    for size in [2, 5] {
        ranks(size, |comm, rank| {
            let letters: Vec<_> = (0..size).map(|to| letter(rank, to, LONG / size + to)).collect();
            let mut boxes: Vec<_> = (0..size).map(|_| vec![0; LONG / size + rank]).collect();
            group(|| {
                // Each rank sends in an order of its own, to itself as well, and then receives in
                // the opposite order.
                (0..size).for_each(|step| send(comm, &letters[(rank + step) % size], (rank + step) % size));
                for (from, place) in boxes.iter_mut().enumerate().rev() {
                    recv(comm, place, from);
                }
            });
            for (from, place) in boxes.iter().enumerate() {
                assert!(*place == letter(from, rank, LONG / size + rank), "from {from} to {rank} of {size}");
            }
        });
    }
}

#[test]
fn messages_between_two_ranks_arrive_in_their_order() {
    ranks(2, |comm, rank| {
        let lengths = [3, 0, LONG, 1, 70_000];
        let mut received: Vec<_> = lengths.iter().map(|&len| vec![0; len]).collect();
        let sent: Vec<_> = lengths.iter().map(|&len| letter(rank, 1 - rank, len)).collect();
        group(|| {
            group(|| sent.iter().for_each(|data| send(comm, data, 1 - rank)));
            received.iter_mut().for_each(|place| recv(comm, place, 1 - rank));
        });
        assert!(received.iter().zip(lengths).all(|(place, len)| *place == letter(1 - rank, rank, len)));
    });
}

#[test]
fn a_rank_gets_its_own_messages_on_the_communicator_where_it_sent_them() {
    let [first, second] = [Comm::init_all(1), Comm::init_all(1)].map(|mut comms| comms.remove(0));
    let mut got = [0; 4].map(|_: i32| vec![0; 2]);
    group(|| {
        let [one, two, three, four] = &mut got;
        recv(&second, three, 0);
        send(&first, &[1, 2], 0);
        recv(&first, one, 0);
        send(&second, &[5, 6], 0);
        send(&first, &[3, 4], 0);
        send(&second, &[7, 8], 0);
        recv(&second, four, 0);
        recv(&first, two, 0);
    });
    assert_eq!(got, [[1, 2], [3, 4], [5, 6], [7, 8]]);

    // The group has as many sends as receives, but on different communicators.
    // SAFETY: the group is ended below.
    ok(unsafe { ncclGroupStart() });
    send(&first, &[1, 2], 0);
    recv(&second, &mut got[0], 0);
    // SAFETY: the group has been started.
    assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
    // The error names either communicator.
    let expected = ["1 sent and 0 received", "0 sent and 1 received"];
    let told = last_error();
    assert!(expected.iter().any(|count| told.contains(&format!("to itself in one group: {count}"))), "{told}");
    assert!(told.ends_with("; nothing of this group was performed"), "{told}");
}

#[test]
fn a_rank_gets_its_own_messages_by_their_names() {
    let comm = Comm::init_all(1).remove(0);
    let named = |tag: u64, text: &CStr| {
        // SAFETY: the text is a C string.
        ok(unsafe { hostcclNextCallName(tag, text.as_ptr()) });
    };
    let [mut tp, mut dp] = [vec![0; 2], vec![0; 3]];
    group(|| {
        named(1, c"tp");
        send(&comm, &[1, 2], 0);
        named(2, c"dp");
        send(&comm, &[3, 4, 5], 0);
        named(2, c"dp");
        recv(&comm, &mut dp, 0);
        named(1, c"tp");
        recv(&comm, &mut tp, 0);
    });
    assert_eq!((tp, dp), (vec![1, 2], vec![3, 4, 5]));

    // SAFETY: the group is ended below.
    ok(unsafe { ncclGroupStart() });
    named(1, c"tp");
    send(&comm, &[1], 0);
    named(2, c"dp");
    recv(&comm, &mut [0], 0);
    // SAFETY: the group has been started.
    assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
    assert!(last_error().contains("to itself along tp in one group: 1 sent and 0 received"), "{}", last_error());
}

#[test]
fn a_shrink_of_a_group_that_performs_nothing_ends_nothing() {
    let comms = Comm::init_all(2);
    let (mut list, mut shrunk) = ([1], null_mut());
    // SAFETY: the place outlives the call, because the group fails. The wrong call uses no buffer.
    unsafe {
        ok(ncclGroupStart());
        ok(ncclCommShrink(*comms[0], list.as_mut_ptr(), 1, &raw mut shrunk, null_mut(), NCCL_SHRINK_ABORT));
        assert_ne!(ncclAllReduce(null_mut(), null_mut(), 4, F32, SUM, *comms[0], null_mut()), ncclSuccess);
        assert_eq!(ncclGroupEnd(), ncclInvalidArgument);
    }
    assert!(last_error().ends_with("; nothing of this group was performed"), "{}", last_error());
    assert_eq!(state_of(&comms[0]), ncclSuccess, "{}", last_error());
}

#[test]
fn a_group_that_fails_on_one_communicator_says_that_the_others_were_used() {
    let (broken, sound) = (Comm::init_all(2), Comm::init_all(2));
    let (mut wrong, mut right) = ([1.0_f32; 4], [[1.0_f32; 2]; 2]);
    let reduce = |comm: &Comm, data: &mut [f32], count: usize| {
        let at = data.as_mut_ptr().cast();
        // SAFETY: the buffer holds `count` elements, and outlives the group.
        ok(unsafe { ncclAllReduce(at, at, count, F32, SUM, **comm, null_mut()) });
    };
    // SAFETY: the group is ended below.
    ok(unsafe { ncclGroupStart() });
    for (rank, data) in right.iter_mut().enumerate() {
        let (one, other) = wrong.split_at_mut(2);
        reduce(&broken[rank], if rank == 0 { one } else { other }, 1 + rank);
        reduce(&sound[rank], data, 2);
    }
    // SAFETY: the group has been started.
    assert_eq!(unsafe { ncclGroupEnd() }, ncclInvalidUsage);
    let told = last_error();
    assert!(told.contains("the calls of this group on other communicators were performed"), "{told}");
    assert_eq!(right, [[2.0; 2]; 2]);
}

#[test]
fn a_message_to_itself_that_fails_leaves_the_calls_on_other_communicators() {
    let (broken, sound) = (Comm::init_all(1), Comm::init_all(2));
    let (sent, mut place, mut data) = ([1; 3], [0; 4], [[1.0_f32]; 2]);
    // SAFETY: all buffers hold what the calls say, and outlive the group, which is ended here.
    let ended = unsafe {
        ok(ncclGroupStart());
        send(&broken[0], &sent, 0);
        recv(&broken[0], &mut place, 0);
        for (comm, data) in sound.iter().zip(&mut data) {
            let at = data.as_mut_ptr().cast();
            ok(ncclAllReduce(at, at, 1, F32, SUM, **comm, null_mut()));
        }
        ncclGroupEnd()
    };
    assert_eq!(ended, ncclInvalidUsage);
    let told = last_error();
    assert!(told.contains("the calls of this group on other communicators were performed"), "{told}");
    assert_eq!(data, [[2.0]; 2]);
    assert_eq!(state_of(&broken[0]), ncclInvalidUsage);
    assert_eq!(state_of(&sound[0]), ncclSuccess, "{}", last_error());
}

#[test]
fn a_message_to_itself_without_its_receive_leaves_a_non_blocking_split_undone() {
    let comms = Comm::init_all(2);
    let (mut config, mut part) = (config(0), null_mut());
    // SAFETY: the place outlives the call, because the group fails.
    unsafe {
        ok(ncclGroupStart());
        ok(ncclCommSplit(*comms[0], 0, 0, &raw mut part, &raw mut config));
        send(&comms[0], &[1], 0);
        assert_eq!(ncclGroupEnd(), ncclInvalidUsage);
    }
    assert!(last_error().ends_with("; nothing of this group was performed"), "{}", last_error());
    assert_eq!(state_of(&comms[0]), ncclSuccess, "{}", last_error());
}

#[test]
fn collectives_and_messages_mix_in_one_group() {
    ranks(3, |comm, rank| {
        let other = comm.split(0, -(rank as c_int)).unwrap();
        let mut values = vec![rank as i64; LONG];
        let mut totals = [0_i64; 2];
        let mut received = vec![0; LONG];
        let sent = letter(rank, 0, LONG);
        let one = rank as i64 + 1;
        group(|| {
            // SAFETY: all buffers outlive the group and hold what the calls say.
            unsafe {
                let data = values.as_mut_ptr().cast::<c_void>();
                let one = (&raw const one).cast::<c_void>();
                let at = totals.as_mut_ptr();
                ok(ncclAllReduce(data, data, LONG, I64, SUM, **comm, null_mut()));
                recv(comm, &mut received, (rank + 1) % 3);
                ok(ncclAllReduce(one, at.cast(), 1, I64, SUM, *other, null_mut()));
                ok(ncclAllReduce(one, at.add(1).cast(), 1, I64, ReduceOp::Max as c_int, **comm, null_mut()));
                send(comm, &sent, (rank + 2) % 3);
            }
        });
        assert!(values.iter().all(|&value| value == 3));
        assert_eq!(totals, [6, 3]);
        assert_eq!(received, letter((rank + 1) % 3, 0, LONG));
    });
}

#[test]
fn one_thread_drives_all_ranks() {
    const SIZE: usize = 5;
    let comms = Comm::init_all(SIZE);
    for (rank, comm) in comms.iter().enumerate() {
        let mut device = -1;
        // SAFETY: there is a place for the answer.
        ok(unsafe { ncclCommCuDevice(**comm, &raw mut device) });
        assert_eq!((comm.size(), comm.rank(), device), (SIZE, rank, rank as c_int));
    }
    for len in [1, 1000, 400_000] {
        let mut data: Vec<Vec<f32>> = (0..SIZE).map(|rank| vec![rank as f32; len]).collect();
        group(|| {
            for (comm, data) in comms.iter().zip(&mut data) {
                let data = data.as_mut_ptr().cast::<c_void>();
                // SAFETY: the vector holds `len` elements and outlives the group.
                ok(unsafe { ncclAllReduce(data, data, len, F32, SUM, **comm, null_mut()) });
            }
        });
        assert!(data.iter().flatten().all(|&value| value == 10.0), "{len}");
    }
    let mut parts = [null_mut(); SIZE];
    group(|| {
        for (rank, (comm, part)) in comms.iter().zip(&mut parts).enumerate() {
            // SAFETY: a place for the communicator, which outlives the group.
            ok(unsafe { ncclCommSplit(**comm, rank as c_int % 2, -(rank as c_int), part, null_mut()) });
        }
    });
    let parts = parts.map(Comm);
    let places: Vec<_> = parts.iter().map(|part| (part.size(), part.rank())).collect();
    assert_eq!(places, [(3, 2), (2, 1), (3, 1), (2, 0), (3, 0)]);
}

#[test]
fn a_collective_and_a_split_of_one_communicator_share_a_group() {
    for blocks in [1, 0] {
        ranks(2, |comm, rank| {
            let (mut config, mut part) = (config(blocks), null_mut());
            let (mut before, mut after) = ([rank as i64 + 1; 3], [rank as i64 + 10; 3]);
            // SAFETY: the places outlive the group and the split, because the test waits for both.
            unsafe {
                let (first, second) = (before.as_mut_ptr().cast(), after.as_mut_ptr().cast());
                ok(ncclGroupStart());
                ok(ncclAllReduce(first, first, 3, I64, SUM, **comm, null_mut()));
                ok(ncclCommSplit(**comm, 0, -(rank as c_int), &raw mut part, &raw mut config));
                ok(ncclAllReduce(second, second, 3, I64, SUM, **comm, null_mut()));
                let ended = ncclGroupEnd();
                assert!([ncclSuccess, ncclInProgress].contains(&ended), "{ended}: {}", last_error());
            }
            assert_eq!(state_of(comm), ncclSuccess, "{}", last_error());
            assert_eq!((before, after), ([3; 3], [21; 3]));
            assert_eq!(gather(&Comm(part), rank as i64), [1, 0]);
            assert_eq!(sum(comm, 1), 2);
        });
    }
}

#[test]
fn a_non_blocking_split_of_a_group_that_fails_leaves_the_parent_as_it_was() {
    let start_and_split = |comm: ncclComm_t, part: &mut ncclComm_t| {
        let mut config = config(0);
        // SAFETY: the place outlives the call, because the group fails.
        unsafe {
            ok(ncclGroupStart());
            ok(ncclCommSplit(comm, 0, 0, part, &raw mut config));
            let mut list = [1];
            ok(ncclCommShrink(comm, list.as_mut_ptr(), 1, part, &raw mut config, NCCL_SHRINK_DEFAULT));
        }
    };
    let comms = Comm::init_all(2);
    let comm = &comms[0];
    let mut part = null_mut();
    for way in ["a wrong call", "hostcclGroupFail"] {
        match way {
            // SAFETY: the handle is live, and the call is refused before it uses the buffers.
            "a wrong call" => unsafe {
                start_and_split(**comm, &mut part);
                assert_ne!(ncclAllReduce(null_mut(), null_mut(), 4, F32, SUM, **comm, null_mut()), ncclSuccess);
                assert_eq!(ncclGroupEnd(), ncclInvalidArgument);
                assert!(last_error().ends_with("; nothing of this group was performed"), "{}", last_error());
            },
            // SAFETY: the text is a C string.
            _ => unsafe {
                start_and_split(**comm, &mut part);
                ok(hostcclGroupFail(c"not now".as_ptr()));
                assert_ne!(ncclGroupEnd(), ncclSuccess);
            },
        }
        assert_eq!(state_of(comm), ncclSuccess, "after {way}: {}", last_error());
        assert!(part.is_null());
    }
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let comm = &comms[rank];
            scope.spawn(move || gather(&comm.split(0, 0).unwrap(), rank as i64))
        });
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), [0, 1]));
    });
    // Nobody gets an error when the thread ends inside the group, so the parent fails for all
    // ranks.
    let mut lost = Comm(null_mut());
    std::thread::scope(|scope| {
        let place = &mut lost;
        let thread = scope.spawn(move || {
            let place = place;
            start_and_split(**comm, &mut place.0);
        });
        thread.join().unwrap();
    });
    assert_eq!((state_of(comm), state_of(&comms[1])), (ncclInvalidUsage, ncclInvalidUsage));
}

#[test]
fn an_init_in_a_group_that_a_thread_leaves_open_does_not_touch_the_callers_place_later() {
    let mut comm = Comm(null_mut());
    let id = common::unique_id();
    std::thread::scope(|scope| {
        let comm = &mut comm;
        let thread = scope.spawn(move || {
            let comm = comm;
            // SAFETY: there is a place for the communicator.
            unsafe {
                ok(ncclGroupStart());
                ok(ncclCommInitRank(&raw mut comm.0, 2, id, 0));
            }
        });
        thread.join().unwrap();
    });
    assert!(!comm.is_null(), "the end of the thread wrote to the place, which might be gone");
    let mut size = 0;
    // SAFETY: there is a place for the answer.
    assert_eq!(unsafe { ncclCommCount(*comm, &raw mut size) }, ncclInvalidArgument, "the token is dead");
}
