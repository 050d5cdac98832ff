//! Collectives under several names. The ranks may issue them in any order.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Comm, ok, ranks};
use crate::named::{KINDS, Numbers, all_reduce, call_and_check, calls_of, name};
use hostccl::*;

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
