//! Giving dimensions their communicators: shared where the ranks are the same, else made, and taken back together when any
//! rank fails.

use std::sync::{Arc, PoisonError};

use once_cell::sync::OnceCell;

use super::communicator::{Communicator, Held, LazyPlan, State, lasting_name};
use super::domain::{Domain, PartitionKey};
use super::groups::outside_groups;
use super::making::{Maker, millis, outcome, report};
use super::options::DimOptions;
use super::root::{DimComm, RootComms};
use crate::ccl::{CallName, CommConfig, Library, NO_COLOR, RawComm};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::{Round, Scope};
use crate::wait::Wait;

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

/// The existing communicators that a plan's dimensions take.
pub(super) struct Shared {
    /// By place in the plan.
    dims: Vec<Option<Arc<Communicator>>>,
    /// The one over all ranks of the root, to split from; made when it is needed and not there.
    parent: OnceCell<Arc<Communicator>>,
}

impl Shared {
    /// For a plan that makes everything anew.
    pub(super) fn nothing(plan: &Plan) -> Shared {
        Shared { dims: vec![None; plan.dims.len()], parent: OnceCell::new() }
    }

    /// Whether the dimension at that place of the plan takes an existing one.
    pub(super) fn has(&self, place: usize) -> bool {
        self.dims.get(place).is_some_and(Option::is_some)
    }

    /// Agrees on `call` with the other ranks, and on which of these candidates all ranks have. One that some rank knows to have failed or ended is
    /// left out on all of them, and made anew.
    pub(super) fn agree(self, scope: &Scope, call: &str, wait: &Wait) -> Result<(Round, Shared)> {
        let all = self.dims.iter().map(Option::as_ref).chain([self.parent.get()]);
        let name = |known: &Arc<Communicator>| known.shareable().map(str::to_owned);
        let offers: Vec<_> = all.map(|known| known.and_then(name)).collect();
        let (round, shared) = scope.agree_to_share(call, &offers, wait)?;
        let is_shared = |place: &usize| shared.get(*place).copied().unwrap_or(false);
        let of_parent = is_shared(&self.dims.len());
        let dims = self.dims.into_iter().enumerate().map(|(place, known)| known.filter(|_| is_shared(&place)));
        let parent = self.parent.into_inner().filter(|_| of_parent);
        Ok((round, Shared { dims: dims.collect(), parent: parent.map_or_else(OnceCell::new, OnceCell::from) }))
    }
}

impl RootComms {
    /// Makes what the plan needs inside the agreed `round` and ends the round with the other ranks. On any rank's failure
    /// every rank gets that error and keeps nothing of the plan.
    pub(super) fn carry_out(&self, plan: &Plan, shared: Shared, round: Round, wait: &Wait) -> Result<()> {
        match &self.library {
            Some(library) => outside_groups(library, || self.carry_out_here(plan, shared, round, wait)),
            None => self.carry_out_here(plan, shared, round, wait),
        }
    }

    fn carry_out_here(&self, plan: &Plan, shared: Shared, round: Round, wait: &Wait) -> Result<()> {
        let holder = plan.part.as_deref().unwrap_or(self);
        let dims_before = holder.dims.read().unwrap_or_else(PoisonError::into_inner).len();
        let had_parent = self.parent.read().unwrap_or_else(PoisonError::into_inner).is_some();
        let mut fresh = Vec::new();
        let made = if self.root.is_member() { self.add_dims(plan, shared, &round, wait, &mut fresh) } else { Ok(()) };
        if let Err(error) = &made {
            report(&round, error, wait);
        }
        let outcome = outcome(made, round.finish(wait));
        // An abort that came after the last wait has not seen what was made meanwhile.
        let outcome = outcome.and_then(|()| self.alive());
        if outcome.is_err() {
            self.take_back(holder, dims_before, had_parent, &fresh);
        } else {
            holder.drop_replaced();
        }
        if let Some(domain) = &self.domain {
            domain.bury();
        }
        wait.outcome(outcome)
    }

    /// What this rank could share for each of the plan's dimensions. It may differ between ranks where a mesh over the same ranks has ended or failed
    /// on some of them, so what is shared is agreed on ([`Shared::agree`]).
    pub(super) fn candidates(&self, plan: &Plan) -> Shared {
        let Some(domain) = self.domain.as_ref().filter(|_| self.root.is_member()) else {
            return Shared::nothing(plan);
        };
        let holder = plan.part.as_deref().unwrap_or(self);
        let candidate = |(index, options): &(usize, DimOptions)| {
            let (name, dim) = (plan.view.dim_name(*index), plan.view.dim_layout(*index));
            // A dimension of size 1 needs no other rank.
            if dim.size() == 1 {
                return None;
            }
            // The same dimension under the same name keeps the communicator that it has.
            let own = holder.own_dim(name, dim).filter(|own| own.is_sound());
            own.or_else(|| domain.find_shared(&plan.view, dim).filter(|_| !options.is_exclusive()))
        };
        let parent = self.library.as_ref().and_then(|library| self.known_parent(domain, library));
        Shared {
            dims: plan.dims.iter().map(candidate).collect(),
            parent: parent.map_or_else(OnceCell::new, OnceCell::from),
        }
    }

