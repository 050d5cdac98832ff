//! Copies of data that is not reduced.

use hostccl_reduce::{Target, stream};

/// The most bytes that are copied to the first of two places before they are copied to the second.
/// They stay in the second-level cache from the first copy to the second.
const TWICE: usize = 64 << 10;

/// Copies to the caller's receive buffer.
///
/// # Safety
/// Both sides hold `bytes` bytes and do not overlap.
#[inline]
pub(super) unsafe fn copy_result(from: *const u8, to: Target, bytes: usize) {
    // SAFETY: this function's contract.
    unsafe {
        match to.stream {
            true => stream(from, to.at, bytes),
            false => std::ptr::copy_nonoverlapping(from, to.at, bytes),
        }
    }
}

/// Copies this rank's data from its send buffer to its receive buffer, unless the two are one
/// memory.
///
/// # Safety
/// Both sides hold `bytes` bytes, and are one memory or apart.
#[inline]
pub(super) unsafe fn copy_own(from: *const u8, to: Target, bytes: usize) {
    if !std::ptr::eq(from, to.at) {
        // SAFETY: this function's contract.
        unsafe { copy_result(from, to, bytes) };
    }
}

/// Copies this rank's data to its slot, and from its send buffer to its receive buffer. Large data
/// is read from memory once.
///
/// # Safety
/// All sides hold `bytes` bytes. The slot is apart from the buffers, which are one memory or apart.
#[inline]
pub(super) unsafe fn copy_twice(from: *const u8, slot: *mut u8, own: Target, bytes: usize) {
    // In place, there is one copy only.
    let most = if std::ptr::eq(from, own.at) { bytes } else { TWICE };
    let mut done = 0;
    while done < bytes {
        let length = most.min(bytes - done);
        // SAFETY: this function's contract.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(done), slot.add(done), length);
            copy_own(from.add(done), Target { at: own.at.add(done), ..own }, length);
        }
        done += length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_copied_to_both_places() {
        for bytes in [0, 1, 63, TWICE, TWICE + 1, 3 * TWICE + 77] {
            for stream in [false, true] {
                let from: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
                let (mut slot, mut own) = (vec![0; bytes + 1], vec![0; bytes + 1]);
                let to = Target { at: own.as_mut_ptr(), stream };
                // SAFETY: all three have that many bytes and are apart.
                unsafe { copy_twice(from.as_ptr(), slot.as_mut_ptr(), to, bytes) };
                assert!(slot[..bytes] == from && own[..bytes] == from && slot[bytes] == 0 && own[bytes] == 0);
                // In place, only the slot is written.
                slot.fill(0);
                let to = Target { at: own.as_mut_ptr(), stream };
                // SAFETY: as above; the two buffers are one memory.
                unsafe { copy_twice(to.at, slot.as_mut_ptr(), to, bytes) };
                assert!(slot[..bytes] == from && own[..bytes] == from);
            }
        }
    }
}
