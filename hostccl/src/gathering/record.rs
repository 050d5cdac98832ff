//! The record of a host: a head, and a payload of the length in the head. The bytes come from other
//! processes, so nothing in them is trusted.

use crate::collective::Descriptor;

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
    /// The data of the call, as with `Data`, in a direct exchange.
    Direct = 4,
}

/// A bit of [`Head::content`] that says that the host began in the ring and left it, because
/// another host exchanges directly. So the hosts' calls differ, and the record has no data.
pub(super) const LEFT_RING: u32 = 1 << 8;

/// The beginning of a record.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Head {
    /// The length of the payload in bytes.
    pub(super) bytes: u32,
    /// The host to which the record belongs.
    pub(super) host: u32,
    /// The number of the gathering.
    pub(super) number: u32,
    /// A [`Content`], and perhaps [`LEFT_RING`].
    pub(super) content: u32,
    /// The call of the host's ranks.
    pub(crate) descriptor: Descriptor,
}

pub(super) const HEAD_BYTES: usize = size_of::<Head>();

impl Head {
    /// Returns the head with which the bytes begin; `None` where they are too few.
    pub(super) fn read(bytes: &[u8]) -> Option<Head> {
        let head = bytes.get(..HEAD_BYTES)?;
        // SAFETY: these are the bytes of a head. Every bit pattern is a head.
        Some(unsafe { head.as_ptr().cast::<Head>().read_unaligned() })
    }

    /// Whether the record belongs to a direct exchange, or to a host that has left the ring because
    /// of one.
    pub(super) fn is_of_direct_exchange(&self) -> bool {
        self.content == Content::Direct as u32 || self.content & LEFT_RING != 0
    }
}

/// Returns the length of the record with which a message begins. Fails with the reason where the
/// message does not begin with a whole record of that host in the gathering of that number.
pub(super) fn first(message: &[u8], host: usize, number: u32) -> Result<usize, String> {
    let Some(head) = Head::read(message) else {
        return Err(format!("{} bytes where a record was due", message.len()));
    };
    if (head.host as usize, head.number) != (host, number) {
        let (theirs, whose) = (head.number, head.host);
        return Err(format!("record {theirs} of host {whose} where record {number} of host {host} was due"));
    }
    match head.bytes as usize {
        payload if payload <= message.len() - HEAD_BYTES => Ok(HEAD_BYTES + payload),
        payload => Err(format!("a record of {payload} bytes in {} bytes", message.len())),
    }
}

/// Reads a message that consists of one record of each of these hosts, in their order, and calls
/// `found` with each host and the place where its record begins. Fails with the reason where the
/// message has other bytes, or where a payload is longer than `most` bytes.
pub(super) fn each(
    message: &[u8],
    hosts: impl IntoIterator<Item = usize>,
    number: u32,
    most: usize,
    mut found: impl FnMut(usize, usize),
) -> Result<(), String> {
    let mut at = 0;
    for host in hosts {
        let length = first(&message[at..], host, number)?;
        if length > HEAD_BYTES + most {
            return Err(format!("a record of {} bytes where at most {most} are allowed", length - HEAD_BYTES));
        }
        found(host, at);
        at += length;
    }
    match message.len() - at {
        0 => Ok(()),
        more => Err(format!("{more} bytes behind the last record")),
    }
}

