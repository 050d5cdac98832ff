//! epoll, as far as the server needs it.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use hostccl::fork::Private;

/// What is waited for on a descriptor. Errors and a hang-up of both directions are always told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interest {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// What came.
pub(super) struct Ready {
    pub(super) token: u64,
    pub(super) read: bool,
    pub(super) write: bool,
    /// Nothing more can be sent or received.
    pub(super) over: bool,
}

pub(super) struct Poll(Private<OwnedFd>);

impl Poll {
    pub(super) fn new() -> io::Result<Poll> {
        // SAFETY: no arguments to get wrong; the result is checked.
        Private::open(|| unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }).map(Poll)
    }

    pub(super) fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, Interest { read: true, write: false })
    }

    pub(super) fn modify(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    /// Ends the looking at a descriptor that is about to be closed. Closing it is not enough where a process made by `clone` has a copy.
    pub(super) fn remove(&self, fd: RawFd) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, Interest { read: false, write: false });
    }

    fn control(&self, action: i32, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let read = if interest.read { libc::EPOLLIN | libc::EPOLLRDHUP } else { 0 };
        let events = read | if interest.write { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open and the event is valid.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), action, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What is ready, at the latest after `limit`.
    pub(super) fn wait(&self, limit: Option<Duration>, ready: &mut Vec<Ready>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        let millis = match limit {
            None => -1,
            Some(Duration::ZERO) => 0,
            Some(limit) => limit.as_millis().min(60_000) as i32 + 1,
        };
        // SAFETY: the buffer holds as many events as said.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, millis) };
        ready.clear();
        for event in &events[..usize::try_from(count).unwrap_or(0)] {
            let flags = event.events as i32;
            ready.push(Ready {
                token: event.u64,
                read: flags & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0,
                write: flags & libc::EPOLLOUT != 0,
                over: flags & (libc::EPOLLHUP | libc::EPOLLERR) != 0,
            });
        }
    }
}

/// A counter that wakes a poll.
pub(super) fn event() -> io::Result<Private<OwnedFd>> {
    // SAFETY: no arguments to get wrong; the result is checked.
    Private::open(|| unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) })
}

pub(super) fn ring(event: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes to an open eventfd.
    unsafe { libc::write(event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// # Safety
/// `fd` is an open descriptor that nobody else owns, or negative.
unsafe fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's contract.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}
