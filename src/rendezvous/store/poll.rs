//! Wraps the parts of epoll and eventfd that the server and the relay need.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use hostccl::fork::Private;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// The most events that one look returns.
const MOST_EVENTS: usize = 256;
/// The longest time that one look takes when it has a limit.
const LONGEST: Duration = Duration::from_secs(60);

/// The events on a descriptor that the loop waits for. Errors and a hang-up of both directions are
/// always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    /// Whether the loop wants to know that there is something to read.
    pub(super) read: bool,
    /// Whether the loop wants to know that there is room to write.
    pub(super) write: bool,
}

/// The events that have happened on a descriptor.
pub(super) struct Ready {
    /// The number under which the descriptor was added.
    pub(super) token: u64,
    /// There is something to read, or the peer has ended its direction.
    pub(super) read: bool,
    /// There is room to write.
    pub(super) write: bool,
    /// Nothing more can be sent or received.
    pub(super) over: bool,
}

/// The descriptors of a server or of a relay, which one thread waits for.
pub(super) struct Poll(Private<OwnedFd>);

impl Poll {
    pub(super) fn new() -> io::Result<Poll> {
        Private::open(|| Ok(epoll::create(CreateFlags::CLOEXEC)?)).map(Poll)
    }

    /// Looks at a descriptor from now on, for something to read.
    pub(super) fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let interest = Interest { read: true, write: false };
        Ok(epoll::add(&*self.0, source, EventData::new_u64(token), flags(interest))?)
    }

    /// Changes the events for which a descriptor is looked at.
    pub(super) fn modify(&self, source: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&*self.0, source, EventData::new_u64(token), flags(interest))?)
    }

    /// Looks no longer at a descriptor that is about to be closed. Closing it is not enough where a
    /// process made by `clone` has a copy.
    pub(super) fn remove(&self, source: impl AsFd) {
        let _ = epoll::delete(&*self.0, source);
    }

    /// Fills `ready` with what has happened, at the latest after `limit`. Nothing happened when a
    /// signal has interrupted the wait.
    pub(super) fn wait(&self, limit: Option<Duration>, ready: &mut Vec<Ready>) {
        let mut buffer = [const { MaybeUninit::uninit() }; MOST_EVENTS];
        // The wait must not end before the limit, so a part of a millisecond counts as a whole one.
        let limit = limit.map(|limit| limit.min(LONGEST).as_micros().div_ceil(1000) as u64);
        let limit = limit.map(|millis| timespec(Duration::from_millis(millis)));
        ready.clear();
        let Ok((events, _)) = epoll::wait(&*self.0, &mut buffer, limit.as_ref()) else { return };
        for event in events {
            let flags = event.flags;
            ready.push(Ready {
                token: event.data.u64(),
                read: flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                write: flags.contains(EventFlags::OUT),
                over: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            });
        }
    }
}

fn flags(interest: Interest) -> EventFlags {
    let read = if interest.read { EventFlags::IN | EventFlags::RDHUP } else { EventFlags::empty() };
    if interest.write { read | EventFlags::OUT } else { read }
}

/// Makes a counter that wakes a poll.
pub(super) fn event() -> io::Result<Private<OwnedFd>> {
    Private::open(|| Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Wakes the poll that looks at this counter.
pub(super) fn ring(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Returns the time as the kernel takes it. The time is a day at most.
pub(super) fn timespec(time: Duration) -> Timespec {
    let time = time.min(Duration::from_secs(86_400));
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
