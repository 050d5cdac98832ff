//! The communicators of a root mesh: along its dimensions, and the parent from which others are
//! split.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::super::communicator::{Communicator, Held, State};
use super::super::ending::abort_all;
use super::super::options::DimOptions;
use super::super::world::EndsWithWorld;
use super::departed::DepartureWatch;
use super::{DimComm, Life, RootComms};
use crate::ccl::{CallName, Expected, expect};
use crate::error::{Error, Result, Status};
use crate::layout::Dim;
use crate::recorder::{self, Group, Kind, Reports};
use crate::wait::{By, Wait, Watch};

/// The things that calls along a dimension need.
pub(in crate::comm) struct Issued {
    pub(in crate::comm) communicator: Arc<Communicator>,
    /// The name under which the calls are issued.
    pub(in crate::comm) call: CallName,
    /// The group in the recording of this process.
    pub(in crate::comm) group: Arc<Group>,
}

/// The root's communicators.
impl RootComms {
    /// The communicator of a dimension; `None` where none was ever planned.
    pub(in crate::comm) fn communicator(&self, name: &str, dim: &Dim) -> Option<Arc<Communicator>> {
        self.issued(name, dim).map(|issued| issued.communicator)
    }

    /// The communicator of a dimension, with what calls along the dimension need beside it. Where
    /// this root is a range and has no such dimension itself, the outer root may have it.
    pub(in crate::comm) fn issued(&self, name: &str, dim: &Dim) -> Option<Issued> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &&DimComm| known.dim.pairs() == dim.pairs();
        // The last communicator counts, because a communicator is made anew when an earlier one
        // has failed.
        let of_name = |known: &&DimComm| same(known) && known.name == name;
        let found = dims.iter().rev().find(of_name).or_else(|| dims.iter().rev().find(same));
        let issued = |known: &DimComm| Issued {
            communicator: Arc::clone(&known.communicator),
            call: known.call,
            group: Arc::clone(&known.group),
        };
        found.map(issued).or_else(|| {
            let (_, dim) = self.mesh.outer_dim(dim)?;
            self.outer.upgrade()?.issued(name, &dim)
        })
    }

    /// The dimensions of this root and of its ranges on which this rank makes calls: the group in
    /// the recording, and the communicator.
    pub(in crate::comm) fn recorded_dims(&self) -> Vec<(Arc<Group>, Arc<Communicator>)> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let own = dims.iter().map(|known| (Arc::clone(&known.group), Arc::clone(&known.communicator)));
        let mut all: Vec<_> = own.collect();
        drop(dims);
        self.ranges().iter().for_each(|range| all.extend(range.recorded_dims()));
        all
    }

    /// Lets NCCL's profiler interface find the dimension of a communicator that is about to be
    /// made.
    pub(in crate::comm) fn expect(&self, communicator: &Arc<Communicator>) -> Option<Expected> {
        let (group, _) = self.recorded_dims().into_iter().find(|(_, known)| Arc::ptr_eq(known, communicator))?;
        let (ranks, name) = (communicator.group(), communicator.first_use().comm_name.as_deref()?);
        Some(expect(name, (ranks.local_rank(0).ok()?, ranks.size()), &group))
    }

    /// The error of a call of `group`, with what the recordings of the ranks say about the call.
    pub(in crate::comm) fn explained(&self, error: Error, group: &Group) -> Error {
        match self.reports() {
            Some(reports) => recorder::explained_with(error, group, &reports),
            None => recorder::explained(error, group),
        }
    }

    /// The place where the hosts leave reports for one error; `None` where all ranks are on this
    /// host.
    pub(in crate::comm) fn reports(&self) -> Option<impl Reports> {
        let world = self.world.as_ref().filter(|world| world.local_place().num_hosts > 1)?;
        Some(world.rendezvous().scope().ok()?.reports())
    }

    /// The communicator that this root made last for a dimension with this name and this layout.
    pub(in crate::comm) fn own_dim(&self, name: &str, dim: &Dim) -> Option<Arc<Communicator>> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let own = dims.iter().rev().find(|known| known.name == name && known.dim.pairs() == dim.pairs());
        own.map(|known| Arc::clone(&known.communicator))
    }

    /// The options with which a dimension got its communicator. Where this root is a range and has
    /// no such dimension itself, the outer root may have it.
    pub(in crate::comm) fn dim_options(&self, name: &str, dim: &Dim) -> DimOptions {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let of_name = |known: &&DimComm| known.dim.pairs() == dim.pairs() && known.name == name;
        let found = dims.iter().rev().find(of_name).map(|known| known.options.clone());
        let outer = || {
            let (_, dim) = self.mesh.outer_dim(dim)?;
            Some(self.outer.upgrade()?.dim_options(name, &dim))
        };
        found.or_else(outer).unwrap_or_default()
    }

    /// Gives a dimension its communicator. `options` are the caller's.
    pub(in crate::comm) fn add_dim(
        &self,
        name: &str,
        dim: &Dim,
        communicator: &Arc<Communicator>,
        options: &DimOptions,
    ) {
        communicator.add_user();
        let call = CallName::new(&self.id, name, dim.pairs());
        let group = Arc::new(self.record_dim(name, &call, communicator));
        self.life.note_group(&group);
        self.dims.write().unwrap_or_else(PoisonError::into_inner).push(DimComm {
            name: name.to_owned(),
            dim: dim.clone(),
            communicator: Held::new(Arc::clone(communicator)),
            call,
            options: options.clone(),
            group,
        });
    }

    /// Records a dimension's group, in which calls have that name. A rank outside a range has no
    /// group there.
    fn record_dim(&self, name: &str, call: &CallName, communicator: &Communicator) -> Group {
        let group = communicator.group();
        let Ok(rank) = group.local_rank(0) else { return Group::default() };
        let record = self.world.as_ref().map_or_else(recorder::World::default, |world| world.rendezvous().record());
        let (size, rank_at) = (group.size(), |position| group.translate_rank(0, position).unwrap_or(-1));
        // A dimension that gets another communicator, because the first one has failed, is another
        // group.
        let key = record.digest().number(call.tag()).text(communicator.agreed_name().unwrap_or_default());
        // The groups along a dimension have no rank in common.
        let key = key.number(rank_at(0) as u64);
        let name = format!("{}/{name}", self.name());
        Group::open(Kind::Dimension, &record, key, (rank, size), &recorder::members(size, rank_at), &name)
    }

    /// The name of the root in recordings and events. The first mesh of a job is "mesh", so that
    /// messages about a job with one mesh are short.
    pub(in crate::comm) fn name(&self) -> String {
        match self.id.strip_prefix("mesh1") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("mesh{rest}"),
            _ => self.id.clone(),
        }
    }

    /// Undoes the last [`add_dim`](RootComms::add_dim) of this communicator. Returns the
    /// communicator where nobody uses it any more, and the caller then ends it.
    #[must_use]
    pub(in crate::comm) fn remove_dim(&self, communicator: &Arc<Communicator>) -> Option<Arc<Communicator>> {
        let mut dims = self.dims.write().unwrap_or_else(PoisonError::into_inner);
        let at = dims.iter().rposition(|known| Arc::ptr_eq(&known.communicator, communicator));
        let removed = at.map(|at| dims.remove(at));
        drop(dims);
        removed.and_then(|_| self.let_go(communicator))
    }

    /// The communicator over all ranks of the root from which others are split, if there is one.
    pub(in crate::comm) fn own_parent(&self) -> Option<Arc<Communicator>> {
        self.parent.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|own| Arc::clone(own))
    }

    /// The communicator over all ranks of the root from which others can be split, where there is
    /// one already that works.
    pub(in crate::comm) fn working_parent(&self) -> Option<Arc<Communicator>> {
        let own = self.own_parent().filter(|own| own.state() == State::Ready && own.is_sound());
        let (world, library) = self.world.as_ref().zip(self.library.as_ref())?;
        own.or_else(|| world.comms().find_parent(&self.mesh, library))
    }

    /// Makes `parent` the communicator from which others are split, in place of one that has
    /// failed, and lets other roots of the same ranks share it. Returns false when `parent` was
    /// the root's parent already.
    pub(in crate::comm) fn set_parent(&self, parent: &Arc<Communicator>) -> bool {
        let mut own = self.parent.write().unwrap_or_else(PoisonError::into_inner);
        if own.as_ref().is_some_and(|own| Arc::ptr_eq(own, parent)) {
            return false;
        }
        if let Some((world, library)) = self.world.as_ref().zip(self.library.as_ref()) {
            world.comms().add_living(parent);
            world.comms().share_parent(&self.mesh, library, parent);
        }
        parent.add_user();
        let replaced = own.replace(Held::new(Arc::clone(parent)));
        drop(own);
        let unused = replaced.and_then(|replaced| self.let_go(&replaced));
        Communicator::end_all_soon(&Vec::from_iter(unused));
        true
    }

    /// Undoes [`set_parent`](RootComms::set_parent). A parent that was replaced does not come
    /// back, because the ranks have agreed not to use it. Returns the parent where nobody uses it
    /// any more, and the caller then ends it.
    #[must_use]
    pub(in crate::comm) fn remove_parent(&self) -> Option<Arc<Communicator>> {
        let removed = self.parent.write().unwrap_or_else(PoisonError::into_inner).take();
        removed.and_then(|removed| self.let_go(&removed))
    }

    /// Notes that this root does not use the communicator any more. When this root was the last
    /// user, no further call enters the communicator. In that case the communicator is returned,
    /// and the caller ends it.
    #[must_use]
    fn let_go(&self, communicator: &Arc<Communicator>) -> Option<Arc<Communicator>> {
        communicator.drop_user().then(|| {
            communicator.close();
            if let Some(world) = &self.world {
                world.comms().forget(communicator);
            }
            Arc::clone(communicator)
        })
    }

    /// Lets go of failed communicators whose dimension has a new one under the same name. Returns
    /// those that nobody uses any more, and the caller then ends them.
    #[must_use]
    pub(in crate::comm) fn drop_replaced(&self) -> Vec<Arc<Communicator>> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        // A mesh may have thousands of dimensions, so each is looked up in a set of the later ones.
        let mut later = HashSet::with_capacity(dims.len());
        let from_last = dims.iter().enumerate().rev();
        let replaced = from_last.filter(|(_, known)| !later.insert((known.name.as_str(), known.dim.pairs())));
        let mut failed: Vec<(usize, Arc<Communicator>)> =
            replaced.map(|(at, known)| (at, Arc::clone(&known.communicator))).collect();
        failed.reverse();
        drop(dims);
        // The library may take long to answer, and a failure that it tells is logged. So it is
        // asked without the lock. The turn of the call keeps other calls from changing the list.
        failed.retain(|(_, communicator)| communicator.has_failed());
        let mut dims = self.dims.write().unwrap_or_else(PoisonError::into_inner);
        failed.retain(|(at, one)| dims.get(*at).is_some_and(|known| Arc::ptr_eq(&known.communicator, one)));
        let gone: Vec<DimComm> = failed.iter().rev().map(|(at, _)| dims.remove(*at)).collect();
        drop(dims);
        gone.iter().filter_map(|known| self.let_go(&known.communicator)).collect()
    }

    /// Takes all communicators of this root, but not those of its ranges: first the parent, then
    /// those along its dimensions in the order in which they were made. The flag says whether this
    /// root makes calls on the communicator; on the parent it makes none.
    pub(in crate::comm) fn take_communicators(&self) -> Vec<(Held, bool)> {
        let parent = self.parent.write().unwrap_or_else(PoisonError::into_inner).take();
        let dims = std::mem::take(&mut *self.dims.write().unwrap_or_else(PoisonError::into_inner));
        let of_dims = dims.into_iter().map(|known| (Held::new(Arc::clone(&known.communicator)), true));
        parent.into_iter().map(|parent| (parent, false)).chain(of_dims).collect()
    }

    /// Every communicator of this root and of its ranges once, in the order in which they were
    /// made.
    pub(in crate::comm) fn communicators(&self) -> Vec<Arc<Communicator>> {
        let mut all = Vec::from_iter(self.own_parent());
        self.collect_dims(&mut all, RootComms::communicators);
        all
    }

    /// The communicators on which this root and its ranges make calls, each once.
    pub(in crate::comm) fn dim_communicators(&self) -> Vec<Arc<Communicator>> {
        let mut all = Vec::new();
        self.collect_dims(&mut all, RootComms::dim_communicators);
        all
    }

    /// Adds the communicators of this root's dimensions to `all`, and those that `of_range` gives
    /// for each of its ranges.
    fn collect_dims(&self, all: &mut Vec<Arc<Communicator>>, of_range: impl Fn(&RootComms) -> Vec<Arc<Communicator>>) {
        let mut add = |communicator: &Arc<Communicator>| {
            if !all.iter().any(|other| Arc::ptr_eq(other, communicator)) {
                all.push(Arc::clone(communicator));
            }
        };
        self.dims.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(|known| add(&known.communicator));
        self.ranges().iter().flat_map(|range| of_range(range)).for_each(|made| add(&made));
    }

    /// The communicators that end with this root: all except the communicator that holds this rank
    /// alone. That communicator serves every mesh of the world and never blocks.
    fn own_communicators(&self) -> Vec<Arc<Communicator>> {
        let is_single = |communicator: &Arc<Communicator>| {
            self.world.as_ref().is_some_and(|world| world.comms().is_single(communicator))
        };
        self.communicators().into_iter().filter(|communicator| !is_single(communicator)).collect()
    }

    /// A wait of at most `timeout` (`None`: the mesh's own) for the root's other ranks. The wait
    /// ends early when a communicator has failed because a rank has died or aborted: that rank will
    /// not make the call. After other failures all ranks still make the call.
    pub(in crate::comm) fn wait_for_peers(&self, timeout: Option<Duration>) -> Wait {
        let communicators = self.communicators();
        let watch: Watch = Arc::new(move || {
            let made = communicators.iter().filter(|communicator| !communicator.raw().is_null());
            let failures = made.filter_map(|communicator| communicator.poll().err());
            let mut ends = failures.filter(|error| !matches!(error.status(), Status::Mismatch | Status::Timeout));
            ends.next().map_or(Ok(()), Err)
        });
        Wait { watch: Some(watch), ..self.wait(timeout) }
    }

    /// Aborts the communicators of this root and of its ranges for which `which` returns true.
    pub(in crate::comm) fn abort_communicators(&self, which: impl Fn(&Arc<Communicator>) -> bool) -> Result<()> {
        let ended: Vec<_> = self.own_communicators().into_iter().filter(which).collect();
        let outcome = abort_all(&ended);
        if let Some(world) = &self.world {
            ended.iter().for_each(|communicator| world.comms().forget(communicator));
        }
        outcome
    }
}

