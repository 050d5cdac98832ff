//! A gathering of the hosts: the seats 0 of all hosts exchange one record each. The file `record`
//! reads records, and the file `ways` sends the messages.

#[cfg(any(test, fuzzing))]
pub(crate) mod any_bytes;
mod record;
#[cfg(test)]
mod tests;
mod ways;

use std::slice;
use std::sync::Arc;

pub(crate) use self::record::{Content, Head};
use self::record::{HEAD_BYTES, calls_in};
use crate::blame::Blame;
use crate::collective::Descriptor;
use crate::comm::Comm;
use crate::error::Result;
use crate::scratch::Memory;
use crate::segment::LINE;
use crate::span::Span;
use crate::types::ncclInternalError;

/// The stream of the messages of a gathering, and of the first messages of a collective.
pub(crate) const STREAM: u64 = 0;

/// The most hosts that exchange their records directly. More hosts would send too many messages.
pub(crate) const MOST_DIRECT: usize = 8;
/// The longest record of a direct exchange in bytes. Wires send records of this length at once.
const LONGEST_RECORD: usize = (64 << 10) + 256;
const _: () = assert!(LONGEST_RECORD <= crate::wire::EAGER_BYTES);
/// The most bytes of all hosts' payloads together, in the ring.
const PAYLOADS: usize = 64 << 10;
/// The payload in bytes that each host may have in the ring, however many hosts there are.
const LEAST_PAYLOAD: usize = 1 << 10;
/// The most tags of names that a host tells in a record.
pub(crate) const MOST_TAGS: usize = 64;

/// The records of the hosts. Each consists of its head and its payload.
pub(crate) struct Records {
    /// The records. In the ring the records follow each other in the order in which they arrived.
    /// After them there is room for one message of each host, because another host may exchange
    /// directly. In a direct exchange there is room for one record of each host, and then room for
    /// one record to each host.
    memory: Option<Memory>,
    /// The communicator.
    comm: Arc<Comm>,
    /// Where the record of each host begins in the memory, in bytes.
    starts: Vec<usize>,
    /// Where the last record of the ring ends.
    end: usize,
    /// The distance between two rooms of a direct exchange in bytes; 0 where there are too many
    /// hosts for a direct exchange, so that the memory has no such rooms.
    pitch: usize,
    /// Whether this host begins with a direct exchange.
    is_direct: bool,
}

/// Returns the span of a communicator over several hosts.
pub(crate) fn span_of(comm: &Comm) -> &Span {
    comm.span.as_ref().expect("a gathering takes place among several hosts")
}

/// The most bytes that a host's record may have as payload, in a direct exchange or in the ring.
pub(crate) fn most_payload(hosts: usize, is_direct: bool) -> usize {
    if is_direct { LONGEST_RECORD - HEAD_BYTES } else { (PAYLOADS / hosts).max(LEAST_PAYLOAD) }
}

/// The most bytes of any record's payload.
fn most_bytes(span: &Span, is_direct: bool) -> usize {
    let seats = span.hosts.iter().map(Vec::len).max().unwrap_or(1);
    most_payload(span.hosts.len(), is_direct).max(seats * size_of::<Descriptor>()).max(MOST_TAGS * 8)
}

/// The largest message in bytes between hosts that may exchange directly.
fn most_message(span: &Span) -> usize {
    let of_ring = span.hosts.len().div_ceil(2) * (HEAD_BYTES + most_bytes(span, false));
    of_ring.max(HEAD_BYTES + most_bytes(span, true))
}

/// The size in bytes of the records of all hosts in the ring, and of one message that follows
/// them.
fn ring_bytes(span: &Span) -> usize {
    (span.hosts.len() * (HEAD_BYTES + most_bytes(span, false)) + most_message(span)).next_multiple_of(LINE)
}

