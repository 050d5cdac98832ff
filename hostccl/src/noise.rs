//! Encrypted and authenticated connections between processes that know one secret.
//!
//! The protocol is `Noise_NNpsk0_25519_ChaChaPoly_SHA256` (noiseprotocol.org, by the crate snow).
//! Two messages make the handshake: the initiator writes the first one, and the responder answers
//! with the second one. Afterwards each side seals records, and the other side opens them in the
//! order in which they were sealed. A record that was changed, left out, repeated or put into
//! another order does not open, and ends the session.
//!
//! The module does no input or output: the caller moves the bytes, and says where a message or a
//! record ends. Nothing here waits.
//!
//! Each side can be sure of these facts:
//! - A first message that can be decrypted was made by a process that knows the secret. It may be a
//!   copy of an earlier one. So the responder must do nothing for the initiator before the first
//!   record has opened. A record opens only in the session in which it was sealed.
//! - A second message that can be decrypted was made for this very session.
//! - Each session has keys of its own. Whoever learns the secret later cannot read the records that
//!   were sent before.
//! - Whoever records a handshake can try out secrets later. So nobody must be able to guess the
//!   secret.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;
use snow::params::NoiseParams;
use snow::{Builder, HandshakeState, TransportState};

/// The protocol of the handshake and of the records.
const PROTOCOL: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// The label under which the key of the protocol is derived from the secret. The secret may also
/// serve elsewhere, so it is not the key itself.
const KEY_LABEL: &[u8] = b"libdevicemesh noise 1 pre-shared key";

/// The beginning of each prologue. Its number changes when this module does something else.
const PROLOGUE: &[u8] = b"libdevicemesh noise 1:";

/// How many bytes a message of the handshake has beyond its payload: a public key and a tag.
pub const HANDSHAKE_BYTES: usize = 32 + TAG_BYTES;

/// How many bytes a sealed record has beyond its text.
pub const TAG_BYTES: usize = 16;

/// The longest text of a record, in bytes. A sealed record then has 65,535 bytes, which a 16-bit
/// length can say.
pub const RECORD_BYTES: usize = 65_535 - TAG_BYTES;

/// Each side takes a new key for a direction after this many records in that direction. So no key
/// seals more than 64 GiB, and the counter of records has 64 bits and never ends.
const RECORDS_A_KEY: u64 = 1 << 20;

