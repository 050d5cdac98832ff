//! The listener, which accepts the connections that other processes make.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{SockAddr, Socket};

use crate::fork::Private;
use crate::machine;
use crate::wire::tcp::epoll::Epoll;

/// The time for which the thread leaves the listener alone after `accept` has failed.
const PAUSE: Duration = Duration::from_millis(50);

/// The listener, and its place in the thread's epoll set.
pub(super) struct Door {
    /// The listening socket.
    listener: Private<Socket>,
    /// The number of the listener in the set.
    number: u64,
    /// A descriptor that is closed to accept a connection when this process can open no more files.
    /// That connection gets the reason, and ends. `None` while such a connection is open.
    spare: Option<Private<File>>,
    /// Why the last connection could not be accepted; `None` where it could.
    pub(super) trouble: Option<String>,
    /// The end of the pause after `accept` has failed. During the pause the listener is not in the
    /// set. `None` while there is no pause.
    pub(super) shut_until: Option<Instant>,
}

impl Door {
    /// Puts the listener into `set`.
    pub(super) fn new(listener: Private<Socket>, set: &Epoll, number: u64) -> io::Result<Door> {
        set.add(listener.as_raw_fd(), number, false)?;
        Ok(Door { listener, number, spare: spare(), trouble: None, shut_until: None })
    }

    /// Accepts a connection that waits at the listener, if there is one. Returns the connection
    /// with its address, and whether this process can open no more files. If this process can open
    /// none, the connection has taken the place of the spare descriptor, and must end soon.
    pub(super) fn accept(&mut self, set: &Epoll) -> Option<(Private<Socket>, SockAddr, bool)> {
        match take(&self.listener) {
            Ok((socket, from)) => {
                self.trouble = None;
                Some((socket, from, false))
            }
            Err(reason) if reason.kind() == io::ErrorKind::WouldBlock => None,
            Err(reason) => {
                let why = machine::explained(&reason);
                if self.trouble.is_none() {
                    log::warn!("the wire accepts no connection: {why}");
                }
                self.trouble = Some(why);
                let is_full = matches!(reason.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
                if is_full && self.spare.take().is_some() {
                    if let Ok((socket, from)) = take(&self.listener) {
                        return Some((socket, from, true));
                    }
                }
                // The listener stays readable. It leaves the set for a while, so that the thread
                // can serve connections.
                set.remove(self.listener.as_raw_fd());
                self.shut_until = Some(Instant::now() + PAUSE);
                None
            }
        }
    }

    /// Puts the listener back into the set once the pause after a failure is over. Opens the spare
    /// descriptor again where that is possible.
    pub(super) fn open_again(&mut self, set: &Epoll) {
        if self.spare.is_none() {
            self.spare = spare();
        }
        let now = Instant::now();
        if self.shut_until.is_some_and(|until| now >= until) {
            let opened = set.add(self.listener.as_raw_fd(), self.number, false);
            self.shut_until = opened.is_err().then_some(now + PAUSE);
        }
    }
}

/// Opens a descriptor whose only use is to be closed later.
fn spare() -> Option<Private<File>> {
    Private::open(|| File::open("/dev/null")).ok()
}

/// Accepts a connection.
fn take(listener: &Socket) -> io::Result<(Private<Socket>, SockAddr)> {
    let mut address = None;
    let socket = Private::open(|| {
        let (socket, from) = listener.accept()?;
        address = Some(from);
        Ok(socket)
    })?;
    address.map(|from| (socket, from)).ok_or_else(|| io::ErrorKind::NotConnected.into())
}
