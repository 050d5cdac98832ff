//! Lets threads sleep while messages move, and runs the loop of the wire's own thread.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::driver::{self, LEAVE, SLICE, TICK};
use super::shared::Shared;
use super::state::Core;
use crate::event::{self, Watch};
use crate::fork;

impl Shared {
    /// The sleep of `Wire::sleep`: on the words, while the wire's thread moves messages.
    pub(super) fn sleep_on_words(&self, watches: &[Watch<'_>], timeout: Duration) {
        self.driver.polled.store(0, Ordering::Relaxed);
        self.driver.call_thread();
        event::sleep(watches, None, timeout);
    }

    /// The sleep of `Wire::sleep_on_wire`: this thread moves messages, unless another one does.
    pub(super) fn drive(&self, seen: u32, others: &[Watch<'_>], timeout: Duration) {
        let state = &self.driver;
        if fork::is_child() || state.taken.swap(true, Ordering::SeqCst) {
            let moved = Watch { event: &self.moved, seen };
            let watches: Vec<Watch<'_>> = std::iter::once(moved).chain(others.iter().copied()).collect();
            return event::sleep(&watches, None, timeout);
        }
        let until = Instant::now() + timeout.min(Duration::from_secs(3600));
        let same = || self.moved.value() == seen && others.iter().all(|watch| watch.event.value() == watch.seen);
        while same() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state.asleep.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if same() && self.ready_to_sleep() && same() {
                let slice = if others.is_empty() { left } else { left.min(SLICE) };
                driver::poll(Some(&self.worker_fd), &state.wake_driver, slice);
            }
            state.asleep.store(false, Ordering::SeqCst);
            self.turn();
        }
        state.note_poll();
        state.taken.store(false, Ordering::SeqCst);
        state.call_thread();
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

    /// Waits until `done` returns true, or for `time` at most. Moves messages meanwhile, and lets
    /// other threads use the wire. Returns whether `done` returned true.
    pub(super) fn wait_until(&self, time: Duration, done: impl Fn(&Core) -> bool) -> bool {
        let until = Instant::now() + time;
        loop {
            let seen = self.moved.value();
            let is_done = self.with(|core| {
                // SAFETY: this thread holds the lock, and keeps no reference over `advance`.
                unsafe {
                    self.advance(core);
                    done(&*core)
                }
            });
            // A forked child has no wire, so it does not wait.
            if is_done.unwrap_or(true) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.drive(seen, &[], left.min(SLICE));
        }
    }

    /// The loop of the wire's thread.
    pub(super) fn run(&self) {
        let state = &self.driver;
        let (mut beat, period) = (Instant::now(), (self.limit / 10).min(TICK));
        while !state.stop.load(Ordering::SeqCst) && !fork::is_child() {
            let left = period.saturating_sub(beat.elapsed());
            if left.is_zero() {
                let own_pause = beat.elapsed() > self.limit / 2;
                beat = Instant::now();
                self.beat(own_pause);
                (self.tick)();
                continue;
            }
            if state.taken.load(Ordering::SeqCst) {
                state.away.store(true, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                if state.taken.load(Ordering::SeqCst) {
                    driver::poll(None, &state.wake_thread, left);
                }
                state.away.store(false, Ordering::SeqCst);
            } else if state.polled_recently() {
                state.away.store(true, Ordering::SeqCst);
                driver::poll(None, &state.wake_thread, LEAVE.min(left));
                state.away.store(false, Ordering::SeqCst);
            } else if self.ready_to_sleep() {
                driver::poll(Some(&self.worker_fd), &state.wake_thread, left);
            }
        }
    }
}
