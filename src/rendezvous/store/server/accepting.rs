//! Lets clients in.

use std::io::ErrorKind;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hostccl::fork::Private;

use super::super::channels;
use super::super::poll::Interest;
use super::super::table::Client;
use super::client::Connection;
use super::clients::Serving;
use super::connections::{HESITANT, MAX_CLIENTS, accept};
use super::link::{Channel, Link};

/// How many connections are accepted before the clients that are there get their turn.
const ACCEPT_TURN: usize = 32;

/// How long the server waits before the next try when there is no descriptor for another
/// connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Serving {
    /// Sets whether the loop waits for new connections.
    pub(super) fn listen(&self, read: bool) {
        for (token, listener) in (0..).zip(&self.listeners) {
            let _ = self.poll.modify(&**listener, token, Interest { read, write: false });
        }
    }

    /// Returns how many connections there may be.
    pub(super) fn most_clients(&self) -> usize {
        match self.shared.room.load(Ordering::SeqCst) {
            0 => MAX_CLIENTS,
            most => most,
        }
    }

    /// Accepts no connections for a moment. Without the pause the loop would try again at once,
    /// although there is still no room.
    fn pause(&mut self) {
        self.listen(false);
        self.paused = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Accepts the connections that wait at this listener, up to [`ACCEPT_TURN`].
    pub(super) fn accept(&mut self, listener: usize) {
        // Without the bound a flood of new connections would make the existing clients wait.
        for _ in 0..ACCEPT_TURN {
            let mut searched = false;
            let lacks_descriptors = self.connections.is_out_of_descriptors(self.sockets());
            if lacks_descriptors || self.clients.len() >= self.most_clients() {
                let hesitant = self.connections.hesitant();
                searched = hesitant.is_none();
                if searched && lacks_descriptors {
                    self.shared.starved.store(true, Ordering::SeqCst);
                }
                match hesitant.or_else(|| self.dispensable()) {
                    Some(client) => self.leave(client),
                    None => return self.pause(),
                }
            }
            match accept(&self.listeners[listener]) {
                Ok((stream, address)) => {
                    self.connections.look_at(&stream, self.sockets());
                    self.welcome(stream, address);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE) if self.connections.ran_out(self.sockets()) => {}
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        self.shared.starved.store(true, Ordering::SeqCst);
                        return self.pause();
                    }
                    _ => {}
                },
            }
            // The search looks at all clients, so there is at most one search in a turn.
            if searched {
                return;
            }
        }
    }

    fn welcome(&mut self, stream: Private<TcpStream>, address: IpAddr) {
        let client = self.next;
        self.next += 1;
        if self.poll.add(&*stream, client).is_ok() {
            self.clients.insert(client, Box::new(Connection::new(Link::Socket(stream), address)));
            self.connections.came(client, address);
        }
    }

    /// Makes the client of a new channel. Returns `None` where the channel has ended before, or
    /// where there is no room for it.
    pub(super) fn open_channel(&mut self, trunk: Client, number: u32) -> Option<Client> {
        let (client, is_full) = (self.next, self.clients.len() >= self.most_clients());
        let connection = self.clients.get_mut(&trunk)?;
        let address = connection.address;
        let state = connection.trunk.as_mut()?;
        if state.last.is_some_and(|last| number <= last) {
            return None;
        }
        state.last = Some(number);
        if is_full {
            let mut frames = Vec::new();
            channels::put_end(&mut frames, number);
            self.send_on_trunk(trunk, &frames);
            return None;
        }
        state.channels.insert(number, client);
        self.next += 1;
        self.channels += 1;
        let link = Link::Channel(Channel::new(trunk, number));
        self.clients.insert(client, Box::new(Connection::new(link, address)));
        self.connections.came(client, address);
        Some(client)
    }

    /// Returns the client that makes room, among the clients from the address with the most
    /// connections: the newest client that is idle, waits for nothing and has left no last word.
    /// If there is no such client and the address leaves little room to the others, returns the
    /// newest client from that address.
    fn dispensable(&self) -> Option<Client> {
        let (address, is_greedy) = self.connections.busiest()?;
        let is_idle = |connection: &Connection| {
            connection.trunk.is_none()
                && !connection.has_more()
                && connection.outgoing.left() == 0
                && connection.active.elapsed() > HESITANT
        };
        let there = || self.clients.iter().filter(|(_, connection)| connection.address == address);
        let idle = there().filter(|(_, connection)| is_idle(connection)).map(|(client, _)| *client);
        let last = idle.filter(|client| !self.table.has_stake(*client)).max();
        last.or_else(|| there().map(|(client, _)| *client).max().filter(|_| is_greedy))
    }
}
