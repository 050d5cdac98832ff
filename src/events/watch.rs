//! The thread `dm-events`, and the subscribers to which it gives events.
//!
//! No lock of this module is held while a handler runs or a source looks. Only this thread lets the
//! sources look, so each source has one look at a time. [`Source::joined`] is called with the lock
//! of the subscribers held, by the thread that subscribes or announces a source.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hostccl::fork::{self, Own};

use super::event::{Event, Kind};
use super::slow::SlowCalls;
use super::subscriber::{Subscriber, begin_thread, is_this_thread};
use crate::error::{Error, Result};
use crate::logging::Me;

/// The longest and the shortest time between two looks of the thread.
const LOOKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(5)];

/// Takes the value that a source holds, because its world or mesh ends. Waits until a running look
/// has let go of the value, so that the thread `dm-events` never drops a world. Returns `None` in a
/// forked child, and where the look itself makes this call.
pub(crate) fn take_from_source<T>(held: &Mutex<Option<T>>) -> Option<T> {
    if fork::is_child() {
        return None;
    }
    let guard = match is_this_thread() {
        true => held.try_lock().ok(),
        false => Some(held.lock().unwrap_or_else(PoisonError::into_inner)),
    };
    guard?.take()
}

/// Whether there is a handler or a queue.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

static STATE: Mutex<State> =
    Mutex::new(State { subscribers: Vec::new(), ended: Vec::new(), sources: Vec::new(), thread: None });

/// Wakes the thread.
static CHANGED: Condvar = Condvar::new();

/// Something that knows of events which nobody publishes: a world, or a mesh.
pub(crate) trait Source: Send + Sync {
    /// The event by which a new subscriber learns of the source. `None` where there is no such
    /// event. The caller holds the lock of the subscribers, so this function publishes no event,
    /// logs nothing and waits for nobody.
    fn joined(&self) -> Option<Event>;

    /// Looks for new events. The thread calls this function again and again. The function waits
    /// for half a second at most.
    fn look(&self) -> Vec<Event>;

    /// Waits for a look that runs now. Then drops what the source holds of its world or mesh,
    /// because that world or mesh ends.
    fn release(&self);
}

struct State {
    /// The subscribers. At most one of them has a handler.
    subscribers: Vec<Arc<Subscriber>>,
    /// Handlers that were removed, one of which may run. The thread forgets them when none runs.
    ended: Vec<Arc<Subscriber>>,
    sources: Vec<Weak<dyn Source>>,
    /// `None` where the thread does not run. A child that is forked while the thread runs may use
    /// nothing of this library, because the thread may hold locks.
    thread: Option<Own<()>>,
}

/// Whether there is a handler or a queue.
#[inline]
pub(crate) fn is_watched() -> bool {
    IS_WATCHED.load(Ordering::Relaxed)
}

