//! Calls of several threads on one communicator. Calls under different names pair name by name.
//! Calls under one name are refused.

mod common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Comm, group, last_error, ok, ranks};
use hostccl::types::*;
use hostccl::*;

const I64: c_int = DataType::Int64 as c_int;
const SUM: c_int = ReduceOp::Sum as c_int;

/// Calls a function of the engine under a name: `called!(3, ncclAllReduce(...))`.
macro_rules! called {
    ($name:expr, $call:expr) => {{
        let (tag, text) = name($name);
        // SAFETY: the name has 32 bytes; the arguments of the call are valid for what it reads and
        // writes.
        unsafe {
            ok(hostcclNextCallName(tag, text.as_ptr().cast()));
            $call
        }
    }};
}

fn name(number: usize) -> (u64, [u8; 32]) {
    let mut text = [0; 32];
    let written = format!("dim{number}");
    text[..written.len()].copy_from_slice(written.as_bytes());
    (0x1234_5678_9abc + number as u64, text)
}

/// A sequence of random-looking numbers, which depends on the seed alone.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % below as u64) as usize
    }
}

/// Returns element `i` of the input of `rank` in the call of that seed.
fn element(seed: usize, rank: usize, i: usize) -> i64 {
    (seed * 1_000_003 + rank * 10_007 + i) as i64
}

fn input(seed: usize, rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| element(seed, rank, i)).collect()
}

/// Makes one call of any kind under a name, and checks every element. All ranks pass one seed.
fn call_and_check(comm: &Comm, under: usize, seed: usize, kind: usize, count: usize) {
    let (size, rank, root) = (comm.size(), comm.rank(), (seed % comm.size()) as c_int);
    let (whole, is_root) = (count * size, rank == root as usize);
    let sum = |i: usize| (0..size).map(|rank| element(seed, rank, i)).sum::<i64>();
    let send = input(seed, rank, whole);
    let mut recv = vec![-1; whole];
    let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    let of = |rank: usize, block: usize| (0..count).map(move |i| element(seed, rank, block * count + i));
    let expected: Vec<i64> = match kind {
        0 => {
            ok(called!(under, ncclAllReduce(from, to, whole, I64, SUM, **comm, null_mut())));
            (0..whole).map(sum).collect()
        }
        1 => {
            ok(called!(under, ncclAllGather(from, to, count, I64, **comm, null_mut())));
            (0..size).flat_map(|rank| of(rank, 0)).collect()
        }
        2 => {
            ok(called!(under, ncclReduceScatter(from, to, count, I64, SUM, **comm, null_mut())));
            (rank * count..(rank + 1) * count).map(sum).collect()
        }
        3 => {
            ok(called!(under, ncclBroadcast(from, to, whole, I64, root, **comm, null_mut())));
            input(seed, root as usize, whole)
        }
        4 => {
            ok(called!(under, ncclScatter(from, to, count, I64, root, **comm, null_mut())));
            of(root as usize, rank).collect()
        }
        5 => {
            ok(called!(under, ncclGather(from, to, count, I64, root, **comm, null_mut())));
            if is_root { (0..size).flat_map(|rank| of(rank, 0)).collect() } else { Vec::new() }
        }
        6 => {
            ok(called!(under, ncclAlltoAll(from, to, count, I64, **comm, null_mut())));
            (0..size).flat_map(|other| of(other, rank)).collect()
        }
        7 => {
            ok(called!(under, ncclReduce(from, to, whole, I64, SUM, root, **comm, null_mut())));
            if is_root { (0..whole).map(sum).collect() } else { Vec::new() }
        }
        _ => {
            // Two sums and a ring of messages in one group.
            let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
            let (mut sums, mut more) = (vec![0; count], vec![0; count]);
            group(|| {
                ok(called!(under, ncclAllReduce(from, sums.as_mut_ptr().cast(), count, I64, SUM, **comm, null_mut())));
                ok(called!(under, ncclSend(from, whole, I64, next as c_int, **comm, null_mut())));
                ok(called!(under, ncclRecv(to, whole, I64, before as c_int, **comm, null_mut())));
                ok(called!(under, ncclAllReduce(from, more.as_mut_ptr().cast(), count, I64, SUM, **comm, null_mut())));
            });
            assert_eq!(sums, (0..count).map(sum).collect::<Vec<_>>(), "sums in a group under name {under}");
            assert_eq!(more, sums, "the second sums in a group under name {under}");
            input(seed, before, whole)
        }
    };
    assert_eq!(recv[..expected.len()], expected, "kind {kind}, {count} elements, under name {under}, rank {rank}");
}

