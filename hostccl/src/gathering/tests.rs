use super::record::LEFT_RING;
use super::*;
use crate::call_name::Name;
use crate::collective::Kind;
use crate::flow::Flow;
use crate::hosts_of_threads;
use crate::wire::request::Transfer;

/// The memory of so many hosts has no rooms for a direct exchange.
#[test]
fn a_record_of_a_direct_exchange_among_too_many_hosts_ends_the_communicator() {
    let hosts: Vec<[usize; 1]> = (0..=MOST_DIRECT).map(|rank| [rank]).collect();
    let hosts: Vec<&[usize]> = hosts.iter().map(|ranks| &ranks[..]).collect();
    for content in [Content::Direct as u32, Content::Data as u32 | LEFT_RING] {
        let (ends, _wires) = hosts_of_threads::communicators(&hosts);
        let descriptor = Descriptor::making(Kind::Split, Name::NONE);
        // The first message for host 0 comes from the last host.
        let number = ends[MOST_DIRECT].rails.as_ref().unwrap().next_gathering();
        let forged = Head { bytes: 0, host: MOST_DIRECT as u32, number, content, descriptor };
        let span = span_of(&ends[MOST_DIRECT]);
        let (peer, tag) = (span.peers[0].unwrap(), span.to(0, STREAM));
        // SAFETY: the head outlives the transfer, and has no gaps.
        let _sent = unsafe { Transfer::send(&span.wire, peer, tag, (&raw const forged).cast(), HEAD_BYTES) };
        let mut records = Records::new(&ends[0], false);
        let mut flow = Flow::new(records.gather_in_ring(Content::Tags, descriptor, 0, || None));
        let error = flow.poll().unwrap_err();
        assert!(error.message().contains("rank 8 sent a record of a direct exchange"), "{}", error.message());
        assert_eq!((error.code(), &error.blame().ranks[..]), (ncclInternalError, &[8][..]));
    }
}
