//! Messages between two ranks under several names, which share one channel.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Comm, ok, ranks};
use crate::named::{I64, Numbers, call_and_check, name};
use hostccl::*;
use plain::numbers::{input, unset};

#[test]
fn messages_of_two_names_between_two_ranks_find_their_receivers() {
    ranks(2, |comm, rank| {
        std::thread::scope(|scope| {
            for under in 0..3 {
                scope.spawn(move || {
                    for turn in 0..100 {
                        let seed = under * 1000 + turn;
                        let mut data = input(seed, rank, 0, 1 + turn * 37);
                        let (at, count) = (data.as_mut_ptr(), data.len());
                        if rank == 0 {
                            ok(called!(under, ncclSend(at.cast(), count, I64, 1, **comm, null_mut())));
                        } else {
                            ok(called!(under, ncclRecv(at.cast(), count, I64, 0, **comm, null_mut())));
                            assert_eq!(data, input(seed, 0, 0, count));
                        }
                    }
                });
            }
        });
    });
}

/// Sends `count` elements to rank 1, or receives them from rank 0 and checks them.
fn message(comm: &Comm, rank: usize, under: usize, seed: usize, count: usize) {
    let mut data = if rank == 0 { input(seed, 0, 0, count) } else { unset(count) };
    let at = data.as_mut_ptr().cast();
    if rank == 0 {
        ok(called!(under, ncclSend(at, count, I64, 1, **comm, null_mut())));
    } else {
        ok(called!(under, ncclRecv(at, count, I64, 0, **comm, null_mut())));
    }
    assert_eq!(data, input(seed, 0, 0, count), "{count} elements under name {under}");
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
