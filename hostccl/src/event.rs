//! Sleeps until a word in shared memory changes.
//!
//! An [`Event`] is a word together with the number of threads that sleep on it, so that a change on
//! which nobody sleeps costs no system call. No wake-up is lost: a sleeper first counts itself,
//! then lets the kernel compare the word. The thread that changes the word first changes it, then
//! reads the count. All four accesses are sequentially consistent, so at least one of the two
//! threads sees the other.
//!
//! # Doorbells
//! A thread sleeps on several words by `futex_waitv`, which takes at most 128 words and needs Linux
//! 5.16. Where this call cannot be used, the thread sleeps on one word in the segment, the doorbell
//! of its rank. The thread marks each word that it watches with its doorbell. A thread that changes
//! a word rings the doorbells with which that word is marked.
//!
//! The sleeper reads its doorbell, marks the words, and then reads the words. It sleeps only while
//! the doorbell still holds the value that the sleeper has read. The thread that changes a word
//! first changes the word, and then takes the marks off. These accesses are sequentially
//! consistent. So either the sleeper sees the change, or the other thread sees the mark. In the
//! second case the other thread changes the doorbell after the sleeper has read it. Then the
//! sleeper does not fall asleep, or it wakes.
//!
//! A mark stays until the word changes, also when its sleeper no longer waits. Then the change
//! rings the doorbell for nobody, or wakes a thread of that rank that watches other words and
//! sleeps again. The sleeper takes no marks off, because another thread of the same rank may rely
//! on them.
//!
//! A process may be killed after it has taken the marks off and before it has rung. Then the
//! sleepers wake at the ends of their slices, when they check their peers anyway, and mark the
//! words again.

#[cfg(test)]
mod tests;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering, fence};
use std::time::Duration;

/// A word to sleep on, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Event {
    /// The word.
    value: AtomicU32,
    /// How many threads of all processes sleep on the word.
    sleepers: AtomicU32,
    /// The doorbells to ring when the word changes, as bits. A thread that watches the word sets
    /// its bit, and the thread that rings clears the bits.
    bells: AtomicU32,
    /// The distance in bytes from this event to the first doorbell. It is the same in every
    /// mapping, because the event and the doorbells are in one segment. It is set before `bells`.
    to_bells: AtomicI64,
}

impl Event {
    /// Reads the word. The caller then also sees all memory that was written before the word was set.
    pub(crate) fn value(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Sets the word and wakes the threads that sleep on it.
    pub(crate) fn set(&self, value: u32) {
        self.value.store(value, Ordering::SeqCst);
        self.wake();
    }

    /// Sets the word and wakes nobody.
    pub(crate) fn store(&self, value: u32) {
        self.value.store(value, Ordering::Release);
    }

    /// Adds one to the word and returns the new value. It wakes nobody.
    pub(crate) fn count(&self) -> u32 {
        self.value.fetch_add(1, Ordering::SeqCst).wrapping_add(1)
    }

    /// Adds one to the word, wakes the threads that sleep on it, and returns the new value.
    pub(crate) fn change(&self) -> u32 {
        let value = self.count();
        self.wake();
        value
    }

    /// Wakes every sleeper of any process, whether or not the word has changed.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            // SAFETY: FUTEX_WAKE reads no memory, and the address belongs to `self`.
            unsafe { libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
        if self.bells.load(Ordering::SeqCst) != 0 {
            self.ring();
        }
    }

    /// Takes the marks off this event, and rings the doorbells that they name.
    #[cold]
    fn ring(&self) {
        let marks = self.bells.swap(0, Ordering::SeqCst);
        let distance = self.to_bells.load(Ordering::Acquire) as isize;
        let first = std::ptr::from_ref(self).addr().wrapping_add_signed(distance);
        for number in (0..BELLS).filter(|number| marks >> number & 1 == 1) {
            // SAFETY: a sleeper set the distance before its mark. Its doorbells are in the segment
            // of this event, which is mapped here as a whole, or in a mapping of this process that
            // lives as long as the event. A doorbell is never marked with a doorbell, so `ring`
            // does not call itself again.
            let bell = unsafe { &*std::ptr::with_exposed_provenance::<Event>(first).add(number) };
            bell.change();
        }
    }
}

/// How many doorbells a segment has. Ranks share them where there are more ranks.
pub(crate) const BELLS: usize = 16;

/// The doorbell of a rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bell<'a> {
    /// All doorbells of the segment.
    pub(crate) all: &'a [Event; BELLS],
    /// The rank.
    pub(crate) rank: usize,
}

