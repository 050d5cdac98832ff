//! Questions to the library about a communicator. While one is asked, nobody ends the communicator.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;

use super::super::background::Worker;
use super::super::polling::poll_until_done;
use super::Handle;
use crate::ccl::{Library, RawComm};
use crate::error::Result;
use crate::wait::Wait;

/// Questions to the library.
impl Handle {
    /// Asks the library about the raw communicator, while nobody ends it. Returns `None` where
    /// there is none. On a library with streams the question runs on `worker`, or else on a thread
    /// of its own. Fails when the answer is not there by the deadline; `call` is the library's
    /// function.
    pub(in crate::comm) fn ask<T: Send + 'static>(
        self: &Arc<Handle>,
        worker: Option<&Worker>,
        wait: &Wait,
        call: &'static str,
        question: impl FnOnce(&Library, RawComm) -> T + Send + 'static,
    ) -> Result<Option<T>> {
        let what = || format!("{call} on the communicator of {}", self.label());
        if self.raw().is_null() {
            return Ok(None);
        }
        // Another thread's question may never return, so the wait for it has a deadline.
        let taken = || self.is_asked.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !taken() {
            poll_until_done(wait, what, sleep, || Ok(taken()))?;
        }
        let answered = Answered(Arc::clone(self));
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        if raw.is_null() {
            return Ok(None);
        }
        if !self.library.has_streams() {
            return Ok(Some(question(&self.library, raw)));
        }
        let own;
        let worker = match worker {
            Some(worker) => worker,
            None => {
                own = Worker::new(&self.library, "dm-background");
                &own
            }
        };
        let work = move || {
            let answer = question(&answered.0.library, raw);
            drop(answered);
            Ok(answer)
        };
        worker.run(work, drop, |is_done| poll_until_done(wait, what, sleep, is_done))?.map(Some)
    }

    /// Does what [`ask`](Handle::ask) does, on the calling thread.
    pub(in crate::comm) fn ask_here<T>(
        self: &Arc<Handle>,
        wait: &Wait,
        question: impl FnOnce(RawComm) -> T,
    ) -> Result<Option<T>> {
        let taken = || self.is_asked.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        poll_until_done(wait, || format!("a question on the communicator of {}", self.label()), sleep, || Ok(taken()))?;
        let _answered = Answered(Arc::clone(self));
        let raw = RawComm(self.raw.load(Ordering::SeqCst));
        Ok((!raw.is_null()).then(|| question(raw)))
    }
}

/// A question that is asked. Dropping it lets others ask, and end the communicator.
pub(super) struct Answered(pub(super) Arc<Handle>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.is_asked.store(false, Ordering::SeqCst);
        if self.0.raw.load(Ordering::SeqCst).is_null() {
            self.0.end_what_was_taken();
        }
    }
}
