//! How a root mesh ends: aborted at once by one rank, or finalized by all ranks together.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use super::call::{Call, Peers};
use super::communicator::Held;
use super::ending::finalize;
use super::groups::{self, refuse_inside};
use super::names::names_text;
use super::polling::poll_until_done;
use super::root::{Life, RootComms};
use crate::error::{Result, Status};
use crate::events::{Kind, publish};
use crate::wait::{Wait, Watch};

/// How long dm_finalize waits for the other ranks after a communicator has failed. Also how long it
/// waits before it refuses the collectives in which other ranks wait for this rank.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long dm_abort waits until the note of the abort is in the store. A store that answers needs
/// less than a millisecond for this.
const TOLD: Duration = Duration::from_millis(500);

impl RootComms {
    /// Ends this root on this rank: raises its cancel flag and aborts its communicators. That wakes
    /// every call that looks at the flag or is blocked in a communicator. The call is local, may
    /// come from any thread, and takes no lock that a blocked call holds. Communicators that
    /// another root mesh shares end for that root as well. Adopted communicators are left to their
    /// owner, unless the mesh owns them (`DM_INIT_OWN_COMMS`).
    pub fn abort(&self) -> Result<()> {
        // dm_shrink has ended everything but the communicator from which it makes the new mesh's
        // communicators. If that one ended here, too, the other ranks would take this rank for
        // lost.
        let was_alive = self.end(Life::Aborted);
        if !was_alive && self.life() == Life::Shrunk {
            return Ok(());
        }
        if was_alive {
            let message = || format!("rank {}: dm_abort ends {} here", self.mesh().rank(), self.mesh().describe());
            log::warn!("{}", message());
            publish(|| self.event(Kind::Aborted, message()).about(vec![self.mesh().rank()]));
        }
        self.cancel().raise();
        let is_told = was_alive && self.tell_before_kernels_end();
        let aborted = self.abort_communicators(|_| true);
        if was_alive {
            if !is_told {
                drop(self.tell_departure());
            }
            self.library().into_iter().for_each(|library| groups::abandon(library, "dm_abort"));
        }
        aborted
    }

    /// On a library with streams, tells the other ranks that this one ends the root, before any
    /// communicator is aborted. A kernel of NCCL that is aborted lets its peers go on with wrong
    /// data, so the peers must be able to find the note before their work ends (stream_wait.rs).
    /// Waits for at most [`TOLD`]. Returns whether the library has streams. On the host engine the
    /// abort itself tells the other ranks.
    pub(super) fn tell_before_kernels_end(&self) -> bool {
        let has_streams = self.library().is_some_and(|library| library.has_streams());
        if has_streams {
            let is_told = self.tell_departure().is_none_or(|telling| wait_until_told(&telling));
            if !is_told {
                let (rank, mesh) = (self.mesh().rank(), self.mesh().describe());
                log::warn!(
                    "rank {rank}: ends {mesh} although the store has not taken the note of this end within {} ms: dm_stream_wait on other ranks may not report it",
                    TOLD.as_millis()
                );
            }
        }
        has_streams
    }

    /// Waits for the outstanding work of all ranks, and destroys the communicators that no other
    /// root mesh shares. **Collective over the root**; on a rank outside it, local.
    pub fn finalize(&self) -> Result<()> {
        self.finalize_within(None)
    }

    /// Does what [`finalize`](RootComms::finalize) does, and waits for at most `timeout` (`None`:
    /// the mesh's timeout).
    pub fn finalize_within(&self, timeout: Option<Duration>) -> Result<()> {
        self.tell_if_refused("dm_finalize", || {
            refuse_inside("dm_finalize", self.library())?;
            self.library().map_or(Ok(()), |library| library.check_no_capture("dm_finalize", None))
        })?;
        if self.scope().is_none() {
            self.alive()?;
            self.end(Life::Finalized);
            return self.destroy(Peers::none(&self.wait(timeout)));
        }
        let text = format!("dm_finalize({})", names_text(&self.mesh().dim_names()));
        let (world, scope) = self.participants(&text)?;
        Call::begin(world, Some(self), self.wait_to_finalize(&text, timeout))?.agree_on_mesh(scope, &text)?.run(
            |work| {
                let compared = self.compare_certificates(work.peers);
                self.end(Life::Finalized);
                log::info!("rank {}: dm_finalize ends {}", self.mesh().rank(), self.mesh().describe());
                // The mesh ends in any case.
                let told = compared.inspect_err(|error| {
                    work.peers.tell(error);
                });
                let ended = self.destroy(work.peers);
                told.and(ended)
            },
        )
    }

