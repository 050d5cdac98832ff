//! One connection to a TCPStore server, which sends and receives until the deadline or until the
//! call is cancelled.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use hostccl::fork::{self, Private};
use hostccl::noise::Broken;
use rustix::event::{PollFd, PollFlags, poll};

use super::frame::{MAX_VALUE, op};
use super::poll::timespec;
use super::records::{Records, TEXT};
use crate::error::Error;
use crate::wait::Wait;

/// How long the answer to a cancellation may take before the connection is given up.
pub(super) const CANCEL_ANSWER: Duration = Duration::from_millis(150);

/// How many encrypted bytes are read in one system call.
const READ: usize = 32 << 10;

/// How many bytes an open connection reads in one system call where the caller wants fewer. An
/// answer consists of short parts, which come together.
const READ_OPEN: usize = 1 << 10;

/// A stream in non-blocking mode.
pub(super) struct Connection {
    /// The socket, which does not block.
    pub(super) stream: Private<TcpStream>,
    /// The nonce of the greeting, by which the server knows this connection.
    pub(super) nonce: u32,
    /// Requests that are sent together with the next one.
    ahead: Vec<u8>,
    /// How many bytes the answers to these requests have. These answers come before the answer to
    /// the next request, and are skipped.
    unread: usize,
    /// Bytes that have come, decrypted where the store has a secret.
    text: Vec<u8>,
    /// How many bytes of `text` were taken. As soon as all of them are taken, `text` is emptied.
    taken: usize,
    /// The encryption in both directions, where the store has a secret.
    records: Option<Box<Records>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The server learns of the end also when a process made by `clone` has a copy of the
        // socket. In a forked child the socket is closed already.
        if !fork::is_child() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Why an exchange ended early.
pub(super) enum ExchangeError {
    /// The connection has failed.
    Io(io::Error),
    /// The deadline has passed.
    Late,
    /// The wait was cancelled, or the answer is no answer of a TCPStore.
    Ended(Error),
}

impl Connection {
    pub(super) fn new(stream: Private<TcpStream>) -> Connection {
        Connection { stream, nonce: 0, ahead: Vec::new(), unread: 0, text: Vec::new(), taken: 0, records: None }
    }

    /// Returns the socket, and the encryption where the store has a secret.
    pub(super) fn parts(&mut self) -> (&TcpStream, Option<&mut Records>) {
        (&self.stream, self.records.as_deref_mut())
    }

    /// Whether more has come than the answers that were received.
    pub(super) fn has_more(&self) -> bool {
        !self.text.is_empty()
    }

    /// Encrypts everything from now on, in both directions. Fails where something has come already:
    /// it is not encrypted, so anybody may have sent it.
    pub(super) fn encrypt(&mut self, records: Records) -> std::result::Result<(), ExchangeError> {
        if self.has_more() {
            return Err(broken(Broken::Handshake));
        }
        self.records = Some(Box::new(records));
        Ok(())
    }

    /// Sends these requests together with the next one, in one packet, and skips their answers,
    /// which have that many bytes together.
    pub(super) fn send_ahead(&mut self, requests: Vec<u8>, answers: usize) {
        self.ahead.extend(requests);
        self.unread += answers;
    }

