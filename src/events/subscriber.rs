//! A receiver of events: a handler, or the reader of a queue.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

use hostccl::fork::Own;

use super::event::Handler;
use super::queue::Queue;
use crate::error::Result;
use crate::recorder;
use crate::wait::Deadline;

/// How often a thread looks whether a handler has returned.
const RETURNED: Duration = Duration::from_millis(1);

/// The number of the next subscriber.
static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this is the thread that calls the handler.
    static IS_EVENTS_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// A handler, or the reader of a queue.
pub(super) struct Subscriber {
    /// The number of the subscriber, which no other one has.
    id: u64,
    /// After this time a call is slow.
    slow: Duration,
    queue: Queue,
    /// The function that gets the events of the queue; `None` where the program takes them itself.
    handler: Option<Handler>,
    /// Whether the handler runs now.
    is_called: AtomicBool,
    /// A child that is forked while this subscriber exists has no events thread, so the child may
    /// use nothing of this library.
    _held: Own<()>,
}

impl Subscriber {
    /// A subscriber that gets no events yet. Opens the recording of this process, in which slow
    /// calls are found.
    pub(super) fn new(slow: Duration, queue: Queue, handler: Option<Handler>) -> Result<Arc<Subscriber>> {
        recorder::open()?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let is_called = AtomicBool::new(false);
        Ok(Arc::new(Subscriber { id, slow, queue, handler, is_called, _held: Own::new(()) }))
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// After this time a call is slow.
    pub(super) fn slow(&self) -> Duration {
        self.slow
    }

    /// Whether the subscriber has a handler.
    pub(super) fn has_handler(&self) -> bool {
        self.handler.is_some()
    }

    /// Calls the handler with the events of the subscriber's queue.
    pub(super) fn deliver(&self) {
        let Some(handler) = &self.handler else { return };
        // Whoever removes the handler empties the queue. After that the handler runs no more, or
        // the removing thread sees that it runs.
        while let Some(event) = self.queue.pop_noting(|| self.is_called.store(true, Ordering::SeqCst)) {
            // No caller could handle a panic of the handler.
            let _ = catch_unwind(AssertUnwindSafe(|| handler(&event)));
            self.is_called.store(false, Ordering::SeqCst);
        }
    }

    /// Whether the handler, which was removed, has returned before the deadline. A handler that
    /// makes this call itself need not have returned.
    pub(super) fn has_ended_before(&self, deadline: &Deadline) -> bool {
        while !is_this_thread() && self.is_called.load(Ordering::SeqCst) {
            if deadline.passed() {
                return false;
            }
            sleep(RETURNED);
        }
        true
    }
}

/// Notes that the calling thread is the one that calls the handler.
pub(super) fn begin_thread() {
    let _ = IS_EVENTS_THREAD.try_with(|is_it| is_it.set(true));
}

/// Whether the calling thread is the one that calls the handler.
pub(super) fn is_this_thread() -> bool {
    IS_EVENTS_THREAD.try_with(Cell::get).unwrap_or(false)
}
