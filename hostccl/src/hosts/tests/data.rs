//! The cases of the tests: what each rank sends, and the results that a plain loop computes.

use plain::small;

use super::{Args, Random};
use crate::blocks::Block;
use crate::collective::{Kind, Reduction};
use crate::types::ReduceOp;

/// The data that a rank sends and expects in one case, and the result that it must get.
pub(super) struct Case {
    /// The send buffer.
    pub(super) send: Vec<u8>,
    /// The length of the receive buffer in elements.
    pub(super) recv_len: usize,
    /// The blocks of both buffers, where each rank has a count of its own.
    pub(super) blocks: Option<(Vec<Block>, Vec<Block>)>,
    /// The block of the send buffer, and that of the receive buffer, that are one memory in a call
    /// in place: where the send buffer begins in the receive buffer, in elements (may be negative).
    pub(super) in_place: Option<isize>,
    /// The expected elements of the receive buffer; `None` where nothing is written.
    pub(super) expected: Vec<Option<f64>>,
}

/// The counts of a call in which each rank has its own: what `from` sends to `to`.
pub(super) fn ragged_count(args: &Args, from: usize, to: usize) -> usize {
    let scale = |seed: usize| args.count * (seed % 4) / 3;
    match args.kind {
        Kind::AllToAllV => scale(from * 5 + to * 3),
        Kind::AllGatherV => scale(from + 1),
        _ => scale(to + 2),
    }
}

/// Returns `count` reduced elements of what all ranks have for `to`.
fn reduced(args: &Args, ranks: usize, to: usize, count: usize, most: usize) -> Vec<Option<f64>> {
    let (op, factor) = match args.reduction {
        Some(Reduction::PreMulSum(_)) => (ReduceOp::Sum, 2.0),
        Some(Reduction::Plain(op)) => (op, 1.0),
        None => unreachable!(),
    };
    small::reduced(args.dtype, op, factor, ranks, to, count, most)
}

/// Returns the case of `me` among `n` ranks.
pub(super) fn case(args: &Args, me: usize, n: usize) -> Case {
    let Args { kind, count, dtype, root, .. } = args.clone();
    // Products and sums of such values are exact in every type.
    let most = match args.reduction {
        Some(Reduction::Plain(ReduceOp::Prod)) => 2,
        Some(_) if dtype.size() == 1 => 2,
        _ => 5,
    };
    let is_root = root == Some(me);
    let block = |rank: usize| small::values(rank, 0, count, most);
    let to = |from: usize, to: usize| small::values(from, to, count, most);
    let over = |to: usize| reduced(args, n, to, count, most);
    let case = |send, expected: Vec<Option<f64>>, in_place| Case {
        send,
        recv_len: expected.len(),
        blocks: None,
        in_place,
        expected,
    };
    let gathered = || (0..n).map(block).collect::<Vec<_>>().concat();
    let own = || small::encoded(dtype, me, 0, count, most);
    let parts = || (0..n).map(|to| small::encoded(dtype, me, to, count, most)).collect::<Vec<_>>().concat();
    match kind {
        Kind::AllReduce => case(own(), over(0), Some(0)),
        Kind::Reduce => {
            let result = if is_root { over(0) } else { Vec::new() };
            case(own(), result, is_root.then_some(0))
        }
        Kind::Broadcast => {
            let root = root.unwrap();
            case(if is_root { own() } else { Vec::new() }, block(root), is_root.then_some(0))
        }
        Kind::AllGather => case(own(), gathered(), Some((me * count) as isize)),
        Kind::Gather if is_root => case(own(), gathered(), Some((me * count) as isize)),
        Kind::Gather => case(own(), Vec::new(), None),
        Kind::Scatter => {
            let send = if is_root { parts() } else { Vec::new() };
            let place = is_root.then_some(-((me * count) as isize));
            case(send, to(root.unwrap(), me), place)
        }
        Kind::AllToAll => case(parts(), (0..n).map(|from| to(from, me)).collect::<Vec<_>>().concat(), Some(0)),
        Kind::ReduceScatter => {
            let result = over(me);
            case(parts(), result, Some(-((me * count) as isize)))
        }
        Kind::Split | Kind::Grow => unreachable!(),
        Kind::AllToAllV | Kind::AllGatherV | Kind::ReduceScatterV => ragged(args, me, n, most),
    }
}

/// Returns blocks with gaps between them, in another order than that of the ranks.
fn with_gaps(counts: &[usize]) -> (Vec<Block>, usize) {
    let mut next = 3;
    let mut blocks = vec![Block { start: 0, count: 0 }; counts.len()];
    for rank in (0..counts.len()).rev() {
        blocks[rank] = Block { start: next, count: counts[rank] };
        next += counts[rank] + 1;
    }
    (blocks, next)
}

fn ragged(args: &Args, me: usize, n: usize, most: usize) -> Case {
    let (kind, dtype) = (args.kind, args.dtype);
    let counts = |of: &dyn Fn(usize) -> usize| (0..n).map(of).collect::<Vec<_>>();
    let one = |count: usize| (vec![Block { start: 0, count }; n], count);
    let (sends, send_len) = match kind {
        Kind::AllGatherV => one(ragged_count(args, me, 0)),
        _ => with_gaps(&counts(&|to| ragged_count(args, me, to))),
    };
    let (recvs, recv_len) = match kind {
        Kind::ReduceScatterV => one(ragged_count(args, 0, me)),
        _ => with_gaps(&counts(&|from| ragged_count(args, from, me))),
    };
    let size = dtype.size();
    let mut send = vec![0; send_len * size];
    let to_whom = |to: usize| if kind == Kind::AllGatherV { 0 } else { to };
    for (to, block) in sends.iter().enumerate() {
        let bytes = small::encoded(dtype, me, to_whom(to), block.count, most);
        send[block.start * size..][..bytes.len()].copy_from_slice(&bytes);
    }
    let mut expected = vec![None; recv_len];
    for (from, block) in recvs.iter().enumerate() {
        let values = match kind {
            Kind::ReduceScatterV => reduced(args, n, me, block.count, most),
            _ => small::values(from, to_whom(me), block.count, most),
        };
        expected[block.start..][..block.count].copy_from_slice(&values);
    }
    let in_place = match kind {
        Kind::AllGatherV => Some(recvs[me].start as isize),
        Kind::ReduceScatterV => Some(-(sends[me].start as isize)),
        _ => None,
    };
    Case { send, recv_len, blocks: Some((sends, recvs)), in_place, expected }
}

/// Returns hosts of random sizes, whose ranks may have any numbers.
pub(super) fn random_hosts(random: &mut Random) -> Vec<Vec<usize>> {
    let hosts = 2 + random.next(3);
    let mut sizes: Vec<usize> = (0..hosts).map(|_| 1 + random.next(4)).collect();
    if random.next(2) == 0 {
        sizes = vec![1 + random.next(3); hosts];
    }
    let n: usize = sizes.iter().sum();
    let mut ranks: Vec<usize> = (0..n).collect();
    if random.next(2) == 0 {
        for index in (1..n).rev() {
            ranks.swap(index, random.next(index + 1));
        }
    }
    let mut lists: Vec<Vec<usize>> = sizes.iter().map(|size| ranks.drain(..*size).collect()).collect();
    lists.iter_mut().for_each(|list| list.sort_unstable());
    lists.sort();
    lists
}
