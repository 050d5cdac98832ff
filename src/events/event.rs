//! What an event is, and what those get who want events.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// After this time a call that waits is slow, unless the options say another time.
const SLOW: Duration = Duration::from_secs(10);

/// What has happened. The numbers are those of C's `DM_EVENT_` constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Kind {
    /// Ranks have joined: this one its world, or by a recovery the ranks that need the state of
    /// the training.
    Joined = 1,
    /// A call of this rank has waited for longer than the given time.
    Slow = 2,
    /// Ranks are lost.
    Lost = 3,
    /// A rank has ended a mesh by `dm_abort`, or this rank its world by `dm_world_abort`.
    Aborted = 4,
    /// `dm_recover` or `dm_shrink` has given the mesh with which the job goes on.
    Recovered = 5,
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// What has happened.
    pub kind: Kind,
    /// When this process noticed it.
    pub time: SystemTime,
    /// This process's rank in the world; in the communicator for a slow call that belongs to no
    /// world.
    pub rank: i32,
    /// The number of ranks of the world, or of that communicator.
    pub world_size: i32,
    /// The epoch of the world; after a recovery the new one.
    pub epoch: u64,
    /// The world ranks that the event is about, in ascending order: the ranks that have joined,
    /// for which the call waits, that are lost, that have aborted, or that were lost or left out
    /// in a recovery. For [`Kind::Slow`] those that this host shows; empty where it shows none.
    pub ranks: Vec<i32>,
    /// The name of the group of ranks: of a slow call its group (`mesh/tp`, or `the world`), and
    /// the mesh that was aborted or that goes on. `None` where the event is about the world.
    pub group: Option<String>,
    /// The name of the dimension along which a slow call was made.
    pub dimension: Option<String>,
    /// What a slow call does: `all-reduce`, or for a call like `dm_flatten` its text.
    pub operation: Option<String>,
    /// The number of a slow call in its group, from 1.
    pub call: Option<u64>,
    /// How long a slow call has waited.
    pub waited: Option<Duration>,
    /// How many events were left out before this one because the queue was full.
    pub dropped: u64,
    /// One line that says it all.
    pub message: String,
}

impl Event {
    /// An event of rank `rank` of a world of `world_size` ranks, which is about the world.
    pub(crate) fn new(kind: Kind, (rank, world_size): (usize, usize), epoch: u64, message: String) -> Event {
        Event {
            kind,
            time: SystemTime::now(),
            rank: i32::try_from(rank).unwrap_or(i32::MAX),
            world_size: i32::try_from(world_size).unwrap_or(i32::MAX),
            epoch,
            ranks: Vec::new(),
            group: None,
            dimension: None,
            operation: None,
            call: None,
            waited: None,
            dropped: 0,
            message,
        }
    }

    /// The event, about these ranks.
    #[must_use]
    pub(crate) fn about(self, ranks: Vec<i32>) -> Event {
        Event { ranks, ..self }
    }

    /// The event, about the group of that name.
    #[must_use]
    pub(crate) fn of_group(self, group: String) -> Event {
        Event { group: Some(group), ..self }
    }
}

/// What a handler or a queue gets.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// After this time a call that waits is slow. It is told of again whenever the time has
    /// doubled.
    pub slow: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { slow: SLOW }
    }
}

impl Options {
    /// The options with that time after which a call is slow.
    #[must_use]
    pub fn slow(self, slow: Duration) -> Options {
        Options { slow, ..self }
    }
}

/// A handler, as the thread calls it.
pub(crate) type Handler = Arc<dyn Fn(&Event) + Send + Sync>;
