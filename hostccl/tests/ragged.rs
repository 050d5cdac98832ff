//! The collectives in which each rank has a count of its own. They give exactly what a plain loop
//! gives, on every rank, and write nothing else. Counts that do not fit together fail on all
//! ranks.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use common::call::Buffer;
use common::{Comm, last_error, ok, ranks};
use hostccl::types::*;
use hostccl::*;
use plain::{reduced, sample};

struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Counts for every pair of ranks, which all ranks know.
struct Case {
    dtype: DataType,
    /// The number of elements that rank `from` sends to rank `to` in an all-to-all-v:
    /// `counts[from][to]`.
    counts: Vec<Vec<usize>>,
    /// The elements between two blocks. `None` for blocks that follow each other.
    gap: Option<usize>,
}

impl Case {
    fn new(size: usize, dtype: DataType, seed: u64) -> Case {
        let mut random = Xorshift(seed * 2 + 1);
        // Many blocks are empty or small, and some take several chunks.
        let most = [1, 3, 40, 3000, 200_000][random.below(5)];
        let mut count = || if random.below(3) == 0 { 0 } else { random.below(most + 1) };
        let counts = (0..size).map(|_| (0..size).map(|_| count()).collect()).collect();
        Case { dtype, counts, gap: (seed % 2 == 0).then_some(seed as usize % 5) }
    }

    fn size(&self) -> usize {
        self.counts.len()
    }

    /// Returns where blocks of those counts begin, and the number of elements of the buffer.
    fn places(&self, counts: &[usize]) -> (Vec<usize>, usize) {
        let mut next = 0;
        let places = counts.iter().map(|count| {
            let at = next + self.gap.unwrap_or(0);
            next = at + count;
            at
        });
        (places.collect(), next)
    }

    /// The displacements to pass: NULL where the blocks follow each other.
    fn displs(&self, places: &[usize]) -> *const usize {
        if self.gap.is_some() { places.as_ptr() } else { null() }
    }

    fn input(&self, rank: usize, elements: usize) -> Vec<u8> {
        sample(self.dtype, 77, rank, elements)
    }

