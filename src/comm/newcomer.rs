//! The dm_init of a process that joins a running job (docs/recovery.md, "The door").

use std::sync::Arc;

use super::create::mesh_text;
use super::next_mesh::{Job, id_of_epoch, tell_recovered};
use super::options::RecoverOptions;
use super::recovering::{Recovering, Way};
use super::root::{RootComms, RootSpec};
use super::world::World;
use crate::error::{Error, Result};
use crate::rendezvous::{Recovery, Request};
use crate::wait::Wait;

impl RootComms {
    /// The mesh of a process that joins a running job, which its dm_init asks for by `spec`: waits
    /// at the door until a recovery lets this process in, and makes the mesh of that epoch together
    /// with the others.
    pub(super) fn come_in(world: &Arc<World>, spec: RootSpec<'_>, wait: Wait) -> Result<Arc<RootComms>> {
        let mut way = world.recovering().lock().map_err(|busy| match Recovering::is_busy(&busy) {
            true => Error::invalid_state(format!(
                "another thread of rank {} is in dm_init, and waits to come into the running job: call dm_init again when that call has returned",
                world.rank()
            )),
            false => busy,
        })?;
        // Another thread may have come in since `create_by` asked. Then this call stops here,
        // because `end_epoch` below would end that thread's mesh.
        world.rendezvous().check_at_door()?;
        let library = Some(Arc::clone(world.library()?));
        let wanted = RootComms::new(RootSpec { world: None, library, id: "door".to_owned(), ..spec })?;
        let (rank, ranks, text) = (world.rank() as i32, wanted.mesh().root_ranks(), mesh_text(&wanted));
        if wanted.mesh().ndim() == 0 {
            return Err(Error::invalid(format!(
                "rank {rank} joins a running job, whose mesh has dimensions, and asks for a mesh without any"
            )));
        }
        if ranks.iter().all(|known| *known != rank) && world.rendezvous().is_beyond_start() {
            return Err(Error::invalid(format!(
                "rank {rank} is beyond the ranks of the running job, and {}, for which it asks, does not have this rank: ask for a mesh with more indices of dimension {}",
                wanted.mesh().describe(),
                wanted.mesh().dim_name(0)
            )));
        }
        // A process that takes the place of a lost spare asks for no seat.
        let seat = ranks.iter().position(|known| *known == rank).unwrap_or(usize::MAX);
        let options = RecoverOptions::default();
        let job = Job { world, before: &wanted, is_newcomer: true, index: 0, options: &options, wait };
        let make = |recovery: &Recovery| {
            world.end_epoch();
            job.make(recovery)
        };
        let come = world.rendezvous().come_in(&Request { seat, mesh: &text }, make, &job.wait);
        let come = come.and_then(|(recovery, made)| {
            // The way is stored first, because this process is a member even if making the mesh
            // fails.
            let root = id_of_epoch(recovery.epoch_number());
            let way = way.insert(Way { recovery, root });
            made.map_or_else(|| job.make(&way.recovery), Ok)
        });
        let come = come.inspect(|root| tell_recovered(root));
        job.wait.outcome(come).inspect_err(|_| world.end_epoch())
    }
}
