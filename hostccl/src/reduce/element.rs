//! The arithmetic of the accumulators, and the conversion of each element type to its accumulator
//! and back.

use super::isa::Isa;
use std::mem::MaybeUninit;
use std::ptr;

/// A type in which reductions compute.
pub(super) trait Number: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    /// Turns the sum of `inputs` values into their average. There is at least one value.
    fn average(self, inputs: usize) -> Self;
}

macro_rules! integer {
    ($($type:ty, |$value:ident, $inputs:ident| $average:expr;)*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn average(self, inputs: usize) -> Self {
                let ($value, $inputs) = (self, inputs);
                $average
            }
        }
    )*};
}

// The quotient of integers below 2^8 differs from the next integer by at least one part in 2^8, and
// an f32 errs by one part in 2^23. So truncating the f32 quotient is exact for any number of
// inputs, and it vectorises. The other types divide in 64 bits, which hold any number of inputs,
// because a slice is no longer than i64::MAX.
integer! {
    i8, |sum, inputs| (f32::from(sum) / inputs as f32) as i32 as i8;
    u8, |sum, inputs| (f32::from(sum) / inputs as f32) as i32 as u8;
    i32, |sum, inputs| (i64::from(sum) / inputs as i64) as i32;
    u32, |sum, inputs| (u64::from(sum) / inputs as u64) as u32;
    i64, |sum, inputs| sum / inputs as i64;
    u64, |sum, inputs| sum / inputs as u64;
}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }
            // Equal numbers have equal bits, except for the two zeros. The maximum of two zeros is
            // -0 when both have the sign bit, and their minimum is -0 when either has.
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let equal = <$type>::from_bits(self.to_bits() & other.to_bits());
                if self == other { equal } else { self.max(other) }
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let equal = <$type>::from_bits(self.to_bits() | other.to_bits());
                if self == other { equal } else { self.min(other) }
            }
            #[inline(always)]
            fn average(self, inputs: usize) -> Self {
                self / inputs as $type
            }
        }
    )*};
}

float!(f32, f64);

/// An element type of the API. Pointers need no alignment.
pub(super) trait Element {
    /// The type in which reductions of these elements compute.
    type Accumulator: Number;

    /// How many bytes one element has.
    const SIZE: usize;

    /// Converts `len` elements of `source` to accumulators.
    ///
    /// # Safety
    /// `source` is readable for `len` elements. `target` is aligned and writable for `len`
    /// accumulators. They do not overlap. The processor has the instruction set `I`.
    unsafe fn widen<I: Isa>(source: *const u8, target: *mut Self::Accumulator, len: usize);

    /// Rounds accumulators to elements.
    ///
    /// # Safety
    /// `target` is writable for as many elements as `source` has, without overlap. The processor
    /// has the instruction set `I`.
    unsafe fn narrow<I: Isa>(source: &[Self::Accumulator], target: *mut u8);

    /// Rounds accumulators to elements and returns where these are: in `source` itself, or in
    /// `spare`.
    ///
    /// # Safety
    /// `spare` is writable for as many elements as `source` has, without overlap. The processor has
    /// the instruction set `I`.
    #[inline(always)]
    unsafe fn elements<I: Isa>(source: &[Self::Accumulator], spare: *mut Self::Accumulator) -> *const u8 {
        // SAFETY: the contract of `elements`.
        unsafe { Self::narrow::<I>(source, spare.cast()) };
        spare.cast()
    }

    /// Folds `K` inputs into `sums`, one after the other. With `START` the sums begin with the
    /// first of these inputs. A type whose elements are widened one by one needs a single pass over
    /// `sums`. The other types widen into `spare` first.
    ///
    /// # Safety
    /// Every input is readable for as many elements as `sums` has. `spare` is aligned and writable
    /// for as many accumulators. Nothing overlaps. `sums` is initialised unless `START`. The
    /// processor has the instruction set `I`.
    unsafe fn fold<I: Isa, const K: usize, const START: bool>(
        sums: &mut [MaybeUninit<Self::Accumulator>],
        inputs: [*const u8; K],
        spare: *mut Self::Accumulator,
        apply: impl Fn(Self::Accumulator, Self::Accumulator) -> Self::Accumulator,
    );
}

/// Does the work of [`Element::fold`] in one pass, where `load` returns an input's element as an
/// accumulator.
///
/// # Safety
/// The contract of [`Element::fold`], for what `load` reads.
#[inline(always)]
unsafe fn fold_loaded<A: Number, const K: usize, const START: bool>(
    sums: &mut [MaybeUninit<A>],
    inputs: [*const u8; K],
    load: impl Fn(*const u8, usize) -> A,
    apply: impl Fn(A, A) -> A,
) {
    for (i, place) in sums.iter_mut().enumerate() {
        // SAFETY: the sum is initialised unless START.
        let mut sum = if START { load(inputs[0], i) } else { unsafe { place.assume_init() } };
        for &input in &inputs[usize::from(START)..] {
            sum = apply(sum, load(input, i));
        }
        place.write(sum);
    }
}

macro_rules! native {
    ($($type:ty),*) => {$(
        impl Element for $type {
            type Accumulator = $type;

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
                    let load = |input: *const u8, i: usize| input.cast::<$type>().add(i).read_unaligned();
                    fold_loaded::<$type, K, START>(sums, inputs, load, apply)
                }
            }
        }
    )*};
}

native!(i8, u8, i32, u32, i64, u64, f32, f64);

/// The element type of IEEE 754 half precision. Its reductions compute in `f32`.
pub(super) struct Float16;

impl Element for Float16 {
    type Accumulator = f32;

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
                let load = |input: *const u8, i: usize| input.cast::<f32>().add(i).read();
                fold_loaded::<f32, 1, false>(sums, [spare.cast_const().cast()], load, &apply);
            }
        }
    }
}

/// The element type that is the upper half of an IEEE 754 single. Its reductions compute in `f32`.
pub(super) struct Bfloat16;

impl Element for Bfloat16 {
    type Accumulator = f32;

    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn widen<I: Isa>(source: *const u8, target: *mut f32, len: usize) {
        let source = source.cast::<u16>();
        for i in 0..len {
            // SAFETY: i < len, and both pointers are valid for `len` elements.
            unsafe { target.add(i).write(widen_bfloat16(source.add(i).read_unaligned())) };
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
            let load = |input: *const u8, i: usize| widen_bfloat16(input.cast::<u16>().add(i).read_unaligned());
            fold_loaded::<f32, K, START>(sums, inputs, load, apply)
        }
    }
}

#[inline(always)]
fn widen_bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest, ties to even. It has no branches, so that loops over it vectorise.
#[inline(always)]
fn round_to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could turn a NaN into infinity. So a NaN keeps its upper bits and becomes quiet.
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}
