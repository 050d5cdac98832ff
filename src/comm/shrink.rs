//! Going on without lost ranks: a root mesh of what is left of another one, which ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::communicator::{Communicator, LazyPlan, State};
use super::dims::{Plan, Shared, Shrinking, config};
use super::domain::Domain;
use super::making::Maker;
use super::options::DimOptions;
use super::root::{Life, RootComms, ranks_text};
use super::view::View;
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

impl View {
    /// The mesh without those indices along a dimension that hold a lost rank. **Collective over the ranks that are not lost**, also those of the
    /// replicas that go. Ends this root on this rank, as [`RootComms::abort`] does, whatever comes of it; after a failure the call may be
    /// repeated, with the ranks that are lost by then.
    pub fn shrink(&self, dim: Option<&str>, lost: &[i32]) -> Result<View> {
        let (space, mesh) = (&self.space, self.mesh());
        let index = mesh.dim_index_or_only(dim)?;
        let Some(domain) = &space.domain else {
            return Err(Error::unsupported(format!(
                "dm_shrink is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                mesh.describe()
            )));
        };
        let mut lost = lost.to_vec();
        lost.sort_unstable();
        lost.dedup();
        let left = mesh.without(index, &lost, domain.world().size())?;
        if domain.world().is_offline() {
            return Ok(View::of_root(RootComms::create(domain, left, &Default::default())?));
        }
        if !space.mesh().is_member() {
            return Err(Error::not_member(format!("dm_shrink: rank {} is not in {}", mesh.rank(), mesh.describe())));
        }
        space.library.as_ref().map_or(Ok(()), |library| library.check_can_shrink())?;
        if self.root_comms().life() == Life::Finalized {
            self.root_comms().alive()?;
        }
        domain.alive()?;

        let attempt = space.shrinkings.fetch_add(1, Ordering::SeqCst);
        let parent = space.parent_to_shrink(domain).filter(|_| attempt == 0);
        let parent = self.root_comms().end_but_for(parent);
        let call = format!(
            "dm_shrink(dims=({}), dim={}, lost={})",
            mesh.dim_names().join(", "),
            mesh.dim_name(index),
            ranks_text(&lost)
        );
        let made = space.go_on(domain, attempt, call, left, &lost, parent.as_ref());
        // Its child, if it came to be, does not need it.
        if let Some(parent) = parent {
            let _ = parent.abort();
            domain.forget(&parent);
        }
        made.map(View::of_root)
    }
}

impl RootComms {
    /// The communicator over all ranks that dimensions are split from, where there is one that works or did.
    fn parent_to_shrink(&self, domain: &Domain) -> Option<Arc<Communicator>> {
        let own = self.parent.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|own| Arc::clone(own));
        let known = own.or_else(|| domain.last_parent(&self.root, self.library.as_ref()?));
        known.filter(|known| known.state() == State::Ready)
    }

    /// Ends this root's calls and communicators on this rank, except one, and gives that. One that has ended before is left alone, and spares nothing:
    /// another thread may be shrinking it.
    fn end_but_for(&self, spared: Option<Arc<Communicator>>) -> Option<Arc<Communicator>> {
        if !self.end(Life::Shrunk) {
            return None;
        }
        self.cancel.raise();
        let spare =
            |communicator: &Arc<Communicator>| spared.as_ref().is_some_and(|one| Arc::ptr_eq(communicator, one));
        let _ = self.abort_communicators(|communicator| !spare(communicator));
        spared
    }

    fn go_on(
        &self,
        domain: &Arc<Domain>,
        attempt: u64,
        call: String,
        left: crate::mesh::Mesh,
        lost: &[i32],
        parent: Option<&Arc<Communicator>>,
    ) -> Result<Arc<RootComms>> {
        let world = domain.world();
        let wait = Wait { cancel: domain.cancel(), ..Wait::after(self.timeout) };
        let _turn = domain.take_turn(&wait)?;
        // A call that had the turn before may have ended it, when it was ended in the middle of a split.
        let parent = parent.filter(|parent| parent.state() == State::Ready);
        let ranks = self.mesh().root_ranks();
        let survivors: Vec<i32> = ranks.iter().copied().filter(|rank| lost.binary_search(rank).is_err()).collect();
        let position = survivors.iter().position(|rank| *rank == self.mesh().rank()).unwrap_or(0);
        // Ranks that take different ones for lost may have nobody in common, and must not take each other's word for that of their own: only those
        // meet that have the first rank in common, and compare with it.
        let place = format!("{attempt}/{}", survivors.first().copied().unwrap_or_default());
        let scope = world.subscope(&format!("{}/shrink{place}", self.id), survivors.into(), position)?;
        let round = wait.outcome(scope.agree(&call, &wait))?;
        // Where it is not there on some rank, as dm_abort came first there, all do without.
        let detail = if parent.is_some() { "with its communicator" } else { "without its communicator" };
        let parent = match wait.outcome(scope.agree_in_detail(&call, detail, &wait)) {
            Ok(_) => parent,
            Err(error) if error.status() == Status::Mismatch => None,
            Err(error) => return Err(error),
        };
        let dims = (0..left.ndim()).map(|index| (index, DimOptions::default())).collect();
        let excluded = |parent: &Arc<Communicator>| Shrinking {
            parent: Arc::clone(parent),
            excluded: (0..ranks.len())
                .filter(|at| left.coordinate_of(ranks[*at]).is_err())
                .map(|at| at as i32)
                .collect(),
        };
        let shrinking = parent.map(excluded);
        let plan = Plan { view: left.clone(), dims, part: None, apart: None, shrinking };
        let root = RootComms::shrunk_from(self, domain, left, format!("{}/shrunk{place}", self.id))?;
        // Ranks that go with a replica could not agree on what the others share with earlier meshes of theirs.
        domain.share_no_more(root.mesh());
        root.carry_out(&plan, Shared::nothing(&plan), round, &wait)?;
        domain.register(&root);
        root.alive()?;
        Ok(root)
    }

    /// Takes what is left of another root's communicator as this one's over all its ranks.
    pub(super) fn take_shrunk(
        &self,
        domain: &Domain,
        maker: &Maker<'_>,
        from: &Shrinking,
    ) -> Result<Arc<Communicator>> {
        let all = self.root.all_ranks();
        let config = config(maker.library, None, &format!("mesh_{}", self.root.dim_names().join("_")));
        let raw = maker.shrink(&from.parent, &all, &from.excluded, config.blocking(false))?;
        let made = Arc::new(Communicator::unmade(Arc::clone(domain.library()?), all, LazyPlan::default()));
        if let Some(round) = maker.round {
            made.set_origin(format!("{}/root", round.name()));
        }
        made.set_ready(raw)?;
        self.keep_parent(domain, maker.library, &made);
        Ok(made)
    }
}
