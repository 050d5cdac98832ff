//! Compares the collectives of the ranks before they are issued, where `DM_CHECK_COLLECTIVES` asks
//! for that (docs/order.md). rendezvous/agreement/order.rs has the protocol.
//!
//! The comparison needs the store alone, so it works on every device type. The comparison takes
//! the turn of the world, as a collective call of the library does. So the calls of all threads of
//! a rank have one order, and a rank that waits in a comparison comes to no other call meanwhile.
//! For this reason a ring of ranks that wait for each other is a deadlock.

use std::sync::Arc;

use super::groups;
use super::names::name_text;
use super::operations::Operands;
use super::root::Purpose;
use super::view::View;
use crate::error::{Result, Status};
use crate::rendezvous::{Scope, check_order};

/// Collectives along dimensions, each with the scope of its dimension, in their order.
pub(super) type Collectives = Vec<(Arc<Scope>, Vec<String>)>;

impl View {
    /// Compares an operation along dimension `index` with those of the other ranks. Inside a group
    /// of the calling thread, the end of the group makes the comparison instead. Returns when the
    /// operation may be issued.
    #[cold]
    pub(super) fn check_order(&self, name: &str, index: usize, operands: Operands) -> Result<()> {
        let Operands { count, dtype, what, .. } = operands;
        let (space, mesh) = (self.space(), self.mesh());
        // NCCL does nothing in a collective without elements, so ranks may leave it out.
        let is_empty = what.is_empty(count) && self.library()?.has_streams();
        let is_compared = what.is_compared() && !is_empty && mesh.dim_size(index) > 1;
        let Some(world) = space.world().filter(|_| is_compared) else { return Ok(()) };
        let label = self.recorded_group(index).map_or_else(String::new, |group| group.name().to_owned());
        let text = format!("{} along {}", what.text(count, dtype), name_text(&label));
        let of_root = |scope| space.of_this_mesh(scope);
        let (world, scopes) = (world.rendezvous(), space.control_scopes());
        let scope = scopes.of_group(world, space.id(), of_root, mesh, index, Purpose::Order)?;
        match groups::note_collective(self.library()?, &scope, &text) {
            true => Ok(()),
            false => self.compare(&vec![(scope, vec![text])]).map_err(|error| error.within(name)),
        }
    }

    /// Compares the collectives of the calling thread's group with those of the other ranks, where
    /// this is the outermost end of the group. If they differ, this function marks the group as
    /// refused and returns `Ok`. `groups::end` then returns the error.
    pub(super) fn check_group_order(&self) -> Result<()> {
        let library = self.library()?;
        let collectives = groups::take_collectives(library);
        if collectives.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.compare(&collectives) {
            groups::refuse(Some(library), &error.within("dm_group_end"));
        }
        Ok(())
    }

    fn compare(&self, collectives: &Collectives) -> Result<()> {
        let Some(world) = self.root_comms().world() else { return Ok(()) };
        let wait = self.root_comms().wait_for_peers(None);
        let _turn = world.take_turn(&wait)?;
        // The call that had the turn before may have ended the mesh.
        self.root_comms().alive()?;
        let has_threads = world.note_collective_thread();
        wait.outcome(check_order(collectives, &wait)).map_err(|error| match (error.status(), has_threads) {
            (Status::Mismatch, true) => error.followed_by(
                "; several threads of this rank call collectives, and with DM_CHECK_COLLECTIVES all their calls have one order",
            ),
            _ => error,
        })
    }
}
