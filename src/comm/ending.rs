//! Ends communicators: at once, or in order when their work is done.

use std::sync::Arc;
use std::thread::sleep;

use super::background::in_background;
use super::communicator::Communicator;
use super::failure::blame;
use super::polling::poll_until_done;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// Aborts communicators, each on a thread of its own where the library has streams. NCCL's abort
/// raises the flag at which the communicator's kernels look, and then waits for the communicator's
/// streams (`commDestroySync`). On a stream its work may lie behind the work of another
/// communicator, which only that communicator's own flag ends. Inside a group of the calling
/// thread NCCL would put the abort off until the end of the group.
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
                // Where the device cannot be selected, the abort is tried all the same.
                let _ = device.and_then(|device| device.select());
                communicator.abort()
            };
            match hostccl::thread::spawn_scoped(scope, "dm-abort", abort) {
                Ok(thread) => threads.push(thread),
                Err(_) => here.push(communicator),
            }
        }
        let outcome = here.into_iter().map(|communicator| communicator.abort()).fold(Ok(()), Result::and);
        let panicked = |panic: Box<dyn std::any::Any + Send>| Err(Error::of_panic(&*panic));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).fold(outcome, Result::and)
    })
}

/// Flushes and destroys one communicator. Aborts it when its work is not done by the deadline.
/// `tell` is called with the error before the abort, because the other ranks take a rank that
/// aborts for a lost one.
pub(super) fn finalize(communicator: &Communicator, wait: &Wait, tell: &dyn Fn(&Error)) -> Result<()> {
    let Some(raw) = communicator.take_to_finalize(wait.deadline.left()).inspect_err(tell)? else {
        return Ok(());
    };
    let library = communicator.library();
    let what = || format!("finalizing the communicator of {}", communicator.label());
    let finalized = match library.has_streams() {
        false => library.finalize(raw),
        // A blocking communicator waits for its streams, and so for peers that may have gone.
        true => {
            let flushing = Arc::clone(library);
            let flush = move || flushing.finalize(raw);
            // While a thread is inside the communicator, nothing else may be done with it.
            in_background(library, flush, drop, |is_done| poll_until_done(wait, what, sleep, is_done))
                .inspect_err(tell)?
        }
    };
    let flushed = finalized.and_then(|()| {
        let blamed = |error| blame(communicator.group(), error);
        poll_until_done(wait, what, |pause| library.rest(raw, pause), || library.poll(raw).map_err(blamed))
    });
    match flushed {
        // From 2.31.2 on ncclCommDestroy waits for the other ranks of the node without a deadline.
        Ok(()) if library.has_streams() => {
            let destroying = Arc::clone(library);
            let what = || format!("destroying the communicator of {}", communicator.label());
            let destroy = move || destroying.destroy(raw);
            in_background(library, destroy, drop, |is_done| poll_until_done(wait, what, sleep, is_done))
                .and_then(|destroyed| destroyed)
                .inspect_err(tell)
        }
        Ok(()) => library.destroy(raw).inspect_err(tell),
        Err(error) => {
            tell(&error);
            let _ = library.abort(raw);
            Err(error)
        }
    }
}
