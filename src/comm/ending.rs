//! Ends communicators: at once, or in order when their work is done. Every end has a deadline.

use std::sync::Arc;
use std::thread::sleep;

use super::background::Worker;
use super::communicator::Communicator;
use super::failure::blame;
use super::handle::{CAUSES, GRACE};
use super::polling::poll_until_done;
use crate::ccl::{Library, RawComm};
use crate::error::{Error, Result, Status};
use crate::wait::Wait;

/// Aborts communicators at the same time. Fails where an abort is not done within seconds. That
/// abort then continues in the background.
pub(super) fn abort_all(communicators: &[Arc<Communicator>]) -> Result<()> {
    Communicator::abort_all(communicators)
}

/// Ends the communicators of `parts` by `end`, which returns by a deadline of its own. On a library
/// with streams each of them ends on a thread of its own, with the device of the calling thread.
/// The reason is that the end of a communicator may wait for its other ranks, and ranks may have
/// made their communicators in different orders.
pub(super) fn end_together<T: Sync>(
    parts: &[T],
    communicator_of: impl Fn(&T) -> &Arc<Communicator>,
    end: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let has_streams = parts.iter().any(|part| communicator_of(part).library().has_streams());
    if !has_streams || parts.len() < 2 {
        return parts.iter().map(end).fold(Ok(()), Result::and);
    }
    std::thread::scope(|scope| {
        let (mut here, mut threads) = (Vec::new(), Vec::new());
        let end = &end;
        for part in parts {
            // Where the device cannot be selected, the end is tried all the same.
            let device = communicator_of(part).library().current_device();
            let end_there = move || {
                let _ = device.and_then(|device| device.select());
                end(part)
            };
            match hostccl::thread::spawn_scoped(scope, "dm-finalize", end_there) {
                Ok(thread) => threads.push(thread),
                Err(_) => here.push(part),
            }
        }
        let outcome = here.into_iter().map(end).fold(Ok(()), Result::and);
        let panicked = |_| Err(Error::internal("finalizing a communicator panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).fold(outcome, Result::and)
    })
}

/// Aborts raw communicators that nobody uses, after a call has failed. On a library with streams
/// the aborts run at the same time, and those that take long go on in the background. `worker` is
/// the thread that has made them.
pub(super) fn discard(library: &Arc<Library>, raws: &[RawComm], worker: Option<&Worker>) {
    if !library.has_streams() {
        raws.iter().for_each(|raw| drop(library.abort(*raw)));
        return;
    }
    let begin = |raw: &RawComm| {
        let (raw, library) = (*raw, Arc::clone(library));
        let own = Worker::new(&library, "dm-abort");
        worker.unwrap_or(&own).start_abort(move || library.abort(raw))
    };
    // Without a thread nothing could bound the abort, so the communicator is left as it is.
    let begun: Vec<_> = raws.iter().filter_map(|raw| begin(raw).ok()).collect();
    let wait = Wait::after(GRACE);
    for pending in begun {
        let _ = pending.finish(|is_done| poll_until_done(&wait, String::new, sleep, is_done));
    }
}

/// Flushes and destroys one communicator. Aborts it when its work is not done by the deadline.
/// `tell` is called with the error before the abort, because the other ranks take a rank that
/// aborts for a lost one, and because the abort waits for the ranks of this host.
pub(super) fn finalize(communicator: &Communicator, wait: &Wait, tell: &dyn Fn(&Error)) -> Result<()> {
    let Some(raw) = communicator.take_to_finalize(wait.deadline.left()).inspect_err(tell)? else {
        return Ok(());
    };
    let library = communicator.library();
    if library.has_streams() {
        return finalize_on_streams(communicator, raw, wait, tell);
    }
    let what = || format!("finalizing the communicator of {}", communicator.label());
    let flushed = library.finalize(raw).and_then(|()| {
        let blamed = |error| blame(communicator.group(), error);
        poll_until_done(wait, what, |pause| library.rest(raw, pause), || library.poll(raw).map_err(blamed))
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

/// Does what [`finalize`] does, on a library with streams. The calls of the library run on one
/// thread. While that thread is inside a call, nothing else may be done with the communicator, so
/// a communicator whose call does not return is left as it is. A communicator is aborted where a
/// call could not be made, because no thread could be started or the thread could not select the
/// device.
fn finalize_on_streams(communicator: &Communicator, raw: RawComm, wait: &Wait, tell: &dyn Fn(&Error)) -> Result<()> {
    let library = communicator.library();
    let worker = Worker::new(library, "dm-background");
    let call =
        |name: &'static str, wait: &Wait, late: fn(&Library, RawComm), work: fn(&Library, RawComm) -> Result<bool>| {
            let what = || format!("{name} of {} on the communicator of {}", library.label(), communicator.label());
            let (working, ending) = (Arc::clone(library), Arc::clone(library));
            let run = move || Ok(work(&working, raw));
            let discard = move |_| late(&ending, raw);
            // The outer error says that the call has not returned. The inner error says that it was
            // not made.
            worker.run(run, discard, |is_done| poll_until_done(wait, what, sleep, is_done))
        };
    let give_up = |error: Error| {
        tell(&error);
        discard(library, &[raw], Some(&worker));
        Err(error)
    };
    let abort = |library: &Library, raw| drop(library.abort(raw));
    // A blocking communicator waits for its streams, and so for peers that may have gone.
    let finalized = call("ncclCommFinalize", wait, abort, |library, raw| library.finalize(raw).map(|()| true));
    let finalized = finalized.map_err(with_causes).inspect_err(tell)?;
    let mut stuck = None;
    let flushed = finalized.and_then(|answer| answer).and_then(|_| {
        let what = || format!("finalizing the communicator of {} (ncclCommFinalize)", communicator.label());
        poll_until_done(wait, what, sleep, || {
            match call("ncclCommGetAsyncError", &question_wait(wait), abort, Library::poll) {
                Ok(asked) => asked?.map_err(|error| blame(communicator.group(), error)),
                Err(late) => {
                    stuck = Some(());
                    Err(late)
                }
            }
        })
    });
    match flushed {
        // From 2.31.2 on ncclCommDestroy waits for the other ranks of the node without a deadline.
        Ok(()) => match call("ncclCommDestroy", wait, |_, _| (), |library, raw| library.destroy(raw).map(|()| true)) {
            Ok(Err(not_made)) => give_up(not_made),
            ended => ended.and_then(|made| made?.map(drop)).map_err(with_causes).inspect_err(tell),
        },
        Err(error) if stuck.is_some() => Err(with_causes(error)).inspect_err(tell),
        Err(error) => give_up(with_causes(error)),
    }
}

/// The error of an end, with the likely causes where the end has not come in time.
fn with_causes(error: Error) -> Error {
    match error.status() {
        Status::Timeout if error.ccl_result() == 0 => error.followed_by(&format!("; {CAUSES}")),
        _ => error,
    }
}

/// A wait for the answer to a question that a call with `wait` asks the library. Such a wait is
/// not cancelled, because the answer is there at once, and a communicator about which a thread
/// asks cannot be ended.
pub(super) fn question_wait(wait: &Wait) -> Wait {
    Wait::after(wait.deadline.left().max(GRACE))
}