const KINDS: usize = 9;

/// Makes the calls of one name in their order, with pauses that differ between ranks.
fn calls_of(comm: &Comm, under: usize, calls: usize, pauses: &mut Numbers) {
    let mut numbers = Numbers(under as u64);
    for call in 0..calls {
        let kind = numbers.next(KINDS);
        // Most calls are small, and some have several chunks.
        let count = if numbers.next(6) == 0 { 40_000 + numbers.next(60_000) } else { numbers.next(2000) };
        match pauses.next(5) {
            0 => std::thread::sleep(Duration::from_micros(pauses.next(300) as u64)),
            1 => std::thread::yield_now(),
            _ => {}
        }
        call_and_check(comm, under, under * 1000 + call, kind, count);
    }
}

#[test]
fn each_name_pairs_for_itself_whatever_the_order_of_the_threads() {
    for (size, names, calls) in [(2, 2, 300), (2, 4, 150), (3, 3, 100), (4, 2, 120), (8, 3, 40)] {
        ranks(size, |comm, rank| {
            std::thread::scope(|scope| {
                for under in 0..names {
                    scope.spawn(move || {
                        calls_of(comm, under, calls, &mut Numbers((rank * 100 + under) as u64));
                    });
                }
            });
        });
    }
}

#[test]
fn a_thread_for_each_name_meets_one_thread_that_calls_them_in_turn() {
    // Ranks 0 and 1 have a thread for each name. Rank 2 makes these calls one after another, in an
    // order of its own.
    const CALLS: usize = 60;
    ranks(3, |comm, rank| {
        let kind = |under: usize, call: usize| (under + call) % KINDS;
        let one = |under: usize, call: usize| call_and_check(comm, under, under * 1000 + call, kind(under, call), 700);
        std::thread::scope(|scope| {
            if rank == 2 {
                for call in 0..CALLS {
                    [[0, 1, 2], [2, 0, 1]][call % 2].iter().for_each(|under| one(*under, call));
                }
            } else {
                (0..3).for_each(|under| {
                    scope.spawn(move || (0..CALLS).for_each(|call| one(under, call)));
                });
            }
        });
    });
}

#[test]
fn a_name_that_another_name_waits_for_on_one_rank_goes_first() {
    // Rank 1 calls under the second name only after the first one, whichever name rank 0 begins
    // with. The calls end, as they would on two communicators.
    for _ in 0..50 {
        let order = AtomicUsize::new(0);
        ranks(2, |comm, rank| {
            let call = |under| call_and_check(comm, under, under, 0, 10);
            if rank == 1 {
                while order.load(Ordering::SeqCst) == 0 {
                    std::thread::yield_now();
                }
                call(0);
                call(1);
                return;
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    order.store(1, Ordering::SeqCst);
                    call(1);
                });
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(500));
                    call(0);
                });
            });
        });
    }
}

#[test]
fn splits_and_calls_share_a_communicator() {
    ranks(4, |comm, rank| {
        std::thread::scope(|scope| {
            scope.spawn(move || calls_of(comm, 0, 100, &mut Numbers(rank as u64)));
            scope.spawn(move || {
                for turn in 0..20 {
                    let mut half = null_mut();
                    ok(called!(1, ncclCommSplit(**comm, (rank % 2) as c_int, 0, &raw mut half, null_mut())));
                    call_and_check(&Comm(half), 7, turn, turn % KINDS, 50);
                }
            });
        });
    });
}