    pub(super) fn send(&mut self, bytes: &[u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
        if self.ahead.is_empty() {
            return self.send_text(bytes, wait);
        }
        let mut all = std::mem::take(&mut self.ahead);
        all.extend_from_slice(bytes);
        self.send_text(&all, wait)
    }

    pub(super) fn receive(&mut self, buffer: &mut [u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
        // Skipped bytes count at once, because the wait may end inside an answer and the connection
        // may stay in use after that (`cancel_wait`).
        let mut skipped = [0; 512];
        while self.unread > 0 {
            let part = self.unread.min(skipped.len());
            self.unread -= self.receive_some_text(&mut skipped[..part], wait)?;
        }
        self.receive_text(buffer, wait)
    }

    /// Sends these bytes, encrypted where the store has a secret.
    fn send_text(&mut self, bytes: &[u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
        let Some(mut records) = self.records.take() else { return self.send_all(bytes, wait) };
        let mut record = Vec::with_capacity(bytes.len().min(TEXT) + 64);
        let sent = bytes.chunks(TEXT).try_for_each(|text| {
            record.clear();
            records.seal(text, &mut record).map_err(broken)?;
            self.send_all(&record, wait)
        });
        self.records = Some(records);
        sent
    }

    /// Fills the buffer with what the server sends, decrypted where the store has a secret.
    fn receive_text(&mut self, mut buffer: &mut [u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
        while !buffer.is_empty() {
            let count = self.receive_some_text(buffer, wait)?;
            buffer = &mut buffer[count..];
        }
        Ok(())
    }

    /// Waits until something has come, decrypted where the store has a secret. Returns how many
    /// bytes of the buffer it fills, which is at least one. After an error nothing is lost: the
    /// bytes that came are still to be received.
    fn receive_some_text(&mut self, buffer: &mut [u8], wait: &Wait) -> std::result::Result<usize, ExchangeError> {
        while self.text.is_empty() {
            if self.records.is_some() {
                let mut bytes = [0; READ];
                let count = self.receive_some(&mut bytes, wait)?;
                let Some(records) = &mut self.records else { continue };
                records.open(&bytes[..count], &mut self.text).map_err(broken)?;
            } else if buffer.len() < READ_OPEN {
                let mut bytes = [0; READ_OPEN];
                let count = self.receive_some(&mut bytes, wait)?;
                self.text.extend_from_slice(&bytes[..count]);
            } else {
                return self.receive_some(buffer, wait);
            }
        }
        let there = &self.text[self.taken..];
        let count = there.len().min(buffer.len());
        buffer[..count].copy_from_slice(&there[..count]);
        self.taken += count;
        if self.taken == self.text.len() {
            self.text.clear();
            self.taken = 0;
        }
        Ok(count)
    }

    fn send_all(&mut self, mut bytes: &[u8], wait: &Wait) -> std::result::Result<(), ExchangeError> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(PollFlags::OUT, wait)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ExchangeError::Io(error)),
            }
        }
        Ok(())
    }

    /// Waits until something has come, and returns how many bytes it was, which is at least one.
    fn receive_some(&mut self, buffer: &mut [u8], wait: &Wait) -> std::result::Result<usize, ExchangeError> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(ExchangeError::Io(io::Error::new(ErrorKind::UnexpectedEof, "end of stream"))),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(PollFlags::IN, wait)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ExchangeError::Io(error)),
            }
        }
    }

    /// Sleeps until the socket is ready. Fails when the deadline passes or the call is cancelled.
    fn ready(&self, events: PollFlags, wait: &Wait) -> std::result::Result<(), ExchangeError> {
        let mut lookout = wait.lookout();
        loop {
            wait.cancel.check().map_err(ExchangeError::Ended)?;
            lookout.look().map_err(ExchangeError::Ended)?;
            if wait.deadline.passed() {
                return Err(ExchangeError::Late);
            }
            let slice = timespec(wait.deadline.slice().max(Duration::from_millis(1)));
            if poll(&mut [PollFd::new(&*self.stream, events)], Some(&slice)).is_ok_and(|ready| ready > 0) {
                return Ok(());
            }
        }
    }

    /// Ends a WAIT that took too long. All answers are read, so the connection can be used again.
    /// Returns whether the key came after all, because its answer may have crossed the
    /// cancellation.
    pub(super) fn cancel_wait(&mut self, wait: &Wait) -> std::result::Result<bool, ExchangeError> {
        self.send(&[op::CANCEL_WAIT], wait)?;
        let came = self.byte(wait)? == 0;
        if came {
            self.byte(wait)?;
        }
        Ok(came)
    }

    pub(super) fn byte(&mut self, wait: &Wait) -> std::result::Result<u8, ExchangeError> {
        let mut byte = [0];
        self.receive(&mut byte, wait)?;
        Ok(byte[0])
    }

    pub(super) fn number(&mut self, wait: &Wait) -> std::result::Result<i64, ExchangeError> {
        let mut number = [0; 8];
        self.receive(&mut number, wait)?;
        Ok(i64::from_le_bytes(number))
    }

    pub(super) fn string(&mut self, wait: &Wait) -> std::result::Result<Vec<u8>, ExchangeError> {
        let len = self.number(wait)?;
        if !(0..=MAX_VALUE as i64).contains(&len) {
            return Err(ExchangeError::Ended(Error::store(format!(
                "the store announces a value of {len} bytes; at most {MAX_VALUE} are taken"
            ))));
        }
        let mut bytes = vec![0; len as usize];
        self.receive(&mut bytes, wait)?;
        Ok(bytes)
    }
}

