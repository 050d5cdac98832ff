//! The kernels compiled for x86-64 processors with AVX2 and F16C.

use std::arch::x86_64::{
    __m128i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_storeu_ps,
};

use super::block::{reduce_all, scale_all};
use super::isa::Isa;
use super::target::Target;
use crate::types::{DataType, ReduceOp};

/// The instruction sets AVX2 and F16C. AVX-512 would need Rust 1.89, and the kernels wait for
/// memory long before wider registers would help.
pub(super) struct Avx2;

/// Whether the processor has AVX2 and F16C.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

/// Runs [`reduce_all`] compiled for AVX2.
///
/// # Safety
/// The contract of [`reduce_all`], on a processor with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn reduce(dtype: DataType, op: ReduceOp, inputs: &[*const u8], targets: &[Target], count: usize) {
    // SAFETY: this function's contract.
    unsafe { reduce_all::<Avx2>(dtype, op, inputs, targets, count) }
}

/// Runs [`scale_all`] compiled for AVX2.
///
/// # Safety
/// The contract of [`scale_all`], on a processor with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scale(dtype: DataType, scalar: [u8; 8], input: *const u8, out: *mut u8, count: usize) {
    // SAFETY: this function's contract.
    unsafe { scale_all::<Avx2>(dtype, scalar, input, out, count) }
}

impl Isa for Avx2 {
    #[inline(always)]
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize) {
        // SAFETY: the contract of widen_f16.
        unsafe { widen(source, target, len) }
    }

    #[inline(always)]
    unsafe fn narrow_f16(source: &[f32], target: *mut u16) {
        // SAFETY: the contract of narrow_f16.
        unsafe { narrow(source, target) }
    }
}

/// How many elements one F16C instruction converts.
const LANES: usize = 8;

#[target_feature(enable = "avx2,f16c")]
unsafe fn widen(source: *const u16, target: *mut f32, len: usize) {
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: i + LANES <= len, and both pointers are valid for `len` elements. The intrinsics
        // need no alignment.
        unsafe { _mm256_storeu_ps(target.add(i), _mm256_cvtph_ps(_mm_loadu_si128(source.add(i).cast::<__m128i>()))) };
    }
    if whole < len {
        let (mut halves, mut floats) = ([0u16; LANES], [0f32; LANES]);
        // SAFETY: fewer than LANES elements are left, and each array holds LANES.
        unsafe {
            std::ptr::copy_nonoverlapping(
                source.add(whole).cast::<u8>(),
                halves.as_mut_ptr().cast(),
                2 * (len - whole),
            );
            _mm256_storeu_ps(floats.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast::<__m128i>())));
            std::ptr::copy_nonoverlapping(floats.as_ptr(), target.add(whole), len - whole);
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn narrow(source: &[f32], target: *mut u16) {
    let chunks = source.chunks_exact(LANES);
    let (rest, whole) = (chunks.remainder(), source.len() - source.len() % LANES);
    for (i, chunk) in chunks.enumerate() {
        // SAFETY: the chunk has LANES elements, and `target` as many as `source`. The intrinsics
        // need no alignment.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(chunk.as_ptr()));
            _mm_storeu_si128(target.add(i * LANES).cast::<__m128i>(), halves);
        }
    }
    if !rest.is_empty() {
        let (mut floats, mut halves) = ([0f32; LANES], [0u16; LANES]);
        floats[..rest.len()].copy_from_slice(rest);
        // SAFETY: each array holds LANES elements, and `target` has room for `rest.len()` more
        // after the whole chunks.
        unsafe {
            let converted = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(floats.as_ptr()));
            _mm_storeu_si128(halves.as_mut_ptr().cast::<__m128i>(), converted);
            std::ptr::copy_nonoverlapping(halves.as_ptr().cast::<u8>(), target.add(whole).cast(), 2 * rest.len());
        }
    }
}
