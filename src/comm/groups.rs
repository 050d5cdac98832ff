//! Keeps the groups that the calling thread has begun and not ended, one entry for each library.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::communicator::{Communicator, State};
use crate::ccl::{Library, result};
use crate::error::{Error, Result};
use crate::recorder::{Group, Recorded};
use crate::rendezvous::Scope;

/// A communicator on which operations wait for the end of a group.
#[derive(Clone)]
pub(super) struct Used {
    pub(super) communicator: Arc<Communicator>,
    /// The first of these operations.
    call: String,
    /// The group in the recording to which this operation belongs.
    pub(super) recorded: Option<Arc<Group>>,
}

/// An open group of this thread in one library.
struct OpenGroup {
    library: Arc<Library>,
    /// How many groups are open, one inside the other.
    depth: usize,
    /// How many operations wait for the end of the group.
    queued: usize,
    /// The first error of an operation that was refused in the group. The whole group fails with
    /// this error.
    refused: Option<Error>,
    /// The communicators on which operations wait, each with the first of these operations.
    used: Vec<Used>,
    /// The communicators with streams that have operations in the group. This thread keeps their
    /// gates until the group ends.
    inside: Vec<Arc<Communicator>>,
    /// The operations of the group in the recording of this process.
    recorded: Vec<Recorded>,
    /// The collectives of the group that the ranks compare before it ends, each with the scope of
    /// its dimension.
    compared: Vec<(Arc<Scope>, Vec<String>)>,
    /// Whether the library cannot end the group any more, because a communicator in it was aborted.
    /// The thread then stays inside the group, so it can issue no further operations.
    is_lost: bool,
}

impl OpenGroup {
    /// Whether a communicator that has operations in the group was aborted or finalized.
    fn holds_ended(&self) -> bool {
        self.inside.iter().any(|communicator| communicator.state() != State::Ready)
    }

    /// The calls on communicators that were ended meanwhile, and the calls on the others.
    fn ended_and_alive(&self) -> (Vec<&str>, Vec<&str>) {
        let calls = |is_ended: bool| {
            let chosen = self.used.iter().filter(move |one| (one.communicator.state() != State::Ready) == is_ended);
            chosen.map(|one| one.call.as_str()).collect()
        };
        (calls(true), calls(false))
    }

    /// Says that the communicators of these calls were aborted.
    fn were_aborted(calls: &[&str]) -> String {
        match calls {
            [call] => format!("the communicator that {call} uses was aborted"),
            calls => format!("the communicators that {} use were aborted", calls.join(", ")),
        }
    }

    /// The error of a group that cannot run, because a communicator in it was ended.
    fn ended_before(&self) -> Option<Error> {
        let (ended, alive) = self.ended_and_alive();
        (!ended.is_empty()).then(|| {
            Error::aborted(format!(
                "dm_group_end: {} while the group was open; none of the group's operations ran{}",
                OpenGroup::were_aborted(&ended),
                if alive.is_empty() { String::new() } else { format!(", not even {}", alive.join(", ")) }
            ))
        })
    }

    /// The error of a group in which a communicator was ended while its operations ran. `error` is
    /// the library's.
    fn ended_meanwhile(&self, error: &Error) -> Option<Error> {
        let (ended, alive) = self.ended_and_alive();
        (!ended.is_empty()).then(|| {
            let has_failed =
                |Used { communicator, .. }: &Used| communicator.state() == State::Ready && communicator.has_failed();
            let failed = alive.is_empty() || self.used.iter().any(has_failed);
            let others = match (alive.is_empty(), failed) {
                (true, _) => String::new(),
                (false, false) => format!("; {} ran to the end", alive.join(", ")),
                (false, true) => format!("; {} did not all run to the end: {}", alive.join(", "), error.message()),
            };
            Error::aborted(format!(
                "dm_group_end: {} while the group ran, so {} did not end well{others}",
                OpenGroup::were_aborted(&ended),
                if ended.len() == 1 { "it" } else { "they" }
            ))
            .with_ccl_result(error.ccl_result())
        })
    }

    /// The communicators that the library works on when it is about to run the group. `None` where
    /// the group is lost.
    fn to_enter(&self) -> Option<Vec<Arc<Communicator>>> {
        let runs_here = self.depth == 1 && self.library.has_streams();
        (!self.is_lost).then(|| if runs_here { self.inside.clone() } else { Vec::new() })
    }
}

