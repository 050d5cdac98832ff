//! The calls of a group: each kind of call that a thread can collect or perform.

use std::sync::Arc;
use std::time::Duration;

use crate::call_name::{NO_TAG, Name};
use crate::collective::{Call, Collective, Ragged};
use crate::comm::Comm;
use crate::error::Result;
use crate::hosts::Spanning;
use crate::message::{Message, Side};
use crate::operation::Operation;
use crate::places::Place;
use crate::progress::Holder;
use crate::remote_message::RemoteMessage;
use crate::setup::{ChildInit, Init};

/// One call of a group.
#[allow(clippy::large_enum_variant, reason = "the larger ones are common, and outside a group they live on the stack")]
pub(crate) enum Task {
    /// The call joins a communicator by a unique id, or grows one.
    Init(Init),
    /// The call makes a communicator of ranks of another one.
    Child(ChildInit),
    /// The call is a collective among ranks that share a segment.
    Collective(Collective),
    /// The call is a collective over several hosts.
    Spanning(Box<Spanning>),
    /// The call is a send or a receive.
    Message(Message),
    /// The call is a send to a rank of another host, or a receive from one.
    Remote(RemoteMessage),
}

impl Task {
    /// Returns a collective that has not begun. `ragged` has the counts where each rank has its
    /// own. Fails when the communicator takes no more calls.
    ///
    /// # Safety
    /// The buffers hold what the call says, and stay valid until the collective is dropped.
    #[inline]
    pub(crate) unsafe fn collective(comm: Arc<Comm>, call: Call, ragged: Option<Ragged>, name: Name) -> Result<Task> {
        // SAFETY: the caller's contract.
        unsafe {
            match comm.span {
                None => {
                    comm.check_open()?;
                    Ok(Task::Collective(Collective::new(comm, call, ragged.map(Box::new), name)))
                }
                Some(_) => Ok(Task::Spanning(Box::new(Spanning::new(comm, call, ragged, name)?))),
            }
        }
    }

    /// Sets how long the call may wait without progress. With `None` the time of its communicator
    /// applies. A call that joins a communicator has the time of its handle.
    #[cold]
    pub(crate) fn set_timeout(&mut self, timeout: Option<Duration>) {
        match self {
            Task::Init(_) => {}
            Task::Child(child) => child.call_timeout = timeout,
            Task::Collective(collective) => collective.call_timeout = timeout,
            Task::Spanning(collective) => collective.call_timeout = timeout,
            Task::Message(message) => message.call_timeout = timeout,
            Task::Remote(message) => message.call_timeout = timeout,
        }
    }

    /// The lane in which the call takes place. Calls with the same lane take place one after
    /// another. Returns `None` for a call that depends on no other call.
    pub(crate) fn lane(&self) -> Option<(usize, Place, u64)> {
        let (comm, place, name) = match self {
            Task::Init(init) => init.lane().map(|(comm, name)| (comm, Place::Collectives, name))?,
            Task::Child(child) => match child.name() {
                Some(name) => (child.parent(), Place::Collectives, name),
                // A shrink takes no turns with other calls. Two shrinks would offer their segments
                // in the same place.
                None => return Some((Arc::as_ptr(child.parent()).addr(), Place::Collectives, NO_TAG)),
            },
            Task::Collective(collective) => (collective.comm()?, Place::Collectives, *collective.name()),
            Task::Spanning(collective) => (collective.comm()?, Place::Collectives, *collective.name()),
            Task::Message(message) => (message.communicator(), message.place(), *message.name()),
            Task::Remote(message) => {
                // These places only sort calls into lanes. Ranks of other hosts come after the
                // seats of this one.
                let (comm, peer) = (message.communicator(), message.communicator().nranks + message.peer());
                let place = if matches!(message.side(), Side::Send(_)) { Place::To(peer) } else { Place::From(peer) };
                (comm, place, *message.name())
            }
        };
        Some((Arc::as_ptr(comm).addr(), place, name.tag))
    }

    /// Whether the caller waits for the end of the call. Other calls usually take place in the
    /// background (see `group::perform`).
    pub(crate) fn blocks(&self) -> bool {
        match self {
            Task::Init(init) => init.blocking(),
            Task::Child(child) => child.blocking(),
            Task::Collective(_) | Task::Spanning(_) | Task::Message(_) | Task::Remote(_) => true,
        }
    }
}

impl Holder for Task {
    fn operation(&self) -> &dyn Operation {
        match self {
            Task::Init(init) => init,
            Task::Child(child) => child,
            Task::Collective(collective) => collective,
            Task::Spanning(collective) => &**collective,
            Task::Message(message) => message,
            Task::Remote(message) => message,
        }
    }

    fn operation_mut(&mut self) -> &mut dyn Operation {
        match self {
            Task::Init(init) => init,
            Task::Child(child) => child,
            Task::Collective(collective) => collective,
            Task::Spanning(collective) => &mut **collective,
            Task::Message(message) => message,
            Task::Remote(message) => message,
        }
    }
}
