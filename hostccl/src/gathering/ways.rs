//! The two ways in which hosts gather.
//!
//! - In the **ring**, a host sends in round `k` all records that it has to the host `2^k` places
//!   further on, and receives as many from the host `2^k` places back. So after `ceil(log2 H)`
//!   rounds each of `H` hosts has all records. No other way needs fewer messages.
//! - In a **direct exchange**, each host sends every other host one record, all at the same time.
//!   The heads of these records are equal, but each host may get a payload of its own. So fewer
//!   bytes move where the payloads are long.
//!
//! A host's call decides in which way the host begins. The hosts exchange their heads even if their
//! calls differ. When a host in the ring receives a record of a direct exchange, it leaves the
//! ring: it sends its own record to all hosts to which it has sent nothing, and waits for a record
//! of each host from which it has none. When a host that exchanges directly receives a message of
//! the ring, it takes the first record, which is the sender's. So each host gets all heads. A host
//! can complete the ring only if all hosts began in the ring, because a host that has left the ring
//! passes no records on.

use std::slice;

use super::record::{self, Content, HEAD_BYTES, Head, LEFT_RING};
use super::{Records, STREAM, most_bytes, most_message, ring_bytes, span_of};
use crate::blame::Blame;
use crate::collective::Descriptor;
use crate::error::{Error, Result};
use crate::flow::wait;
use crate::poll::Poll;
use crate::transfers::Transfers;
use crate::types::ncclInternalError;

impl Records {
    /// Adds the `count` records that have arrived from the host `back` places before this one: its
    /// own record, and those of the hosts before it. `bytes` is the length of the message, and
    /// `number` the number of the gathering.
    fn append(&mut self, bytes: usize, back: usize, count: usize, number: u32) -> std::result::Result<(), String> {
        let (span, begin) = (span_of(&self.comm), self.end);
        let hosts = span.hosts.len();
        let from = (0..count).map(|index| (span.host() + 2 * hosts - back - index) % hosts);
        // SAFETY: so many bytes have come to the end of the records, and nobody writes them now.
        let message = unsafe { slice::from_raw_parts(self.at().add(begin), bytes) };
        record::each(message, from, number, most_bytes(span, false), |host, at| self.starts[host] = begin + at)?;
        self.end = begin + bytes;
        Ok(())
    }

    /// Gathers the records of all hosts. This host's payload has been written, and has `bytes`
    /// bytes. In a direct exchange with `parcels`, each other host gets the payload at
    /// [`payload_for`](Records::payload_for), whose length is in that list.
    pub(crate) async fn gather(
        &mut self,
        content: Content,
        descriptor: Descriptor,
        bytes: usize,
        parcels: Option<&[usize]>,
    ) -> Result<()> {
        match self.is_direct {
            true => self.exchange(content, descriptor, bytes, parcels).await,
            false => self.gather_in_ring(content, descriptor, bytes, || None).await,
        }
    }

    /// Gathers the records of all hosts in the ring. The gathering begins once `may_begin` returns
    /// `None`, or when a message of another host arrives.
    pub(crate) async fn gather_in_ring(
        &mut self,
        content: Content,
        descriptor: Descriptor,
        bytes: usize,
        mut may_begin: impl FnMut() -> Option<Poll>,
    ) -> Result<()> {
        let comm = self.comm.clone();
        let span = span_of(&comm);
        let (hosts, host) = (span.hosts.len(), span.host());
        let mut head = self.begin(content, descriptor, bytes);
        self.end = HEAD_BYTES + bytes;
        // The transfers are dropped before the memory, which `self` keeps.
        let mut sends = Transfers::new(&comm, descriptor);
        let mut receive = Transfers::new(&comm, descriptor);
        let mut have = 1;
        while have < hosts {
            // In the last round, a host may need only some of the records that its partner has.
            let count = have.min(hosts - have);
            let (next, back) = ((host + have) % hosts, (host + hosts - have) % hosts);
            let from = span.hosts[back][0];
            let room = (count * (HEAD_BYTES + most_bytes(span, false))).max(self.pitch.min(most_message(span)));
            // SAFETY: there is room for as many records as there are hosts, and a message more.
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
            let length = if count < have { self.starts[(host + hosts - count) % hosts] } else { self.end };
            // SAFETY: nobody changes these records until the sends have ended.
            unsafe { sends.send(span.hosts[next][0], STREAM, self.at(), length) };
            wait(|| receive.poll()).await?;
            let bytes = receive.lengths().next().unwrap_or(0);
            receive.clear();
            if self.is_of_direct_exchange(bytes) {
                // So many hosts never exchange directly, and the memory has no rooms for that.
                if self.pitch == 0 {
                    return Err(self.malformed(back, "a record of a direct exchange"));
                }
                self.starts[back] = self.end;
                self.check(back, bytes, head.number)?;
                // The other host does not use this host's data, because its call differs.
                if content == Content::Data {
                    head.bytes = 0;
                }
                head.content |= LEFT_RING;
                wait(|| sends.poll()).await?;
                // SAFETY: the sends have ended, and there is room for a head.
                unsafe { self.at().cast::<Head>().write_unaligned(head) };
                // The rounds so far were those of 1, 2, 4 ... `have` places.
                let rest = || (1..hosts).filter(|places| *places > have || !places.is_power_of_two());
                let from: Vec<usize> = rest().map(|places| (host + hosts - places) % hosts).collect();
                let base = ring_bytes(span);
                from.iter().for_each(|host| self.starts[*host] = base + host * self.pitch);
                let own = (0, HEAD_BYTES + head.bytes as usize);
                let outgoing: Vec<_> = rest().map(|places| ((host + places) % hosts, own)).collect();
                return self.swap(descriptor, head.number, &outgoing, &from).await;
            }
            self.append(bytes, have, count, head.number).map_err(|wrong| self.malformed(back, &wrong))?;
            have += count;
        }
        wait(|| sends.poll()).await
    }

