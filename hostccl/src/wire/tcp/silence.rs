//! Detects that another host has fallen silent.
//!
//! A process may be stopped, or may read nothing for a long time. Its host is alive all the same:
//! the host's kernel acknowledges data, answers probes, and sends probes of its own. Only the host
//! counts here. `TCP_USER_TIMEOUT` cannot be used, because it also counts the time in which the
//! receiver answers but has no room. So this file counts the segments that come.
//!
//! While the host is alive, a segment comes at least once in a third of the allowed time (or once a
//! second, if that is longer), whatever the state of the connection. Where no data is under way,
//! both kernels send keepalive probes. Where data is on the way, it is acknowledged. Where data
//! waits for room at the receiver, the sender's kernel probes more and more seldom, but the
//! receiver's kernel, which has nothing to send, goes on with its keepalive probes.

use std::time::Duration;

use socket2::Socket;

use super::sockets;

/// The longest time between two looks that counts in full. If more time has passed, this process
/// or its whole machine did not run, so the time says nothing about the other host.
const MOST_COUNTED: Duration = Duration::from_secs(1);

/// The time for which nothing has come over a connection.
#[derive(Debug)]
pub(crate) struct Silence {
    /// The number of segments that had come at the last look; `None` where the kernel does not
    /// tell.
    segments: Option<u32>,
    /// The time for which `segments` has not changed.
    lasts: Duration,
}

impl Silence {
    /// Begins to watch a connection. Where the kernel tells the number of segments, this switches
    /// the kernel's own limit (`TCP_USER_TIMEOUT`) off.
    pub(crate) fn of(socket: &Socket) -> Silence {
        let segments = sockets::segments_in(socket);
        if segments.is_some() {
            let _ = socket.set_tcp_user_timeout(None);
        }
        Silence { segments, lasts: Duration::ZERO }
    }

    /// Looks whether a segment has come since the last look, which was `since` ago. Returns the
    /// time for which nothing has come; always 0 where the kernel does not tell.
    pub(crate) fn look(&mut self, socket: &Socket, since: Duration) -> Duration {
        if self.segments.is_some() {
            let segments = sockets::segments_in(socket);
            self.lasts = if segments == self.segments { self.lasts + since.min(MOST_COUNTED) } else { Duration::ZERO };
            self.segments = segments;
        }
        self.lasts
    }
}
