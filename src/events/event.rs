//! An event, and the options of a handler or a queue.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The time after which a waiting call is slow, unless the options say another time.
const SLOW: Duration = Duration::from_secs(10);

/// The kind of an event. The numbers are those of C's `DM_EVENT_` constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Kind {
    /// This rank has joined its world, or ranks have joined in a recovery and need the state of
    /// the training.
    Joined = 1,
    /// A call of this rank has waited for longer than the given time.
    Slow = 2,
    /// Ranks are lost.
    Lost = 3,
    /// A rank has ended a mesh by `dm_abort`, or this rank has ended its world by
    /// `dm_world_abort`.
    Aborted = 4,
    /// `dm_recover` or `dm_shrink` has given the mesh with which the job goes on.
    Recovered = 5,
}

/// One event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// The kind of the event.
    pub kind: Kind,
    /// When this process noticed it.
    pub time: SystemTime,
    /// This process's rank in the world. For a slow call that belongs to no world, its rank in the
    /// communicator.
    pub rank: i32,
    /// The number of ranks of the world, or of that communicator.
    pub world_size: i32,
    /// The epoch of the world. After a recovery, this is the new epoch.
    pub epoch: u64,
    /// The world ranks that the event is about, in ascending order: the ranks that have joined,
    /// the ranks for which the call waits, the ranks that are lost, the ranks that have aborted,
    /// or the ranks that were lost or left out in a recovery. For [`Kind::Slow`] it has only the
    /// ranks that this process knows (docs/events.md), and may be empty.
    pub ranks: Vec<i32>,
    /// For a slow call, the name of its group (`mesh/tp`, or `the world`); `None` for `dm_recover`.
    /// For other events, the name of the mesh that was aborted or with which the job goes on;
    /// `None` where the event is about the world.
    pub group: Option<String>,
    /// The name of the dimension along which a slow call was made.
    pub dimension: Option<String>,
    /// The work of a slow call: `all-reduce`, or for a call like `dm_flatten` its text.
    pub operation: Option<String>,
    /// The number of a slow call in its group, from 1; `None` for `dm_recover` and
    /// `dm_stream_wait`.
    pub call: Option<u64>,
    /// How long a slow call has waited.
    pub waited: Option<Duration>,
    /// How many events were left out before this one because the queue was full.
    pub dropped: u64,
    /// A description of the event in one line.
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

    /// Returns the event with these ranks.
    #[must_use]
    pub(crate) fn about(self, ranks: Vec<i32>) -> Event {
        Event { ranks, ..self }
    }

    /// Returns the event with the group of that name.
    #[must_use]
    pub(crate) fn of_group(self, group: String) -> Event {
        Event { group: Some(group), ..self }
    }
}

/// The options of a handler or a queue.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// The time after which a waiting call is slow. The call gives an event then, and another one
    /// whenever the time that it has waited has doubled.
    pub slow: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { slow: SLOW }
    }
}

impl Options {
    /// Sets the time after which a waiting call is slow.
    #[must_use]
    pub fn slow(self, slow: Duration) -> Options {
        Options { slow, ..self }
    }
}

/// A handler, as the thread calls it.
pub(crate) type Handler = Arc<dyn Fn(&Event) + Send + Sync>;
