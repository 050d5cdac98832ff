//! The listener, which accepts the connections that other processes make.

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
    /// The end of the pause after `accept` has failed. During the pause the listener is not in the
    /// set. `None` while there is no pause.
    pub(super) shut_until: Option<Instant>,
}

impl Door {
    /// Puts the listener into `set`.
    pub(super) fn new(listener: Private<Socket>, set: &Epoll, number: u64) -> io::Result<Door> {
        set.add(listener.as_raw_fd(), number, false)?;
        Ok(Door { listener, number, shut_until: None })
    }

    /// Accepts a connection that waits at the listener, if there is one.
    pub(super) fn accept(&mut self, set: &Epoll) -> Option<(Private<Socket>, SockAddr)> {
        let mut address = None;
        let accepted = Private::open(|| {
            let (socket, from) = self.listener.accept()?;
            address = Some(from);
            Ok(socket)
        });
        match accepted {
            Ok(socket) => Some((socket, address?)),
            Err(reason) if reason.kind() == io::ErrorKind::WouldBlock => None,
            Err(reason) => {
                // The listener stays readable, for example while this process can open no more
                // files. It leaves the set for a while, so that the thread can serve connections.
                log::debug!("the wire accepts no connection: {}", machine::explained(&reason));
                set.remove(self.listener.as_raw_fd());
                self.shut_until = Some(Instant::now() + PAUSE);
                None
            }
        }
    }

    /// Puts the listener back into the set once the pause after a failure is over.
    pub(super) fn open_again(&mut self, set: &Epoll) {
        let now = Instant::now();
        if self.shut_until.is_some_and(|until| now >= until) {
            let opened = set.add(self.listener.as_raw_fd(), self.number, false);
            self.shut_until = opened.is_err().then_some(now + PAUSE);
        }
    }
}