/// Gives an event to all subscribers. `event` is called only where there is a subscriber.
#[inline]
pub(crate) fn publish(event: impl FnOnce() -> Event) {
    if is_watched() {
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

/// Gives a subscriber all events from now on. A handler takes the place of an earlier one, and gets
/// the events that wait for it.
pub(super) fn subscribe(subscriber: Arc<Subscriber>) -> Result<()> {
    let mut state = lock();
    if state.thread.is_none() {
        let held = Own::new(());
        hostccl::thread::spawn("dm-events", run).map_err(|cause| Error::no_thread(&cause))?;
        state.thread = Some(held);
    }
    let known = state.sources.iter().filter_map(Weak::upgrade).filter_map(|source| source.joined());
    let joined: Vec<Event> = known.collect();
    joined.iter().for_each(|event| subscriber.queue().push(event.clone()));
    if subscriber.has_handler() {
        let (waiting, left_out) = take_handler(&mut state);
        let is_told = |event: &Event| joined.iter().any(|joined| joined.message == event.message);
        let waiting = waiting.into_iter().filter(|event| event.kind != Kind::Slow && !is_told(event));
        waiting.for_each(|event| subscriber.queue().push(event));
        subscriber.queue().leave_out(left_out);
    }
    state.subscribers.push(subscriber);
    IS_WATCHED.store(true, Ordering::Relaxed);
    CHANGED.notify_all();
    Ok(())
}

/// Gives a subscriber no more events.
pub(super) fn unsubscribe(subscriber: &Arc<Subscriber>) {
    take(&mut lock(), |known| Arc::ptr_eq(known, subscriber));
}

/// Removes the subscriber that has the handler.
pub(super) fn unsubscribe_handler() {
    take_handler(&mut lock());
}

/// The handlers that were removed, as far as they may run.
pub(super) fn ended_handlers() -> Vec<Arc<Subscriber>> {
    lock().ended.clone()
}

/// Removes the subscriber that has the handler. Returns the events that wait for it, and the number
/// of those that were left out after them.
fn take_handler(state: &mut State) -> (Vec<Event>, u64) {
    let Some(earlier) = take(state, |known| known.has_handler()) else { return (Vec::new(), 0) };
    let waiting = earlier.queue().take_all();
    state.ended.push(earlier);
    waiting
}

/// Removes the subscriber that `which` finds. The thread ends when the last subscriber is gone.
fn take(state: &mut State, which: impl Fn(&Arc<Subscriber>) -> bool) -> Option<Arc<Subscriber>> {
    let at = state.subscribers.iter().position(which)?;
    let taken = state.subscribers.remove(at);
    IS_WATCHED.store(!state.subscribers.is_empty(), Ordering::Relaxed);
    CHANGED.notify_all();
    Some(taken)
}

/// The work of the thread.
fn run() {
    begin_thread();
    let mut slow = SlowCalls::default();
    loop {
        let mut state = lock();
        // No handler runs now.
        let ended = std::mem::take(&mut state.ended);
        if state.subscribers.is_empty() {
            let held = state.thread.take();
            drop(state);
            go_on(|| drop(ended));
            // A child that is forked until here is recognised.
            drop(held);
            return;
        }
        let (subscribers, sources) = (state.subscribers.clone(), state.sources.clone());
        drop(state);
        go_on(|| drop(ended));
        subscribers.iter().for_each(|subscriber| subscriber.deliver());
        for source in &sources {
            let news = go_on(|| source.upgrade().map(|source| source.look()));
            news.flatten().into_iter().flatten().for_each(|event| publish(|| event));
        }
        go_on(|| slow.look(&subscribers));
        let slowest = subscribers.iter().map(|subscriber| subscriber.slow()).min().unwrap_or_default();
        // The thread keeps nothing alive while it sleeps.
        go_on(|| drop(subscribers));
        rest((slowest / 4).clamp(LOOKS[1], LOOKS[0]));
    }
}

/// Does a part of the thread's work. `None` where it panics, which is a bug of this library or of a
/// store of the program: the thread goes on, and says so once.
fn go_on<T>(work: impl FnOnce() -> T) -> Option<T> {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    let done = catch_unwind(AssertUnwindSafe(work));
    if done.is_err() && !IS_TOLD.swap(true, Ordering::Relaxed) {
        log::error!("{Me}: the thread dm-events has panicked and goes on: events may be missing");
    }
    done.ok()
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::events::queue::Queue;
    use crate::wait::Deadline;

    const LONG: Duration = Duration::from_secs(60);

    fn event(number: u64) -> Event {
        Event::new(Kind::Lost, (0, 1), number, format!("event {number}"))
    }

    /// Whether [`event`] has made the event. Other tests of this process end worlds meanwhile, and
    /// a subscriber gets the events of these worlds too.
    fn is_of_this_test(event: &Event) -> bool {
        event.message.starts_with("event ")
    }

    /// A handler that sends the numbers of this test's events. It returns from such an event when
    /// `release` says so.
    fn blocking(sent: Sender<u64>, release: Receiver<()>) -> Arc<Subscriber> {
        let release = Mutex::new(release);
        let handler = move |event: &Event| {
            if is_of_this_test(event) {
                sent.send(event.epoch).unwrap();
                let _ = release.lock().unwrap().recv();
            }
        };
        Subscriber::new(LONG, Queue::new(), Some(Arc::new(handler))).unwrap()
    }

    struct Panics(Mutex<Sender<()>>);

    impl Source for Panics {
        fn joined(&self) -> Option<Event> {
            None
        }

        fn look(&self) -> Vec<Event> {
            let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(());
            panic!("a source that panics");
        }

        fn release(&self) {}
    }

    /// One test, because the process has one handler.
    #[test]
    fn handlers_are_replaced_while_they_run_and_the_thread_survives_a_panic() {
        let (sent, seen) = channel();
        let (release, released) = channel();
        let first = blocking(sent.clone(), released);
        subscribe(Arc::clone(&first)).unwrap();
        [1, 2, 3].iter().for_each(|number| publish(|| event(*number)));
        publish(|| Event { kind: Kind::Slow, ..event(4) });
        assert_eq!(seen.recv_timeout(LONG), Ok(1));

        // The handler runs. The next one gets the events that wait. Whoever removes a later handler
        // still finds that the first one runs.
        let (release_next, released_next) = channel();
        let second = blocking(sent, released_next);
        subscribe(Arc::clone(&second)).unwrap();
        let (waiting, left_out) = second.queue().take_all();
        let mine = waiting.iter().filter(|event| is_of_this_test(event));
        let numbers: Vec<u64> = mine.map(|event| event.epoch).collect();
        assert_eq!((numbers, left_out), (vec![2, 3], 0), "the slow call comes again by itself");
        let third = blocking(channel().0, channel().1);
        subscribe(Arc::clone(&third)).unwrap();
        unsubscribe_handler();
        let ended = ended_handlers();
        assert_eq!(ended.len(), 3);
        let now = Deadline::after(Duration::ZERO);
        let runs: Vec<bool> = ended.iter().map(|ended| !ended.has_ended_before(&now)).collect();
        assert_eq!(runs, [true, false, false]);
        drop((release, release_next));
        assert!(first.has_ended_before(&Deadline::after(LONG)));

        // The thread asks a source again after the source has panicked.
        let (asked, asks) = channel();
        let panics: Arc<dyn Source> = Arc::new(Panics(Mutex::new(asked)));
        let queue = Subscriber::new(LONG, Queue::with_descriptor().unwrap(), None).unwrap();
        subscribe(Arc::clone(&queue)).unwrap();
        announce(Arc::downgrade(&panics));
        assert_eq!([asks.recv_timeout(LONG), asks.recv_timeout(LONG)], [Ok(()); 2]);
        drop(panics);
        unsubscribe(&queue);
    }

    #[test]
    fn the_end_of_a_source_waits_for_a_look() {
        let held = Arc::new(Mutex::new(Some(7)));
        let (begun, begins) = channel();
        let looked = Arc::clone(&held);
        let look = std::thread::spawn(move || {
            let mut looking = looked.lock().unwrap();
            begun.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            *looking = Some(8);
        });
        begins.recv_timeout(LONG).unwrap();
        assert_eq!(take_from_source(&held), Some(8));
        assert_eq!(take_from_source(&held), None);
        look.join().unwrap();
    }
}