impl EndsWithWorld for RootComms {
    fn end_with_epoch(&self) -> Vec<Arc<Communicator>> {
        let was_alive = self.end(Life::Recovered);
        self.cancel.raise_by(By::Recover);
        if was_alive {
            self.tell_before_kernels_end();
        }
        self.own_communicators()
    }

    fn end_with_world(&self) -> Vec<Arc<Communicator>> {
        self.end(Life::Aborted);
        self.cancel.raise();
        self.own_communicators()
    }

    fn is_in_use(&self) -> bool {
        self.life() == Life::Alive
    }

    fn num_seats(&self) -> Option<usize> {
        matches!(self.life(), Life::Alive | Life::Recovered).then(|| self.mesh.root_size())
    }

    fn watch_departures(&self) {
        if let Some(watch) = DepartureWatch::begin(self) {
            let _ = self.departed.set(watch);
        }
    }

    fn finalize_with_world(&self) -> Vec<Arc<Communicator>> {
        self.end(Life::Finalized);
        self.communicators()
    }

    fn departed_from(&self, communicators: &[Arc<Communicator>], wait: &Wait) -> Result<Vec<i32>> {
        let Some(departures) = self.departures() else { return Ok(Vec::new()) };
        let is_among = |own: &Arc<Communicator>| communicators.iter().any(|other| Arc::ptr_eq(own, other));
        match self.communicators().iter().any(is_among) {
            true => departures.others(wait),
            false => Ok(Vec::new()),
        }
    }
}