#[test]
fn messages_of_two_names_between_two_ranks_find_their_receivers() {
    ranks(2, |comm, rank| {
        std::thread::scope(|scope| {
            for under in 0..3 {
                scope.spawn(move || {
                    for turn in 0..100 {
                        let seed = under * 1000 + turn;
                        let mut data = input(seed, rank, 1 + turn * 37);
                        let (at, count) = (data.as_mut_ptr(), data.len());
                        if rank == 0 {
                            ok(called!(under, ncclSend(at.cast(), count, I64, 1, **comm, null_mut())));
                        } else {
                            ok(called!(under, ncclRecv(at.cast(), count, I64, 0, **comm, null_mut())));
                            assert_eq!(data, input(seed, 0, count));
                        }
                    }
                });
            }
        });
    });
}

/// Sends `count` elements to rank 1, or receives them from rank 0 and checks them.
fn message(comm: &Comm, rank: usize, under: usize, seed: usize, count: usize) {
    let mut data = if rank == 0 { input(seed, 0, count) } else { vec![-1; count] };
    let at = data.as_mut_ptr().cast();
    if rank == 0 {
        ok(called!(under, ncclSend(at, count, I64, 1, **comm, null_mut())));
    } else {
        ok(called!(under, ncclRecv(at, count, I64, 0, **comm, null_mut())));
    }
    assert_eq!(data, input(seed, 0, count), "{count} elements under name {under}");
}

/// How many elements fill the ring between two ranks (256 KiB) several times.
const LONG: usize = 100_000;

#[test]
fn one_thread_receives_what_threads_send_in_whatever_order_it_wants() {
    const CALLS: usize = 100;
    for names in [2, 4] {
        ranks(2, |comm, rank| {
            let count = |under: usize, call: usize| if (under + call) % 16 == 0 { LONG } else { 1 + call * 37 };
            let one = |under, call| message(comm, rank, under, under * 1000 + call, count(under, call));
            let mut numbers = Numbers(names as u64);
            std::thread::scope(|scope| {
                if rank == 0 {
                    (0..names)
                        .for_each(|under| drop(scope.spawn(move || (0..CALLS).for_each(|call| one(under, call)))));
                    return;
                }
                let mut left = vec![CALLS; names];
                while left.iter().any(|calls| *calls > 0) {
                    let under = numbers.next(names);
                    if left[under] > 0 {
                        one(under, CALLS - left[under]);
                        left[under] -= 1;
                    }
                }
            });
        });
    }
}

#[test]
fn one_thread_sends_in_whatever_order_it_wants_to_threads_that_receive() {
    const CALLS: usize = 100;
    ranks(2, |comm, rank| {
        let one = |under, call| message(comm, rank, under, under * 1000 + call, 1 + call * 37);
        std::thread::scope(|scope| {
            if rank == 0 {
                for call in 0..CALLS {
                    [[0, 1, 2], [2, 0, 1], [1, 2, 0]][call % 3].iter().for_each(|under| one(*under, call));
                }
            } else {
                (0..3).for_each(|under| drop(scope.spawn(move || (0..CALLS).for_each(|call| one(under, call)))));
            }
        });
    });
}

#[test]
fn a_receive_that_waits_behind_another_name_is_sent_first_when_it_alone_can_be() {
    // Rank 0 begins with sends under the names 0 and 1, and rank 1 with receives under the names 2
    // and 1. The other calls are made only when the message under the name 1 is done.
    for _ in 0..30 {
        let second = AtomicUsize::new(0);
        let past = || {
            while second.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        };
        ranks(2, |comm, rank| {
            let one = |under| message(comm, rank, under, under, 500);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    if rank == 1 {
                        past();
                    }
                    one(0);
                });
                scope.spawn(|| {
                    one(1);
                    second.store(1, Ordering::SeqCst);
                });
                scope.spawn(|| {
                    if rank == 0 {
                        past();
                    }
                    one(2);
                });
            });
        });
    }
}

