//! One communicator of this rank: made, still to be made, or ended.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hostccl::fork::Own;
use once_cell::sync::OnceCell;

use super::gate::Gate;
use super::making::world_ranks;
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
        adopted.set_ready(raw)?;
        Ok(adopted)
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
        self.library.set_timeout(raw, millis).map_err(|error| self.explain(raw, error))
    }

    /// Whether nothing is in progress on it; its failure, if it has failed. Does not wait.
    pub(super) fn poll(&self) -> Result<bool> {
        let _asking = self.asking();
        let raw = self.ready()?;
        self.library.poll(raw).map_err(|error| self.explain(raw, error))
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
        Err(match self.state() {
            State::Aborted => Error::aborted(format!("the communicator of {} was aborted", self.label())),
            State::Finalized => Error::aborted(format!("the communicator of {} was finalized", self.label())),
            State::Unmade | State::Ready | State::Absent => {
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
        if self.state() != State::Ready {
            return Error::aborted(format!("the communicator of {} was aborted during the call", self.label()))
                .with_ccl_result(error.ccl_result());
        }
        if error.ccl_result() == result::INVALID_USAGE && self.library.is_host_engine() && self.is_broken(raw) {
            // The engine found that ranks made calls that do not fit together; the message says who called what.
            return Error::new(Status::Mismatch, error.message()).with_ccl_result(error.ccl_result());
        }
        blame(&self.library, raw, &self.group, error)
    }

    /// What to call it in messages: its dimension and where it lies.
    pub(super) fn label(&self) -> String {
        self.group.describe()
    }

    /// Whether it has failed for all its ranks, so that an error is more than one bad call here.
    fn is_broken(&self, raw: RawComm) -> bool {
        self.library.poll(raw).is_err()
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

/// The error of a call on a communicator of `group`, with the rank that is lost or late by its world rank where the library knows it.
pub(super) fn blame(library: &Library, raw: RawComm, group: &Mesh, error: Error) -> Error {
    let said = match error.status() {
        Status::PeerLost => "was lost",
        Status::Timeout => "did not come",
        _ => return error,
    };
    let lost = library.lost_rank(raw).and_then(|lost| Some((lost, *group.ranks().get(lost)?)));
    let Some((lost, world_rank)) = lost else { return error };
    // The library counts within the communicator.
    let error = match group.ranks().iter().copied().eq(0..group.size() as i32) {
        true => error,
        false => error.within(&format!("on the communicator of ranks {}", world_ranks(group))),
    };
    error.within(&format!("rank {world_rank} {said} (rank {lost} of {})", group.describe()))
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