    fn part<'a>(&self, bytes: &'a [u8], start: usize, count: usize) -> &'a [u8] {
        &bytes[start * self.dtype.size()..(start + count) * self.dtype.size()]
    }

    fn put(&self, bytes: &mut [u8], start: usize, part: &[u8]) {
        bytes[start * self.dtype.size()..][..part.len()].copy_from_slice(part);
    }

    fn unset(&self, elements: usize) -> Vec<u8> {
        vec![0x3c; elements * self.dtype.size()]
    }

    fn all_to_all(&self, comm: &Comm, me: usize) {
        let column = |to: usize| -> Vec<usize> { self.counts.iter().map(|row| row[to]).collect() };
        let ((sends, sent), (receives, received)) = (self.places(&self.counts[me]), self.places(&column(me)));
        let mut expected = self.unset(received);
        for (from, (counts, place)) in self.counts.iter().zip(&receives).enumerate() {
            let (places, elements) = self.places(counts);
            let part = self.input(from, elements);
            self.put(&mut expected, *place, self.part(&part, places[me], counts[me]));
        }
        let input = self.input(me, sent);
        let (mut send, mut recv) = (Buffer::new(&input, 8), Buffer::new(&self.unset(received), 8));
        // SAFETY: the buffers hold the blocks, and the lists have a number for each rank.
        ok(unsafe {
            let (counts, from) = (self.counts[me].as_ptr(), column(me));
            let (sdispls, rdispls) = (self.displs(&sends), self.displs(&receives));
            let dtype = self.dtype as c_int;
            let (send, recv) = (send.at(0), recv.at(0));
            hostcclAlltoAllv(send, counts, sdispls, recv, from.as_ptr(), rdispls, dtype, **comm, null_mut())
        });
        recv.check(&expected, &format!("all-to-all-v of {:?} on rank {me}", self.counts));
        send.check(&input, "input of all-to-all-v");
    }

    fn all_gather(&self, comm: &Comm, me: usize) {
        let counts = &self.counts[0];
        let (places, elements) = self.places(counts);
        let mut expected = self.unset(elements);
        for (rank, (place, count)) in places.iter().zip(counts).enumerate() {
            self.put(&mut expected, *place, &self.input(rank, *count));
        }
        let input = self.input(me, counts[me]);
        let (mut send, mut recv) = (Buffer::new(&input, 8), Buffer::new(&self.unset(elements), 8));
        let call = |send: *const c_void, recv| {
            let (displs, dtype) = (self.displs(&places), self.dtype as c_int);
            // SAFETY: the buffers hold the blocks, and the lists have a number for each rank.
            ok(unsafe { hostcclAllGatherv(send, recv, counts.as_ptr(), displs, dtype, **comm, null_mut()) });
        };
        call(send.at(0), recv.at(0));
        recv.check(&expected, &format!("all-gather-v of {counts:?} on rank {me}"));
        let mut start = self.unset(elements);
        self.put(&mut start, places[me], &input);
        let mut both = Buffer::new(&start, 8);
        call(both.at(places[me] * self.dtype.size()), both.at(0));
        both.check(&expected, &format!("all-gather-v in place of {counts:?} on rank {me}"));
    }

    fn reduce_scatter(&self, comm: &Comm, me: usize, op: ReduceOp) {
        let counts = &self.counts[0];
        let (places, elements) = self.places(counts);
        let inputs: Vec<Vec<u8>> = (0..self.size()).map(|rank| self.input(rank, elements)).collect();
        let result = reduced(self.dtype, op, &inputs);
        let expected = self.part(&result, places[me], counts[me]);
        let (mut send, mut recv) = (Buffer::new(&inputs[me], 8), Buffer::new(&self.unset(counts[me]), 8));
        let call = |send, recv| {
            let (displs, dtype) = (self.displs(&places), self.dtype as c_int);
            // SAFETY: the buffers hold the blocks, and the lists have a number for each rank.
            ok(unsafe {
                hostcclReduceScatterv(send, counts.as_ptr(), displs, recv, dtype, op as c_int, **comm, null_mut())
            });
        };
        call(send.at(0), recv.at(0));
        recv.check(expected, &format!("reduce-scatter-v {} of {counts:?} on rank {me}", op.name()));
        send.check(&inputs[me], "input of reduce-scatter-v");
        call(send.at(0), send.at(places[me] * self.dtype.size()));
        let mut after = inputs[me].clone();
        self.put(&mut after, places[me], expected);
        send.check(&after, &format!("reduce-scatter-v in place of {counts:?} on rank {me}"));
    }
}

#[test]
fn random_counts_on_any_number_of_ranks() {
    for size in 1..=8 {
        let cases: Vec<(Case, ReduceOp)> = (0..24)
            .map(|seed| {
                let dtype = DataType::ALL[seed as usize % DataType::ALL.len()];
                (Case::new(size, dtype, seed * 8 + size as u64), ReduceOp::ALL[seed as usize % 5])
            })
            .collect();
        ranks(size, |comm, me| {
            for (case, op) in &cases {
                case.all_to_all(comm, me);
                case.all_gather(comm, me);
                case.reduce_scatter(comm, me, *op);
            }
        });
    }
}

/// One rank has nearly all of the data, and blocks take many chunks.
#[test]
fn one_large_block() {
    let size = 4;
    let mut counts = vec![vec![3; size]; size];
    (counts[0][2], counts[3][1]) = (3_000_000, 1_234_567);
    let case = Case { dtype: DataType::Float32, counts, gap: Some(1) };
    ranks(size, |comm, me| {
        case.all_to_all(comm, me);
        case.all_gather(comm, me);
        case.reduce_scatter(comm, me, ReduceOp::Sum);
    });
}

/// A reduction that scales takes this rank's own elements through its slot, too.
#[test]
fn reduce_scatter_with_a_scalar_of_each_rank() {
    ranks(3, |comm, me| {
        let (counts, mut op, scalar) = ([2_usize, 0, 3], 0, (me + 1) as i32);
        let (send, mut recv) = ([1, 2, 3, 4, 5_i32], [0_i32; 3]);
        // SAFETY: the buffers hold the blocks, and there is a scalar and a place for the operator.
        unsafe {
            let at = (&raw const scalar).cast_mut().cast();
            let int32 = DataType::Int32 as c_int;
            ok(ncclRedOpCreatePreMulSum(&raw mut op, at, int32, ncclScalarHostImmediate, **comm));
            let (send, recv) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
            ok(hostcclReduceScatterv(send, counts.as_ptr(), null(), recv, int32, op, **comm, null_mut()));
            ok(ncclRedOpDestroy(op, **comm));
        }
        // The scalars add up to 6.
        let expected = [[6, 12, 0], [0; 3], [18, 24, 30]][me];
        assert_eq!(recv, expected);
    });
}

