//! What the server's handle and its thread share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use hostccl::fork::Private;

/// How long a new connection has for its greeting.
pub const GREETING: Duration = Duration::from_secs(10);

/// The most bytes of incomplete requests, unread replies, and values that only replies keep, over
/// all clients.
pub const MAX_BUFFERED: usize = 256 << 20;

pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) wake: Private<OwnedFd>,
    pub(super) clients: AtomicUsize,
    /// Whether a connection could not be accepted because this process has as many files open as it
    /// may.
    pub(super) starved: AtomicBool,
    /// How many clients may be connected; 0 when the number of ranks is not known.
    pub(super) room: AtomicUsize,
    /// The most work of one small turn, of one round, and of everything between two looks at the
    /// sockets (server/serving.rs).
    pub(super) small_turn: AtomicUsize,
    pub(super) round: AtomicUsize,
    pub(super) look: AtomicUsize,
}
