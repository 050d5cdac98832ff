//! Notices that another host has fallen silent.
//!
//! A process may be stopped, or may read nothing for a long time. Its host is alive all the same,
//! and that is what counts here: its kernel acknowledges data, answers probes, and sends probes of
//! its own. `TCP_USER_TIMEOUT` would not do, because the kernel also counts the time for which a
//! receiver that answers has no room. So this file looks whether any segment has come.
//!
//! Some segment comes at least once in a third of the allowed time, whatever the state of the
//! connection. Where no data is under way, both kernels send keepalive probes. Where data is on the
//! way, it is acknowledged. Where data waits for room at the receiver, the sender's kernel probes
//! more and more seldom, but the receiver's kernel, which has nothing to send, goes on with its
//! keepalive probes.

use std::time::Duration;

use socket2::Socket;

use super::sockets;

/// The longest time between two looks that counts in full. When the time is longer, this process
/// or its whole machine did not run meanwhile, and nothing can be said about the other host.
const MOST_COUNTED: Duration = Duration::from_secs(1);

/// How long nothing has come over a connection.
#[derive(Debug)]
pub(super) struct Silence {
    /// How many segments had come at the last look; `None` where the kernel does not say.
    segments: Option<u32>,
    /// How long the number has not changed.
    lasts: Duration,
}

impl Silence {
    /// Begins to listen at a connection. Where the kernel tells enough, its own limit for answers
    /// is switched off.
    pub(super) fn of(socket: &Socket) -> Silence {
        let segments = sockets::segments_in(socket);
        if segments.is_some() {
            let _ = socket.set_tcp_user_timeout(None);
        }
        Silence { segments, lasts: Duration::ZERO }
    }

    /// Looks whether something has come since the last look, which was `since` ago. Returns how
    /// long nothing has come.
    pub(super) fn look(&mut self, socket: &Socket, since: Duration) -> Duration {
        if self.segments.is_some() {
            let segments = sockets::segments_in(socket);
            self.lasts = if segments == self.segments { self.lasts + since.min(MOST_COUNTED) } else { Duration::ZERO };
            self.segments = segments;
        }
        self.lasts
    }
}
