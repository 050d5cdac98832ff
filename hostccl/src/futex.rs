//! The kernel's futexes: a thread sleeps while words hold certain values, and another thread wakes
//! that thread.

use std::sync::OnceLock;
use std::time::Duration;

use crate::sync::AtomicU32;

/// The most words that the kernel watches in one call.
pub(crate) const WAITV_MAX: usize = 128;

/// The kernel's `struct futex_waitv`.
#[repr(C)]
struct Waiter {
    /// The value that the word must hold for the sleep to begin.
    value: u64,
    /// The address of the word.
    address: u64,
    /// The size of the word: [`FUTEX_32`].
    flags: u32,
    /// Always 0.
    reserved: u32,
}

/// The flag of a word of 32 bits.
const FUTEX_32: u32 = 2;

/// Whether the kernel has `futex_waitv` (Linux 5.16) and the sandbox allows it.
pub(crate) fn has_waitv() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        // SAFETY: the kernel refuses zero waiters with EINVAL before it reads anything.
        let refused = unsafe { libc::syscall(libc::SYS_futex_waitv, std::ptr::null::<Waiter>(), 0, 0, 0, 0) } == -1;
        let known = std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
        refused && known
    })
}

/// Wakes all threads of all processes that sleep on the word.
#[inline]
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE reads no memory, and the address belongs to `word`.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps while the word holds `seen`, until somebody wakes the word's sleepers, or the time is up.
/// It may return earlier.
pub(crate) fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = timespec(timeout);
    // SAFETY: the word and the timeout outlive the call, and the kernel writes to neither.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout) };
}

/// Sleeps while each word holds the value beside it, until somebody wakes the sleepers of one of
/// the words, or the time is up. It may return earlier. There are at most [`WAITV_MAX`] words, and
/// the kernel [has](has_waitv) `futex_waitv`.
pub(crate) fn wait_any<'a>(words: impl ExactSizeIterator<Item = (&'a AtomicU32, u32)>, timeout: Duration) {
    let waiters: Vec<Waiter> = words
        .map(|(word, seen)| Waiter {
            value: u64::from(seen),
            address: word.as_ptr() as u64,
            flags: FUTEX_32,
            reserved: 0,
        })
        .collect();
    let deadline = monotonic_after(timeout);
    // SAFETY: the array, its words and the deadline outlive the call, and the kernel writes to none
    // of them.
    unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            waiters.as_ptr(),
            waiters.len() as u32,
            0,
            &raw const deadline,
            libc::CLOCK_MONOTONIC,
        )
    };
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

fn monotonic_after(duration: Duration) -> libc::timespec {
    let mut now = timespec(Duration::ZERO);
    // SAFETY: `now` is a valid timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let nanos = now.tv_nsec + libc::c_long::from(duration.subsec_nanos());
    libc::timespec {
        tv_sec: now.tv_sec + duration.as_secs() as i64 + nanos / 1_000_000_000,
        tv_nsec: nanos % 1_000_000_000,
    }
}
