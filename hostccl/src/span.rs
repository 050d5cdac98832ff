//! The part of a communicator that lies on other hosts.
//!
//! "Host" means a set of ranks that share the memory of one segment. Ranks that cannot open each
//! other's segment count as ranks of different hosts, also where they run on one machine.
//!
//! In a communicator over several hosts, each host has a segment of its own. In the segment the
//! host's ranks have dense numbers, their seats: [`Comm::rank`](crate::comm::Comm::rank) and
//! [`Comm::nranks`](crate::comm::Comm::nranks) count seats. The span has the ranks of the whole
//! communicator. Messages, blame and the failure in the segment's header use the whole
//! communicator's ranks.

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
    /// For each rank, how its process is reached. Smaller communicators need it.
    pub(crate) contacts: Arc<[Contact]>,
    /// The secret that the processes prove to each other when they connect.
    pub(crate) token: Token,
    /// Segments in which the ranks of this host read why they could not be made a smaller
    /// communicator. They stay open until this communicator ends.
    pub(crate) kept: Mutex<Vec<Private<OwnedFd>>>,
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
        for peer in self.peers.iter().flatten() {
            self.wire.retire(*peer, self.comm, self.rank as u32);
            self.wire.close(*peer);
        }
    }
}

/// Communicators over several hosts whose ranks are threads of the test.
#[cfg(test)]
pub(crate) mod threads {
    use super::*;
    use std::sync::atomic::Ordering;

    use crate::comm::Comm;

    use crate::labels::Labels;
    use crate::process::ProcessId;
    use crate::segment::{self, Segment};
    use crate::token::random_token;
    use crate::wire::memory::{self, Memory};
    use crate::wire::{Peer, Wire};

    /// Returns the ends of a communicator by rank, and the wire of each. `hosts` has the ranks of
    /// each host.
    pub(crate) fn communicators(hosts: &[&[usize]]) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
        let nranks = hosts.iter().map(|ranks| ranks.len()).sum();
        let wires = memory::wires(nranks);
        let mut host_of = vec![0; nranks];
        for (host, ranks) in hosts.iter().enumerate() {
            ranks.iter().for_each(|&rank| host_of[rank] = host);
        }
        let mut ends: Vec<Option<Arc<Comm>>> = vec![None; nranks];
        for (host, ranks) in hosts.iter().enumerate() {
            let fd = segment::create(random_token().unwrap()).unwrap();
            for (seat, &rank) in ranks.iter().enumerate() {
                let segment = Segment::map(&fd, ranks.len() as u32, seat as u32, &Labels::default()).unwrap();
                let me = ProcessId::current();
                let taken = segment.seat(seat);
                taken.pid.store(me.pid, Ordering::Relaxed);
                taken.start.store(me.start, Ordering::Relaxed);
                taken.claim.store(2, Ordering::Release);
                segment.header().arrived.count();
                let span = Span {
                    rank,
                    nranks,
                    hosts: hosts.iter().map(|ranks| ranks.to_vec()).collect(),
                    host_of: host_of.clone(),
                    comm: 7,
                    wire: wires[rank].clone() as Arc<dyn Wire>,
                    peers: (0..nranks).map(|to| (host_of[to] != host).then_some(Peer(to as u32))).collect(),
                    contacts: wires.iter().map(|wire| wire.contact()).collect(),
                    token: [7; 16],
                    kept: Mutex::default(),
                };
                let labels = Labels { comm_name: "it".to_owned(), seats: (*ranks).into(), ..Labels::default() };
                ends[rank] = Some(Arc::new(Comm::new(segment, seat, 0, labels, Arc::default(), me, Some(span))));
            }
        }
        (ends.into_iter().flatten().collect(), wires)
    }

    #[test]
    fn ranks_of_two_hosts_exchange_messages() {
        let (ends, _) = communicators(&[&[0, 2], &[1]]);
        let spans: Vec<&Span> = ends.iter().map(|end| end.span.as_ref().unwrap()).collect();
        assert_eq!((spans[2].here(), ends[2].rank, ends[2].nranks, ends[2].whole()), (&[0, 2][..], 1, 2, (2, 3)));
        assert_eq!(ends[2].label(1), "rank 2");
        let (sent, mut got) = ([5_u8; 3], [0_u8; 8]);
        // SAFETY: the buffers outlive both requests.
        let (send, recv) = unsafe {
            let send = spans[2].wire.isend(spans[2].peers[1].unwrap(), spans[2].to(1, 0), sent.as_ptr(), 3);
            (send, spans[1].wire.irecv(spans[1].peers[2].unwrap(), spans[1].from(2, 0), got.as_mut_ptr(), 8))
        };
        assert_eq!(spans[2].wire.test(&send), Ok(Some(3)));
        assert_eq!(spans[1].wire.test(&recv), Ok(Some(3)));
        assert_eq!(got[..4], [5, 5, 5, 0]);
        assert_eq!(spans[0].peers[2], None, "ranks 0 and 2 share a host");
    }
}
