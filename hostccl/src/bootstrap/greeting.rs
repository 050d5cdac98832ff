//! The first bytes of a connection: both sides prove that they know the id's token before anything
//! else is read.
//!
//! | from | bytes |
//! |---|---|
//! | rank | mark (8), version (4), whether it encrypts (1), zeros (3), the id's number (8), nonce (16) |
//! | maker | status (1), zeros (7), nonce (16), proof (32) |
//! | rank | proof (32) |
//! | rank | with a secret: the first message of the Noise handshake |
//! | maker | with a secret: the second message of the Noise handshake; zeros where the secrets differ |
//!
//! A proof is an HMAC-SHA-256, keyed with the token, over the name of the side that proves and over
//! everything that was sent before.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::segment::LAYOUT_VERSION;
use crate::wire::Token;

/// The first bytes of a rank's greeting.
const MARK: [u8; 8] = *b"hccljoin";
/// The length of a rank's greeting.
pub(super) const HELLO_BYTES: usize = 40;
/// The length of the maker's answer.
pub(super) const ANSWER_BYTES: usize = 56;
/// The length of a proof.
pub(super) const PROOF_BYTES: usize = 32;

/// The maker's answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// The maker serves the id of the greeting.
    Welcome,
    /// The maker has no such id. There is no proof, because there is no token.
    UnknownId,
    /// The maker encrypts, and the rank does not.
    RankHasNoSecret,
    /// The rank encrypts, and the maker does not.
    MakerHasNoSecret,
    /// The maker has another version of the library.
    OtherVersion,
}

impl Status {
    const ALL: [Status; 5] =
        [Status::Welcome, Status::UnknownId, Status::RankHasNoSecret, Status::MakerHasNoSecret, Status::OtherVersion];

    pub(super) fn of(byte: u8) -> Option<Status> {
        Status::ALL.get(usize::from(byte)).copied()
    }
}

/// The fields of a rank's greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The layout version of the rank's library.
    pub(super) version: u32,
    /// Whether the rank encrypts.
    pub(super) sealed: bool,
    /// The number of the id.
    pub(super) number: u64,
}

impl Hello {
    /// Returns the greeting of a rank for an id.
    pub(super) fn write(token: &Token, sealed: bool, nonce: &[u8; 16]) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MARK);
        bytes[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        bytes[12] = u8::from(sealed);
        bytes[16..24].copy_from_slice(&number(token).to_le_bytes());
        bytes[24..].copy_from_slice(nonce);
        bytes
    }

    /// Reads a greeting. Returns `None` for a stranger's bytes.
    pub(super) fn read(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
        (bytes[..8] == MARK).then(|| Hello {
            version: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            sealed: bytes[12] != 0,
            number: u64::from_le_bytes(*bytes[16..].first_chunk().expect("24 bytes are left")),
        })
    }
}

/// Returns the maker's answer. Without a token it has no proof.
pub(super) fn answer(
    status: Status,
    token: Option<&Token>,
    hello: &[u8; HELLO_BYTES],
    nonce: &[u8; 16],
) -> [u8; ANSWER_BYTES] {
    let mut bytes = [0; ANSWER_BYTES];
    bytes[0] = status as u8;
    bytes[8..24].copy_from_slice(nonce);
    if let Some(token) = token {
        let proof = mac(token, &[b"maker", hello, &bytes[..24]]).finalize().into_bytes();
        bytes[24..].copy_from_slice(&proof);
    }
    bytes
}

/// Whether the maker's answer proves that it knows the token.
pub(super) fn is_proven(token: &Token, hello: &[u8; HELLO_BYTES], answer: &[u8; ANSWER_BYTES]) -> bool {
    mac(token, &[b"maker", hello, &answer[..24]]).verify_slice(&answer[24..]).is_ok()
}

/// Returns a rank's proof after the maker's answer.
pub(super) fn proof(token: &Token, hello: &[u8; HELLO_BYTES], answer: &[u8; ANSWER_BYTES]) -> [u8; PROOF_BYTES] {
    mac(token, &[b"rank", hello, answer]).finalize().into_bytes().into()
}

/// Whether a rank's proof is right.
pub(super) fn is_proof(
    token: &Token,
    hello: &[u8; HELLO_BYTES],
    answer: &[u8; ANSWER_BYTES],
    proof: &[u8; PROOF_BYTES],
) -> bool {
    mac(token, &[b"rank", hello, answer]).verify_slice(proof).is_ok()
}

/// Returns the number of the id with this token. The number is no secret, because nobody can
/// compute the token from it.
pub(super) fn number(token: &Token) -> u64 {
    let mac = mac(token, &[b"number"]).finalize().into_bytes();
    u64::from_le_bytes(*mac.first_chunk().expect("an HMAC-SHA-256 has 32 bytes"))
}

/// Returns the token by which the processes of a communicator prove to each other, on the wire,
/// that they belong together. It is computed from the id's token.
pub(crate) fn wire_token(token: &Token) -> Token {
    let mac = mac(token, &[b"wire"]).finalize().into_bytes();
    *mac.first_chunk().expect("an HMAC-SHA-256 has 32 bytes")
}

fn mac(token: &Token, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::new_from_slice(token).expect("HMAC takes a key of any length");
    mac.update(b"hostccl join 1:");
    for part in parts {
        mac.update(part);
    }
    mac
}
