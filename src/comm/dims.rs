//! Giving dimensions their communicators: shared where the ranks are the same, else made, and taken back together when any
//! rank fails.

use std::sync::{Arc, PoisonError};

use super::communicator::{Communicator, LazyPlan, State, lasting_name};
use super::domain::{Domain, PartitionKey};
use super::making::{Maker, millis, outcome, report};
use super::options::DimOptions;
use super::root::{DimComm, RootComms};
use crate::ccl::{CommConfig, Library, RawComm};
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
}

impl RootComms {
    /// Makes what the plan needs inside the agreed `round` and ends the round with the other ranks. On any rank's failure
    /// every rank gets that error and keeps nothing of the plan.
    pub(super) fn carry_out(&self, plan: &Plan, round: Round, wait: &Wait) -> Result<()> {
        let dims_before = self.dims.read().unwrap_or_else(PoisonError::into_inner).len();
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
            self.take_back(dims_before, had_parent, &fresh);
        }
        wait.outcome(outcome)
    }

    /// Which of the plan's dimensions take a communicator that exists, for the ranks to agree on. They differ only where a mesh over the same
    /// ranks has ended on some of them: then making one here while a peer shares would be a wait for nobody.
    pub(super) fn sharing(&self, plan: &Plan) -> String {
        let Some(domain) = self.domain.as_ref().filter(|_| self.root.is_member()) else {
            return SHARES_NOTHING.to_owned();
        };
        let shared = domain.shared();
        let is_shared = |dim: &Dim| {
            let known = shared.get(&PartitionKey::of(&self.root, dim));
            known.is_some_and(|known| matches!(known.state(), State::Unmade | State::Ready))
        };
        let candidates = plan.dims.iter().filter(|(_, options)| !options.is_exclusive());
        let mut names: Vec<&str> = candidates
            .filter(|(index, _)| plan.view.dim_size(*index) > 1 && is_shared(plan.view.dim_layout(*index)))
            .map(|(index, _)| plan.view.dim_name(*index))
            .collect();
        if is_shared(&Dim::new(&[(self.root.root_size(), 1)])) {
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
        let maker = Maker { library, round: Some(round), wait, timeout: self.timeout };
        for (index, options) in &plan.dims {
            // The same dimension under the same name keeps the communicator that it has.
            if self.has_dim(plan.view.dim_name(*index), plan.view.dim_layout(*index)) {
                continue;
            }
            let communicator = self.communicator_for(domain, library, &plan.view, *index, options)?;
            // Noted before it is made, so that an abort meanwhile finds it.
            self.note(plan.view.dim_name(*index), &plan.view, *index, &communicator);
            let wanted_now = !self.lazy && plan.view.dim_size(*index) > 1;
            if wanted_now && communicator.state() == State::Unmade {
                let raw = self.make(domain, &maker, &communicator, &plan.view, *index, options)?;
                communicator.set_ready(raw)?;
                fresh.push(Arc::clone(&communicator));
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
        library: &Arc<Library>,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
    ) -> Result<Arc<Communicator>> {
        let (name, dim) = (view.dim_name(index), view.dim_layout(index));
        let group = view.slice(&[name])?;
        if dim.size() == 1 && !options.is_exclusive() {
            return Ok(domain.single(|| Communicator::unmade(Arc::clone(library), group, LazyPlan::alone())));
        }
        let exclusive = options.is_exclusive();
        let key = PartitionKey::of(&self.root, dim);
        let known = if exclusive { None } else { domain.shared().get(&key).cloned() };
        if let Some(known) = known.filter(|known| matches!(known.state(), State::Unmade | State::Ready)) {
            return Ok(known);
        }
        let (color, _) = view.split_color_key(index)?;
        let lazy = LazyPlan {
            scope: self.lazy.then(|| format!("{}/{name}/{color}", self.id)),
            config: options.config.clone(),
            comm_name: Some(comm_name(name, options)),
        };
        let made = Arc::new(Communicator::unmade(Arc::clone(library), group, lazy));
        if !exclusive {
            domain.shared().insert(key, Arc::clone(&made));
        }
        Ok(made)
    }

    fn make(
        &self,
        domain: &Domain,
        maker: &Maker<'_>,
        communicator: &Arc<Communicator>,
        view: &Mesh,
        index: usize,
        options: &DimOptions,
    ) -> Result<RawComm> {
        let (name, group) = (view.dim_name(index), communicator.group());
        let (color, key) = view.split_color_key(index)?;
        let config = config(maker.library, options.config.as_ref(), &comm_name(name, options));
        // By a fresh id: what joins all ranks of the root (it needs no parent), what another mesh planned lazily (some of its
        // groups may exist already, so that not all ranks would take part in a split), and where the library has no split.
        if group.size() == self.root.root_size() || communicator.plan().is_lazy() || !maker.library.can_split() {
            return maker.meet(&format!("comm/{name}/{color}"), group, config.blocking(false));
        }
        let parent = self.parent(domain, maker)?;
        let child = if config.says_blocking() { config } else { config.blocking(true) };
        maker.split(&parent, group, (color, key), child)
    }

    /// The communicator over all ranks of the root in row-major order, to split from: shared with whatever joins the same ranks.
    fn parent(&self, domain: &Domain, maker: &Maker<'_>) -> Result<Arc<Communicator>> {
        if let Some(parent) = &*self.parent.read().unwrap_or_else(PoisonError::into_inner) {
            return Ok(Arc::clone(parent));
        }
        let all = self.root.flatten(Some("all ranks"))?;
        let key = PartitionKey::of(&self.root, all.dim_layout(0));
        let known = domain.shared().get(&key).cloned();
        let parent = match known.filter(|known| known.state() == State::Ready) {
            Some(known) => known,
            None => {
                let config = config(maker.library, None, &format!("mesh_{}", self.root.dim_names().join("_")));
                let library = Arc::clone(domain.library()?);
                let raw = maker.meet("comm/root", &all, config.blocking(false))?;
                let parent = Arc::new(Communicator::unmade(library, all, LazyPlan::default()));
                parent.set_ready(raw)?;
                domain.keep(&parent);
                domain.shared().entry(key).or_insert_with(|| Arc::clone(&parent));
                parent
            }
        };
        parent.add_user();
        *self.parent.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&parent));
        Ok(parent)
    }

    fn note(&self, name: &str, view: &Mesh, index: usize, communicator: &Arc<Communicator>) {
        communicator.add_user();
        self.dims.write().unwrap_or_else(PoisonError::into_inner).push(DimComm {
            name: name.to_owned(),
            dim: view.dim_layout(index).clone(),
            communicator: Arc::clone(communicator),
        });
    }

    /// Undoes a plan that failed: what only it used is aborted and forgotten, what it made for others as well is unmade.
    fn take_back(&self, dims_before: usize, had_parent: bool, fresh: &[Arc<Communicator>]) {
        let mut gone: Vec<Arc<Communicator>> = {
            let mut dims = self.dims.write().unwrap_or_else(PoisonError::into_inner);
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
