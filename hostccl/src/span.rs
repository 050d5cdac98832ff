//! The part of a communicator that lies on other hosts.
//!
//! "Host" means a set of ranks that share the memory of one segment. Ranks that cannot open each
//! other's segment count as ranks of different hosts, also where they run on one machine.
//!
//! In a communicator over several hosts, each host has a segment of its own. In the segment the
//! ranks of the host are numbered from 0 on. These numbers are their seats:
//! [`Comm::rank`](crate::comm::Comm::rank) and [`Comm::nranks`](crate::comm::Comm::nranks) count
//! seats. The span has the ranks of the whole communicator. Messages, blame and the failure in the
//! segment's header use the whole communicator's ranks.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::fork::Private;
use crate::wire::{Contact, Peer, Tag, Token, Wire};

/// Where the ranks of a communicator over several hosts are, and how this rank reaches them.
#[derive(Debug)]
pub(crate) struct Span {
    /// This rank in the whole communicator.
    pub(crate) rank: usize,
    /// The number of ranks of the whole communicator.
    pub(crate) nranks: usize,
    /// The ranks of each host, in ascending order. The hosts are ordered by their first ranks.
    pub(crate) hosts: Vec<Vec<usize>>,
    /// For each rank, the host on which it is: an index of `hosts`.
    pub(crate) host_of: Vec<usize>,
    /// The number of the communicator in tags and notices. It is random and equal on all ranks.
    pub(crate) comm: u64,
    /// The wire of this process.
    pub(crate) wire: Arc<dyn Wire>,
    /// For each rank, the process in which it is; `None` for the ranks of this host.
    pub(crate) peers: Vec<Option<Peer>>,
    /// For each rank, how its process is reached. Split and shrink need it for the new
    /// communicator.
    pub(crate) contacts: Arc<[Contact]>,
    /// The secret that the processes prove to each other when they connect.
    pub(crate) token: Token,
    /// Segments in which the ranks of this host read why a shrink has failed, by the digests of the
    /// shrinks. A segment stays open until this communicator ends, or until the same shrink has
    /// failed again.
    pub(crate) kept: Mutex<HashMap<u64, Private<OwnedFd>>>,
}

impl Span {
    /// Returns the span of rank `rank`, and meets the processes of all ranks of other hosts.
    pub(crate) fn new(
        rank: usize,
        hosts: Vec<Vec<usize>>,
        host_of: Vec<usize>,
        comm: u64,
        wire: Arc<dyn Wire>,
        token: Token,
        contacts: Arc<[Contact]>,
    ) -> Span {
        let meet = |other: usize| (host_of[other] != host_of[rank]).then(|| wire.meet(&contacts[other], &token));
        let peers = (0..host_of.len()).map(meet).collect();
        Span { rank, nranks: host_of.len(), hosts, host_of, comm, wire, peers, contacts, token, kept: Mutex::default() }
    }

    /// The host of this rank.
    pub(crate) fn host(&self) -> usize {
        self.host_of[self.rank]
    }

    /// The ranks of this host. The index is the seat.
    pub(crate) fn here(&self) -> &[usize] {
        &self.hosts[self.host()]
    }

    /// The seat of a rank of this host; `None` for a rank of another host.
    pub(crate) fn seat_of(&self, rank: usize) -> Option<usize> {
        self.here().iter().position(|here| *here == rank)
    }

    /// The processes of another host, each once, in the order of their ranks.
    pub(crate) fn processes_on(&self, host: usize) -> Vec<Peer> {
        let mut peers: Vec<Peer> = Vec::new();
        for peer in self.hosts[host].iter().filter_map(|rank| self.peers[*rank]) {
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        peers
    }

    /// The processes of all other hosts, each once.
    pub(crate) fn processes(&self) -> Vec<Peer> {
        (0..self.hosts.len()).flat_map(|host| self.processes_on(host)).collect()
    }

    /// Returns the process of another host that watches this rank, if there is one. The last rank
    /// of each host watches the first rank of the next host: it keeps a connection to that rank. So
    /// somebody notices when all processes of a host end, or when the host falls silent.
    pub(crate) fn watcher(&self) -> Option<Peer> {
        let last = self.hosts.len() - 1;
        let before = &self.hosts[self.host().checked_sub(1).unwrap_or(last)];
        self.peers[*before.last()?].filter(|_| self.here().first() == Some(&self.rank))
    }

    /// Returns the process of another host that this rank watches, if it has to watch one.
    pub(crate) fn watched(&self) -> Option<Peer> {
        let next = &self.hosts[(self.host() + 1) % self.hosts.len()];
        self.peers[*next.first()?].filter(|_| self.here().last() == Some(&self.rank))
    }

    /// The tag of a message from this rank to `to`.
    pub(crate) fn to(&self, to: usize, stream: u64) -> Tag {
        Tag { comm: self.comm, stream, from: self.rank as u32, to: to as u32 }
    }

    /// The tag of a message from `from` to this rank.
    pub(crate) fn from(&self, from: usize, stream: u64) -> Tag {
        Tag { comm: self.comm, stream, from: from as u32, to: self.rank as u32 }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let peers: Vec<Peer> = self.peers.iter().flatten().copied().collect();
        for peer in &peers {
            self.wire.retire(*peer, self.comm, self.rank as u32);
        }
        self.wire.close_all(&peers, &self.token);
    }
}
