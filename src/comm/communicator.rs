//! One communicator of this rank: made, still to be made, or ended.

mod calls;
mod questions;

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use hostccl::fork::Own;

use super::background::Worker;
use super::failure::{FirstFailure, name_ranks};
use super::handle::{GRACE, Handle, PATIENCE};
use crate::ccl::{CommConfig, Library, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::{self, Scope};
use crate::wait::Deadline;

/// The shortest time that the end of a communicator and a question about it may take, however short
/// the timeout of its mesh is. The end and the question run on threads, which a busy host may
/// start late.
const LEAST: Duration = Duration::from_secs(1);

/// Whether a communicator has a raw handle, and why it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// The communicator is planned, and nobody has asked for it yet.
    Unmade = 0,
    /// The communicator is made and can be used.
    Ready = 1,
    /// An abort of this root mesh, or of another one that shares the communicator, has ended it.
    Aborted = 2,
    /// dm_finalize has ended the communicator.
    Finalized = 3,
    /// Other ranks have made the communicator, and this rank has no part in it. The state is kept
    /// so that all ranks agree on which communicators exist.
    Absent = 4,
}

impl State {
    /// Whether a further dimension over the same ranks can use a communicator in this state.
    fn is_usable(self) -> bool {
        matches!(self, State::Unmade | State::Ready | State::Absent)
    }
}

/// How the first use of a communicator makes it, if no agreed call has made it before.
#[derive(Debug, Default)]
pub(super) struct FirstUse {
    /// The name of the agreement scope in which the communicator's ranks meet. Only a lazy mesh
    /// sets this name.
    pub(super) scope_id: Option<String>,
    /// The caller's `ncclConfig_t`.
    pub(super) config: Option<CommConfig>,
    /// The communicator's name in the library's logs.
    pub(super) comm_name: Option<String>,
}

impl FirstUse {
    /// The first use of the communicator that holds this rank alone.
    pub(super) fn alone() -> FirstUse {
        FirstUse { comm_name: Some("mesh_single".to_owned()), ..FirstUse::default() }
    }

    pub(super) fn is_lazy(&self) -> bool {
        self.scope_id.is_some()
    }
}

/// A root mesh's hold on a communicator. While one hold is left, a failed communicator is kept, so
/// that calls on it can say how it failed.
pub(super) struct Held(Arc<Communicator>);

impl Held {
    pub(super) fn new(communicator: Arc<Communicator>) -> Held {
        communicator.holders.fetch_add(1, Ordering::SeqCst);
        Held(communicator)
    }
}

impl std::ops::Deref for Held {
    type Target = Arc<Communicator>;

