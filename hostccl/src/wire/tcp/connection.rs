//! A connection whose sides have proved themselves: bytes to and from the socket.

use std::io::{self, ErrorKind};

use socket2::Socket;

use super::cipher::Cipher;
use super::frame::{HEADER, Header, Kind, PIECE};
use super::inbox::Inbox;
use super::incoming::Sink;
use super::ledger::{Key, Ledger};
use super::remote::{Remote, Send, slice};
use super::silence::Silence;
use super::sockets;
use crate::fork::Private;
use crate::wire::Lost;

/// The room for bytes that were read and not parsed, in bytes.
const ROOM: usize = 32 << 10;
/// The room, in bytes, for bytes that were read and not parsed where the connection is encrypted.
/// The room fits a part of a header and a record behind it.
const SECRET_ROOM: usize = 128 << 10;
/// The longest message that is copied to be written together with others, in bytes.
const SHORT: usize = 4 << 10;
/// When the frames in the head have more bytes than this together, they are written without waiting
/// for further frames.
const MOST_SHORT: usize = 16 << 10;
/// The most bytes that one call reads or writes before others have their turn.
const TURN: usize = 1 << 20;

/// The bytes of a message that follow the head.
#[derive(Debug)]
enum Payload {
    /// No bytes follow the head.
    None,
    /// The bytes lie in the caller's buffer.
    Of {
        /// The send.
        send: Send,
        /// The address of the first byte that was not written.
        from: usize,
        /// How many bytes are left of this piece.
        left: usize,
    },
    /// The send was cancelled in the middle of the frame, so this is a copy of the rest.
    Copy {
        /// The rest of the frame.
        rest: Vec<u8>,
        /// How many bytes of the rest are written.
        written: usize,
    },
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    /// The socket, which does not block.
    pub(super) socket: Private<Socket>,
    /// The other side's address, for messages.
    pub(super) address: String,
    /// Bytes that were read and not parsed.
    inbox: Inbox,
    /// Where the bytes of the current frame belong. The current frame is the frame whose header
    /// came last.
    sink: Sink,
    /// How many bytes of the current frame have not come.
    left: usize,
    /// Bytes that are being written: whole frames, and the header of `payload`.
    head: Vec<u8>,
    /// How many bytes of the head are written.
    head_written: usize,
    /// The bytes that follow the head.
    payload: Payload,
    /// Seals and opens records, where the connection is encrypted.
    cipher: Option<Box<Cipher>>,
    /// Whether the socket's epoll entry waits for room to write.
    pub(super) waits_for_room: bool,
    /// The time for which nothing has come over the socket.
    pub(super) silence: Silence,
}

/// The progress that a call has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    /// Whether bytes have moved.
    pub(super) moved: bool,
    /// Whether more is left: a limit has ended the call, or the socket has no room.
    pub(super) more: bool,
}

impl Connection {
    pub(super) fn new(socket: Private<Socket>, address: String, cipher: Option<Box<Cipher>>) -> Connection {
        let room = if cipher.is_some() { SECRET_ROOM } else { ROOM };
        Connection {
            silence: Silence::of(&socket),
            socket,
            address,
            inbox: Inbox::new(room),
            sink: Sink::None,
            left: 0,
            head: Vec::new(),
            head_written: 0,
            payload: Payload::None,
            cipher,
            waits_for_room: false,
        }
    }

    /// Makes the connection drop the bytes of a message from now on. Returns the message's length
    /// if a frame of it was being read.
    pub(super) fn forget(&mut self, forgotten: Key) -> Option<usize> {
        match self.sink {
            Sink::Direct { key, total, .. } if key == forgotten => {
                self.sink = Sink::Drop;
                Some(total)
            }
            _ => None,
        }
    }

    /// Ends the use of a send's buffer. The rest of the frame that is being written is copied.
    /// Returns whether further frames of the message would have followed.
    pub(super) fn detach(&mut self, request: u64) -> bool {
        let Payload::Of { send, from, left } = &self.payload else { return false };
        if send.request != request {
            return false;
        }
        let is_cut = send.sent < send.bytes;
        // SAFETY: the request is under way, so its buffer is valid.
        let rest = unsafe { slice(*from, *left) }.to_vec();
        self.payload = Payload::Copy { rest, written: 0 };
        is_cut
    }

    /// Whether the head or the payload has bytes that are neither written nor sealed.
    fn has_frames(&self) -> bool {
        self.head_written < self.head.len() || !matches!(self.payload, Payload::None)
    }

    /// Whether bytes are left that belong to frames that were begun.
    pub(super) fn is_writing(&self) -> bool {
        self.has_frames() || self.cipher.as_ref().is_some_and(|cipher| !cipher.sealed().is_empty())
    }

    /// Whether the kernel has all bytes of the frames that were begun. With `arrival`, whether the
    /// other host has acknowledged these bytes.
    pub(super) fn is_flushed(&self, arrival: bool) -> bool {
        !self.is_writing() && (!arrival || sockets::is_sent(&self.socket))
    }

