//! One communicator of this rank: made, still to be made, or ended.

mod calls;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hostccl::fork::Own;

use super::failure::{FirstFailure, blame, is_repeated, name_ranks, with_world_ranks};
use super::gate::Gate;
use crate::ccl::{CommConfig, Library, RawComm, result};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;
use crate::rendezvous::Scope;
use crate::wait::Deadline;

/// How long an abort waits for a call of another thread that is inside the library. Such a call
/// puts its work on a stream and returns. Only a call that connects to peers takes longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a communicator has a raw handle, and why it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// It is planned, and nobody has asked for it yet.
    Unmade = 0,
    /// It is made and can be used.
    Ready = 1,
    /// An abort ended it, of this root mesh or of another one that shares it.
    Aborted = 2,
    /// dm_finalize ended it.
    Finalized = 3,
    /// Other ranks have made it, and this rank has no part in it. The state is kept so that all
    /// ranks agree on which communicators exist.
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
    /// sets it.
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
    /// The library that makes and ends it.
    library: Arc<Library>,
    /// Its ranks as a one-dimensional view. The order of the view is the rank order in the
    /// communicator.
    group: Mesh,
    /// The raw communicator; NULL unless `state` is `Ready`. Calls that must be quick read this
    /// field alone.
    raw: AtomicPtr<c_void>,
    /// The [`State`] as a number.
    state: AtomicU8,
    /// How many root meshes use it, freed ones included. When no user is left it may be destroyed.
    users: AtomicUsize,
    /// How many root meshes have it that have neither ended nor been freed.
    holders: AtomicUsize,
    /// Whether this library ends it; false for a communicator that was adopted and stays the
    /// caller's.
    is_owned: bool,
    /// The way in which the first use makes this communicator.
    first_use: FirstUse,
    /// The scope in which the ranks of a lazy communicator agree on making it. It is kept after a
    /// failed call, because the next try is the next call of the same scope. It is `None` before
    /// the first try, and after a try that succeeded, because it keeps the store of the world.
    scope: Mutex<Option<Arc<Scope>>>,
    /// The milliseconds that [`set_timeout`](Communicator::set_timeout) has set last.
    timeout_millis: AtomicU64,
    /// The name under which the ranks of an agreed call know it: equal on all its ranks, and
    /// different from every other communicator's. It is empty where no such call planned the
    /// communicator.
    agreed_name: OnceLock<String>,
    /// The first failure of this communicator, which later errors repeat. It is empty until this rank
    /// knows of one.
    failure: FirstFailure,
    /// Held while the library is asked about the raw communicator, and while the raw communicator
    /// is taken away, because the library may free it at once. Calls that wait for peers do not
    /// hold it.
    asking: Mutex<()>,
    /// On libraries with streams, lets in one host call at a time.
    gate: Gate,
    /// The raw communicator that was taken away and is not ended yet, because a call was inside.
    taken: Mutex<Option<RawComm>>,
    /// Held by the thread that ends what was taken away. So a second abort returns only when the
    /// first one is done.
    ending: Mutex<()>,
    /// Keeps forked children from using the communicator.
    _own: Own<()>,
}

impl Communicator {
    pub(super) fn unmade(library: Arc<Library>, group: Mesh, first_use: FirstUse) -> Communicator {
        Communicator {
            library,
            group,
            raw: AtomicPtr::new(ptr::null_mut()),
            state: AtomicU8::new(State::Unmade as u8),
            users: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            is_owned: true,
            first_use,
            scope: Mutex::default(),
            timeout_millis: AtomicU64::new(0),
            agreed_name: OnceLock::new(),
            failure: FirstFailure::default(),
            asking: Mutex::default(),
            gate: Gate::default(),
            taken: Mutex::default(),
            ending: Mutex::default(),
            _own: Own::new(()),
        }
    }

    /// A communicator that the caller has made. With `is_owned` this library ends it.
    pub(super) fn adopted(library: Arc<Library>, group: Mesh, raw: RawComm, is_owned: bool) -> Result<Communicator> {
        let adopted = Communicator { is_owned, ..Communicator::unmade(library, group, FirstUse::default()) };
        name_ranks(&adopted.library, raw, &adopted.group);
        adopted.set_ready(raw)?;
        Ok(adopted)
    }

