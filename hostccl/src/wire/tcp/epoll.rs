//! The kernel's event queues.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::fork::Private;

/// A set of descriptors. The kernel tells which of them are ready.
#[derive(Debug)]
pub(super) struct Epoll(Private<OwnedFd>);

/// A descriptor that is ready.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    /// The number under which the descriptor was added.
    pub(super) number: u64,
}

/// The most descriptors that one call returns.
const MOST: usize = 64;

/// Turns the answer of a system call into a result.
fn checked(answer: i32) -> io::Result<i32> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

impl Epoll {
    pub(super) fn new() -> io::Result<Epoll> {
        Private::open(|| {
            // SAFETY: the call has no pointers, and the descriptor is new.
            unsafe { checked(libc::epoll_create1(libc::EPOLL_CLOEXEC)).map(|fd| OwnedFd::from_raw_fd(fd)) }
        })
        .map(Epoll)
    }

    fn control(&self, what: i32, fd: RawFd, number: u64, writes: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | if writes { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: events as u32, u64: number };
        // SAFETY: the kernel only reads the event.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd, &raw mut event) }).map(drop)
    }

    /// Adds a descriptor. The descriptor is ready when it can be read. With `writes` the
    /// descriptor is also ready when it can be written.
    pub(super) fn add(&self, fd: RawFd, number: u64, writes: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, number, writes)
    }

    /// Sets whether the kernel also reports the descriptor when it can be written.
    pub(super) fn change(&self, fd: RawFd, number: u64, writes: bool) {
        let _ = self.control(libc::EPOLL_CTL_MOD, fd, number, writes);
    }

    /// Removes a descriptor.
    pub(super) fn remove(&self, fd: RawFd) {
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, false);
    }

    /// Waits until a descriptor is ready or the time is up. Returns the descriptors that are ready.
    pub(super) fn wait(&self, timeout: Duration) -> impl Iterator<Item = Ready> + use<> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        let millis = timeout.as_nanos().div_ceil(1_000_000).min(1 << 30) as i32;
        // SAFETY: the array has room for as many events as the call says.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), MOST as i32, millis) };
        events.into_iter().take(count.max(0) as usize).map(|event| Ready { number: event.u64 })
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A descriptor that a thread makes ready to wake another thread.
#[derive(Debug)]
pub(super) struct Bell(Private<OwnedFd>);

impl Bell {
    pub(super) fn new() -> io::Result<Bell> {
        Private::open(|| {
            // SAFETY: the call has no pointers, and the descriptor is new.
            unsafe {
                checked(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)).map(|fd| OwnedFd::from_raw_fd(fd))
            }
        })
        .map(Bell)
    }

    /// Makes the descriptor ready.
    pub(super) fn ring(&self) {
        // SAFETY: the kernel reads eight bytes of the number. A full counter is ready already.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const ONE).cast(), 8) };
    }

    /// Makes the descriptor unready.
    pub(super) fn still(&self) {
        let mut count = 0_u64;
        // SAFETY: the kernel writes eight bytes into the number.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

/// The number that [`Bell::ring`] adds.
static ONE: u64 = 1;

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits until one of these descriptors can be read, or the time is up.
pub(super) fn wait_for(descriptors: &[RawFd], timeout: Duration) {
    let mut polls: Vec<libc::pollfd> =
        descriptors.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let millis = timeout.as_nanos().div_ceil(1_000_000).min(1 << 30) as i32;
    // SAFETY: the array has as many entries as the call says.
    unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as _, millis) };
}