impl Records {
    /// Returns room for the records of all hosts. With `is_direct` they are exchanged directly.
    pub(crate) fn new(comm: &Arc<Comm>, is_direct: bool) -> Records {
        let span = span_of(comm);
        let hosts = span.hosts.len();
        let pitch = if hosts > MOST_DIRECT { 0 } else { most_message(span).next_multiple_of(LINE) };
        let behind = if is_direct { hosts * pitch } else { ring_bytes(span) };
        let memory = comm.rails.as_ref().map(|rails| rails.scratch.take(behind + hosts * pitch));
        let starts = (0..hosts).map(|host| if is_direct { host * pitch } else { 0 }).collect();
        Records { memory, comm: comm.clone(), starts, end: 0, pitch, is_direct }
    }

    fn at(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::at)
    }

    /// The place to which this host's payload is written before the gathering begins.
    pub(crate) fn own_payload(&self) -> *mut u8 {
        // SAFETY: there is room for a head. In the ring this host's record is the first one.
        unsafe { self.at().add(self.own_start() + HEAD_BYTES) }
    }

    fn own_start(&self) -> usize {
        if self.is_direct { span_of(&self.comm).host() * self.pitch } else { 0 }
    }

    /// The place to which the payload for another host is written, before a direct exchange in
    /// which the payloads differ.
    pub(crate) fn payload_for(&self, host: usize) -> *mut u8 {
        // SAFETY: there is a room for each host behind those for the records.
        unsafe { self.at().add((self.starts.len() + host) * self.pitch + HEAD_BYTES) }
    }

    /// Writes this host's payload.
    pub(crate) fn write_payload(&self, bytes: &[u8]) {
        assert!(bytes.len() <= most_bytes(span_of(&self.comm), self.is_direct));
        // SAFETY: there is room for the payload, and no gathering is under way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.own_payload(), bytes.len()) };
    }

    /// Returns the head and the payload of a host's record, once all have gathered.
    pub(crate) fn of(&self, host: usize) -> (Head, &[u8]) {
        let start = self.starts[host];
        // SAFETY: a whole record begins there, as `append` or `check` has found.
        unsafe {
            let head = self.at().add(start).cast::<Head>().read_unaligned();
            (head, slice::from_raw_parts(self.at().add(start + HEAD_BYTES), head.bytes as usize))
        }
    }

    /// Returns the tags that a host has told, or nothing where its record has none.
    pub(crate) fn tags(&self, host: usize) -> Vec<u64> {
        let (head, payload) = self.of(host);
        let tags = payload.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok().map(u64::from_ne_bytes));
        if head.content == Content::Tags as u32 { tags.collect() } else { Vec::new() }
    }

    /// Whether all ranks of all hosts make this call.
    pub(crate) fn agree(&self, descriptor: &Descriptor) -> bool {
        let content = if self.is_direct { Content::Direct } else { Content::Data };
        (0..self.starts.len()).all(|host| {
            let (head, _) = self.of(host);
            head.content == content as u32 && head.descriptor.is_same(descriptor)
        })
    }

    /// Returns the call of each rank of the whole communicator.
    pub(crate) fn calls(&self) -> Result<Vec<Descriptor>> {
        let span = span_of(&self.comm);
        let mut calls = vec![self.of(span.host()).0.descriptor; span.nranks];
        for (host, ranks) in span.hosts.iter().enumerate() {
            let (head, payload) = self.of(host);
            let Some(theirs) = calls_in(&head, payload, ranks.len()) else {
                let message = format!("{} sent a record that fits no call", self.comm.labels.rank(ranks[0], None));
                return Err(self.comm.fail_whole(ncclInternalError, Blame::of([ranks[0]]), &message, ""));
            };
            for (&rank, call) in ranks.iter().zip(theirs) {
                calls[rank] = call;
            }
        }
        Ok(calls)
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        if let (Some(memory), Some(rails)) = (self.memory.take(), &self.comm.rails) {
            rails.scratch.give(memory);
        }
    }
}