    /// Exchanges the records of all hosts directly.
    async fn exchange(
        &mut self,
        content: Content,
        descriptor: Descriptor,
        bytes: usize,
        parcels: Option<&[usize]>,
    ) -> Result<()> {
        let comm = self.comm.clone();
        let span = span_of(&comm);
        let (hosts, me) = (span.hosts.len(), span.host());
        let content = if content == Content::Data { Content::Direct } else { content };
        let head = self.begin(content, descriptor, bytes);
        let others: Vec<usize> = (1..hosts).map(|step| (me + step) % hosts).collect();
        let outgoing = others.iter().map(|host| {
            let (start, bytes) = match parcels {
                None => (self.own_start(), bytes),
                Some(lengths) => ((hosts + host) * self.pitch, lengths[*host]),
            };
            // SAFETY: each room has space for a head.
            unsafe { self.at().add(start).cast::<Head>().write_unaligned(Head { bytes: bytes as u32, ..head }) };
            (*host, (start, HEAD_BYTES + bytes))
        });
        let outgoing: Vec<_> = outgoing.collect();
        self.swap(descriptor, head.number, &outgoing, &others).await
    }

    /// Sends records to hosts, and receives the records of other hosts into their rooms. `outgoing`
    /// has for each receiver the place and the length of its record.
    async fn swap(
        &self,
        descriptor: Descriptor,
        number: u32,
        outgoing: &[(usize, (usize, usize))],
        from: &[usize],
    ) -> Result<()> {
        let span = span_of(&self.comm);
        // The transfers are dropped before the memory, which `self` keeps.
        let (mut sends, mut receives) =
            (Transfers::new(&self.comm, descriptor), Transfers::new(&self.comm, descriptor));
        // SAFETY: each room has space for a message. Nobody else touches the rooms before the
        // transfers have ended.
        unsafe {
            for host in from {
                receives.recv_at_most(
                    span.hosts[*host][0],
                    STREAM,
                    self.at().add(self.starts[*host]),
                    most_message(span),
                );
            }
            for (host, (start, bytes)) in outgoing {
                sends.send(span.hosts[*host][0], STREAM, self.at().add(*start), *bytes);
            }
        }
        wait(|| receives.poll()).await?;
        for (host, bytes) in from.iter().zip(receives.lengths()) {
            self.check(*host, bytes, number)?;
        }
        wait(|| sends.poll()).await
    }

    /// Begins a gathering: writes the head of this host's record, and returns it.
    fn begin(&mut self, content: Content, descriptor: Descriptor, bytes: usize) -> Head {
        let host = span_of(&self.comm).host();
        let number = self.comm.rails.as_ref().map_or(0, |rails| rails.next_gathering());
        let head = Head { bytes: bytes as u32, host: host as u32, number, content: content as u32, descriptor };
        self.starts[host] = self.own_start();
        // SAFETY: there is room for a head.
        unsafe { self.at().add(self.own_start()).cast::<Head>().write_unaligned(head) };
        head
    }

    /// Whether the message that has arrived after the records of the ring belongs to a direct
    /// exchange.
    fn is_of_direct_exchange(&self, bytes: usize) -> bool {
        // SAFETY: so many bytes have come to the end of the records, and nobody writes them now.
        let message = unsafe { slice::from_raw_parts(self.at().add(self.end), bytes) };
        Head::read(message).is_some_and(|head| head.is_of_direct_exchange())
    }

    /// Checks the message that has come from a host to its room: its first record is the host's. A
    /// message of the ring may have more records, which belong to other hosts.
    fn check(&self, host: usize, bytes: usize, number: u32) -> Result<()> {
        // SAFETY: so many bytes have come to the room, and nobody writes them now.
        let message = unsafe { slice::from_raw_parts(self.at().add(self.starts[host]), bytes) };
        record::first(message, host, number).map(drop).map_err(|wrong| self.malformed(host, &wrong))
    }

    /// Ends the communicator because that host breaks this protocol.
    fn malformed(&self, host: usize, wrong: &str) -> Error {
        let from = span_of(&self.comm).hosts[host][0];
        let message = format!(
            "{} sent {wrong}: the ranks' libraries differ, or this is a bug in hostccl",
            self.comm.labels.rank(from, None)
        );
        self.comm.fail_whole(ncclInternalError, Blame::of([from]), &message, "")
    }
}
