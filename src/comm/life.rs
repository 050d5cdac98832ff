//! How a root mesh's communicators end: aborted at once by one rank, or finalized by all together.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::beside::beside;
use super::communicator::{Communicator, State, blame};
use super::groups::{self, refuse_inside};
use super::making::{outcome, report, settle};
use super::root::{Life, RootComms};
use crate::error::{Error, Result, Status};
use crate::wait::{Wait, Watch};

/// How long dm_finalize waits for the other ranks after a communicator has failed, and before it ends one in which a rank waits in vain.
const PATIENCE: Duration = Duration::from_secs(1);

impl RootComms {
    /// Ends this root on this rank: raises its cancel flag, aborts its communicators, wakes every call that is blocked in
    /// either. Local, from any thread, takes no lock that a blocked call holds. Communicators that another root mesh shares
    /// end for that one as well; adopted ones are left to their owner unless the library was to destroy them.
    pub fn abort(&self) -> Result<()> {
        // Shrinking has ended all but the communicator of which the next one is being made; taken away from there, this rank would be lost for the others.
        if !self.end(Life::Aborted) && self.life() == Life::Shrunk {
            return Ok(());
        }
        self.give_up();
        let aborted = self.abort_communicators(|_| true);
        self.library.iter().for_each(groups::abandon);
        aborted
    }

    /// From now on this root is aborted on this rank. Gives its communicators, which are still to be.
    pub(super) fn give_up(&self) -> Vec<Arc<Communicator>> {
        self.end(Life::Aborted);
        self.cancel.raise();
        self.own_communicators()
    }

    /// Aborts those communicators of this root and its ranges.
    pub(super) fn abort_communicators(&self, which: impl Fn(&Arc<Communicator>) -> bool) -> Result<()> {
        let ended: Vec<_> = self.own_communicators().into_iter().filter(which).collect();
        let outcome = abort_all(&ended);
        if let Some(domain) = &self.domain {
            ended.iter().for_each(|communicator| domain.forget(communicator));
        }
        outcome
    }

    /// Without the single-rank one, which serves every mesh of the world and never blocks.
    fn own_communicators(&self) -> Vec<Arc<Communicator>> {
        let single = |communicator: &Arc<Communicator>| {
            self.domain.as_ref().is_some_and(|domain| domain.is_single(communicator))
        };
        self.communicators().into_iter().filter(|communicator| !single(communicator)).collect()
    }

    /// Waits for the outstanding work of all ranks and destroys the communicators that no other root mesh shares.
    /// **Collective over the root**; on a rank outside it, local.
    pub fn finalize(&self) -> Result<()> {
        refuse_inside("dm_finalize", self.library.as_ref())?;
        if self.scope.is_none() {
            self.alive()?;
            self.end(Life::Finalized);
            return self.destroy(&self.wait(None), &|_| ());
        }
        let call = format!("dm_finalize({})", self.root.dim_names().join(", "));
        let wait = |root: &RootComms| root.wait_to_finalize(&call);
        let (_turn, round, wait) = self.begin(&call, wait, |scope, wait| scope.agree(&call, wait))?;
        self.end(Life::Finalized);
        let destroyed = self.destroy(&wait, &|error| report(&round, error, &wait));
        wait.outcome(outcome(destroyed, round.finish(&wait)))
    }

    /// A wait for the other ranks' dm_finalize. It ends soon where a communicator has failed, since there is no work to be waited for; and a rank that
    /// waits in a collective for this one, which makes no more of them, is told so.
    fn wait_to_finalize(&self, call: &str) -> Wait {
        let (communicators, call, began) = (self.communicators(), call.to_owned(), Instant::now());
        let working = self.with_dim_communicators(Vec::new());
        let failed = Mutex::new(None::<Instant>);
        let watch: Watch = Arc::new(move || {
            for communicator in communicators.iter().filter(|communicator| !communicator.raw().is_null()) {
                // Another mesh that shares it may have calls of its own on other threads.
                let is_refusing = began.elapsed() > PATIENCE && !communicator.is_shared();
                let refused = if is_refusing { communicator.refuse(&call) } else { Ok(()) };
                let Err(error) = refused.and_then(|()| communicator.poll().map(drop)) else { continue };
                let others_come = matches!(error.status(), Status::Mismatch | Status::Timeout);
                // What is only split from has no work of this root that could have failed.
                if others_come && !working.iter().any(|known| Arc::ptr_eq(known, communicator)) {
                    continue;
                }
                let since = *failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
                if !others_come || since.elapsed() > PATIENCE {
                    return Err(communicator.earlier().unwrap_or(error));
                }
            }
            Ok(())
        });
        Wait { watch: Some(watch), ..self.wait(None) }
    }

