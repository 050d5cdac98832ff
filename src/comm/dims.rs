//! Giving dimensions their communicators: shared where the ranks are the same, else made, and taken back together when any
//! rank fails.

use std::sync::{Arc, PoisonError};

use super::communicator::{Communicator, LazyPlan, State, lasting_name};
use super::domain::{Domain, PartitionKey};
use super::groups::outside_groups;
use super::making::{Maker, millis, outcome, report};
use super::options::DimOptions;
use super::root::{DimComm, RootComms};
use crate::ccl::{CallName, CommConfig, Library, NO_COLOR, RawComm};
use crate::error::{Error, Result};
use crate::layout::Dim;
use crate::mesh::Mesh;
use crate::rendezvous::Round;
use crate::wait::Wait;

const SHARES_NOTHING: &str =
    "sharing no communicator (if an earlier mesh over the same ranks was aborted on some rank, abort it on all)";

/// Dimensions of a view that need a communicator, by index, with the caller's wishes.
pub(super) struct Plan {
    pub(super) view: Mesh,
    pub(super) dims: Vec<(usize, DimOptions)>,
    /// Where `view` is a range of the root's ranks: what owns the range's communicators.
    pub(super) part: Option<Arc<RootComms>>,
    /// Of a call that ranks outside the root make as well: its text, by which the root's own agree on what they share.
    pub(super) apart: Option<String>,
    /// Of which communicator that over all ranks is to be made, instead of a new id.
    pub(super) shrinking: Option<Shrinking>,
}

/// A communicator over more ranks, some of them lost.
pub(super) struct Shrinking {
    pub(super) parent: Arc<Communicator>,
    /// By their ranks in it.
    pub(super) excluded: Vec<i32>,
}

impl RootComms {
    /// Makes what the plan needs inside the agreed `round` and ends the round with the other ranks. On any rank's failure
    /// every rank gets that error and keeps nothing of the plan.
    pub(super) fn carry_out(&self, plan: &Plan, round: Round, wait: &Wait) -> Result<()> {
        match &self.library {
            Some(library) => outside_groups(library, || self.carry_out_here(plan, round, wait)),
            None => self.carry_out_here(plan, round, wait),
        }
    }

    fn carry_out_here(&self, plan: &Plan, round: Round, wait: &Wait) -> Result<()> {
        let holder = plan.part.as_deref().unwrap_or(self);
        let dims_before = holder.dims.read().unwrap_or_else(PoisonError::into_inner).len();
        let had_parent = self.parent.read().unwrap_or_else(PoisonError::into_inner).is_some();
        let mut fresh = Vec::new();
        let made = if self.root.is_member() { self.add_dims(plan, &round, wait, &mut fresh) } else { Ok(()) };
        if let Err(error) = &made {
            report(&round, error, wait);
        }
        let outcome = outcome(made, round.finish(wait));
        // An abort that came after the last wait has not seen what was made meanwhile.
        let outcome = outcome.and_then(|()| self.alive());
        if outcome.is_err() {
            self.take_back(holder, dims_before, had_parent, &fresh);
        }
        wait.outcome(outcome)
    }

    /// Which of the plan's dimensions take a communicator that exists, for the ranks to agree on. They differ only where a mesh over the same
    /// ranks has ended on some of them: then making one here while a peer shares would be a wait for nobody.
    pub(super) fn sharing(&self, plan: &Plan) -> String {
        let Some(domain) = self.domain.as_ref().filter(|_| self.root.is_member()) else {
            return SHARES_NOTHING.to_owned();
        };
        let is_shared = |mesh: &Mesh, dim: &Dim| domain.find_shared(mesh, dim).is_some();
        let candidates = plan.dims.iter().filter(|(_, options)| !options.is_exclusive());
        let mut names: Vec<&str> = candidates
            .filter(|(index, _)| plan.view.dim_size(*index) > 1 && is_shared(&plan.view, plan.view.dim_layout(*index)))
            .map(|(index, _)| plan.view.dim_name(*index))
            .collect();
        if self.library.as_ref().is_some_and(|library| domain.find_parent(&self.root, library).is_some()) {
            names.push("the root");
        }
        match names.is_empty() {
            true => SHARES_NOTHING.to_owned(),
            false => format!("sharing communicators for {} with an earlier mesh", names.join(", ")),
        }
    }

