//! The thread `dm-events`, and the subscribers to which it gives events.
//!
//! No lock is held while a handler or a source runs. Only this thread asks the sources, so it asks
//! a source one question at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::event::Event;
use super::slow::SlowCalls;
use super::subscriber::{Subscriber, is_events_thread};
use crate::error::{Error, Result};

/// The longest and the shortest time between two looks of the thread.
const LOOKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(5)];

/// Whether there is a handler or a queue.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

static STATE: Mutex<State> = Mutex::new(State { subscribers: Vec::new(), sources: Vec::new(), is_running: false });

/// Wakes the thread.
static CHANGED: Condvar = Condvar::new();

/// Something that knows of events which nobody publishes: a world, or a mesh.
pub(crate) trait Source: Send + Sync {
    /// The event by which a new subscriber learns of the source. `None` where there is no such
    /// event.
    fn joined(&self) -> Option<Event>;

    /// Looks for new events. The thread calls this function again and again. The function waits
    /// for half a second at most.
    fn look(&self) -> Vec<Event>;
}

struct State {
    /// The subscribers. At most one of them has a handler.
    subscribers: Vec<Arc<Subscriber>>,
    sources: Vec<Weak<dyn Source>>,
    /// Whether the thread runs.
    is_running: bool,
}

/// Gives an event to all subscribers. `event` is called only where there is a subscriber.
#[inline]
pub(crate) fn publish(event: impl FnOnce() -> Event) {
    if IS_WATCHED.load(Ordering::Relaxed) {
        give(&event());
    }
}

#[cold]
fn give(event: &Event) {
    give_by(&lock(), event);
}

fn give_by(state: &State, event: &Event) {
    state.subscribers.iter().for_each(|subscriber| subscriber.queue().push(event.clone()));
    CHANGED.notify_all();
}

/// Notes a source for as long as it lives, and publishes that it has joined.
pub(crate) fn announce(source: Weak<dyn Source>) {
    let mut state = lock();
    // The list is cleaned before it would grow.
    if state.sources.len() == state.sources.capacity() {
        state.sources.retain(|known| known.strong_count() > 0);
    }
    let joined = if state.subscribers.is_empty() { None } else { source.upgrade().and_then(|it| it.joined()) };
    joined.iter().for_each(|event| give_by(&state, event));
    state.sources.push(source);
}

/// Gives a subscriber all events from now on. A handler takes the place of an earlier one, which
/// is returned.
pub(super) fn subscribe(subscriber: Arc<Subscriber>) -> Result<Option<Arc<Subscriber>>> {
    let mut state = lock();
    if !state.is_running {
        hostccl::thread::spawn("dm-events", run).map_err(|cause| Error::no_thread(&cause))?;
        state.is_running = true;
    }
    let earlier = if subscriber.has_handler() { take(&mut state, |known| known.has_handler()) } else { None };
    let known = state.sources.iter().filter_map(Weak::upgrade).filter_map(|source| source.joined());
    known.for_each(|event| subscriber.queue().push(event));
    state.subscribers.push(subscriber);
    IS_WATCHED.store(true, Ordering::Relaxed);
    CHANGED.notify_all();
    Ok(earlier)
}

/// Gives a subscriber no more events.
pub(super) fn unsubscribe(subscriber: &Arc<Subscriber>) {
    take(&mut lock(), |known| Arc::ptr_eq(known, subscriber));
}

/// Removes the subscriber that has the handler, and returns it.
pub(super) fn unsubscribe_handler() -> Option<Arc<Subscriber>> {
    take(&mut lock(), |known| known.has_handler())
}

/// Removes the subscriber that `which` finds. The thread ends when the last subscriber is gone.
fn take(state: &mut State, which: impl Fn(&Arc<Subscriber>) -> bool) -> Option<Arc<Subscriber>> {
    let at = state.subscribers.iter().position(which)?;
    let taken = state.subscribers.remove(at);
    taken.end();
    IS_WATCHED.store(!state.subscribers.is_empty(), Ordering::Relaxed);
    CHANGED.notify_all();
    Some(taken)
}

/// What the thread does.
fn run() {
    is_events_thread();
    let mut slow = SlowCalls::default();
    loop {
        let mut state = lock();
        if state.subscribers.is_empty() {
            state.is_running = false;
            return;
        }
        let (subscribers, sources) = (state.subscribers.clone(), state.sources.clone());
        drop(state);
        subscribers.iter().for_each(|subscriber| subscriber.deliver());
        for event in sources.iter().filter_map(Weak::upgrade).flat_map(|source| source.look()) {
            publish(|| event);
        }
        slow.look(&subscribers);
        let slowest = subscribers.iter().map(|subscriber| subscriber.slow()).min().unwrap_or_default();
        // The thread keeps nothing alive while it sleeps.
        drop(subscribers);
        rest((slowest / 4).clamp(LOOKS[1], LOOKS[0]));
    }
}

/// Sleeps until somebody changes something, or for that time.
fn rest(pause: Duration) {
    let state = lock();
    let has_work = |known: &Arc<Subscriber>| known.has_handler() && !known.queue().is_empty();
    if !state.subscribers.is_empty() && !state.subscribers.iter().any(has_work) {
        drop(CHANGED.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner));
    }
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}
