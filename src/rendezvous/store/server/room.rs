//! Who may be connected. Descriptors and memory are finite, so there is a limit; where it is reached, those make room that a job needs least.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use hostccl::fork::Private;
use socket2::SockAddr;

use super::super::table::Client;

/// The most connections where nobody says how many ranks there are.
pub(super) const MAX_CLIENTS: usize = 1 << 16;
/// Where somebody does: each thread of a rank that is in a call has a connection of its own, and other programs may meet here too.
const OF_A_RANK: usize = 16;
const OF_OTHERS: usize = 1024;
/// Who is to make room has had so long to say something.
pub(super) const HESITANT: Duration = Duration::from_secs(1);
/// The part of all descriptors that is left to the process itself: one in so many, up to a bound. Where there are very few, the ranks need nearly all.
const RESERVED: usize = 8;
const MAX_RESERVE: usize = 1024;

/// How many connections a world of that many ranks may have.
pub(super) fn for_ranks(ranks: usize) -> usize {
    ranks.saturating_mul(OF_A_RANK).saturating_add(OF_OTHERS)
}

/// Who is there, as far as it matters for who is let in.
#[derive(Default)]
pub(super) struct Room {
    by_address: HashMap<IpAddr, usize>,
    /// Connections that are not admitted, oldest first, and when they came.
    strangers: BTreeMap<Client, Instant>,
    /// Connections that are admitted and have asked for nothing, oldest first, and when they were admitted.
    silent: BTreeMap<Client, Instant>,
    /// The descriptors that we may use as the process's limit is.
    usable: usize,
    /// How many connections there were when one more took a descriptor that is to be left to the process.
    fits: Option<usize>,
}

impl Room {
    pub(super) fn came(&mut self, client: Client, address: IpAddr) {
        *self.by_address.entry(address).or_default() += 1;
        self.strangers.insert(client, Instant::now());
    }

    pub(super) fn admitted(&mut self, client: Client) {
        self.strangers.remove(&client);
        self.silent.insert(client, Instant::now());
    }

    pub(super) fn asked(&mut self, client: Client) {
        self.silent.remove(&client);
    }

    /// `clients` are there still.
    pub(super) fn left(&mut self, client: Client, address: IpAddr, clients: usize) {
        self.strangers.remove(&client);
        self.silent.remove(&client);
        // The process may have given descriptors back.
        self.fits = self.fits.filter(|fits| clients > fits - fits / 8);
        if let Some(count) = self.by_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&address);
            }
        }
    }

    /// When the oldest stranger came.
    pub(super) fn oldest_stranger(&self) -> Option<(Client, Instant)> {
        self.strangers.first_key_value().map(|(client, came)| (*client, *came))
    }

    /// Whether there is no room for one more beside `clients` connections, of which at most `most` may be.
    pub(super) fn is_full(&self, clients: usize, most: usize) -> bool {
        clients >= most.min(self.fits.unwrap_or(usize::MAX))
    }

    /// Whether it is descriptors that leave no room for one more beside `clients`.
    pub(super) fn is_out_of_descriptors(&self, clients: usize) -> bool {
        self.fits.is_some_and(|fits| clients >= fits)
    }

    /// Who makes room before anybody that a job may need: the oldest that has not said who it is, or has asked for nothing.
    pub(super) fn hesitant(&self) -> Option<Client> {
        let late = |list: &BTreeMap<Client, Instant>| {
            let (client, since) = list.first_key_value()?;
            (since.elapsed() > HESITANT).then_some(*client)
        };
        late(&self.strangers).or_else(|| late(&self.silent))
    }

    /// The address from which most connections come, and whether it leaves less than a quarter to the others that are there.
    pub(super) fn busiest(&self) -> Option<(IpAddr, bool)> {
        let (address, count) = self.by_address.iter().max_by_key(|(_, count)| **count)?;
        let all: usize = self.by_address.values().sum();
        Some((*address, *count < all && *count > all - all / 4))
    }

    /// Looks at the descriptor of a new connection, beside which there are `clients`. Descriptors are given out from the lowest on, so a high one
    /// says that few are left.
    pub(super) fn look_at(&mut self, stream: &TcpStream, clients: usize) {
        let descriptor = stream.as_raw_fd() as usize;
        while descriptor >= self.usable {
            let (soft, hard) = descriptor_limits();
            self.usable = usable(soft);
            if descriptor < self.usable {
                return;
            }
            // Every rank needs a descriptor here, and the usual soft limit is 1024. Within the hard limit the process may raise it, so a
            // job of thousands need not fail for it.
            if soft >= hard || !raise_descriptor_limit(soft.saturating_mul(4).min(hard), hard) {
                return self.ends_at(clients);
            }
        }
    }

    /// There was no descriptor for a new connection beside `clients`. Whether there is now.
    pub(super) fn ran_out(&mut self, clients: usize) -> bool {
        let (soft, hard) = descriptor_limits();
        let raised = soft < hard && raise_descriptor_limit(soft.saturating_mul(4).min(hard), hard);
        if !raised {
            self.ends_at(clients);
        }
        raised
    }

    fn ends_at(&mut self, clients: usize) {
        self.fits = Some(self.fits.map_or(clients, |fits| fits.min(clients)));
    }
}

fn usable(soft: usize) -> usize {
    soft - (soft / RESERVED).min(MAX_RESERVE)
}

fn descriptor_limits() -> (usize, usize) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid structure to fill.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } {
        0 => (limit.rlim_cur as usize, limit.rlim_max as usize),
        _ => (usize::MAX, usize::MAX),
    }
}

fn raise_descriptor_limit(soft: usize, hard: usize) -> bool {
    let limit = libc::rlimit { rlim_cur: soft as libc::rlim_t, rlim_max: hard as libc::rlim_t };
    // SAFETY: a valid structure.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0 }
}

/// A new connection, which does not block, and where it comes from; its other options are the listener's. One system call, where the standard
/// library needs two.
pub(super) fn accept(listener: &TcpListener) -> io::Result<(Private<TcpStream>, IpAddr)> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let accept = |storage: *mut _, length: *mut libc::socklen_t| {
        // SAFETY: `try_init` gives memory for any address and its length; the result is checked.
        let fd = unsafe { libc::accept4(listener.as_raw_fd(), (storage as *mut libc::sockaddr).cast(), length, flags) };
        // SAFETY: a new socket that nobody else owns.
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { TcpStream::from_raw_fd(fd) }) }
    };
    let mut from = IpAddr::from([0, 0, 0, 0]);
    let stream = Private::open(|| {
        // SAFETY: accept4 has written the address when it succeeds.
        let (stream, address) = unsafe { SockAddr::try_init(accept) }?;
        from = address.as_socket().map_or(from, |address| address.ip());
        Ok(stream)
    })?;
    Ok((stream, from))
}