impl Bell<'_> {
    /// Sleeps until a watched word changes, somebody calls [`Event::wake`] on one, or the time is
    /// up. The words are in the segment of the doorbell, or belong to this process and to the
    /// [`Comm`](crate::comm::Comm) of the doorbell's mapping.
    fn sleep(&self, watches: &[Watch<'_>], timeout: Duration) {
        let (number, first) = (self.rank % BELLS, std::ptr::from_ref(self.all).expose_provenance());
        let bell = &self.all[number];
        let seen = bell.value.load(Ordering::SeqCst);
        bell.sleepers.fetch_add(1, Ordering::SeqCst);
        for Watch { event, .. } in watches {
            let distance = first.wrapping_sub(std::ptr::from_ref(*event).addr()) as i64;
            event.to_bells.store(distance, Ordering::Release);
            event.bells.fetch_or(1 << number, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        if watches.iter().all(|watch| watch.event.value.load(Ordering::SeqCst) == watch.seen) {
            wait_one(&Watch { event: bell, seen }, timeout);
        }
        bell.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One condition of a sleep: the word holds `seen`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch<'a> {
    /// The word.
    pub(crate) event: &'a Event,
    /// The value that the caller has seen in the word.
    pub(crate) seen: u32,
}

/// Sleeps until a watched word differs from what was seen, somebody calls [`Event::wake`] on one,
/// or the time is up. It may return earlier.
///
/// `bell` is the doorbell of this thread's rank, where that doorbell serves all of the words. Where
/// there is none and the kernel cannot watch all words, the thread sleeps for at most
/// [`POLL_SLICE`].
pub(crate) fn sleep(watches: &[Watch<'_>], bell: Option<Bell<'_>>, timeout: Duration) {
    if let Some(bell) = bell.filter(|_| !is_watched_by_kernel(watches.len())) {
        return bell.sleep(watches, timeout);
    }
    for watch in watches {
        watch.event.sleepers.fetch_add(1, Ordering::SeqCst);
    }
    fence(Ordering::SeqCst);
    if watches.iter().all(|watch| watch.event.value.load(Ordering::SeqCst) == watch.seen) {
        match watches {
            [] => std::thread::sleep(timeout),
            [one] => wait_one(one, timeout),
            many => wait_many(many, timeout),
        }
    }
    for watch in watches {
        watch.event.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

fn wait_one(watch: &Watch<'_>, timeout: Duration) {
    let timeout = timespec(timeout);
    // SAFETY: the word and the timeout outlive the call, and the kernel writes to neither.
    unsafe {
        libc::syscall(libc::SYS_futex, watch.event.value.as_ptr(), libc::FUTEX_WAIT, watch.seen, &raw const timeout)
    };
}

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
/// The most words that the kernel watches in one call.
const FUTEX_WAITV_MAX: usize = 128;

/// Whether the kernel can watch that number of words in one call.
fn is_watched_by_kernel(words: usize) -> bool {
    words <= 1 || words <= FUTEX_WAITV_MAX && has_waitv()
}

/// How long a thread sleeps on one of many words where the kernel cannot watch them all, and where
/// the words have no common doorbell.
const POLL_SLICE: Duration = Duration::from_millis(1);

fn wait_many(watches: &[Watch<'_>], timeout: Duration) {
    if !is_watched_by_kernel(watches.len()) {
        return wait_one(&watches[0], timeout.min(POLL_SLICE));
    }
    let waiters: Vec<Waiter> = watches
        .iter()
        .map(|watch| Waiter {
            value: u64::from(watch.seen),
            address: watch.event.value.as_ptr() as u64,
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

/// Whether the kernel has `futex_waitv` (Linux 5.16) and the sandbox allows it.
fn has_waitv() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        // SAFETY: the kernel refuses zero waiters with EINVAL before it reads anything.
        let refused = unsafe { libc::syscall(libc::SYS_futex_waitv, std::ptr::null::<Waiter>(), 0, 0, 0, 0) } == -1;
        let known = std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
        refused && known
    })
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

fn monotonic_after(duration: Duration) -> libc::timespec {
    let mut now = timespec(Duration::ZERO);
    // SAFETY: `now` is a valid timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let nanos = now.tv_nsec + libc::c_long::from(duration.subsec_nanos());
    libc::timespec {
        tv_sec: now.tv_sec + duration.as_secs() as libc::time_t + nanos / 1_000_000_000,
        tv_nsec: nanos % 1_000_000_000,
    }
}
