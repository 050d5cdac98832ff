//! One communicator of this rank: made, still to be made, or ended.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hostccl::FAILED_EARLIER;
use hostccl::fork::Own;
use once_cell::sync::OnceCell;

use super::gate::Gate;
use crate::ccl::{CommConfig, Library, RawComm, result};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;
use crate::rendezvous::Scope;

/// Why a communicator has no raw handle, or that it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Nobody asked for it yet.
    Unmade = 0,
    Ready = 1,
    Aborted = 2,
    Finalized = 3,
    /// Other ranks have it, this one has no part in it: known so that all ranks tell alike what exists.
    Absent = 4,
}

impl State {
    /// Whether it is there for a further dimension over the same ranks.
    pub(super) fn is_usable(self) -> bool {
        matches!(self, State::Unmade | State::Ready | State::Absent)
    }
}

/// How a communicator is made when it is first asked for, if no agreed call made it before.
#[derive(Debug, Default)]
pub(super) struct LazyPlan {
    /// The agreement scope of its group when a lazy mesh planned it; such a one is made by its own ranks alone.
    pub(super) scope: Option<String>,
    pub(super) config: Option<CommConfig>,
    pub(super) comm_name: Option<String>,
}

impl LazyPlan {
    /// Of the single-rank communicator.
    pub(super) fn alone() -> LazyPlan {
        LazyPlan { comm_name: Some("mesh_single".to_owned()), ..LazyPlan::default() }
    }

    pub(super) fn is_lazy(&self) -> bool {
        self.scope.is_some()
    }
}

/// How a communicator failed.
#[derive(Debug)]
struct Failure {
    status: Status,
    ccl_result: i32,
    /// The call that failed and why, as it goes on after "failed earlier".
    how: String,
}

/// What a root mesh has of a communicator: while one is left, a failed communicator is kept, so that calls on it can say how it failed.
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

/// A communicator over an ordered list of ranks, in which this rank is one. Shared by every mesh dimension with that list.
pub(crate) struct Communicator {
    library: Arc<Library>,
    /// The ranks as a one-dimensional view, for messages.
    group: Mesh,
    /// NULL unless `state` is `Ready`: readers of the fast path look only here.
    raw: AtomicPtr<c_void>,
    state: AtomicU8,
    /// Root meshes that use it; at zero it may be destroyed.
    users: AtomicUsize,
    /// Whether ending it is ours: false for a communicator adopted from the caller.
    owned: bool,
    plan: LazyPlan,
    /// Where the ranks of a lazy one agree to make it: kept, so that calls after a failed one are further calls.
    scope: OnceCell<Scope>,
    /// The milliseconds that [`limit`](Communicator::limit) set last.
    patience: AtomicU64,
    /// What the ranks of one agreed call know it by: equal on all its ranks, and different from every other communicator's. Empty where no such call
    /// planned it.
    origin: OnceLock<String>,
    /// How many root meshes have it that have not ended or been freed.
    holders: AtomicUsize,
    /// How it failed, once that is known here: after "failed earlier" in messages.
    failed: OnceLock<Failure>,
    /// Held by questions to the library about the raw communicator and while it is taken away: a library may free it at once. Not held by calls
    /// that wait.
    asking: Mutex<()>,
    /// Where host calls pass one at a time, on libraries with streams.
    gate: Gate,
    /// Held by who aborts, so that nobody else goes on before that is done.
    aborting: Mutex<()>,
    /// Forked children may not use it.
    _own: Own<()>,
}

