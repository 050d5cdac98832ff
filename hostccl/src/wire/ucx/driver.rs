//! Decides which thread moves messages, and how threads sleep meanwhile.
//!
//! A thread that waits for messages moves them itself, because that is quickest: it calls
//! `progress` while it polls, and then sleeps in `poll` on the worker's descriptor. Only one
//! thread at a time sleeps in this way: the driver. When no thread of the program is the driver,
//! the wire's own thread sleeps in this way. The wire's thread also moves messages for which
//! nobody waits, sends signs of life, and looks for peers that are silent.
//!
//! The wire's thread keeps away from the worker while threads of the program poll, because it
//! would take the processor and the lock from them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::fork::{self, Private};

/// How long the driver sleeps before it looks at words that do not belong to the wire. One such
/// word is the alarm of a communicator, which is written when the communicator fails.
pub(super) const SLICE: Duration = Duration::from_millis(5);
/// A thread of the program that made progress this recently is expected to do so again.
const RECENT: Duration = Duration::from_micros(200);
/// How long the wire's thread leaves the worker to a thread that polls.
pub(super) const LEAVE: Duration = Duration::from_millis(1);

/// The longest time from one call of the tick to the next. At each tick the wire's thread also
/// looks which peers need a sign of life.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The state by which the threads agree which of them drives the wire.
#[derive(Debug)]
pub(super) struct Driver {
    /// Wakes the driver from its sleep in `poll`.
    pub(super) wake_driver: Private<OwnedFd>,
    /// Ends a sleep of the wire's thread.
    pub(super) wake_thread: Private<OwnedFd>,
    /// Whether a thread of the program is the driver.
    pub(super) taken: AtomicBool,
    /// Whether the driver may be asleep, so that a change of `moved` must wake it.
    pub(super) asleep: AtomicBool,
    /// Whether the wire's thread leaves the worker alone until it is woken.
    pub(super) away: AtomicBool,
    /// When a thread of the program last made progress, in nanoseconds since `start`.
    pub(super) polled: AtomicU64,
    /// When the wire began.
    start: Instant,
    /// Whether the wire ends.
    pub(super) stop: AtomicBool,
}

impl Driver {
    pub(super) fn new() -> std::io::Result<Driver> {
        let event_fd = || {
            Private::open(|| {
                // SAFETY: the call returns a new descriptor, or -1.
                match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
                    -1 => Err(std::io::Error::last_os_error()),
                    // SAFETY: the descriptor is new, so nobody else owns it.
                    fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
                }
            })
        };
        Ok(Driver {
            wake_driver: event_fd()?,
            wake_thread: event_fd()?,
            taken: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            away: AtomicBool::new(false),
            polled: AtomicU64::new(0),
            start: Instant::now(),
            stop: AtomicBool::new(false),
        })
    }

    /// Notes that a thread of the program makes progress.
    pub(super) fn note_poll(&self) {
        self.polled.store(self.start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Whether a thread of the program has made progress a moment ago.
    pub(super) fn polled_recently(&self) -> bool {
        let since = (self.start.elapsed().as_nanos() as u64).saturating_sub(self.polled.load(Ordering::Relaxed));
        Duration::from_nanos(since) < RECENT
    }

    /// Wakes the driver after a change of the wire's word.
    pub(super) fn changed(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            write(&self.wake_driver);
        }
    }

    /// Makes the wire's thread look after the worker.
    pub(super) fn call_thread(&self) {
        if self.away.swap(false, Ordering::SeqCst) {
            write(&self.wake_thread);
        }
    }

    /// Ends the wire's thread.
    pub(super) fn end_thread(&self) {
        self.stop.store(true, Ordering::SeqCst);
        write(&self.wake_thread);
    }
}

fn write(fd: &OwnedFd) {
    if fork::is_child() {
        // The descriptor is closed in a forked child, and its number may belong to another file.
        return;
    }
    // SAFETY: the eight bytes are read during the call. A full counter wakes as well.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const ONE).cast(), 8) };
}

static ONE: u64 = 1;

/// Sleeps until one of these descriptors is readable, or the time is up. Resets `wake`.
pub(super) fn poll(worker: Option<&OwnedFd>, wake: &OwnedFd, timeout: Duration) {
    let wanted = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // The kernel passes over a descriptor below 0.
    let mut both = [wanted(wake.as_raw_fd()), wanted(worker.map_or(-1, AsRawFd::as_raw_fd))];
    let timeout = libc::timespec { tv_sec: timeout.as_secs().min(3600) as i64, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: the array and the timeout outlive the call.
    unsafe { libc::ppoll(both.as_mut_ptr(), 2, &raw const timeout, std::ptr::null()) };
    if both[0].revents != 0 {
        let mut count = 0_u64;
        // SAFETY: the call writes at most eight bytes. It does not block.
        unsafe { libc::read(wake.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}
