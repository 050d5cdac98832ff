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
    fn most_clients(&self) -> usize {
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
                // A channel that ends gives no descriptor back.
                let is_of_use = |client| !lacks_descriptors || self.has_socket(client);
                let hesitant = self.connections.hesitant(is_of_use);
                searched = hesitant.is_none();
                if searched && lacks_descriptors {
                    self.shared.starved.store(true, Ordering::SeqCst);
                }
                match hesitant.or_else(|| self.dispensable(lacks_descriptors)) {
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

    fn has_socket(&self, client: Client) -> bool {
        self.clients.get(&client).is_some_and(|connection| matches!(connection.link, Link::Socket(_)))
    }

    /// Makes the client of a channel that begins, in a turn of its trunk. Where there is no room
    /// for it, and no client makes room, the channel ends at once.
    pub(super) fn open_channel(&mut self, trunk: Client, number: u32) {
        let Some(connection) = self.clients.get_mut(&trunk) else { return };
        let Some(state) = &mut connection.trunk else { return };
        if state.last.is_some_and(|last| number <= last) {
            return;
        }
        state.last = Some(number);
        if self.clients.len() >= self.most_clients() {
            // A trunk is admitted and has asked for something, so the hesitant client is never the
            // trunk whose turn it is.
            let Some(hesitant) = self.connections.hesitant(|_| true) else {
                return self.send_on_trunk(trunk, &channels::end(number));
            };
            self.leave(hesitant);
        }
        let client = self.next;
        let Some(connection) = self.clients.get_mut(&trunk) else { return };
        let address = connection.address;
        if let Some(state) = &mut connection.trunk {
            state.channels.insert(number, client);
        }
        self.next += 1;
        self.channel_count += 1;
        let link = Link::Channel(Channel::new(trunk, number));
        self.clients.insert(client, Box::new(Connection::new(link, address)));
        self.connections.came(client, address);
    }

    /// Returns the client that makes room, among the clients from the address with the most
    /// connections: the newest client that is idle, waits for nothing and has left no last word.
    /// If there is no such client and the address leaves little room to the others, returns the
    /// newest client from that address.
    /// Where a descriptor is needed, only a client with a socket counts.
    fn dispensable(&self, needs_descriptor: bool) -> Option<Client> {
        let (address, is_greedy) = self.connections.busiest()?;
        let is_idle = |connection: &Connection| {
            connection.trunk.is_none()
                && !connection.has_more()
                && connection.outgoing.left() == 0
                && connection.active.elapsed() > HESITANT
        };
        let is_of_use = |connection: &Connection| !needs_descriptor || matches!(connection.link, Link::Socket(_));
        let is_there = |connection: &Connection| connection.address == address && is_of_use(connection);
        let there = || self.clients.iter().filter(|(_, connection)| is_there(connection));
        let idle = there().filter(|(_, connection)| is_idle(connection)).map(|(client, _)| *client);
        let last = idle.filter(|client| !self.table.has_stake(*client)).max();
        last.or_else(|| there().map(|(client, _)| *client).max().filter(|_| is_greedy))
    }
}
