//! Calls every collective with buffers that have guards, and checks the results.

use std::ffi::c_int;
use std::fmt::Display;
use std::ptr::null_mut;

use super::{Comm, ok};
use hostccl::types::*;
use hostccl::*;
use plain::{reduced, sample};

/// How many guard bytes there are before and after a buffer. Nobody may write there.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa7;
/// The byte that fills an output before the call.
const UNSET: u8 = 0x3c;

/// A buffer between two guards. Its address is a multiple of the element's size, but of no larger
/// power of two.
pub struct Buffer {
    /// The buffer and its guards.
    memory: Vec<u8>,
    /// Where the buffer begins.
    start: usize,
    /// The length of the buffer in bytes.
    len: usize,
}

impl Buffer {
    pub fn new(bytes: &[u8], size: usize) -> Buffer {
        let mut memory = vec![GUARD_BYTE; bytes.len() + 3 * GUARD];
        let start = memory.as_ptr().align_offset(GUARD) + GUARD + size;
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        Buffer { memory, start, len: bytes.len() }
    }

    pub fn unset(len: usize, size: usize) -> Buffer {
        Buffer::new(&vec![UNSET; len], size)
    }

    pub fn at(&mut self, offset: usize) -> *mut std::ffi::c_void {
        self.memory[self.start + offset..].as_mut_ptr().cast()
    }

    /// Panics unless the buffer holds exactly `expected` and its guards are unchanged.
    #[track_caller]
    pub fn check(&self, expected: &[u8], context: &str) {
        let (before, rest) = self.memory.split_at(self.start);
        let (bytes, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|&byte| byte == GUARD_BYTE), "{context}: wrote beside the buffer");
        if bytes != expected {
            let at = bytes.iter().zip(expected).position(|(a, b)| a != b);
            panic!(
                "{context}: {} bytes, {} expected, the first difference is at byte {at:?}",
                bytes.len(),
                expected.len()
            );
        }
    }

    #[track_caller]
    fn check_unset(&self, context: &str) {
        self.check(&vec![UNSET; self.len], context);
    }
}

/// One set of inputs, and the expected results of the reductions.
pub struct Case {
    /// The element type.
    pub dtype: DataType,
    /// How many elements one rank's part has. The input of every rank has a part for each rank.
    pub count: usize,
    /// The count for the collectives that take the count of the whole.
    pub whole: usize,
    /// The input of each rank.
    pub inputs: Vec<Vec<u8>>,
    /// The operators to try, with their expected results.
    reductions: Vec<(ReduceOp, Vec<u8>)>,
    /// The roots to try.
    roots: Vec<usize>,
}

impl Case {
    pub fn new(dtype: DataType, size: usize, count: usize, whole: usize, ops: &[ReduceOp], roots: &[usize]) -> Case {
        assert!(whole <= size * count);
        let salt = (count * 10 + dtype as usize) as u64;
        let inputs: Vec<Vec<u8>> = (0..size).map(|rank| sample(dtype, salt, rank, size * count)).collect();
        let reductions = ops.iter().map(|&op| (op, reduced(dtype, op, &inputs))).collect();
        Case { dtype, count, whole, inputs, reductions, roots: roots.to_vec() }
    }

    /// Returns this case with the results that it has where each host has `seats` of the ranks. The
    /// elements of a host's ranks are reduced and rounded first, and then those of the hosts. Only
    /// floats of 16 bits and more are rounded twice.
    pub fn on_hosts_of(mut self, seats: usize) -> Case {
        let (dtype, inputs) = (self.dtype, &self.inputs);
        if matches!(dtype, DataType::Float16 | DataType::Bfloat16 | DataType::Float32 | DataType::Float64) {
            for (op, result) in &mut self.reductions {
                let hosts: Vec<Vec<u8>> = inputs.chunks(seats).map(|inputs| reduced(dtype, *op, inputs)).collect();
                *result = reduced(dtype, *op, &hosts);
            }
        }
        self
    }

