//! The calls that make communicators. Each is an operation together with the handle that it fills.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::blame::Blame;
use crate::call_name::Name;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::handle::{self, Handle};
use crate::join::Join;
use crate::operation::Operation;
use crate::poll::Poll;
use crate::timeout::DEFAULT_TIMEOUT;
use crate::turn::Pass;
use crate::types::*;

/// The place where the caller wants the new communicator's handle.
struct Out(*mut ncclComm_t);

// SAFETY: NCCL's contract for calls that end in the background says that the place stays valid
// until they have ended.
unsafe impl Send for Out {}

impl Out {
    fn write(&self, comm: ncclComm_t) {
        // SAFETY: the caller passed a place that stays valid until the call is over.
        unsafe { self.0.write(comm) };
    }
}

/// An operation that makes a communicator. The caller gets the communicator's handle when the
/// operation begins.
pub(crate) trait InitOperation: Operation + Send {
    /// Returns the communicator once this rank has its seat. All ranks have arrived only when
    /// `poll` has answered [`Poll::Done`].
    fn joined(&self) -> Option<Arc<Comm>>;

    /// Sets how long the rank waits, if the handle of the new communicator has a timeout.
    fn wait_at_most(&mut self, timeout: Option<Duration>);

    /// Returns the words that precede `error` in a message.
    fn describe_for(&self, error: &Error) -> String;

    /// Tells the other ranks that `error` keeps this rank from joining.
    fn refuse(&mut self, error: &Error);

    /// Ends the operation, which has failed or is given up, and tells the other ranks. It is called
    /// before the handle says that the operation is over, because the process may then end at once.
    fn leave(&mut self);

    /// Returns the communicator with whose collectives the operation takes turns, and the name of
    /// the call. `None` where there is no such communicator.
    fn lane(&self) -> Option<(&Arc<Comm>, Name)> {
        None
    }
}

impl InitOperation for Join {
    fn joined(&self) -> Option<Arc<Comm>> {
        Join::joined(self)
    }

    fn wait_at_most(&mut self, timeout: Option<Duration>) {
        Join::wait_at_most(self, timeout);
    }

    fn describe_for(&self, error: &Error) -> String {
        Join::describe_for(self, error)
    }

    fn refuse(&mut self, error: &Error) {
        Join::refuse(self, error);
    }

    fn leave(&mut self) {
        Join::leave(self);
    }
}

/// A call that joins a communicator by a unique id: `ncclCommInitRank` and its variants, and
/// `ncclCommGrow`.
pub(crate) struct Init {
    /// The operation by which this rank joins the communicator.
    join: Box<dyn InitOperation>,
    /// The handle that gets the communicator.
    handle: Arc<Handle>,
    /// The handle's token, which the caller has already.
    token: ncclComm_t,
    /// The place of the token. The token there is replaced by NULL when a blocking call fails.
    /// `None` when the place may not exist any more.
    out: Option<Out>,
    /// Whether the handle has this call's outcome. After that, this call must not write to the
    /// handle, because another call may be under way.
    done: bool,
}

// SAFETY: the token is a number, and `Out` is `Send`.
unsafe impl Send for Init {}

impl Init {
    /// Returns the call, and writes the new handle to `out` at once, as NCCL does.
    ///
    /// # Safety
    /// `out` stays valid until the call is over.
    pub(crate) unsafe fn new(join: Box<dyn InitOperation>, handle: Arc<Handle>, out: *mut ncclComm_t) -> Result<Init> {
        let token = handle::insert(handle.clone())?;
        let out = Out(out);
        out.write(token);
        Ok(Init { join, handle, token, out: Some(out), done: false })
    }

    /// Whether the caller waits for the end of the call.
    pub(crate) fn blocking(&self) -> bool {
        self.handle.config.blocking
    }

    /// The handle that gets the communicator.
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// Tells the other ranks that `error` keeps this rank from joining.
    pub(crate) fn refuse(&mut self, error: &Error) {
        self.join.refuse(error);
    }

    /// The communicator with whose collectives the call takes turns, and the name of the call.
    pub(crate) fn lane(&self) -> Option<(&Arc<Comm>, Name)> {
        self.join.lane()
    }

    /// Makes the call write no more to the caller's place. The caller's thread has ended inside a
    /// group, so the place may not exist any more.
    pub(crate) fn forget_place(&mut self) {
        self.out = None;
    }
}

