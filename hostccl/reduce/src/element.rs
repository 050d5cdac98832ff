//! The arithmetic of the accumulators, and the traits that say how an element type is converted to
//! its accumulator and back.

use super::isa::Isa;
use std::mem::MaybeUninit;

/// A type in which reductions compute.
pub(super) trait Number: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
}

macro_rules! integer {
    ($($type:ty),*) => {$(
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
        }
    )*};
}

integer!(i8, u8, i32, u32, i64, u64, i128);

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
            // `one` and `another` differ for zeros and NaNs only. The maximum of two zeros is -0
            // if both zeros are -0, and the minimum is -0 if either zero is -0. Every NaN becomes
            // the constant `NAN`, so the order of the inputs makes no difference.
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let one = if self > other { self } else { other };
                let another = if other > self { other } else { self };
                let number = <$type>::from_bits(one.to_bits() & another.to_bits());
                if self.is_nan() | other.is_nan() { <$type>::NAN } else { number }
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let one = if self < other { self } else { other };
                let another = if other < self { other } else { self };
                let number = <$type>::from_bits(one.to_bits() | another.to_bits());
                if self.is_nan() | other.is_nan() { <$type>::NAN } else { number }
            }
        }
    )*};
}

float!(f32, f64);

/// An element type of the API. Pointers need no alignment.
pub(super) trait Element {
    /// The type in which reductions of these elements compute.
    type Accumulator: Number;

    /// The element type that averages use. Its sums do not overflow.
    type Averaged: Averaged;

    /// The element type that the maximum and the minimum use. This type gives back every element
    /// unchanged, infinities included.
    type Compared: Element;

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

    /// Rounds accumulators to elements and returns where the elements are: in `source` itself, or
    /// in `spare`.
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

/// An element type whose averages do not overflow.
pub(super) trait Averaged: Element {
    /// Turns the sum of `inputs` values into their average. `inputs` is between 1 and
    /// [`MOST_INPUTS`].
    fn average(sum: Self::Accumulator, inputs: usize) -> Self::Accumulator;

    /// Whether the sum did not overflow. The answer may be no for inputs that were infinite or
    /// NaN.
    fn is_exact(sum: Self::Accumulator) -> bool;

    /// Returns the average of values whose sum overflows.
    fn average_scaled(values: impl ExactSizeIterator<Item = Self::Accumulator>) -> Self::Accumulator;
}

/// The most inputs whose average is exact for every type. A communicator has at most 1024 ranks.
pub(super) const MOST_INPUTS: usize = 1 << 15;

/// A number at any address.
#[repr(C, packed)]
struct Anywhere<T>(T);

/// Reads a number at any address. `read_unaligned` would do so, too, but in a build with debug
/// assertions `read_unaligned` calls functions that check the pointer of each element. These
/// checks took half of the processor time of some tests. The kernels write by assignment for the
/// same reason.
///
/// # Safety
/// `from` is readable for one number.
#[inline(always)]
pub(super) unsafe fn read<T: Copy>(from: *const T) -> T {
    // SAFETY: this function's contract, and a packed struct needs no alignment.
    unsafe { (*from.cast::<Anywhere<T>>()).0 }
}

/// Does the work of [`Element::fold`] in one pass, where `load` returns an input's element as an
/// accumulator.
///
/// # Safety
/// The contract of [`Element::fold`], for what `load` reads.
#[inline(always)]
pub(super) unsafe fn fold_loaded<A: Number, const K: usize, const START: bool>(
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

/// The average of a floating-point type is its sum divided by the number of inputs. Where the sum
/// overflows, the inputs are first scaled by a power of two that is small enough.
macro_rules! averaged_float {
    ([$($generics:tt)*] $element:ty, $accumulator:ty) => {
        impl $($generics)* Averaged for $element {
            #[inline(always)]
            fn average(sum: $accumulator, inputs: usize) -> $accumulator {
                sum / inputs as $accumulator
            }
            #[inline(always)]
            fn is_exact(sum: $accumulator) -> bool {
                sum.is_finite()
            }
            fn average_scaled(values: impl ExactSizeIterator<Item = $accumulator>) -> $accumulator {
                let inputs = values.len();
                let scale = inputs.next_power_of_two() as $accumulator;
                let sum = values.fold(0.0, |sum, value| sum + value / scale);
                sum / inputs as $accumulator * scale
            }
        }
    };
}

pub(super) use averaged_float;
