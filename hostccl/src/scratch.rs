//! Temporary memory that a communicator keeps from call to call.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::segment::LINE;

/// The most bytes that a communicator keeps between its calls.
const KEPT_BYTES: usize = 32 << 20;

/// A piece of memory that begins on a cache line. Its content is undefined at first.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The first byte.
    at: NonNull<u8>,
    /// The length in bytes, which is not 0.
    bytes: usize,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Memory {}
// SAFETY: a shared reference gives no access to the memory without `unsafe`.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Memory {
        let bytes = bytes.max(1).next_multiple_of(LINE);
        let layout = Memory::layout(bytes);
        // SAFETY: the layout is not empty.
        let at = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Memory { at, bytes }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, LINE).expect("the size of a temporary is below isize::MAX")
    }

    /// The first byte.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// The length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated the memory with this layout.
        unsafe { dealloc(self.at.as_ptr(), Memory::layout(self.bytes)) };
    }
}

/// The memory that no call uses at the moment.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The pieces.
    free: Mutex<Vec<Memory>>,
}

impl Scratch {
    /// Returns a piece of at least `bytes` bytes: the smallest that is free and large enough, or a
    /// new one.
    pub(crate) fn take(&self, bytes: usize) -> Memory {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = (0..free.len()).filter(|index| free[*index].bytes >= bytes);
        match fitting.min_by_key(|index| free[*index].bytes) {
            Some(index) => free.swap_remove(index),
            None => Memory::new(bytes),
        }
    }

    /// Keeps a piece for later calls, if there is room for it.
    pub(crate) fn give(&self, memory: Memory) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let kept: usize = free.iter().map(Memory::bytes).sum();
        if kept + memory.bytes <= KEPT_BYTES {
            free.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_that_was_given_back_is_used_again() {
        let scratch = Scratch::default();
        let (small, large) = (scratch.take(100), scratch.take(1000));
        let (first, second) = (small.at(), large.at());
        assert_eq!((small.bytes(), large.bytes()), (128, 1024));
        scratch.give(large);
        scratch.give(small);
        assert_eq!((scratch.take(90).at(), scratch.take(90).at()), (first, second));
        scratch.give(Memory::new(KEPT_BYTES + 1));
        assert!(scratch.free.lock().unwrap().is_empty(), "a piece beyond the bound is freed");
    }
}
