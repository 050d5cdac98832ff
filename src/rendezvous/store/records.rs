//! An encrypted connection between a client and a server that have the same secret.
//!
//! The handshake travels in one request and its reply (`op::HANDSHAKE`). Afterwards both directions
//! are sequences of records. A record is a u16 length, little-endian, and that many bytes, which
//! are encrypted (hostccl/src/noise.rs). The texts of the records, one after another, are what an
//! open connection would carry. A record may end anywhere in a request or reply.

use hostccl::noise::{Broken, HANDSHAKE_BYTES, Session, TAG_BYTES};

use super::secret::Secret;

/// The purpose of the sessions. Both sides must agree on it.
const PROLOGUE: &[u8] = b"store 1";

/// How many bytes of text a record has at most when this library sends it. Shorter records are
/// opened earlier, and longer ones cost little less.
pub const TEXT: usize = 16 << 10;

/// How many bytes the length of a record takes.
const LENGTH: usize = 2;

/// The records of one connection, in both directions.
pub struct Records {
    /// The keys and the counters of both directions.
    session: Session,
    /// The beginning of a record whose end has not come yet.
    incoming: Vec<u8>,
    /// A record on its way out, of which the socket has not taken everything.
    outgoing: Vec<u8>,
    /// How many bytes of `outgoing` the socket has taken.
    sent: usize,
    /// How many bytes of text `outgoing` stands for.
    text: usize,
}

impl Records {
    fn of(session: Session) -> Records {
        Records { session, incoming: Vec::new(), outgoing: Vec::new(), sent: 0, text: 0 }
    }

    /// Begins a connection on the client's side. Returns the message for the server.
    pub fn initiator(secret: &Secret) -> Result<(Records, Vec<u8>), Broken> {
        let (mut session, mut first) = (Session::initiator(secret.bytes(), PROLOGUE)?, Vec::new());
        session.write_message(b"", &mut first)?;
        Ok((Records::of(session), first))
    }

    /// Begins a connection on the server's side, and returns the answer to the client's message.
    /// Fails when the client does not have this secret. The message may be a copy of an earlier
    /// one, so the client has proved itself only when a record has opened.
    pub fn responder(secret: &Secret, first: &[u8]) -> Result<(Records, Vec<u8>), Broken> {
        if first.len() != HANDSHAKE_BYTES {
            return Err(Broken::Handshake);
        }
        let (mut session, mut second) = (Session::responder(secret.bytes(), PROLOGUE)?, Vec::new());
        session.read_message(first, &mut Vec::new())?;
        session.write_message(b"", &mut second)?;
        Ok((Records::of(session), second))
    }

    /// Ends the handshake on the client's side. Fails when the server does not have the secret.
    pub fn finish(&mut self, second: &[u8]) -> Result<(), Broken> {
        if second.len() != HANDSHAKE_BYTES {
            return Err(Broken::Handshake);
        }
        self.session.read_message(second, &mut Vec::new())
    }

    /// Whether the other side has proved that it has the secret, on the server's side.
    pub fn is_proved(&self) -> bool {
        self.session.opened() > 0
    }

    /// Returns how many bytes of memory the records keep beside a fixed part.
    pub fn memory(&self) -> usize {
        self.incoming.capacity() + self.outgoing.capacity()
    }

    /// Appends `text`, which has at most [`TEXT`] bytes and at least one, to `out` as a record.
    pub fn seal(&mut self, text: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        out.extend(((text.len() + TAG_BYTES) as u16).to_le_bytes());
        self.session.seal(text, out)
    }

