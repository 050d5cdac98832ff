//! The state that the server's handle and its thread share.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

/// How long a new connection has for its greeting.
pub const GREETING: Duration = Duration::from_secs(10);

/// The most bytes of incomplete requests, unread replies, and values that only replies keep, over
/// all clients.
pub const MAX_BUFFERED: usize = 256 << 20;

/// The state that the server's handle and its thread share.
pub(super) struct Shared {
    /// How many clients are connected.
    pub(super) clients: AtomicUsize,
    /// Whether at some time there was no descriptor for another connection, because this process
    /// had as many files open as it may.
    pub(super) starved: AtomicBool,
    /// How many clients may be connected; 0 when the number of ranks is not known.
    pub(super) room: AtomicUsize,
    /// The most work of one small turn (server/serving.rs).
    pub(super) small_turn: AtomicUsize,
    /// The most work of one round.
    pub(super) round: AtomicUsize,
    /// The most work between two looks at the sockets.
    pub(super) look: AtomicUsize,
}
