//! The calls that make communicators: a [`Join`], or a child being made of another, together with the handle that it completes.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::handle::{self, Handle};
use crate::join::Join;
use crate::operation::{Operation, Poll};
use crate::turn::Name;
use crate::types::*;

/// How long ranks wait for each other to make a communicator.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// Where a caller wants a communicator written.
struct Out(*mut ncclComm_t);

// SAFETY: NCCL's contract for calls that end in the background: the place stays valid until they have ended.
unsafe impl Send for Out {}

impl Out {
    fn write(&self, comm: ncclComm_t) {
        // SAFETY: the caller passed a place that it keeps until the call is over.
        unsafe { self.0.write(comm) };
    }
}

/// `ncclCommInitRank` and its kin.
pub(crate) struct Init {
    join: Join,
    handle: Arc<Handle>,
    token: ncclComm_t,
    out: Out,
    /// Whether the handle has the outcome: from then on its other calls in progress are not this one.
    done: bool,
}

// SAFETY: the token is a number, and `Out` is `Send`.
unsafe impl Send for Init {}

impl Init {
    /// Writes the new handle to `out` at once, as NCCL does.
    ///
    /// # Safety
    /// `out` stays valid until the call is over.
    pub(crate) unsafe fn new(join: Join, handle: Arc<Handle>, out: *mut ncclComm_t) -> Result<Init> {
        let token = handle::insert(handle.clone())?;
        let out = Out(out);
        out.write(token);
        Ok(Init { join, handle, token, out, done: false })
    }

    pub(crate) fn blocking(&self) -> bool {
        self.handle.config.blocking
    }
}

impl Operation for Init {
    fn poll(&mut self) -> Result<Poll> {
        let poll = self.join.poll().inspect_err(|error| {
            self.done = true;
            self.handle.set_comm(Err(error.clone().within(&self.join.describe())));
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

    fn patience(&self) -> Option<Duration> {
        self.handle.patience().or(Some(PATIENCE))
    }

    fn describe(&self) -> String {
        self.join.describe()
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        if !self.done {
            self.handle.set_comm(Err(ended(self.join.comm()).within(&self.join.describe())));
        }
        // A caller that waited has its error and needs no handle; one that did not asks the handle.
        if self.blocking() && self.handle.comm().is_none() {
            let _ = handle::remove(self.token);
            self.out.write(std::ptr::null_mut());
        }
    }
}

/// A communicator being made of ranks of another one.
pub(crate) trait Child: Operation + Send {
    /// The new communicator, once done; none for a rank that has no part in it.
    fn joined(&self) -> Option<Arc<Comm>>;

    /// An error of the new communicator as the parent's ranks are to hear it.
    fn for_parent(&self, error: Error) -> Error;

    /// The name of the call, where it takes turns with the parent's collectives.
    fn name(&self) -> Option<Name> {
        None
    }
}

/// `ncclCommSplit` and `ncclCommShrink`.
pub(crate) struct ChildInto {
    child: Box<dyn Child>,
    parent: Arc<Handle>,
    on: Arc<Comm>,
    handle: Arc<Handle>,
    out: Out,
    done: bool,
}

impl ChildInto {
    /// # Safety
    /// `out` stays valid until the call is over.
    pub(crate) unsafe fn new(
        child: Box<dyn Child>,
        parent: Arc<Handle>,
        on: Arc<Comm>,
        handle: Arc<Handle>,
        out: *mut ncclComm_t,
    ) -> ChildInto {
        let out = Out(out);
        out.write(std::ptr::null_mut());
        ChildInto { child, parent, on, handle, out, done: false }
    }

    /// The making of a non-blocking parent's child does not block (as in NCCL), and neither does one whose child is to be non-blocking.
    pub(crate) fn blocking(&self) -> bool {
        self.parent.config.blocking && self.handle.config.blocking
    }

    /// Marks the parent as at work, for a making that ends in the background.
    pub(crate) fn begin(&self) {
        self.parent.begin();
    }

    pub(crate) fn parent(&self) -> &Arc<Comm> {
        &self.on
    }

    pub(crate) fn name(&self) -> Option<Name> {
        self.child.name()
    }

    fn finish(&mut self, outcome: Result<()>) {
        self.done = true;
        if !self.blocking() {
            self.parent.finish(outcome);
        }
    }
}

impl Operation for ChildInto {
    fn poll(&mut self) -> Result<Poll> {
        match self.child.poll() {
            Ok(Poll::Done) => {
                if let Some(comm) = self.child.joined() {
                    self.handle.set_comm(Ok(comm));
                    self.out.write(handle::insert(self.handle.clone())?);
                }
                self.finish(Ok(()));
                Ok(Poll::Done)
            }
            Ok(blocked) => Ok(blocked),
            Err(error) => {
                self.finish(Err(error.clone().within(&self.child.describe())));
                Err(error)
            }
        }
    }

    fn comm(&self) -> Option<&Arc<Comm>> {
        self.child.comm()
    }

    /// The parent's: nobody has the child's handle yet.
    fn patience(&self) -> Option<Duration> {
        self.parent.patience().or(Some(PATIENCE))
    }

    fn describe(&self) -> String {
        self.child.describe()
    }
}

impl Drop for ChildInto {
    fn drop(&mut self) {
        if !self.done {
            let error = self.child.for_parent(ended(self.child.comm())).within(&self.child.describe());
            self.finish(Err(error));
        }
    }
}

/// Why a call was given up before it said so itself.
fn ended(comm: Option<&Arc<Comm>>) -> Error {
    comm.and_then(|comm| comm.check().err()).unwrap_or_else(|| Error::usage("another call of the same group failed"))
}
