//! Sleeps until a word in shared memory changes.
//!
//! An [`Event`] is a word together with the number of threads that sleep on it, so that a change on
//! which nobody sleeps costs no system call. No wake-up is lost: a sleeper first counts itself,
//! then lets the kernel compare the word. The thread that changes the word first changes it, then
//! reads the count. All four accesses are sequentially consistent, so at least one of the two
//! threads sees the other.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// A word to sleep on, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Event {
    /// The word.
    value: AtomicU32,
    /// How many threads of all processes sleep on the word.
    sleepers: AtomicU32,
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
pub(crate) fn sleep(watches: &[Watch<'_>], timeout: Duration) {
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

/// How long a thread sleeps on one of many words where the kernel cannot watch them all.
const POLL_SLICE: Duration = Duration::from_millis(1);

fn wait_many(watches: &[Watch<'_>], timeout: Duration) {
    if watches.len() > FUTEX_WAITV_MAX || !has_waitv() {
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_change_wakes_the_sleeper_long_before_its_time() {
        let (event, other) = (Event::default(), Event::default());
        for watched in 1..=2 {
            let before = event.value();
            let all = [Watch { event: &event, seen: before }, Watch { event: &other, seen: 0 }];
            let started = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| event.set(before + 1));
                while event.value() == before {
                    sleep(&all[..watched], Duration::from_secs(20));
                }
            });
            assert!(started.elapsed() < Duration::from_secs(10), "the wake-up was lost with {watched} words");
        }
        assert_eq!(event.sleepers.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn no_wake_up_is_lost_in_many_handovers() {
        let (there, back) = (Event::default(), Event::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..20_000 {
                    while there.value() == turn {
                        sleep(&[Watch { event: &there, seen: turn }], Duration::from_secs(20));
                    }
                    back.set(turn + 1);
                }
            });
            let started = Instant::now();
            for turn in 0..20_000 {
                there.set(turn + 1);
                while back.value() == turn {
                    sleep(&[Watch { event: &back, seen: turn }], Duration::from_secs(20));
                }
            }
            assert!(started.elapsed() < Duration::from_secs(15), "a sleeper waited out its slice");
        });
    }

    #[test]
    fn more_words_than_the_kernel_watches_are_looked_at_in_turn() {
        let events: Vec<Event> = (0..FUTEX_WAITV_MAX + 2).map(|_| Event::default()).collect();
        let watches: Vec<_> = events.iter().map(|event| Watch { event, seen: 0 }).collect();
        let started = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| events[FUTEX_WAITV_MAX + 1].set(1));
            while events[FUTEX_WAITV_MAX + 1].value() == 0 {
                sleep(&watches, Duration::from_secs(20));
            }
        });
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn time_runs_out() {
        let event = Event::default();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(30) {
            sleep(&[Watch { event: &event, seen: 0 }], Duration::from_millis(10));
        }
        let watches = [Watch { event: &event, seen: 0 }, Watch { event: &event, seen: 0 }];
        sleep(&watches, Duration::from_millis(10));
    }
}
