//! Calls that differ between ranks, on one host or on several.

use super::data::{case, ragged_count};
use super::{Args, Random, Ranks, call};
use crate::blocks::Block;
use crate::call_name::Name;
use crate::collective::{Kind, Reduction};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::types::*;
use std::sync::Arc;

const HOSTS: [&[&[usize]]; 3] = [&[&[0], &[1], &[2]], &[&[0, 2], &[1, 3]], &[&[0, 3, 4], &[1], &[2]]];

/// Makes a call whose result does not matter.
fn make(comm: &Arc<Comm>, args: &Args) -> Result<()> {
    let (me, n) = comm.whole();
    let case = case(args, me, n);
    let mut recv = vec![0_u8; (case.recv_len + 1) * args.dtype.size()];
    // SAFETY: the buffers have the sizes that the case says.
    unsafe { call(comm, args, case.send.as_ptr(), recv.as_mut_ptr(), case.blocks.clone(), Name::NONE) }
}

/// Checks that all ranks have one message and blame one set of ranks.
fn check(errors: &[Error], message: &str, blame: &[usize]) {
    for error in errors {
        assert_eq!((error.code(), error.blame().ranks.as_slice()), (ncclInvalidUsage, blame), "{}", error.message());
        assert!(error.message().ends_with(message), "{} and not {message}", error.message());
    }
}

#[test]
fn a_rank_with_another_call_is_found_by_all_ranks() {
    let sum = Some(Reduction::Plain(ReduceOp::Sum));
    let usual = Args { kind: Kind::AllReduce, count: 40, dtype: DataType::Float32, reduction: sum, root: None };
    let broadcast = Args { kind: Kind::Broadcast, reduction: None, root: Some(0), ..usual.clone() };
    let cases = [
        (usual.clone(), Args { count: 41, ..usual.clone() }, "ncclAllReduce(41 x float32, sum)"),
        (usual.clone(), Args { count: 2_000_000, ..usual.clone() }, "ncclAllReduce(2000000 x float32, sum)"),
        (usual.clone(), Args { dtype: DataType::Int32, ..usual.clone() }, "ncclAllReduce(40 x int32, sum)"),
        (usual.clone(), Args { kind: Kind::ReduceScatter, ..usual.clone() }, "ncclReduceScatter(40 x float32, sum)"),
        (broadcast.clone(), Args { root: Some(1), ..broadcast.clone() }, "ncclBroadcast(40 x float32, root 1)"),
        (
            Args { count: 300_000, ..usual.clone() },
            Args { kind: Kind::AllGatherV, reduction: None, count: 0, ..usual.clone() },
            "hostcclAllGatherv(float32)",
        ),
    ];
    let mut random = Random(3);
    for (usual, other, text) in &cases {
        let hosts = random.of(&HOSTS);
        let ranks = Ranks::new(hosts);
        let odd = 1 + random.next(ranks.ends.len() - 1);
        let errors = ranks.errors(|me, comm| make(comm, if me == odd { other } else { usual }));
        check(&errors, &format!(", rank {odd} calls {text}"), &[odd]);
        let message = "the ranks make different calls: rank 0 calls nccl";
        errors.iter().for_each(|error| assert!(error.message().contains(message), "{}", error.message()));
    }
}

#[test]
fn calls_that_gather_in_different_ways_are_found_by_all_ranks() {
    let sum = Some(Reduction::Plain(ReduceOp::Sum));
    let usual = Args { kind: Kind::AllReduce, count: 4, dtype: DataType::Float32, reduction: sum, root: None };
    // In the ring, in a direct exchange, and with data behind the meeting.
    let counts = [4, 2_000, 100_000];
    let singles: [&[usize]; 9] = [&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7], &[8]];
    let mut random = Random(11);
    for turn in 0..60 {
        let hosts: &[&[usize]] = match turn % 4 {
            0 => &singles[..random.of(&[8, 9])],
            1 => &[&[0, 3], &[1], &[2, 4], &[5]],
            _ => &singles[..3 + random.next(3)],
        };
        let ranks = Ranks::new(hosts);
        let n = ranks.ends.len();
        let mut calls: Vec<usize> = (0..n).map(|_| random.of(&counts)).collect();
        if calls.iter().all(|count| *count == calls[0]) {
            calls[n - 1] = counts[counts.iter().position(|count| *count != calls[0]).unwrap()];
        }
        let errors = ranks.errors(|me, comm| make(comm, &Args { count: calls[me], ..usual.clone() }));
        let other = calls.iter().position(|count| *count != calls[0]).unwrap();
        let call = |rank: usize| format!("rank {rank} calls ncclAllReduce({} x float32, sum)", calls[rank]);
        let message = format!("the ranks make different calls: {}, {}", call(0), call(other));
        for error in errors {
            assert_eq!(error.code(), ncclInvalidUsage, "{hosts:?} {calls:?}: {}", error.message());
            assert!(error.message().contains(&message), "{hosts:?} {calls:?}: {}", error.message());
        }
    }
}

#[test]
fn a_count_that_one_rank_sends_and_another_does_not_expect_is_found_by_all_ranks() {
    for (hosts, (from, to)) in HOSTS.into_iter().zip([(0, 2), (3, 1), (4, 0)]) {
        let ranks = Ranks::new(hosts);
        let n = ranks.ends.len();
        let args = Args { kind: Kind::AllToAllV, count: 30, dtype: DataType::Int32, reduction: None, root: None };
        let list = |counts: Vec<usize>| -> Vec<Block> {
            let mut start = 0;
            let block = |count| {
                start += count;
                Block { start: start - count, count }
            };
            counts.into_iter().map(block).collect()
        };
        let errors = ranks.errors(|me, comm| {
            let mut sends: Vec<usize> = (0..n).map(|to| ragged_count(&args, me, to)).collect();
            if me == from {
                sends[to] += 1;
            }
            let recvs: Vec<usize> = (0..n).map(|from| ragged_count(&args, from, me)).collect();
            let (send, mut recv) = (vec![0_i32; 1000], vec![0_i32; 1000]);
            let blocks = Some((list(sends), list(recvs)));
            // SAFETY: both buffers are long enough.
            unsafe { call(comm, &args, send.as_ptr().cast(), recv.as_mut_ptr().cast(), blocks, Name::NONE) }
        });
        let expected = ragged_count(&args, from, to);
        let message = format!(
            "the ranks give different counts to hostcclAlltoAllv: rank {from} has {} x int32 for rank {to}, which expects {expected} x int32 from it",
            expected + 1
        );
        let mut blame = [from, to];
        blame.sort_unstable();
        check(&errors, &message, &blame);
    }
}