/// Returns the error of a connection whose encryption broke.
fn broken(why: Broken) -> ExchangeError {
    ExchangeError::Ended(Error::store(format!("the connection to the store broke: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::store::secret::Secret;
    use crate::wait::Deadline;
    use std::net::TcpListener;

    /// Returns a connection, and the server's side of it.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Private::open(|| TcpStream::connect(listener.local_addr().unwrap())).unwrap();
        let (server, _) = listener.accept().unwrap();
        server.set_nodelay(true).unwrap();
        client.set_nonblocking(true).unwrap();
        (Connection::new(client), server)
    }

    /// Sends the bytes to the client, and waits until all of them are there.
    fn deliver(server: &mut TcpStream, bytes: &[u8], client: &Connection) {
        server.write_all(bytes).unwrap();
        let all_there = || client.stream.peek(&mut [0; 512]).is_ok_and(|count| count == bytes.len());
        let deadline = Deadline::after(Duration::from_secs(10));
        while !all_there() {
            assert!(!deadline.passed(), "{} bytes did not come", bytes.len());
            std::thread::yield_now();
        }
    }

    /// Lets a wait end while only a part of the answers to be skipped has come. Then the rest
    /// comes, and the answer of the wait. `seal` turns the text of the server into what it sends.
    fn skip_in_parts(client: &mut Connection, server: &mut TcpStream, mut seal: impl FnMut(&[u8]) -> Vec<u8>) {
        let late = Wait::after(Duration::ZERO);
        client.send_ahead(b"requests".to_vec(), 24);
        assert!(client.send(b"wait", &Wait::after(Duration::from_secs(10))).is_ok());
        for part in [&[1; 8][..], &[2; 5][..]] {
            deliver(server, &seal(part), client);
            assert!(matches!(client.byte(&late), Err(ExchangeError::Late)));
        }
        deliver(server, &seal(&[&[3; 11][..], &[42]].concat()), client);
        assert!(matches!(client.byte(&late), Ok(42)), "the skipped answers were counted wrongly");
        assert_eq!(client.unread, 0);
    }

    #[test]
    fn a_wait_that_ends_between_skipped_answers_remembers_what_it_has_skipped() {
        let (mut client, mut server) = pair();
        skip_in_parts(&mut client, &mut server, <[u8]>::to_vec);

        let (mut client, mut server) = pair();
        let secret = Secret::new(b"open sesame").unwrap();
        let (mut records, first) = Records::initiator(&secret).unwrap();
        let (mut theirs, second) = Records::responder(&secret, &first).unwrap();
        records.finish(&second).unwrap();
        assert!(client.encrypt(records).is_ok());
        skip_in_parts(&mut client, &mut server, |text| {
            let mut record = Vec::new();
            theirs.seal(text, &mut record).unwrap();
            record
        });
    }

    /// Somebody without the secret may add bytes to the answer of the handshake. They must not
    /// count as text that was decrypted.
    #[test]
    fn bytes_behind_the_handshake_end_the_connection() {
        let (mut client, mut server) = pair();
        let secret = Secret::new(b"open sesame").unwrap();
        let (mut records, first) = Records::initiator(&secret).unwrap();
        let (_, second) = Records::responder(&secret, &first).unwrap();
        let answer = [&(second.len() as u64).to_le_bytes(), &second[..]].concat();
        deliver(&mut server, &[&answer[..], b"forged"].concat(), &client);
        let Ok(second) = client.string(&Wait::after(Duration::from_secs(10))) else { panic!("no answer") };
        records.finish(&second).unwrap();
        assert!(client.has_more() && client.encrypt(records).is_err());
    }
}
