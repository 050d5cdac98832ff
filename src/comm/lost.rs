//! The lost ranks of a mesh, as far as this rank knows them.

use std::time::Duration;

use super::communicator::Communicator;
use super::root::RootComms;
use super::view::View;
use crate::error::{Error, Result, Status};
use crate::wait::{Deadline, Wait};

/// How long the store and the communicators together may take to tell the lost ranks. The store may
/// use half of this time.
const LIMIT: Duration = Duration::from_millis(500);

impl View {
    /// The world ranks of this view that are known to be lost by now, in ascending order: their
    /// processes have ended, they have left the world, or their hosts fell silent. **Local**: this
    /// function asks the store and the communicators, for half a second at most. It may be called
    /// on a mesh that has ended.
    pub fn lost_ranks(&self) -> Result<Vec<i32>> {
        let (root, deadline) = (self.root_comms(), Deadline::after(LIMIT));
        let mut lost = match root.world().filter(|world| !world.rendezvous().is_offline()) {
            Some(world) => world.rendezvous().lost_ranks(&Wait::after(LIMIT / 2))?,
            None => Vec::new(),
        };
        let wait = Wait::after(LIMIT).with_deadline(deadline);
        lost.extend(root.lost_in(|communicator| communicator.has_failed_by(&wait)));
        lost.retain(|rank| self.mesh().coordinate_of(*rank).is_ok());
        lost.sort_unstable();
        lost.dedup();
        Ok(lost)
    }

    /// Adds to the error of a call the lost ranks among those that the error is about. For the
    /// communicator library, a rank that aborts its world looks like a rank that calls dm_abort on
    /// a mesh. Only the first is lost, and the store has a note of it. So this function asks as
    /// [`lost_ranks`](View::lost_ranks) does, for half a second at most. An error that names no
    /// rank gets the rank that has begun a recovery, because the recovery has ended the call.
    pub(super) fn with_losses(&self, error: Error) -> Error {
        if error.status() != Status::PeerLost {
            return error;
        }
        if error.ranks().is_empty() {
            let begun = self.root_comms().world().and_then(|world| world.rendezvous().begun_recovery());
            return match begun {
                Some((_, rank)) => error.with_ranks(&[rank]),
                None => error,
            };
        }
        if error.lost().len() == error.ranks().len() {
            return error;
        }
        let known = self.lost_ranks().unwrap_or_default();
        let lost: Vec<i32> = error.ranks().iter().copied().filter(|rank| known.contains(rank)).collect();
        error.with_lost(&lost)
    }
}

impl RootComms {
    /// The lost ranks that the communicators of this root have met.
    pub(super) fn lost_in_communicators(&self) -> Vec<i32> {
        self.lost_in(|communicator| communicator.has_failed())
    }

    /// The lost ranks that the failed communicators of this root have met. `has_failed` says which
    /// communicators have failed.
    fn lost_in(&self, has_failed: impl Fn(&Communicator) -> bool) -> Vec<i32> {
        // The host engine notices the end of a peer's process when it is asked.
        let failed = self.communicators().into_iter().filter(|communicator| has_failed(communicator));
        failed.flat_map(|one| one.earlier_failure().map_or_else(Vec::new, |error| error.lost().to_vec())).collect()
    }
}
