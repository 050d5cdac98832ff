//! Shrinking: a root mesh of the ranks that are left of another one, which ends.
//!
//! The callers either name the lost ranks, or agree on them first. Named lists meet in a scope of
//! the ranks that the list leaves, so ranks with different lists may go on apart. Ranks without a
//! list meet in one scope of all ranks of the mesh, and get one list of lost ranks. The next steps
//! are equal in both cases: the ranks that are left agree on the call, and make the communicators
//! of the new mesh.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::{Call, Work};
use super::communicator::{Communicator, State};
use super::create::as_weak;
use super::dims::{SharedComms, WantedDims, make_dims, new_parent, parent_name};
use super::maker::Maker;
use super::names::{name_text, names_text, parent_config, ranks_text};
use super::options::{CallOptions, DimOptions, MeshOptions};
use super::refusal::{on_refusal, tell};
use super::root::{Life, RootComms, RootSpec};
use super::view::View;
use super::world::World;
use crate::error::{Error, Result, Status};
use crate::events::{Kind, publish};
use crate::mesh::Mesh;
use crate::rank_list::ranges;
use crate::rendezvous::{Scope, TakenForLost, note_begun_by_this_thread};
use crate::wait::By;

/// One attempt of this rank to shrink a mesh to the ranks that are left.
struct Attempt {
    /// The part that the attempt has in the names of its scope and of the new root mesh. This part
    /// is equal on all ranks that are left, and is used once.
    place: String,
    /// The scope of the ranks that are left.
    scope: Scope,
    /// The text on which the ranks that are left must agree.
    text: String,
    /// The options of the new mesh's dimensions.
    dims: Vec<DimOptions>,
}

impl View {
    /// The mesh without those indices along a dimension that hold a lost rank. **Collective over
    /// the ranks that are not lost**, also those whose replica is left out. Ends this root on this
    /// rank, as [`RootComms::abort`] does, even if the call fails later. A call that this rank
    /// refuses ends nothing. After a failure the call may be repeated, with the ranks that are lost
    /// by then. `lost` holds the lost ranks, and must be equal on all ranks. When `lost` is empty,
    /// the ranks that are left agree on who is lost; they all get [`Status::InvalidState`] when
    /// nobody is. The new mesh has the timeout and the options of this one, and is lazy where this
    /// one is. `options` may have other options for its dimensions, and says how long the call may
    /// take.
    pub fn shrink(&self, dim: Option<&str>, lost: &[i32], options: &CallOptions) -> Result<View> {
        let Some(world) = self.space().world() else {
            return Err(Error::unsupported(format!(
                "dm_shrink is collective, but {} was made over existing communicators without a world; pass dm_init_options.world",
                self.mesh().describe()
            )));
        };
        self.tell_shrink_if_refused(lost, || match lost {
            [] if world.rendezvous().is_offline() => Err(Error::invalid_state(
                "dm_shrink: no rank of an offline world (DM_WORLD_OFFLINE) is ever lost: name the ranks to leave out in lost_ranks",
            )),
            [] => self.shrink_by_agreement(world, dim, options),
            lost => self.shrink_by_list(world, dim, lost, options),
        })
    }

    /// Runs `call`, which shrinks this mesh by the list `lost`, or, when it is empty, without one.
    /// If this rank refuses the call, the ranks that would be left are told. For these ranks the
    /// call is an attempt, so the refusal counts as an attempt of this rank. A list that is wrong
    /// in itself says nothing about whom the other ranks would leave out, so nobody is told of it.
    pub(crate) fn tell_shrink_if_refused<T>(&self, lost: &[i32], call: impl FnOnce() -> Result<T>) -> Result<T> {
        const CALL: &str = "dm_shrink";
        let space = self.space();
        let world = space.world().filter(|world| !world.rendezvous().is_offline() && space.mesh().is_member());
        // A forked child must not speak for its parent.
        let world = world.filter(|world| Error::check_fork().is_ok() && world.alive().is_ok());
        let Some(world) = world else { return call() };
        on_refusal(call, |error| {
            if lost.is_empty() {
                if let Ok(scope) = space.survivors_scope(world) {
                    space.next_shrink_attempt();
                    tell(&scope, world.cancel(), CALL, error);
                }
            } else if self.could_leave_out(lost) {
                let number = space.next_shrink_attempt();
                let attempt = self.attempt_scope(world, &number.to_string(), lost);
                let _ = attempt.map(|(_, scope)| tell(&scope, world.cancel(), CALL, error));
            }
        })
    }

