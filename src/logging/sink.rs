//! The logger that writes lines to stderr or calls the program's callback.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use hostccl::fork;
use log::{Level, Log, Metadata, Record};

use super::line::line;
use super::rank::Me;
use crate::printable::printable;
use crate::wait::Deadline;

/// A function that gets the records.
type Function = dyn Fn(Level, &str) + Send + Sync;

/// A function that gets the records in place of stderr.
pub(crate) type Callback = Arc<Function>;

/// The sink of this process.
pub(super) static SINK: Sink = Sink::new();

/// How often a thread looks whether the replaced callbacks are unused.
const LOOK: Duration = Duration::from_millis(1);

thread_local! {
    /// Whether this thread is inside the callback.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Writes records to stderr, or gives them to a callback.
pub(super) struct Sink(Mutex<Callbacks>);

/// The callbacks that the sink was given.
struct Callbacks {
    /// The callback that gets the records; `None` for stderr.
    current: Option<Callback>,
    /// The earlier callbacks that a thread may still be running. Such a thread holds its callback.
    replaced: Vec<Weak<Function>>,
}

impl Sink {
    const fn new() -> Sink {
        Sink(Mutex::new(Callbacks { current: None, replaced: Vec::new() }))
    }

    fn callbacks(&self) -> MutexGuard<'_, Callbacks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the callback in place of the earlier one.
    pub(super) fn replace(&self, callback: Option<Callback>) {
        let mut callbacks = self.callbacks();
        let earlier = std::mem::replace(&mut callbacks.current, callback);
        callbacks.replaced.retain(|replaced| replaced.strong_count() > 0);
        callbacks.replaced.extend(earlier.as_ref().map(Arc::downgrade));
    }

    /// Returns the callback that gets the records. The calling thread counts as inside it while it
    /// holds the value.
    fn current(&self) -> Option<Callback> {
        self.callbacks().current.clone()
    }

    /// Waits until no other thread is inside a callback that was replaced by now, also by earlier
    /// calls. Returns false when one still is after `patience`. The calling thread may be inside
    /// such a callback itself; then there is nothing to wait for.
    pub(super) fn wait_until_unused(&self, patience: Duration) -> bool {
        let deadline = Deadline::after(patience);
        let replaced = self.callbacks().replaced.clone();
        let is_inside = IS_INSIDE.try_with(Cell::get).unwrap_or(false);
        while !is_inside && replaced.iter().any(|replaced| replaced.strong_count() > 0) {
            if deadline.passed() {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        // The count is read without an order. From here on the caller may free what a callback has
        // used, so the last use must have happened before. A thread that leaves a callback lowers
        // the count with the order Release.
        fence(Ordering::Acquire);
        true
    }
}

/// Marks the calling thread as inside the callback while this lives.
struct Inside;

impl Inside {
    /// Returns `None` where the thread is inside already, and where it is being torn down.
    fn enter() -> Option<Inside> {
        let was_inside = IS_INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true);
        (!was_inside).then_some(Inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = IS_INSIDE.try_with(|inside| inside.set(false));
    }
}

impl Log for Sink {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        metadata.level() <= log::max_level() && (target.starts_with("devicemesh") || target.starts_with("hostccl"))
    }

    /// Writes one record. Does nothing in a forked child. Drops a record that the callback causes
    /// by calls of its own, because the records would never end.
    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) || fork::is_child() {
            return;
        }
        let text = record.args().to_string();
        // The wire of the host engine belongs to the process, and does not know the process's rank.
        let is_nameless = record.target().starts_with("hostccl") && !text.starts_with("rank ");
        let text = if is_nameless { format!("{Me}: {text}") } else { text };
        let text = printable(&text);
        // A callback is called without the lock, because it may set another one.
        match self.current() {
            Some(callback) => {
                let Some(_inside) = Inside::enter() else { return };
                // A panic of a callback has nowhere to go.
                let _ = catch_unwind(AssertUnwindSafe(|| callback(record.level(), &text)));
            }
            None => {
                let line = line(SystemTime::now(), record.level(), &text);
                // Rust's stderr has no buffer, so this is one write. When it fails, nobody can be
                // told.
                let _ = std::io::stderr().write(&line);
            }
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value of [`Sink::current`] stands for a thread that is inside the callback.
    #[test]
    fn a_callback_that_runs_is_waited_for_also_after_later_ones_were_set() {
        let (sink, callback) = (Sink::new(), || -> Callback { Arc::new(|_, _| {}) });
        sink.replace(Some(callback()));
        let inside = sink.current();
        sink.replace(Some(callback()));
        assert!(!sink.wait_until_unused(Duration::ZERO));
        sink.replace(Some(callback()));
        assert!(!sink.wait_until_unused(Duration::ZERO), "the first callback still runs");
        drop(inside);
        assert!(sink.wait_until_unused(Duration::ZERO));
        sink.replace(None);
        assert!(sink.wait_until_unused(Duration::ZERO));
    }
}
