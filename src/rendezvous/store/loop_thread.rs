//! The thread of a loop that waits on a [`Poll`]. The thread ends when its handle is dropped.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use hostccl::fork::{self, Private};

use super::poll::{Poll, event, ring};

/// Tells a loop that it must end.
pub(super) struct End {
    /// Whether the loop must end.
    stop: AtomicBool,
    /// Wakes the loop.
    wake: Private<OwnedFd>,
}

impl End {
    /// Returns the end of a loop that waits on `poll`. The end wakes the loop with `token`.
    pub(super) fn of_loop(poll: &Poll, token: u64) -> io::Result<Arc<End>> {
        let wake = event()?;
        poll.add(&*wake, token)?;
        Ok(Arc::new(End { stop: AtomicBool::new(false), wake }))
    }

    /// Whether the loop must end.
    pub(super) fn has_come(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

/// The handle of a loop's thread. Dropping it ends the loop and waits for the thread.
pub(super) struct LoopThread {
    /// Ends the loop.
    end: Arc<End>,
    /// The thread, until it is joined.
    thread: Option<JoinHandle<()>>,
}

impl LoopThread {
    /// Starts the thread of a loop that ends when `end` has come.
    pub(super) fn start(name: &str, end: Arc<End>, work: impl FnOnce() + Send + 'static) -> io::Result<LoopThread> {
        let thread = hostccl::thread::spawn(name, work)?;
        Ok(LoopThread { end, thread: Some(thread) })
    }
}

impl Drop for LoopThread {
    fn drop(&mut self) {
        if fork::is_child() {
            // The thread belongs to the parent, so nobody waits for it here.
            return std::mem::forget(self.thread.take());
        }
        self.end.stop.store(true, Ordering::SeqCst);
        ring(&self.end.wake);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