    fn shrink_by_list(
        &self,
        world: &Arc<World>,
        dim: Option<&str>,
        lost: &[i32],
        options: &CallOptions,
    ) -> Result<View> {
        let (space, mesh) = (self.space(), self.mesh());
        let index = mesh.dim_index_or_only(dim)?;
        options.check_dims(mesh.ndim())?;
        let mut lost = lost.to_vec();
        lost.sort_unstable();
        lost.dedup();
        let remaining = mesh.without(index, &lost, world.size())?;
        self.check_member()?;
        self.check_can_shrink(world)?;
        if world.rendezvous().is_offline() {
            self.end_to_shrink(world);
            let like = MeshOptions { lazy: space.is_lazy(), timeout: Some(space.timeout()), ..MeshOptions::default() };
            let root = RootComms::create(world, remaining, &like.dims(self.dims_after(options)))?;
            return Ok(View::of_root(root));
        }
        let (mut number, parent) = self.end_to_shrink(world);
        let wait = world.wait(options.timeout.unwrap_or(space.timeout()));
        // Ranks may name different lost ranks. Such ranks may have no survivor in common, and then
        // one must not read the keys of the other. So the scope has the first survivor in its
        // name: only ranks with the same first survivor meet, and they compare their calls with
        // that rank.
        let try_next = |number: u64| {
            let attempt = self.attempt(world, &number.to_string(), index, &lost, options)?;
            let call = Call::begin(world, None, wait.clone())?;
            space.make_shrunk(world, call, &attempt, remaining.clone(), parent.as_ref())
        };
        let made = loop {
            if let Some(made) = try_next(number).transpose() {
                break made;
            }
            number = space.next_shrink_attempt();
        };
        end_parent(world, parent);
        made.map(View::of_root)
    }

    fn shrink_by_agreement(&self, world: &Arc<World>, dim: Option<&str>, options: &CallOptions) -> Result<View> {
        self.check_member()?;
        let survivors = self.space().survivors_scope(world)?;
        let index = self.mesh().dim_index_or_only(dim)?;
        options.check_dims(self.mesh().ndim())?;
        self.mesh().check_whole()?;
        self.check_can_shrink(world)?;
        let blamed = self.space().lost_in_communicators();
        // On one host the engine sees that a process has ended. On several hosts it may only be
        // unable to reach a rank that lives.
        let known = match world.rendezvous().shares_memory() {
            Some(true) => TakenForLost { lost: &blamed, suspects: &[] },
            _ => TakenForLost { lost: &[], suspects: &blamed },
        };
        let (_, mut parent) = self.end_to_shrink(world);
        let made = self.shrink_until_agreed(world, &survivors, index, known, &mut parent, options);
        end_parent(world, parent);
        made.map(View::of_root)
    }

    /// Agrees with the ranks that are left on who is lost, and makes their mesh. Begins anew when
    /// further ranks are lost while the mesh is made: all ranks learn of that by the same verdict.
    fn shrink_until_agreed(
        &self,
        world: &Arc<World>,
        survivors: &Scope,
        index: usize,
        known: TakenForLost<'_>,
        parent: &mut Option<Arc<Communicator>>,
        options: &CallOptions,
    ) -> Result<Arc<RootComms>> {
        let (space, mesh) = (self.space(), self.mesh());
        let wait = world.wait(options.timeout.unwrap_or(space.timeout()));
        let text = self.shrink_text(index, "without a list");
        let mut failed: Option<(Vec<i32>, Error)> = None;
        loop {
            let call = Call::begin(world, None, wait.clone())?;
            let agreed = call.agree_on_lost(survivors, &text, known)?;
            // When nobody else was lost, another attempt would fail in the same way.
            if let Some((_, error)) = failed.filter(|(before, _)| *before == agreed.lost) {
                return Err(error);
            }
            let attempt = self.attempt(world, &format!("-agreed{}", agreed.number), index, &agreed.lost, options)?;
            let remaining = mesh.without(index, &agreed.lost, world.size());
            // Ranks that named another dimension wait for this rank.
            let remaining = remaining.inspect_err(|error| attempt.scope.tell_refusal("dm_shrink", error, &wait))?;
            match space.make_shrunk(world, call, &attempt, remaining, parent.as_ref()) {
                Err(error) if error.status() == Status::PeerLost && !error.lost().is_empty() => {
                    end_parent(world, parent.take());
                    failed = Some((agreed.lost, error));
                }
                Err(error) => return Err(error),
                Ok(Some(made)) => {
                    survivors.forget_keys(&wait);
                    return Ok(made);
                }
                Ok(None) => failed = None,
            }
        }
    }

