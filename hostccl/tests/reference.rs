//! Every collective gives exactly what a plain loop gives, on every rank, and writes nothing else:
//! for every element type and reduction, for 1 to 8 ranks, for odd sizes, in place and apart, and
//! for every root.

mod common;

use common::call::Case;
use common::ranks;
use hostccl::types::{DataType, ReduceOp};

const COUNTS: [usize; 8] = [0, 1, 2, 3, 7, 31, 1023, 4097];

fn check(size: usize) {
    let cases: Vec<Case> = DataType::ALL
        .into_iter()
        .flat_map(|dtype| COUNTS.map(|count| (dtype, count)))
        .enumerate()
        .map(|(i, (dtype, count))| {
            // One of the sizes is tried with every root, and the other sizes with one root each.
            let roots: Vec<usize> = if count == 7 { (0..size).collect() } else { vec![i % size] };
            Case::new(dtype, size, count, count, &ReduceOp::ALL, &roots)
        })
        .collect();
    ranks(size, |comm, rank| cases.iter().for_each(|case| case.run(comm, rank)));
}

#[test]
fn one_rank() {
    check(1);
}

#[test]
fn two_ranks() {
    check(2);
}

#[test]
fn three_ranks() {
    check(3);
}

#[test]
fn four_ranks() {
    check(4);
}

#[test]
fn five_ranks() {
    check(5);
}

#[test]
fn six_ranks() {
    check(6);
}

#[test]
fn seven_ranks() {
    check(7);
}

#[test]
fn eight_ranks() {
    check(8);
}

/// Two ranks hand up to 16 bytes over with the ends of their steps. The sizes are below, at and
/// above that bound. In some calls the bound holds for the whole data, in others for both ranks'
/// parts together.
#[test]
fn sizes_around_what_two_ranks_hand_over() {
    let mut cases = Vec::new();
    for dtype in DataType::ALL {
        let most = 16 / dtype.size();
        for count in [most / 2, most / 2 + 1, most - 1, most, most + 1] {
            cases.push(Case::new(dtype, 2, count, count, &ReduceOp::ALL, &[0, 1]));
        }
    }
    ranks(2, |comm, rank| cases.iter().for_each(|case| case.run(comm, rank)));
}

/// The engine stages data in slots of 64 KiB to 1 MiB, and each rank reduces up to 64 KiB itself.
/// The sizes here are one element below, at and above these bounds, both for the whole and for a
/// part.
#[test]
fn sizes_around_the_engines_chunks() {
    for (size, dtype, op) in [
        (2, DataType::Float32, ReduceOp::Sum),
        (3, DataType::Bfloat16, ReduceOp::Avg),
        (5, DataType::Uint8, ReduceOp::Max),
        (8, DataType::Int64, ReduceOp::Prod),
    ] {
        let slot = ((12 << 20) / (5 * size) / 4096 * 4096).clamp(64 << 10, 1 << 20);
        let mut cases = Vec::new();
        for bytes in [(64 << 10) / size, 64 << 10, slot / size, slot] {
            let at = bytes / dtype.size();
            for whole in [at - 1, at, at + 1] {
                cases.push(Case::new(dtype, size, whole.div_ceil(size), whole, &[op], &[whole % size]));
            }
        }
        for part in [slot / size / dtype.size() - 1, slot / size / dtype.size() + 1] {
            cases.push(Case::new(dtype, size, part, part, &[op], &[part % size]));
        }
        ranks(size, |comm, rank| cases.iter().for_each(|case| case.run(comm, rank)));
    }
}

#[test]
fn several_mebibytes() {
    for (size, dtype, op) in [
        (2, DataType::Float64, ReduceOp::Avg),
        (3, DataType::Int8, ReduceOp::Sum),
        (4, DataType::Float32, ReduceOp::Sum),
        (7, DataType::Float16, ReduceOp::Min),
        // Results of 32 MiB and more bypass the caches.
        (6, DataType::Int64, ReduceOp::Prod),
    ] {
        let mebibytes = if size == 6 { 6 } else { 3 };
        let whole = (mebibytes << 20) / dtype.size() + 5;
        let case = Case::new(dtype, size, whole.div_ceil(size), whole, &[op], &[size - 1]);
        ranks(size, |comm, rank| case.run(comm, rank));
    }
}

/// Ranks are late at different times while all of them make calls of all kinds, of one chunk and of
/// many. No rank may read a chunk before it is written, or overwrite a chunk that another rank has
/// not read.
#[test]
fn many_chunks_while_ranks_lag() {
    let size = 6;
    let cases: Vec<Case> = [(DataType::Uint8, 2 << 20), (DataType::Int32, 1 << 20), (DataType::Float32, 100)]
        .into_iter()
        .map(|(dtype, bytes): (DataType, usize)| {
            let whole = bytes / dtype.size();
            Case::new(dtype, size, whole.div_ceil(size), whole, &[ReduceOp::Sum, ReduceOp::Max], &[0, 4])
        })
        .collect();
    ranks(size, |comm, rank| {
        // All ranks make one sequence of calls, and each rank has delays of its own.
        let (mut calls, mut lags) = (Xorshift(11), Xorshift(100 + rank as u64));
        for _ in 0..60 {
            let (case, call) = (calls.below(cases.len()), calls.below(Case::CALLS));
            if lags.below(3) == 0 {
                std::thread::sleep(std::time::Duration::from_micros(lags.below(3000) as u64));
            }
            cases[case].run_one(comm, rank, call);
        }
    });
}

struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
