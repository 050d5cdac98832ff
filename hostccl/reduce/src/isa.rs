//! The operations that the kernels need from an instruction set, and the instruction set that every
//! processor has.

use half::f16;

/// An instruction set. It has functions for the conversions that the compiler does not vectorise by
/// itself.
pub(super) trait Isa {
    /// Converts half-precision numbers to single precision.
    ///
    /// # Safety
    /// `source` is readable and `target` is writable for `len` elements, without overlap. `source`
    /// needs no alignment. The processor has this instruction set.
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize);

    /// Rounds single-precision numbers to half precision: to nearest, ties to even.
    ///
    /// # Safety
    /// `target` is writable for `source.len()` elements, without overlap. `target` needs no
    /// alignment. The processor has this instruction set.
    unsafe fn narrow_f16(source: &[f32], target: *mut u16);
}

/// An instruction set with no more than Rust's own operations. On 64-bit ARM only the tests use
/// it, for comparisons.
#[cfg_attr(target_arch = "aarch64", allow(dead_code))]
pub(super) struct Plain;

// On x86-64 only processors without F16C run these functions, so they do not let the crate `half`
// look for F16C. On other processors the crate may use the hardware.
impl Isa for Plain {
    #[inline(always)]
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, and `source` is valid for `len` elements.
            let value = f16::from_bits(unsafe { source.add(i).read_unaligned() });
            let wide = if cfg!(target_arch = "x86_64") { value.to_f32_const() } else { value.to_f32() };
            // SAFETY: i < len, and `target` is valid for `len` elements.
            unsafe { target.add(i).write(wide) };
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(source: &[f32], target: *mut u16) {
        for (i, value) in source.iter().enumerate() {
            let narrow = if cfg!(target_arch = "x86_64") { f16::from_f32_const(*value) } else { f16::from_f32(*value) };
            // SAFETY: `target` is valid for as many elements as `source` has.
            unsafe { target.add(i).write_unaligned(narrow.to_bits()) };
        }
    }
}
