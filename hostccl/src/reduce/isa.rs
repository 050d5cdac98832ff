//! What the kernels need from an instruction set, and the instruction set that every processor has.

use half::f16;

/// What differs between instruction sets beyond what the compiler makes of the same loops.
pub(super) trait Isa {
    /// # Safety
    /// `source` is readable for `len` elements (any alignment), `target` writable for `len`, without overlap; the
    /// processor has this instruction set.
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize);

    /// # Safety
    /// `target` is writable for `source.len()` elements (any alignment), without overlap; the processor has this
    /// instruction set.
    unsafe fn narrow_f16(source: &[f32], target: *mut u16);
}

/// What every processor of the target has.
pub(super) struct Plain;

impl Isa for Plain {
    #[inline(always)]
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, which both pointers are good for.
            unsafe { target.add(i).write(f16_to_f32(f16::from_bits(source.add(i).read_unaligned()))) };
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(source: &[f32], target: *mut u16) {
        for (i, value) in source.iter().enumerate() {
            // SAFETY: target is good for as many elements as source has.
            unsafe { target.add(i).write_unaligned(f32_to_f16(*value).to_bits()) };
        }
    }
}

/// On x86-64 this path means "no F16C", so the crate's own look for it is left out; elsewhere it may find hardware.
#[inline(always)]
fn f16_to_f32(value: f16) -> f32 {
    if cfg!(target_arch = "x86_64") { value.to_f32_const() } else { value.to_f32() }
}

#[inline(always)]
fn f32_to_f16(value: f32) -> f16 {
    if cfg!(target_arch = "x86_64") { f16::from_f32_const(value) } else { f16::from_f32(value) }
}