    /// Takes bytes as they come, in pieces of any length, and appends the texts of the records
    /// that are whole to `text`. Each byte is copied once, however many pieces a record comes in.
    pub fn open(&mut self, mut bytes: &[u8], text: &mut Vec<u8>) -> Result<(), Broken> {
        while !self.incoming.is_empty() {
            let whole = record_length(&self.incoming)?.unwrap_or(LENGTH);
            let (more, rest) = bytes.split_at(bytes.len().min(whole - self.incoming.len()));
            self.incoming.extend_from_slice(more);
            bytes = rest;
            if self.incoming.len() < whole {
                return Ok(());
            }
            // Where `whole` is two bytes, the length has come, and not a record.
            if whole > LENGTH {
                let record = std::mem::take(&mut self.incoming);
                self.session.open(&record[LENGTH..], text)?;
            }
        }
        while let Some(whole) = record_length(bytes)?.filter(|whole| *whole <= bytes.len()) {
            self.session.open(&bytes[LENGTH..whole], text)?;
            bytes = &bytes[whole..];
        }
        self.incoming.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes these bytes the next ones on the way out, as they are. These bytes stand for `text`
    /// bytes of the replies.
    pub(super) fn put(&mut self, bytes: &[u8], text: usize) {
        (self.outgoing, self.sent, self.text) = (bytes.to_vec(), 0, text);
    }

    /// Makes a record of `text` the next one on the way out.
    pub(super) fn put_record(&mut self, text: &[u8]) -> Result<(), Broken> {
        let mut outgoing = std::mem::take(&mut self.outgoing);
        outgoing.clear();
        self.seal(text, &mut outgoing)?;
        (self.outgoing, self.sent, self.text) = (outgoing, 0, text.len());
        Ok(())
    }

    /// Returns the bytes on their way out that the socket has not taken yet.
    pub(super) fn outgoing(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// Notes that the socket has taken so many bytes more. Returns for how many bytes of text they
    /// stood, once all of them are gone.
    pub(super) fn advance(&mut self, count: usize) -> Option<usize> {
        self.sent += count;
        (self.sent == self.outgoing.len()).then(|| {
            self.sent = 0;
            self.outgoing.clear();
            std::mem::take(&mut self.text)
        })
    }

    /// Frees the buffer of the records on their way out. There must be none.
    pub(super) fn give_back(&mut self) {
        self.outgoing = Vec::new();
    }
}

/// Returns the number by which a connection is known whose handshake began with this message.
pub(super) fn number_of(first: &[u8]) -> u32 {
    first.first_chunk().map_or(0, |first| u32::from_le_bytes(*first))
}

/// Returns the length of the record that these bytes begin with, its length field included. Fails
/// when no record has that length. A record without text is never sent, so nobody can make the
/// other side work for nothing.
fn record_length(bytes: &[u8]) -> Result<Option<usize>, Broken> {
    let Some(length) = bytes.first_chunk() else { return Ok(None) };
    match usize::from(u16::from_le_bytes(*length)) {
        ..=TAG_BYTES => Err(Broken::Record),
        length => Ok(Some(LENGTH + length)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair() -> (Records, Records) {
        let secret = Secret::new(b"open sesame").unwrap();
        let (mut client, first) = Records::initiator(&secret).unwrap();
        let (server, second) = Records::responder(&secret, &first).unwrap();
        client.finish(&second).unwrap();
        (client, server)
    }

    #[test]
    fn a_server_trusts_a_client_from_its_first_record_on() {
        let (mut client, mut server) = pair();
        assert!(!server.is_proved());
        let mut record = Vec::new();
        client.seal(b"x", &mut record).unwrap();
        server.open(&record[..record.len() - 1], &mut Vec::new()).unwrap();
        assert!(!server.is_proved());
        server.open(&record[record.len() - 1..], &mut Vec::new()).unwrap();
        assert!(server.is_proved());
    }

    #[test]
    fn a_record_without_text_is_refused() {
        for length in 0..=TAG_BYTES as u16 {
            let (_, mut server) = pair();
            let bytes = [&length.to_le_bytes()[..], &[0; 16]].concat();
            assert_eq!(server.open(&bytes, &mut Vec::new()), Err(Broken::Record));
        }
    }

    #[test]
    fn what_the_socket_takes_in_pieces_counts_when_all_is_gone() {
        let (mut client, mut server) = pair();
        server.put(b"plain", 5);
        assert_eq!(server.outgoing(), b"plain");
        assert_eq!(server.advance(2), None);
        assert_eq!(server.outgoing(), b"ain");
        assert_eq!(server.advance(3), Some(5));
        server.put_record(b"hush").unwrap();
        let mut text = Vec::new();
        client.open(server.outgoing(), &mut text).unwrap();
        assert_eq!((&text[..], server.advance(LENGTH + 4 + TAG_BYTES)), (&b"hush"[..], Some(4)));
        assert!(server.outgoing().is_empty());
    }

    proptest! {
        #[test]
        fn records_open_in_pieces_of_any_length(
            texts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..300), 1..8),
            pieces in proptest::collection::vec(1_usize..400, 1..40),
        ) {
            let (mut client, mut server) = pair();
            let mut sealed = Vec::new();
            for text in &texts {
                client.seal(text, &mut sealed).unwrap();
            }
            let (mut rest, mut opened) = (&sealed[..], Vec::new());
            for piece in pieces.iter().cycle() {
                let (piece, after) = rest.split_at(rest.len().min(*piece));
                server.open(piece, &mut opened).unwrap();
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(opened, texts.concat());
            prop_assert!(server.incoming.is_empty());
        }
    }
}