/// Enters all communicators of this thread's group where `library` is about to run the group, so
/// that nobody ends one of them meanwhile. Returns these communicators; `None` where one of them
/// has ended, because the group is then lost.
fn enter_all(library: &Arc<Library>) -> Option<Vec<Arc<Communicator>>> {
    let Some(inside) = with_group(library, |group| group.to_enter()) else { return Some(Vec::new()) };
    let inside = inside?;
    let entered = inside.iter().take_while(|communicator| communicator.enter_again().is_ok()).count();
    if entered < inside.len() {
        inside[..entered].iter().for_each(|communicator| communicator.pause());
        lose(library);
        return None;
    }
    Some(inside)
}

/// Marks this thread's group as lost, because the library cannot end it. A thread that leaves a
/// communicator may wait for the communicator's end and write to the log, and the program's log
/// callback may call this library. So the list of groups is not borrowed any more when the
/// communicators are left.
fn lose(library: &Arc<Library>) {
    let left = with_group(library, |group| {
        group.is_lost = true;
        group.queued = 0;
        std::mem::take(&mut group.inside)
    });
    left.iter().flatten().for_each(|communicator| communicator.leave());
}

impl Drop for OpenGroup {
    fn drop(&mut self) {
        self.inside.iter().for_each(|communicator| communicator.leave());
    }
}

/// How the end of a group failed.
pub(super) enum Failed {
    /// The calling thread has begun no group.
    NotBegun(Error),
    /// The error has its reason already.
    Known(Error),
    /// The library's error, and the communicators of the group's operations, one of which may know
    /// the reason.
    OfLibrary(Error, Vec<Used>),
}

