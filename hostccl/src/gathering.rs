//! A gathering of the hosts: the seats 0 of all hosts exchange one record each.
//!
//! The hosts sit in a ring. In round `k` a host sends all records that it has to the host `2^k`
//! places further on, and receives as many from the host `2^k` places back. So after
//! `ceil(log2 H)` rounds each of `H` hosts has all records. The partners depend on the number of
//! hosts alone, never on the calls of the ranks. So hosts meet even if their calls differ.

use std::slice;
use std::sync::Arc;

use crate::blame::Blame;
use crate::collective::Descriptor;
use crate::comm::Comm;
use crate::error::Result;
use crate::flow::wait;
use crate::poll::Poll;
use crate::scratch::Memory;
use crate::span::Span;
use crate::transfers::Transfers;
use crate::types::ncclInternalError;

/// The stream of the messages of a gathering, and of the first messages of a collective.
pub(crate) const STREAM: u64 = 0;

/// The most bytes of all hosts' payloads together, for few hosts.
const PAYLOADS: usize = 64 << 10;
/// The most bytes of a host's payload, for many hosts.
const LEAST_PAYLOAD: usize = 1 << 10;
/// The most tags of names that a host tells in a record.
pub(crate) const MOST_TAGS: usize = 64;

/// The kind of a record's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Content {
    /// The data of the call. All ranks of the host make the call of the record's descriptor.
    Data = 1,
    /// The descriptors of the calls of the host's ranks, which differ.
    Calls = 2,
    /// The tags of the names under which all ranks of the host have a call.
    Tags = 3,
}

/// The beginning of a record.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Head {
    /// The length of the payload in bytes.
    bytes: u32,
    /// The host to which the record belongs.
    host: u32,
    /// The number of the gathering.
    number: u32,
    /// A [`Content`].
    content: u32,
    /// The call of the host's ranks.
    pub(crate) descriptor: Descriptor,
}

const HEAD_BYTES: usize = size_of::<Head>();

/// The records of the hosts. Each consists of its head and its payload.
pub(crate) struct Records {
    /// The records, one behind the other, in the order in which they came.
    memory: Option<Memory>,
    /// The communicator.
    comm: Arc<Comm>,
    /// Where each record begins in the memory, in bytes. The first record is this host's, the
    /// second one that of the host before it in the ring.
    starts: Vec<usize>,
    /// Where the last record ends.
    end: usize,
}

/// Returns the span of a communicator over several hosts.
pub(crate) fn span_of(comm: &Comm) -> &Span {
    comm.span.as_ref().expect("a gathering takes place among several hosts")
}

/// The most bytes that a host's record may have as payload.
pub(crate) fn most_payload(hosts: usize) -> usize {
    (PAYLOADS / hosts).max(LEAST_PAYLOAD)
}

/// The most bytes of any record's payload.
fn most_bytes(span: &Span) -> usize {
    let seats = span.hosts.iter().map(Vec::len).max().unwrap_or(1);
    most_payload(span.hosts.len()).max(seats * size_of::<Descriptor>()).max(MOST_TAGS * 8)
}

impl Records {
    /// Returns room for the records of all hosts.
    pub(crate) fn new(comm: &Arc<Comm>) -> Records {
        let span = span_of(comm);
        let bytes = span.hosts.len() * (HEAD_BYTES + most_bytes(span));
        let memory = comm.rails.as_ref().map(|rails| rails.scratch.take(bytes));
        Records { memory, comm: comm.clone(), starts: Vec::with_capacity(span.hosts.len()), end: 0 }
    }

