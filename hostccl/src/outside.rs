//! The sleep of operations that do not wait for a word of a communicator. A join over several
//! hosts, for example, waits for a connection to the maker of the unique id.

use std::os::fd::RawFd;
use std::time::Duration;

/// The longest sleep of a thread that waits for connections only, because `ncclCommAbort` cannot
/// wake that sleep.
pub(crate) const SLICE: Duration = Duration::from_millis(20);
/// The longest sleep of a thread that waits for ranks of a communicator and for connections.
pub(crate) const MIXED_SLICE: Duration = Duration::from_millis(1);

/// The longest sleep of a thread that waits for no connection, but for time or for the wire.
const NO_CONNECTION_SLICE: Duration = Duration::from_millis(2);

/// Sleeps until one of the descriptors has become readable, or the time is up. The flag of a
/// descriptor says whether the sleep also ends when the descriptor becomes writable.
pub(crate) fn sleep(descriptors: impl Iterator<Item = (RawFd, bool)>, longest: Duration) {
    let poll = |(fd, writable)| libc::pollfd {
        fd,
        events: if writable { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
        revents: 0,
    };
    let mut polls: Vec<libc::pollfd> = descriptors.map(poll).collect();
    let longest = if polls.is_empty() { longest.min(NO_CONNECTION_SLICE) } else { longest };
    // A part of a millisecond counts as a whole one. Otherwise a caller with so little time would
    // look again and again until the time is up.
    let millis = longest.as_micros().div_ceil(1000);
    // SAFETY: the array is valid for its length.
    unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, millis as libc::c_int) };
}
