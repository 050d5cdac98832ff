//! The proof that a connection belongs to this job.
//!
//! The process that connects sends a hello: who it is, whom it wants to reach, and the name of a
//! token that both processes know. The other process answers with its own hello and a proof that it
//! knows the token. Then the process that connected sends its proof. Frames follow. A proof is
//! HMAC-SHA-256 with the token over both hellos. The hellos have random numbers, so no proof can be
//! used again.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::wire::Token;

/// The length of a hello in bytes.
pub(super) const HELLO: usize = 96;
/// The length of a proof in bytes.
pub(super) const PROOF: usize = 32;

/// The index, in a hello, of the byte that says whether the sender has a secret.
pub(super) const SECRET_AT: usize = 11;
/// The first bytes of each connection.
const MAGIC: [u8; 8] = *b"dm-wire\n";
/// The version of this format and of the frames.
const VERSION: u16 = 1;

/// The answer of the process that was connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Answer {
    /// The process accepts the connection.
    Yes = 0,
    /// The process already has a connection with the process that connects.
    Twice = 1,
    /// The process is not the one that was asked for.
    Stranger = 2,
    /// The process does not know the process that connects.
    Unknown = 3,
    /// The process has lost the process that connects, and does not accept it again.
    Lost = 4,
    /// Only one of the two processes has a secret.
    Secret = 5,
    /// The process that answers can open no more files, so it accepts no connection now.
    Full = 6,
}

/// How a connection begins, on either side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    /// The answer; `Yes` in the hello of the process that connects.
    pub(super) answer: Answer,
    /// Whether this process has a secret, so that everything after the hellos is encrypted.
    pub(super) is_secret: bool,
    /// The number of the wire that sends this hello.
    pub(super) from: [u8; 16],
    /// The number of the wire to which this hello goes.
    pub(super) to: [u8; 16],
    /// A random number, so that no proof can be used again.
    pub(super) nonce: [u8; 16],
    /// The name of the token that the proofs use.
    pub(super) token: [u8; 32],
}

/// Returns the name of a token, which tells nothing about the token.
pub(super) fn name(token: &Token) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"dm-wire token");
    hash.update(token);
    hash.finalize().into()
}

impl Hello {
    /// Returns the hello's bytes.
    pub(super) fn to_bytes(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10] = self.answer as u8;
        out[SECRET_AT] = u8::from(self.is_secret);
        out[16..32].copy_from_slice(&self.from);
        out[32..48].copy_from_slice(&self.to);
        out[48..64].copy_from_slice(&self.nonce);
        out[64..96].copy_from_slice(&self.token);
        out
    }

    /// Reads a hello. Fails with the reason why the bytes are no hello.
    pub(super) fn parse(raw: &[u8]) -> Result<Hello, String> {
        if raw.len() != HELLO {
            return Err(format!("a hello of {} bytes", raw.len()));
        }
        if raw[..8] != MAGIC {
            return Err("it does not speak this library's protocol".to_owned());
        }
        let version = u16::from_le_bytes([raw[8], raw[9]]);
        if version != VERSION {
            return Err(format!("it speaks version {version} of the protocol, and this process version {VERSION}"));
        }
        let answer = match raw[10] {
            0 => Answer::Yes,
            1 => Answer::Twice,
            2 => Answer::Stranger,
            3 => Answer::Unknown,
            4 => Answer::Lost,
            5 => Answer::Secret,
            6 => Answer::Full,
            other => return Err(format!("it gave the unknown answer {other}")),
        };
        let mut hello = Hello {
            answer,
            is_secret: raw[SECRET_AT] != 0,
            from: [0; 16],
            to: [0; 16],
            nonce: [0; 16],
            token: [0; 32],
        };
        hello.from.copy_from_slice(&raw[16..32]);
        hello.to.copy_from_slice(&raw[32..48]);
        hello.nonce.copy_from_slice(&raw[48..64]);
        hello.token.copy_from_slice(&raw[64..96]);
        Ok(hello)
    }
}

/// The side that makes a proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The process that connects.
    Connects,
    /// The process that accepts.
    Accepts,
}

/// Prepares the proof of one side over both hellos.
fn over(token: &Token, side: Side, first: &[u8], second: &[u8]) -> Option<Hmac<Sha256>> {
    // A key of any length is allowed, so this never fails.
    let mut mac = Hmac::<Sha256>::new_from_slice(token).ok()?;
    mac.update(if side == Side::Connects { b"connects" } else { b"accepts " });
    mac.update(first);
    mac.update(second);
    Some(mac)
}

/// Returns the proof of one side.
pub(super) fn prove(token: &Token, side: Side, first: &[u8], second: &[u8]) -> [u8; PROOF] {
    over(token, side, first, second).map_or([0; PROOF], |mac| mac.finalize().into_bytes().into())
}

/// Whether the other side's proof is right. The comparison takes equally long for every wrong
/// proof.
pub(super) fn is_proof(token: &Token, side: Side, first: &[u8], second: &[u8], proof: &[u8]) -> bool {
    over(token, side, first, second).is_some_and(|mac| mac.verify_slice(proof).is_ok())
}
