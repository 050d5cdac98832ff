//! Makes raw communicators inside an agreed call: by unique id, by split and by shrink, always
//! against the deadline.
//!
//! The communicators that a program gets are blocking. On a non-blocking communicator NCCL's
//! operations return ncclInProgress before they are on the stream, and such operations may not be
//! in one group with those of a blocking communicator. But only the making of non-blocking
//! communicators can be ended early. So where there are streams, ranks meet in a non-blocking
//! communicator that nobody sees, and what is handed out is split from it (docs/nccl-sources.md).

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::background::in_background;
use super::call::Peers;
use super::communicator::{Communicator, FirstUse};
use super::ending::finalize;
use super::failure::{blame, name_ranks};
use super::names::{parent_config, world_ranks};
use super::polling::{millis, poll_until_done};
use crate::ccl::{CallName, CommConfig, Library, NO_COLOR, RawComm, UniqueId};
use crate::error::{Error, Result, Status};
use crate::logging::Me;
use crate::mesh::Mesh;
use crate::wait::Nearing;

/// How often, while a library works in the background, this rank looks in the store for failures of
/// the other ranks.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// How much longer than the deadline this rank waits for the host engine, which has the same
/// deadline and then says which ranks did not come.
const LAST_WORD: Duration = Duration::from_millis(100);

/// How many ranks meet at one id, where a library takes several ids. NCCL's root of an id serves
/// its ranks one after another. With 256 ranks or more, the ranks pause before they connect to it.
const RANKS_PER_ID: usize = 128;

/// Makes communicators of one library inside one call.
pub(super) struct Maker<'a> {
    pub(super) library: &'a Arc<Library>,
    /// The other ranks of the call.
    pub(super) peers: Peers<'a>,
    /// How long calls on what is made may wait for their peers.
    pub(super) timeout: Duration,
}

