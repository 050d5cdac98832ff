//! The contents of messages.

/// Returns bytes that depend on `seed` and the place.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(31).wrapping_add(seed * 7) >> 3) as u8 ^ seed as u8).collect()
}