    /// In the plan's order, which is the same on every rank: communicator libraries need that.
    fn add_dims(
        &self,
        plan: &Plan,
        mut shared: Shared,
        round: &Round,
        wait: &Wait,
        fresh: &mut Vec<Arc<Communicator>>,
    ) -> Result<()> {
        let (Some(domain), Some(library)) = (&self.domain, &self.library) else {
            return Ok(());
        };
        if let (Some(call), Some(scope)) = (&plan.apart, &self.scope) {
            shared = self.candidates(plan).agree(scope, call, wait)?.1;
        }
        domain.select_device()?;
        let maker = Maker { library, round: Some(round), wait, timeout: self.timeout };
        let holder = plan.part.as_deref().unwrap_or(self);
        if let Some(from) = &plan.shrinking {
            let _ = shared.parent.set(self.take_shrunk(domain, &maker, from)?);
        }
        for (place, (index, options)) in plan.dims.iter().enumerate() {
            let (name, dim) = (plan.view.dim_name(*index), plan.view.dim_layout(*index));
            let own = holder.own_dim(name, dim);
            let keeps_own = match (&own, &shared.dims[place]) {
                (Some(own), Some(known)) => Arc::ptr_eq(own, known),
                (Some(own), None) => dim.size() == 1 && own.is_sound(),
                (None, _) => false,
            };
            if keeps_own {
                continue;
            }
            let communicator = match &shared.dims[place] {
                Some(known) => Arc::clone(known),
                None => self.new_communicator(domain, holder, &plan.view, *index, options, round)?,
            };
            // Noted before it is made, so that an abort meanwhile finds it.
            holder.note(plan.view.dim_name(*index), &plan.view, *index, &communicator);
            let wanted_now = !self.lazy && plan.view.dim_size(*index) > 1;
            if wanted_now && communicator.state() == State::Unmade {
                let raw = self.make(domain, &maker, &communicator, &plan.view, (*index, options), &shared.parent)?;
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

    /// A new communicator for this dimension, not made yet, or the one that all dimensions of size 1 share.
    fn new_communicator(
        &self,
        domain: &Domain,
        holder: &RootComms,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
        round: &Round,
    ) -> Result<Arc<Communicator>> {
        let library = domain.library()?;
        let (name, dim) = (view.dim_name(index), view.dim_layout(index));
        // A rank outside a range has no group along it.
        let group = if view.is_member() { view.slice(&[name])? } else { view.clone() };
        let exclusive = options.is_exclusive();
        if dim.size() == 1 && !exclusive {
            let alone = || Communicator::unmade(Arc::clone(library), group, LazyPlan::alone());
            // The one that serves all such dimensions of this rank is of a group that this rank is in.
            return Ok(if view.is_member() { domain.single(alone) } else { Arc::new(alone()) });
        }
        let color = view.is_member().then(|| view.split_color_key(index)).transpose()?.map_or(NO_COLOR, |own| own.0);
        let lazy = LazyPlan {
            // A further one of the same name meets in a scope of its own.
            scope: self.lazy.then(|| format!("{}{}/{name}/{color}", holder.id, round.name())),
            config: options.config.clone(),
            comm_name: Some(comm_name(name, options)),
        };
        let made = Arc::new(Communicator::unmade(Arc::clone(library), group, lazy));
        made.set_origin(format!("{}/{index}", round.name()));
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
        (index, options): (usize, &DimOptions),
        parent: &OnceCell<Arc<Communicator>>,
    ) -> Result<Option<RawComm>> {
        let (name, group) = (view.dim_name(index), communicator.group());
        let place = view.is_member().then(|| view.split_color_key(index)).transpose()?;
        let config = config(maker.library, options.config.as_ref(), &comm_name(name, options));
        // By a fresh id: what joins all ranks of the root (it needs no parent, but takes one that is there where it cannot be that itself), what another
        // mesh planned lazily (some of its groups may exist already, so that not all ranks would take part in a split), and where the
        // library has no split.
        let is_whole = view.dim_size(index) == self.root.root_size();
        let from_parent = !is_whole || (maker.library.has_streams() && parent.get().is_some());
        if !from_parent || communicator.plan().is_lazy() || !maker.library.can_split() {
            let meet = |(color, _)| maker.meet_for_use(&format!("comm/{name}/{color}"), group, config);
            return place.map(meet).transpose();
        }
        let parent = self.parent(domain, maker, parent)?;
        maker.split(&parent, group, place, config.blocking_by_default())
    }

    /// The one that dimensions can be split from, where there is one already that works.
    pub(super) fn known_parent(&self, domain: &Domain, library: &Library) -> Option<Arc<Communicator>> {
        let own = self.parent.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|own| Arc::clone(own));
        let own = own.filter(|own| own.state() == State::Ready && own.is_sound());
        own.or_else(|| domain.find_parent(&self.root, library))
    }

    /// The communicator over all ranks of the root in row-major order, to split from: the `known` one, which is shared with other roots of the same
    /// ranks, and with what joins them where that can be split from as well; else a new one.
    fn parent(
        &self,
        domain: &Domain,
        maker: &Maker<'_>,
        known: &OnceCell<Arc<Communicator>>,
    ) -> Result<Arc<Communicator>> {
        let parent = known.get_or_try_init(|| {
            let all = self.root.all_ranks();
            let config = config(maker.library, None, &format!("mesh_{}", self.root.dim_names().join("_")));
            let raw = maker.meet("comm/root", &all, config.blocking(false))?;
            let made = Arc::new(Communicator::unmade(Arc::clone(maker.library), all, LazyPlan::default()));
            if let Some(round) = maker.round {
                made.set_origin(format!("{}/root", round.name()));
            }
            made.set_ready(raw).map(|()| made)
        })?;
        self.keep_parent(domain, maker.library, parent);
        Ok(Arc::clone(parent))
    }

    /// Notes the communicator over all ranks of the root, and that others may share it, in place of one that has failed on some rank.
    pub(super) fn keep_parent(&self, domain: &Domain, library: &Library, parent: &Arc<Communicator>) {
        let mut own = self.parent.write().unwrap_or_else(PoisonError::into_inner);
        if own.as_ref().is_some_and(|own| Arc::ptr_eq(own, parent)) {
            return;
        }
        domain.keep(parent);
        let all = self.root.all_ranks();
        let key = PartitionKey::of(&all, all.dim_layout(0)).for_splits(library);
        domain.shared().insert(key, Arc::clone(parent));
        parent.add_user();
        let replaced = own.replace(Held::new(Arc::clone(parent)));
        drop(own);
        if let Some(replaced) = replaced {
            self.let_go(&replaced);
        }
    }

    /// This root uses it no longer: it ends where that was the last one.
    fn let_go(&self, communicator: &Arc<Communicator>) {
        if communicator.drop_user() {
            let _ = communicator.abort();
            if let Some(domain) = &self.domain {
                domain.forget(communicator);
            }
        }
    }

    /// Lets go of failed communicators whose dimension has a new one of the same name.
    fn drop_replaced(&self) {
        let mut dims = self.dims.write().unwrap_or_else(PoisonError::into_inner);
        let is_replaced = |at: usize, dims: &[DimComm]| {
            let same = |later: &DimComm| later.name == dims[at].name && later.dim.pairs() == dims[at].dim.pairs();
            dims[at + 1..].iter().any(same) && dims[at].communicator.has_failed()
        };
        let replaced: Vec<usize> = (0..dims.len()).filter(|at| is_replaced(*at, &dims)).collect();
        let gone: Vec<DimComm> = replaced.into_iter().rev().map(|at| dims.remove(at)).collect();
        drop(dims);
        gone.iter().for_each(|known| self.let_go(&known.communicator));
    }

    fn note(&self, name: &str, view: &Mesh, index: usize, communicator: &Arc<Communicator>) {
        communicator.add_user();
        self.dims.write().unwrap_or_else(PoisonError::into_inner).push(DimComm {
            name: name.to_owned(),
            dim: view.dim_layout(index).clone(),
            communicator: Held::new(Arc::clone(communicator)),
            call: CallName::new(&self.id, name, view.dim_layout(index).pairs()),
        });
    }

    /// Undoes a plan that failed: what only it used is aborted and forgotten, what it made for others as well is unmade.
    fn take_back(&self, holder: &RootComms, dims_before: usize, had_parent: bool, fresh: &[Arc<Communicator>]) {
        let mut gone: Vec<Held> = {
            let mut dims = holder.dims.write().unwrap_or_else(PoisonError::into_inner);
            let from = dims_before.min(dims.len());
            dims.drain(from..).map(|known| known.communicator).collect()
        };
        if !had_parent {
            gone.extend(self.parent.write().unwrap_or_else(PoisonError::into_inner).take());
        }
        gone.iter().for_each(|communicator| self.let_go(communicator));
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
