//! Keeps what is still to be sent to one side of a connection: bytes that belong to this side
//! alone, and between these bytes values that the table and other clients share.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::TcpStream;

use socket2::SockRef;

use super::records::{Records, TEXT};
use super::value::Value;

/// A buffer of more bytes than this is freed when it is empty, so an idle client costs little. Most
/// replies are a number or less.
const KEPT: usize = 64;
/// Values of up to this many bytes are copied, because a copy costs less than a separate piece in
/// the system call.
const COPIED: usize = 4 << 10;
/// When this many bytes of `own` were sent, they are moved out of the buffer.
const SENT: usize = 256 << 10;
/// The most pieces that are sent in one system call.
const PIECES: usize = 32;

/// The bytes and values that are still to be sent on one connection.
#[derive(Default)]
pub(super) struct Outgoing {
    /// The bytes that belong to this client alone.
    own: Vec<u8>,
    /// How many bytes of `own` were sent.
    sent: usize,
    /// Values in order, each with the number of bytes of `own` that are sent before it.
    shared: VecDeque<(usize, Value)>,
    /// How many bytes of the first value were sent.
    begun: usize,
    /// How many bytes are still to be sent.
    left: usize,
}

impl Outgoing {
    /// Returns how many bytes are still to be sent.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Returns how many bytes of memory belong to this client alone.
    pub(super) fn memory(&self) -> usize {
        self.own.capacity()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.own.extend_from_slice(bytes);
        self.left += bytes.len();
    }

    pub(super) fn push_value(&mut self, value: Value) {
        if value.len() <= COPIED {
            return self.push(&value);
        }
        self.left += value.len();
        self.shared.push_back((self.own.len(), value));
    }

    /// Sends what the socket takes, but not much more than `limit` bytes, and returns how many. An
    /// error says that the client is gone.
    pub(super) fn flush(&mut self, stream: &TcpStream, limit: usize) -> io::Result<usize> {
        let mut flushed = 0;
        while self.left > 0 && flushed < limit {
            let written = if self.shared.is_empty() {
                let end = self.own.len().min(self.sent + limit - flushed);
                (&*stream).write(&self.own[self.sent..end])
            } else {
                // The process may not ignore SIGPIPE, and the standard library's writev would raise
                // it.
                SockRef::from(stream).send_vectored_with_flags(&self.pieces(limit - flushed), libc::MSG_NOSIGNAL)
            };
            match written {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.advance(count);
                    flushed += count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.give_back();
        Ok(flushed)
    }

    /// Does what [`Outgoing::flush`] does, encrypted. A record counts as sent when the socket has
    /// taken all of it. At most one record is on its way.
    pub(super) fn flush_sealed(
        &mut self,
        records: &mut Records,
        mut stream: &TcpStream,
        limit: usize,
    ) -> io::Result<usize> {
        let mut flushed = 0;
        while self.left > 0 && flushed < limit {
            if records.outgoing().is_empty() {
                self.put_record(records, limit - flushed)?;
            }
            match stream.write(records.outgoing()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    flushed += count;
                    let text = records.advance(count).unwrap_or(0);
                    self.advance(text);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.left == 0 {
            records.give_back();
        }
        self.give_back();
        Ok(flushed)
    }

    /// Takes at most `limit` bytes out, in place of sending them.
    pub(super) fn take(&mut self, limit: usize) -> Vec<u8> {
        let count = self.left.min(limit);
        let mut bytes = Vec::with_capacity(count);
        while bytes.len() < count {
            let before = bytes.len();
            self.pieces(count - before).iter().for_each(|piece| bytes.extend_from_slice(piece));
            self.advance(bytes.len() - before);
        }
        self.give_back();
        bytes
    }

    /// Does what [`Outgoing::take`] does, encrypted.
    pub(super) fn take_sealed(&mut self, records: &mut Records, limit: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while self.left > 0 && bytes.len() < limit {
            if records.outgoing().is_empty() {
                self.put_record(records, limit - bytes.len())?;
            }
            let sealed = records.outgoing();
            let count = sealed.len().min(limit - bytes.len());
            bytes.extend_from_slice(&sealed[..count]);
            let text = records.advance(count).unwrap_or(0);
            self.advance(text);
        }
        if self.left == 0 {
            records.give_back();
        }
        self.give_back();
        Ok(bytes)
    }

    /// Makes a record of the bytes that are sent next. They have about `limit` bytes.
    fn put_record(&mut self, records: &mut Records, limit: usize) -> io::Result<()> {
        let mut text = Vec::new();
        self.pieces(TEXT.min(limit)).iter().for_each(|piece| text.extend_from_slice(piece));
        records.put_record(&text).map_err(io::Error::other)
    }

    /// Returns the pieces that are sent next, at most `limit` bytes together.
    fn pieces(&self, limit: usize) -> Vec<IoSlice<'_>> {
        let (mut pieces, mut room) = (Vec::with_capacity(PIECES), limit);
        let mut add = |piece: &'_ [u8]| {
            let piece = piece.len().min(room);
            room -= piece;
            piece
        };
        let (mut at, mut begun) = (self.sent, self.begun);
        for (position, value) in self.shared.iter().take(PIECES / 2 - 1) {
            for piece in [&self.own[at..*position], &value[begun..]] {
                pieces.push(IoSlice::new(&piece[..add(piece)]));
            }
            (at, begun) = (*position, 0);
        }
        if self.shared.len() < PIECES / 2 {
            let rest = &self.own[at..];
            pieces.push(IoSlice::new(&rest[..add(rest)]));
        }
        pieces
    }

    /// Notes that this many bytes were sent.
    pub(super) fn advance(&mut self, mut count: usize) {
        self.left -= count;
        while count > 0 {
            let until = self.shared.front().map_or(self.own.len(), |(position, _)| *position);
            let own = count.min(until - self.sent);
            self.sent += own;
            count -= own;
            if self.sent < until {
                return;
            }
            let Some((_, value)) = self.shared.front() else { return };
            let of_value = count.min(value.len() - self.begun);
            self.begun += of_value;
            count -= of_value;
            if self.begun < value.len() {
                return;
            }
            self.shared.pop_front();
            self.begun = 0;
        }
    }

    /// Frees the memory of what was sent.
    fn give_back(&mut self) {
        if self.left == 0 {
            self.sent = 0;
            if self.own.capacity() > KEPT {
                self.own = Vec::new()
            } else {
                self.own.clear()
            }
            if self.shared.capacity() > 0 {
                self.shared = VecDeque::new();
            }
        } else if self.sent > SENT {
            self.own.drain(..self.sent);
            self.shared.iter_mut().for_each(|(position, _)| *position -= self.sent);
            self.sent = 0;
        }
    }
}
