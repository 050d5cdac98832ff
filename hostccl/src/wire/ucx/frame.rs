//! The data that go over an endpoint: headers of messages, greetings, and the wire's address.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::wire::{ADDRESS_BYTES, Tag, Token};

/// The length of a header in bytes.
pub(super) const HEADER: usize = 64;

/// The meaning of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A whole short message, for which the receiver need not have asked.
    Eager = 1,
    /// A long message waits at the sender. `number` is the send, and `extra` the length in bytes.
    Announce = 2,
    /// The sender has given up the announced send `number`.
    Withdraw = 3,
    /// A notice about a communicator.
    Notice = 4,
    /// The receiver asks for the announced send `number`. Its pieces name the receive `extra`.
    Want = 5,
    /// The announced send `number` is longer than the receiver's buffer, and is dropped.
    Refuse = 6,
    /// A piece of a long message for the receive `number`, from the byte `extra` on.
    Piece = 7,
    /// The sender lives.
    Alive = 8,
}

impl Kind {
    /// Whether messages of this kind are taken in the order in which they were sent.
    pub(super) fn is_ordered(self) -> bool {
        matches!(self, Kind::Eager | Kind::Announce | Kind::Withdraw | Kind::Notice)
    }
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Proves that the sender knows the token, and says which peer the sender is.
    pub(super) cookie: u64,
    /// The meaning of the message.
    pub(super) kind: Kind,
    /// How many bytes of short messages the sender's side has taken since its last header.
    pub(super) credit: u32,
    /// The message's number among the ordered ones of its sender, from 0.
    pub(super) index: u64,
    /// The message's tag. A notice uses only the communicator in it.
    pub(super) tag: Tag,
    /// A number whose meaning depends on the kind.
    pub(super) number: u64,
    /// Another number whose meaning depends on the kind.
    pub(super) extra: u64,
}

/// The tag of messages that need none.
pub(super) const NO_TAG: Tag = Tag { comm: 0, stream: 0, from: 0, to: 0 };

fn four(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

fn eight(raw: &[u8], at: usize) -> u64 {
    u64::from(four(raw, at)) | u64::from(four(raw, at + 4)) << 32
}

impl Header {
    /// Returns a header whose cookie, credit and index are not set yet.
    pub(super) fn new(kind: Kind, tag: Tag, number: u64, extra: u64) -> Header {
        Header { cookie: 0, kind, credit: 0, index: 0, tag, number, extra }
    }

    /// Returns the header's bytes.
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..8].copy_from_slice(&self.cookie.to_le_bytes());
        out[8] = self.kind as u8;
        out[12..16].copy_from_slice(&self.credit.to_le_bytes());
        out[16..24].copy_from_slice(&self.index.to_le_bytes());
        out[24..32].copy_from_slice(&self.tag.comm.to_le_bytes());
        out[32..40].copy_from_slice(&self.tag.stream.to_le_bytes());
        out[40..44].copy_from_slice(&self.tag.from.to_le_bytes());
        out[44..48].copy_from_slice(&self.tag.to.to_le_bytes());
        out[48..56].copy_from_slice(&self.number.to_le_bytes());
        out[56..].copy_from_slice(&self.extra.to_le_bytes());
        out
    }

    /// Reads a header. Returns `None` where the bytes are no header.
    pub(super) fn parse(raw: &[u8]) -> Option<Header> {
        if raw.len() != HEADER || raw[9..12] != [0; 3] {
            return None;
        }
        let kind = match raw[8] {
            1 => Kind::Eager,
            2 => Kind::Announce,
            3 => Kind::Withdraw,
            4 => Kind::Notice,
            5 => Kind::Want,
            6 => Kind::Refuse,
            7 => Kind::Piece,
            8 => Kind::Alive,
            _ => return None,
        };
        let tag = Tag { comm: eight(raw, 24), stream: eight(raw, 32), from: four(raw, 40), to: four(raw, 44) };
        Some(Header {
            cookie: eight(raw, 0),
            kind,
            credit: four(raw, 12),
            index: eight(raw, 16),
            tag,
            number: eight(raw, 48),
            extra: eight(raw, 56),
        })
    }
}

/// The length of a greeting in bytes.
pub(super) const GREETING: usize = 100;

/// The first four bytes of a greeting, and the version of the protocol.
const GREETING_MARK: [u8; 4] = *b"dmu\x01";

/// The greeting that each of two wires sends before they exchange messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Greeting {
    /// The random number of the sender's wire.
    pub(super) from: [u8; 16],
    /// The random number of the receiver's wire.
    pub(super) to: [u8; 16],
    /// The random number that the sender made for this connection.
    pub(super) nonce: [u8; 16],
    /// The receiver's number for this connection, which is all zero in a first greeting. The field
    /// `proof` is all zero in a first greeting, too, and where the receiver is not known.
    pub(super) answers: [u8; 16],
    /// The proof that the sender knows the token, as [`Direction::proof`] makes it.
    pub(super) proof: [u8; 32],
}

impl Greeting {
    /// Returns the greeting's bytes.
    pub(super) fn to_bytes(self) -> [u8; GREETING] {
        let mut out = [0; GREETING];
        out[..4].copy_from_slice(&GREETING_MARK);
        out[4..20].copy_from_slice(&self.from);
        out[20..36].copy_from_slice(&self.to);
        out[36..52].copy_from_slice(&self.nonce);
        out[52..68].copy_from_slice(&self.answers);
        out[68..].copy_from_slice(&self.proof);
        out
    }

