//! The instruction set of every 64-bit ARM processor: NEON, which has conversions of half
//! precision.
//!
//! The compiler vectorises the other loops for NEON by itself.

use std::arch::aarch64::{float32x4_t, uint16x4_t};
use std::arch::asm;

use super::isa::Isa;

/// The instruction set NEON.
pub(super) struct Neon;

/// How many elements one instruction converts.
const LANES: usize = 4;

/// Converts four numbers. Rust 1.85 has no intrinsic for this instruction.
#[inline(always)]
fn to_floats(halves: uint16x4_t) -> float32x4_t {
    let floats: float32x4_t;
    // SAFETY: every 64-bit ARM processor has the instruction, which reads and writes registers
    // alone.
    unsafe {
        asm!("fcvtl {floats:v}.4s, {halves:v}.4h", floats = lateout(vreg) floats, halves = in(vreg) halves,
             options(pure, nomem, nostack, preserves_flags));
    }
    floats
}

/// Rounds four numbers to nearest, ties to even.
#[inline(always)]
fn to_halves(floats: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: as above. A thread of Rust rounds to nearest, because the control register has its
    // default.
    unsafe {
        asm!("fcvtn {halves:v}.4h, {floats:v}.4s", halves = lateout(vreg) halves, floats = in(vreg) floats,
             options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

impl Isa for Neon {
    #[inline(always)]
    unsafe fn widen_f16(source: *const u16, target: *mut f32, len: usize) {
        let whole = len - len % LANES;
        for i in (0..whole).step_by(LANES) {
            // SAFETY: i + LANES <= len, and both pointers are valid for `len` elements.
            unsafe {
                let halves = source.add(i).cast::<uint16x4_t>().read_unaligned();
                target.add(i).cast::<float32x4_t>().write_unaligned(to_floats(halves));
            }
        }
        if whole < len {
            let mut floats = [0_f32; LANES];
            let mut halves = [0_u16; LANES];
            // SAFETY: fewer than LANES elements are left, and each array holds LANES.
            unsafe {
                let bytes = 2 * (len - whole);
                std::ptr::copy_nonoverlapping(source.add(whole).cast::<u8>(), halves.as_mut_ptr().cast(), bytes);
                let converted = to_floats(halves.as_ptr().cast::<uint16x4_t>().read_unaligned());
                floats.as_mut_ptr().cast::<float32x4_t>().write_unaligned(converted);
                std::ptr::copy_nonoverlapping(floats.as_ptr(), target.add(whole), len - whole);
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(source: &[f32], target: *mut u16) {
        let chunks = source.chunks_exact(LANES);
        let (rest, whole) = (chunks.remainder(), source.len() - source.len() % LANES);
        for (i, chunk) in chunks.enumerate() {
            // SAFETY: the chunk has LANES elements, and `target` as many as `source`.
            unsafe {
                let halves = to_halves(chunk.as_ptr().cast::<float32x4_t>().read_unaligned());
                target.add(i * LANES).cast::<uint16x4_t>().write_unaligned(halves);
            }
        }
        if !rest.is_empty() {
            let mut floats = [0_f32; LANES];
            floats[..rest.len()].copy_from_slice(rest);
            // SAFETY: the array holds LANES elements, and `target` has room for `rest.len()` more
            // after the whole chunks.
            unsafe {
                let halves = to_halves(floats.as_ptr().cast::<float32x4_t>().read_unaligned());
                std::ptr::copy_nonoverlapping(
                    (&raw const halves).cast::<u8>(),
                    target.add(whole).cast(),
                    2 * rest.len(),
                );
            }
        }
    }
}
