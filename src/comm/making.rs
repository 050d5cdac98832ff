//! Making raw communicators inside an agreed call: by unique id, by split, always against the deadline.
//!
//! What a user gets is blocking: on a non-blocking communicator NCCL's operations return ncclInProgress before they are on the stream, and they may not
//! be in one group with a blocking one's. But only the making of non-blocking communicators can be ended. So where there are streams, ranks meet in
//! a non-blocking communicator that nobody sees, and what is handed out is split from it (docs/nccl-sources.md).

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::beside::beside;
use super::communicator::{Communicator, LazyPlan, blame, name_ranks};
use super::life::retire;
use super::root::ranks_text;
use crate::ccl::{CommConfig, Library, NO_COLOR, RawComm, UniqueId};
use crate::error::{Error, Result, Status};
use crate::mesh::Mesh;
use crate::rendezvous::Round;
use crate::wait::Wait;

/// How often, while a library works in the background, the other ranks' failures are looked for in the store.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// The host engine is given the same deadline and says which ranks did not come: how long its word is waited for.
const LAST_WORD: Duration = Duration::from_millis(100);

/// So many ranks meet at one id, where a library takes several: NCCL's root of an id serves its ranks one after another, and from 256 on they wait
/// before they turn to it.
const RANKS_PER_ID: usize = 128;

/// Makes communicators of one library within one round of agreement.
pub(super) struct Maker<'a> {
    pub(super) library: &'a Arc<Library>,
    /// The agreed call that this happens in; `None` where no other rank takes part.
    pub(super) round: Option<&'a Round>,
    pub(super) wait: &'a Wait,
    /// How long calls on what is made may wait for their peers.
    pub(super) timeout: Duration,
}