    /// In the plan's order, which is the same on every rank: communicator libraries need that.
    fn add_dims(&self, plan: &Plan, round: &Round, wait: &Wait, fresh: &mut Vec<Arc<Communicator>>) -> Result<()> {
        let (Some(domain), Some(library)) = (&self.domain, &self.library) else {
            return Ok(());
        };
        if let (Some(call), Some(scope)) = (&plan.apart, &self.scope) {
            scope.agree_in_detail(call, &self.sharing(plan), wait)?;
        }
        domain.select_device()?;
        let maker = Maker { library, round: Some(round), wait, timeout: self.timeout };
        let holder = plan.part.as_deref().unwrap_or(self);
        if let Some(from) = &plan.shrinking {
            self.take_shrunk(domain, &maker, from)?;
        }
        for (index, options) in &plan.dims {
            // The same dimension under the same name keeps the communicator that it has.
            if holder.has_dim(plan.view.dim_name(*index), plan.view.dim_layout(*index)) {
                continue;
            }
            let communicator = self.communicator_for(domain, holder, &plan.view, *index, options)?;
            // Noted before it is made, so that an abort meanwhile finds it.
            holder.note(plan.view.dim_name(*index), &plan.view, *index, &communicator);
            let wanted_now = !self.lazy && plan.view.dim_size(*index) > 1;
            if wanted_now && communicator.state() == State::Unmade {
                let raw = self.make(domain, &maker, &communicator, &plan.view, *index, options)?;
                fresh.push(Arc::clone(&communicator));
                let Some(raw) = raw else {
                    communicator.set_absent();
                    continue;
                };
                communicator.set_ready(raw)?;
                domain.keep(&communicator);
                communicator.limit(millis(self.timeout))?;
            }
        }
        Ok(())
    }

    /// The communicator that this dimension shares with another over the same ranks, or a new one that is not made yet.
    fn communicator_for(
        &self,
        domain: &Domain,
        holder: &RootComms,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
    ) -> Result<Arc<Communicator>> {
        let library = domain.library()?;
        let (name, dim) = (view.dim_name(index), view.dim_layout(index));
        // A rank outside a range has no group along it.
        let group = if view.is_member() { view.slice(&[name])? } else { view.clone() };
        if dim.size() == 1 && !options.is_exclusive() {
            let alone = || Communicator::unmade(Arc::clone(library), group, LazyPlan::alone());
            // What serves all such dimensions of this rank is of a group that it is in.
            return Ok(if view.is_member() { domain.single(alone) } else { Arc::new(alone()) });
        }
        let exclusive = options.is_exclusive();
        if let Some(known) = domain.find_shared(view, dim).filter(|_| !exclusive) {
            return Ok(known);
        }
        let color = view.is_member().then(|| view.split_color_key(index)).transpose()?.map_or(NO_COLOR, |own| own.0);
        let lazy = LazyPlan {
            scope: self.lazy.then(|| format!("{}/{name}/{color}", holder.id)),
            config: options.config.clone(),
            comm_name: Some(comm_name(name, options)),
        };
        let made = Arc::new(Communicator::unmade(Arc::clone(library), group, lazy));
        if !exclusive {
            domain.shared().insert(PartitionKey::of(view, dim), Arc::clone(&made));
        }
        Ok(made)
    }

    /// `None` on a rank outside the range that the view is of.
    fn make(
        &self,
        domain: &Domain,
        maker: &Maker<'_>,
        communicator: &Arc<Communicator>,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
    ) -> Result<Option<RawComm>> {
        let (name, group) = (view.dim_name(index), communicator.group());
        let place = view.is_member().then(|| view.split_color_key(index)).transpose()?;
        let config = config(maker.library, options.config.as_ref(), &comm_name(name, options));
        // By a fresh id: what joins all ranks of the root (it needs no parent, but takes one that is there where it cannot be that itself), what another
        // mesh planned lazily (some of its groups may exist already, so that not all ranks would take part in a split), and where the
        // library has no split.
        let is_whole = view.dim_size(index) == self.root.root_size();
        let from_parent =
            !is_whole || (maker.library.has_streams() && self.known_parent(domain, maker.library).is_some());
        if !from_parent || communicator.plan().is_lazy() || !maker.library.can_split() {
            let meet = |(color, _)| maker.meet_for_use(&format!("comm/{name}/{color}"), group, config);
            return place.map(meet).transpose();
        }
        let parent = self.parent(domain, maker)?;
        maker.split(&parent, group, place, config.blocking_by_default())
    }