impl Communicator {
    pub(super) fn unmade(library: Arc<Library>, group: Mesh, plan: LazyPlan) -> Communicator {
        Communicator {
            library,
            group,
            raw: AtomicPtr::new(ptr::null_mut()),
            state: AtomicU8::new(State::Unmade as u8),
            users: AtomicUsize::new(0),
            owned: true,
            plan,
            scope: OnceCell::new(),
            patience: AtomicU64::new(0),
            origin: OnceLock::new(),
            holders: AtomicUsize::new(0),
            failed: OnceLock::new(),
            asking: Mutex::default(),
            gate: Gate::default(),
            aborting: Mutex::default(),
            _own: Own::new(()),
        }
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(super) fn adopted(library: Arc<Library>, group: Mesh, raw: RawComm, owned: bool) -> Result<Communicator> {
        let adopted = Communicator { owned, ..Communicator::unmade(library, group, LazyPlan::default()) };
        name_ranks(&adopted.library, raw, &adopted.group);
        adopted.set_ready(raw)?;
        Ok(adopted)
    }

    /// From now on the ranks of an agreed call know it by `origin`. The first one stands.
    pub(super) fn set_origin(&self, origin: String) {
        let _ = self.origin.set(origin);
    }

    /// What the ranks of an agreed call know it by, where it can be shared: it has neither ended nor failed, as far as this rank knows.
    pub(super) fn shareable(&self) -> Option<&str> {
        self.origin.get().filter(|_| self.is_sound()).map(String::as_str)
    }

    /// Whether it is there for a further dimension: it has neither ended nor failed, as far as this rank knows.
    pub(super) fn is_sound(&self) -> bool {
        self.state().is_usable() && !self.has_failed()
    }

    /// Whether more than one root mesh uses it, ones that were freed among them.
    pub(super) fn is_shared(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 1
    }

    /// Whether an error on it came from a call that began after the failure.
    pub(super) fn came_later(&self, error: &Error) -> bool {
        self.library.is_host_engine() && error.message().contains(FAILED_EARLIER)
    }

    /// Ends it where another rank waits in a collective on it that this rank does not make, as it is in `call` instead: both sides learn it.
    pub(super) fn refuse(&self, call: &str) -> Result<()> {
        let raw = self.ready()?;
        self.library.refuse(raw, call).map_err(|error| self.explain(raw, error))
    }

    /// Whether it has failed, so that it only reports its failure.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.get().is_some() || (!self.raw().is_null() && self.poll().is_err() && self.failed.get().is_some())
    }

    /// Whether it has failed and no root mesh has it any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.owned && self.holders.load(Ordering::SeqCst) == 0 && self.has_failed()
    }

    /// The error of a call on it that came after its failure: it says which call failed, and what to do.
    pub(super) fn earlier(&self) -> Option<Error> {
        let Failure { status, ccl_result, how } = self.failed.get()?;
        let message = format!(
            "the communicator of {} {FAILED_EARLIER}{how}; it is of no further use, make the mesh anew (dm_init)",
            self.label()
        );
        Some(Error::new(*status, message).with_ccl_result(*ccl_result))
    }

    /// Notes how it failed. The first failure stands.
    pub(super) fn note_failure(&self, error: &Error) {
        let how = match error.message().split_once(FAILED_EARLIER) {
            // The engine has said so already.
            Some((_, how)) => how.to_owned(),
            None => format!(": {}", error.message()),
        };
        let _ = self.failed.set(Failure { status: error.status(), ccl_result: error.ccl_result(), how });
    }

    /// Puts the raw communicator in place. An abort that came first ends it at once.
    pub(super) fn set_ready(&self, raw: RawComm) -> Result<()> {
        self.raw.store(raw.0, Ordering::SeqCst);
        if !self.turn_from(State::Unmade, State::Ready) {
            self.take_raw().map(|raw| self.library.abort(raw));
        }
        self.ready().map(drop)
    }

    /// How long calls on it may wait for their peers from now on, in milliseconds: each mesh that shares it has a timeout of its own.
    pub(super) fn limit(&self, millis: u64) -> Result<()> {
        if self.patience.swap(millis, Ordering::Relaxed) == millis {
            return Ok(());
        }
        let _asking = self.asking();
        let raw = self.ready()?;
        self.library
            .set_timeout(raw, millis)
            .map_err(|error| self.explained(raw, error, self.library.poll(raw).is_err()))
    }

    /// Whether nothing is in progress on it; its failure, if it has failed. Does not wait.
    pub(super) fn poll(&self) -> Result<bool> {
        let _asking = self.asking();
        let raw = self.ready()?;
        self.library.poll(raw).map_err(|error| self.explained(raw, error, true))
    }

    /// The scope in which the ranks of a lazy one agree, made when first asked for.
    pub(super) fn scope(&self, make: impl FnOnce() -> Result<Scope>) -> Result<&Scope> {
        self.scope.get_or_try_init(make)
    }

    /// The raw communicator; NULL when it is not made yet or has ended. The cheapest question there is.
    pub(crate) fn raw(&self) -> RawComm {
        RawComm(self.raw.load(Ordering::Acquire))
    }

    /// The raw communicator, or why there is none.
    pub(crate) fn ready(&self) -> Result<RawComm> {
        let raw = self.raw();
        if !raw.is_null() {
            return Ok(raw);
        }
        Err(match (self.state(), self.earlier()) {
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

    /// The library it belongs to.
    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// The ranks it joins, as a one-dimensional view; rank order in the communicator is this order.
    pub(crate) fn group(&self) -> &Mesh {
        &self.group
    }

    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Unmade,
            1 => State::Ready,
            2 => State::Aborted,
            3 => State::Finalized,
            _ => State::Absent,
        }
    }

    pub(super) fn plan(&self) -> &LazyPlan {
        &self.plan
    }

    pub(super) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// One root mesh less; true when that was the last.
    pub(super) fn drop_user(&self) -> bool {
        self.users.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Ends it at once, waking whoever is blocked in it; when this returns, what the host engine did with it in the background is over. A
    /// borrowed one is left to its owner.
    pub(super) fn abort(&self) -> Result<()> {
        let _aborting = self.aborting.lock().unwrap_or_else(PoisonError::into_inner);
        self.end(State::Aborted);
        match self.take_raw() {
            Some(raw) if self.owned => self.library.abort(raw),
            _ => Ok(()),
        }
    }

    /// Gives the raw communicator out for its orderly end; `None` when it has ended already or is the caller's.
    pub(super) fn retire(&self) -> Option<RawComm> {
        self.end(State::Finalized);
        self.take_raw().filter(|_| self.owned)
    }

    /// Notes that it was made without this rank. An abort that came first stands.
    pub(super) fn set_absent(&self) {
        self.turn_from(State::Unmade, State::Absent);
    }

    /// Undoes the making on this rank, because another one failed at it: what shares it can make it again.
    pub(super) fn unmake(&self) {
        self.turn_from(State::Absent, State::Unmade);
        if self.turn_from(State::Ready, State::Unmade) {
            self.take_raw().map(|raw| self.library.abort(raw));
        }
    }

    fn turn_from(&self, old: State, new: State) -> bool {
        self.state.compare_exchange(old as u8, new as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The first end stands.
    fn end(&self, end: State) {
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
            [State::Unmade, State::Ready, State::Absent].map(|state| state as u8).contains(&state).then_some(end as u8)
        });
    }

    /// The error of a call on this communicator, with the lost rank by its world rank where the library knows it.
    pub(super) fn explain(&self, raw: RawComm, error: Error) -> Error {
        let broken = {
            let _asking = self.asking();
            self.raw() == raw && self.library.poll(raw).is_err()
        };
        self.explained(raw, error, broken)
    }

    /// The same, where it is known whether the communicator has failed for all its ranks, so that the error is more than one bad call here.
    fn explained(&self, raw: RawComm, error: Error, broken: bool) -> Error {
        if self.state() != State::Ready {
            return Error::aborted(format!("the communicator of {} was aborted during the call", self.label()))
                .with_ccl_result(error.ccl_result());
        }
        let error = match error.ccl_result() {
            // The engine found that ranks made calls that do not fit together; the message says who called what.
            result::INVALID_USAGE if broken && self.library.is_host_engine() => {
                Error::new(Status::Mismatch, error.message()).with_ccl_result(error.ccl_result())
            }
            _ => error,
        };
        if broken && self.came_later(&error) {
            self.note_failure(&error);
            return self.earlier().unwrap_or(error);
        }
        let error = blame(&self.library, raw, &self.group, error);
        if broken {
            self.note_failure(&error);
        }
        error
    }

    /// What to call it in messages: its dimension and where it lies.
    pub(super) fn label(&self) -> String {
        self.group.describe()
    }

    fn asking(&self) -> MutexGuard<'_, ()> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_raw(&self) -> Option<RawComm> {
        let _asking = self.asking();
        let raw = RawComm(self.raw.swap(ptr::null_mut(), Ordering::SeqCst));
        if raw.is_null() { None } else { Some(raw) }
    }
}

