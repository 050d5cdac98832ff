//! Takes the place of the product's module `plain`: accesses to shared memory that are no atomics.
//! loom checks that the protocol orders each of them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use loom::cell::UnsafeCell;

thread_local! {
    /// One cell of loom for each line of shared memory, by the number of the line. loom runs all
    /// threads of a model on one thread.
    static LINES: RefCell<BTreeMap<usize, UnsafeCell<()>>> = const { RefCell::new(BTreeMap::new()) };
}

/// How many bytes are checked together.
const LINE: usize = 64;

/// Has loom check the accesses to these lines. The model calls this before it starts threads.
pub fn share(memory: *const u8, bytes: usize) {
    LINES.with_borrow_mut(|lines| {
        for line in memory.addr() / LINE..(memory.addr() + bytes).div_ceil(LINE) {
            lines.insert(line, UnsafeCell::new(()));
        }
    });
}

/// Forgets the lines of the execution before this one.
pub fn begin() {
    LINES.with_borrow_mut(BTreeMap::clear);
}

fn look(memory: *const u8, bytes: usize, writes: bool) {
    LINES.with_borrow(|lines| {
        for number in memory.addr() / LINE..(memory.addr() + bytes).div_ceil(LINE) {
            let line = lines.get(&number).expect("the model has shared this memory");
            if writes { line.with_mut(|_| ()) } else { line.with(|_| ()) }
        }
    });
}

/// Writes a value to shared memory.
///
/// # Safety
/// The contract of [`std::ptr::write`].
pub unsafe fn write<T>(to: *mut T, value: T) {
    look(to.cast(), size_of::<T>(), true);
    // SAFETY: the caller's promise.
    unsafe { to.write(value) }
}

/// Reads a value from shared memory.
///
/// # Safety
/// The contract of [`std::ptr::read`].
pub unsafe fn read<T>(from: *const T) -> T {
    look(from.cast(), size_of::<T>(), false);
    // SAFETY: the caller's promise.
    unsafe { from.read() }
}

/// Copies bytes to shared memory.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy_in(from: *const u8, to: *mut u8, bytes: usize) {
    look(to, bytes, true);
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Copies bytes from shared memory.
///
/// # Safety
/// The contract of [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy_out(from: *const u8, to: *mut u8, bytes: usize) {
    look(from, bytes, false);
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}
