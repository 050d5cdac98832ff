//! The logger that writes lines to stderr or calls the program's callback.

use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hostccl::fork;
use log::{Level, Log, Metadata, Record};

use super::line::line;
use super::rank::Me;
use crate::printable::printable;
use crate::wait::Deadline;

/// A function that gets the records in place of stderr.
pub(crate) type Callback = Arc<dyn Fn(Level, &str) + Send + Sync>;

/// The sink of this process.
pub(super) static SINK: Sink = Sink { callback: Mutex::new(None) };

/// How often a thread looks whether a callback is unused.
const LOOK: Duration = Duration::from_millis(1);

thread_local! {
    /// Whether this thread is inside the callback.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Writes records to stderr, or gives them to a callback.
pub(super) struct Sink {
    /// The callback that gets the records; `None` for stderr.
    callback: Mutex<Option<Callback>>,
}

impl Sink {
    /// Sets the callback and returns the earlier one.
    pub(super) fn replace(&self, callback: Option<Callback>) -> Option<Callback> {
        std::mem::replace(&mut *self.callback.lock().unwrap_or_else(PoisonError::into_inner), callback)
    }

    /// Waits until no other thread is inside a callback that was taken away. Returns false when one
    /// still is after `patience`. The calling thread may be inside that callback itself; then there
    /// is nothing to wait for.
    pub(super) fn wait_until_unused(&self, callback: Callback, patience: Duration) -> bool {
        let deadline = Deadline::after(patience);
        let is_inside = IS_INSIDE.try_with(Cell::get).unwrap_or(false);
        while !is_inside && Arc::strong_count(&callback) > 1 {
            if deadline.passed() {
                return false;
            }
            std::thread::sleep(LOOK);
        }
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

    /// Writes one record. Does nothing in a forked child, and for records that the callback causes
    /// by calls of its own, which would never end.
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
        let callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match callback {
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
