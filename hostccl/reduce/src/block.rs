//! The loops of the kernels.
//!
//! A reduction makes one block of the result at a time. The block is accumulated in the first-level
//! cache, while the inputs are read once, two of them in each pass. Then the block is copied to all
//! targets.

use super::element::{Averaged, Element, MOST_INPUTS, Number};
use super::float8::{Float8E4M3, Float8E5M2};
use super::float16::{Bfloat16, Float16};
use super::isa::Isa;
use super::target::Target;
use crate::copy;
use crate::types::{DataType, ReduceOp};
use std::mem::MaybeUninit;
use std::slice;

/// The size of a block. Two blocks and a block of input stay in a first-level cache of 32 KiB.
const BLOCK_BYTES: usize = 4096;

/// Room for one block of accumulators.
///
/// The room is never cleared, because it is written before it is read and small reductions are
/// frequent. A call makes its blocks once and hands them down. Otherwise every inlined kernel would
/// have blocks of its own in one large stack frame.
#[repr(C, align(64))]
struct Block(MaybeUninit<[u8; BLOCK_BYTES]>);

impl Block {
    #[inline(always)]
    fn new() -> Self {
        Block(MaybeUninit::uninit())
    }

    /// Returns the aligned room as accumulators. It holds `BLOCK_BYTES / size_of::<A>()` of them.
    #[inline(always)]
    fn as_mut_ptr<A: Number>(&mut self) -> *mut A {
        const { assert!(align_of::<A>() <= 64 && BLOCK_BYTES % size_of::<A>() == 0) };
        self.0.as_mut_ptr().cast()
    }
}

/// Evaluates an expression with the element type of a [`DataType`].
macro_rules! for_element {
    ($dtype:expr, $element:ident => $call:expr) => {
        match $dtype {
            DataType::Int8 => {
                type $element = i8;
                $call
            }
            DataType::Uint8 => {
                type $element = u8;
                $call
            }
            DataType::Int32 => {
                type $element = i32;
                $call
            }
            DataType::Uint32 => {
                type $element = u32;
                $call
            }
            DataType::Int64 => {
                type $element = i64;
                $call
            }
            DataType::Uint64 => {
                type $element = u64;
                $call
            }
            DataType::Float16 => {
                type $element = Float16;
                $call
            }
            DataType::Float32 => {
                type $element = f32;
                $call
            }
            DataType::Float64 => {
                type $element = f64;
                $call
            }
            DataType::Bfloat16 => {
                type $element = Bfloat16;
                $call
            }
            DataType::Float8E4M3 => {
                type $element = Float8E4M3;
                $call
            }
            DataType::Float8E5M2 => {
                type $element = Float8E5M2;
                $call
            }
        }
    };
}

/// Reduces at least two inputs with the instruction set `I`.
///
/// # Safety
/// The contract of [`super::reduce`], with at least two inputs, on a processor with `I`.
#[inline(always)]
pub(super) unsafe fn reduce_all<I: Isa>(
    dtype: DataType,
    op: ReduceOp,
    inputs: &[*const u8],
    targets: &[Target],
    count: usize,
) {
    let mut blocks = [Block::new(), Block::new()];
    // SAFETY: this function's contract.
    for_element!(dtype, E => unsafe { reduce_element::<I, E>(op, inputs, targets, count, &mut blocks) });
    if targets.iter().any(|target| target.stream) {
        copy::order_streams();
    }
}

/// Scales with the instruction set `I`.
///
/// # Safety
/// The contract of [`super::scale`], on a processor with `I`.
#[inline(always)]
pub(super) unsafe fn scale_all<I: Isa>(dtype: DataType, scalar: [u8; 8], input: *const u8, out: *mut u8, count: usize) {
    let mut blocks = [Block::new(), Block::new()];
    // SAFETY: this function's contract.
    for_element!(dtype, E => unsafe { scale_element::<I, E>(scalar, input, out, count, &mut blocks) })
}

#[inline(always)]
unsafe fn reduce_element<I: Isa, E: Element>(
    op: ReduceOp,
    inputs: &[*const u8],
    targets: &[Target],
    count: usize,
    blocks: &mut [Block; 2],
) {
    // SAFETY: the contract of `reduce_all`.
    unsafe {
        match op {
            ReduceOp::Sum => fold_blocks::<I, E>(inputs, targets, count, blocks, E::Accumulator::sum, |_, _| ()),
            ReduceOp::Prod => fold_blocks::<I, E>(inputs, targets, count, blocks, E::Accumulator::product, |_, _| ()),
            ReduceOp::Max => fold_compared::<I, E::Compared>(inputs, targets, count, blocks, Number::maximum),
            ReduceOp::Min => fold_compared::<I, E::Compared>(inputs, targets, count, blocks, Number::minimum),
            ReduceOp::Avg => average_blocks::<I, E::Averaged>(inputs, targets, count, blocks),
        }
    }
}

#[inline(always)]
unsafe fn fold_compared<I: Isa, E: Element>(
    inputs: &[*const u8],
    targets: &[Target],
    count: usize,
    blocks: &mut [Block; 2],
    apply: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator + Copy,
) {
    // SAFETY: the contract of `reduce_all`.
    unsafe { fold_blocks::<I, E>(inputs, targets, count, blocks, apply, |_, _| ()) }
}

