//! An allocator that knows what was asked of it: a text takes no more memory than it is long.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest piece of memory that anything in this process asked for.
struct Watched;

pub static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Watched = Watched;

// SAFETY: all of it is the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(place, layout) }
    }
}

/// That nothing so far asked for more than 64 MiB at once.
pub fn check_largest() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest > 0 && largest < 64 << 20, "{largest} bytes asked for at once");
}
