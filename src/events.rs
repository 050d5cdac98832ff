//! Events: a rank has joined, a call waits for long, ranks are lost, a mesh was aborted, the job
//! has recovered (docs/events.md).
//!
//! - [`set_handler`] sets a function that the thread `dm-events` calls with each event.
//! - [`Events`] is a queue of events with a descriptor, for programs with a loop of their own.
//!
//! The thread exists while there is a handler or a queue. It also looks for events that nobody
//! publishes: calls that wait for long (slow.rs), and events that the sources of upper layers
//! report. Without a handler and a queue, no event is made, and each place that could make one
//! loads a flag.
//!
//! ```
//! use std::time::Duration;
//! use devicemesh::comm::{World, WorldOptions};
//! use devicemesh::events::{Events, Kind, Options};
//!
//! let events = Events::open(&Options::default().slow(Duration::from_secs(30)))?;
//! let world = World::join("cpu", &WorldOptions::default())?;
//! let joined = events.next_within(Duration::from_secs(5))?.expect("the join is an event");
//! assert_eq!((joined.kind, joined.rank as usize), (Kind::Joined, world.rank()));
//! # Ok::<(), devicemesh::error::Error>(())
//! ```

mod event;
mod queue;
mod slow;
mod subscriber;
mod waits;
mod watch;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use hostccl::fork;

pub(crate) use self::event::Handler;
pub use self::event::{Event, Kind, Options};
use self::queue::Queue;
use self::subscriber::Subscriber;
pub(crate) use self::waits::Waiting;
pub(crate) use self::watch::{Source, announce, is_watched, publish, take_from_source};
use self::watch::{ended_handlers, subscribe, unsubscribe, unsubscribe_handler};
use crate::error::{Error, Result};
use crate::wait::Deadline;

/// How long [`set_handler`] waits for a call of the earlier handler.
const PATIENCE: Duration = Duration::from_secs(5);

/// Sets the handler of this process, in place of an earlier one. The thread `dm-events` calls it
/// with one event at a time. The first ones are [`Kind::Joined`] of the worlds that this process
/// is in. A panic of the handler is dropped.
///
/// The handler may call local functions, `abort` among them, and set another handler. It should
/// return soon, because the thread notices nothing while the handler runs.
///
/// The events that wait for the earlier handler go to the new one, without those of slow calls,
/// which come again when they have waited for the new handler's time.
///
/// Waits for a call of an earlier handler. Fails with `DM_STATUS_TIMEOUT` where that call has not
/// ended after 5 s: the new handler is set, but keep what the earlier ones use. Another call of
/// this function waits again for all earlier handlers.
pub fn set_handler(options: &Options, handler: impl Fn(&Event) + Send + Sync + 'static) -> Result<()> {
    replace_handler(Some((options, Arc::new(handler))))
}

/// Removes the handler of this process. Waits for a running call of the handler, as
/// [`set_handler`] does.
pub fn clear_handler() -> Result<()> {
    replace_handler(None)
}

/// Sets the handler, or removes it.
pub(crate) fn replace_handler(handler: Option<(&Options, Handler)>) -> Result<()> {
    Error::check_fork()?;
    let handler = match handler {
        Some((options, handler)) => Some(Subscriber::new(options.slow, Queue::new(), Some(handler))?),
        None => None,
    };
    match handler {
        Some(handler) => subscribe(handler)?,
        None => unsubscribe_handler(),
    }
    // A handler before the last one may run, too, where an earlier call has ended with a timeout.
    let deadline = Deadline::after(PATIENCE);
    match ended_handlers().iter().all(|earlier| earlier.has_ended_before(&deadline)) {
        true => Ok(()),
        false => Err(Error::timeout(format!(
            "dm_set_event_handler: an earlier handler was still running after {} ms: it gets no more events, but keep what it uses until a later call returns DM_STATUS_OK",
            PATIENCE.as_millis()
        ))),
    }
}

/// A queue that keeps the events of this process from now on. It holds 256 events. Later ones are
/// left out while it is full, and the next event that finds a place says how many. Dropping the
/// value ends the queue.
pub struct Events(Arc<Subscriber>);

impl Events {
    /// Opens a queue. The first events are [`Kind::Joined`] of the worlds that this process is in.
    pub fn open(options: &Options) -> Result<Events> {
        Error::check_fork()?;
        let subscriber = Subscriber::new(options.slow, Queue::with_descriptor()?, None)?;
        subscribe(Arc::clone(&subscriber))?;
        Ok(Events(subscriber))
    }

    /// Returns the next event. Waits for one, but no longer than `timeout`.
    /// Fails in a forked child.
    pub fn next_within(&self, timeout: Duration) -> Result<Option<Event>> {
        Error::check_fork()?;
        Ok(self.0.queue().pop_within(timeout))
    }
}

impl AsFd for Events {
    /// A descriptor that is readable while the queue has events, for poll, select and epoll. Read
    /// nothing from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.queue().descriptor()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // A thread of the parent may have held the lock at the fork.
        if !fork::is_child() {
            unsubscribe(&self.0);
        }
    }
}