    /// A wait of at most `timeout` for the other ranks' dm_finalize. The wait ends soon where a
    /// communicator has failed, because then there is no work to wait for. This rank makes no more
    /// collectives, so a rank that waits for it in a collective is told so.
    fn wait_to_finalize(&self, call: &str, timeout: Option<Duration>) -> Wait {
        let (communicators, call, began) = (self.communicators(), call.to_owned(), Instant::now());
        let working = self.dim_communicators();
        let failed = Mutex::new(None::<Instant>);
        let watch: Watch = Arc::new(move || {
            for communicator in communicators.iter().filter(|communicator| !communicator.raw().is_null()) {
                // Another mesh that shares it may have calls of its own on other threads.
                let is_refusing = began.elapsed() > PATIENCE && !communicator.is_shared();
                let refused = if is_refusing { communicator.refuse_collectives(&call) } else { Ok(()) };
                let Err(error) = refused.and_then(|()| communicator.poll().map(drop)) else { continue };
                let others_come = matches!(error.status(), Status::Mismatch | Status::Timeout);
                // A communicator that is only split from has no work of this root that could have
                // failed.
                if others_come && !working.iter().any(|known| Arc::ptr_eq(known, communicator)) {
                    continue;
                }
                let since = *failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
                if !others_come || since.elapsed() > PATIENCE {
                    return Err(communicator.earlier_failure().unwrap_or(error));
                }
            }
            Ok(())
        });
        Wait { watch: Some(watch), ..self.wait(timeout) }
    }

    /// Lets go of every communicator, the last made first, so that children go before the parent
    /// from which they were split. The communicators end one after another, in one order on all
    /// ranks.
    fn destroy(&self, peers: Peers<'_>) -> Result<()> {
        let ranges = self.take_ranges();
        let outcome = ranges.iter().rev().map(|range| range.destroy(peers)).fold(Ok(()), Result::and);
        let (mut children, mut parents) = (Vec::new(), Vec::new());
        for (communicator, has_work) in self.take_communicators().into_iter().rev() {
            let is_last = communicator.drop_user();
            if let Some(world) = self.world().filter(|_| is_last) {
                world.comms().forget(&communicator);
            }
            let part = Part { communicator, has_work, is_last };
            if has_work { children.push(part) } else { parents.push(part) }
        }
        children.iter().chain(&parents).map(|part| part.end(peers)).fold(outcome, Result::and)
    }
}

/// Waits until the thread that writes the note of an abort has ended, but not longer than [`TOLD`].
/// Returns whether it has ended.
fn wait_until_told(telling: &JoinHandle<()>) -> bool {
    poll_until_done(&Wait::after(TOLD), String::new, sleep, || Ok(telling.is_finished())).is_ok()
}

/// A communicator of a root mesh that ends.
struct Part {
    /// The root's hold on the communicator, which ends with this value.
    communicator: Held,
    /// Whether the root makes calls on it. A communicator that is only split from has no work.
    has_work: bool,
    /// Whether no other root mesh uses it, so that it ends here.
    is_last: bool,
}

impl Part {
    fn end(&self, peers: Peers<'_>) -> Result<()> {
        let Part { communicator, has_work, is_last } = self;
        match communicator.has_failed().then(|| communicator.earlier_failure()).flatten() {
            // The work failed with the communicator, so there is nothing to flush.
            Some(error) => {
                if *has_work {
                    peers.tell(&error);
                }
                let _ = if *is_last { communicator.abort() } else { Ok(()) };
                if *has_work { Err(error) } else { Ok(()) }
            }
            None if *is_last => finalize(communicator, peers.wait(), &|error| {
                peers.tell(error);
            }),
            None => Ok(()),
        }
    }
}
