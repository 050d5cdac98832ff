//! Reads and writes of shared memory that are not atomic. They move the bytes that one rank hands
//! to another.
//!
//! In tests/memory_order another module `plain` takes the place of this one. With it, loom checks
//! that the protocol orders each of these accesses.

/// Writes a value to shared memory.
///
/// # Safety
/// The contract of [`std::ptr::write`].
#[inline(always)]
pub(crate) unsafe fn write<T>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) }
}

/// Reads a value from shared memory.
///
/// # Safety
/// The contract of [`std::ptr::read`].
#[inline(always)]
pub(crate) unsafe fn read<T>(from: *const T) -> T {
    // SAFETY: the caller's promise.
    unsafe { from.read() }
}

/// Copies bytes to shared memory.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
pub(crate) unsafe fn copy_in(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Copies bytes from shared memory.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
pub(crate) unsafe fn copy_out(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}
