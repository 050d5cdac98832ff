//! The lost ranks of a mesh, as far as this rank knows them.

use super::view::View;
use crate::error::Result;

impl View {
    /// The world ranks of this view that are known to be lost by now, in ascending order: their
    /// processes have ended, they have left the world, or their hosts fell silent. **Local**: it
    /// asks the store, for half a second at most. It may be called on a mesh that has ended.
    pub fn lost_ranks(&self) -> Result<Vec<i32>> {
        let root = self.root_comms();
        let mut lost = match root.world().filter(|world| !world.rendezvous().is_offline()) {
            Some(world) => world.rendezvous().lost_ranks()?,
            None => Vec::new(),
        };
        for communicator in root.communicators() {
            // The host engine notices the end of a peer's process when it is asked.
            if communicator.has_failed() {
                lost.extend(communicator.earlier_failure().iter().flat_map(|error| error.lost().to_vec()));
            }
        }
        lost.retain(|rank| self.mesh().coordinate_of(*rank).is_ok());
        lost.sort_unstable();
        lost.dedup();
        Ok(lost)
    }
}