#[test]
fn a_ring_of_messages_under_several_names_ends_whatever_each_rank_begins_with() {
    // Each channel has a message of one name in front while its receiver waits for one of another
    // name.
    const CALLS: usize = 40;
    ranks(3, |comm, rank| {
        std::thread::scope(|scope| {
            if rank == 0 {
                (0..CALLS).for_each(|call| (0..3).for_each(|under| call_and_check(comm, under, call, 8, 300)));
            } else {
                for under in 0..3 {
                    let mut pauses = Numbers((rank * 10 + under) as u64);
                    scope.spawn(move || {
                        for call in 0..CALLS {
                            std::thread::sleep(Duration::from_micros(pauses.next(200) as u64));
                            call_and_check(comm, under, call, 8, 300);
                        }
                    });
                }
            }
        });
    });
}

/// Runs `body` on two ranks and returns their errors, each a code and its text.
fn errors_of(body: impl Fn(&Comm, usize) -> ncclResult_t + Sync) -> Vec<(ncclResult_t, String)> {
    ranks(2, |comm, rank| {
        // SAFETY: the communicator is live.
        ok(unsafe { hostcclCommSetTimeout(**comm, 700) });
        let code = body(comm, rank);
        (code, if code == ncclSuccess { String::new() } else { last_error() })
    })
}

fn all_reduce(comm: &Comm, under: usize) -> ncclResult_t {
    let mut data = [1_i64; 4];
    let at = data.as_mut_ptr().cast();
    called!(under, ncclAllReduce(at, at, 4, I64, SUM, **comm, null_mut()))
}

#[test]
fn ranks_that_stay_with_different_names_hear_of_both() {
    for (code, message) in errors_of(all_reduce) {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected = "rank 0 is in ncclAllReduce(4 x int64, sum) along dim0, rank 1 in ncclAllReduce(4 x int64, sum) along dim1, which share one communicator";
        assert!(message.contains(expected) && message.contains("DM_DIM_OWN_COMM"), "{message}");
    }
}

#[test]
fn a_message_under_another_name_is_told_to_both_sides() {
    let errors = errors_of(|comm, rank| {
        let mut data = [0_i64; 4];
        let at = data.as_mut_ptr().cast();
        match rank {
            0 => called!(0, ncclSend(at, 4, I64, 1, **comm, null_mut())),
            _ => called!(1, ncclRecv(at, 4, I64, 0, **comm, null_mut())),
        }
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        let expected =
            "rank 0 sends to rank 1 along dim0, where rank 1 receives along dim1, which share one communicator";
        assert!(message.contains(expected), "{message}");
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
fn threads_hand_one_name_over() {
    ranks(2, |comm, _| {
        for _ in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| ok(all_reduce(comm, 0)));
            });
            ok(all_reduce(comm, 0));
        }
    });
}