    /// Runs every collective on the inputs, as `rank` of `comm`.
    pub fn run(&self, comm: &Comm, rank: usize) {
        (0..Case::CALLS).for_each(|call| self.run_one(comm, rank, call));
    }

    /// How many collectives [`Case::run_one`] knows.
    pub const CALLS: usize = 9;

    /// Runs the collective of that number, with every reduction and root.
    pub fn run_one(&self, comm: &Comm, rank: usize, call: usize) {
        for (op, result) in &self.reductions {
            match call {
                0 => self.all_reduce(comm, rank, *op, result),
                1 => self.reduce_scatter(comm, rank, *op, result),
                2 => self.roots.iter().for_each(|&root| self.reduce(comm, rank, *op, result, root)),
                _ => {}
            }
        }
        for &root in &self.roots {
            match call {
                3 => self.broadcast(comm, rank, root),
                4 => self.gather(comm, rank, root),
                5 => self.scatter(comm, rank, root),
                _ => {}
            }
        }
        match call {
            6 => self.all_gather(comm, rank),
            7 => self.all_to_all(comm, rank),
            8 => self.ring(comm, rank),
            _ => {}
        }
    }

    fn ranks(&self) -> usize {
        self.inputs.len()
    }

    /// Returns how many bytes so many elements have.
    fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size()
    }

    /// Returns the part of `bytes` that belongs to a rank.
    fn part<'a>(&self, bytes: &'a [u8], rank: usize) -> &'a [u8] {
        let part = self.bytes(self.count);
        &bytes[rank * part..(rank + 1) * part]
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        Buffer::new(bytes, self.dtype.size())
    }

    fn unset(&self, elements: usize) -> Buffer {
        Buffer::unset(self.bytes(elements), self.dtype.size())
    }

    fn context(&self, call: &str, rank: usize, details: impl Display) -> String {
        let (dtype, count, ranks) = (self.dtype.name(), self.count, self.ranks());
        format!("{call} {details}, {count} x {dtype} for each of {ranks} ranks (whole: {}), on rank {rank}", self.whole)
    }

    fn all_reduce(&self, comm: &Comm, rank: usize, op: ReduceOp, result: &[u8]) {
        let (input, expected) = (&self.inputs[rank][..self.bytes(self.whole)], &result[..self.bytes(self.whole)]);
        let call = |send, recv| {
            // SAFETY: both buffers hold `whole` elements.
            ok(unsafe { ncclAllReduce(send, recv, self.whole, self.dtype as c_int, op as c_int, **comm, null_mut()) });
        };
        let (mut send, mut recv) = (self.buffer(input), self.unset(self.whole));
        call(send.at(0), recv.at(0));
        recv.check(expected, &self.context("all-reduce", rank, op.name()));
        send.check(input, &self.context("input of all-reduce", rank, op.name()));
        let both = send.at(0);
        call(both, both);
        send.check(expected, &self.context("all-reduce in place", rank, op.name()));
    }

    fn reduce(&self, comm: &Comm, rank: usize, op: ReduceOp, result: &[u8], root: usize) {
        let (input, expected) = (&self.inputs[rank][..self.bytes(self.whole)], &result[..self.bytes(self.whole)]);
        let call = |send, recv| {
            let (dtype, op, root) = (self.dtype as c_int, op as c_int, root as c_int);
            // SAFETY: each buffer holds `whole` elements or is not used.
            ok(unsafe { ncclReduce(send, recv, self.whole, dtype, op, root, **comm, null_mut()) });
        };
        let context = |how: &str| self.context(how, rank, format!("{} root {root}", op.name()));
        let (mut send, mut recv) = (self.buffer(input), self.unset(self.whole));
        call(send.at(0), recv.at(0));
        send.check(input, &context("input of reduce"));
        if rank == root {
            recv.check(expected, &context("reduce"));
            let both = send.at(0);
            call(both, both);
            send.check(expected, &context("reduce in place"));
        } else {
            recv.check_unset(&context("reduce elsewhere"));
            call(send.at(0), null_mut());
            send.check(input, &context("input of reduce to NULL"));
        }
    }

    fn reduce_scatter(&self, comm: &Comm, rank: usize, op: ReduceOp, result: &[u8]) {
        let expected = self.part(result, rank);
        let call = |send, recv| {
            let (dtype, op) = (self.dtype as c_int, op as c_int);
            // SAFETY: the send buffer has a part for every rank, and the receive buffer has one
            // part.
            ok(unsafe { ncclReduceScatter(send, recv, self.count, dtype, op, **comm, null_mut()) });
        };
        let (mut send, mut recv) = (self.buffer(&self.inputs[rank]), self.unset(self.count));
        call(send.at(0), recv.at(0));
        recv.check(expected, &self.context("reduce-scatter", rank, op.name()));
        send.check(&self.inputs[rank], &self.context("input of reduce-scatter", rank, op.name()));
        let (whole, mine) = (send.at(0), send.at(self.bytes(rank * self.count)));
        call(whole, mine);
        let mut all = self.inputs[rank].clone();
        let at = self.bytes(rank * self.count);
        all[at..at + expected.len()].copy_from_slice(expected);
        send.check(&all, &self.context("reduce-scatter in place", rank, op.name()));
    }

    fn all_gather(&self, comm: &Comm, rank: usize) {
        let expected = self.inputs.iter().map(|input| self.part(input, 0)).collect::<Vec<_>>().concat();
        let call = |send, recv| {
            // SAFETY: the send buffer has one part, and the receive buffer has a part for every
            // rank.
            ok(unsafe { ncclAllGather(send, recv, self.count, self.dtype as c_int, **comm, null_mut()) });
        };
        let input = self.part(&self.inputs[rank], 0);
        let (mut send, mut recv) = (self.buffer(input), self.unset(self.ranks() * self.count));
        call(send.at(0), recv.at(0));
        recv.check(&expected, &self.context("all-gather", rank, ""));
        send.check(input, &self.context("input of all-gather", rank, ""));
        let mut both = self.own_part(rank);
        let (mine, whole) = (both.at(self.bytes(rank * self.count)), both.at(0));
        call(mine, whole);
        both.check(&expected, &self.context("all-gather in place", rank, ""));
    }

    /// Returns a buffer with a part for every rank, in which only the part of `rank` is set.
    fn own_part(&self, rank: usize) -> Buffer {
        let input = self.part(&self.inputs[rank], 0);
        let at = self.bytes(rank * self.count);
        let mut start = vec![UNSET; self.bytes(self.ranks() * self.count)];
        start[at..at + input.len()].copy_from_slice(input);
        self.buffer(&start)
    }

    fn all_to_all(&self, comm: &Comm, rank: usize) {
        let expected = self.inputs.iter().map(|input| self.part(input, rank)).collect::<Vec<_>>().concat();
        let call = |send, recv| {
            // SAFETY: both buffers have a part for every rank.
            ok(unsafe { ncclAlltoAll(send, recv, self.count, self.dtype as c_int, **comm, null_mut()) });
        };
        let (mut send, mut recv) = (self.buffer(&self.inputs[rank]), self.unset(self.ranks() * self.count));
        call(send.at(0), recv.at(0));
        recv.check(&expected, &self.context("all-to-all", rank, ""));
        send.check(&self.inputs[rank], &self.context("input of all-to-all", rank, ""));
        let both = send.at(0);
        call(both, both);
        send.check(&expected, &self.context("all-to-all in place", rank, ""));
    }

    fn broadcast(&self, comm: &Comm, rank: usize, root: usize) {
        let input = |rank: usize| &self.inputs[rank][..self.bytes(self.whole)];
        let context = |how: &str| self.context(how, rank, format!("root {root}"));
        let (dtype, of) = (self.dtype as c_int, root as c_int);
        let (mut send, mut recv) = (self.buffer(input(rank)), self.unset(self.whole));
        let source = if rank == root { send.at(0) } else { null_mut() };
        // SAFETY: both buffers hold `whole` elements, and the send buffer is NULL where nothing is
        // sent.
        ok(unsafe { ncclBroadcast(source, recv.at(0), self.whole, dtype, of, **comm, null_mut()) });
        recv.check(input(root), &context("broadcast"));
        send.check(input(rank), &context("input of broadcast"));
        // SAFETY: the buffer holds `whole` elements.
        ok(unsafe { ncclBcast(send.at(0), self.whole, dtype, of, **comm, null_mut()) });
        send.check(input(root), &context("broadcast in place"));
    }

    fn gather(&self, comm: &Comm, rank: usize, root: usize) {
        let expected = self.inputs.iter().map(|input| self.part(input, 0)).collect::<Vec<_>>().concat();
        let context = |how: &str| self.context(how, rank, format!("root {root}"));
        let call = |send, recv| {
            // SAFETY: the send buffer has one part, and on the root the receive buffer has a part
            // for every rank.
            ok(unsafe { ncclGather(send, recv, self.count, self.dtype as c_int, root as c_int, **comm, null_mut()) });
        };
        let input = self.part(&self.inputs[rank], 0);
        let (mut send, mut recv) = (self.buffer(input), self.unset(self.ranks() * self.count));
        call(send.at(0), recv.at(0));
        send.check(input, &context("input of gather"));
        if rank == root {
            recv.check(&expected, &context("gather"));
            let mut both = self.own_part(rank);
            let (mine, whole) = (both.at(self.bytes(rank * self.count)), both.at(0));
            call(mine, whole);
            both.check(&expected, &context("gather in place"));
        } else {
            recv.check_unset(&context("gather elsewhere"));
            call(send.at(0), null_mut());
        }
    }

    fn scatter(&self, comm: &Comm, rank: usize, root: usize) {
        let expected = self.part(&self.inputs[root], rank);
        let context = |how: &str| self.context(how, rank, format!("root {root}"));
        let call = |send, recv| {
            // SAFETY: on the root the send buffer has a part for every rank, and the receive buffer
            // has one part.
            ok(unsafe { ncclScatter(send, recv, self.count, self.dtype as c_int, root as c_int, **comm, null_mut()) });
        };
        let (mut send, mut recv) = (self.buffer(&self.inputs[rank]), self.unset(self.count));
        call(if rank == root { send.at(0) } else { null_mut() }, recv.at(0));
        recv.check(expected, &context("scatter"));
        send.check(&self.inputs[rank], &context("input of scatter"));
        if rank == root {
            let (whole, mine) = (send.at(0), send.at(self.bytes(rank * self.count)));
            call(whole, mine);
            send.check(&self.inputs[rank], &context("scatter in place"));
        } else {
            let mut again = self.unset(self.count);
            call(null_mut(), again.at(0));
            again.check(expected, &context("scatter the second time"));
        }
    }

    /// Sends to the right and receives from the left, in one group. A single rank sends to itself.
    fn ring(&self, comm: &Comm, rank: usize) {
        let ranks = self.ranks();
        let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let input = |rank: usize| &self.inputs[rank][..self.bytes(self.whole)];
        let (mut send, mut recv) = (self.buffer(input(rank)), self.unset(self.whole));
        let (dtype, count) = (self.dtype as c_int, self.whole);
        // SAFETY: both buffers hold `whole` elements.
        unsafe {
            ok(ncclGroupStart());
            ok(ncclSend(send.at(0), count, dtype, right as c_int, **comm, null_mut()));
            ok(ncclRecv(recv.at(0), count, dtype, left as c_int, **comm, null_mut()));
            ok(ncclGroupEnd());
        }
        recv.check(input(left), &self.context("receive", rank, format!("from {left}")));
        send.check(input(rank), &self.context("send", rank, format!("to {right}")));
    }
}
