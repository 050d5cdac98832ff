//! The 16-bit floating-point types. Reductions compute in `f32` and round once, at the end.

use super::element::{Averaged, Element, averaged_float, fold_loaded, read};
use super::isa::Isa;
use std::mem::MaybeUninit;

/// The element type of IEEE 754 half precision. Its reductions compute in `f32`.
pub(super) struct Float16;

impl Element for Float16 {
    type Accumulator = f32;
    type Averaged = Float16;
    type Compared = Float16;

    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn widen<I: Isa>(source: *const u8, target: *mut f32, len: usize) {
        // SAFETY: the contract of `widen`.
        unsafe { I::widen_f16(source.cast(), target, len) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(source: &[f32], target: *mut u8) {
        // SAFETY: the contract of `narrow`.
        unsafe { I::narrow_f16(source, target.cast()) }
    }

    #[inline(always)]
    unsafe fn fold<I: Isa, const K: usize, const START: bool>(
        sums: &mut [MaybeUninit<f32>],
        inputs: [*const u8; K],
        spare: *mut f32,
        apply: impl Fn(f32, f32) -> f32,
    ) {
        for (k, input) in inputs.into_iter().enumerate() {
            // SAFETY: the contract of `fold`.
            unsafe {
                if START && k == 0 {
                    I::widen_f16(input.cast(), sums.as_mut_ptr().cast(), sums.len());
                    continue;
                }
                I::widen_f16(input.cast(), spare, sums.len());
                let load = |input: *const u8, i: usize| *input.cast::<f32>().add(i);
                fold_loaded::<f32, 1, false>(sums, [spare.cast_const().cast()], load, &apply);
            }
        }
    }
}

/// The element type that is the upper half of an IEEE 754 single. Its reductions compute in `f32`.
pub(super) struct Bfloat16;

impl Element for Bfloat16 {
    type Accumulator = f32;
    type Averaged = Bfloat16;
    type Compared = Bfloat16;

    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn widen<I: Isa>(source: *const u8, target: *mut f32, len: usize) {
        let source = source.cast::<u16>();
        for i in 0..len {
            // SAFETY: i < len, and both pointers are valid for `len` elements.
            unsafe { *target.add(i) = widen_bfloat16(read(source.add(i))) };
        }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(source: &[f32], target: *mut u8) {
        let target = target.cast::<u16>();
        for (i, value) in source.iter().enumerate() {
            // SAFETY: `target` is valid for as many elements as `source` has.
            unsafe { target.add(i).write_unaligned(round_to_bfloat16(*value)) };
        }
    }

    #[inline(always)]
    unsafe fn fold<I: Isa, const K: usize, const START: bool>(
        sums: &mut [MaybeUninit<f32>],
        inputs: [*const u8; K],
        _spare: *mut f32,
        apply: impl Fn(f32, f32) -> f32,
    ) {
        // SAFETY: the contract of `fold`, and every index is below the length of `sums`.
        unsafe {
            let load = |input: *const u8, i: usize| widen_bfloat16(read(input.cast::<u16>().add(i)));
            fold_loaded::<f32, K, START>(sums, inputs, load, apply)
        }
    }
}

#[inline(always)]
fn widen_bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest, ties to even. The function has no branches, so that loops over it vectorise.
#[inline(always)]
fn round_to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could turn a NaN into infinity. So a NaN keeps its upper bits and becomes quiet.
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

averaged_float!([] Float16, f32);
averaged_float!([] Bfloat16, f32);
