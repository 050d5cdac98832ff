//! Who moves messages, and how threads sleep meanwhile.
//!
//! A thread that waits for messages moves them itself, because that is quickest: it calls
//! `progress` while it polls, and then sleeps in `poll` on the worker's descriptor. Only one thread
//! sleeps so, the driver. Otherwise the wire's own thread does. It also moves what nobody waits
//! for, sends signs of life, and looks for peers that are silent.
//!
//! The wire's thread keeps away from the worker while threads of the program poll: it would take
//! the processor and the lock from them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::Shared;
use crate::event::{self, Watch};
use crate::fork::{self, Private};

/// How long the driver sleeps before it looks at words that do not belong to the wire. One such
/// word is the alarm of a communicator, which is written when the communicator fails.
const SLICE: Duration = Duration::from_millis(5);
/// A thread of the program that made progress this recently is expected to do so again.
const RECENT: Duration = Duration::from_micros(200);
/// How long the wire's thread leaves the worker to a thread that polls.
const LEAVE: Duration = Duration::from_millis(1);

/// How often the wire's thread sends signs of life and calls the tick, at least.
const TICK: Duration = Duration::from_millis(100);

/// What the threads know of each other.
#[derive(Debug)]
pub(super) struct Driver {
    /// Ends a sleep in `poll` of the driver.
    wake_driver: Private<OwnedFd>,
    /// Ends a sleep of the wire's thread.
    wake_thread: Private<OwnedFd>,
    /// Whether a thread of the program is the driver.
    taken: AtomicBool,
    /// Whether the driver may be asleep, so that a change of `moved` must wake it.
    asleep: AtomicBool,
    /// Whether the wire's thread leaves the worker alone until it is woken.
    away: AtomicBool,
    /// When a thread of the program last made progress, in nanoseconds since `start`.
    polled: AtomicU64,
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
    fn polled_recently(&self) -> bool {
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
    // SAFETY: the eight bytes are read during the call. A full counter wakes as well.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const ONE).cast(), 8) };
}

static ONE: u64 = 1;

/// Sleeps until one of these descriptors is readable. Empties the second one.
fn poll(worker: Option<RawFd>, wake: &OwnedFd, timeout: Duration) {
    let wanted = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // The kernel passes over a descriptor below 0.
    let mut both = [wanted(wake.as_raw_fd()), wanted(worker.unwrap_or(-1))];
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs().min(3600) as libc::time_t, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: the array and the timeout outlive the call.
    unsafe { libc::ppoll(both.as_mut_ptr(), 2, &raw const timeout, std::ptr::null()) };
    if both[0].revents != 0 {
        let mut count = 0_u64;
        // SAFETY: the call writes at most eight bytes. It does not block.
        unsafe { libc::read(wake.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl Shared {
    /// The sleep of `Wire::sleep`: on the words, while the wire's thread moves messages.
    pub(super) fn sleep_on_words(&self, watches: &[Watch<'_>], timeout: Duration) {
        self.driver.polled.store(0, Ordering::Relaxed);
        self.driver.call_thread();
        event::sleep(watches, timeout);
    }

    /// The sleep of `Wire::sleep_on_wire`: this thread moves messages, unless another one does.
    pub(super) fn drive(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let driver = &self.driver;
        if fork::is_child() || driver.taken.swap(true, Ordering::SeqCst) {
            let moved = Watch { event: &self.moved, seen };
            let watches: Vec<Watch<'_>> = std::iter::once(moved).chain(others.iter().copied()).collect();
            return event::sleep(&watches, timeout);
        }
        let until = Instant::now() + timeout.min(Duration::from_secs(3600));
        let same = || self.moved.value() == seen && others.iter().all(|watch| watch.event.value() == watch.seen);
        while same() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            driver.asleep.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if same() && self.ready_to_sleep() && same() {
                let slice = if others.is_empty() { left } else { left.min(SLICE) };
                poll(Some(self.worker_fd), &driver.wake_driver, slice);
            }
            driver.asleep.store(false, Ordering::SeqCst);
            self.turn();
        }
        driver.note_poll();
        driver.taken.store(false, Ordering::SeqCst);
        driver.call_thread();
    }

    /// Makes progress, and arms the worker. Returns false where there is more to do.
    fn ready_to_sleep(&self) -> bool {
        self.with(|core| {
            // SAFETY: this thread holds the lock, and has no reference to what it protects.
            let moved = unsafe { self.advance(core) };
            // SAFETY: as above.
            !moved && unsafe { (*core).worker.arm() }
        })
        .unwrap_or(true)
    }

    /// What the wire's thread does.
    pub(super) fn run(&self) {
        let driver = &self.driver;
        let (mut beat, period) = (Instant::now(), (self.limit / 10).min(TICK));
        while !driver.stop.load(Ordering::SeqCst) && !fork::is_child() {
            let left = period.saturating_sub(beat.elapsed());
            if left.is_zero() {
                let own_pause = beat.elapsed() > self.limit / 2;
                beat = Instant::now();
                self.beat(own_pause);
                (self.tick)();
                continue;
            }
            if driver.taken.load(Ordering::SeqCst) {
                driver.away.store(true, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                if driver.taken.load(Ordering::SeqCst) {
                    poll(None, &driver.wake_thread, left);
                }
                driver.away.store(false, Ordering::SeqCst);
            } else if driver.polled_recently() {
                driver.away.store(true, Ordering::SeqCst);
                poll(None, &driver.wake_thread, LEAVE.min(left));
                driver.away.store(false, Ordering::SeqCst);
            } else if self.ready_to_sleep() {
                poll(Some(self.worker_fd), &driver.wake_thread, left);
            }
        }
    }
}
