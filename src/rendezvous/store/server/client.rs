//! One connection as the server sees it: its requests, its replies, and whether its client may ask
//! for anything. With a secret, all that follows the handshake is encrypted.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Read};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use hostccl::noise::Broken;

use super::super::channels;
use super::super::frame::{DENIED, Malformed, Measure, OTHER_SECRET, Request, Writer, op, request};
use super::super::outgoing::Outgoing;
use super::super::poll::Interest;
use super::super::records::{Records, number_of};
use super::super::secret::Secret;
use super::super::table::Task;
use super::link::{Link, ReadOutcome, Trunk};

/// The server does not read from a client while its unsent replies have more bytes than this.
const HIGH_WATER: usize = 1 << 20;
/// A request of at least this many bytes keeps the buffer in which it came, so that its lists need
/// no copy.
const LONG: usize = 16 << 10;
/// How many units of work an encrypted byte counts, because it is encrypted or decrypted too.
const SEALED: usize = 4;
/// How many units of work a handshake counts. A handshake takes about as long as this many bytes
/// that are encrypted.
const HANDSHAKE: usize = 32 << 10;
/// A client that has taken none of its replies for this long counts as one that does not read.
const STALLED: Duration = Duration::from_secs(1);

/// Whether a client may ask for anything.
pub(super) enum Authentication {
    /// The client has not greeted.
    Stranger,
    /// The client has greeted, and must begin the handshake.
    Greeted,
    /// The server has answered the client's message of the handshake, which may be a copy of an
    /// earlier one. The client's first record proves that it has the secret.
    Answered,
    /// The client may ask for anything.
    Admitted,
}

/// A connection of one client.
pub(super) struct Connection {
    /// The client's socket, or its channel.
    pub(super) link: Link,
    /// The address from which the client connects.
    pub(super) address: IpAddr,
    /// The events for which the loop waits.
    pub(super) interest: Interest,
    /// How far the client is with its greeting and the handshake.
    pub(super) authentication: Authentication,
    /// Whether the connection is dropped once its replies are sent.
    pub(super) ending: bool,
    /// Whether the client has asked for more than one turn's work. Such a client waits in the
    /// queue for its next turn, and nothing is read from it before.
    pub(super) busy: bool,
    /// Whether the client is in the queue [`Serving::answered`](super::clients::Serving).
    pub(super) answered: bool,
    /// Whether the connection has failed because nothing comes from the client's host any more.
    pub(super) is_silent: bool,
    /// The channels, where the connection is a trunk.
    pub(super) trunk: Option<Box<Trunk>>,
    /// Whether the client has asked for something since it was admitted.
    pub(super) asked: bool,
    /// A request that is carried out in steps. The next request waits for its end.
    pub(super) task: Option<Box<Task>>,
    /// The nonce of the client's greeting. With this number the client asks why it was dropped.
    pub(super) nonce: u32,
    /// When the client took bytes of a reply the last time, or when the replies that it has not
    /// taken yet began to wait, or when it asked for something while no reply waited.
    pub(super) active: Instant,
    /// The bytes that have come, without those that were dropped from the front.
    received: Vec<u8>,
    /// How many bytes of `received` belong to requests that were taken.
    done: usize,
    /// How far the next request was measured.
    measure: Measure,
    /// The length of the next request, once all of it is there.
    measured: Option<usize>,
    /// The replies that are still to be sent.
    pub(super) outgoing: Outgoing,
    /// The encryption, from the handshake on. Without a secret there is none.
    records: Option<Box<Records>>,
    /// How many bytes of this client are in the server's count of buffered bytes.
    pub(super) counted: usize,
}

/// The result of a request at a connection whose client may have to prove that it has the secret.
pub(super) enum Admission {
    /// The request is to be carried out.
    CarryOut(Request),
    /// The connection itself has answered the request.
    Answered,
    /// The client has the wrong secret, or no secret, or it has a secret and the store has none.
    /// The text says which of these cases it is.
    Refused(&'static str),
}

impl Connection {
    pub(super) fn new(link: Link, address: IpAddr) -> Connection {
        Connection {
            link,
            address,
            interest: Interest { read: true, write: false },
            authentication: Authentication::Stranger,
            ending: false,
            busy: false,
            answered: false,
            is_silent: false,
            trunk: None,
            asked: false,
            task: None,
            nonce: 0,
            active: Instant::now(),
            received: Vec::new(),
            done: 0,
            measure: Measure::default(),
            measured: None,
            outgoing: Outgoing::default(),
            records: None,
            counted: 0,
        }
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> ReadOutcome {
        let stream = match &mut self.link {
            Link::Socket(stream) => stream,
            Link::Channel(channel) => return channel.read(buffer),
        };
        loop {
            return match stream.read(buffer) {
                Ok(0) => ReadOutcome::End,
                Ok(count) => ReadOutcome::Bytes(count),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => ReadOutcome::Nothing,
                Err(error) => {
                    self.is_silent = is_silence(&error);
                    ReadOutcome::End
                }
            };
        }
    }

    /// Whether so little is to be sent that those who wait for this connection may add to it.
    pub(super) fn is_clear(&self) -> bool {
        self.outgoing.left() <= HIGH_WATER / 2
    }

    /// Whether the client's requests must wait until it reads its replies.
    pub(super) fn is_backlogged(&self) -> bool {
        self.outgoing.left() > HIGH_WATER
    }

    /// Whether the client's channel has ended. A socket tells of its end when it is read.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&self.link, Link::Channel(channel) if channel.has_ended())
    }