    /// Reads a greeting. Returns `None` where the bytes are no greeting.
    pub(super) fn parse(raw: &[u8]) -> Option<Greeting> {
        let raw: &[u8; GREETING] = raw.try_into().ok()?;
        let sixteen = |at: usize| -> [u8; 16] { std::array::from_fn(|byte| raw[at + byte]) };
        let proof = std::array::from_fn(|byte| raw[68 + byte]);
        let greeting = Greeting { from: sixteen(4), to: sixteen(20), nonce: sixteen(36), answers: sixteen(52), proof };
        (raw[..4] == GREETING_MARK).then_some(greeting)
    }
}

/// One direction of a connection: who sends and who receives, with the numbers that each has made
/// for this connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direction<'a> {
    /// The random number of the sender's wire, and its number for this connection.
    pub(super) from: (&'a [u8; 16], &'a [u8; 16]),
    /// The random number of the receiver's wire, and its number for this connection.
    pub(super) to: (&'a [u8; 16], &'a [u8; 16]),
}

impl Direction<'_> {
    fn mac(&self, token: &Token, label: &[u8]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(token).ok()?;
        for part in [label, self.from.0, self.to.0, self.from.1, self.to.1] {
            mac.update(part);
        }
        Some(mac)
    }

    /// Returns the proof that the sender knows the token.
    pub(super) fn proof(&self, token: &Token) -> [u8; 32] {
        self.mac(token, b"libdevicemesh ucx 1 proof").map_or([0; 32], |mac| mac.finalize().into_bytes().into())
    }

    /// Whether that is the proof, compared in a time that does not depend on the bytes.
    pub(super) fn proves(&self, token: &Token, proof: &[u8; 32]) -> bool {
        self.mac(token, b"libdevicemesh ucx 1 proof").is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    /// Returns the number that each message in this direction carries. The number is never 0.
    pub(super) fn cookie(&self, token: &Token) -> u64 {
        let bytes = self.mac(token, b"libdevicemesh ucx 1 cookie").map(|mac| mac.finalize().into_bytes());
        bytes.map_or(1, |bytes| eight(&bytes, 0).max(1))
    }
}

/// The first bytes of an address, which tell it from the address of a wire of another kind.
const ADDRESS_MARK: [u8; 4] = *b"ucx\x01";

/// Returns the address of a wire: a text that says where it is, and UCX's own address.
pub(super) fn address(place: &str, worker: &[u8]) -> Result<Vec<u8>, String> {
    let place = &place.as_bytes()[..place.len().min(200)];
    let address = [&ADDRESS_MARK[..], &[place.len() as u8], place, worker].concat();
    match address.len() <= ADDRESS_BYTES {
        true => Ok(address),
        false => Err(format!(
            "UCX's address of this process has {} bytes, more than {ADDRESS_BYTES}: choose fewer devices in UCX_NET_DEVICES",
            worker.len()
        )),
    }
}

/// Takes an address apart. Returns `None` where the bytes are no address.
pub(super) fn parse_address(address: &[u8]) -> Option<(String, &[u8])> {
    let (mark, rest) = address.split_first_chunk::<4>()?;
    let (&length, rest) = rest.split_first()?;
    let (place, worker) = rest.split_at_checked(length.into())?;
    let whole = *mark == ADDRESS_MARK && !worker.is_empty() && address.len() <= ADDRESS_BYTES;
    let place: String = String::from_utf8_lossy(place).chars().filter(|letter| !letter.is_control()).collect();
    whole.then_some((place, worker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_greetings_come_back_and_garbage_does_not() {
        let tag = Tag { comm: u64::MAX - 1, stream: 2, from: 3, to: 4 };
        let header = Header { cookie: 5, kind: Kind::Piece, credit: 6, index: 7, tag, number: 8, extra: u64::MAX };
        let mut raw = header.to_bytes();
        assert_eq!(Header::parse(&raw), Some(header));
        assert_eq!(Header::parse(&raw[1..]), None);
        raw[8] = 99;
        assert_eq!(Header::parse(&raw), None);
        let greeting = Greeting { from: [1; 16], to: [2; 16], nonce: [3; 16], answers: [4; 16], proof: [5; 32] };
        let mut raw = greeting.to_bytes();
        assert_eq!(Greeting::parse(&raw), Some(greeting));
        assert_eq!(Greeting::parse(&raw[..99]), None);
        raw[0] = 0;
        assert_eq!(Greeting::parse(&raw), None);
    }

    #[test]
    fn a_proof_holds_for_one_token_one_direction_and_one_connection() {
        let (a, b, x, y) = ([1; 16], [2; 16], [3; 16], [4; 16]);
        let there = Direction { from: (&a, &x), to: (&b, &y) };
        let proof = there.proof(&[9; 16]);
        assert!(there.proves(&[9; 16], &proof));
        assert!(!there.proves(&[8; 16], &proof), "another token");
        assert!(!Direction { from: there.to, to: there.from }.proves(&[9; 16], &proof), "the other direction");
        assert!(!Direction { from: (&a, &y), ..there }.proves(&[9; 16], &proof), "another connection");
        assert_ne!(there.cookie(&[9; 16]), Direction { from: there.to, to: there.from }.cookie(&[9; 16]));
    }

    #[test]
    fn addresses_are_checked() {
        let made = address("process 7 on node\n1", b"ucx").unwrap();
        assert_eq!(parse_address(&made), Some(("process 7 on node1".to_owned(), &b"ucx"[..])));
        for bad in [&b""[..], b"ucx\x01", b"ucx\x01\x09A", b"ucx\x02\x01AB", b"ucx\x01\x01A"] {
            assert_eq!(parse_address(bad), None, "{bad:?}");
        }
        assert!(address("here", &[0; ADDRESS_BYTES]).unwrap_err().contains("UCX_NET_DEVICES"));
    }
}