thread_local! {
    static OPEN: RefCell<Vec<OpenGroup>> = const { RefCell::new(Vec::new()) };
    /// How many entries `OPEN` has. Reading it is quicker than borrowing `OPEN`.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// Runs `work` with the list of open groups, which `work` must not use in another way: it makes no
/// call that may wait or write to the log. Returns `None` on a thread that is ending and has no
/// list any more.
fn with_open<T>(work: impl FnOnce(&mut Vec<OpenGroup>) -> T) -> Option<T> {
    OPEN.try_with(|open| {
        let mut open = open.borrow_mut();
        let result = work(&mut open);
        COUNT.set(open.len());
        result
    })
    .ok()
}

fn with_group<T>(library: &Arc<Library>, work: impl FnOnce(&mut OpenGroup) -> T) -> Option<T> {
    if COUNT.get() == 0 {
        return None;
    }
    with_open(|open| open.iter_mut().find(|group| group.library.is_same(library)).map(work)).flatten()
}

/// Whether this thread is inside a group of that library.
pub(super) fn in_group(library: &Arc<Library>) -> bool {
    with_group(library, |_| ()).is_some()
}

/// Notes that an operation on a communicator waits for the end of this thread's group. `recorded`
/// is the operation in the recording, and `of` is the group of ranks to which it belongs there.
pub(super) fn note(
    communicator: &Arc<Communicator>,
    recorded: Recorded,
    of: Option<&Arc<Group>>,
    call: impl FnOnce() -> String,
) {
    with_group(communicator.library(), |group| {
        group.queued += 1;
        group.recorded.push(recorded);
        if !group.used.iter().any(|known| Arc::ptr_eq(&known.communicator, communicator)) {
            let communicator = Arc::clone(communicator);
            group.used.push(Used { communicator, call: call(), recorded: of.cloned() });
        }
    });
}

/// Notes a collective along the dimension of `scope` that the ranks compare before this thread's
/// group ends. Returns whether this thread has a group.
pub(super) fn note_collective(library: &Arc<Library>, scope: &Arc<Scope>, text: &str) -> bool {
    let note = |group: &mut OpenGroup| match group.compared.iter_mut().find(|(known, _)| Arc::ptr_eq(known, scope)) {
        Some((_, texts)) => texts.push(text.to_owned()),
        None => group.compared.push((Arc::clone(scope), vec![text.to_owned()])),
    };
    with_group(library, note).is_some()
}

/// Takes the collectives that the ranks compare before this thread's group ends. There are none
/// where the group is not the outermost one, or was refused already.
pub(super) fn take_collectives(library: &Arc<Library>) -> Vec<(Arc<Scope>, Vec<String>)> {
    let ends = |group: &OpenGroup| group.depth == 1 && !group.is_lost && group.refused.is_none();
    let take = |group: &mut OpenGroup| if ends(group) { std::mem::take(&mut group.compared) } else { Vec::new() };
    with_group(library, take).unwrap_or_default()
}

/// Records that an operation of the calling thread has ended well in the host engine, or was handed
/// to its stream by another library.
#[inline]
pub(super) fn record_end(library: &Library, recorded: Recorded) {
    match library.is_host_engine() {
        true => recorded.done(library.take_wait()),
        false => recorded.issued(),
    }
}

/// Keeps the gate of a communicator, which this thread has entered already, until the group ends.
/// Returns whether there is a group.
pub(super) fn hold_gate(communicator: &Arc<Communicator>) -> bool {
    with_group(communicator.library(), |group| group.inside.push(Arc::clone(communicator))).is_some()
}

/// Whether this thread's group keeps that communicator's gate.
pub(super) fn holds_gate(communicator: &Arc<Communicator>) -> bool {
    with_group(communicator.library(), |group| group.inside.iter().any(|known| Arc::ptr_eq(known, communicator)))
        .unwrap_or(false)
}

/// Fails when operations of this thread wait for the end of a group in that library, because `call`
/// would then wait, or end, without these operations.
pub(super) fn refuse_inside(call: &str, library: Option<&Arc<Library>>) -> Result<()> {
    let waiting = library.and_then(|library| {
        with_group(library, |group| {
            let first = group.used.first().filter(|_| group.queued > 0);
            first.map(|first| (group.queued, first.call.clone()))
        })
        .flatten()
    });
    let Some((queued, first)) = waiting else { return Ok(()) };
    let operations = if queued == 1 { "1 operation is".to_owned() } else { format!("{queued} operations are") };
    Err(Error::invalid_state(format!(
        "{call}: this thread has begun a group and not ended it; {operations} queued in it since {first} and not done: call dm_group_end first"
    )))
}

/// Notes that the calling thread has begun a group in `library`.
pub(super) fn begin(library: &Arc<Library>) {
    with_open(|open| match open.iter_mut().find(|group| group.library.is_same(library)) {
        Some(group) => group.depth += 1,
        None => open.push(OpenGroup {
            library: Arc::clone(library),
            depth: 1,
            queued: 0,
            refused: None,
            used: Vec::new(),
            inside: Vec::new(),
            recorded: Vec::new(),
            compared: Vec::new(),
            is_lost: false,
        }),
    });
}

/// Ends a group of the calling thread in `library`. The outermost end runs the operations, and then
/// opens the gates that the group kept, and returns the communicators of the operations; an inner
/// end returns none. Fails with the error of the first operation that was refused in the group,
/// else with the library's error.
pub(super) fn end(library: &Arc<Library>) -> std::result::Result<Vec<Used>, Failed> {
    // When a communicator was aborted meanwhile, its operations are still in the library's list,
    // but its memory is gone. So the library must not run the list.
    let Some(inside) = enter_all(library) else { return Err(Failed::Known(lost(library))) };
    // The host engine would run the other operations, but a group runs as a whole.
    let ended_before = with_group(library, |group| if group.depth == 1 { group.ended_before() } else { None });
    if let Some(error) = ended_before.flatten() {
        refuse(Some(library), &error);
    }
    let is_begun = in_group(library);
    let start = |group: &mut OpenGroup| {
        if group.depth == 1 {
            Recorded::start_all(&group.recorded);
        }
    };
    with_group(library, start);
    let ended = library.group_end().map_err(|error| match is_begun {
        false if error.ccl_result() == result::INVALID_USAGE => Error::invalid_state(format!(
            "dm_group_end: this thread has begun no group in {}: call dm_group_start first",
            library.label()
        ))
        .with_ccl_result(error.ccl_result()),
        _ => error,
    });
    inside.iter().for_each(|communicator| communicator.pause());
    let closed = with_open(|open| {
        let at = open.iter().position(|group| group.library.is_same(library))?;
        open[at].depth -= 1;
        (open[at].depth == 0).then(|| open.remove(at))
    });
    let Some(mut group) = closed.flatten() else {
        return ended.map(|()| Vec::new()).map_err(|error| match is_begun {
            true => Failed::OfLibrary(error, Vec::new()),
            false => Failed::NotBegun(error),
        });
    };
    if ended.is_ok() && group.refused.is_none() {
        group.recorded.drain(..).for_each(|recorded| record_end(library, recorded));
    }
    match (group.refused.take(), ended) {
        (Some(refused), _) => Err(Failed::Known(refused)),
        (None, Err(error)) => match group.ended_meanwhile(&error) {
            Some(aborted) => Err(Failed::Known(aborted)),
            None => Err(Failed::OfLibrary(error, std::mem::take(&mut group.used))),
        },
        (None, Ok(())) => Ok(std::mem::take(&mut group.used)),
    }
}

/// Notes that an operation of this thread was refused. The thread's open group in `library` then
/// fails with that error at its end, and the host engine runs none of the group's operations. Where
/// the library is not known (`None`), because the operation names no mesh, this holds for every
/// group that the thread has open.
pub(crate) fn refuse(library: Option<&Library>, error: &Error) {
    if COUNT.get() == 0 {
        return;
    }
    with_open(|open| {
        let is_meant = |group: &&mut OpenGroup| library.is_none_or(|library| group.library.is_same(library));
        for group in open.iter_mut().filter(is_meant).filter(|group| group.refused.is_none()) {
            group.refused = Some(error.clone());
            group.library.fail_group(error.message());
        }
    });
}

/// Ends the group that this thread has begun last. A program gets here when it ends a group by a
/// handle that is not live any more. The group fails with `error`, and the host engine runs none
/// of its operations.
pub(crate) fn end_in_vain(error: &Error) {
    let last = with_open(|open| open.last().filter(|group| !group.is_lost).map(|group| Arc::clone(&group.library)));
    let Some(library) = last.flatten() else { return };
    refuse(Some(&library), error);
    let _ = end(&library);
}

/// Ends the groups that this thread has open in `library`, after a mesh or the world was aborted by
/// the call `by`: later operations must not wait for an end of the group that the program may have
/// left out. The host engine drops the operations of the group. NCCL ends a group only where no
/// operation of an aborted communicator is queued in it; otherwise the group is lost.
pub(super) fn abandon(library: &Arc<Library>, by: &str) {
    let found = with_group(library, |group| (group.is_lost, group.holds_ended(), group.queued));
    let Some((false, holds_ended, queued)) = found else { return };
    if library.is_host_engine() {
        library.fail_group(&format!("{by} ended the group"));
    } else if holds_ended {
        lose(library);
        return;
    } else if queued > 0 {
        // The operations are those of other meshes, and the program ends their group.
        return;
    }
    // A lost group stays open, because no end is possible.
    while with_group(library, |group| group.is_lost) == Some(false) {
        // In the host engine this end fails, as it is meant to.
        let _ = end(library);
    }
}

/// Fails on a thread whose group in `library` is lost, because whatever the thread did there would
/// only be queued.
pub(super) fn check_usable(library: &Arc<Library>) -> Result<()> {
    match with_group(library, |group| group.is_lost) {
        Some(true) => Err(lost(library)),
        _ => Ok(()),
    }
}

fn lost(library: &Library) -> Error {
    Error::aborted(format!(
        "an abort has ended a communicator with operations in an open group of this thread, and {} cannot end such a group: further operations of this thread would only be queued, so make them on another thread",
        library.label()
    ))
}

/// Makes communicators outside the calling thread's groups, because inside a group a library would
/// not make them before the group ends. Groups belong to threads, so another thread makes the
/// communicators when this thread has an open group.
pub(super) fn outside_groups<T: Send>(library: &Arc<Library>, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !in_group(library) {
        return make();
    }
    let device = library.current_device()?;
    std::thread::scope(|scope| {
        let make = || device.select().and_then(|()| make());
        let making = hostccl::thread::spawn_scoped(scope, "dm-make", make);
        let making = making.map_err(|error| Error::no_thread(&error))?;
        making.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::ccl::{self, RawComm};
    use crate::logging::{self, LevelFilter};
    use crate::mesh::{Mesh, MeshSpec};
    use crate::wait::Wait;

    #[test]
    fn a_log_callback_may_call_while_a_group_is_lost() {
        let library = ccl::for_device("cpu").unwrap();
        let group = Mesh::new(&MeshSpec::new("cpu", &[1], 1, 0)).unwrap();
        // The engine does not know this communicator, so its abort fails and is logged.
        let raw = RawComm(std::ptr::without_provenance_mut(16));
        let communicator = Arc::new(Communicator::adopted(Arc::clone(&library), group, raw, true).unwrap());
        begin(&library);
        communicator.enter(7, || Wait::after(Duration::ZERO), &String::new).unwrap();
        assert!(hold_gate(&communicator));
        // This thread is inside, so the end is left to this thread.
        assert!(communicator.take_to_finalize(Duration::from_millis(1)).is_err());

        let was_called = Arc::new(AtomicBool::new(false));
        let (called, asked) = (Arc::clone(&was_called), Arc::clone(&library));
        let this = std::thread::current().id();
        let callback = move |_, _: &str| {
            if std::thread::current().id() == this {
                assert!(in_group(&asked));
                called.store(true, Ordering::SeqCst);
            }
        };
        logging::set(LevelFilter::Warn, Some(Arc::new(callback))).unwrap();
        lose(&library);
        logging::set(LevelFilter::Off, None).unwrap();
        assert!(was_called.load(Ordering::SeqCst), "the end of the communicator was not logged");
        assert!(check_usable(&library).is_err());
    }
}
