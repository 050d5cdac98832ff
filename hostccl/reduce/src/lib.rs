//! Reduction of several host buffers into one, element by element, in the order of the inputs.
//!
//! Every instruction set gives the same bits, so ranks that reduce different parts of a buffer
//! agree with a rank that reduces all of it. There is one exception, as on every processor: when
//! two NaNs meet in a sum, the payload of the result may be that of either NaN.
//!
//! * Sums and products of integers wrap. The average of integers is the exact sum divided by the
//!   number of inputs, truncated towards zero.
//! * `f16`, `bf16` and the 8-bit types are accumulated in `f32` and rounded once, at the end (to
//!   nearest, ties to even). The 8-bit types saturate (module `float8`).
//! * An average does not overflow, because the inputs are scaled where their sum overflows.
//! * The maximum and minimum of floating-point numbers are NaN where an input is NaN, and order -0
//!   below +0.
//!
//! [`stream`] copies a result that is larger than the caches.
//!
//! This crate is apart from `hostccl` because `make test` optimises this crate and not `hostccl`.
//! Without optimisation the tests' reductions of millions of elements take minutes.
//!
//! The files, from the bottom up: `types` (element types and reductions), `copy` (streaming
//! stores), `target` (where a result goes), `isa` (what differs between instruction sets),
//! `element` (the traits of the types), `wide`, `float8`, `float16` and `native` (how each type
//! computes), `block` (the loops), `avx2` (the loops compiled for AVX2), and `neon` (what 64-bit
//! ARM has).

#[cfg(target_arch = "x86_64")]
mod avx2;
mod block;
mod copy;
mod element;
mod float16;
mod float8;
mod isa;
mod native;
#[cfg(target_arch = "aarch64")]
mod neon;
mod target;
mod types;
mod wide;

use self::block::{reduce_all, scale_all};
pub use self::copy::stream;
#[cfg(not(target_arch = "aarch64"))]
use self::isa::Plain as Always;
#[cfg(target_arch = "aarch64")]
use self::neon::Neon as Always;
pub use self::target::Target;
pub use self::types::{DataType, ReduceOp};

/// [`reduce`] and [`scale`] by the kernels without special instructions. The tests compare them
/// with the kernels that [`reduce`] and [`scale`] choose.
#[doc(hidden)]
pub mod plain {
    use super::isa::Plain;
    use super::{DataType, ReduceOp, Target, reduce_all, scale_all};

    /// # Safety
    ///
    /// The contract of [`reduce`](super::reduce), with two inputs or more.
    pub unsafe fn reduce(dtype: DataType, op: ReduceOp, inputs: &[*const u8], targets: &[Target], count: usize) {
        // SAFETY: this function's contract.
        unsafe { reduce_all::<Plain>(dtype, op, inputs, targets, count) }
    }

    /// # Safety
    ///
    /// The contract of [`scale`](super::scale).
    pub unsafe fn scale(dtype: DataType, scalar: [u8; 8], input: *const u8, out: *mut u8, count: usize) {
        // SAFETY: this function's contract.
        unsafe { scale_all::<Plain>(dtype, scalar, input, out, count) }
    }
}

/// Computes `target[i] = inputs[0][i] op inputs[1][i] op ...` for `i` in `0..count` and every
/// target, strictly from left to right. [`ReduceOp::Avg`] divides the sum by `inputs.len()`. A
/// single input is copied as it is. If there are no inputs, nothing is written.
///
/// # Safety
///
/// Every input is readable and every target is writable for `count * dtype.size()` bytes, and
/// nobody else writes to them meanwhile. A target may have the address of one or more inputs. A
/// target must not overlap an input in another way, and must not overlap another target. No
/// alignment is needed.
pub unsafe fn reduce(dtype: DataType, op: ReduceOp, inputs: &[*const u8], targets: &[Target], count: usize) {
    if let [] | [_] = inputs {
        if let Some(&only) = inputs.first() {
            for target in targets {
                // SAFETY: both are valid for that many bytes by this function's contract, and
                // `copy` allows equal addresses.
                unsafe { std::ptr::copy(only, target.at, count * dtype.size()) };
            }
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if avx2::is_available() {
        // SAFETY: the processor has AVX2 and F16C, and the pointers fulfil this function's
        // contract.
        return unsafe { avx2::reduce(dtype, op, inputs, targets, count) };
    }
    // SAFETY: this function's contract.
    unsafe { reduce_all::<Always>(dtype, op, inputs, targets, count) }
}

/// Computes `out[i] = input[i] * scalar` for `i` in `0..count`, in the element type: integers wrap,
/// `f16` and `bf16` are rounded. The scalar is the first `dtype.size()` bytes of `scalar`, in
/// native byte order.
///
/// # Safety
///
/// The contract of [`reduce`] with one input and one target.
pub unsafe fn scale(dtype: DataType, scalar: [u8; 8], input: *const u8, out: *mut u8, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if avx2::is_available() {
        // SAFETY: the processor has AVX2 and F16C, and the pointers fulfil this function's
        // contract.
        return unsafe { avx2::scale(dtype, scalar, input, out, count) };
    }
    // SAFETY: this function's contract.
    unsafe { scale_all::<Always>(dtype, scalar, input, out, count) }
}