impl Maker<'_> {
    /// A communicator over the ranks of the one-dimensional `group`, for their own calls. The ranks
    /// meet by a fresh id under `key`.
    pub(super) fn meet_for_use(&self, key: &str, group: &Mesh, config: CommConfig) -> Result<RawComm> {
        if !self.library.has_streams() {
            return self.meet(key, group, config.blocking(false));
        }
        if !self.library.can_split() {
            return self.meet(key, group, config.blocking_by_default());
        }
        let raw = self.meet(key, group, parent_config(self.library, None))?;
        let seed = Communicator::unmade(Arc::clone(self.library), group.clone(), FirstUse::default());
        seed.set_ready(raw)?;
        let place = i32::try_from(group.local_rank(0)?).unwrap_or(i32::MAX);
        let made = self.split(&seed, group, Some((0, place)), config.blocking_by_default());
        let made = made.inspect_err(|_| drop(seed.abort()))?.unwrap_or(RawComm::NULL);
        finalize(&seed, self.peers.wait(), &|error| self.peers.tell_before_abort(error))
            .map(|()| made)
            .inspect_err(|_| drop(self.library.abort(made)))
    }

    /// A communicator over the ranks of the one-dimensional `group`, which meet by a fresh id under
    /// `key`.
    pub(super) fn meet(&self, key: &str, group: &Mesh, config: CommConfig) -> Result<RawComm> {
        let began = Instant::now();
        self.connect(key, group, config).inspect(|_| log_made("made by id", group, began))
    }

    fn connect(&self, key: &str, group: &Mesh, mut config: CommConfig) -> Result<RawComm> {
        let (size, rank) = (group.size(), group.local_rank(0)?);
        let ids = self.ids(key, group, rank)?;
        let what = || format!("making communicator {key} of ranks {}", world_ranks(group));
        if size > 1 && config.is_blocking() {
            return self.meet_blocking(what, size, ids[0], rank, config);
        }
        let comm = self.library.init_rank(size, &ids, rank, &mut config)?;
        // Only the host engine takes a timeout. Where it refuses, the polling still ends at the
        // deadline.
        let _ = self.library.set_timeout(comm, self.millis_left());
        name_ranks(self.library, comm, group);
        let explain = |error: Error| match group.ranks().first() {
            // The communicator was never complete, so the engine cannot name the lost rank. Then
            // the lost rank is the one that made the id.
            Some(maker) if error.status() == Status::PeerLost && error.blamed().is_empty() => {
                error.within(&format!("rank {maker} was lost (it made the id)")).with_lost(&[*maker])
            }
            _ => blame(group, error),
        };
        self.poll_new(comm, what, explain)?;
        Ok(comm)
    }

    /// The ids by which the ranks of `group` meet. There is one id, unless there are many ranks
    /// and the library takes several ids. Then each part of the ranks has an id, which the first
    /// rank of the part makes. All ranks get the same list from rank 0.
    fn ids(&self, key: &str, group: &Mesh, rank: usize) -> Result<Vec<UniqueId>> {
        let (size, wait) = (group.size(), self.peers.wait());
        let count = if self.library.takes_several_ids() { size.div_ceil(RANKS_PER_ID) } else { 1 };
        let maker = |index: usize| index * (size / count) + index.min(size % count);
        let world_rank = |position: usize| group.ranks().get(position).copied().unwrap_or_default();
        let Some(round) = self.peers.round().filter(|_| size > 1) else {
            return Ok(vec![self.library.unique_id()?]);
        };
        let (first, mine) = (rank == 0, (0..count).find(|index| maker(*index) == rank));
        let made = mine.map(|_| self.library.unique_id()).transpose()?;
        let publish = |key: &str, id: &UniqueId, value: &[u8]| {
            round.publish(key, value, wait).inspect_err(|_| self.library.discard(id))
        };
        if let (Some(id), Some(index), false) = (&made, mine, first) {
            publish(&format!("{key}/id{index}"), id, &id.bytes)?;
        }
        let bytes = match made.filter(|_| first) {
            Some(id) => {
                let mut all = id.bytes.to_vec();
                for index in 1..count {
                    all.extend(round.fetch(&format!("{key}/id{index}"), world_rank(maker(index)), wait)?);
                }
                publish(key, &id, &all)?;
                all
            }
            None => round.fetch(key, world_rank(0), wait)?,
        };
        UniqueId::list(&bytes, count).ok_or_else(|| {
            Error::store(format!(
                "the {count} unique ids under {key} have {} bytes instead of {}",
                bytes.len(),
                128 * count
            ))
        })
    }

    /// Makes a blocking communicator, on a library that cannot split. Once the library has begun,
    /// nothing ends its work early.
    fn meet_blocking(
        &self,
        what: impl Fn() -> String,
        size: usize,
        id: UniqueId,
        rank: usize,
        mut config: CommConfig,
    ) -> Result<RawComm> {
        let (library, ending) = (Arc::clone(self.library), Arc::clone(self.library));
        let make = move || library.init_rank(size, &[id], rank, &mut config);
        let discard = move |made| drop(ending.abort(made));
        in_background(self.library, make, discard, |is_done| self.poll(what, sleep, is_done))?
    }

    /// The child of `parent` that joins the ranks of `group`: the ranks that say the same colour,
    /// ordered by key. A rank without a colour takes part and gets no child. When the split fails
    /// or is not done in time, the parent is aborted.
    pub(super) fn split(
        &self,
        parent: &Communicator,
        group: &Mesh,
        place: Option<(i32, i32)>,
        mut config: CommConfig,
    ) -> Result<Option<RawComm>> {
        let began = Instant::now();
        let (color, key) = place.unwrap_or((NO_COLOR, 0));
        let what = || format!("splitting off the communicator of ranks {}", world_ranks(group));
        let (child, outcome) = self.child(parent, what, |raw, child| {
            // SAFETY: `child` says what it is for.
            unsafe { self.library.split(raw, color, key, child, &mut config) }
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
            return parent.set_timeout(millis(self.timeout)).map(|()| None);
        }
        if child.is_null() {
            return Err(Error::new(
                Status::Ccl,
                format!("ncclCommSplit of {} left no communicator for colour {color}, key {key}", self.library.name()),
            ));
        }
        // The child may still be in progress by itself, so it is waited for as well.
        let made = self.poll_new(child, what, |error| blame(group, error));
        let restored = parent.set_timeout(millis(self.timeout));
        made?;
        if let Err(error) = restored {
            let _ = self.library.abort(child);
            return Err(error);
        }
        log_made("split off", group, began);
        Ok(Some(child))
    }

    /// The child of `parent` that joins the ranks of `group`: the ranks that are not `excluded`, by
    /// their ranks in the parent. Calls in progress on the parent end, and the parent is of no
    /// further use.
    pub(super) fn shrink(
        &self,
        parent: &Communicator,
        group: &Mesh,
        excluded: &[i32],
        mut config: CommConfig,
    ) -> Result<RawComm> {
        let began = Instant::now();
        let mut excluded = excluded.to_vec();
        let what = || format!("shrinking a communicator to ranks {}", world_ranks(group));
        let (child, outcome) = self.child(parent, what, |raw, child| {
            // SAFETY: `child` says what it is for.
            unsafe { self.library.shrink(raw, &mut excluded, child, &mut config) }
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

    /// Ends a parent whose child was not made in time, or is not needed any more.
    fn end_parent(&self, parent: &Communicator, child: *mut RawComm) {
        let _ = parent.abort();
        if self.library.is_host_engine() {
            // The child may have been made before the parent failed. The engine is done with both.
            // SAFETY: the handle is still there, and nobody writes to it any more.
            let child = unsafe { child.read_volatile() };
            let _ = if child.is_null() { Ok(()) } else { self.library.abort(child) };
        }
    }

    /// Starts the making of a child and waits until the parent is idle. Returns the place of the
    /// child's handle, and how the wait ended. The place is on the heap. It is freed only by the
    /// caller, because the library may write to it at any time until the parent is idle.
    fn child(
        &self,
        parent: &Communicator,
        what: impl Fn() -> String,
        start: impl FnOnce(RawComm, *mut RawComm) -> Result<()>,
    ) -> Result<(*mut RawComm, Result<()>)> {
        let mut raw = parent.ready()?;
        parent.set_timeout(self.millis_left())?;
        let child: *mut RawComm = Box::into_raw(Box::new(RawComm::NULL));
        let started = match self.library.has_streams() {
            false => start(raw, child),
            // No other thread ends the parent while the library begins.
            true => parent.enter(CallName::OF_MAKING.tag(), || self.peers.wait().clone(), &what).and_then(|now| {
                raw = now;
                let started = start(now, child);
                parent.leave();
                started
            }),
        };
        if let Err(error) = started {
            // SAFETY: the handle came from a box, and a library that refuses to start does not keep
            // its place.
            drop(unsafe { Box::from_raw(child) });
            let error = parent.explain(raw, error);
            let _ = parent.set_timeout(millis(self.timeout));
            return Err(error);
        }
        let outcome = self.poll(what, |pause| self.library.rest(raw, pause), || parent.poll());
        Ok((child, outcome))
    }

    /// Polls a communicator that nobody else has yet, and aborts it when that fails. `explain` adds
    /// the reason to an error of its own.
    fn poll_new(&self, comm: RawComm, what: impl Fn() -> String, explain: impl Fn(Error) -> Error) -> Result<()> {
        let rest = |pause| self.library.rest(comm, pause);
        let result = self.poll(what, rest, || self.library.poll(comm).map_err(&explain));
        if let Err(error) = &result {
            self.peers.tell_before_abort(error);
            let _ = self.library.abort(comm);
        }
        result
    }

    /// Waits until the background work is done. Fails at the deadline, when the call is cancelled,
    /// and when another rank reports a failure.
    fn poll(
        &self,
        what: impl Fn() -> String,
        rest: impl Fn(Duration),
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let mut looked = Instant::now();
        let extra = if self.library.is_host_engine() { LAST_WORD } else { Duration::ZERO };
        let own = self.peers.wait();
        let wait = own.with_deadline(own.deadline.extended(extra));
        let nearing = Nearing::default();
        poll_until_done(&wait, &what, rest, || {
            if is_done()? {
                return Ok(true);
            }
            // The host engine warns by itself, and knows which ranks are missing.
            let percent = if self.library.has_streams() { nearing.due(&own.deadline) } else { None };
            if let Some(percent) = percent {
                let millis = own.deadline.timeout().as_millis();
                log::warn!("{Me}: {} goes on: {percent} % of its {millis} ms have passed", what());
            }
            let is_due = looked.elapsed() > LOOK_AROUND && !own.deadline.passed();
            if is_due && self.peers.round().is_some() {
                looked = Instant::now();
                own.look_around()?;
                self.peers.check()?;
            }
            Ok(false)
        })
    }

    fn millis_left(&self) -> u64 {
        millis(self.peers.wait().deadline.left())
    }
}

/// Tells the log that a communicator over the ranks of `group` was made, and how.
fn log_made(how: &str, group: &Mesh, began: Instant) {
    log::info!(
        "rank {}: the communicator of {} ({} ranks: {}) was {how} in {:.1} ms",
        group.rank(),
        group.describe(),
        group.size(),
        world_ranks(group),
        began.elapsed().as_secs_f64() * 1e3
    );
}