    /// The one that dimensions can be split from, where there is one already.
    pub(super) fn known_parent(&self, domain: &Domain, library: &Library) -> Option<Arc<Communicator>> {
        let own = self.parent.read().unwrap_or_else(PoisonError::into_inner).clone();
        own.or_else(|| domain.find_parent(&self.root, library))
    }

    /// The communicator over all ranks of the root in row-major order, to split from: shared with other roots of the same ranks, and with what
    /// joins them where that can be split from as well.
    fn parent(&self, domain: &Domain, maker: &Maker<'_>) -> Result<Arc<Communicator>> {
        if let Some(parent) = &*self.parent.read().unwrap_or_else(PoisonError::into_inner) {
            return Ok(Arc::clone(parent));
        }
        let all = self.root.all_ranks();
        let key = PartitionKey::of(&all, all.dim_layout(0)).for_splits(maker.library);
        let parent = match self.known_parent(domain, maker.library) {
            Some(known) => known,
            None => {
                let config = config(maker.library, None, &format!("mesh_{}", self.root.dim_names().join("_")));
                let raw = maker.meet("comm/root", &all, config.blocking(false))?;
                let parent = Arc::new(Communicator::unmade(Arc::clone(maker.library), all, LazyPlan::default()));
                parent.set_ready(raw)?;
                parent
            }
        };
        Ok(self.keep_parent(domain, key, parent))
    }

    /// Notes the communicator over all ranks of the root, and that others may share it.
    pub(super) fn keep_parent(
        &self,
        domain: &Domain,
        key: PartitionKey,
        parent: Arc<Communicator>,
    ) -> Arc<Communicator> {
        domain.keep(&parent);
        domain.shared().entry(key).or_insert_with(|| Arc::clone(&parent));
        parent.add_user();
        *self.parent.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&parent));
        parent
    }

    fn note(&self, name: &str, view: &Mesh, index: usize, communicator: &Arc<Communicator>) {
        communicator.add_user();
        self.dims.write().unwrap_or_else(PoisonError::into_inner).push(DimComm {
            name: name.to_owned(),
            dim: view.dim_layout(index).clone(),
            communicator: Arc::clone(communicator),
            call: CallName::new(&self.id, name, view.dim_layout(index).pairs()),
        });
    }

    /// Undoes a plan that failed: what only it used is aborted and forgotten, what it made for others as well is unmade.
    fn take_back(&self, holder: &RootComms, dims_before: usize, had_parent: bool, fresh: &[Arc<Communicator>]) {
        let mut gone: Vec<Arc<Communicator>> = {
            let mut dims = holder.dims.write().unwrap_or_else(PoisonError::into_inner);
            let from = dims_before.min(dims.len());
            dims.drain(from..).map(|known| known.communicator).collect()
        };
        if !had_parent {
            gone.extend(self.parent.write().unwrap_or_else(PoisonError::into_inner).take());
        }
        let ended = |communicator: &Arc<Communicator>| {
            let _ = communicator.abort();
            if let Some(domain) = &self.domain {
                domain.forget(communicator);
            }
        };
        for communicator in gone.iter().filter(|communicator| communicator.drop_user()) {
            ended(communicator);
        }
        for communicator in fresh {
            communicator.unmake();
        }
    }
}

fn comm_name(dim: &str, options: &DimOptions) -> String {
    options.name.clone().unwrap_or_else(|| format!("mesh_{dim}"))
}

/// The caller's config, or one with nothing set, with the communicator's name.
pub(super) fn config(library: &Library, callers: Option<&CommConfig>, name: &str) -> CommConfig {
    callers.cloned().unwrap_or_else(|| CommConfig::unset(library.version())).named(lasting_name(name))
}

/// For [`RootComms::create`] and the like: a plan for all dimensions of a view.
impl Plan {
    /// Whether every dimension has a communicator planned already.
    pub(super) fn is_known(&self, root: &RootComms) -> bool {
        let known =
            |index: &usize| root.communicator(self.view.dim_name(*index), self.view.dim_layout(*index)).is_some();
        self.dims.iter().all(|(index, _)| known(index))
    }
}

/// An error for a dimension that no agreed call gave a communicator.
pub(super) fn unplanned(view: &Mesh, index: usize) -> Error {
    Error::internal(format!("dimension {} of {} has no communicator planned", view.dim_name(index), view.describe()))
}
