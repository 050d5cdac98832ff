//! A connection of a join. It sends and reads bytes without waiting, and splits the bytes that it
//! reads into messages.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::SockRef;
#[cfg(test)]
use socket2::TcpKeepalive;

use super::message::Message;
use crate::fork::Closed;
use crate::noise::{RECORD_BYTES, Session, TAG_BYTES};
use crate::wire::tcp::options;
use crate::wire::tcp::silence::Silence;

/// The most bytes that one call of `pump` reads, so that the maker's thread also serves its other
/// connections.
const READ_AT_ONCE: usize = 256 << 10;

/// The time between two looks whether the other host is silent. Each look counts one second at most
/// ([`Silence`]).
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// The most bytes of a greeting that a link keeps. Each part of a greeting is shorter.
const GREETING_BYTES: usize = 256;

/// Whether a connection is open, as far as its last read or write has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkState {
    /// The connection is open.
    Open,
    /// The other side has closed the connection, or the connection has broken. Bytes that arrived
    /// before that can still be taken.
    Closed,
}

/// A connection whose reads and writes return at once.
#[derive(Debug)]
pub(super) struct Link {
    /// The connection.
    socket: Closed<TcpStream>,
    /// The bytes that have arrived and have not been taken. On a sealed link they are encrypted.
    inbox: Vec<u8>,
    /// On a sealed link: the decrypted bytes of messages that have not been taken.
    plain: Vec<u8>,
    /// The pieces that wait to be sent. Several links may share a piece.
    outbox: VecDeque<Arc<[u8]>>,
    /// How many bytes of the first piece have been sent.
    sent: usize,
    /// The encryption, where a secret is set.
    session: Option<Session>,
    /// The longest message that the other side may send, in bytes; 0 while it may only greet.
    longest: usize,
    /// The silence of the other host; `None` while the connection is being made.
    watch: Option<Watch>,
}

/// The silence of the host on the other side of a link.
#[derive(Debug)]
struct Watch {
    /// The time for which nothing has come.
    silence: Silence,
    /// When this process last looked.
    looked: Instant,
    /// The silence after which the host counts as lost.
    most: Duration,
}

impl Link {
    /// Returns the link of a connection that does not block.
    pub(super) fn new(socket: Closed<TcpStream>) -> Link {
        Link {
            socket,
            inbox: Vec::new(),
            plain: Vec::new(),
            outbox: VecDeque::new(),
            sent: 0,
            session: None,
            longest: 0,
            watch: None,
        }
    }

    /// Watches the other host from now on, because the connection is made. The link is closed once
    /// the host has been silent for longer than `DM_HOST_TIMEOUT_MS` allows. A process that is
    /// stopped, and so reads nothing, does not count as silent.
    pub(super) fn watch_host(&mut self) {
        self.watch(longest_silence());
    }

    fn watch(&mut self, most: Duration) {
        let silence = Silence::of(&SockRef::from(&*self.socket));
        self.watch = Some(Watch { silence, looked: Instant::now(), most });
    }

    /// Whether the other host has been silent for too long. The owner of a link calls this, or
    /// [`pump`](Link::pump), at least once in [`LOOK`].
    pub(super) fn is_silent(&mut self) -> bool {
        let Some(watch) = &mut self.watch else { return false };
        let since = watch.looked.elapsed();
        if since < LOOK.min(watch.most / 4) {
            return false;
        }
        watch.looked = Instant::now();
        watch.silence.look(&SockRef::from(&*self.socket), since) >= watch.most
    }

    /// Allows the other side to send messages of at most that many bytes.
    pub(super) fn allow_messages(&mut self, longest: usize) {
        self.longest = longest;
    }

