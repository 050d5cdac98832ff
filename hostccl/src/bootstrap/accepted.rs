//! A connection that the maker's thread has accepted: the steps from the rank's greeting to its
//! registration, and then the messages of the join.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::greeting::{self, ANSWER_BYTES, HELLO_BYTES, Hello, PROOF_BYTES, Status};
use super::link::Link;
use super::meeting::{ConnectionId, Meeting};
use super::message::RANK_MESSAGE_BYTES;
use crate::fork::Closed;
use crate::noise::{HANDSHAKE_BYTES, Session};
use crate::segment::LAYOUT_VERSION;
use crate::token::random_token;
use crate::wire::{Token, here};

/// How long a connection may take from its beginning until the rank has registered.
const GREETING_TIME: Duration = Duration::from_secs(20);
/// How long the last message to a rank may take.
const FAREWELL_TIME: Duration = Duration::from_secs(10);

/// The joins that the thread serves, each with the token of its id. The key is the id's number.
pub(super) type Meetings = HashMap<u64, (Token, Meeting)>;

/// The next thing that a connection waits for.
#[derive(Debug)]
pub(super) enum Progress {
    /// The connection waits for the rank's greeting.
    Hello,
    /// The connection waits for the rank's proof, which covers this greeting and this answer.
    Proof(Box<([u8; HELLO_BYTES], [u8; ANSWER_BYTES])>, Hello),
    /// The connection waits for the first message of the Noise handshake. The number is the id's.
    Noise(Box<Session>, u64),
    /// The connection waits for messages of the join by the id with this number. The rank is known
    /// once it has registered.
    Ready(u64, Option<usize>),
    /// The connection waits until everything is sent. Then it is closed. The flag says whether the
    /// other side has proved that it knows the id.
    Farewell(bool),
}

/// The outcome of [`Accepted::step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The other side has to send more bytes before the next step.
    Wait,
    /// The next step may follow at once.
    Advanced,
    /// The join by the id with this number has handled a message, and may have messages to send.
    /// The next step may follow at once.
    Handled(u64),
}

/// A connection, and the facts that the thread knows about its other side.
#[derive(Debug)]
pub(super) struct Accepted {
    /// The bytes that go in both directions.
    pub(super) link: Link,
    /// The address of the other side.
    pub(super) from: SocketAddr,
    /// The next thing that the connection waits for.
    pub(super) progress: Progress,
    /// When the thread closes the connection. It is `None` once the rank has registered, because
    /// from then on the rank's own deadline counts.
    pub(super) until: Option<Instant>,
}

impl Accepted {
    pub(super) fn new(socket: Closed<TcpStream>, from: SocketAddr) -> Accepted {
        let until = Some(Instant::now() + GREETING_TIME);
        let mut link = Link::new(socket);
        link.watch_host();
        Accepted { link, from, progress: Progress::Hello, until }
    }

    /// Whether nobody has registered on the connection. A connection that is about to close counts
    /// as a stranger unless its other side knows the id.
    pub(super) fn is_stranger(&self) -> bool {
        !matches!(self.progress, Progress::Ready(_, Some(_)) | Progress::Farewell(true))
    }

    /// Closes the connection as soon as everything is sent.
    pub(super) fn say_farewell(&mut self) {
        let knows_id = matches!(self.progress, Progress::Ready(..) | Progress::Farewell(true));
        self.progress = Progress::Farewell(knows_id);
        self.until = Some(Instant::now() + FAREWELL_TIME);
    }

    /// Handles the bytes that the connection waits for, if they have arrived. Fails where the
    /// connection must be closed.
    pub(super) fn step(&mut self, own_id: ConnectionId, meetings: &mut Meetings) -> Result<Step, String> {
        match &mut self.progress {
            Progress::Hello => {
                let Some(bytes) = self.link.take::<HELLO_BYTES>() else { return Ok(Step::Wait) };
                let hello = Hello::read(&bytes).ok_or("its first bytes are no greeting of a rank")?;
                let token = meetings.get(&hello.number).map(|(token, _)| *token);
                let status = status(&hello, token.is_some());
                let nonce = random_token().map_err(|error| error.message().to_owned())?;
                let answer = greeting::answer(status, token.as_ref(), &bytes, &nonce);
                self.link.put(&answer);
                match status {
                    Status::Welcome => self.progress = Progress::Proof(Box::new((bytes, answer)), hello),
                    _ => self.say_farewell(),
                }
            }
            Progress::Proof(said, hello) => {
                let Some(proof) = self.link.take::<PROOF_BYTES>() else { return Ok(Step::Wait) };
                let (token, _) = meetings.get(&hello.number).ok_or("its id has been closed")?;
                if !greeting::is_proof(token, &said.0, &said.1, &proof) {
                    return Err("it does not know the id's token".to_owned());
                }
                let number = hello.number;
                match here::own_secret() {
                    None => {
                        self.link.allow_messages(RANK_MESSAGE_BYTES);
                        self.progress = Progress::Ready(number, None);
                    }
                    Some(secret) => {
                        let session = Session::responder(&secret, &super::prologue(&said.0, &said.1));
                        let session = session.map_err(|broken| broken.to_string())?;
                        self.progress = Progress::Noise(Box::new(session), number);
                    }
                }
            }
            Progress::Noise(session, number) => {
                let Some(message) = self.link.take::<HANDSHAKE_BYTES>() else { return Ok(Step::Wait) };
                let (number, mut reply) = (*number, Vec::new());
                if let Err(broken) = session.read_message(&message, &mut Vec::new()) {
                    // The rank cannot decrypt these bytes either, so it learns that the secrets
                    // differ. A rank whose connection is closed without such bytes connects
                    // again.
                    self.link.put(&[0; HANDSHAKE_BYTES]);
                    return Err(broken.to_string());
                }
                session.write_message(&[], &mut reply).map_err(|broken| broken.to_string())?;
                self.link.put(&reply);
                let progress = std::mem::replace(&mut self.progress, Progress::Ready(number, None));
                if let Progress::Noise(session, _) = progress {
                    self.link.seal(*session);
                }
                self.link.allow_messages(RANK_MESSAGE_BYTES);
            }
            Progress::Ready(number, rank) => {
                let Some(message) = self.link.message()? else { return Ok(Step::Wait) };
                let (number, rank, from) = (*number, *rank, self.from.ip());
                let (_, meeting) = meetings.get_mut(&number).ok_or("its id has been closed")?;
                let now = meeting.take(own_id, rank, from, message)?;
                if now.is_some() {
                    self.until = None;
                }
                self.progress = Progress::Ready(number, now);
                return Ok(Step::Handled(number));
            }
            // Unread bytes would keep the connection readable, and the thread awake, until the
            // connection is closed. So they are thrown away.
            Progress::Farewell(_) => {
                self.link.discard();
                return Ok(Step::Wait);
            }
        }
        Ok(Step::Advanced)
    }
}

/// Returns the status with which the maker answers a greeting.
fn status(hello: &Hello, is_known: bool) -> Status {
    match (hello.sealed, here::own_secret().is_some()) {
        _ if !is_known => Status::UnknownId,
        _ if hello.version != LAYOUT_VERSION => Status::OtherVersion,
        (false, true) => Status::RankHasNoSecret,
        (true, false) => Status::MakerHasNoSecret,
        _ => Status::Welcome,
    }
}
