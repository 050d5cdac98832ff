//! Calls under names, with inputs that tell the rank and the call that they belong to.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::Duration;

use crate::common::{Comm, group, ok};
use hostccl::types::*;
use hostccl::*;
use plain::numbers::{gathered, input, sums, unset};

pub const I64: c_int = DataType::Int64 as c_int;
pub const SUM: c_int = ReduceOp::Sum as c_int;

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

pub fn name(number: usize) -> (u64, [u8; 32]) {
    let mut text = [0; 32];
    let written = format!("dim{number}");
    text[..written.len()].copy_from_slice(written.as_bytes());
    (0x1234_5678_9abc + number as u64, text)
}

/// A sequence of random-looking numbers, which depends on the seed alone.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % below as u64) as usize
    }
}

/// Makes one call of any kind under a name, and checks every element. All ranks pass one seed.
pub fn call_and_check(comm: &Comm, under: usize, seed: usize, kind: usize, count: usize) {
    let (size, rank, root) = (comm.size(), comm.rank(), (seed % comm.size()) as c_int);
    let (whole, is_root) = (count * size, rank == root as usize);
    let send = input(seed, rank, 0, whole);
    let mut recv = unset(whole);
    let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    // A block of the inputs of all ranks, one after the other.
    let gathered = |block: usize| gathered(seed, size, block * count, count);
    let expected: Vec<i64> = match kind {
        0 => {
            ok(called!(under, ncclAllReduce(from, to, whole, I64, SUM, **comm, null_mut())));
            sums(seed, size, 0, whole)
        }
        1 => {
            ok(called!(under, ncclAllGather(from, to, count, I64, **comm, null_mut())));
            gathered(0)
        }
        2 => {
            ok(called!(under, ncclReduceScatter(from, to, count, I64, SUM, **comm, null_mut())));
            sums(seed, size, rank * count, count)
        }
        3 => {
            ok(called!(under, ncclBroadcast(from, to, whole, I64, root, **comm, null_mut())));
            input(seed, root as usize, 0, whole)
        }
        4 => {
            ok(called!(under, ncclScatter(from, to, count, I64, root, **comm, null_mut())));
            input(seed, root as usize, rank * count, count)
        }
        5 => {
            ok(called!(under, ncclGather(from, to, count, I64, root, **comm, null_mut())));
            if is_root { gathered(0) } else { Vec::new() }
        }
        6 => {
            ok(called!(under, ncclAlltoAll(from, to, count, I64, **comm, null_mut())));
            gathered(rank)
        }
        7 => {
            ok(called!(under, ncclReduce(from, to, whole, I64, SUM, root, **comm, null_mut())));
            if is_root { sums(seed, size, 0, whole) } else { Vec::new() }
        }
        _ => {
            // Two sums and a ring of messages in one group.
            let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
            let (mut first, mut second) = (vec![0; count], vec![0; count]);
            group(|| {
                ok(called!(under, ncclAllReduce(from, first.as_mut_ptr().cast(), count, I64, SUM, **comm, null_mut())));
                ok(called!(under, ncclSend(from, whole, I64, next as c_int, **comm, null_mut())));
                ok(called!(under, ncclRecv(to, whole, I64, before as c_int, **comm, null_mut())));
                ok(called!(
                    under,
                    ncclAllReduce(from, second.as_mut_ptr().cast(), count, I64, SUM, **comm, null_mut())
                ));
            });
            assert_eq!(first, sums(seed, size, 0, count), "sums in a group under name {under}");
            assert_eq!(second, first, "the second sums in a group under name {under}");
            input(seed, before, 0, whole)
        }
    };
    assert_eq!(recv[..expected.len()], expected, "kind {kind}, {count} elements, under name {under}, rank {rank}");
}

pub const KINDS: usize = 9;

/// Makes the calls of one name in their order, with pauses that differ between ranks.
pub fn calls_of(comm: &Comm, under: usize, calls: usize, pauses: &mut Numbers) {
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

pub fn all_reduce(comm: &Comm, under: usize) -> ncclResult_t {
    let mut data = [1_i64; 4];
    let at = data.as_mut_ptr().cast();
    called!(under, ncclAllReduce(at, at, 4, I64, SUM, **comm, null_mut()))
}
