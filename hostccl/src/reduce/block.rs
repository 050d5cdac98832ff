//! The loops: one block of the output at a time, accumulated in the first-level cache while every input streams by once.

use super::element::{Bfloat16, Element, Float16, Number};
use super::isa::Isa;
use crate::types::{DataType, ReduceOp};
use std::mem::MaybeUninit;
use std::slice;

/// Two of these and a block of input stay in a first-level cache of 32 KiB.
const BLOCK_BYTES: usize = 4096;

/// Room for one block of accumulators. Written before it is read, so never cleared: small reductions are frequent. Made
/// once per call and handed down, because every inlined kernel would otherwise get its own in one large stack frame.
#[repr(C, align(64))]
struct Block(MaybeUninit<[u8; BLOCK_BYTES]>);

impl Block {
    #[inline(always)]
    fn new() -> Self {
        Block(MaybeUninit::uninit())
    }

    /// The room as accumulators: aligned, for up to `BLOCK_BYTES / size_of::<A>()` of them.
    #[inline(always)]
    fn as_mut_ptr<A: Number>(&mut self) -> *mut A {
        const { assert!(align_of::<A>() <= 64 && BLOCK_BYTES % size_of::<A>() == 0) };
        self.0.as_mut_ptr().cast()
    }
}

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
        }
    };
}

/// # Safety
/// As [`super::reduce`], with at least one input, on a processor with `I`.
#[inline(always)]
pub(super) unsafe fn reduce_all<I: Isa>(
    dtype: DataType,
    op: ReduceOp,
    inputs: &[*const u8],
    out: *mut u8,
    count: usize,
) {
    let mut blocks = [Block::new(), Block::new()];
    // SAFETY: this function's contract.
    for_element!(dtype, E => unsafe { reduce_element::<I, E>(op, inputs, out, count, &mut blocks) })
}

/// # Safety
/// As [`super::scale`], on a processor with `I`.
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
    out: *mut u8,
    count: usize,
    blocks: &mut [Block; 2],
) {
    // SAFETY: the contract of reduce_all.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => {
                let divisor = (op == ReduceOp::Avg).then_some(inputs.len());
                fold_blocks::<I, E>(inputs, out, count, divisor, E::Accumulator::sum, blocks)
            }
            ReduceOp::Prod => fold_blocks::<I, E>(inputs, out, count, None, E::Accumulator::product, blocks),
            ReduceOp::Max => fold_blocks::<I, E>(inputs, out, count, None, E::Accumulator::maximum, blocks),
            ReduceOp::Min => fold_blocks::<I, E>(inputs, out, count, None, E::Accumulator::minimum, blocks),
        }
    }
}

#[inline(always)]
unsafe fn fold_blocks<I: Isa, E: Element>(
    inputs: &[*const u8],
    out: *mut u8,
    count: usize,
    divisor: Option<usize>,
    apply: impl Fn(E::Accumulator, E::Accumulator) -> E::Accumulator,
    [sums, widened]: &mut [Block; 2],
) {
    let Some((&first, others)) = inputs.split_first() else { return };
    let capacity = BLOCK_BYTES / size_of::<E::Accumulator>();
    for start in (0..count).step_by(capacity) {
        let (len, offset) = (capacity.min(count - start), start * E::SIZE);
        let target = sums.as_mut_ptr::<E::Accumulator>();
        // SAFETY: offset + len elements lie within the input; the block is aligned, holds len, and is initialised by
        // widen before it becomes a slice.
        let sums = unsafe {
            E::widen::<I>(first.add(offset), target, len);
            slice::from_raw_parts_mut(target, len)
        };
        for input in others {
            // SAFETY: offset + len elements lie within the input. It is either read in place, while nothing is
            // written to it (out is written after the last input of this block), or through the other block.
            let values = unsafe {
                let source = input.add(offset);
                let mut values = E::as_accumulators(source);
                if values.is_null() {
                    let target = widened.as_mut_ptr::<E::Accumulator>();
                    E::widen::<I>(source, target, len);
                    values = target;
                }
                slice::from_raw_parts(values, len)
            };
            fold(sums, values, &apply);
        }
        if let Some(inputs) = divisor {
            sums.iter_mut().for_each(|sum| *sum = sum.average(inputs));
        }
        // SAFETY: offset + len elements lie within out, which this function's block cannot overlap.
        unsafe { E::narrow::<I>(sums, out.add(offset)) };
    }
}

/// Slices of its own, so that the compiler knows that they do not overlap.
#[inline(always)]
fn fold<A: Number>(sums: &mut [A], values: &[A], apply: impl Fn(A, A) -> A) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = apply(*sum, *value);
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
    // SAFETY: no element is larger than 8 bytes; the block is aligned and initialised by widen before it is read.
    let factor = unsafe {
        E::widen::<I>(scalar.as_ptr(), factor, 1);
        *factor
    };
    let capacity = BLOCK_BYTES / size_of::<E::Accumulator>();
    for start in (0..count).step_by(capacity) {
        let (len, offset) = (capacity.min(count - start), start * E::SIZE);
        let target = block.as_mut_ptr::<E::Accumulator>();
        // SAFETY: offset + len elements lie within both buffers; the block is initialised by widen before it is a
        // slice, and overlaps neither.
        unsafe {
            E::widen::<I>(input.add(offset), target, len);
            let values = slice::from_raw_parts_mut(target, len);
            values.iter_mut().for_each(|value| *value = value.product(factor));
            E::narrow::<I>(values, out.add(offset));
        }
    }
}
