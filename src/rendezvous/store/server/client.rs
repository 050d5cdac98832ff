//! One connection as the server sees it: what came of a request, what waits to be sent, and whether it may ask at all.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use hostccl::fork::Private;

use super::super::frame::{DENIED, Malformed, Measure, Request, Writer, op, request};
use super::super::poll::Interest;
use super::super::secret::{NONCE, Secret, Side, nonce};

/// Unsent replies, in bytes, from which on a client is not listened to.
const HIGH_WATER: usize = 1 << 20;
/// Buffers that were larger are given back when they are empty.
const KEPT: usize = 4 << 10;
/// The longest nonce that is taken.
const MAX_NONCE: usize = 256;

/// Whether a client may ask.
pub(super) enum Standing {
    /// It has not said hello.
    Stranger,
    /// It has, and must prove that it has the secret.
    Greeted,
    /// Its nonce and ours, for its proof.
    Challenged(Vec<u8>, [u8; NONCE]),
    Admitted,
}

pub(super) struct Connection {
    pub(super) stream: Private<TcpStream>,
    pub(super) interest: Interest,
    pub(super) standing: Standing,
    /// It gets what is unsent, and is then dropped.
    pub(super) ending: bool,
    /// It has asked for more than one turn's work, and is not read from before its next turn.
    pub(super) resuming: bool,
    received: Vec<u8>,
    measure: Measure,
    unsent: Vec<u8>,
    sent: usize,
    /// What the server counts for it.
    pub(super) counted: usize,
}

/// What to do after an attempt to read.
pub(super) enum Came {
    Bytes(usize),
    Nothing,
    End,
}

impl Connection {
    pub(super) fn new(stream: Private<TcpStream>) -> Connection {
        Connection {
            stream,
            interest: Interest { read: true, write: false },
            standing: Standing::Stranger,
            ending: false,
            resuming: false,
            received: Vec::new(),
            measure: Measure::default(),
            unsent: Vec::new(),
            sent: 0,
            counted: 0,
        }
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Came {
        loop {
            return match self.stream.read(buffer) {
                Ok(0) => Came::End,
                Ok(count) => Came::Bytes(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => Came::Nothing,
                Err(_) => Came::End,
            };
        }
    }

    /// Whether its requests are to wait until it reads.
    pub(super) fn is_deaf(&self) -> bool {
        self.unsent() > HIGH_WATER
    }

    pub(super) fn has_received(&self) -> bool {
        !self.received.is_empty()
    }

    /// Bytes that it makes the server keep.
    pub(super) fn buffered(&self) -> usize {
        self.received.capacity() + self.unsent.capacity()
    }

    /// What is there to be carried out: what was left of earlier and what came now. It comes back with [`Connection::keep`].
    pub(super) fn pending<'a>(&mut self, new: &'a [u8]) -> std::borrow::Cow<'a, [u8]> {
        if self.received.is_empty() {
            return new.into();
        }
        self.received.extend_from_slice(new);
        std::mem::take(&mut self.received).into()
    }

    /// Keeps what is left of the pending bytes from `at` on.
    pub(super) fn keep(&mut self, pending: std::borrow::Cow<'_, [u8]>, at: usize) {
        self.received = match pending {
            std::borrow::Cow::Owned(bytes) if at == 0 => bytes,
            pending => pending[at..].to_vec(),
        };
    }

    /// The next request that `bytes` begins with, and its length.
    pub(super) fn next(&mut self, bytes: &[u8]) -> Result<Option<(Request, usize)>, Malformed> {
        // Who may not ask leaves nothing here but a greeting and a proof, and those are short.
        let greetings = [op::VALIDATE, op::PING, op::CHALLENGE, op::PROOF];
        if !self.is_admitted() && !bytes.first().is_none_or(|op| greetings.contains(op)) {
            return Err(Malformed("no greeting, or no proof".to_owned()));
        }
        let Some(length) = self.measure.length(bytes)? else { return Ok(None) };
        Ok(request(&bytes[..length]).map(|request| (request, length)))
    }

    pub(super) fn is_admitted(&self) -> bool {
        matches!(self.standing, Standing::Admitted)
    }

    /// Gives back what it makes the server keep; then it is dropped.
    pub(super) fn give_up(&mut self) {
        (self.received, self.unsent, self.sent) = (Vec::new(), Vec::new(), 0);
        (self.ending, self.counted) = (true, 0);
    }

    /// Bytes that are still to be sent.
    pub(super) fn unsent(&self) -> usize {
        self.unsent.len() - self.sent
    }

    pub(super) fn queue(&mut self, bytes: &[u8]) {
        self.unsent.extend_from_slice(bytes);
    }

    /// Sends what the socket takes. An error says that the client is gone.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.unsent.len() {
            match self.stream.write(&self.unsent[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.sent == self.unsent.len() {
            self.sent = 0;
            if self.unsent.capacity() > KEPT { self.unsent = Vec::new() } else { self.unsent.clear() }
        } else if self.sent > HIGH_WATER {
            self.unsent.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// What the connection itself answers before it may ask: a greeting, and with a secret the two proofs. Gives the request back when
    /// it may be carried out.
    pub(super) fn admit(&mut self, request: Request, secret: Option<&Secret>) -> Result<Option<Request>, String> {
        let string = |bytes: &[u8]| Writer::default().string(bytes).finish();
        match (&self.standing, request, secret) {
            (Standing::Admitted, Request::Challenge(_), None) => self.queue(&string(b"")),
            (Standing::Admitted, request, _) => return Ok(Some(request)),
            (Standing::Stranger, request @ Request::Validate(_), None) => {
                self.standing = Standing::Admitted;
                return Ok(Some(request));
            }
            (Standing::Stranger, request @ Request::Validate(_), Some(_)) => {
                self.standing = Standing::Greeted;
                return Ok(Some(request));
            }
            (Standing::Greeted, Request::Ping(_), Some(_)) => {
                self.queue(&DENIED);
                self.ending = true;
            }
            (Standing::Greeted, Request::Challenge(theirs), Some(_)) if theirs.len() <= MAX_NONCE => {
                let ours = nonce().map_err(|error| error.to_string())?;
                self.queue(&string(&ours));
                self.standing = Standing::Challenged(theirs, ours);
            }
            (Standing::Challenged(theirs, ours), Request::Proof(proof), Some(secret)) => {
                if secret.is_proof(&proof, Side::Client, theirs, ours) {
                    let proof = secret.proof(Side::Server, theirs, ours);
                    self.queue(&string(&proof));
                    self.standing = Standing::Admitted;
                } else {
                    self.queue(&string(b""));
                    self.ending = true;
                }
            }
            _ => return Err("no greeting, or no proof".to_owned()),
        }
        Ok(None)
    }
}