    fn check_member(&self) -> Result<()> {
        match self.space().mesh().is_member() {
            true => Ok(()),
            false => Err(Error::not_member(format!(
                "dm_shrink: rank {} is not in {}",
                self.mesh().rank(),
                self.mesh().describe()
            ))),
        }
    }

    fn check_can_shrink(&self, world: &World) -> Result<()> {
        self.space().library().map_or(Ok(()), |library| {
            library.check_can_shrink()?;
            library.check_no_capture("dm_shrink", None)
        })?;
        let root = self.root_comms();
        if root.life() == Life::Finalized || root.is_of_past_epoch() {
            root.alive()?;
        }
        world.alive()
    }

    /// Ends this rank's calls and communicators of the root. The first attempt keeps the
    /// communicator over all ranks of the root, where there is one. Returns the number of this
    /// attempt on the root, and the communicator that was kept.
    fn end_to_shrink(&self, world: &World) -> (u64, Option<Arc<Communicator>>) {
        let number = self.space().next_shrink_attempt();
        let parent = self.space().parent_to_shrink(world).filter(|_| number == 0);
        (number, self.root_comms().end_except(parent))
    }

    fn shrink_text(&self, index: usize, what: &str) -> String {
        let (names, dim) = (names_text(&self.mesh().dim_names()), name_text(self.mesh().dim_name(index)));
        format!("dm_shrink(dims=({names}), dim={dim}, {what})")
    }

    /// Returns the options of the new mesh's dimensions: the caller's, or those of this mesh.
    fn dims_after(&self, options: &CallOptions) -> Vec<DimOptions> {
        if !options.dims.is_empty() {
            return options.dims.clone();
        }
        let (space, mesh) = (self.space(), self.mesh());
        let inherited = |index: usize| match space.is_offline() {
            // A dimension of an offline mesh has no communicator that would have its options.
            true => {
                let at = space.mesh().dim_index(mesh.dim_name(index)).ok();
                at.and_then(|at| space.options_of_dims().get(at).cloned()).unwrap_or_default()
            }
            false => space.dim_options(mesh.dim_name(index), mesh.dim_layout(index)),
        };
        (0..mesh.ndim()).map(inherited).collect()
    }

    /// Returns attempt `number` to go on without the ranks `lost`.
    fn attempt(
        &self,
        world: &World,
        number: &str,
        index: usize,
        lost: &[i32],
        options: &CallOptions,
    ) -> Result<Attempt> {
        let (place, scope) = self.attempt_scope(world, number, lost)?;
        let dims = self.dims_after(options);
        let agreed = MeshOptions::default().dims(dims.clone()).agreed();
        let text = self.shrink_text(index, &format!("lost={}{agreed}", ranks_text(lost)));
        Ok(Attempt { place, scope, text, dims })
    }
}

impl View {
    /// Whether all of these ranks are in the mesh, and this rank is none of them.
    fn could_leave_out(&self, lost: &[i32]) -> bool {
        let mesh = self.space().mesh();
        !lost.contains(&mesh.rank()) && lost.iter().all(|rank| mesh.coordinate_of(*rank).is_ok())
    }

