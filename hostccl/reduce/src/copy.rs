//! Copies with stores that bypass the caches.

/// Copies `bytes` bytes with stores that bypass the caches.
///
/// # Safety
/// `from` is readable and `to` is writable for `bytes` bytes, and they do not overlap.
pub unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: this function's contract.
    unsafe { stream_unordered(from, to, bytes) };
    order_streams();
}

/// Copies as [`stream`] does, but other threads may see the copy only after [`order_streams`].
///
/// # Safety
/// The contract of [`stream`].
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn stream_unordered(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    // SAFETY: head, lines and tail together are the given ranges. The head aligns the streamed
    // stores. SSE2 is part of every x86-64 processor.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let (mut source, mut target) = (from.add(head).cast::<__m128i>(), to.add(head).cast::<__m128i>());
        for _ in 0..lines {
            let line = [
                _mm_loadu_si128(source),
                _mm_loadu_si128(source.add(1)),
                _mm_loadu_si128(source.add(2)),
                _mm_loadu_si128(source.add(3)),
            ];
            for (offset, part) in line.into_iter().enumerate() {
                _mm_stream_si128(target.add(offset), part);
            }
            source = source.add(4);
            target = target.add(4);
        }
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
    }
}

/// Copies `bytes` bytes.
///
/// # Safety
/// The contract of [`stream`].
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) unsafe fn stream_unordered(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// Makes what [`stream_unordered`] has written visible before any later store. The processor does
/// not order streamed stores by itself.
#[inline]
pub(crate) fn order_streams() {
    // SAFETY: a fence touches no memory, and SSE is part of every x86-64 processor.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}