    /// The library it belongs to.
    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// The ranks it joins, as a one-dimensional view; rank order in the communicator is this order.
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

    /// Forgets the scope, which the made communicator does not need.
    pub(super) fn forget_scope(&self) {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Sets the name under which the ranks of an agreed call know it. A name that was set before
    /// stays.
    pub(super) fn set_agreed_name(&self, name: String) {
        let _ = self.agreed_name.set(name);
    }

    /// The name under which the ranks of an agreed call know it. `None` when it has no such name,
    /// has ended, or has failed as far as this rank knows: then it cannot be shared.
    pub(super) fn shareable_name(&self) -> Option<&str> {
        self.agreed_name.get().filter(|_| self.is_sound()).map(String::as_str)
    }
}

/// The raw communicator.
impl Communicator {
    /// The raw communicator; NULL when it is not made yet or has ended. This reads one atomic
    /// value.
    pub(crate) fn raw(&self) -> RawComm {
        RawComm(self.raw.load(Ordering::Acquire))
    }

    /// The raw communicator, or why there is none.
    pub(crate) fn ready(&self) -> Result<RawComm> {
        let raw = self.raw();
        if !raw.is_null() {
            return Ok(raw);
        }
        Err(match (self.state(), self.earlier_failure()) {
            (State::Aborted, Some(earlier)) => {
                Error::aborted(format!("it was aborted, and before that {}", earlier.message()))
            }
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
        self.raw.store(raw.0, Ordering::SeqCst);
        if !self.change(State::Unmade, State::Ready) {
            let _ = self.take_and_abort();
        }
        self.ready().map(drop)
    }

    /// Notes that the other ranks have made it without this rank. An abort that came first stands.
    pub(super) fn set_absent(&self) {
        self.change(State::Unmade, State::Absent);
    }

    /// Undoes [`set_ready`](Communicator::set_ready) and [`set_absent`](Communicator::set_absent),
    /// so that a later call can make it again.
    pub(super) fn unmake(&self) {
        self.change(State::Absent, State::Unmade);
        if self.change(State::Ready, State::Unmade) {
            let _ = self.take_and_abort();
        }
    }

    /// Ends it at once and wakes every call that is blocked in it. When this returns, the host
    /// engine's background work on it is over too. A communicator that stays the caller's is not
    /// ended. On a library with streams, fails where another thread stays inside a call for
    /// [`PATIENCE`]; that thread then ends the communicator when its call returns.
    pub(super) fn abort(&self) -> Result<()> {
        self.end(State::Aborted);
        self.take_and_abort()
    }

    /// Marks it as finalized and returns the raw communicator, which the caller then ends. `None`
    /// when it has ended already or stays the caller's. Fails where another thread stays inside a
    /// call for `patience`; that thread then aborts the communicator when its call returns.
    pub(super) fn take_to_finalize(&self, patience: Duration) -> Result<Option<RawComm>> {
        self.end(State::Finalized);
        self.take_away();
        let _ending = self.ending();
        self.wait_for_calls(patience.min(PATIENCE))?;
        Ok(self.taken().take().filter(|_| self.is_owned))
    }

    fn take_and_abort(&self) -> Result<()> {
        self.take_away();
        self.abort_taken(PATIENCE)
    }

    /// Takes the raw communicator away, so that no further call can enter it.
    fn take_away(&self) {
        let _asking = self.asking();
        let raw = RawComm(self.raw.swap(ptr::null_mut(), Ordering::SeqCst));
        if !raw.is_null() {
            *self.taken() = Some(raw);
        }
    }

    /// Aborts the raw communicator that was taken away, once no call is inside.
    fn abort_taken(&self, patience: Duration) -> Result<()> {
        let _ending = self.ending();
        self.wait_for_calls(patience)?;
        match self.taken().take() {
            Some(raw) if self.is_owned => self.library.abort(raw),
            _ => Ok(()),
        }
    }

    fn wait_for_calls(&self, patience: Duration) -> Result<()> {
        let no_call_matters = self.taken().is_none() || !self.is_owned;
        if no_call_matters || self.gate.wait_until_idle(&Deadline::after(patience)) {
            return Ok(());
        }
        Err(Error::timeout(format!(
            "a thread was inside a call of {} on the communicator of {} for {} ms, and the library forbids ending a communicator meanwhile: it ends when that call returns; if the call waits for a rank that has gone, end this process",
            self.library.label(),
            self.label(),
            patience.as_millis()
        )))
    }

    fn ending(&self) -> MutexGuard<'_, ()> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> MutexGuard<'_, Option<RawComm>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asking(&self) -> MutexGuard<'_, ()> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Sets how it ended. The first end stands.
    fn end(&self, end: State) {
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
            [State::Unmade, State::Ready, State::Absent].map(|state| state as u8).contains(&state).then_some(end as u8)
        });
    }

