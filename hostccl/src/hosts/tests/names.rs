//! Calls under different names, which threads of the ranks make in different orders.

use std::sync::Arc;

use super::{Args, Ranks, call, name, sum};
use crate::call_name::Name;
use crate::collective::{Kind, Reduction};
use crate::comm::Comm;
use crate::error::Result;
use crate::types::{DataType, ReduceOp, ncclInvalidUsage};

#[test]
fn names_in_any_order_on_any_host_all_make_progress() {
    let names = ["tp", "ep", "dp"];
    for hosts in [&[&[0][..], &[1]][..], &[&[0, 2], &[1, 3]], &[&[1, 3], &[0, 4], &[2]]] {
        let ranks = Ranks::new(hosts);
        let n = ranks.ends.len() as u64;
        ranks.run(|me, comm| {
            std::thread::scope(|scope| {
                for turn in 0..names.len() {
                    let which = (turn + me) % names.len();
                    scope.spawn(move || {
                        for round in 0..6 {
                            let number = (round * 10 + which) as u64;
                            assert_eq!(sum(comm, number, name(names[which])).unwrap(), n * number);
                        }
                    });
                }
            });
        });
    }
}

/// Sums `count` numbers over the ranks, under a name. Checks the result.
fn sum_many(comm: &Arc<Comm>, count: usize, under: Name) -> Result<()> {
    let (me, n) = comm.whole();
    let reduction = Some(Reduction::Plain(ReduceOp::Sum));
    let args = Args { kind: Kind::AllReduce, count, dtype: DataType::Uint64, reduction, root: None };
    let mut numbers = vec![me as u64; count];
    // SAFETY: the numbers outlive the call, which is in place.
    unsafe { call(comm, &args, numbers.as_ptr().cast(), numbers.as_mut_ptr().cast(), None, under)? };
    assert!(numbers.iter().all(|number| *number == (n * (n - 1) / 2) as u64), "{count} numbers along {under:?}");
    Ok(())
}

#[test]
fn names_of_calls_that_gather_in_different_ways_make_progress() {
    // In the ring, in a direct exchange, and with data behind the meeting.
    let calls = [("tp", 1), ("ep", 2_000), ("dp", 20_000)];
    for hosts in [&[&[0][..], &[1], &[2]][..], &[&[0, 1], &[2], &[3]], &[&[0], &[1], &[2], &[3], &[4]]] {
        let ranks = Ranks::new(hosts);
        ranks.run(|me, comm| {
            std::thread::scope(|scope| {
                for turn in 0..calls.len() {
                    let (along, count) = calls[(turn + me) % calls.len()];
                    scope.spawn(move || (0..4).for_each(|_| sum_many(comm, count, name(along)).unwrap()));
                }
            });
        });
    }
}

#[test]
fn names_that_never_meet_end_at_the_deadline_with_both_calls() {
    for hosts in [&[&[0][..], &[1]][..], &[&[0, 2], &[1, 3]]] {
        let ranks = Ranks::new(hosts);
        // On a busy machine, a rank may come a second later than the others.
        ranks.ends.iter().for_each(|end| end.set_timeout(1_500));
        let n = ranks.ends.len();
        let one = |me: usize, comm: &Arc<Comm>| -> Result<()> {
            sum(comm, 1, name(if me + 1 == n { "ep" } else { "tp" })).map(drop)
        };
        for error in ranks.errors(one) {
            assert_eq!(error.code(), ncclInvalidUsage, "{}", error.message());
            let calls = format!(
                "rank 0 is in ncclAllReduce(1 x uint64, sum) along tp, rank {} in ncclAllReduce(1 x uint64, sum) along ep",
                n - 1
            );
            assert!(error.message().contains(&calls), "{}", error.message());
        }
    }
}

#[test]
fn two_calls_under_one_name_at_a_time_are_refused() {
    let ranks = Ranks::new(&[&[0], &[1]]);
    let comm = &ranks.ends[0];
    let error = std::thread::scope(|scope| {
        let calls = [0, 1].map(|_| scope.spawn(|| sum(comm, 1, name("tp")).unwrap_err()));
        calls.map(|call| call.join().unwrap())
    });
    for error in error {
        assert!(
            error.message().contains("two threads of rank 0 call along tp at the same time"),
            "{}",
            error.message()
        );
    }
}
