//! The results of all collectives.

use std::sync::Arc;

use plain::small;

use super::super::plan::Small;
use super::data::{Case, case, random_hosts};
use super::{Args, Random, Ranks, call, of_args};
use crate::call_name::Name;
use crate::collective::{Kind, Reduction};
use crate::progress;
use crate::rails::Limits;
use crate::setup::ChildOperation;
use crate::split::SpanSplit;
use crate::types::{DataType, ReduceOp};

/// The byte that fills a receive buffer before the call.
const UNSET: u8 = 0x5a;

const KINDS: [Kind; 11] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Gather,
    Kind::Scatter,
    Kind::AllToAllV,
    Kind::AllGatherV,
    Kind::ReduceScatterV,
];

/// Returns random arguments.
pub(super) fn random_args(random: &mut Random, n: usize) -> Args {
    let kind = random.of(&KINDS);
    let dtype = random.of(&DataType::ALL);
    let rooted = matches!(kind, Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Scatter);
    let reduces = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV);
    let mut scalar = [0; 8];
    scalar[..dtype.size()].copy_from_slice(&small::encode(dtype, 2.0));
    let reduction = match random.next(6) {
        5 => Reduction::PreMulSum(scalar),
        op => Reduction::Plain(ReduceOp::ALL[op]),
    };
    let most = 40_000 / dtype.size();
    let count = match random.next(6) {
        0 => random.next(3),
        1 | 2 => random.next(700),
        3 => random.next(9000 / n),
        _ => random.next(most),
    };
    Args { kind, count, dtype, reduction: reduces.then_some(reduction), root: rooted.then(|| random.next(n)) }
}

/// Performs a call on a rank, and returns its receive buffer.
pub(super) fn perform(comm: &std::sync::Arc<crate::comm::Comm>, args: &Args, case: &Case, in_place: bool) -> Vec<u8> {
    let size = args.dtype.size();
    let place = case.in_place.filter(|_| in_place);
    // Room for both buffers, wherever one begins in the other.
    let before = place.map_or(0, |place| place.max(0) as usize);
    let behind = place.map_or(0, |place| (-place).max(0) as usize);
    let len = case.recv_len.max(case.send.len() / size) + before + behind;
    let mut memory = vec![UNSET; (len + 1) * size];
    let recv = memory.as_mut_ptr().wrapping_add(behind * size);
    let mut own = case.send.clone();
    let send = match place {
        None => own.as_mut_ptr().cast_const(),
        Some(_) => {
            memory[before * size..][..own.len()].copy_from_slice(&own);
            memory.as_ptr().wrapping_add(before * size)
        }
    };
    // SAFETY: the buffers have the sizes that the case says.
    unsafe { call(comm, args, send, recv, case.blocks.clone(), Name::NONE).unwrap() };
    memory[behind * size..][..case.recv_len * size].to_vec()
}

/// Compares a result with that of a plain loop.
pub(super) fn check(args: &Args, case: &Case, got: &[u8], in_place: bool, what: &str) {
    let is_average = matches!(args.reduction, Some(Reduction::Plain(ReduceOp::Avg)));
    let unset = (!in_place).then_some(UNSET);
    if let Some(complaint) = small::complaint(args.dtype, got, &case.expected, unset, is_average) {
        panic!("{what}: {complaint}");
    }
}

#[test]
fn all_collectives_have_the_results_of_a_plain_loop() {
    for seed in 0..12 {
        let mut random = Random(seed * 77 + 5);
        let hosts = random_hosts(&mut random);
        let lists: Vec<&[usize]> = hosts.iter().map(Vec::as_slice).collect();
        let ranks = Ranks::new(&lists);
        let n = ranks.ends.len();
        let calls: Vec<(Args, bool)> = (0..16).map(|_| (random_args(&mut random, n), random.next(3) == 0)).collect();
        ranks.run(|me, comm| {
            for (number, (args, in_place)) in calls.iter().enumerate() {
                let case = case(args, me, n);
                let what = format!("seed {seed}, {hosts:?}, call {number} {args:?}, rank {me}, in place {in_place}");
                let got = perform(comm, args, &case, *in_place);
                check(args, &case, &got, *in_place, &what);
            }
        });
    }
}

#[test]
fn large_data_is_cut_by_the_limits_with_which_programs_run() {
    let Limits { contribution, message, reduction, broadcast, .. } = Limits::PRODUCT;
    let ranks = Ranks::with(&[&[0, 2], &[1]], Limits::PRODUCT);
    let sum = Some(Reduction::Plain(ReduceOp::Sum));
    // Each call has some bytes more than fit into one piece.
    let calls = [
        (Kind::AllReduce, contribution, sum, None),
        (Kind::AllReduce, reduction, sum, None),
        (Kind::Broadcast, broadcast, None, Some(2)),
        (Kind::AllGather, message, None, None),
        (Kind::AllToAll, 4 * message / 3, None, None),
        (Kind::ReduceScatter, reduction / 3, sum, None),
    ];
    ranks.run(|me, comm| {
        for (kind, bytes, reduction, root) in calls {
            let args = Args { kind, count: bytes / 8 + 5, dtype: DataType::Float64, reduction, root };
            let case = case(&args, me, 3);
            check(&args, &case, &perform(comm, &args, &case, false), false, &format!("{args:?}, rank {me}"));
        }
    });
}

#[test]
fn a_gathered_result_that_is_longer_than_a_slot_travels_in_the_meeting() {
    let ranks = Ranks::new(&[&[0], &[1], &[2], &[3]]);
    ranks.run(|me, comm| {
        for (count, in_place) in [16_383, 16_384, 16_385].into_iter().flat_map(|count| [(count, false), (count, true)])
        {
            let args = Args { kind: Kind::AllGather, count, dtype: DataType::Uint8, reduction: None, root: None };
            let case = case(&args, me, 4);
            let got = perform(comm, &args, &case, in_place);
            check(&args, &case, &got, in_place, &format!("{count} bytes, rank {me}, in place {in_place}"));
        }
    });
}

#[test]
fn a_result_that_is_longer_than_a_slot_of_a_split_does_not_go_through_the_slot() {
    let all: Vec<usize> = (0..20).collect();
    let whole = Ranks::with(&[&all[..16], &all[16..18], &all[18..]], Limits::PRODUCT);
    // Ranks 0 and 1 share a split with the ranks of the two small hosts. Their slots are as small
    // as those of the other 14 ranks of their host.
    let children = whole.run(|me, comm| {
        let color = i32::from((2..16).contains(&me));
        let mut split =
            SpanSplit::new(comm.clone(), (color, 0), "part".to_owned(), Arc::default(), Name::NONE).unwrap();
        progress::run(&mut split).unwrap();
        (color == 0).then(|| split.joined().unwrap())
    });
    let ranks = Ranks { ends: children.into_iter().flatten().collect(), wires: Vec::new() };
    let slot = ranks.ends[0].segment.layout().slot_bytes;
    ranks.run(|me, comm| {
        for count in [slot / 6 - 64, slot / 6, slot / 5] {
            let args = Args { kind: Kind::AllGather, count, dtype: DataType::Uint8, reduction: None, root: None };
            let is_small = Small::of(&of_args(&args), comm).is_some();
            assert_eq!(is_small, count * 6 <= slot - 128, "{count} bytes, slots of {slot}");
            let case = case(&args, me, 6);
            check(&args, &case, &perform(comm, &args, &case, false), false, &format!("{count} bytes, rank {me}"));
        }
    });
}
