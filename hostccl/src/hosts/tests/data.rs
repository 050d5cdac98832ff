//! Elements of all types with small values, and the results that a plain loop computes.

use super::{Args, Random};
use crate::blocks::Block;
use crate::collective::{Kind, Reduction};
use crate::types::{DataType, ReduceOp};

/// Returns the bytes of a small number that the type holds exactly.
pub(super) fn encode(dtype: DataType, value: f64) -> Vec<u8> {
    let bits = (value as f32).to_bits();
    // The exponent with another bias, and the upper bits of the mantissa.
    let small = |bias: u32, mantissa: u32| match value {
        0.0 => 0,
        _ => (((bits >> 23) - 127 + bias) << mantissa) | ((bits & 0x7f_ffff) >> (23 - mantissa)),
    };
    match dtype {
        DataType::Int8 => (value as i64 as i8).to_ne_bytes().into(),
        DataType::Uint8 => (value as i64 as u8).to_ne_bytes().into(),
        DataType::Int32 => (value as i32).to_ne_bytes().into(),
        DataType::Uint32 => (value as u32).to_ne_bytes().into(),
        DataType::Int64 => (value as i64).to_ne_bytes().into(),
        DataType::Uint64 => (value as u64).to_ne_bytes().into(),
        DataType::Float16 => (small(15, 10) as u16).to_ne_bytes().into(),
        DataType::Bfloat16 => (small(127, 7) as u16).to_ne_bytes().into(),
        DataType::Float32 => (value as f32).to_ne_bytes().into(),
        DataType::Float64 => value.to_ne_bytes().into(),
        DataType::Float8E4M3 => vec![small(7, 3) as u8],
        DataType::Float8E5M2 => vec![small(15, 2) as u8],
    }
}

/// Returns the number that an element has.
pub(super) fn decode(dtype: DataType, at: &[u8]) -> f64 {
    let small = |bits: u32, bias: i32, mantissa: u32| {
        let (exponent, fraction) = (bits >> mantissa, bits & ((1 << mantissa) - 1));
        match exponent {
            0 => f64::from(fraction) * 2_f64.powi(1 - bias - mantissa as i32),
            _ => (1.0 + f64::from(fraction) / f64::from(1 << mantissa)) * 2_f64.powi(exponent as i32 - bias),
        }
    };
    let two = || u32::from(u16::from_ne_bytes(at[..2].try_into().unwrap()));
    match dtype {
        DataType::Int8 => f64::from(at[0] as i8),
        DataType::Uint8 => f64::from(at[0]),
        DataType::Int32 => f64::from(i32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Uint32 => f64::from(u32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Int64 => i64::from_ne_bytes(at[..8].try_into().unwrap()) as f64,
        DataType::Uint64 => u64::from_ne_bytes(at[..8].try_into().unwrap()) as f64,
        DataType::Float16 => small(two(), 15, 10),
        DataType::Bfloat16 => small(two(), 127, 7),
        DataType::Float32 => f64::from(f32::from_ne_bytes(at[..4].try_into().unwrap())),
        DataType::Float64 => f64::from_ne_bytes(at[..8].try_into().unwrap()),
        DataType::Float8E4M3 => small(u32::from(at[0]), 7, 3),
        DataType::Float8E5M2 => small(u32::from(at[0]), 15, 2),
    }
}

/// The value of element `index` of what `from` has for `to`.
pub(super) fn value(from: usize, to: usize, index: usize, most: usize) -> f64 {
    (1 + (index * 7 + from * 3 + to + index / 251) % most) as f64
}

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

/// Reduces the values of all ranks as one host does.
fn reduced(args: &Args, values: impl Iterator<Item = f64>, n: usize) -> f64 {
    let op = match args.reduction {
        Some(Reduction::PreMulSum(_)) => return values.map(|value| 2.0 * value).sum(),
        Some(Reduction::Plain(op)) => op,
        None => unreachable!(),
    };
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Prod => values.product(),
        ReduceOp::Max => values.fold(0.0, f64::max),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Avg => {
            let mean = values.sum::<f64>() / n as f64;
            if is_float(args.dtype) { mean } else { mean.trunc() }
        }
    }
}

pub(super) fn is_float(dtype: DataType) -> bool {
    use DataType::*;
    matches!(dtype, Float16 | Bfloat16 | Float32 | Float64 | Float8E4M3 | Float8E5M2)
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
    let list = |len: usize, of: &dyn Fn(usize) -> f64| -> Vec<u8> {
        (0..len).flat_map(|index| encode(dtype, of(index))).collect()
    };
    let all = |len: usize, of: &dyn Fn(usize) -> f64| (0..len).map(|index| Some(of(index))).collect::<Vec<_>>();
    let over = |of: &dyn Fn(usize) -> f64| reduced(args, (0..n).map(of), n);
    let block = |rank: usize, index: usize| value(rank, 0, index, most);
    let to = |from: usize, to: usize, index: usize| value(from, to, index, most);
    let case = |send, expected: Vec<Option<f64>>, in_place| Case {
        send,
        recv_len: expected.len(),
        blocks: None,
        in_place,
        expected,
    };
    let gathered = || all(n * count, &|index| block(index / count, index % count));
    let own = || list(count, &|index| block(me, index));
    let parts = || list(n * count, &|index| to(me, index / count, index % count));
    match kind {
        Kind::AllReduce => case(own(), all(count, &|index| over(&|rank| block(rank, index))), Some(0)),
        Kind::Reduce => {
            let result = if is_root { all(count, &|index| over(&|rank| block(rank, index))) } else { Vec::new() };
            case(own(), result, is_root.then_some(0))
        }
        Kind::Broadcast => {
            let root = root.unwrap();
            case(
                if is_root { own() } else { Vec::new() },
                all(count, &|index| block(root, index)),
                is_root.then_some(0),
            )
        }
        Kind::AllGather => case(own(), gathered(), Some((me * count) as isize)),
        Kind::Gather if is_root => case(own(), gathered(), Some((me * count) as isize)),
        Kind::Gather => case(own(), Vec::new(), None),
        Kind::Scatter => {
            let send = if is_root { parts() } else { Vec::new() };
            let place = is_root.then_some(-((me * count) as isize));
            case(send, all(count, &|index| to(root.unwrap(), me, index)), place)
        }
        Kind::AllToAll => case(parts(), all(n * count, &|index| to(index / count, me, index % count)), Some(0)),
        Kind::ReduceScatter => {
            let result = all(count, &|index| over(&|rank| to(rank, me, index)));
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
        for index in 0..block.count {
            let bytes = encode(dtype, value(me, to_whom(to), index, most));
            send[(block.start + index) * size..][..size].copy_from_slice(&bytes);
        }
    }
    let mut expected = vec![None; recv_len];
    for (from, block) in recvs.iter().enumerate() {
        for index in 0..block.count {
            expected[block.start + index] = Some(match kind {
                Kind::ReduceScatterV => reduced(args, (0..n).map(|rank| value(rank, me, index, most)), n),
                _ => value(from, to_whom(me), index, most),
            });
        }
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