#[test]
fn both_sides_that_send_first_are_told_to_use_a_group() {
    let errors = errors_of(|comm, rank| {
        let data = [0_i64; 4];
        called!(0, ncclSend(data.as_ptr().cast(), 4, I64, 1 - rank as c_int, **comm, null_mut()))
    });
    for (code, message) in errors {
        assert_eq!(code, ncclInvalidUsage, "{message}");
        assert!(message.contains("both send to each other and neither receives"), "{message}");
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
fn buffers_that_overlap_otherwise_than_in_place_are_refused() {
    ranks(3, |comm, rank| {
        const N: usize = 20_000;
        let mut memory = vec![1_i64; 4 * N * 3];
        let base = memory.as_mut_ptr();
        // SAFETY: all offsets are inside the vector.
        let at = |element: usize| unsafe { base.add(element) };
        let (root, stream) = (rank as c_int, null_mut());
        let (a, b) = (at(0).cast::<std::ffi::c_void>(), at(7).cast::<std::ffi::c_void>());
        let own = at(rank * N).cast::<std::ffi::c_void>();
        // SAFETY: all buffers are inside the vector.
        let refused = unsafe {
            [
                ncclAllReduce(a, b, N, I64, SUM, **comm, stream),
                ncclReduce(a, b, N, I64, SUM, root, **comm, stream),
                ncclBroadcast(a, b, N, I64, root, **comm, stream),
                ncclAllGather(b, a, N, I64, **comm, stream),
                ncclGather(b, a, N, I64, root, **comm, stream),
                ncclReduceScatter(a, b, N, I64, SUM, **comm, stream),
                ncclScatter(a, b, N, I64, root, **comm, stream),
                ncclAlltoAll(a, b, N, I64, **comm, stream),
            ]
        };
        assert_eq!(refused, [ncclInvalidArgument; 8]);
        assert!(last_error().contains("overlap, but not as in place"), "{}", last_error());
        // SAFETY: as above. The buffers are exactly in place, so no call is refused.
        unsafe {
            ok(ncclAllReduce(a, a, N, I64, SUM, **comm, stream));
            ok(ncclAllGather(own, a, N, I64, **comm, stream));
            ok(ncclReduceScatter(a, own, N, I64, SUM, **comm, stream));
            ok(ncclAlltoAll(a, a, N, I64, **comm, stream));
            ok(ncclGather(own, a, N, I64, 0, **comm, stream));
            ok(ncclScatter(a, own, N, I64, 0, **comm, stream));
        }
    });
}

#[test]
fn one_rank_may_wait_under_more_names_than_it_can_show() {
    // One rank has a thread for each name. The other one calls under these names one by one, and
    // begins with the name that the first rank shows last.
    const NAMES: usize = 40;
    for many in [0, 1] {
        let waiting = AtomicUsize::new(0);
        let waiting = &waiting;
        ranks(2, |comm, rank| {
            // SAFETY: the communicator is live.
            ok(unsafe { hostcclCommSetTimeout(**comm, 10_000) });
            if rank == many {
                std::thread::scope(|scope| {
                    for under in 0..NAMES {
                        while waiting.load(Ordering::SeqCst) != under {
                            std::thread::yield_now();
                        }
                        scope.spawn(move || {
                            waiting.fetch_add(1, Ordering::SeqCst);
                            call_and_check(comm, under, under, 0, 10);
                        });
                        std::thread::sleep(Duration::from_millis(2));
                    }
                });
                return;
            }
            while waiting.load(Ordering::SeqCst) < NAMES {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            (0..NAMES).rev().for_each(|under| call_and_check(comm, under, under, 0, 10));
        });
    }
}

#[test]
fn all_ranks_may_wait_under_more_names_than_they_can_show() {
    // Each rank has a thread for each of its names, and shows the names that began first. The only
    // common names begin last on rank 0 and first or last on the others. Each rank makes the calls
    // of the others when all common ones are done.
    const NAMES: usize = 40;
    for common_first in [false, true] {
        ranks(3, |comm, rank| {
            // SAFETY: the communicator is live.
            ok(unsafe { hostcclCommSetTimeout(**comm, 60_000) });
            let own = |of: usize| (of + 1) * 1000..(of + 1) * 1000 + NAMES;
            let mut mine: Vec<usize> = own(rank).chain(0..4).collect();
            if common_first && rank > 0 {
                mine.reverse();
            }
            let (began, common_done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for under in mine {
                    let before = began.load(Ordering::SeqCst);
                    let (began, common_done) = (&began, &common_done);
                    scope.spawn(move || {
                        began.fetch_add(1, Ordering::SeqCst);
                        call_and_check(comm, under, under, 0, 10);
                        common_done.fetch_add(usize::from(under < 4), Ordering::SeqCst);
                    });
                    while began.load(Ordering::SeqCst) == before {
                        std::thread::yield_now();
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                while common_done.load(Ordering::SeqCst) < 4 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                for of in (0..3).filter(|of| *of != rank) {
                    for under in own(of) {
                        scope.spawn(move || call_and_check(comm, under, under, 0, 10));
                    }
                }
            });
        });
    }
}