    fn deref(&self) -> &Arc<Communicator> {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.holders.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A communicator over an ordered list of ranks, one of which is this rank. Every mesh dimension
/// over the same list may share it.
pub(crate) struct Communicator {
    /// The library that makes and ends the communicator.
    library: Arc<Library>,
    /// The communicator's ranks as a one-dimensional view. The order of the view is the rank order
    /// in the communicator.
    group: Mesh,
    /// The raw communicator; there is none unless `state` is `Ready`.
    handle: Arc<Handle>,
    /// The [`State`] as a number.
    state: AtomicU8,
    /// How many root meshes use the communicator, freed ones included. When no user is left, the
    /// communicator may be destroyed.
    users: AtomicUsize,
    /// How many root meshes that have neither ended nor been freed have the communicator.
    holders: AtomicUsize,
    /// The way in which the first use makes this communicator.
    first_use: FirstUse,
    /// The scope in which the ranks of a lazy communicator agree on making it. The scope is kept
    /// after a failed call, because the next try is the next call of this scope. The field is
    /// `None` before the first try, and after a try that succeeded, because a scope keeps the
    /// store of the world.
    scope: Mutex<Option<Arc<Scope>>>,
    /// The timeout of the mesh that has used the communicator last, in milliseconds; 0 before the
    /// first use. Only [`patience`](Communicator::patience) reads it. Calls have the timeouts of
    /// their own meshes.
    timeout_millis: AtomicU64,
    /// How long the host engine lets a call wait that brings no timeout, in milliseconds; 0 where
    /// this is not known. Calls of meshes with this timeout bring none. The value is set before a
    /// program can use the communicator, and then stays, except in an engine without timeouts of
    /// single calls.
    engine_millis: AtomicU64,
    /// The name under which the ranks of an agreed call know the communicator. The name is equal
    /// on all its ranks, and no other communicator has it. The field is empty where no such call
    /// planned the communicator.
    agreed_name: OnceLock<String>,
    /// The first failure of this communicator, which later errors repeat. The field is empty until
    /// this rank knows of a failure.
    failure: FirstFailure,
    /// Keeps forked children from using the communicator.
    _own: Own<()>,
}

impl Communicator {
    pub(super) fn unmade(library: Arc<Library>, group: Mesh, first_use: FirstUse) -> Communicator {
        let handle = Handle::new(Arc::clone(&library), group.clone(), true);
        Communicator {
            library,
            group,
            handle,
            state: AtomicU8::new(State::Unmade as u8),
            users: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            first_use,
            scope: Mutex::default(),
            timeout_millis: AtomicU64::new(0),
            engine_millis: AtomicU64::new(0),
            agreed_name: OnceLock::new(),
            failure: FirstFailure::default(),
            _own: Own::new(()),
        }
    }

    /// Returns a communicator that the caller has made. With `is_owned` this library ends the
    /// communicator.
    pub(super) fn adopted(library: Arc<Library>, group: Mesh, raw: RawComm, is_owned: bool) -> Result<Communicator> {
        let handle = Handle::new(Arc::clone(&library), group.clone(), is_owned);
        let adopted = Communicator { handle, ..Communicator::unmade(library, group, FirstUse::default()) };
        name_ranks(&adopted.library, raw, &adopted.group);
        adopted.set_ready(raw)?;
        Ok(adopted)
    }

    /// Returns the library to which the communicator belongs.
    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Returns the ranks that the communicator joins, as a one-dimensional view. The order of the
    /// view is the rank order in the communicator.
    pub(crate) fn group(&self) -> &Mesh {
        &self.group
    }

    pub(super) fn first_use(&self) -> &FirstUse {
        &self.first_use
    }

    /// The communicator's name in messages: its dimension, and its place.
    pub(super) fn label(&self) -> String {
        self.group.describe()
    }

    /// The scope in which the ranks of a lazy communicator agree. `make` makes the scope at the
    /// first call.
    pub(super) fn scope(&self, make: impl FnOnce() -> Result<Scope>) -> Result<Arc<Scope>> {
        let mut scope = self.scope.lock().unwrap_or_else(PoisonError::into_inner);
        match &*scope {
            Some(known) => Ok(Arc::clone(known)),
            None => Ok(Arc::clone(scope.insert(Arc::new(make()?)))),
        }
    }

    /// Whether the communicator keeps a scope.
    pub(super) fn has_scope(&self) -> bool {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Forgets the scope, which a made communicator does not need.
    pub(super) fn forget_scope(&self) {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The name under which the ranks of an agreed call know it; `None` where it has no such name.
    pub(super) fn agreed_name(&self) -> Option<&str> {
        self.agreed_name.get().map(String::as_str)
    }

    /// Sets the name under which the ranks of an agreed call know it. A name that was set before
    /// stays.
    pub(super) fn set_agreed_name(&self, name: String) {
        let _ = self.agreed_name.set(name);
    }
}

/// The raw communicator.
impl Communicator {
    /// The raw communicator; NULL when it is not made yet or has ended. This reads one atomic
    /// value.
    pub(crate) fn raw(&self) -> RawComm {
        self.handle.raw()
    }

    /// The raw communicator, or why there is none.
    pub(crate) fn ready(&self) -> Result<RawComm> {
        let raw = self.raw();
        if !raw.is_null() {
            return Ok(raw);
        }
        Err(match (self.state(), self.earlier_failure()) {
            (State::Aborted, Some(earlier)) => Error::aborted(format!(
                "the communicator of {} was aborted, after it had failed: {}",
                self.label(),
                earlier.message()
            )),
            (State::Aborted, None) => Error::aborted(format!(
                "the communicator of {} was aborted: dm_abort ended this mesh or another one that shares it; make the mesh anew (dm_init)",
                self.label()
            )),
            (State::Finalized, _) => Error::aborted(format!("the communicator of {} was finalized", self.label())),
            (State::Unmade | State::Ready | State::Absent, _) => {
                Error::internal(format!("the communicator of {} is not made yet", self.label()))
            }
        })
    }

    /// Puts the raw communicator in place. When an abort came first, ends the raw communicator and
    /// fails.
    pub(super) fn set_ready(&self, raw: RawComm) -> Result<()> {
        self.handle.set(raw);
        if !self.change(State::Unmade, State::Ready) {
            let _ = self.end_by(&self.deadline(), None);
        }
        self.ready().map(drop)
    }

    /// Lets the host engine end calls that are blocked in this communicator when another rank of
    /// `world` has begun a recovery. A rank for which they wait may never make its call. Other
    /// libraries do nothing here.
    pub(super) fn end_with_recovery(&self, world: &rendezvous::World) {
        let question = world.recovery_question().filter(|_| !self.raw().is_null());
        question.into_iter().for_each(|question| self.library.set_interrupt(self.raw(), question));
    }

    /// Notes that the other ranks have made the communicator without this rank. An abort that came
    /// first stays in force.
    pub(super) fn set_absent(&self) {
        self.change(State::Unmade, State::Absent);
    }

    /// Undoes [`set_ready`](Communicator::set_ready) and [`set_absent`](Communicator::set_absent),
    /// so that a later call can make the communicator again.
    /// [`end_all_soon`](Communicator::end_all_soon) then ends the raw communicator.
    pub(super) fn unmake(&self) {
        self.change(State::Absent, State::Unmade);
        if self.change(State::Ready, State::Unmade) {
            self.handle.take_away();
        }
    }

    /// Takes over a raw communicator that was made for this communicator and never put in place.
    /// [`end_all_soon`](Communicator::end_all_soon) then ends the raw communicator.
    pub(super) fn take_over(&self, raw: RawComm) {
        self.handle.take_over(raw);
    }

    /// Marks the communicator as aborted, so that no further call enters it.
    /// [`end_all_soon`](Communicator::end_all_soon) then ends the raw communicator.
    pub(super) fn close(&self) {
        self.end(State::Aborted);
        self.handle.take_away();
    }

    /// Aborts, at the same time, the raw communicators that were taken from several communicators.
    /// Waits only for a moment, and not at all for those inside which a thread stays. The aborts go
    /// on in the background.
    pub(super) fn end_all_soon(communicators: &[Arc<Communicator>]) {
        let mut handles: Vec<Arc<Handle>> = Vec::new();
        for communicator in communicators {
            if !handles.iter().any(|known| Arc::ptr_eq(known, &communicator.handle)) {
                handles.push(Arc::clone(&communicator.handle));
            }
        }
        let (occupied, quiet): (Vec<_>, Vec<_>) = handles.into_iter().partition(|handle| handle.is_occupied());
        let _ = Handle::finish_all(&occupied, &Deadline::after(Duration::ZERO));
        let _ = Handle::finish_all(&quiet, &Deadline::after(GRACE));
    }

    /// Ends the communicator at once and wakes every call that is blocked in it. When this
    /// returns, the host engine's background work on it is over too. A communicator that stays the
    /// caller's is not ended. On a library with streams, fails where the end has not come within
    /// [`PATIENCE`]. The end then goes on in the background.
    pub(super) fn abort(&self) -> Result<()> {
        self.end(State::Aborted);
        self.end_by(&self.deadline(), None)
    }

    /// Aborts the communicator after a call has failed, so that nobody waits for the end: at once
    /// where a thread stays inside, and for a moment otherwise. The end goes on in the background.
    pub(super) fn abort_soon(&self, worker: Option<&Worker>) {
        self.end(State::Aborted);
        self.end_soon(worker);
    }

    fn end_soon(&self, worker: Option<&Worker>) {
        let patience = if self.handle.is_occupied() { Duration::ZERO } else { GRACE };
        let _ = self.end_by(&Deadline::after(patience), worker);
    }

    fn end_by(&self, deadline: &Deadline, worker: Option<&Worker>) -> Result<()> {
        self.handle.abort(deadline, worker)
    }

    /// Does what [`abort`](Communicator::abort) does for several communicators at the same time.
    pub(super) fn abort_all(communicators: &[Arc<Communicator>]) -> Result<()> {
        communicators.iter().for_each(|communicator| communicator.end(State::Aborted));
        let patience = communicators.iter().map(|communicator| communicator.patience()).max().unwrap_or(LEAST);
        let handles: Vec<_> = communicators.iter().map(|communicator| Arc::clone(&communicator.handle)).collect();
        Handle::abort_all(&handles, &Deadline::after(patience))
    }

    /// Marks the communicator as finalized and returns the raw communicator, which the caller then
    /// ends. Returns `None` when the communicator has ended already or stays the caller's. Fails
    /// where another thread stays inside a call for `patience`, or for [`PATIENCE`] if that is
    /// shorter. That thread then aborts the communicator when its call returns.
    pub(super) fn take_to_finalize(&self, patience: Duration) -> Result<Option<RawComm>> {
        self.end(State::Finalized);
        self.handle.take(&Deadline::after(patience.min(PATIENCE)))
    }

    /// Sets how many milliseconds a call on `raw` waits if it brings no timeout. `raw` is not in
    /// place yet.
    pub(super) fn set_default_timeout(&self, raw: RawComm, millis: u64) -> Result<()> {
        self.library.set_timeout(raw, millis)?;
        self.engine_millis.store(millis, Ordering::Relaxed);
        self.note_timeout(millis);
        Ok(())
    }

    /// Gives the calling thread's next call on the communicator a timeout, in milliseconds. The
    /// timeout goes with the call, because meshes with different timeouts may share the
    /// communicator, and several threads may use it. Libraries with streams have no timeouts.
    #[inline]
    pub(super) fn limit_next_call(&self, raw: RawComm, millis: u64) {
        // Most calls have the timeout that the engine has for the communicator. A load takes less
        // time than a call of the engine.
        if self.engine_millis.load(Ordering::Relaxed) != millis && !self.library.limit_next_call(raw, millis) {
            self.engine_millis.store(millis, Ordering::Relaxed);
        }
    }

    /// Notes the timeout of a mesh that uses the communicator, in milliseconds.
    pub(super) fn note_timeout(&self, millis: u64) {
        // Every operation calls this function, and the timeout is nearly always noted already. A
        // load takes less time than a store to memory that other threads read.
        if self.timeout_millis.load(Ordering::Relaxed) != millis {
            self.timeout_millis.store(millis, Ordering::Relaxed);
        }
    }

    /// Returns how long the end of the communicator, or a question about it, may take: the timeout
    /// of its mesh, within bounds.
    pub(super) fn patience(&self) -> Duration {
        match self.timeout_millis.load(Ordering::Relaxed) {
            0 => PATIENCE,
            millis => Duration::from_millis(millis).clamp(LEAST, PATIENCE),
        }
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.patience())
    }
}

/// The state and the users.
impl Communicator {
    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Unmade,
            1 => State::Ready,
            2 => State::Aborted,
            3 => State::Finalized,
            _ => State::Absent,
        }
    }

    fn change(&self, old: State, new: State) -> bool {
        self.state.compare_exchange(old as u8, new as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Sets how the communicator has ended. Only the first end counts.
    fn end(&self, end: State) {
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
            [State::Unmade, State::Ready, State::Absent].map(|state| state as u8).contains(&state).then_some(end as u8)
        });
    }

    pub(super) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one root mesh less. Returns true when that was the last one.
    pub(super) fn drop_user(&self) -> bool {
        self.users.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Whether more than one root mesh uses the communicator, freed ones included.
    pub(super) fn is_shared(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 1
    }

    /// Returns the error of a call that comes after the communicator's failure; `None` while no
    /// failure is known.
    pub(super) fn earlier_failure(&self) -> Option<Error> {
        self.failure.later_error(|| self.label())
    }

    /// Keeps how the communicator has failed. Only the first failure counts.
    pub(super) fn note_failure(&self, error: &Error) {
        if self.failure.note(error) {
            log::warn!("rank {}: the communicator of {} has failed: {error}", self.group.rank(), self.label());
        }
    }
}
