//! The dm_init of a process that joins a running job (docs/recovery.md, "The door").

use std::sync::Arc;

use super::create::mesh_text;
use super::next_mesh::Job;
use super::options::RecoverOptions;
use super::recovering::Way;
use super::root::{RootComms, RootSpec};
use super::world::World;
use crate::error::Result;
use crate::rendezvous::{Recovery, Request};
use crate::wait::Wait;

impl RootComms {
    /// The mesh of a process that joins a running job, which its dm_init asks for by `spec`: waits
    /// at the door until a recovery lets this process in, and makes the mesh of that epoch together
    /// with the others.
    pub(super) fn come_in(world: &Arc<World>, spec: RootSpec<'_>, wait: Wait) -> Result<Arc<RootComms>> {
        let mut way = world.recovering().lock()?;
        let library = Some(Arc::clone(world.library()?));
        let wanted = RootComms::new(RootSpec { world: None, library, id: "door".to_owned(), ..spec })?;
        let (rank, ranks, text) = (world.rank() as i32, wanted.mesh().root_ranks(), mesh_text(&wanted));
        // A spare that was lost asks for a place beyond the mesh, where nobody lets it in.
        let seat = ranks.iter().position(|known| *known == rank).unwrap_or(ranks.len());
        let options = RecoverOptions::default();
        let job = Job { world, before: &wanted, is_newcomer: true, index: 0, options: &options, wait };
        let make = |recovery: &Recovery| {
            world.end_epoch();
            job.make(recovery)
        };
        let come = world.rendezvous().come_in(&Request { seat, mesh: &text }, make, &job.wait);
        let come = come.and_then(|(recovery, made)| {
            let root = made.map_or_else(|| job.make(&recovery), Ok)?;
            *way = Some(Way { recovery, root: root.id().to_owned() });
            Ok(root)
        });
        job.wait.outcome(come).inspect_err(|_| world.end_epoch())
    }
}