    /// Whether the client has not read for a while though there are replies.
    pub(super) fn is_stalled(&self) -> bool {
        self.outgoing.left() > 0 && self.active.elapsed() > STALLED
    }

    /// Whether the connection has failed because nothing comes from the client's host any more. A
    /// process that ends closes its connections, or resets them.
    pub(super) fn is_silent(&self) -> bool {
        // The socket has the error of a connection that was not read after it failed.
        let has_failed_so = match &self.link {
            Link::Socket(stream) => stream.take_error().ok().flatten().is_some_and(|error| is_silence(&error)),
            Link::Channel(_) => false,
        };
        self.is_silent || has_failed_so
    }

    /// Whether there may be something to carry out without reading more.
    pub(super) fn has_more(&self) -> bool {
        self.task.is_some() || self.done < self.received.len()
    }

    /// Returns how many bytes of memory the client makes the server keep.
    pub(super) fn buffered(&self) -> usize {
        let records = self.records.as_ref().map_or(0, |records| records.memory());
        let task = self.task.as_ref().map_or(0, |task| task.memory());
        let inbox = match &self.link {
            Link::Socket(_) => 0,
            Link::Channel(channel) => channel.memory(),
        };
        self.received.capacity() + self.outgoing.memory() + records + task + inbox
    }

    /// Returns how many units of work a byte of this connection counts that is read or sent.
    pub(super) fn work_of_byte(&self) -> usize {
        if self.records.is_some() { SEALED } else { 1 }
    }

    /// Returns how many units of work the next request, which has that length, counts.
    pub(super) fn work_of_request(&self, length: usize) -> usize {
        let is_handshake = !self.is_admitted() && self.received.get(self.done) == Some(&op::HANDSHAKE);
        if is_handshake { HANDSHAKE } else { length }
    }