#[test]
fn calls_in_a_group_keep_their_order() {
    let size = 4;
    ranks(size, |comm, me| {
        let counts: Vec<usize> = (0..size).map(|rank| rank + 1).collect();
        let (send, mut gathered) = (vec![me as i32; me + 1], vec![-1_i32; 10]);
        let (mut sum, mut again) = (me as i32, vec![-1_i32; 10]);
        let int32 = DataType::Int32 as c_int;
        {
            // The lists may go before the group ends.
            let counts = counts.clone();
            // SAFETY: the buffers hold the blocks until the end of the group.
            unsafe {
                ok(ncclGroupStart());
                let (from, to) = (send.as_ptr().cast(), gathered.as_mut_ptr().cast());
                ok(hostcclAllGatherv(from, to, counts.as_ptr(), null(), int32, **comm, null_mut()));
                let at = (&raw mut sum).cast();
                ok(ncclAllReduce(at, at, 1, int32, ReduceOp::Sum as c_int, **comm, null_mut()));
                let (from, to) = (send.as_ptr().cast(), again.as_mut_ptr().cast());
                ok(hostcclAllGatherv(from, to, counts.as_ptr(), null(), int32, **comm, null_mut()));
            }
        }
        // SAFETY: the buffers are still there.
        ok(unsafe { ncclGroupEnd() });
        assert_eq!(gathered, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]);
        assert_eq!((sum, again), (6, gathered));
    });
}

#[test]
fn counts_that_differ_fail_on_all_ranks_with_their_values() {
    for which in 0..4 {
        ranks(4, |comm, me| {
            let (send, mut recv) = ([me as f32; 64], [0_f32; 64]);
            let (from, to) = (send.as_ptr().cast::<c_void>(), recv.as_mut_ptr().cast::<c_void>());
            let f32 = DataType::Float32 as c_int;
            let (mut out, mut into) = ([5_usize; 4], [5_usize; 4]);
            // SAFETY: the buffers hold the blocks.
            let result = unsafe {
                match which {
                    0 => {
                        into[1] = if me == 2 { 4 } else { 5 };
                        let (out, into) = (out.as_ptr(), into.as_ptr());
                        hostcclAlltoAllv(from, out, null(), to, into, null(), f32, **comm, null_mut())
                    }
                    1 => {
                        // Rank 3 disagrees with itself.
                        out[3] = if me == 3 { 0 } else { 5 };
                        let (out, into) = (out.as_ptr(), into.as_ptr());
                        hostcclAlltoAllv(from, out, null(), to, into, null(), f32, **comm, null_mut())
                    }
                    2 => {
                        into[0] = if me == 3 { 6 } else { 5 };
                        hostcclAllGatherv(from, to, into.as_ptr(), null(), f32, **comm, null_mut())
                    }
                    _ => {
                        out[2] = if me == 1 { 6 } else { 5 };
                        let out = out.as_ptr();
                        hostcclReduceScatterv(from, out, null(), to, f32, ReduceOp::Sum as c_int, **comm, null_mut())
                    }
                }
            };
            let message = last_error();
            assert_eq!(result, ncclInvalidUsage, "rank {me}: {message}");
            let words = [
                "hostcclAlltoAllv: rank 1 has 5 x float32 for rank 2, which expects 4 x float32",
                "hostcclAlltoAllv: rank 3 has 0 x float32 for rank 3, which expects 5 x float32",
                "hostcclAllGatherv: rank 0 has 5 x float32 for rank 3, which expects 6 x float32",
                "hostcclReduceScatterv: rank 1 has 6 x float32 for rank 2, which expects 5 x float32",
            ][which];
            assert!(message.contains(words), "rank {me}: {message}");
            assert_eq!(recv, [0.0; 64], "nothing was written");
        });
    }
}