/// Returns the call of each of the host's ranks. Returns `None` where the record describes
/// no call.
pub(super) fn calls_in<'a>(
    head: &Head,
    payload: &'a [u8],
    ranks: usize,
) -> Option<impl Iterator<Item = Descriptor> + use<'a>> {
    const SIZE: usize = size_of::<Descriptor>();
    let (content, same) = (head.content & !LEFT_RING, head.descriptor);
    let are_mixed = content == Content::Calls as u32;
    if head.content == Content::Tags as u32 || are_mixed && payload.len() != SIZE * ranks {
        return None;
    }
    Some((0..ranks).map(move |seat| match are_mixed {
        // SAFETY: these are the bytes of a descriptor. Every bit pattern is a descriptor.
        true => unsafe { payload[seat * SIZE..][..SIZE].as_ptr().cast::<Descriptor>().read_unaligned() },
        false => same,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call_name::Name;
    use crate::collective::Kind;

    /// A record of that host in gathering 3.
    fn record(host: u32, content: u32, payload: &[u8]) -> Vec<u8> {
        let bytes = payload.len() as u32;
        let head = Head { bytes, host, number: 3, content, descriptor: Descriptor::making(Kind::Split, Name::NONE) };
        // SAFETY: a head is plain numbers without gaps.
        let head = unsafe { std::slice::from_raw_parts((&raw const head).cast::<u8>(), HEAD_BYTES) };
        [head, payload].concat()
    }

    fn starts(message: &[u8], hosts: &[usize]) -> Result<Vec<(usize, usize)>, String> {
        let mut found = Vec::new();
        each(message, hosts.iter().copied(), 3, 100, |host, at| found.push((host, at))).map(|()| found)
    }

    #[test]
    fn the_records_of_a_message_are_found_in_the_order_of_their_hosts() {
        let message = [record(1, 1, b"abc"), record(0, 1, b""), record(3, 3, &[7; 100])].concat();
        let second = HEAD_BYTES + 3;
        assert_eq!(starts(&message, &[1, 0, 3]), Ok(vec![(1, 0), (0, second), (3, second + HEAD_BYTES)]));
        assert_eq!(first(&message, 1, 3), Ok(second), "a message of the ring begins with the sender's record");
    }

    #[test]
    fn a_message_that_breaks_the_protocol_is_refused_with_the_reason() {
        let good = record(1, 1, b"abc");
        let refused = |message: &[u8], hosts: &[usize]| starts(message, hosts).unwrap_err();
        assert_eq!(refused(&good[..HEAD_BYTES - 1], &[1]), format!("{} bytes where a record was due", HEAD_BYTES - 1));
        assert_eq!(refused(&good, &[1, 2]), "0 bytes where a record was due");
        assert_eq!(refused(&good, &[2]), "record 3 of host 1 where record 3 of host 2 was due");
        assert_eq!(first(&good, 1, 4).unwrap_err(), "record 3 of host 1 where record 4 of host 1 was due");
        let short = &good[..good.len() - 1];
        assert_eq!(refused(short, &[1]), format!("a record of 3 bytes in {} bytes", short.len()));
        assert_eq!(refused(&[&good[..], b"x"].concat(), &[1]), "1 bytes behind the last record");
        let long = record(1, 1, &[0; 101]);
        assert_eq!(refused(&long, &[1]), "a record of 101 bytes where at most 100 are allowed");
        let mut huge = good;
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(refused(&huge, &[1]), format!("a record of {} bytes in {} bytes", u32::MAX, huge.len()));
    }

    #[test]
    fn a_record_has_one_call_for_all_ranks_or_one_for_each() {
        let calls = |content: u32, payload: &[u8], ranks: usize| {
            let head = Head::read(&record(0, content, b"")).unwrap();
            calls_in(&head, payload, ranks).map(|calls| calls.map(|call| call.name.tag).collect::<Vec<_>>())
        };
        let unnamed = Name::NONE.tag;
        assert_eq!(calls(Content::Data as u32, b"data", 3), Some(vec![unnamed; 3]));
        assert_eq!(calls(Content::Data as u32 | LEFT_RING, b"", 2), Some(vec![unnamed; 2]));
        let each = [5, 6].map(|tag| Descriptor::making(Kind::Split, Name { tag, ..Name::NONE }));
        // SAFETY: a descriptor is plain numbers without gaps.
        let each = unsafe { std::slice::from_raw_parts(each.as_ptr().cast::<u8>(), size_of_val(&each)) };
        assert_eq!(calls(Content::Calls as u32, each, 2), Some(vec![5, 6]));
        assert_eq!(calls(Content::Calls as u32 | LEFT_RING, each, 2), Some(vec![5, 6]));
        assert_eq!(calls(Content::Calls as u32, each, 3), None, "two calls of three ranks");
        assert_eq!(calls(Content::Calls as u32, &each[1..], 2), None, "a part of a call");
        assert_eq!(calls(Content::Tags as u32, b"", 1), None, "tags are no calls");
    }
}
