//! The 8-bit floating-point types `ncclFloat8e4m3` and `ncclFloat8e5m2`. Reductions compute in
//! `f32` and round once, at the end.
//!
//! Both types are those of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), Table 1:
//!
//! | | E4M3 | E5M2 |
//! |---|---|---|
//! | exponent bias | 7 | 15 |
//! | largest number | 448 | 57344 |
//! | smallest normal number | 2^-6 | 2^-14 |
//! | smallest number | 2^-9 | 2^-16 |
//! | infinity | none | 0x7c |
//! | NaN | 0x7f | 0x7d, 0x7e, 0x7f |
//!
//! NCCL rounds the results of its reductions in CUDA's mode `__NV_SATFINITE`: to nearest, ties to
//! even, and a result beyond the largest number, or an infinity, becomes the largest number. This
//! engine rounds in the same way. A NaN stays a NaN. The maximum and the minimum give back an
//! infinity unchanged.
//!
//! The conversions have no branches, so that loops over them vectorise.

use super::element::{Averaged, Element, averaged_float, fold_loaded};
use super::isa::Isa;
use std::mem::MaybeUninit;

/// An 8-bit floating-point type whose mantissa has `MANTISSA` bits. `SATURATES` says whether a
/// conversion turns an infinity into the largest number.
pub(super) struct Float8<const MANTISSA: u32, const SATURATES: bool>;

/// `ncclFloat8e4m3`.
pub(super) type Float8E4M3 = Float8<3, true>;
/// `ncclFloat8e5m2`.
pub(super) type Float8E5M2 = Float8<2, true>;

impl<const MANTISSA: u32, const SATURATES: bool> Float8<MANTISSA, SATURATES> {
    /// How many more bits the mantissa of an `f32` has than the mantissa of this type.
    const SHIFT: u32 = 23 - MANTISSA;
    /// The exponent bias.
    const BIAS: u32 = (1 << (6 - MANTISSA)) - 1;
    /// The difference of the exponent biases, shifted to the exponent's bits of an `f32`.
    const REBIAS: u32 = (127 - Self::BIAS) << 23;
    /// The bits of the largest number, without its sign.
    const LARGEST: u8 = if Self::HAS_INFINITY { 0x7b } else { 0x7e };
    /// The largest number.
    const LARGEST_VALUE: f32 = f32::from_bits(((Self::LARGEST as u32) << Self::SHIFT) + Self::REBIAS);
    /// The bits of the NaN that a conversion gives.
    const NAN: u8 = if Self::HAS_INFINITY { 0x7e } else { 0x7f };
    /// The bits of infinity. A type without infinities does not use them.
    const INFINITY: u8 = 0x7c;
    /// Whether the type has infinities.
    const HAS_INFINITY: bool = MANTISSA == 2;
    /// The smallest normal number.
    const NORMAL: f32 = f32::from_bits((1 << 23) + Self::REBIAS);
    /// The smallest number above 0.
    const SMALLEST: f32 = f32::from_bits(((1 - MANTISSA as i32 - Self::BIAS as i32 + 127) as u32) << 23);
    /// An `f32` whose neighbours differ by the smallest number. The addition of this `f32` rounds
    /// a number that is below the smallest normal number.
    const ROUNDS: f32 = Self::SMALLEST * (1 << 23) as f32;

    #[inline(always)]
    fn widen_one(bits: u8) -> f32 {
        let (sign, magnitude) = ((u32::from(bits) & 0x80) << 24, u32::from(bits) & 0x7f);
        let normal = f32::from_bits((magnitude << Self::SHIFT) + Self::REBIAS);
        let subnormal = magnitude as f32 * Self::SMALLEST;
        let number = if magnitude < 1 << MANTISSA { subnormal } else { normal };
        let number = if magnitude > u32::from(Self::LARGEST) { f32::NAN } else { number };
        let number = if Self::HAS_INFINITY && magnitude == u32::from(Self::INFINITY) { f32::INFINITY } else { number };
        f32::from_bits(number.to_bits() | sign)
    }

    #[inline(always)]
    fn narrow_one(value: f32) -> u8 {
        let (sign, magnitude) = ((value.to_bits() >> 24) & 0x80, f32::from_bits(value.to_bits() & 0x7fff_ffff));
        let bounded = if magnitude < Self::LARGEST_VALUE { magnitude } else { Self::LARGEST_VALUE };
        let bits = bounded.to_bits();
        let normal =
            bits.wrapping_sub(Self::REBIAS).wrapping_add(((1 << (Self::SHIFT - 1)) - 1) + ((bits >> Self::SHIFT) & 1))
                >> Self::SHIFT;
        // A result that rounds up to the smallest normal number has that number's bits.
        let subnormal = (bounded + Self::ROUNDS).to_bits() - Self::ROUNDS.to_bits();
        let number = if bounded < Self::NORMAL { subnormal } else { normal };
        let number = if !SATURATES && Self::HAS_INFINITY && magnitude == f32::INFINITY {
            u32::from(Self::INFINITY)
        } else {
            number
        };
        (if value.is_nan() { u32::from(Self::NAN) } else { number } | sign) as u8
    }
}

impl<const MANTISSA: u32, const SATURATES: bool> Element for Float8<MANTISSA, SATURATES> {
    type Accumulator = f32;
    type Averaged = Float8<MANTISSA, true>;
    type Compared = Float8<MANTISSA, false>;

    const SIZE: usize = 1;

    #[inline(always)]
    unsafe fn widen<I: Isa>(source: *const u8, target: *mut f32, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, and both pointers are valid for `len` elements.
            unsafe { *target.add(i) = Self::widen_one(*source.add(i)) };
        }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(source: &[f32], target: *mut u8) {
        for (i, value) in source.iter().enumerate() {
            // SAFETY: `target` is valid for as many elements as `source` has.
            unsafe { *target.add(i) = Self::narrow_one(*value) };
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
            let load = |input: *const u8, i: usize| Self::widen_one(*input.add(i));
            fold_loaded::<f32, K, START>(sums, inputs, load, apply)
        }
    }
}

averaged_float!([<const MANTISSA: u32, const SATURATES: bool>] Float8<MANTISSA, SATURATES>, f32);