/// Why a session cannot go on, or could not do what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broken {
    /// A message of the handshake cannot be decrypted: the other side has another secret, or none,
    /// or another prologue, or it is no party of this protocol at all.
    Handshake,
    /// A record does not open: it was changed, cut short, repeated, or sealed for another session.
    Record,
    /// The text of a record is longer than [`RECORD_BYTES`], or the payload of a message of the
    /// handshake is longer than 65,535 bytes less [`HANDSHAKE_BYTES`]. The number is the length of
    /// the text or payload in bytes.
    TooLong(usize),
    /// A call came at the wrong time. Records need a finished handshake. Messages of the handshake
    /// need this side's turn. A broken session allows nothing.
    OutOfTurn,
    /// The host gave no random bytes, or the machine lacks something else. The text says what.
    Machine(&'static str),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Handshake => {
                f.write_str("the other side does not have the same secret, or speaks another version of the protocol")
            }
            Broken::Record => f.write_str("an encrypted record was changed, cut short or repeated on its way"),
            Broken::TooLong(bytes) => write!(f, "{bytes} bytes are too many for one encrypted message"),
            Broken::OutOfTurn => f.write_str("the encrypted connection is not ready for this, or is broken"),
            Broken::Machine(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Broken {}

/// One side of an encrypted connection, from the first message of the handshake to the last record.
pub struct Session {
    /// How far the session is.
    state: State,
    /// How many records this side has sealed.
    sealed: u64,
    /// How many records this side has opened.
    opened: u64,
    /// After how many records a direction takes a new key. Tests make it small.
    records_a_key: u64,
}

/// How far a session is.
enum State {
    /// Messages of the handshake are still to be written or read.
    Handshake(Box<HandshakeState>),
    /// Records go in both directions.
    Ready(Box<TransportState>),
    /// Nothing goes any more.
    Ended,
}

impl Session {
    /// Begins a session on the side that writes the first message. Both sides must give the same
    /// secret and the same prologue, which says what the session is for ("store 1"). Fails only
    /// where the machine lacks something.
    pub fn initiator(secret: &[u8], prologue: &[u8]) -> Result<Session, Broken> {
        Session::begin(secret, prologue, true)
    }

    /// Begins a session on the side that reads the first message and answers it.
    pub fn responder(secret: &[u8], prologue: &[u8]) -> Result<Session, Broken> {
        Session::begin(secret, prologue, false)
    }

    fn begin(secret: &[u8], prologue: &[u8], is_initiator: bool) -> Result<Session, Broken> {
        let unusable = |_: snow::Error| Broken::Machine("the encrypted connection cannot be set up on this machine");
        let params: NoiseParams = PROTOCOL.parse().map_err(unusable)?;
        let (key, prologue) = (key(secret)?, [PROLOGUE, prologue].concat());
        let builder = Builder::new(params).prologue(&prologue).and_then(|builder| builder.psk(0, &key));
        let handshake = builder.and_then(|builder| match is_initiator {
            true => builder.build_initiator(),
            false => builder.build_responder(),
        });
        Ok(Session {
            state: State::Handshake(Box::new(handshake.map_err(unusable)?)),
            sealed: 0,
            opened: 0,
            records_a_key: RECORDS_A_KEY,
        })
    }

    /// Appends this side's message of the handshake to `out`. The message has [`HANDSHAKE_BYTES`]
    /// more than its payload. The payload of the first message is encrypted, but whoever learns the
    /// secret later can read it. The payload of the second message is as safe as a record.
    pub fn write_message(&mut self, payload: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        let State::Handshake(handshake) = &mut self.state else { return Err(Broken::OutOfTurn) };
        if !handshake.is_my_turn() {
            return Err(Broken::OutOfTurn);
        }
        let begin = out.len();
        if HANDSHAKE_BYTES + payload.len() > RECORD_BYTES + TAG_BYTES {
            return Err(Broken::TooLong(payload.len()));
        }
        out.resize(begin + HANDSHAKE_BYTES + payload.len(), 0);
        match handshake.write_message(payload, &mut out[begin..]) {
            Ok(written) => {
                out.truncate(begin + written);
                self.finish_handshake();
                Ok(())
            }
            Err(error) => {
                out.truncate(begin);
                self.state = State::Ended;
                Err(match error {
                    snow::Error::Rng => Broken::Machine("this host gives no random bytes"),
                    _ => Broken::Handshake,
                })
            }
        }
    }

    /// Reads the other side's message of the handshake, which is exactly `message`, and appends its
    /// payload to `out`. A message that cannot be decrypted ends the session.
    pub fn read_message(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        let State::Handshake(handshake) = &mut self.state else { return Err(Broken::OutOfTurn) };
        if handshake.is_my_turn() {
            return Err(Broken::OutOfTurn);
        }
        let begin = out.len();
        // A message that is longer than every valid message must not make this side reserve memory.
        let room = message.len().min(RECORD_BYTES + TAG_BYTES);
        out.resize(begin + room, 0);
        match handshake.read_message(message, &mut out[begin..]) {
            Ok(read) => {
                out.truncate(begin + read);
                self.finish_handshake();
                Ok(())
            }
            Err(_) => {
                out.truncate(begin);
                self.state = State::Ended;
                Err(Broken::Handshake)
            }
        }
    }

    fn finish_handshake(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Ended) {
            State::Handshake(handshake) if handshake.is_handshake_finished() => match handshake.into_transport_mode() {
                Ok(transport) => State::Ready(Box::new(transport)),
                Err(_) => State::Ended,
            },
            state => state,
        };
    }

    /// Whether the handshake is over on this side, so that records can be sealed and opened.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready(_))
    }

    /// How many records have opened. A responder does nothing for the initiator while it is 0.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Encrypts `plain`, which has at most [`RECORD_BYTES`], and appends the record to `out`. The
    /// record has [`TAG_BYTES`] more. A record may be empty.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        let State::Ready(transport) = &mut self.state else { return Err(Broken::OutOfTurn) };
        if plain.len() > RECORD_BYTES {
            return Err(Broken::TooLong(plain.len()));
        }
        let begin = out.len();
        out.resize(begin + plain.len() + TAG_BYTES, 0);
        if transport.write_message(plain, &mut out[begin..]).is_err() {
            out.truncate(begin);
            self.state = State::Ended;
            return Err(Broken::OutOfTurn);
        }
        self.sealed += 1;
        if self.sealed % self.records_a_key == 0 {
            transport.rekey_outgoing();
        }
        Ok(())
    }

    /// Decrypts `sealed`, which is exactly one record, and appends its text to `out`. When the
    /// record does not open, `out` is as before and the session has ended.
    pub fn open(&mut self, sealed: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        let State::Ready(transport) = &mut self.state else { return Err(Broken::OutOfTurn) };
        let begin = out.len();
        let opened = match sealed.len() {
            TAG_BYTES..=65_535 => {
                out.resize(begin + sealed.len() - TAG_BYTES, 0);
                transport.read_message(sealed, &mut out[begin..]).is_ok()
            }
            _ => false,
        };
        if !opened {
            out.truncate(begin);
            self.state = State::Ended;
            return Err(Broken::Record);
        }
        self.opened += 1;
        if self.opened % self.records_a_key == 0 {
            transport.rekey_incoming();
        }
        Ok(())
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Handshake(_) => "handshake",
            State::Ready(_) => "ready",
            State::Ended => "ended",
        };
        f.debug_struct("Session").field("state", &state).field("sealed", &self.sealed).finish_non_exhaustive()
    }
}

/// Returns the protocol's key for this secret.
fn key(secret: &[u8]) -> Result<[u8; 32], Broken> {
    let mac = Hmac::<Sha256>::new_from_slice(secret);
    let mut mac = mac.map_err(|_| Broken::Machine("HMAC-SHA-256 does not take this secret"))?;
    mac.update(KEY_LABEL);
    Ok(mac.finalize().into_bytes().into())
}

#[cfg(test)]
mod tests;