/// Has the host engine call the ranks of a new communicator of `group` by their ranks in the world.
pub(super) fn name_ranks(library: &Library, raw: RawComm, group: &Mesh) {
    // Without names messages count within the communicator, and say so.
    let _ = library.set_names(raw, group.ranks().as_slice());
}

/// The error of a call on a communicator of `group`, with the rank that is lost or late by its world rank where the library knows it.
pub(super) fn blame(library: &Library, raw: RawComm, group: &Mesh, error: Error) -> Error {
    let said = match error.status() {
        Status::PeerLost => "was lost",
        Status::Timeout => "did not come",
        _ => return error,
    };
    let lost = library.lost_rank(raw).and_then(|lost| Some((lost, *group.ranks().get(lost)?)));
    let Some((lost, world_rank)) = lost else { return error };
    error.within(&format!("rank {world_rank} {said} (rank {lost} of {})", group.describe())).with_ranks(&[world_rank])
}

/// A name that lives as long as the process, because communicator libraries keep the pointer and a communicator may outlive
/// every handle. Equal names are one string, so what this holds is bounded by the number of different names.
pub(super) fn lasting_name(name: &str) -> &'static CStr {
    static NAMES: OnceLock<Mutex<Vec<&'static CStr>>> = OnceLock::new();
    let wanted = CString::new(name.replace('\0', "")).unwrap_or_default();
    let mut names = NAMES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.iter().find(|known| ***known == *wanted) {
        return known;
    }
    let name: &'static CStr = Box::leak(wanted.into_boxed_c_str());
    names.push(name);
    name
}