    /// Returns the scope in which the ranks that are left without `lost` meet in the attempt
    /// `number`, and the part that this attempt has in the names of scopes and meshes. Fails where
    /// this rank is not among those ranks.
    fn attempt_scope(&self, world: &World, number: &str, lost: &[i32]) -> Result<(String, Scope)> {
        let space = self.space();
        let mut survivors = space.mesh().root_ranks();
        survivors.retain(|rank| !lost.contains(rank));
        let position = survivors.iter().position(|rank| *rank == self.mesh().rank());
        let position = position.ok_or_else(|| Error::invalid("this rank is in the list of lost ranks"))?;
        let place = format!("{number}/{}", survivors.first().copied().unwrap_or_default());
        let id = format!("{}/shrink{place}", space.id());
        Ok((place, world.rendezvous().subscope(&id, survivors.into(), position)?))
    }
}

/// Ends the communicator from which the new one was made, if there is one. The new communicator
/// does not need that one.
fn end_parent(world: &World, parent: Option<Arc<Communicator>>) {
    if let Some(parent) = parent {
        let _ = parent.abort();
        world.comms().forget(&parent);
    }
}

impl RootComms {
    /// Begins the next attempt of this rank to shrink the root, or the next refusal of one. Returns
    /// the number of the attempt.
    fn next_shrink_attempt(&self) -> u64 {
        note_begun_by_this_thread();
        self.shrink_attempts.fetch_add(1, Ordering::SeqCst)
    }

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
        self.cancel().raise_by(By::Shrink);
        // The calls of dm_shrink itself have scopes that this note does not end.
        self.tell_before_kernels_end();
        let is_spared =
            |communicator: &Arc<Communicator>| spared.as_ref().is_some_and(|one| Arc::ptr_eq(communicator, one));
        let _ = self.abort_communicators(|communicator| !is_spared(communicator));
        spared
    }

    /// Makes the mesh of the `remaining` ranks in that call, from `parent` where all of the ranks
    /// that are left still have it. Returns `None` when this attempt has failed on all ranks, and
    /// this rank's caller was told of the failure in an earlier call. The other ranks are in the
    /// next attempt by then, so the caller begins it, too.
    fn make_shrunk(
        &self,
        world: &Arc<World>,
        call: Call<'_>,
        attempt: &Attempt,
        remaining: Mesh,
        parent: Option<&Arc<Communicator>>,
    ) -> Result<Option<Arc<RootComms>>> {
        let Attempt { place, scope, text, dims } = attempt;
        // The call that had the turn before may have ended the parent: that call was aborted in
        // the middle of a split.
        let parent = parent.filter(|parent| parent.state() == State::Ready);
        let Some(call) = call.agree_once(scope, text)? else { return Ok(None) };
        log::warn!("rank {}: goes on with {} ranks: {text}", self.mesh().rank(), remaining.size());
        // Where the parent is gone on some rank, because dm_abort came first there, all ranks do
        // without it.
        let detail = if parent.is_some() { "with its communicator" } else { "without its communicator" };
        let parent = if call.all_say(scope, text, detail)? { parent } else { None };

        let wanted = WantedDims::all_of(&remaining, |index| dims.get(index).cloned().unwrap_or_default());
        let ranks = self.mesh().root_ranks();
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
            options: dims.clone(),
        })?;
        // The ranks whose replica is left out have no part in the new mesh, so they cannot agree
        // with its ranks on which communicators it shares with earlier meshes. So the new mesh
        // shares none.
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
        publish(|| {
            let lost: Vec<i32> = excluded.iter().map(|at| ranks[*at as usize]).collect();
            let (me, left) = (self.mesh().rank(), root.mesh().root_size());
            let message = format!("rank {me}: goes on with {left} ranks without {} (dm_shrink)", ranges(&lost));
            root.event(Kind::Recovered, message).about(lost)
        });
        Ok(Some(root))
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
        let maker = Maker::new(world.library()?, work.peers, self.timeout());
        let all = self.mesh().all_ranks();
        let config = parent_config(maker.library, Some(&parent_name(self.mesh())));
        let raw = maker.shrink(larger, &all, excluded, config)?;
        let parent = new_parent(&maker, all, raw)?;
        work.log.set_parent(self, &parent);
        Ok(parent)
    }
}