    fn lost(&self, reason: &io::Error) -> Lost {
        let address = &self.address;
        let silent =
            matches!(reason.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable);
        let why = match silent {
            true => format!("{address} has fallen silent: {reason}"),
            false => format!("the connection to {address} broke: {reason}"),
        };
        Lost { ended: !silent, why }
    }

    /// Reads bytes that have come. If the connection cannot go on, fails with the reason why the
    /// peer is lost.
    pub(super) fn read(&mut self, remote: &mut Remote, ledger: &mut Ledger) -> Result<Done, Lost> {
        let mut done = Done { moved: false, more: false };
        let mut read = 0;
        while read < TURN {
            if self.cipher.is_some() {
                match self.read_record(remote, ledger)? {
                    Some(got) => {
                        done.moved = true;
                        read += got;
                        continue;
                    }
                    None => return Ok(done),
                }
            }
            let (direct, direct_left) = match self.sink {
                Sink::Direct { to, .. } if self.inbox.bytes().is_empty() => (to, self.left),
                _ => (0, 0),
            };
            let free = self.inbox.room(HEADER);
            let room = free.len();
            let mut parts = [
                libc::iovec { iov_base: direct as *mut libc::c_void, iov_len: direct_left },
                libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: room },
            ];
            let parts = if direct_left > 0 { &mut parts[..] } else { &mut parts[1..] };
            // SAFETY: the parts are the rest of a posted receive's buffer, which stays valid until
            // its request ends, and the free part of the inbox.
            let got = match unsafe { sockets::receive(&self.socket, parts) } {
                Ok(Some(0)) => {
                    return Err(Lost { ended: true, why: format!("{} closed the connection", self.address) });
                }
                Ok(Some(got)) => got,
                Ok(None) => return Ok(done),
                Err(reason) => return Err(self.lost(&reason)),
            };
            done.moved = true;
            read += got;
            let into = got.min(direct_left);
            if into > 0 {
                self.advance(into, remote, ledger);
            }
            self.inbox.wrote(got - into);
            self.parse(remote, ledger).map_err(|why| garbage(&self.address, &why))?;
            if got < room + direct_left {
                return Ok(done);
            }
        }
        done.more = true;
        Ok(done)
    }

    /// Reads and opens records of an encrypted connection. Returns how many bytes were read from
    /// the socket, or `None` where nothing has come.
    fn read_record(&mut self, remote: &mut Remote, ledger: &mut Ledger) -> Result<Option<usize>, Lost> {
        let Some(cipher) = &mut self.cipher else { return Ok(None) };
        let got = match cipher.receive(&self.socket) {
            Ok(Some(0)) => {
                return Err(Lost { ended: true, why: format!("{} closed the connection", self.address) });
            }
            Ok(Some(got)) => got,
            Ok(None) => return Ok(None),
            Err(reason) => return Err(self.lost(&reason)),
        };
        loop {
            let Some(cipher) = &mut self.cipher else { return Ok(None) };
            let plain = match cipher.open().map_err(|why| garbage(&self.address, &why))? {
                Some(plain) => plain,
                None => return Ok(Some(got)),
            };
            // The parser leaves less than a header, so a record fits.
            self.inbox.room(plain.len())[..plain.len()].copy_from_slice(plain);
            self.inbox.wrote(plain.len());
            self.parse(remote, ledger).map_err(|why| garbage(&self.address, &why))?;
        }
    }

    /// Counts bytes of the current frame that are in place.
    fn advance(&mut self, bytes: usize, remote: &mut Remote, ledger: &mut Ledger) {
        self.left -= bytes;
        if let Sink::Direct { to, key, .. } = &mut self.sink {
            *to += bytes;
            remote.count_moved(*key, bytes);
        }
        if self.left == 0 {
            remote.finish(std::mem::replace(&mut self.sink, Sink::None), ledger);
        }
    }

    /// Takes frames from the inbox.
    fn parse(&mut self, remote: &mut Remote, ledger: &mut Ledger) -> Result<(), String> {
        loop {
            let waiting = self.inbox.bytes();
            if self.left > 0 {
                let bytes = waiting.len().min(self.left);
                if bytes == 0 {
                    return Ok(());
                }
                let data = &waiting[..bytes];
                match &mut self.sink {
                    // SAFETY: the frame's bytes fit into the posted receive's buffer, which stays
                    // valid until its request ends.
                    Sink::Direct { to, .. } => unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), *to as *mut u8, bytes);
                    },
                    Sink::Keep { data: kept, .. } | Sink::Notice { text: kept, .. } => kept.extend_from_slice(data),
                    Sink::None | Sink::Drop => {}
                }
                self.inbox.drop_first(bytes);
                self.advance(bytes, remote, ledger);
                continue;
            }
            let Some(raw) = waiting.first_chunk::<HEADER>() else { return Ok(()) };
            let header = Header::parse(raw)?;
            self.inbox.drop_first(HEADER);
            self.left = header.bytes;
            self.sink = remote.take_header(header, ledger)?;
            if self.left == 0 {
                remote.finish(std::mem::replace(&mut self.sink, Sink::None), ledger);
            }
        }
    }

    /// Writes what waits to be sent.
    pub(super) fn write(&mut self, remote: &mut Remote, ledger: &mut Ledger) -> Result<Done, Lost> {
        let mut done = Done { moved: false, more: false };
        let mut written = 0;
        while written < TURN {
            if self.cipher.as_ref().is_some_and(|cipher| !cipher.sealed().is_empty()) {
                match self.write_records() {
                    Ok(0) => {
                        done.more = true;
                        return Ok(done);
                    }
                    Ok(sent) => {
                        done.moved = true;
                        written += sent;
                        continue;
                    }
                    Err(reason) => return Err(self.lost(&reason)),
                }
            }
            if !self.has_frames() && !self.load(remote, ledger) {
                return Ok(done);
            }
            let head = &self.head[self.head_written..];
            let payload = match &self.payload {
                Payload::None => &[],
                // SAFETY: the send is under way, so its buffer is valid and unchanged.
                Payload::Of { from, left, .. } => unsafe { slice(*from, *left) },
                Payload::Copy { rest, written } => &rest[*written..],
            };
            if let Some(cipher) = &mut self.cipher {
                let sealed = cipher
                    .seal(head, payload)
                    .map_err(|why| Lost { ended: false, why: format!("{}: {why}", self.address) })?;
                self.wrote(sealed, remote, ledger);
                continue;
            }
            let asked = head.len() + payload.len();
            let sent = match sockets::send(&self.socket, head, payload) {
                Ok(Some(sent)) => sent,
                Ok(None) => {
                    done.more = true;
                    return Ok(done);
                }
                Err(reason) => return Err(self.lost(&reason)),
            };
            done.moved = true;
            written += sent;
            self.wrote(sent, remote, ledger);
            if sent < asked {
                done.more = true;
                return Ok(done);
            }
        }
        done.more = true;
        Ok(done)
    }

    /// Writes sealed records. Returns how many bytes were written; 0 where there is no room.
    fn write_records(&mut self) -> io::Result<usize> {
        let Some(cipher) = &mut self.cipher else { return Ok(0) };
        let sent = sockets::send(&self.socket, cipher.sealed(), &[])?.unwrap_or(0);
        cipher.sent(sent);
        Ok(sent)
    }

    /// Puts the next frames into the head and the payload. Returns whether there are any. Short
    /// messages are copied into the head, so one system call writes several of them. The copy ends
    /// the requests of short messages, because their buffers are not needed any more.
    fn load(&mut self, remote: &mut Remote, ledger: &mut Ledger) -> bool {
        self.head.clear();
        self.head_written = 0;
        self.head.append(&mut remote.last_frames);
        if remote.is_closing || !remote.has_output() {
            return !self.head.is_empty();
        }
        self.head.append(&mut remote.control);
        while let Some(mut send) = remote.queue.pop_front() {
            let left = (send.bytes - send.sent).min(PIECE);
            let kind = if send.eager { Kind::Eager } else { Kind::Data };
            let extra = if send.eager { 0 } else { send.bytes as u64 };
            let header = Header { kind, bytes: left, tag: send.key.0, index: send.key.1, extra };
            self.head.extend_from_slice(&header.to_bytes());
            let from = send.from + send.sent;
            if send.bytes > SHORT {
                send.sent += left;
                self.payload = Payload::Of { send, from, left };
                return true;
            }
            // SAFETY: the send is under way, so its buffer is valid and unchanged.
            self.head.extend_from_slice(unsafe { slice(from, left) });
            remote.count_moved(send.key, left);
            ledger.end(send.request, Ok(send.bytes));
            if self.head.len() > MOST_SHORT {
                break;
            }
        }
        true
    }

    /// Counts bytes that were written.
    fn wrote(&mut self, bytes: usize, remote: &mut Remote, ledger: &mut Ledger) {
        let of_head = bytes.min(self.head.len() - self.head_written);
        self.head_written += of_head;
        let bytes = bytes - of_head;
        let is_over = match &mut self.payload {
            Payload::None => false,
            Payload::Of { send, from, left } => {
                remote.count_moved(send.key, bytes);
                *from += bytes;
                *left -= bytes;
                *left == 0
            }
            Payload::Copy { rest, written } => {
                *written += bytes;
                *written == rest.len()
            }
        };
        if self.head_written == self.head.len() && is_over {
            if let Payload::Of { send, .. } = std::mem::replace(&mut self.payload, Payload::None) {
                if send.sent == send.bytes {
                    ledger.end(send.request, Ok(send.bytes));
                } else {
                    remote.queue.push_back(send);
                }
            }
        }
    }
}

/// Returns the loss of a peer that has sent bytes which break the protocol.
fn garbage(address: &str, why: &str) -> Lost {
    Lost { ended: false, why: format!("{address} sent garbage: {why}") }
}
