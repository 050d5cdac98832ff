//! The state of one rank between its recoveries (docs/recovery.md): which decisions it has read,
//! and which mesh the next recovery is about.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::sleep;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::rendezvous::{self, Epoch, Recovery, Replicas};
use crate::wait::Wait;

/// Why a thread of a rank cannot recover now.
const BUSY: &str = "another thread of this rank is inside dm_recover of this world";

/// The pause between two looks of a thread that waits for the end of another thread's recovery.
const AGAIN: Duration = Duration::from_millis(10);

/// The state that a rank keeps between its recoveries. Each world has one such value, because an
/// epoch belongs to the world.
#[derive(Default)]
pub(super) struct Recovering {
    /// This rank's progress through the decisions. The thread that recovers holds the lock.
    way: Mutex<Option<Way>>,
}

/// The root mesh at which a rank's way begins.
pub(super) struct Beginning<'a> {
    /// The id of the root mesh.
    pub(super) id: &'a str,
    /// The layout and the ranks of the root mesh.
    pub(super) mesh: &'a Mesh,
    /// The mesh as a process that joins the running job asks for it.
    pub(super) text: String,
}

/// A rank's progress through the decisions of its world.
pub(super) struct Way {
    /// The decisions that were read, and the epoch.
    pub(super) recovery: Recovery,
    /// The id of the root mesh that dm_recover must be given next: the mesh of the last recovery,
    /// or before the first recovery the mesh that was passed.
    pub(super) root: String,
}

impl Recovering {
    /// Takes the right to recover, which one thread has at a time.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Option<Way>>> {
        match self.way.try_lock() {
            Ok(way) => Ok(way),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::invalid_state(BUSY)),
        }
    }

    /// Whether this is the error of [`lock`](Recovering::lock). In that case another thread takes
    /// this rank's part in the turn, so this rank has refused nothing of which other ranks must
    /// know.
    pub(super) fn is_busy(error: &Error) -> bool {
        error.message() == BUSY
    }

    /// Does what [`lock`](Recovering::lock) does, and waits while another thread recovers. At the
    /// deadline it fails with the error of `lock`.
    pub(super) fn wait_and_lock(&self, wait: &Wait) -> Result<MutexGuard<'_, Option<Way>>> {
        loop {
            match self.lock() {
                Err(busy) if wait.deadline.passed() => return Err(busy),
                Err(_) => wait.cancel.check()?,
                taken => return taken,
            }
            sleep(AGAIN.min(wait.deadline.left()));
        }
    }
}

impl Way {
    /// Returns this rank's way, which begins at this root mesh where the rank has none yet. While
    /// the job is in epoch 0, the mesh and the dimension of replicas may change from one try to the
    /// next.
    pub(super) fn begin<'a>(
        way: &'a mut Option<Way>,
        world: &rendezvous::World,
        root: &Beginning<'_>,
        dim: usize,
    ) -> Result<&'a mut Way> {
        let first = || first_epoch(world, root.mesh, dim);
        match way {
            Some(known) if known.recovery.epoch_number() == 0 => {
                known.recovery.begin_from(first());
                known.recovery.expect_mesh(&root.text);
                root.id.clone_into(&mut known.root);
            }
            Some(_) => {}
            None => {
                let mut recovery = world.recovery(first())?;
                recovery.expect_mesh(&root.text);
                *way = Some(Way { recovery, root: root.id.to_owned() });
            }
        }
        way.as_mut().ok_or_else(|| Error::internal("a recovery without a beginning"))
    }
}

/// The epoch in which a job starts whose mesh is this root.
pub(super) fn first_epoch(world: &rendezvous::World, mesh: &Mesh, dim: usize) -> Epoch {
    Epoch::first(world.size_at_join(), Replicas { sizes: mesh.shape(), dim }, &mesh.root_ranks())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// The other ranks are told of refusals, but not of this refusal.
    #[test]
    fn a_second_thread_that_recovers_has_refused_nothing() {
        let recovering = Recovering::default();
        let held = recovering.lock().expect("nobody recovers");
        let error = recovering.lock().err().expect("another thread recovers");
        assert!(Recovering::is_busy(&error), "{error}");
        assert!(!Recovering::is_busy(&Error::invalid_state("there is nothing to recover")));
        drop(held);
        assert!(recovering.lock().is_ok());
    }

    #[test]
    fn a_wait_for_another_threads_recovery_ends() {
        let recovering = Recovering::default();
        let held = recovering.lock().expect("nobody recovers");
        let late = recovering.wait_and_lock(&Wait::after(Duration::ZERO)).err().expect("another thread recovers");
        assert!(Recovering::is_busy(&late), "{late}");
        let cancelled = Wait::after(Duration::from_secs(3600));
        cancelled.cancel.raise();
        let ended = recovering.wait_and_lock(&cancelled).err().expect("the wait is cancelled");
        assert_eq!(ended.status(), Status::Aborted);
        drop(held);
        assert!(recovering.wait_and_lock(&cancelled).is_ok());
    }
}