impl Maker<'_> {
    /// A communicator over the ranks of the one-dimensional `group`, which meet by a fresh id under `key`, for their own calls.
    pub(super) fn meet_for_use(&self, key: &str, group: &Mesh, config: CommConfig) -> Result<RawComm> {
        if !self.library.has_streams() {
            return self.meet(key, group, config.blocking(false));
        }
        if !self.library.can_split() {
            return self.meet(key, group, config.blocking_by_default());
        }
        let seed = CommConfig::unset(self.library.version()).blocking(false);
        let raw = self.meet(key, group, seed)?;
        let seed = Communicator::unmade(Arc::clone(self.library), group.clone(), LazyPlan::default());
        seed.set_ready(raw)?;
        let place = i32::try_from(group.local_rank(0)?).unwrap_or(i32::MAX);
        let made = self.split(&seed, group, Some((0, place)), config.blocking_by_default());
        let made = made.inspect_err(|_| drop(seed.abort()))?.unwrap_or(RawComm::NULL);
        retire(&seed, self.wait, &|error| self.tell(error))
            .map(|()| made)
            .inspect_err(|_| drop(self.library.abort(made)))
    }

    /// A communicator over the ranks of the one-dimensional `group`, which meet by a fresh id under `key`.
    pub(super) fn meet(&self, key: &str, group: &Mesh, mut config: CommConfig) -> Result<RawComm> {
        let (size, rank) = (group.size(), group.local_rank(0)?);
        let ids = self.ids(key, group, rank)?;
        let what = || format!("making communicator {key} of ranks {}", world_ranks(group));
        if size > 1 && config.is_blocking() {
            return self.meet_blocking(what, size, ids[0], rank, config);
        }
        let comm = self.library.init_rank(size, &ids, rank, &mut config)?;
        // Only the host engine heeds it; where it refuses, the polling still ends at the deadline.
        let _ = self.library.set_timeout(comm, self.millis_left());
        name_ranks(self.library, comm, group);
        let explain = |error: Error| match group.ranks().first() {
            // Nobody has a number in a communicator that was never there, and the one that can have spoilt it is the one that made its id.
            Some(maker) if error.status() == Status::PeerLost && self.library.lost_rank(comm).is_none() => {
                error.within(&format!("rank {maker} was lost (it made the id)")).with_ranks(&[*maker])
            }
            _ => blame(self.library, comm, group, error),
        };
        self.settle(comm, what, explain)?;
        Ok(comm)
    }

    /// The ids by which the ranks of `group` meet: one, or where many ranks would crowd at it and the library takes several, one for every so many.
    /// The first of those makes it. All get the same list from rank 0.
    fn ids(&self, key: &str, group: &Mesh, rank: usize) -> Result<Vec<UniqueId>> {
        let size = group.size();
        let count = if self.library.takes_several_ids() { size.div_ceil(RANKS_PER_ID) } else { 1 };
        let maker = |index: usize| index * (size / count) + index.min(size % count);
        let world_rank = |position: usize| group.ranks().get(position).copied().unwrap_or_default();
        let Some(round) = self.round.filter(|_| size > 1) else {
            return Ok(vec![self.library.unique_id()?]);
        };
        let (first, mine) = (rank == 0, (0..count).find(|index| maker(*index) == rank));
        let made = mine.map(|_| self.library.unique_id()).transpose()?;
        let publish = |key: &str, id: &UniqueId, value: &[u8]| {
            round.publish(key, value, self.wait).inspect_err(|_| self.library.discard(id))
        };
        if let (Some(id), Some(index), false) = (&made, mine, first) {
            publish(&format!("{key}/id{index}"), id, &id.bytes)?;
        }
        let bytes = match made.filter(|_| first) {
            Some(id) => {
                let mut all = id.bytes.to_vec();
                for index in 1..count {
                    all.extend(round.fetch(&format!("{key}/id{index}"), world_rank(maker(index)), self.wait)?);
                }
                publish(key, &id, &all)?;
                all
            }
            None => round.fetch(key, world_rank(0), self.wait)?,
        };
        UniqueId::list(&bytes, count).ok_or_else(|| {
            Error::store(format!(
                "the {count} unique ids under {key} have {} bytes instead of {}",
                bytes.len(),
                128 * count
            ))
        })
    }

    /// A blocking communicator, from a library without split. Nothing ends its making once it has begun.
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
        let too_late = move |made| drop(ending.abort(made));
        beside(self.library, make, too_late, |is_done| self.poll(what, sleep, is_done))?
    }

    /// The child of `parent` that joins the ranks of `group`: those which say the same colour, ordered by key. A rank without a colour takes part
    /// and gets none. A split that does not end ends the parent.
    pub(super) fn split(
        &self,
        parent: &Communicator,
        group: &Mesh,
        place: Option<(i32, i32)>,
        mut config: CommConfig,
    ) -> Result<Option<RawComm>> {
        let (color, key) = place.unwrap_or((NO_COLOR, 0));
        let what = || format!("splitting off the communicator of ranks {}", world_ranks(group));
        let (child, outcome) = self.child(parent, what, |raw, child| {
            // SAFETY: `child` says what it is for.
            unsafe { self.library.split(raw, color, key, child, &mut config) }
        })?;
        if let Err(error) = outcome {
            self.tell(&error);
            self.give_up(parent, child);
            return Err(error);
        }
        // SAFETY: it came from a box, and the settled library does not write to it any more.
        let child = *unsafe { Box::from_raw(child) };
        if place.is_none() && child.is_null() {
            return parent.limit(millis(self.timeout)).map(|()| None);
        }
        if child.is_null() {
            return Err(Error::new(
                Status::Ccl,
                format!("ncclCommSplit of {} left no communicator for colour {color}, key {key}", self.library.name()),
            ));
        }
        // A child that goes on in the background by itself is waited for as well.
        self.settle(child, what, |error| blame(self.library, child, group, error))?;
        if let Err(error) = parent.limit(millis(self.timeout)) {
            let _ = self.library.abort(child);
            return Err(error);
        }
        Ok(Some(child))
    }

    /// The child of `parent` that joins the ranks of `group`: those which are not `excluded`, by their ranks in the parent. What is under way on the
    /// parent ends; it is of no further use.
    pub(super) fn shrink(
        &self,
        parent: &Communicator,
        group: &Mesh,
        excluded: &[i32],
        mut config: CommConfig,
    ) -> Result<RawComm> {
        let mut excluded = excluded.to_vec();
        let what = || format!("shrinking a communicator to ranks {}", world_ranks(group));
        let (child, outcome) = self.child(parent, what, |raw, child| {
            // SAFETY: `child` says what it is for.
            unsafe { self.library.shrink(raw, &mut excluded, child, &mut config) }
        })?;
        // SAFETY: it is still there. The parent has failed, most likely, and says so once it is done: whether its child has come to be is what counts.
        let made = unsafe { child.read_volatile() };
        match outcome {
            _ if !made.is_null() => {
                if self.library.is_host_engine() {
                    // SAFETY: it came from a box, and an engine that is done with the parent does not write to it any more.
                    drop(unsafe { Box::from_raw(child) });
                }
                self.settle(made, what, |error| blame(self.library, made, group, error)).map(|()| made)
            }
            Ok(()) => {
                Err(Error::new(Status::Ccl, format!("ncclCommShrink of {} left no communicator", self.library.name())))
            }
            // Only now is it a failure that others should hear of.
            Err(error) => {
                self.tell(&error);
                self.give_up(parent, child);
                Err(error)
            }
        }
    }

    /// Ends a parent whose child did not come to be in time, or came to be for nothing.
    fn give_up(&self, parent: &Communicator, child: *mut RawComm) {
        let _ = parent.abort();
        if self.library.is_host_engine() {
            // The child may have come to be before the parent failed. Its engine is done with both.
            // SAFETY: it is still there, and nobody writes to it any more.
            let child = unsafe { child.read_volatile() };
            let _ = if child.is_null() { Ok(()) } else { self.library.abort(child) };
        }
    }

    /// Starts the making of a child and waits until the parent has settled: where the child's handle is (on the heap, never freed unless the caller
    /// does so, because the library may write to it at any time until the parent has settled), and how the waiting ended.
    fn child(
        &self,
        parent: &Communicator,
        what: impl Fn() -> String,
        start: impl FnOnce(RawComm, *mut RawComm) -> Result<()>,
    ) -> Result<(*mut RawComm, Result<()>)> {
        let raw = parent.ready()?;
        parent.limit(self.millis_left())?;
        let child: *mut RawComm = Box::into_raw(Box::new(RawComm::NULL));
        start(raw, child).map_err(|error| parent.explain(raw, error))?;
        let outcome = self.poll(what, |pause| self.library.rest(raw, pause), || parent.poll());
        Ok((child, outcome))
    }

    /// Polls a communicator that nobody else has yet, and aborts it when that fails; `explain` says more of its own failure.
    fn settle(&self, comm: RawComm, what: impl Fn() -> String, explain: impl Fn(Error) -> Error) -> Result<()> {
        let rest = |pause| self.library.rest(comm, pause);
        let result = self.poll(what, rest, || self.library.poll(comm).map_err(&explain));
        if let Err(error) = &result {
            self.tell(error);
            let _ = self.library.abort(comm);
        }
        result
    }

    /// Waits until the background work is done: to the deadline, unless cancelled or another rank reports that it failed.
    fn poll(
        &self,
        what: impl Fn() -> String,
        rest: impl Fn(Duration),
        is_done: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let mut looked = Instant::now();
        let extra = if self.library.is_host_engine() { LAST_WORD } else { Duration::ZERO };
        let wait = self.wait.with_deadline(self.wait.deadline.extended(extra));
        settle(&wait, what, rest, || {
            if is_done()? {
                return Ok(true);
            }
            let due = looked.elapsed() > LOOK_AROUND && !self.wait.deadline.passed();
            let Some(round) = self.round.filter(|_| due) else { return Ok(false) };
            looked = Instant::now();
            self.wait.look_around()?;
            match round.failed(self.wait) {
                Ok(Some(failure)) => Err(failure),
                // A store that does not answer is no reason to give up the work: the deadline is the same.
                Err(error) if error.status() != Status::Timeout => Err(error),
                _ => Ok(false),
            }
        })
    }

    /// Says what happened before this rank aborts what it was making: the others would take that for the reason.
    fn tell(&self, error: &Error) {
        if let Some(round) = self.round.filter(|_| matches!(error.status(), Status::PeerLost | Status::Ccl)) {
            report(round, error, self.wait);
        }
    }

    fn millis_left(&self) -> u64 {
        millis(self.wait.deadline.left())
    }
}

