//! The questions to the library about a communicator: whether it works, and how it failed.

use std::sync::atomic::Ordering;

use super::super::background::Worker;
use super::super::failure::{blame, is_repeated, with_world_ranks};
use super::{Communicator, State};
use crate::ccl::{Library, RawComm, result};
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// Questions to the library.
impl Communicator {
    /// Whether nothing is in progress on the communicator. Fails when the communicator has failed,
    /// and when the library does not answer.
    pub(in crate::comm) fn poll(&self) -> Result<bool> {
        self.poll_by(&self.question_wait(), None)
    }

    /// Does what [`poll`](Communicator::poll) does, within `wait` and on the thread of `worker`.
    pub(in crate::comm) fn poll_by(&self, wait: &Wait, worker: Option<&Worker>) -> Result<bool> {
        self.poll_quietly(wait, worker)?.map_err(|error| self.explain_as(error, true))
    }

    /// Does what [`poll_by`](Communicator::poll_by) does while a child of the communicator is made.
    pub(in crate::comm) fn poll_making(&self, wait: &Wait, worker: &Worker) -> Result<bool> {
        let asked = self.ask(Some(worker), wait, "ncclCommGetAsyncError", |library, raw| library.poll_making(raw))?;
        asked.map_err(|error| self.explain_as(error, true))
    }

    /// Does what [`poll_by`](Communicator::poll_by) does. The inner error is the library's, and is
    /// not explained and not logged yet. An answer that is late is the outer error. That error
    /// says nothing about the communicator, because the whole process may have been stopped
    /// meanwhile.
    pub(in crate::comm) fn poll_quietly(&self, wait: &Wait, worker: Option<&Worker>) -> Result<Result<bool>> {
        self.ask(worker, wait, "ncclCommGetAsyncError", |library, raw| library.poll(raw))
    }

    /// How long a question to the library may take. The answer is there at once, unless something
    /// is wrong.
    fn question_wait(&self) -> Wait {
        Wait::after(self.patience())
    }

    fn ask<T: Send + 'static>(
        &self,
        worker: Option<&Worker>,
        wait: &Wait,
        call: &'static str,
        question: impl FnOnce(&Library, RawComm) -> T + Send + 'static,
    ) -> Result<T> {
        match self.handle.ask(worker, wait, call, question)? {
            Some(answer) => Ok(answer),
            None => Err(self.gone()),
        }
    }

    /// Ends the communicator where another rank waits in a collective on it. This rank does not
    /// make that collective, because this rank is in `call` instead. Both ranks then get an error
    /// that says so.
    pub(in crate::comm) fn refuse_collectives(&self, call: &str) -> Result<()> {
        let raw = self.ready()?;
        self.library.refuse(raw, call).map_err(|error| self.explain(raw, error))
    }

    /// Whether the communicator has failed. Asks the library where no failure is known yet.
    pub(in crate::comm) fn has_failed(&self) -> bool {
        self.has_failed_by(&self.question_wait())
    }

    /// Does what [`has_failed`](Communicator::has_failed) does, within `wait`. Where the answer is
    /// late, no failure is known.
    pub(in crate::comm) fn has_failed_by(&self, wait: &Wait) -> bool {
        self.failure.is_known()
            || (!self.raw().is_null() && self.poll_by(wait, None).is_err() && self.failure.is_known())
    }

    /// Returns the name under which the ranks of an agreed call know the communicator; `None` when
    /// it has no such name, has ended, or has failed as far as this rank knows: then it cannot be
    /// shared.
    pub(in crate::comm) fn shareable_name(&self) -> Option<&str> {
        self.agreed_name.get().filter(|_| self.is_sound()).map(String::as_str)
    }

    /// Whether a further dimension can use the communicator: it has neither ended nor failed, as
    /// far as this rank knows.
    pub(in crate::comm) fn is_sound(&self) -> bool {
        self.state().is_usable() && !self.has_failed()
    }

    /// Whether the communicator has failed and no root mesh holds it any more.
    pub(in crate::comm) fn is_abandoned(&self) -> bool {
        self.is_unheld() && self.has_failed()
    }

    /// Whether this library must end the communicator, and no root mesh holds it any more. Asks no
    /// communicator library.
    pub(in crate::comm) fn is_unheld(&self) -> bool {
        self.handle.is_owned() && self.holders.load(Ordering::SeqCst) == 0
    }

    /// Does what [`poll`](Communicator::poll) does, on the calling thread and so without a
    /// deadline. Calls that put operations on a stream use this function: such calls run on the
    /// calling thread as well, and handing the question to another thread would cost more than the
    /// operation. The inner error is not explained and not logged yet.
    pub(in crate::comm) fn poll_here(&self) -> Result<Result<bool>> {
        self.ask_here(|raw| self.library.poll(raw))
    }

    /// Asks the library about the raw communicator, on the calling thread, while nobody ends it.
    pub(in crate::comm) fn ask_here<T>(&self, question: impl FnOnce(RawComm) -> T) -> Result<T> {
        self.handle.ask_here(&self.question_wait(), question)?.ok_or_else(|| self.gone())
    }

    /// Returns the error of a call on the communicator, with what the library knows about the
    /// reason. When the whole communicator has failed, keeps the failure.
    pub(in crate::comm) fn explain(&self, raw: RawComm, error: Error) -> Error {
        let has_failed =
            self.raw() == raw && self.poll_quietly(&self.question_wait(), None).is_ok_and(|it| it.is_err());
        self.explain_as(error, has_failed)
    }

    /// Does what [`explain`](Communicator::explain) does. `has_failed` says whether the whole
    /// communicator has failed, or only this call.
    pub(in crate::comm) fn explain_as(&self, error: Error, has_failed: bool) -> Error {
        if self.state() != State::Ready {
            return Error::aborted(format!("the communicator of {} was aborted during the call", self.label()))
                .with_ccl_result(error.ccl_result());
        }
        let error = match error.ccl_result() {
            // The engine found that the ranks' calls do not fit together. Its message says who
            // called what.
            result::INVALID_USAGE if has_failed && self.library.is_host_engine() => {
                let mismatch = Error::new(Status::Mismatch, error.message()).with_ccl_result(error.ccl_result());
                mismatch.with_facts_of(&error)
            }
            _ => error,
        };
        if has_failed && is_repeated(&self.library, &error) {
            let error = with_world_ranks(&self.group, error);
            self.note_failure(&error);
            return self.earlier_failure().unwrap_or(error);
        }
        let error = blame(&self.group, error);
        if has_failed {
            self.note_failure(&error);
        }
        error
    }
}
