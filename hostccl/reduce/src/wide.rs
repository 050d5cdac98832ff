//! Integers whose sums are made in a wider type, so that averages do not overflow.

use super::element::{Averaged, Element, fold_loaded, read};
use super::isa::Isa;
use std::mem::MaybeUninit;

macro_rules! wide {
    ($($(#[$doc:meta])* $name:ident, $type:ty, $sum:ty, |$value:ident, $inputs:ident| $average:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl Element for $name {
            type Accumulator = $sum;
            type Averaged = $name;
            type Compared = $name;

            const SIZE: usize = size_of::<$type>();

            #[inline(always)]
            unsafe fn widen<I: Isa>(source: *const u8, target: *mut $sum, len: usize) {
                let source = source.cast::<$type>();
                for i in 0..len {
                    // SAFETY: i < len, and both pointers are valid for `len` elements.
                    unsafe { *target.add(i) = <$sum>::from(read(source.add(i))) };
                }
            }

            #[inline(always)]
            unsafe fn narrow<I: Isa>(source: &[$sum], target: *mut u8) {
                let target = target.cast::<$type>();
                for (i, value) in source.iter().enumerate() {
                    // SAFETY: `target` is valid for as many elements as `source` has.
                    unsafe { target.add(i).write_unaligned(*value as $type) };
                }
            }

            #[inline(always)]
            unsafe fn fold<I: Isa, const K: usize, const START: bool>(
                sums: &mut [MaybeUninit<$sum>],
                inputs: [*const u8; K],
                _spare: *mut $sum,
                apply: impl Fn($sum, $sum) -> $sum,
            ) {
                // SAFETY: the contract of `fold`, and every index is below the length of `sums`.
                unsafe {
                    let load =
                        |input: *const u8, i: usize| <$sum>::from(read(input.cast::<$type>().add(i)));
                    fold_loaded::<$sum, K, START>(sums, inputs, load, apply)
                }
            }
        }

        impl Averaged for $name {
            #[inline(always)]
            fn average($value: $sum, $inputs: usize) -> $sum {
                $average
            }
            #[inline(always)]
            fn is_exact(_sum: $sum) -> bool {
                true
            }
            fn average_scaled(values: impl ExactSizeIterator<Item = $sum>) -> $sum {
                let inputs = values.len();
                Self::average(values.sum(), inputs)
            }
        }
    )*};
}

// A quotient of a sum of 8-bit integers is below 2^8. If it is no integer, it differs from the next
// integer by at least 2^-15, because there are at most 2^15 inputs. The rounding error of an f32 is
// smaller than 2^-15 there, and the sum is below 2^23. So truncating the f32 quotient is exact, and
// it vectorises.
wide! {
    /// `i8` with sums in `i32`.
    WideI8, i8, i32, |sum, inputs| (sum as f32 / inputs as f32) as i32;
    /// `u8` with sums in `i32`.
    WideU8, u8, i32, |sum, inputs| (sum as f32 / inputs as f32) as i32;
    /// `i32` with sums in `i64`.
    WideI32, i32, i64, |sum, inputs| sum / inputs as i64;
    /// `u32` with sums in `i64`.
    WideU32, u32, i64, |sum, inputs| sum / inputs as i64;
    /// `i64` with sums in `i128`.
    WideI64, i64, i128, |sum, inputs| quotient(sum, inputs);
    /// `u64` with sums in `i128`.
    WideU64, u64, i128, |sum, inputs| quotient(sum, inputs);
}

/// Divides. A sum that fits 64 bits is divided in 64 bits, which is several times faster.
#[inline(always)]
fn quotient(sum: i128, inputs: usize) -> i128 {
    match i64::try_from(sum) {
        Ok(sum) => i128::from(sum / inputs as i64),
        Err(_) => sum / inputs as i128,
    }
}