/// Tells the other ranks of a call that this one failed. For them a rank that was aborted is lost.
pub(super) fn report(round: &Round, error: &Error, wait: &Wait) {
    match error.status() {
        Status::Aborted => round.fail(&Error::new(Status::PeerLost, format!("it was lost: {}", error.message())), wait),
        _ => round.fail(error, wait),
    }
}

/// How an agreed call ended here: all ranks say what its verdict says, which is the first failure of any of them. What this rank met itself may
/// follow from that one. Its own word stands where it was aborted, where the verdict could not be learnt, and where all were late: it says
/// whom this rank waited for.
pub(super) fn outcome<T>(mine: Result<T>, verdict: Result<()>) -> Result<T> {
    match (mine, verdict) {
        (Ok(value), verdict) => verdict.map(|()| value),
        (Err(mine), Err(verdict)) => Err(match (mine.status(), verdict.status()) {
            (Status::Aborted, _) | (_, Status::Aborted | Status::Store) | (Status::Timeout, Status::Timeout) => mine,
            _ => verdict,
        }),
        (Err(mine), Ok(())) => Err(mine),
    }
}

/// Polls until nothing is in progress any more: to the deadline, and unless cancelled. `what` names the work; `rest` lets a pause between two
/// looks pass, and may end it early when there is something to see.
pub(super) fn settle(
    wait: &Wait,
    what: impl Fn() -> String,
    rest: impl Fn(Duration),
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let mut pause = Duration::from_micros(20);
    loop {
        match is_done() {
            Ok(true) => return Ok(()),
            Ok(false) => wait.cancel.check()?,
            Err(error) => {
                // An abort takes the communicator away from under the question.
                wait.cancel.check()?;
                return Err(error.within(&what()));
            }
        }
        if wait.deadline.passed() {
            let timeout = wait.deadline.timeout().as_millis();
            return Err(Error::timeout(format!("{} was not done after {timeout} ms", what())));
        }
        rest(pause.min(wait.deadline.left()));
        pause = (pause * 2).min(Duration::from_millis(2));
    }
}

/// A group's ranks in the world, in its order.
pub(super) fn world_ranks(group: &Mesh) -> String {
    ranks_text(group.ranks().as_slice())
}

/// As the host engine counts time.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
