//! The records of an encrypted connection: a length of two bytes, and that many sealed bytes.

use std::io;

use socket2::Socket;

use super::sockets;
use crate::noise::{RECORD_BYTES, Session, TAG_BYTES};

/// The room for records that were read and not opened, in bytes.
const ROOM: usize = 256 << 10;
/// How many bytes the length before a record has.
const LENGTH: usize = 2;

/// Seals and opens records.
#[derive(Debug)]
pub(super) struct Cipher {
    /// The session, which is ready.
    session: Session,
    /// Bytes that were read: those from `start` to `end` are not opened.
    raw: Box<[u8]>,
    start: usize,
    end: usize,
    /// The text of the last record that was opened.
    opened: Vec<u8>,
    /// The text of the record that is sealed next.
    text: Vec<u8>,
    /// Sealed records, of which `written` bytes are written.
    out: Vec<u8>,
    written: usize,
}

impl Cipher {
    pub(super) fn new(session: Session) -> Cipher {
        Cipher {
            session,
            raw: vec![0; ROOM].into_boxed_slice(),
            start: 0,
            end: 0,
            opened: Vec::new(),
            text: Vec::new(),
            out: Vec::new(),
            written: 0,
        }
    }

    /// Reads bytes that have come. Returns 0 where the other side has closed the connection, and
    /// `None` where nothing has come.
    pub(super) fn receive(&mut self, socket: &Socket) -> io::Result<Option<usize>> {
        self.raw.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let free = &mut self.raw[self.end..];
        let mut part = [libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() }];
        // SAFETY: the part is the free part of `raw`.
        let got = unsafe { sockets::receive(socket, &mut part) }?;
        self.end += got.unwrap_or(0);
        Ok(got)
    }

    /// Opens the next record, if all of it has come. Returns its text.
    pub(super) fn open(&mut self) -> Result<Option<&[u8]>, String> {
        let have = &self.raw[self.start..self.end];
        let Some((length, rest)) = have.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes(*length));
        if length <= TAG_BYTES {
            return Err(format!("a record of {length} bytes"));
        }
        let Some(record) = rest.get(..length) else { return Ok(None) };
        self.opened.clear();
        self.session.open(record, &mut self.opened).map_err(|why| why.to_string())?;
        self.start += LENGTH + length;
        Ok(Some(&self.opened))
    }

    /// Seals as many bytes of `head` and then `payload` as one record takes. Returns how many
    /// bytes it has sealed.
    pub(super) fn seal(&mut self, head: &[u8], payload: &[u8]) -> Result<usize, String> {
        let of_head = head.len().min(RECORD_BYTES);
        let of_payload = payload.len().min(RECORD_BYTES - of_head);
        self.text.clear();
        self.text.extend_from_slice(&head[..of_head]);
        self.text.extend_from_slice(&payload[..of_payload]);
        self.out.extend_from_slice(&((self.text.len() + TAG_BYTES) as u16).to_le_bytes());
        self.session.seal(&self.text, &mut self.out).map_err(|why| why.to_string())?;
        Ok(of_head + of_payload)
    }

    /// The sealed bytes that are not written.
    pub(super) fn sealed(&self) -> &[u8] {
        &self.out[self.written..]
    }

    /// Counts sealed bytes as written.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.written += bytes;
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
        }
    }
}