impl Operation for Init {
    fn poll(&mut self) -> Result<Poll> {
        self.join.wait_at_most(self.handle.timeout());
        let poll = self.join.poll().inspect_err(|error| {
            self.done = true;
            self.join.leave();
            self.handle.set_comm(Err(error.clone().within(&self.join.describe_for(error))));
        })?;
        if let (Poll::Done, Some(comm)) = (poll, self.join.joined()) {
            self.done = true;
            self.handle.set_comm(Ok(comm));
        }
        Ok(poll)
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.join.comm()
    }

    fn connection(&self) -> Option<(RawFd, bool)> {
        self.join.connection()
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        self.join.pass()
    }

    /// Returns the handle's timeout, which the communicator gets when it is made.
    fn timeout(&self) -> Option<Duration> {
        self.handle.timeout().or_else(|| self.join.timeout())
    }

    fn default_timeout(&self) -> Option<Duration> {
        Some(DEFAULT_TIMEOUT)
    }

    fn is_matched(&self) -> bool {
        self.join.is_matched()
    }

    fn describe(&self) -> String {
        self.join.describe()
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        if !self.done {
            let error = why_dropped(self.join.comm());
            let call = self.join.describe_for(&error);
            self.join.leave();
            self.handle.set_comm(Err(error.within(&call)));
        }
        // A caller that waited has the error and needs no handle. A caller that did not wait asks
        // the handle.
        if self.blocking() && self.handle.comm().is_none() {
            let _ = handle::remove(self.token);
            if let Some(out) = &self.out {
                out.write(std::ptr::null_mut());
            }
        }
    }
}

/// An operation that makes a communicator of ranks of another one: a split or a shrink.
pub(crate) trait ChildOperation: Operation + Send {
    /// Returns the new communicator once the operation is done, and `None` for a rank that is not
    /// in it.
    fn joined(&self) -> Option<Arc<Comm>>;

    /// Turns an error of the new communicator into one that names the parent's ranks.
    fn for_parent(&self, error: Error) -> Error;

    /// Tells the ranks of the parent that the new communicator has failed with `error`, if they
    /// wait for this rank. Returns the error as the ranks of the parent know it.
    fn child_failed(&mut self, error: Error) -> Error {
        self.for_parent(error)
    }

    /// Returns the name of the call, where the call takes turns with the parent's collectives.
    fn name(&self) -> Option<Name> {
        None
    }

    /// Takes back what this rank still offers the other ranks in the parent. Where the operation
    /// has failed or is given up, ends the new communicator for the ranks that have it already. It
    /// is called before the parent's handle says that the operation is over: the next operation may
    /// then write its own offer to the same place, and the process may end at once.
    fn withdraw(&mut self) {}

    /// Tells the other ranks that `error` keeps this rank from the operation, which has not begun.
    /// The ranks of a split learn of it in the parent.
    fn refuse(&mut self, _error: &Error) {}
}

/// A call that makes a communicator of ranks of another one: `ncclCommSplit` or `ncclCommShrink`.
pub(crate) struct ChildInit {
    /// The split or shrink.
    operation: Box<dyn ChildOperation>,
    /// The parent's handle, which says that the call is in progress.
    parent_handle: Arc<Handle>,
    /// The parent.
    parent: Arc<Comm>,
    /// The handle that gets the new communicator.
    handle: Arc<Handle>,
    /// Where the new handle's token is written at the end.
    out: Out,
    /// Whether the parent's handle counts the call, because it ends in the background.
    counted: bool,
    /// Whether an earlier call in the background may have failed on the parent's handle.
    despite_failure: bool,
    /// Whether the handles have the outcome.
    done: bool,
    /// The timeout that came with the call, if one did.
    pub(crate) call_timeout: Option<Duration>,
}

impl ChildInit {
    /// Returns the call, and writes NULL to `out`.
    ///
    /// # Safety
    /// `out` stays valid until the call is over.
    pub(crate) unsafe fn new(
        operation: Box<dyn ChildOperation>,
        parent_handle: Arc<Handle>,
        parent: Arc<Comm>,
        handle: Arc<Handle>,
        out: *mut ncclComm_t,
    ) -> ChildInit {
        let out = Out(out);
        out.write(std::ptr::null_mut());
        ChildInit {
            operation,
            parent_handle,
            parent,
            handle,
            out,
            counted: false,
            despite_failure: false,
            done: false,
            call_timeout: None,
        }
    }

    /// Makes the parent's handle forget the failure of an earlier call when this call begins in the
    /// background, because the handle then gets the outcome of this call.
    pub(crate) fn despite_failure(mut self, despite_failure: bool) -> ChildInit {
        self.despite_failure = despite_failure;
        self
    }