#[inline(always)]
unsafe fn average_blocks<I: Isa, E: Averaged>(
    inputs: &[*const u8],
    targets: &[Target],
    count: usize,
    blocks: &mut [Block; 2],
) {
    debug_assert!(inputs.len() <= MOST_INPUTS);
    let finish = |sums: &mut [E::Accumulator], offset: usize| {
        let mut are_exact = true;
        sums.iter().for_each(|sum| are_exact &= E::is_exact(*sum));
        if !are_exact {
            // SAFETY: the contract of `reduce_all`; the inputs of this block have not changed.
            return unsafe { average_overflowing::<I, E>(inputs, sums, offset) };
        }
        sums.iter_mut().for_each(|sum| *sum = E::average(*sum, inputs.len()));
    };
    // SAFETY: the contract of `reduce_all`.
    unsafe { fold_blocks::<I, E>(inputs, targets, count, blocks, E::Accumulator::sum, finish) }
}

/// Turns the sums of a block into averages, where some of the sums overflow. The block begins
/// `offset` bytes into each input.
///
/// # Safety
/// Every input is readable for as many elements as `sums` has. The processor has the instruction
/// set `I`.
#[cold]
#[inline(never)]
unsafe fn average_overflowing<I: Isa, E: Averaged>(inputs: &[*const u8], sums: &mut [E::Accumulator], offset: usize) {
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = match E::is_exact(*sum) {
            true => E::average(*sum, inputs.len()),
            false => E::average_scaled(inputs.iter().map(|input| {
                let mut value = *sum;
                // SAFETY: this function's contract, and there is room for one accumulator.
                unsafe { E::widen::<I>(input.add(offset + i * E::SIZE), &raw mut value, 1) };
                value
            })),
        };
    }
}

/// Folds the inputs by `apply`, block by block. `finish` gets each block of results, and the
/// distance in bytes from the start of each input to the block.
#[inline(always)]
unsafe fn fold_blocks<I: Isa, E: Element>(
    inputs: &[*const u8],
    targets: &[Target],
    count: usize,
    [sums, spare]: &mut [Block; 2],
    apply: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator + Copy,
    finish: impl Fn(&mut [E::Accumulator], usize),
) {
    let [first, second, others @ ..] = inputs else { return };
    let capacity = BLOCK_BYTES / size_of::<E::Accumulator>();
    for start in (0..count).step_by(capacity) {
        let (len, offset) = (capacity.min(count - start), start * E::SIZE);
        // SAFETY: offset + len elements lie within every input and target. Nothing is written to a
        // target before the last input of this block has been read. The blocks are aligned and hold
        // `len` accumulators.
        unsafe {
            let at = |input: &*const u8| input.add(offset);
            let (spare, target) = (spare.as_mut_ptr(), sums.as_mut_ptr::<E::Accumulator>());
            let sums = slice::from_raw_parts_mut(target.cast::<MaybeUninit<E::Accumulator>>(), len);
            E::fold::<I, 2, true>(sums, [at(first), at(second)], spare, apply);
            let pairs = others.chunks_exact(2);
            let last = pairs.remainder();
            for pair in pairs {
                E::fold::<I, 2, false>(sums, [at(&pair[0]), at(&pair[1])], spare, apply);
            }
            for input in last {
                E::fold::<I, 1, false>(sums, [at(input)], spare, apply);
            }
            let result = slice::from_raw_parts_mut(target, len);
            finish(result, offset);
            let bytes = E::elements::<I>(result, spare);
            for target in targets {
                let to = target.at.add(offset);
                if target.stream {
                    copy::stream_unordered(bytes, to, len * E::SIZE);
                } else {
                    std::ptr::copy_nonoverlapping(bytes, to, len * E::SIZE);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn scale_element<I: Isa, E: Element>(
    scalar: [u8; 8],
    input: *const u8,
    out: *mut u8,
    count: usize,
    [block, factor]: &mut [Block; 2],
) {
    let factor = factor.as_mut_ptr::<E::Accumulator>();
    // SAFETY: no element is larger than 8 bytes. The block is aligned, and `widen` initialises it
    // before it is read.
    let factor = unsafe {
        E::widen::<I>(scalar.as_ptr(), factor, 1);
        *factor
    };
    let capacity = BLOCK_BYTES / size_of::<E::Accumulator>();
    for start in (0..count).step_by(capacity) {
        let (len, offset) = (capacity.min(count - start), start * E::SIZE);
        let target = block.as_mut_ptr::<E::Accumulator>();
        // SAFETY: offset + len elements lie within both buffers. `widen` initialises the block
        // before it is a slice, and the block overlaps neither buffer.
        unsafe {
            E::widen::<I>(input.add(offset), target, len);
            let values = slice::from_raw_parts_mut(target, len);
            values.iter_mut().for_each(|value| *value = value.product(factor));
            E::narrow::<I>(values, out.add(offset));
        }
    }
}
