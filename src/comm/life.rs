//! How a root mesh's communicators end: aborted at once by one rank, or finalized by all together.

use std::sync::{Arc, PoisonError};

use super::communicator::{Communicator, blame};
use super::root::{Life, RootComms};
use crate::ccl::RawComm;
use crate::error::Result;
use crate::wait::Wait;

impl RootComms {
    /// Ends this root on this rank: raises its cancel flag, aborts its communicators, wakes every call that is blocked in
    /// either. Local, from any thread, takes no lock that a blocked call holds. Communicators that another root mesh shares
    /// end for that one as well; adopted ones are left to their owner unless the library was to destroy them.
    pub fn abort(&self) -> Result<()> {
        self.end(Life::Aborted);
        self.cancel.raise();
        let mut outcome = Ok(());
        for communicator in self.communicators() {
            // A communicator of one rank never blocks, and one serves every mesh of the world.
            if communicator.group().size() == 1 {
                continue;
            }
            outcome = outcome.and(communicator.abort());
            if let Some(domain) = &self.domain {
                domain.forget(&communicator);
            }
        }
        outcome
    }

    /// Waits for the outstanding work of all ranks and destroys the communicators that no other root mesh shares.
    /// **Collective over the root**; on a rank outside it, local.
    pub fn finalize(&self) -> Result<()> {
        if self.scope.is_none() {
            self.alive()?;
            self.end(Life::Finalized);
            return self.destroy(&self.wait(None));
        }
        let (_turn, round, wait) = self.begin(&format!("dm_finalize({})", self.root.dim_names().join(", ")), "")?;
        self.end(Life::Finalized);
        let destroyed = self.destroy(&wait);
        if let Err(error) = &destroyed {
            round.fail(error);
        }
        let finished = round.finish(&wait);
        destroyed.and(finished)
    }

    /// Every communicator of this root once, in the order in which they were made.
    pub(super) fn communicators(&self) -> Vec<Arc<Communicator>> {
        let parent = self.parent.read().unwrap_or_else(PoisonError::into_inner).clone();
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<Arc<Communicator>> = parent.into_iter().collect();
        for known in dims.iter() {
            if !all.iter().any(|other| Arc::ptr_eq(other, &known.communicator)) {
                all.push(Arc::clone(&known.communicator));
            }
        }
        all
    }

    /// The made ones with their raw handles.
    pub(super) fn ready(&self) -> Vec<(Arc<Communicator>, RawComm)> {
        let with_raw = |communicator: Arc<Communicator>| (communicator.raw(), communicator);
        let made = self.communicators().into_iter().map(with_raw).filter(|(raw, _)| !raw.is_null());
        made.map(|(raw, communicator)| (communicator, raw)).collect()
    }

    /// Waits until nothing is in progress on any of them (a group's operations on non-blocking communicators).
    pub(super) fn settle_all(&self) -> Result<()> {
        let wait = self.wait(None);
        for (communicator, raw) in self.ready() {
            // Operations of the host engine are done when they return.
            if !communicator.library().is_host_engine() {
                communicator.library().settle(raw, &wait, "dm_group_end")?;
            }
        }
        Ok(())
    }

    /// Lets go of every communicator, last made first, so that children go before the parent they were split from.
    fn destroy(&self, wait: &Wait) -> Result<()> {
        let parent = self.parent.write().unwrap_or_else(PoisonError::into_inner).take();
        let dims = std::mem::take(&mut *self.dims.write().unwrap_or_else(PoisonError::into_inner));
        let held = parent.into_iter().chain(dims.into_iter().map(|known| known.communicator));
        let mut outcome = Ok(());
        for communicator in held.collect::<Vec<_>>().into_iter().rev() {
            if communicator.drop_user() {
                if let Some(domain) = &self.domain {
                    domain.forget(&communicator);
                }
                outcome = outcome.and(retire(&communicator, wait));
            }
        }
        outcome
    }
}

/// Flushes and destroys one communicator; aborts it when it does not come to rest by the deadline.
fn retire(communicator: &Communicator, wait: &Wait) -> Result<()> {
    let Some(raw) = communicator.retire() else {
        return Ok(());
    };
    let library = communicator.library();
    let flushed = library.finalize(raw).and_then(|()| library.settle(raw, wait, "finalizing a communicator"));
    match flushed {
        Ok(()) => library.destroy(raw),
        Err(error) => {
            let error = blame(library, raw, communicator.group(), error);
            let _ = library.abort(raw);
            Err(error)
        }
    }
}
