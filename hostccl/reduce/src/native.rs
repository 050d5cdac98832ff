//! The element types in which reductions compute without a conversion.

use super::element::{Averaged, Element, averaged_float, fold_loaded, read};
use super::isa::Isa;
use super::wide::{WideI8, WideI32, WideI64, WideU8, WideU32, WideU64};
use std::mem::MaybeUninit;
use std::ptr;

macro_rules! native {
    ($($type:ty, $averaged:ty;)*) => {$(
        impl Element for $type {
            type Accumulator = $type;
            type Averaged = $averaged;
            type Compared = $type;

            const SIZE: usize = size_of::<$type>();

            #[inline(always)]
            unsafe fn widen<I: Isa>(source: *const u8, target: *mut $type, len: usize) {
                // SAFETY: the contract of `widen`.
                unsafe { ptr::copy_nonoverlapping(source, target.cast::<u8>(), len * Self::SIZE) }
            }

            #[inline(always)]
            unsafe fn narrow<I: Isa>(source: &[$type], target: *mut u8) {
                // SAFETY: the contract of `narrow`.
                unsafe { ptr::copy_nonoverlapping(source.as_ptr().cast::<u8>(), target, size_of_val(source)) }
            }

            #[inline(always)]
            unsafe fn elements<I: Isa>(source: &[$type], _spare: *mut $type) -> *const u8 {
                source.as_ptr().cast()
            }

            #[inline(always)]
            unsafe fn fold<I: Isa, const K: usize, const START: bool>(
                sums: &mut [MaybeUninit<$type>],
                inputs: [*const u8; K],
                _spare: *mut $type,
                apply: impl Fn($type, $type) -> $type,
            ) {
                // SAFETY: the contract of `fold`, and every index is below the length of `sums`.
                unsafe {
                    let load = |input: *const u8, i: usize| read(input.cast::<$type>().add(i));
                    fold_loaded::<$type, K, START>(sums, inputs, load, apply)
                }
            }
        }
    )*};
}

native! {
    i8, WideI8;
    u8, WideU8;
    i32, WideI32;
    u32, WideU32;
    i64, WideI64;
    u64, WideU64;
    f32, f32;
    f64, f64;
}

averaged_float!([] f32, f32);
averaged_float!([] f64, f64);
