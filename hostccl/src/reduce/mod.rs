//! Reduction of several host buffers into one, element by element, in the order of the inputs.
//!
//! Every instruction set gives the same bits, so ranks that reduce different parts of a buffer agree with a rank that
//! reduces all of it. (One exception, as on every processor: which payload a NaN carries after two NaNs met in a sum.)
//!
//! * Integers wrap. Their average is the wrapped sum divided by the number of inputs, truncated towards zero, as NCCL does.
//! * `f16` and `bf16` are accumulated in `f32` and rounded once, at the end (to nearest, ties to even).
//! * Floating-point maximum and minimum ignore a NaN where the other side is a number, and order -0 below +0, as CUDA's
//!   `fmaxf` and `fminf` do.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod block;
mod element;
mod isa;
mod target;
#[cfg(test)]
mod tests;

use self::block::{reduce_all, scale_all};
use self::isa::Plain;
pub(crate) use self::target::Target;
use crate::types::{DataType, ReduceOp};

/// `target[i] = inputs[0][i] op inputs[1][i] op ...` for `i` in `0..count` and every target, strictly from left to right.
/// [`ReduceOp::Avg`] divides the sum by `inputs.len()`. One input is copied as it is; without inputs nothing is written.
///
/// # Safety
///
/// Every input is readable and every target writable for `count * dtype.size()` bytes, and nobody else writes to them
/// meanwhile. A target may be the same address as one or more inputs, but may not overlap one otherwise, nor another target.
/// No alignment is needed.
pub(crate) unsafe fn reduce(dtype: DataType, op: ReduceOp, inputs: &[*const u8], targets: &[Target], count: usize) {
    if let [] | [_] = inputs {
        if let Some(&only) = inputs.first() {
            for target in targets {
                // SAFETY: both are valid for that many bytes by this function's contract; copy allows the same address.
                unsafe { std::ptr::copy(only, target.at, count * dtype.size()) };
            }
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if avx2::is_available() {
        // SAFETY: the processor has AVX2 and F16C; the pointers are this function's own contract.
        return unsafe { avx2::reduce(dtype, op, inputs, targets, count) };
    }
    // SAFETY: this function's contract.
    unsafe { reduce_all::<Plain>(dtype, op, inputs, targets, count) }
}

/// `out[i] = input[i] * scalar` for `i` in `0..count`, in the element type: integers wrap, `f16` and `bf16` are rounded.
/// The scalar is the first `dtype.size()` bytes of `scalar`, in native byte order.
///
/// # Safety
///
/// As for [`reduce`] with one input and one target.
pub(crate) unsafe fn scale(dtype: DataType, scalar: [u8; 8], input: *const u8, out: *mut u8, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if avx2::is_available() {
        // SAFETY: the processor has AVX2 and F16C; the pointers are this function's own contract.
        return unsafe { avx2::scale(dtype, scalar, input, out, count) };
    }
    // SAFETY: this function's contract.
    unsafe { scale_all::<Plain>(dtype, scalar, input, out, count) }
}