    fn at(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::at)
    }

    /// The place to which this host's payload is written before the gathering begins.
    pub(crate) fn own_payload(&self) -> *mut u8 {
        // SAFETY: there is room for a head.
        unsafe { self.at().add(HEAD_BYTES) }
    }

    /// Writes this host's payload.
    pub(crate) fn write_payload(&self, bytes: &[u8]) {
        assert!(bytes.len() <= most_bytes(span_of(&self.comm)));
        // SAFETY: there is room for the payload, and no gathering is under way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.own_payload(), bytes.len()) };
    }

    /// Returns the head and the payload of a host's record, once all have gathered.
    pub(crate) fn of(&self, host: usize) -> (Head, &[u8]) {
        let hosts = self.starts.len();
        let start = self.starts[(span_of(&self.comm).host() + hosts - host) % hosts];
        // SAFETY: a whole record begins there, as `append` has checked.
        unsafe {
            let head = self.at().add(start).cast::<Head>().read_unaligned();
            (head, slice::from_raw_parts(self.at().add(start + HEAD_BYTES), head.bytes as usize))
        }
    }

    /// Adds the records that have come from the host `back` places before this one: its own and
    /// those of the hosts before it. Nothing in them is trusted.
    fn append(&mut self, bytes: usize, back: usize, count: usize, number: u32) -> std::result::Result<(), String> {
        let (span, end) = (span_of(&self.comm), self.end + bytes);
        let hosts = span.hosts.len();
        for index in 0..count {
            if end - self.end < HEAD_BYTES {
                return Err(format!("{bytes} bytes with {index} records where {count} were due"));
            }
            // SAFETY: the bytes of a head have come. Every bit pattern is a head.
            let head = unsafe { self.at().add(self.end).cast::<Head>().read_unaligned() };
            let host = (span.host() + 2 * hosts - back - index) % hosts;
            if (head.host as usize, head.number) != (host, number) {
                return Err(format!(
                    "record {} of host {} where record {number} of host {host} was due",
                    head.number, head.host
                ));
            }
            let length = head.bytes as usize;
            if length > most_bytes(span) || length > end - self.end - HEAD_BYTES {
                return Err(format!("a record of {length} bytes"));
            }
            self.starts.push(self.end);
            self.end += HEAD_BYTES + length;
        }
        match self.end == end {
            true => Ok(()),
            false => Err(format!("{} bytes behind the last record", end - self.end)),
        }
    }

    /// Gathers the records of all hosts. This host's payload has been written. `may_begin` answers
    /// `None` once this host has a reason to begin; the gathering also begins when another host's
    /// message comes.
    pub(crate) async fn gather(
        &mut self,
        content: Content,
        descriptor: Descriptor,
        bytes: usize,
        mut may_begin: impl FnMut() -> Option<Poll>,
    ) -> Result<()> {
        let comm = self.comm.clone();
        let span = span_of(&comm);
        let (hosts, host) = (span.hosts.len(), span.host());
        let number = comm.rails.as_ref().map_or(0, |rails| rails.next_gathering());
        let head = Head { bytes: bytes as u32, host: host as u32, number, content: content as u32, descriptor };
        // SAFETY: there is room for a head.
        unsafe { self.at().cast::<Head>().write_unaligned(head) };
        self.starts.clear();
        self.starts.push(0);
        self.end = HEAD_BYTES + bytes;
        // The transfers are dropped before the memory, which `self` keeps.
        let mut sends = Transfers::new(&comm, descriptor);
        let mut receive = Transfers::new(&comm, descriptor);
        let mut have = 1;
        while have < hosts {
            // In the last round a host may need fewer records than its partner has.
            let count = have.min(hosts - have);
            let (to, from) = (span.hosts[(host + have) % hosts][0], span.hosts[(host + hosts - have) % hosts][0]);
            let room = count * (HEAD_BYTES + most_bytes(span));
            // SAFETY: there is room for as many records as there are hosts.
            unsafe { receive.recv_at_most(from, STREAM, self.at().add(self.end), room) };
            if have == 1 {
                wait(|| {
                    let begins = may_begin();
                    Ok(match begins {
                        None => None,
                        Some(blocked) => receive.poll()?.map(|_| blocked),
                    })
                })
                .await?;
            }
            let length = self.starts.get(count).copied().unwrap_or(self.end);
            // SAFETY: nobody changes these records until the sends have ended.
            unsafe { sends.send(to, STREAM, self.at(), length) };
            wait(|| receive.poll()).await?;
            let bytes = receive.first_length();
            receive.clear();
            if let Err(wrong) = self.append(bytes, have, count, number) {
                let message = format!(
                    "{} sent {wrong}: the ranks' libraries differ, or this is a bug in hostccl",
                    comm.labels.rank(from, None)
                );
                return Err(comm.fail_whole(ncclInternalError, Blame::of([from]), &message, ""));
            }
            have += count;
        }
        wait(|| sends.poll()).await
    }

    /// Returns the tags that a host has told, or nothing where its record has none.
    pub(crate) fn tags(&self, host: usize) -> Vec<u64> {
        let (head, payload) = self.of(host);
        let tags = payload.chunks_exact(8).filter_map(|bytes| bytes.try_into().ok().map(u64::from_ne_bytes));
        if head.content == Content::Tags as u32 { tags.collect() } else { Vec::new() }
    }

    /// Whether all ranks of all hosts make this call.
    pub(crate) fn agree(&self, descriptor: &Descriptor) -> bool {
        (0..self.starts.len()).all(|host| {
            let (head, _) = self.of(host);
            head.content == Content::Data as u32 && head.descriptor.is_same(descriptor)
        })
    }

    /// Returns the call of each rank of the whole communicator.
    pub(crate) fn calls(&self) -> Result<Vec<Descriptor>> {
        let span = span_of(&self.comm);
        let mut calls = vec![self.of(span.host()).0.descriptor; span.nranks];
        for (host, ranks) in span.hosts.iter().enumerate() {
            let (head, payload) = self.of(host);
            let mixed = head.content == Content::Calls as u32;
            if head.content == Content::Tags as u32
                || mixed && payload.len() != size_of_val(&head.descriptor) * ranks.len()
            {
                let message = format!("{} sent a record that fits no call", self.comm.labels.rank(ranks[0], None));
                return Err(self.comm.fail_whole(ncclInternalError, Blame::of([ranks[0]]), &message, ""));
            }
            for (seat, &rank) in ranks.iter().enumerate() {
                calls[rank] = match mixed {
                    // SAFETY: the payload has a descriptor for each rank. Every bit pattern is a
                    // descriptor.
                    true => unsafe { payload.as_ptr().cast::<Descriptor>().add(seat).read_unaligned() },
                    false => head.descriptor,
                };
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
