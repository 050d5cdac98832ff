//! Communicators that are made from another one: by split and by shrink.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Instant;

use super::super::communicator::Communicator;
use super::super::ending::question_wait;
use super::super::failure::blame;
use super::super::handle::Inside;
use super::super::names::world_ranks;
use super::super::polling::millis;
use super::{Maker, log_made};
use crate::ccl::{CallName, CommConfig, Library, NO_COLOR, RawComm};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;

/// The place of a child's handle, which a library may write to from another thread.
#[derive(Clone, Copy)]
struct Place(*mut RawComm);

// SAFETY: the place is on the heap, and its owner reads it only when the library is done with it.
unsafe impl Send for Place {}

impl Maker<'_> {
    /// The child of `parent` that joins the ranks of `group`: the ranks that pass the same colour,
    /// ordered by key. A rank without a colour takes part and gets no child. When the split fails
    /// or is not done in time, the parent is aborted.
    pub(in crate::comm) fn split(
        &self,
        parent: &Communicator,
        group: &Mesh,
        place: Option<(i32, i32)>,
        mut config: CommConfig,
    ) -> Result<Option<RawComm>> {
        let began = Instant::now();
        let (color, key) = place.unwrap_or((NO_COLOR, 0));
        let what = || format!("splitting off the communicator of ranks {}", world_ranks(group));
        let left = self.millis_left();
        let (child, outcome) = self.child(parent, "ncclCommSplit", what, move |library, raw, child| {
            // SAFETY: `Maker::child` keeps the place valid until the library is done with the
            // parent.
            unsafe { library.split(raw, color, key, child, &mut config, left) }
        })?;
        if let Err(error) = outcome {
            self.peers.tell_before_abort(&error);
            self.end_parent(parent, child);
            return Err(error);
        }
        // SAFETY: the handle came from a box, and a library that is done with the parent does not
        // write to it any more.
        let child = *unsafe { Box::from_raw(child) };
        if place.is_none() && child.is_null() {
            return Ok(None);
        }
        if child.is_null() {
            return Err(Error::new(
                Status::Ccl,
                format!("ncclCommSplit of {} left no communicator for colour {color}, key {key}", self.library.name()),
            ));
        }
        // The child may still be in progress by itself, so it is waited for as well.
        self.poll_new(child, what, |error| blame(group, error))?;
        log_made("split off", group, began);
        Ok(Some(child))
    }

    /// The child of `parent` that joins the ranks of `group`: the ranks that are not `excluded`, by
    /// their ranks in the parent. Calls in progress on the parent end, and the parent is of no
    /// further use.
    pub(in crate::comm) fn shrink(
        &self,
        parent: &Communicator,
        group: &Mesh,
        excluded: &[i32],
        mut config: CommConfig,
    ) -> Result<RawComm> {
        let began = Instant::now();
        let mut excluded = excluded.to_vec();
        let what = || format!("shrinking a communicator to ranks {}", world_ranks(group));
        let left = self.millis_left();
        let (child, outcome) = self.child(parent, "ncclCommShrink", what, move |library, raw, child| {
            // SAFETY: `Maker::child` keeps the place valid until the library is done with the
            // parent.
            unsafe { library.shrink(raw, &mut excluded, child, &mut config, left) }
        })?;
        // SAFETY: the handle is still there. The parent has most likely failed and reports that
        // now. Only the child counts here.
        let made = unsafe { child.read_volatile() };
        match outcome {
            _ if !made.is_null() => {
                if self.library.is_host_engine() {
                    // SAFETY: the handle came from a box, and an engine that is done with the
                    // parent does not write to it any more.
                    drop(unsafe { Box::from_raw(child) });
                }
                self.poll_new(made, what, |error| blame(group, error))?;
                log_made("shrunk", group, began);
                Ok(made)
            }
            Ok(()) => {
                Err(Error::new(Status::Ccl, format!("ncclCommShrink of {} left no communicator", self.library.name())))
            }
            // Without a child, the parent's error is a failure that the others should hear of.
            Err(error) => {
                self.peers.tell_before_abort(&error);
                self.end_parent(parent, child);
                Err(error)
            }
        }
    }

    /// Ends a parent after the making of its child has failed or was late. Where a thread is
    /// still inside the parent, the parent ends when that thread returns.
    fn end_parent(&self, parent: &Communicator, child: *mut RawComm) {
        parent.abort_soon(Some(&self.worker));
        if self.library.is_host_engine() {
            // The child may have been made before the parent failed. The engine is done with both.
            // SAFETY: the handle is still there, and nobody writes to it any more.
            let child = unsafe { child.read_volatile() };
            let _ = if child.is_null() { Ok(()) } else { self.library.abort(child) };
        }
    }

    /// Starts the making of a child by the library's `function` and waits until the parent is
    /// idle. Returns the place of the child's handle, and how the wait ended. The place is on the
    /// heap, because the library may write to it until the parent is idle. After `Ok` the place
    /// belongs to the caller. If `function` refuses to start, this function frees the place. If the
    /// call does not return in time, the place belongs to the thread inside the call, and the
    /// caller gets another, empty place.
    fn child(
        &self,
        parent: &Communicator,
        function: &'static str,
        what: impl Fn() -> String,
        start: impl FnOnce(&Library, RawComm, *mut RawComm) -> Result<()> + Send + 'static,
    ) -> Result<(*mut RawComm, Result<()>)> {
        let what = || format!("{} ({function})", what());
        let mut raw = parent.ready()?;
        parent.note_timeout(millis(self.timeout));
        let child: *mut RawComm = Box::into_raw(Box::new(RawComm::NULL));
        let started = match self.library.has_streams() {
            false => Ok(start(self.library, raw, child)),
            // No other thread ends the parent while the library begins.
            true => match parent.enter(CallName::OF_MAKING.tag(), || self.peers.wait().clone(), &what) {
                Err(error) => Ok(Err(error)),
                Ok(now) => {
                    raw = now;
                    self.start_child(parent.inside(), raw, Place(child), what, start)
                }
            },
        };
        let started = match started {
            Ok(started) => started,
            // The thread is still inside the parent, and the place is its own from now on: the
            // thread ends a child that it finds there. So the caller gets an empty place.
            Err(late) => return Ok((Box::into_raw(Box::new(RawComm::NULL)), Err(late))),
        };
        if let Err(error) = started {
            // SAFETY: the handle came from a box, and a library that refuses to start does not keep
            // its place.
            drop(unsafe { Box::from_raw(child) });
            return Err(parent.explain(raw, error));
        }
        let poll = || parent.poll_making(&question_wait(self.peers.wait()), &self.worker);
        let outcome = self.poll(what, |pause| self.library.rest(raw, pause), poll);
        Ok((child, outcome))
    }

    /// Runs `start` on the thread of this maker. The thread leaves the parent when the library's
    /// call returns. The outer error says that it has not returned in time.
    fn start_child(
        &self,
        inside: Inside,
        raw: RawComm,
        place: Place,
        what: impl Fn() -> String,
        start: impl FnOnce(&Library, RawComm, *mut RawComm) -> Result<()> + Send + 'static,
    ) -> Result<Result<()>> {
        let (library, ending) = (Arc::clone(self.library), Arc::clone(self.library));
        let work = move || {
            // The whole place goes to the thread, and not its pointer.
            let place = place;
            let started = start(&library, raw, place.0);
            drop(inside);
            started
        };
        let discard = move |()| {
            let place = place;
            // SAFETY: the place is never freed, because the caller has given up.
            let late = unsafe { place.0.read_volatile() };
            let _ = if late.is_null() { Ok(()) } else { ending.abort(late) };
        };
        self.worker.run(work, discard, |is_done| self.poll(what, sleep, is_done))
    }
}