    /// The most bytes that the link keeps before somebody takes them. Further bytes stay in the
    /// kernel.
    fn room(&self) -> usize {
        if self.longest == 0 { GREETING_BYTES } else { self.longest + 4 + (1 << 16) }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Returns why the connection could not be made, or `None` where it is established.
    pub(super) fn failure(&self) -> Option<io::Error> {
        match self.socket.take_error() {
            Ok(error) => error,
            Err(error) => Some(error),
        }
    }

    /// Whether bytes wait to be sent.
    pub(super) fn has_to_send(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Encrypts everything that is sent and read from now on.
    pub(super) fn seal(&mut self, session: Session) {
        self.session = Some(session);
    }

    /// Sends and reads what is possible without waiting.
    pub(super) fn pump(&mut self) -> LinkState {
        // Bytes that have arrived are read even after the connection has broken.
        let is_broken = self.push().is_err() || self.is_silent();
        let room = self.room();
        let mut buffer = [0; 16 << 10];
        let mut read = 0;
        while read < READ_AT_ONCE && self.inbox.len() < room {
            let wanted = buffer.len().min(room - self.inbox.len());
            match self.socket.read(&mut buffer[..wanted]) {
                Ok(0) => return LinkState::Closed,
                Ok(bytes) => {
                    self.inbox.extend_from_slice(&buffer[..bytes]);
                    read += bytes;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return LinkState::Closed,
            }
        }
        if is_broken { LinkState::Closed } else { LinkState::Open }
    }

    /// Sends what is possible without waiting.
    pub(super) fn push(&mut self) -> io::Result<()> {
        while let Some(piece) = self.outbox.front() {
            match self.socket.write(&piece[self.sent..]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.sent == piece.len() {
                self.sent = 0;
                self.outbox.pop_front();
            }
        }
        Ok(())
    }

    /// Forgets the bytes that have arrived.
    pub(super) fn discard(&mut self) {
        self.inbox.clear();
    }

    /// Takes the next `LENGTH` bytes without decrypting them. Returns `None` while fewer have
    /// arrived.
    pub(super) fn take<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        let taken = self.inbox.first_chunk::<LENGTH>().copied()?;
        self.inbox.drain(..LENGTH);
        Some(taken)
    }

    /// Puts bytes into the queue without a frame, and without encryption.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.outbox.push_back(bytes.into());
    }

    /// Puts a message into the queue. `frame` is the message in its frame.
    pub(super) fn put_frame(&mut self, frame: &Arc<[u8]>) -> Result<(), String> {
        let Some(session) = &mut self.session else {
            self.outbox.push_back(frame.clone());
            return Ok(());
        };
        let mut out = Vec::with_capacity(frame.len() + 64);
        for part in frame.chunks(RECORD_BYTES) {
            out.extend_from_slice(&((part.len() + TAG_BYTES) as u16).to_le_bytes());
            session.seal(part, &mut out).map_err(|broken| broken.to_string())?;
        }
        self.outbox.push_back(out.into());
        Ok(())
    }

    /// Returns the next message, or `None` until all of it has arrived. Fails for bytes that are no
    /// message.
    pub(super) fn message(&mut self) -> Result<Option<Message>, String> {
        self.decrypt()?;
        let plain = if self.session.is_some() { &mut self.plain } else { &mut self.inbox };
        let Some(length) = plain.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.longest {
            return Err(format!("a message of {length} bytes came, and at most {} are allowed", self.longest));
        }
        let Some(bytes) = plain.get(4..4 + length) else { return Ok(None) };
        let message = Message::decode(bytes).ok_or_else(|| format!("{length} bytes came that are no message"));
        plain.drain(..4 + length);
        message.map(Some)
    }

    /// Decrypts the records that have arrived completely.
    fn decrypt(&mut self) -> Result<(), String> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let mut at = 0;
        while self.plain.len() < self.longest + 4 {
            let Some((length, rest)) = self.inbox[at..].split_first_chunk::<2>() else { break };
            let length = usize::from(u16::from_le_bytes(*length));
            let Some(record) = rest.get(..length) else { break };
            session.open(record, &mut self.plain).map_err(|broken| broken.to_string())?;
            at += 2 + length;
        }
        self.inbox.drain(..at);
        Ok(())
    }
}

/// Returns a message in its frame: its length in four bytes, and its bytes.
pub(super) fn frame(message: &Message) -> Arc<[u8]> {
    let bytes = message.encode();
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat().into()
}

/// Returns how long the other host may be silent. A wrong value of `DM_HOST_TIMEOUT_MS` is refused
/// where the wire is made.
fn longest_silence() -> Duration {
    options::silence().unwrap_or(options::SILENCE)
}

/// Sets the options of a connection. Small messages are sent at once (no Nagle), and the kernel
/// sends probes while nothing is on the way. While the connection is being made, the kernel ends it
/// when the other host has been silent for too long. An option that the kernel refuses does no
/// harm.
pub(super) fn tune(socket: &TcpStream) {
    let (socket, silence) = (SockRef::from(socket), longest_silence());
    let _ = socket.set_tcp_nodelay(true);
    let _ = options::keep_alive(&socket, silence);
    let _ = socket.set_tcp_user_timeout(Some(silence));
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns a link over a new connection, and the other side.
    fn pair() -> (Link, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Closed::open(|| Ok(listener.accept()?.0)).unwrap();
        near.set_nonblocking(true).unwrap();
        tune(&near);
        (Link::new(near), far)
    }

    /// Sends more than the other side has room for.
    fn fill(link: &mut Link) {
        link.put(&vec![0; 64 << 20]);
        assert_eq!(link.pump(), LinkState::Open);
        assert!(link.has_to_send());
    }

    /// The test takes 3 s, because the kernel sends at most one probe a second.
    #[test]
    fn a_rank_that_reads_nothing_is_not_lost_while_its_host_answers() {
        let (mut link, far) = pair();
        link.watch(Duration::from_millis(1500));
        let probes = TcpKeepalive::new().with_time(Duration::from_secs(1)).with_interval(Duration::from_secs(1));
        SockRef::from(&far).set_tcp_keepalive(&probes).unwrap();
        // `TCP_USER_TIMEOUT` would end such a connection.
        assert_eq!(SockRef::from(&*link.socket).tcp_user_timeout().unwrap(), None);
        fill(&mut link);
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            assert_eq!(link.pump(), LinkState::Open);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_host_that_says_nothing_is_lost() {
        let (mut link, _far) = pair();
        link.watch(Duration::from_millis(300));
        // The other side's kernel sends no probes, and this kernel's probes for room are soon more
        // than 300 ms apart.
        fill(&mut link);
        let end = Instant::now() + Duration::from_secs(60);
        while link.pump() == LinkState::Open {
            assert!(Instant::now() < end, "the link stays open");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