    /// Every communicator of this root and of its ranges once, in the order in which they were made.
    pub(super) fn communicators(&self) -> Vec<Arc<Communicator>> {
        let parent = self.parent.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|own| Arc::clone(own));
        self.with_dim_communicators(parent.into_iter().collect())
    }

    /// `all` and those along its dimensions and its ranges': the ones on which it makes calls.
    fn with_dim_communicators(&self, mut all: Vec<Arc<Communicator>>) -> Vec<Arc<Communicator>> {
        let dims = self.dims.read().unwrap_or_else(PoisonError::into_inner);
        for known in dims.iter() {
            if !all.iter().any(|other| Arc::ptr_eq(other, &known.communicator)) {
                all.push(Arc::clone(&known.communicator));
            }
        }
        drop(dims);
        for part in self.parts().iter() {
            for made in part.communicators() {
                if !all.iter().any(|other| Arc::ptr_eq(other, &made)) {
                    all.push(made);
                }
            }
        }
        all
    }

    /// Waits until nothing is in progress on any of them (a group's operations on non-blocking communicators).
    pub(super) fn settle_all(&self) -> Result<()> {
        let wait = self.wait(None);
        for communicator in self.communicators().iter().filter(|communicator| communicator.state() == State::Ready) {
            // Operations of the host engine are done when they return.
            if !communicator.library().is_host_engine() {
                settle(&wait, || "dm_group_end".to_owned(), sleep, || communicator.poll())?;
            }
        }
        Ok(())
    }

    /// What a failed group's error means: a library does not say which communicator failed, so the first that knows of a failure explains it.
    pub(super) fn explain(&self, error: Error) -> Error {
        for communicator in self.communicators() {
            match communicator.state() {
                State::Ready if communicator.poll().is_err() => return communicator.explain(communicator.raw(), error),
                // Ended here, by this root or by another one that shares it.
                State::Aborted | State::Finalized => return communicator.explain(communicator.raw(), error),
                State::Ready | State::Unmade | State::Absent => {}
            }
        }
        error
    }

    /// Lets go of every communicator, last made first, so that children go before the parent they were split from.
    fn destroy(&self, wait: &Wait, tell: &dyn Fn(&Error)) -> Result<()> {
        let parts = std::mem::take(&mut *self.parts());
        let mut outcome = parts.iter().rev().map(|part| part.destroy(wait, tell)).fold(Ok(()), Result::and);
        let parent = self.parent.write().unwrap_or_else(PoisonError::into_inner).take();
        let dims = std::mem::take(&mut *self.dims.write().unwrap_or_else(PoisonError::into_inner));
        let of_dims = dims.into_iter().map(|known| (known.communicator, true));
        let held = parent.into_iter().map(|parent| (parent, false)).chain(of_dims);
        for (communicator, has_work) in held.collect::<Vec<_>>().into_iter().rev() {
            let is_last = communicator.drop_user();
            if let Some(domain) = self.domain.as_ref().filter(|_| is_last) {
                domain.forget(&communicator);
            }
            let ended = match communicator.has_failed().then(|| communicator.earlier()).flatten() {
                // Its work failed with it, so there is nothing to flush. What is only split from has no work.
                Some(error) => {
                    if has_work {
                        tell(&error);
                    }
                    let _ = if is_last { communicator.abort() } else { Ok(()) };
                    if has_work { Err(error) } else { Ok(()) }
                }
                None if is_last => retire(&communicator, wait, tell),
                None => Ok(()),
            };
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// Aborts communicators, each on a thread of its own where there are streams. NCCL's abort raises the flag that the communicator's kernels look at, and then waits for
/// its streams (`commDestroySync`): there its work may lie behind that of another, which only that one's flag ends. And inside a group of the calling thread
/// NCCL would put it off until the group's end.
pub(super) fn abort_all(communicators: &[Arc<Communicator>]) -> Result<()> {
    std::thread::scope(|scope| {
        let (mut here, mut threads) = (Vec::new(), Vec::new());
        for communicator in communicators {
            let library = communicator.library();
            if !library.has_streams() || communicator.raw().is_null() {
                here.push(communicator);
                continue;
            }
            let device = library.current_device();
            let abort = move || {
                // Without it the abort is tried all the same.
                let _ = device.and_then(|device| device.select());
                communicator.abort()
            };
            match hostccl::thread::spawn_scoped(scope, "dm-abort", abort) {
                Ok(thread) => threads.push(thread),
                Err(_) => here.push(communicator),
            }
        }
        let outcome = here.into_iter().map(|communicator| communicator.abort()).fold(Ok(()), Result::and);
        let panicked = |_| Err(Error::internal("aborting a communicator panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).fold(outcome, Result::and)
    })
}

/// Flushes and destroys one communicator; aborts it when it does not come to rest by the deadline. The other ranks are told why first, since for them a
/// rank that aborts is lost.
pub(super) fn retire(communicator: &Communicator, wait: &Wait, tell: &dyn Fn(&Error)) -> Result<()> {
    let Some(raw) = communicator.retire() else {
        return Ok(());
    };
    let library = communicator.library();
    let what = || format!("finalizing the communicator of {}", communicator.label());
    let finalized = match library.has_streams() {
        false => library.finalize(raw),
        // What is blocking waits for its streams, and so for peers that may have gone.
        true => {
            let flushing = Arc::clone(library);
            let flush = move || flushing.finalize(raw);
            // While a thread is inside, nothing else may be done with it.
            beside(library, flush, drop, |is_done| settle(wait, what, sleep, is_done)).inspect_err(tell)?
        }
    };
    let flushed = finalized.and_then(|()| {
        let blamed = |error| blame(library, raw, communicator.group(), error);
        settle(wait, what, |pause| library.rest(raw, pause), || library.poll(raw).map_err(blamed))
    });
    match flushed {
        Ok(()) => library.destroy(raw).inspect_err(tell),
        Err(error) => {
            tell(&error);
            let _ = library.abort(raw);
            Err(error)
        }
    }
}