/// Blocks that are sent may overlap, so their counts together may be more than a number holds.
#[test]
fn counts_whose_sum_is_too_large_for_a_number_are_a_difference() {
    const HUGE: usize = 1 << 62;
    for is_huge in [[true; 4], [false, true, false, false]] {
        ranks(4, |comm, me| {
            // The huge block covers all memory after its start, so the receive buffer lies before
            // it. The rank may read a chunk of each block before
            // it learns of the difference, and a chunk has at most 1 MiB.
            let mut data = vec![0_u8; 4 + (1 << 20)];
            let (to, from) = data.split_at_mut(4);
            let (to, from) = (to.as_mut_ptr().cast::<c_void>(), from.as_ptr().cast::<c_void>());
            let (counts, into) = (if is_huge[me] { [HUGE; 4] } else { [1; 4] }, [1_usize; 4]);
            let (counts, displs, into, u8) = (counts.as_ptr(), [0_usize; 4], into.as_ptr(), DataType::Uint8 as c_int);
            // SAFETY: one chunk of each block is there. Nothing else is read or written, because
            // the counts do not fit together.
            let result =
                unsafe { hostcclAlltoAllv(from, counts, displs.as_ptr(), to, into, null(), u8, **comm, null_mut()) };
            let message = last_error();
            assert_eq!(result, ncclInvalidUsage, "rank {me}: {message}");
            let first = is_huge.iter().position(|huge| *huge).unwrap();
            let words =
                format!("hostcclAlltoAllv: rank {first} has {HUGE} x uint8 for rank 0, which expects 1 x uint8");
            assert!(message.contains(&words), "rank {me}: {message}");
            assert!(data.iter().all(|byte| *byte == 0), "nothing was written");
        });
    }
}

#[test]
fn another_call_meets_it_as_a_difference() {
    ranks(2, |comm, me| {
        let (mut data, counts) = ([1_f32; 8], [4_usize; 2]);
        let (at, f32) = (data.as_mut_ptr().cast::<c_void>(), DataType::Float32 as c_int);
        // SAFETY: the buffer holds what either call reads and writes.
        let result = unsafe {
            match me {
                0 => hostcclAllGatherv(at, at, counts.as_ptr(), null(), f32, **comm, null_mut()),
                _ => ncclAllReduce(at, at, 4, f32, ReduceOp::Sum as c_int, **comm, null_mut()),
            }
        };
        let message = last_error();
        assert_eq!(result, ncclInvalidUsage, "{message}");
        let words = "rank 0 calls hostcclAllGatherv(float32), rank 1 calls ncclAllReduce(4 x float32, sum)";
        assert!(message.contains(words), "{message}");
    });
}

#[test]
fn wrong_arguments_leave_the_communicator_usable() {
    let comm = &Comm::init_all(1)[0];
    let mut data = [1_f32; 8];
    let (at, f32) = (data.as_mut_ptr().cast::<c_void>(), DataType::Float32 as c_int);
    let (counts, many) = ([4_usize], [usize::MAX]);
    let refused = |result, words: &str| {
        let message = last_error();
        assert!(result == ncclInvalidArgument && message.contains(words), "{result} {message}");
    };
    // SAFETY: a wrong argument is refused before a buffer is used.
    unsafe {
        let gather = |from, to, counts, dtype| hostcclAllGatherv(from, to, counts, null(), dtype, **comm, null_mut());
        refused(gather(at, at, null(), f32), "recvcounts is NULL");
        refused(gather(at, at, many.as_ptr(), f32), "recvcounts[0] is 18446744073709551615");
        refused(gather(at, at, counts.as_ptr(), 99), "datatype 99");
        refused(gather(null_mut(), at, counts.as_ptr(), f32), "sendbuff is NULL");
        refused(
            gather(at.byte_add(4), at, counts.as_ptr(), f32),
            "overlap, but not at the exact addresses of an in-place call",
        );
        ok(gather(at, at, counts.as_ptr(), f32));
        ok(gather(at, at.byte_add(16), counts.as_ptr(), f32));
        let (to, one) = (at.byte_add(4), counts.as_ptr());
        refused(hostcclAlltoAllv(at, one, null(), to, one, null(), f32, **comm, null_mut()), "overlap");
    }
}
