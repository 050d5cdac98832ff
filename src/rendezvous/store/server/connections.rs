//! Decides who may be connected. Descriptors and memory are finite, so there is a limit. When the
//! limit is reached, the connections that a job needs least make room.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use hostccl::fork::Private;
use rustix::net::{SocketFlags, acceptfrom_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::table::Client;

/// The most connections when the number of ranks is not known.
pub(super) const MAX_CLIENTS: usize = 1 << 18;
/// How many connections each rank may have when the number of ranks is known. Each thread of a rank
/// that is in a call has a connection of its own.
const OF_A_RANK: usize = 16;
/// How many more connections there may be, because other programs may meet in this store too.
const OF_OTHERS: usize = 1024;
/// How long a client may say nothing before it may have to make room.
pub(super) const HESITANT: Duration = Duration::from_secs(1);
/// How many clients are looked at for one that makes room.
const LOOKED_AT: usize = 256;
/// The part of all descriptors that is left to the process itself: one in `RESERVED`, but at most
/// `MAX_RESERVE`. The part is small, because the ranks need nearly all descriptors when there are
/// few.
const RESERVED: usize = 8;
const MAX_RESERVE: usize = 1024;

/// Returns how many connections a world of that many ranks may have.
pub(super) fn for_ranks(ranks: usize) -> usize {
    ranks.saturating_mul(OF_A_RANK).saturating_add(OF_OTHERS)
}

/// The connections that exist, as far as they matter for the question who is let in.
#[derive(Default)]
pub(in crate::rendezvous::store) struct Connections {
    /// How many connections come from each address.
    by_address: HashMap<IpAddr, usize>,
    /// Connections that are not admitted, and when they came. These connections are ordered by
    /// their numbers, so the oldest one is the first.
    strangers: BTreeMap<Client, Instant>,
    /// Connections that are admitted and have asked for nothing, and when they were admitted.
    silent: BTreeMap<Client, Instant>,
    /// The connections of `silent`, in the order in which they were admitted. A connection may take
    /// long to greet, so this is not the order of their numbers.
    by_admission: BTreeSet<(Instant, Client)>,
    /// How many descriptors the server may use under the present limit of the process.
    usable: usize,
    /// How many connections there were when the next one got no descriptor, or one that is reserved
    /// for the process. `None` while descriptors suffice.
    fits: Option<usize>,
}

impl Connections {
    pub(super) fn came(&mut self, client: Client, address: IpAddr) {
        *self.by_address.entry(address).or_default() += 1;
        self.strangers.insert(client, Instant::now());
    }

    pub(super) fn admitted(&mut self, client: Client) {
        self.strangers.remove(&client);
        let now = Instant::now();
        self.silent.insert(client, now);
        self.by_admission.insert((now, client));
    }

    pub(super) fn asked(&mut self, client: Client) {
        if let Some(since) = self.silent.remove(&client) {
            self.by_admission.remove(&(since, client));
        }
    }

    /// Forgets a client that has gone; `sockets` connections still have sockets.
    pub(super) fn left(&mut self, client: Client, address: IpAddr, sockets: usize) {
        self.strangers.remove(&client);
        self.asked(client);
        // The process may have given descriptors back.
        self.fits = self.fits.filter(|fits| sockets > fits - fits / 8);
        if let Some(count) = self.by_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    /// Returns the oldest stranger, and when it came.
    pub(super) fn oldest_stranger(&self) -> Option<(Client, Instant)> {
        self.strangers.first_key_value().map(|(client, came)| (*client, *came))
    }

    /// Whether a lack of descriptors leaves no room for one more connection beside `sockets` that
    /// have sockets.
    pub(in crate::rendezvous::store) fn is_out_of_descriptors(&self, sockets: usize) -> bool {
        self.fits.is_some_and(|fits| sockets >= fits)
    }

    /// Returns the client that makes room first, because no job needs it: the oldest one that is
    /// not admitted, or else the one that was admitted first among those that have asked for
    /// nothing. Only clients count for which `is_of_use` is true, and only the first ones are
    /// looked at.
    pub(super) fn hesitant(&self, is_of_use: impl Fn(Client) -> bool) -> Option<Client> {
        let late = |(since, client): (Instant, Client)| (since.elapsed() > HESITANT).then_some(client);
        let strangers = self.strangers.iter().map(|(client, came)| (*came, *client));
        let mut strangers = strangers.take(LOOKED_AT).filter(|(_, client)| is_of_use(*client));
        let mut silent = self.by_admission.iter().copied().take(LOOKED_AT).filter(|(_, client)| is_of_use(*client));
        strangers.next().and_then(late).or_else(|| silent.next().and_then(late))
    }

    /// Returns the address from which most connections come, and whether this address leaves less
    /// than a quarter of all connections to the others, if there are any.
    pub(super) fn busiest(&self) -> Option<(IpAddr, bool)> {
        let (address, count) = self.by_address.iter().max_by_key(|(_, count)| **count)?;
        let all: usize = self.by_address.values().sum();
        Some((*address, *count < all && *count > all - all / 4))
    }

    /// Looks at the descriptor of a new connection. `sockets` other connections have sockets. The
    /// kernel gives out the lowest free descriptor, so a high number means that few are left.
    pub(in crate::rendezvous::store) fn look_at(&mut self, stream: &TcpStream, sockets: usize) {
        let descriptor = stream.as_raw_fd() as usize;
        while descriptor >= self.usable {
            let (soft, hard) = descriptor_limits();
            self.usable = usable(soft);
            if descriptor < self.usable {
                return;
            }
            // Every rank needs a descriptor here, and the usual soft limit is 1024. Within the hard
            // limit the process may raise it, so a job of thousands need not fail for it.
            if soft >= hard || !raise_descriptor_limit(soft.saturating_mul(4).min(hard), hard) {
                return self.ends_at(sockets);
            }
        }
    }

    /// Notes that there was no descriptor for a new connection beside `sockets`. Returns whether
    /// there is one now.
    pub(super) fn ran_out(&mut self, sockets: usize) -> bool {
        let (soft, hard) = descriptor_limits();
        let raised = soft < hard && raise_descriptor_limit(soft.saturating_mul(4).min(hard), hard);
        if !raised {
            self.ends_at(sockets);
        }
        raised
    }

    fn ends_at(&mut self, sockets: usize) {
        self.fits = Some(self.fits.map_or(sockets, |fits| fits.min(sockets)));
    }
}

fn usable(soft: usize) -> usize {
    soft - (soft / RESERVED).min(MAX_RESERVE)
}

fn descriptor_limits() -> (usize, usize) {
    let limit = getrlimit(Resource::Nofile);
    let number = |limit: Option<u64>| limit.map_or(usize::MAX, |limit| limit as usize);
    (number(limit.current), number(limit.maximum))
}

fn raise_descriptor_limit(soft: usize, hard: usize) -> bool {
    let number = |limit: usize| (limit != usize::MAX).then_some(limit as u64);
    setrlimit(Resource::Nofile, Rlimit { current: number(soft), maximum: number(hard) }).is_ok()
}

/// Accepts a connection, and returns it with the address from which it comes. The connection does
/// not block; its other options are the listener's. This takes one system call, where the standard
/// library needs two.
pub(in crate::rendezvous::store) fn accept(listener: &TcpListener) -> io::Result<(Private<TcpStream>, IpAddr)> {
    let mut from = IpAddr::from([0, 0, 0, 0]);
    let stream = Private::open(|| {
        let (stream, address) = acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        let address = address.and_then(|address| SocketAddr::try_from(address).ok());
        from = address.map_or(from, |address| address.ip());
        Ok(TcpStream::from(stream))
    })?;
    Ok((stream, from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_silent_client_that_was_admitted_first_makes_room() {
        let mut connections = Connections::default();
        let address = IpAddr::from([127, 0, 0, 1]);
        (1..4).for_each(|client| connections.came(client, address));
        // Client 1 came first, and has taken long to greet.
        (1..4).rev().for_each(|client| connections.admitted(client));
        assert_eq!(connections.hesitant(|_| true), None);
        let now = Instant::now();
        for (client, seconds) in [(1, 0), (2, 5), (3, 9)] {
            connections.asked(client);
            let since = now - Duration::from_secs(seconds);
            connections.silent.insert(client, since);
            connections.by_admission.insert((since, client));
        }
        assert_eq!(connections.hesitant(|_| true), Some(3));
        connections.asked(3);
        assert_eq!(connections.hesitant(|_| true), Some(2));
        connections.left(2, address, 1);
        assert_eq!(connections.hesitant(|_| true), None);
        connections.left(1, address, 0);
        assert!(connections.silent.is_empty() && connections.by_admission.is_empty());
    }
}
