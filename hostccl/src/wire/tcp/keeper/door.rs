//! The listener: connections that other processes make.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Instant;

use super::{Keeper, LISTENER, PAUSE};
use crate::fork::Private;
use crate::machine;
use crate::wire::tcp::stranger::{NAMED_A_TOKEN, Stranger};

/// The most connections that other processes have made and that have not proved themselves.
const MOST_STRANGERS: usize = 128;

impl Keeper {
    /// Accepts what waits at the listener.
    pub(super) fn accept(&mut self) {
        for _ in 0..MOST_STRANGERS {
            let mut address = None;
            let accepted = Private::open(|| {
                let (socket, from) = self.listener.accept()?;
                address = from.as_socket();
                Ok(socket)
            });
            let socket = match accepted {
                Ok(socket) => socket,
                Err(reason) if reason.kind() == io::ErrorKind::WouldBlock => return,
                Err(reason) => {
                    // The listener stays ready, for example while this process can open no more
                    // files. The thread looks away for a while, and serves the connections.
                    log::debug!("the wire accepts no connection: {}", machine::explained(&reason));
                    self.set.remove(self.listener.as_raw_fd());
                    self.shut_until = Some(Instant::now() + PAUSE);
                    return;
                }
            };
            if socket.set_nonblocking(true).is_err() || self.inner.options.prepare(&socket).is_err() {
                continue;
            }
            if !self.make_room() {
                continue;
            }
            let address = address.map_or_else(|| "a stranger".to_owned(), |address| address.to_string());
            self.enter(Stranger::accepted(socket, address));
        }
    }

    /// Closes the oldest accepted connection among those that have said the least, where there are
    /// too many. Returns false where there is no room, because all of them have named a token that
    /// this process knows, and are about to prove it.
    fn make_room(&mut self) -> bool {
        let accepted = || self.strangers.iter().filter(|(_, stranger)| !stranger.is_mine());
        if accepted().count() < MOST_STRANGERS {
            return true;
        }
        let unknown = accepted().filter(|(_, stranger)| stranger.said() < NAMED_A_TOKEN);
        let oldest = unknown.min_by_key(|(_, stranger)| (stranger.said(), stranger.since)).map(|(number, _)| *number);
        oldest.is_some_and(|number| self.remove(number).is_some())
    }

    /// Looks at the listener again once the pause after a failure is over.
    pub(super) fn open_again(&mut self) {
        let now = Instant::now();
        if self.shut_until.is_some_and(|until| now >= until) {
            let opened = self.set.add(self.listener.as_raw_fd(), LISTENER, false);
            self.shut_until = opened.is_err().then_some(now + PAUSE);
        }
    }
}