    /// Adds bytes that have come. Fails when a record does not open.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        if self.done > 0 {
            self.received.drain(..self.done);
            self.done = 0;
        }
        if self.outgoing.left() == 0 {
            // A request without a reply, such as SET, is activity too.
            self.active = Instant::now();
        }
        let Some(records) = &mut self.records else {
            self.received.extend_from_slice(bytes);
            return Ok(());
        };
        records.open(bytes, &mut self.received).map_err(|why| Malformed(why.to_string()))?;
        if records.is_proved() {
            self.authentication = Authentication::Admitted;
        }
        Ok(())
    }

    /// Returns the length of the next request, once all of it is there; in a trunk, the length of
    /// the next frame.
    pub(super) fn measure(&mut self) -> Result<Option<usize>, Malformed> {
        if self.measured.is_none() {
            let bytes = &self.received[self.done..];
            if self.trunk.is_some() {
                self.measured = channels::length(bytes)?;
                return Ok(self.measured);
            }
            // A client that is not admitted may send only a greeting and a handshake. These
            // requests are short, so such a client cannot fill the memory.
            let greetings = [op::VALIDATE, op::PING, op::HANDSHAKE];
            if !self.is_admitted() && !bytes.first().is_none_or(|op| greetings.contains(op)) {
                return Err(Malformed("no greeting, or no handshake".to_owned()));
            }
            self.measured = self.measure.length(bytes)?;
        }
        Ok(self.measured)
    }

    /// Takes the request that was measured.
    pub(super) fn take_request(&mut self) -> Option<Request> {
        let end = self.done + self.measured.take()?;
        if end - self.done < LONG {
            let request = request(Cow::Borrowed(&self.received[self.done..end]));
            self.done = end;
            if self.done == self.received.len() {
                (self.received, self.done) = (Vec::new(), 0);
            }
            return request;
        }
        // The bytes after the request are at most those of one read.
        let rest = self.received.split_off(end);
        let mut bytes = std::mem::replace(&mut self.received, rest);
        bytes.drain(..self.done);
        self.done = 0;
        request(Cow::Owned(bytes))
    }

    /// Makes this connection a trunk. Fails where it is a channel.
    pub(super) fn begin_trunk(&mut self) -> Result<(), String> {
        if matches!(self.link, Link::Channel(_)) {
            return Err("a trunk in a channel of a trunk".to_owned());
        }
        self.trunk = Some(Box::default());
        Ok(())
    }

    /// Takes the frame that was measured, which has that length.
    pub(super) fn take_frame(&mut self, length: usize) -> Vec<u8> {
        self.measured = None;
        let frame = self.received[self.done..][..length].to_vec();
        self.done += length;
        if self.done == self.received.len() {
            (self.received, self.done) = (Vec::new(), 0);
        }
        frame
    }

    pub(super) fn is_admitted(&self) -> bool {
        matches!(self.authentication, Authentication::Admitted)
    }

    /// Frees what the client makes the server keep. The connection is dropped afterwards.
    pub(super) fn release(&mut self) {
        (self.received, self.done, self.measured) = (Vec::new(), 0, None);
        (self.outgoing, self.task, self.records) = (Outgoing::default(), None, None);
        (self.ending, self.counted) = (true, 0);
    }

    /// Sends as much as about `limit` units of work allow and the socket takes, and returns how
    /// much work was done. An error says that the client is gone.
    pub(super) fn flush(&mut self, limit: usize) -> io::Result<usize> {
        let limit = limit / self.work_of_byte();
        let Link::Socket(stream) = &self.link else { return Ok(0) };
        let sent = match &mut self.records {
            None => self.outgoing.flush(stream, limit),
            Some(records) => self.outgoing.flush_sealed(records, stream, limit),
        };
        let sent = sent.inspect_err(|error| self.is_silent = is_silence(error))?;
        if sent > 0 {
            self.active = Instant::now();
        }
        Ok(sent * self.work_of_byte())
    }

    /// Takes out what a channel sends next: at most as much as the channel's window allows, and
    /// about as much as `limit` units of work allow. Returns the bytes, and how much work that was.
    pub(super) fn take_outgoing(&mut self, limit: usize) -> io::Result<(Vec<u8>, usize)> {
        let Link::Channel(channel) = &self.link else { return Ok((Vec::new(), 0)) };
        let limit = (limit / self.work_of_byte()).min(channel.window.room());
        let bytes = match &mut self.records {
            None => self.outgoing.take(limit),
            Some(records) => self.outgoing.take_sealed(records, limit)?,
        };
        if !bytes.is_empty() {
            self.active = Instant::now();
        }
        let work = bytes.len() * self.work_of_byte();
        Ok((bytes, work))
    }

    fn queue(&mut self, bytes: &[u8]) {
        self.outgoing.push(bytes);
    }

    /// Decides on a request. The connection itself answers a handshake, and everything else that is
    /// allowed is carried out.
    pub(super) fn admit(&mut self, request: Request, secret: Option<&Secret>) -> Result<Admission, String> {
        let string = |bytes: &[u8]| Writer::default().string(bytes).finish();
        match (&self.authentication, request, secret) {
            (Authentication::Admitted, Request::Handshake(_), None) => {
                self.queue(&string(b""));
                return Ok(Admission::Refused("because it has a DM_STORE_SECRET and the store has none"));
            }
            (Authentication::Admitted, request, _) => {
                match request {
                    Request::Ping(nonce) if !self.asked && secret.is_none() => self.nonce = nonce,
                    _ => {}
                }
                return Ok(Admission::CarryOut(request));
            }
            (Authentication::Stranger, request @ Request::Validate(_), None) => {
                self.authentication = Authentication::Admitted;
                return Ok(Admission::CarryOut(request));
            }
            (Authentication::Stranger, request @ Request::Validate(_), Some(_)) => {
                self.authentication = Authentication::Greeted;
                return Ok(Admission::CarryOut(request));
            }
            (Authentication::Greeted, Request::Ping(_), Some(_)) => {
                self.queue(&DENIED);
                self.ending = true;
                return Ok(Admission::Refused("because it has no DM_STORE_SECRET and the store has one"));
            }
            (Authentication::Greeted, Request::Handshake(first), Some(secret)) => {
                // Bytes that came together with the handshake were not encrypted.
                if self.has_more() {
                    return Err("bytes after a handshake that is not answered".to_owned());
                }
                match Records::responder(secret, &first) {
                    Ok((mut records, second)) => {
                        let answer = string(&second);
                        self.queue(&answer);
                        records.put(&answer, answer.len());
                        (self.nonce, self.records) = (number_of(&first), Some(Box::new(records)));
                        self.authentication = Authentication::Answered;
                    }
                    Err(Broken::Machine(why)) => return Err(why.to_owned()),
                    Err(_) => {
                        self.queue(&string(OTHER_SECRET));
                        self.ending = true;
                        return Ok(Admission::Refused("because its DM_STORE_SECRET is another one than the store's"));
                    }
                }
            }
            _ => return Err("no greeting, or no handshake".to_owned()),
        }
        Ok(Admission::Answered)
    }
}

/// Whether this is the error of a connection whose other host is down or out of reach.
fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}
