//! Communicators whose ranks are threads of a test, over several hosts or on one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::comm::Comm;
use crate::crowd::Crowd;
use crate::labels::Labels;
use crate::process::ProcessId;
use crate::rails::Limits;
use crate::segment::{self, Segment};
use crate::span::Span;
use crate::token::random_token;
use crate::wire::memory::{self, Memory};
use crate::wire::tcp::{Tcp, options::Options};
use crate::wire::{Contact, Wire};

/// Returns the ends of a communicator by rank, and the wire of each. `hosts` has the ranks of
/// each host.
pub(crate) fn communicators(hosts: &[&[usize]]) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
    communicators_with(hosts, Limits::PRODUCT)
}

/// Does what [`communicators`] does, with other limits for collectives.
pub(crate) fn communicators_with(hosts: &[&[usize]], limits: Limits) -> (Vec<Arc<Comm>>, Vec<Arc<Memory>>) {
    let wires = memory::wires(size(hosts));
    let all: Vec<Arc<dyn Wire>> = wires.iter().map(|wire| wire.clone() as Arc<dyn Wire>).collect();
    (communicators_on(&all, hosts, limits), wires)
}

/// Returns the ends of a communicator by rank. Each rank has a wire over TCP of its own.
pub(crate) fn communicators_over_tcp(hosts: &[&[usize]]) -> Vec<Arc<Comm>> {
    let wire = |_| Tcp::open(Options::of_test(), || ()).unwrap() as Arc<dyn Wire>;
    let wires: Vec<Arc<dyn Wire>> = (0..size(hosts)).map(wire).collect();
    communicators_on(&wires, hosts, Limits::PRODUCT)
}

fn size(hosts: &[&[usize]]) -> usize {
    hosts.iter().map(|ranks| ranks.len()).sum()
}

fn communicators_on(wires: &[Arc<dyn Wire>], hosts: &[&[usize]], limits: Limits) -> Vec<Arc<Comm>> {
    let nranks = size(hosts);
    let contacts: Arc<[Contact]> = wires.iter().map(|wire| wire.contact()).collect();
    let mut host_of = vec![0; nranks];
    for (host, ranks) in hosts.iter().enumerate() {
        ranks.iter().for_each(|&rank| host_of[rank] = host);
    }
    let mut ends: Vec<Option<Arc<Comm>>> = vec![None; nranks];
    for ranks in hosts {
        let fd = segment::create(random_token().unwrap()).unwrap();
        for (seat, &rank) in ranks.iter().enumerate() {
            let segment = Segment::map(&fd, ranks.len() as u32, seat as u32, &Labels::default()).unwrap();
            let me = ProcessId::current();
            let taken = segment.seat(seat);
            taken.pid.store(me.pid, Ordering::Relaxed);
            taken.start.store(me.start, Ordering::Relaxed);
            taken.claim.store(2, Ordering::Release);
            segment.header().arrived.count();
            let lists = hosts.iter().map(|ranks| ranks.to_vec()).collect();
            let span = Span::new(rank, lists, host_of.clone(), 7, wires[rank].clone(), [7; 16], contacts.clone());
            let labels = Labels { comm_name: "it".to_owned(), seats: (*ranks).into(), ..Labels::default() };
            let mut comm = Comm::new(segment, seat, Crowd::default(), labels, Arc::default(), me, Some(span));
            comm.rails.as_mut().expect("a communicator with a span has rails").limits = limits;
            ends[rank] = Some(Arc::new(comm));
        }
    }
    ends.into_iter().flatten().collect()
}

/// Returns the ends of the first `come` ranks of a communicator of `nranks` on one host. The other
/// ranks have not arrived.
pub(crate) fn on_one_host(nranks: usize, come: usize) -> Vec<Arc<Comm>> {
    let fd = segment::create(random_token().unwrap()).unwrap();
    let end = |rank: usize| {
        let segment = Segment::map(&fd, nranks as u32, rank as u32, &Labels::default()).unwrap();
        let me = ProcessId::current();
        segment.seat(rank).take(me).unwrap();
        segment.header().arrive(nranks);
        let labels = Labels { comm_name: "it".to_owned(), ..Labels::default() };
        Arc::new(Comm::new(segment, rank, Crowd::default(), labels, Arc::default(), me, None))
    };
    (0..come).map(end).collect()
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