    /// Whether a further dimension can use it: it has neither ended nor failed, as far as this rank
    /// knows.
    pub(super) fn is_sound(&self) -> bool {
        self.state().is_usable() && !self.has_failed()
    }

    pub(super) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one root mesh less. Returns true when that was the last one.
    pub(super) fn drop_user(&self) -> bool {
        self.users.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Whether more than one root mesh uses it, freed ones included.
    pub(super) fn is_shared(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 1
    }

    /// Whether it has failed and no root mesh holds it any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.is_owned && self.holders.load(Ordering::SeqCst) == 0 && self.has_failed()
    }
}

/// Questions to the library.
impl Communicator {
    /// Sets how long calls on it wait for their peers, in milliseconds. Each mesh that shares it
    /// has a timeout of its own.
    pub(super) fn set_timeout(&self, millis: u64) -> Result<()> {
        if self.timeout_millis.swap(millis, Ordering::Relaxed) == millis {
            return Ok(());
        }
        let (outcome, has_failed) = {
            let _asking = self.asking();
            let raw = self.ready()?;
            let outcome = self.library.set_timeout(raw, millis);
            let has_failed = outcome.is_err() && self.library.poll(raw).is_err();
            (outcome, has_failed)
        };
        // A failure is logged, so the lock is given back before.
        outcome.map_err(|error| self.explain_as(error, has_failed))
    }

    /// Whether nothing is in progress on it. Fails when it has failed. Does not wait.
    pub(super) fn poll(&self) -> Result<bool> {
        let polled = {
            let _asking = self.asking();
            let raw = self.ready()?;
            self.library.poll(raw)
        };
        // A failure is logged, so the lock is given back before.
        polled.map_err(|error| self.explain_as(error, true))
    }

    /// Ends it where another rank waits in a collective on it. This rank does not make that
    /// collective, because it is in `call` instead. Both ranks then get an error that says so.
    pub(super) fn refuse_collectives(&self, call: &str) -> Result<()> {
        let raw = self.ready()?;
        self.library.refuse(raw, call).map_err(|error| self.explain(raw, error))
    }

    /// Whether it has failed. Asks the library where no failure is known yet.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_known() || (!self.raw().is_null() && self.poll().is_err() && self.failure.is_known())
    }

    /// The error of a call that comes after its failure. `None` while no failure is known.
    pub(super) fn earlier_failure(&self) -> Option<Error> {
        self.failure.later_error(|| self.label())
    }

    /// Asks the library about the raw communicator, while nobody ends it.
    #[cfg(feature = "cudarc")]
    pub(super) fn ask<T>(&self, question: impl FnOnce(RawComm) -> T) -> Result<T> {
        let _asking = self.asking();
        self.ready().map(question)
    }

    /// Keeps how it failed. The first failure stands.
    pub(super) fn note_failure(&self, error: &Error) {
        if self.failure.note(error) {
            log::warn!("rank {}: the communicator of {} has failed: {error}", self.group.rank(), self.label());
        }
    }

    /// The error of a call on it, with what the library knows about the reason. When the whole
    /// communicator has failed, keeps the failure.
    pub(super) fn explain(&self, raw: RawComm, error: Error) -> Error {
        let has_failed = {
            let _asking = self.asking();
            self.raw() == raw && self.library.poll(raw).is_err()
        };
        self.explain_as(error, has_failed)
    }

    /// Does what [`explain`](Communicator::explain) does. `has_failed` says whether the whole
    /// communicator has failed, or only this call.
    fn explain_as(&self, error: Error, has_failed: bool) -> Error {
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
