//! The turns of one recovery: this rank ends its part of the mesh, comes to a turn, enters the
//! epoch of its decision, and comes to the next turn where a rank was lost meanwhile.

use std::sync::Arc;

use super::call::Call;
use super::names::{name_text, names_text};
use super::next_mesh::{CALL, Job, tell_recovered};
use super::options::{MeshOptions, RecoverOptions};
use super::recovering::Way;
use super::root::RootComms;
use super::world_end::ends_world;
use crate::error::{Error, Result};
use crate::rendezvous::{Arrival, Made, Outcome, Recovery, Terms};

/// The outcome of making the mesh of an epoch.
enum Entered {
    /// All ranks of the mesh have made it.
    Mesh(Arc<RootComms>),
    /// A rank of the mesh was lost meanwhile, so the next turn is due. The value holds the ranks
    /// that the communicators of the mesh blame.
    Broken(Vec<i32>),
}

impl Job<'_> {
    /// Ends the meshes of the epoch, and goes from turn to turn until a mesh was made.
    pub(super) fn go_on(&mut self, way: &mut Way) -> Result<Arc<RootComms>> {
        let recovery = &mut way.recovery;
        let was_in_mesh = recovery.is_in_mesh();
        // While a rank is not in the mesh, the others train on. So such a rank has no state when it
        // gets a place.
        let mut has_state = recovery.is_stateful() || (was_in_mesh && self.options.has_state);
        // After a recovery that failed this process may be in a later epoch than the mesh. Then
        // other processes hold the places of the ranks that the communicators of the mesh blame.
        let is_of_past = self.before.is_of_past_epoch();
        let mut blamed = if is_of_past { Vec::new() } else { self.before.lost_in_communicators() };
        let (call, terms) = (self.text(recovery), self.terms());
        self.world.end_epoch();
        loop {
            let (lost, suspects) = self.facts_and_suspicions(&blamed);
            let arrival = Arrival { call: &call, terms: &terms, has_state, lost, suspects };
            recovery.watch_call(self.key_of_call(recovery)?);
            match recovery.come(&arrival, &self.wait)? {
                Outcome::Epoch => {}
                Outcome::Ended => return Err(self.ended()),
                Outcome::Called => {
                    self.answer(&call)?;
                    continue;
                }
            }
            match self.enter(recovery)? {
                Entered::Mesh(root) if was_in_mesh || recovery.is_in_mesh() => {
                    root.id().clone_into(&mut way.root);
                    tell_recovered(&root);
                    return Ok(root);
                }
                Entered::Mesh(_) => has_state = false,
                Entered::Broken(ranks) => blamed = ranks,
            }
        }
    }

    /// Enters the epoch to which this rank has come, and makes its mesh together with the others. A
    /// rank that the decision has let in goes on here, too.
    fn enter(&self, recovery: &mut Recovery) -> Result<Entered> {
        self.world.rendezvous().enter_epoch(recovery)?;
        let made = self.make(recovery);
        match recovery.make(made.as_ref().map(|_| ()), &self.wait) {
            Ok(Made::Whole) => made.map(Entered::Mesh),
            Ok(Made::Broken) => {
                let blamed = made.map_or_else(|_| Vec::new(), |root| root.lost_in_communicators());
                self.world.end_epoch();
                Ok(Entered::Broken(blamed))
            }
            Err(error) => {
                self.world.end_epoch();
                Err(error)
            }
        }
    }

    /// Splits the ranks that communicators blame into those that are lost for certain and those
    /// that may be lost. On one host the engine sees that a process has ended. On several hosts it
    /// may only be unable to reach a rank that lives.
    fn facts_and_suspicions<'a>(&self, blamed: &'a [i32]) -> (&'a [i32], &'a [i32]) {
        match self.world.rendezvous().shares_memory() {
            Some(true) => (blamed, &[]),
            _ => (&[], blamed),
        }
    }

    /// Returns the text on which the ranks of the mesh must agree, beside the terms. The shape is
    /// the full one: a rank that has waited may have the handle of an earlier mesh, and may be in
    /// the mesh of an epoch whose making broke.
    fn text(&self, recovery: &Recovery) -> String {
        let mesh = self.before.mesh();
        let shape: Vec<String> = recovery.epoch().replicas.sizes.iter().map(usize::to_string).collect();
        format!(
            "{CALL}(shape=({}), names=({}), dim={}{})",
            shape.join(", "),
            names_text(&mesh.dim_names()),
            name_text(mesh.dim_name(self.index)),
            MeshOptions::default().dims(self.options.dims.clone()).agreed()
        )
    }

    fn terms(&self) -> Terms {
        let RecoverOptions { replace, silent, min_size, max_size, any_state, .. } = *self.options;
        Terms { ends: false, dim: self.index, replace, silent, min_size, max_size, any_state }
    }

    /// The key that says that another rank has made a call of the whole world, which waits for this
    /// one. A rank that is not in the mesh is needed only in epoch 0.
    fn key_of_call(&self, recovery: &Recovery) -> Result<Option<String>> {
        let is_needed = recovery.epoch_number() == 0 && !recovery.is_in_mesh();
        Ok(if is_needed { Some(self.world.rendezvous().scope()?.key_of_next_call()) } else { None })
    }

    /// Another rank has made a call of the world while this rank waits for a place. If the call is
    /// dm_world_finalize, which ends the job, this rank takes part in it. Any other call fails on
    /// its callers with a mismatch, and this rank goes on waiting.
    fn answer(&self, call: &str) -> Result<()> {
        let wait = self.world.wait(self.world.rendezvous().timeout());
        if ends_world(self.world, &wait)? {
            return match self.world.end_with_others(&wait) {
                Ok(()) => Err(self.ended()),
                Err(error) => {
                    self.world.alive()?;
                    log::warn!("rank {}: goes on waiting for a place: {}", self.world.rank(), error.message());
                    Ok(())
                }
            };
        }
        let scope = self.world.rendezvous().scope()?;
        if let Err(error) = Call::begin(self.world, None, wait)?.agree(&scope, call) {
            log::warn!("rank {}: goes on waiting for a place: {}", self.world.rank(), error.message());
        }
        self.world.alive()
    }

    /// Ends the world on this rank, because the job has ended.
    fn ended(&self) -> Error {
        self.world.end_alone();
        Error::aborted("the job has ended: its ranks have called dm_world_finalize while this rank waited for a place")
    }
}
