//! Shrinking: a root mesh of the ranks that are left of another one, which ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::{Call, Work};
use super::communicator::{Communicator, State};
use super::create::as_weak;
use super::dims::{SharedComms, WantedDims, make_dims, new_parent, parent_name};
use super::maker::Maker;
use super::names::{named_config, ranks_text};
use super::options::CallOptions;
use super::root::{Life, RootComms, RootSpec};
use super::view::View;
use super::world::World;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::ranges;

/// One attempt of this rank to shrink a mesh.
struct Attempt {
    /// The number of the attempt on this root, from 0 on.
    number: u64,
    /// The text on which the remaining ranks must agree.
    text: String,
    /// The mesh of the ranks that are left.
    remaining: Mesh,
    /// The lost ranks, in ascending order.
    lost: Vec<i32>,
}

impl View {
    /// The mesh without those indices along a dimension that hold a lost rank. **Collective over
    /// the ranks that are not lost**, also those of the replicas that go. Ends this root on this
    /// rank, as [`RootComms::abort`] does, whether or not the call succeeds. After a failure the
    /// call may be repeated, with the ranks that are lost by then. `options` has the options of the
    /// new mesh's dimensions, and how long the call may take.
    pub fn shrink(&self, dim: Option<&str>, lost: &[i32], options: &CallOptions) -> Result<View> {
        let (space, mesh) = (self.space(), self.mesh());
        let index = mesh.dim_index_or_only(dim)?;
        let Some(world) = space.world() else {
            return Err(Error::unsupported(format!(
                "dm_shrink is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                mesh.describe()
            )));
        };
        let mut lost = lost.to_vec();
        lost.sort_unstable();
        lost.dedup();
        let remaining = mesh.without(index, &lost, world.size())?;
        if world.rendezvous().is_offline() {
            return Ok(View::of_root(RootComms::create(world, remaining, &Default::default())?));
        }
        if !space.mesh().is_member() {
            return Err(Error::not_member(format!("dm_shrink: rank {} is not in {}", mesh.rank(), mesh.describe())));
        }
        space.library().map_or(Ok(()), |library| library.check_can_shrink())?;
        if self.root_comms().life() == Life::Finalized {
            self.root_comms().alive()?;
        }
        world.alive()?;

        let number = space.shrink_attempts.fetch_add(1, Ordering::SeqCst);
        let parent = space.parent_to_shrink(world).filter(|_| number == 0);
        let parent = self.root_comms().end_except(parent);
        let text = format!(
            "dm_shrink(dims=({}), dim={}, lost={})",
            mesh.dim_names().join(", "),
            mesh.dim_name(index),
            ranks_text(&lost)
        );
        let made = space.make_shrunk(world, Attempt { number, text, remaining, lost }, parent.as_ref(), options);
        // The child, if it was made, does not need its parent.
        if let Some(parent) = parent {
            let _ = parent.abort();
            world.comms().forget(&parent);
        }
        made.map(View::of_root)
    }
}

impl RootComms {
    /// The communicator over all ranks of the root from which others are split, where there is one
    /// that works or has worked.
    fn parent_to_shrink(&self, world: &World) -> Option<Arc<Communicator>> {
        let known = self.own_parent().or_else(|| world.comms().last_parent(self.mesh(), self.library()?));
        known.filter(|known| known.state() == State::Ready)
    }

    /// Ends this root's calls and communicators on this rank, except the one that is spared, and
    /// returns that one. A root that has ended before is left alone and spares nothing, because
    /// another thread may be shrinking it.
    fn end_except(&self, spared: Option<Arc<Communicator>>) -> Option<Arc<Communicator>> {
        if !self.end(Life::Shrunk) {
            return None;
        }
        self.cancel().raise();
        let is_spared =
            |communicator: &Arc<Communicator>| spared.as_ref().is_some_and(|one| Arc::ptr_eq(communicator, one));
        let _ = self.abort_communicators(|communicator| !is_spared(communicator));
        spared
    }

    /// Makes the mesh of the ranks that are left, from `parent` where all of them still have it.
    fn make_shrunk(
        &self,
        world: &Arc<World>,
        attempt: Attempt,
        parent: Option<&Arc<Communicator>>,
        options: &CallOptions,
    ) -> Result<Arc<RootComms>> {
        let Attempt { number, text, remaining, lost } = attempt;
        let ranks = self.mesh().root_ranks();
        let survivors: Vec<i32> = ranks.iter().copied().filter(|rank| lost.binary_search(rank).is_err()).collect();
        let position = survivors.iter().position(|rank| *rank == self.mesh().rank()).unwrap_or(0);
        // Ranks may name different lost ranks. Such ranks may have no survivor in common, and then
        // one must not read the keys of the other. So the scope has the first survivor in its
        // name: only ranks with the same first survivor meet, and they compare their calls with
        // that rank.
        let place = format!("{number}/{}", survivors.first().copied().unwrap_or_default());
        let scope = world.rendezvous().subscope(&format!("{}/shrink{place}", self.id()), survivors.into(), position)?;

        let call = Call::begin(world, None, world.wait(options.timeout.unwrap_or(self.timeout())))?;
        // The call that had the turn before may have ended the parent: that call was aborted in
        // the middle of a split.
        let parent = parent.filter(|parent| parent.state() == State::Ready);
        let call = call.agree(&scope, &text)?;
        log::warn!("rank {}: goes on without {}: {text}", self.mesh().rank(), ranges(&lost));
        // Where the parent is gone on some rank, because dm_abort came first there, all ranks do
        // without it.
        let detail = if parent.is_some() { "with its communicator" } else { "without its communicator" };
        let parent = if call.all_say(&scope, &text, detail)? { parent } else { None };

        let wanted = WantedDims::all_of(&remaining, |index| options.dim(index));
        let is_excluded = |rank: i32| remaining.coordinate_of(rank).is_err();
        let excluded: Vec<i32> = (0..ranks.len()).filter(|at| is_excluded(ranks[*at])).map(|at| at as i32).collect();
        let root = RootComms::new(RootSpec {
            world: Some(Arc::clone(world)),
            library: self.library().cloned(),
            mesh: remaining,
            id: format!("{}/shrunk{place}", self.id()),
            is_lazy: self.is_lazy(),
            timeout: self.timeout(),
            outer: None,
        })?;
        // The ranks whose replica goes cannot agree with the others on what these share with
        // earlier meshes. So the new mesh shares nothing.
        world.comms().share_no_more(root.mesh());
        world.register(as_weak(&root));
        call.run(|work| {
            if !root.mesh().is_member() {
                return Ok(());
            }
            let mut shared = SharedComms::none(&wanted);
            if let Some(parent) = parent {
                shared = shared.split_from(root.shrink_parent(world, work, parent, &excluded)?);
            }
            make_dims(work, &root, &root, &wanted, &shared)
        })?;
        Ok(root)
    }

    /// Makes what is left of another root's communicator this root's parent. `excluded` are the
    /// ranks of that communicator that go.
    fn shrink_parent(
        self: &Arc<Self>,
        world: &World,
        work: &mut Work<'_>,
        larger: &Communicator,
        excluded: &[i32],
    ) -> Result<Arc<Communicator>> {
        world.select_device()?;
        let maker = Maker { library: world.library()?, peers: work.peers, timeout: self.timeout() };
        let all = self.mesh().all_ranks();
        let config = named_config(maker.library, None, &parent_name(self.mesh()));
        let raw = maker.shrink(larger, &all, excluded, config.blocking(false))?;
        let parent = new_parent(&maker, all, raw)?;
        work.log.set_parent(self, &parent);
        Ok(parent)
    }
}