    /// Whether the caller waits for the end of the call. As in NCCL, a call on a non-blocking
    /// parent does not block. Neither does a call for a non-blocking child.
    pub(crate) fn blocking(&self) -> bool {
        self.parent_handle.config.blocking && self.handle.config.blocking
    }

    /// Marks the parent's handle as in progress, for a call that ends in the background.
    pub(crate) fn begin(&mut self) {
        self.counted = true;
        if self.despite_failure {
            self.parent_handle.forget_failure();
        }
        self.parent_handle.begin(self.name());
    }

    /// The handles that get the outcome: the parent's, and that of the new communicator.
    pub(crate) fn handles(&self) -> [&Arc<Handle>; 2] {
        [&self.parent_handle, &self.handle]
    }

    /// The parent. All ranks of the new communicator are ranks of the parent.
    pub(crate) fn parent(&self) -> &Arc<Comm> {
        &self.parent
    }

    /// The name of the call, where the call takes turns with the parent's collectives.
    pub(crate) fn name(&self) -> Option<Name> {
        self.operation.name()
    }

    /// Tells the other ranks that `error` keeps this rank from a split or a shrink. The ranks of a
    /// split wait for this rank in the parent.
    pub(crate) fn refuse(&mut self, error: &Error) {
        self.operation.refuse(error);
        if self.name().is_some() && !self.parent.is_revoked() {
            let parent = &self.parent;
            let message =
                format!("{} cannot split the communicator: {}", parent.describe(parent.rank), error.message());
            parent.fail(error.code(), Blame::of([parent.rank]), &message);
        }
    }

    /// Fails the parent on all ranks, because a split in the background has failed here. From now
    /// on, this rank's handle of the parent only reports the failure. Without this, the ranks for
    /// which the split has succeeded would wait for this rank in their next call on the parent.
    fn fail_parent(&self, error: &Error) {
        if self.counted && self.name().is_some() && self.parent.check_open().is_ok() {
            self.parent.fail_whole(error.code(), error.blame().clone(), error.message(), &self.operation.describe());
        }
    }

    /// Ends the call, which has failed. Returns the error for the caller.
    fn fail(&mut self, error: Error) -> Error {
        self.fail_parent(&error);
        self.finish(Err(error.clone().within(&self.operation.describe())));
        error
    }

    fn finish(&mut self, outcome: Result<()>) {
        self.done = true;
        self.operation.withdraw();
        if self.counted {
            if let Some(name) = self.name() {
                self.parent_handle.end_split(name);
            }
            self.parent_handle.finish(outcome);
        }
    }
}

impl Operation for ChildInit {
    fn poll(&mut self) -> Result<Poll> {
        match self.operation.poll() {
            Ok(Poll::Done) => {
                if let Some(comm) = self.operation.joined() {
                    self.handle.set_comm(Ok(comm));
                    self.out.write(handle::insert(self.handle.clone())?);
                }
                self.finish(Ok(()));
                Ok(Poll::Done)
            }
            Ok(blocked) => Ok(blocked),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.operation.comm()
    }

    fn pass(&mut self) -> Option<&mut Pass> {
        self.operation.pass()
    }

    fn call_timeout(&self) -> Option<Duration> {
        self.call_timeout
    }

    /// Returns the parent's timeout, because nobody has the child's handle yet.
    fn timeout(&self) -> Option<Duration> {
        self.parent_handle.timeout()
    }

    fn default_timeout(&self) -> Option<Duration> {
        Some(DEFAULT_TIMEOUT)
    }

    fn is_matched(&self) -> bool {
        self.operation.is_matched()
    }

    fn wait_failed(&mut self, error: Error) -> Error {
        let is_of_child = self.operation.comm().is_some_and(|comm| !Arc::ptr_eq(comm, &self.parent));
        let error = if is_of_child { self.operation.child_failed(error) } else { error };
        self.fail(error)
    }

    fn describe(&self) -> String {
        self.operation.describe()
    }
}

impl Drop for ChildInit {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        match failure_of(self.operation.comm()) {
            // Another call of the group may have waited on the same communicators.
            Some(error) => drop(self.wait_failed(error)),
            None => {
                let error = self.operation.for_parent(dropped());
                self.finish(Err(error.within(&self.operation.describe())));
            }
        }
    }
}

/// Returns the error of a call that was dropped before it ended.
fn why_dropped(comm: Option<&Arc<Comm>>) -> Error {
    failure_of(comm).unwrap_or_else(dropped)
}

fn failure_of(comm: Option<&Arc<Comm>>) -> Option<Error> {
    comm?.check().err()
}

fn dropped() -> Error {
    Error::usage("another call of the same group failed")
}
