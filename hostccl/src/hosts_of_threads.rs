//! Communicators over several hosts whose ranks are threads of a test.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::comm::Comm;
use crate::crowd::Crowd;
use crate::labels::Labels;
use crate::process::ProcessId;
use crate::rails::Limits;
use crate::segment::{self, Segment};
use crate::span::Span;
use crate::token::random_token;
use crate::wire::memory::{self, Memory};
use crate::wire::{Peer, Wire};

/// Returns the ends of a communicator by rank, and the wire of each. `hosts` has the ranks of
/// each host.
pub(crate) fn communicators(hosts: &[&[usize]]) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
    communicators_with(hosts, Limits::PRODUCT)
}

/// Does what [`communicators`] does, with other limits for collectives.
pub(crate) fn communicators_with(hosts: &[&[usize]], limits: Limits) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
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
            let mut comm = Comm::new(segment, seat, Crowd::default(), labels, Arc::default(), me, Some(span));
            comm.rails.as_mut().expect("a communicator with a span has rails").limits = limits;
            ends[rank] = Some(Arc::new(comm));
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
