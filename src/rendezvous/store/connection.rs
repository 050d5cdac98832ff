//! One connection to a TCPStore server: sends and receives, to the deadline and unless cancelled.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use hostccl::fork::{self, Private};

use super::frame::{MAX_VALUE, op};
use crate::error::Error;
use crate::wait::Wait;

/// How long the answer to a cancellation may take before the connection is given up.
pub(super) const CANCEL_ANSWER: Duration = Duration::from_millis(150);

/// A stream in non-blocking mode.
pub(super) struct Connection {
    pub(super) stream: Private<TcpStream>,
    /// Requests that go out together with the next one.
    ahead: Vec<u8>,
    /// Bytes of their answers that come before the next one's, and are of no interest.
    unread: usize,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The server learns of the end also where a process made by `clone` has a copy of the socket. In a forked child it is closed already.
        if !fork::is_child() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Why an exchange ended early.
pub(super) enum Broken {
    Io(io::Error),
    Late,
    Ended(Error),
}

impl Connection {
    pub(super) fn new(stream: Private<TcpStream>) -> Connection {
        Connection { stream, ahead: Vec::new(), unread: 0 }
    }

    /// Sends those requests together with the next one, in one packet, and skips their answers, which have that many bytes together.
    pub(super) fn send_ahead(&mut self, requests: Vec<u8>, answers: usize) {
        self.ahead.extend(requests);
        self.unread += answers;
    }

    pub(super) fn send(&mut self, bytes: &[u8], wait: &Wait) -> std::result::Result<(), Broken> {
        if self.ahead.is_empty() {
            return self.send_all(bytes, wait);
        }
        let mut all = std::mem::take(&mut self.ahead);
        all.extend_from_slice(bytes);
        self.send_all(&all, wait)
    }

    pub(super) fn receive(&mut self, buffer: &mut [u8], wait: &Wait) -> std::result::Result<(), Broken> {
        let mut skipped = [0; 512];
        while self.unread > 0 {
            let part = self.unread.min(skipped.len());
            self.receive_all(&mut skipped[..part], wait)?;
            self.unread -= part;
        }
        self.receive_all(buffer, wait)
    }

    fn send_all(&mut self, mut bytes: &[u8], wait: &Wait) -> std::result::Result<(), Broken> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(libc::POLLOUT, wait)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(())
    }

    fn receive_all(&mut self, mut buffer: &mut [u8], wait: &Wait) -> std::result::Result<(), Broken> {
        while !buffer.is_empty() {
            match self.stream.read(buffer) {
                Ok(0) => return Err(Broken::Io(io::Error::new(ErrorKind::UnexpectedEof, "end of stream"))),
                Ok(count) => buffer = &mut buffer[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(libc::POLLIN, wait)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(())
    }

    /// Sleeps until the socket is ready, the deadline passes or the call is to end for another reason.
    fn ready(&self, events: i16, wait: &Wait) -> std::result::Result<(), Broken> {
        let mut lookout = wait.lookout();
        loop {
            wait.cancel.check().map_err(Broken::Ended)?;
            lookout.look().map_err(Broken::Ended)?;
            if wait.deadline.passed() {
                return Err(Broken::Late);
            }
            let mut poll = libc::pollfd { fd: self.stream.as_raw_fd(), events, revents: 0 };
            let millis = wait.deadline.slice().as_millis().max(1) as i32;
            // SAFETY: one valid entry.
            if unsafe { libc::poll(&mut poll, 1, millis) } > 0 {
                return Ok(());
            }
        }
    }

    /// Ends a WAIT that took too long and keeps the connection in step, so that looking at a key again and again does not connect again and
    /// again. Whether the key came after all: its answer may have crossed the cancellation.
    pub(super) fn cancel_wait(&mut self, wait: &Wait) -> std::result::Result<bool, Broken> {
        self.send(&[op::CANCEL_WAIT], wait)?;
        let came = self.byte(wait)? == 0;
        if came {
            self.byte(wait)?;
        }
        Ok(came)
    }

    pub(super) fn byte(&mut self, wait: &Wait) -> std::result::Result<u8, Broken> {
        let mut byte = [0];
        self.receive(&mut byte, wait)?;
        Ok(byte[0])
    }

    pub(super) fn number(&mut self, wait: &Wait) -> std::result::Result<i64, Broken> {
        let mut number = [0; 8];
        self.receive(&mut number, wait)?;
        Ok(i64::from_le_bytes(number))
    }

    pub(super) fn string(&mut self, wait: &Wait) -> std::result::Result<Vec<u8>, Broken> {
        let len = self.number(wait)?;
        if !(0..=MAX_VALUE as i64).contains(&len) {
            return Err(Broken::Ended(Error::store(format!(
                "the store announces a value of {len} bytes; at most {MAX_VALUE} are taken"
            ))));
        }
        let mut bytes = vec![0; len as usize];
        self.receive(&mut bytes, wait)?;
        Ok(bytes)
    }
}
