//! Connections that have not proved themselves: the steps of the proof.

use std::io::{self, ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::time::Instant;

use socket2::Socket;

use super::cipher::Cipher;
use super::hello::{self, Answer, HELLO, Hello, PROOF, Side};
use super::state::Inner;
use crate::fork::Private;
use crate::noise::{HANDSHAKE_BYTES, Session};
use crate::wire::Token;
use crate::{machine, token};

/// The value of [`Stranger::said`] once the other process has named a token that this process
/// knows.
pub(super) const NAMED_A_TOKEN: u32 = 2;

/// The stages of a connection that has not proved itself.
#[derive(Debug)]
enum Stage {
    /// This process connects, and the kernel has not answered.
    Connecting,
    /// This process has sent its hello and waits for the answer and its proof.
    Asked,
    /// This process has proved itself and waits for the answer of the encryption.
    Proved(Box<Session>),
    /// The other process has connected and has not said who it is.
    Accepted,
    /// The other process has said who it is, but this process does not know the other one yet.
    Unknown,
    /// This process has answered the process with that id, and waits for the proof.
    Answered([u8; 16]),
}

/// A connection that has not proved itself.
#[derive(Debug)]
pub(super) struct Stranger {
    /// The socket, which does not block.
    pub(super) socket: Private<Socket>,
    /// The other side's address, for messages.
    pub(super) address: String,
    /// The peer, where it is known.
    pub(super) peer: Option<u32>,
    /// When the connection began. For a connection that this process has made, this is the time at
    /// which its hello went; for another one that has got an answer, the time of that answer.
    pub(super) since: Instant,
    /// Whether this process can open no more files, so that it only tells the other process so.
    is_full: bool,
    /// The present stage of the connection.
    stage: Stage,
    /// The hello of the process that connects.
    first: [u8; HELLO],
    /// The hello of the process that accepts.
    second: [u8; HELLO],
    /// The token that proves that both processes belong together.
    token: Token,
    /// The bytes that came and are not used.
    came: Vec<u8>,
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// The connection waits for the other side.
    Wait,
    /// This process connected, and its hello has gone.
    Sent,
    /// This process has answered the process that connected.
    Answered,
    /// Both sides have proved themselves. The value is the cipher of an encrypted connection.
    Proved(Option<Box<Cipher>>),
    /// The connection is of no use. The reason is for the log.
    Drop(String),
    /// This process connected, and may try again.
    Again(String),
    /// This process connected, and may try again. If no try succeeds in time, the user has to learn
    /// the reason: one of the two processes or its machine lacks files, memory or ports.
    Short(String),
    /// This process connected, and no way leads to the other host now. It may try again until the
    /// time has passed after which a silent host is lost, and for 30 s at most.
    NoWay(String),
    /// No later try can succeed, so the peer is lost. The flag says whether the peer's process has
    /// ended, and the text is the reason. Either side may get this outcome.
    Fail(bool, String),
}

impl Stranger {
    fn new(socket: Private<Socket>, address: String, stage: Stage) -> Stranger {
        Stranger {
            socket,
            address,
            peer: None,
            since: Instant::now(),
            is_full: false,
            stage,
            first: [0; HELLO],
            second: [0; HELLO],
            token: [0; 16],
            came: Vec::new(),
        }
    }

    /// Returns a connection that another process has made. With `is_full` it is closed once the
    /// other process knows that this one can open no more files.
    pub(super) fn accepted(socket: Private<Socket>, address: String, is_full: bool) -> Stranger {
        Stranger { is_full, ..Stranger::new(socket, address, Stage::Accepted) }
    }

    /// Returns a connection that this process makes. Fails where the host gives no random numbers.
    pub(super) fn connecting(
        inner: &Inner,
        socket: Private<Socket>,
        address: String,
        (peer, to, token): (u32, [u8; 16], Token),
    ) -> Result<Stranger, String> {
        let nonce = token::random_token().map_err(|error| error.message().to_owned())?;
        let is_secret = inner.options.secret.is_some();
        let from = inner.contact.id;
        let hello = Hello { answer: Answer::Yes, is_secret, from, to, nonce, token: hello::name(&token) };
        let stranger = Stranger::new(socket, address, Stage::Connecting);
        Ok(Stranger { peer: Some(peer), first: hello.to_bytes(), token, ..stranger })
    }

    /// Whether this process can open no more files, so that the connection holds the spare
    /// descriptor.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Whether this process has made the connection.
    pub(super) fn is_mine(&self) -> bool {
        matches!(self.stage, Stage::Connecting | Stage::Asked | Stage::Proved(_))
    }

    /// Whether this process has made the connection and the other host has not answered.
    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.stage, Stage::Connecting)
    }

    /// Whether this process has made the connection, the other host has taken it, and the other
    /// process has to answer now.
    pub(super) fn waits_for_answer(&self) -> bool {
        self.is_mine() && !self.is_connecting()
    }

    /// Whether this process has made the connection and proved itself, so that the other side may
    /// have taken the connection.
    pub(super) fn is_proved(&self) -> bool {
        matches!(self.stage, Stage::Proved(_))
    }

    /// Whether the other process waits until this one knows it.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.stage, Stage::Unknown)
    }

    /// Returns the id of the process that has connected and been answered, and that this process
    /// now expects to prove itself.
    pub(super) fn answered(&self) -> Option<[u8; 16]> {
        match self.stage {
            Stage::Answered(id) => Some(id),
            _ => None,
        }
    }

    /// How much the process that has connected has said: 0 for nothing, 1 for who it is,
    /// [`NAMED_A_TOKEN`] for a token that this process knows.
    pub(super) fn said(&self) -> u32 {
        match self.stage {
            Stage::Accepted => 0,
            Stage::Unknown => 1,
            _ => NAMED_A_TOKEN,
        }
    }

    /// How many bytes the next step needs.
    fn need(&self) -> usize {
        match self.stage {
            Stage::Connecting | Stage::Unknown => 0,
            Stage::Accepted => HELLO,
            Stage::Asked => HELLO + PROOF,
            Stage::Proved(_) => HANDSHAKE_BYTES,
            Stage::Answered(_) if self.first[hello::SECRET_AT] != 0 => PROOF + HANDSHAKE_BYTES,
            Stage::Answered(_) => PROOF,
        }
    }

    /// Takes the next step, once the socket is ready. `is_taken` says whether this process has
    /// proved itself to that peer over another connection.
    pub(super) fn step(&mut self, inner: &Inner, is_taken: impl Fn(u32) -> bool) -> Step {
        if matches!(self.stage, Stage::Connecting) {
            let error = self.socket.take_error().unwrap_or_else(Some);
            return match error.map_or_else(|| send_all(&self.socket, &self.first), Err) {
                Ok(()) => {
                    (self.stage, self.since) = (Stage::Asked, Instant::now());
                    Step::Sent
                }
                Err(reason) => self.broken(Some(&reason)),
            };
        }
        let need = self.need();
        let mut room = [0; HELLO + PROOF];
        // A process that is not known yet must not send more bytes. A read of one byte tells when
        // such a process has gone or has sent more.
        let wanted = need.saturating_sub(self.came.len()).clamp(1, room.len());
        match (&*self.socket).read(&mut room[..wanted]) {
            Ok(got) if got > 0 && need > 0 => self.came.extend_from_slice(&room[..got]),
            Err(reason) if matches!(reason.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Step::Wait;
            }
            Err(reason) => return self.broken(Some(&reason)),
            Ok(_) => return self.broken(None),
        }
        if self.came.len() < need {
            return Step::Wait;
        }
        let came = std::mem::take(&mut self.came);
        match &mut self.stage {
            Stage::Accepted => match Hello::parse(&came) {
                Ok(_) => {
                    self.first.copy_from_slice(&came);
                    self.answer(inner, is_taken)
                }
                Err(why) => Step::Drop(why),
            },
            Stage::Asked => self.take_answer(inner, &came),
            Stage::Proved(session) => {
                let read = session.read_message(&came, &mut Vec::new());
                match (read, std::mem::replace(&mut self.stage, Stage::Asked)) {
                    (Ok(()), Stage::Proved(session)) => Step::Proved(Some(Box::new(Cipher::new(*session)))),
                    (Err(why), _) => {
                        Step::Fail(false, format!("{}: {why}: set DM_STORE_SECRET alike on all hosts", self.address))
                    }
                    _ => Step::Drop(String::new()),
                }
            }
            Stage::Answered(_) => self.take_proof(inner, &came),
            Stage::Connecting | Stage::Unknown => Step::Wait,
        }
    }

    /// Returns the step to take when the connection has ended.
    fn broken(&self, reason: Option<&io::Error>) -> Step {
        let address = &self.address;
        if !self.is_mine() {
            return Step::Drop("it closed the connection".to_owned());
        }
        let Some(reason) = reason else {
            return Step::Again(closed_early(address));
        };
        refused(address, reason)
    }

    /// Answers a process that has said who it is.
    pub(super) fn answer(&mut self, inner: &Inner, is_taken: impl Fn(u32) -> bool) -> Step {
        let Ok(hello) = Hello::parse(&self.first) else { return Step::Drop(String::new()) };
        let is_secret = inner.options.secret.is_some();
        let mut knows_others = false;
        let (answer, token) = if hello.to != inner.contact.id {
            (Answer::Stranger, None)
        } else if self.is_full {
            (Answer::Full, None)
        } else if hello.is_secret != is_secret {
            (Answer::Secret, None)
        } else {
            let state = inner.lock();
            let link = state.numbers.get(&hello.from).and_then(|number| state.links.get(number));
            let token = link
                .and_then(|link| link.remote.tokens.iter().find(|(token, _)| hello::name(token) == hello.token))
                .map(|(token, _)| *token);
            self.peer = link.map(|link| link.remote.number);
            knows_others = link.is_some();
            match (link, token) {
                // Where the other process names a token that the lost peer did not have, this
                // process may be about to meet it again.
                (Some(link), Some(_)) if link.remote.lost.is_some() => (Answer::Lost, None),
                (Some(link), Some(_)) if link.connection.is_some() || is_taken(link.remote.number) => {
                    (Answer::Twice, None)
                }
                (Some(_), Some(token)) => (Answer::Yes, Some(token)),
                _ => (Answer::Unknown, None),
            }
        };
        // A process that is not known has to wait. A process that is known may have other tokens
        // than the one that it has named, so it is told to try another one.
        if answer == Answer::Unknown && !knows_others {
            self.stage = Stage::Unknown;
            return Step::Wait;
        }
        let Ok(nonce) = token::random_token() else { return Step::Drop("no random numbers".to_owned()) };
        let from = inner.contact.id;
        let second = Hello { answer, is_secret, from, to: hello.from, nonce, token: hello.token };
        self.second = second.to_bytes();
        let proof = token.map(|token| hello::prove(&token, Side::Accepts, &self.first, &self.second));
        let bytes = [&self.second[..], &proof.unwrap_or_default()].concat();
        let sent = send_all(&self.socket, &bytes);
        match (token, sent) {
            (Some(token), Ok(())) => {
                (self.token, self.stage, self.since) = (token, Stage::Answered(hello.from), Instant::now());
                Step::Answered
            }
            _ if answer == Answer::Secret => {
                let (with, without) = if is_secret { ("this", "the other") } else { ("the other", "this") };
                Step::Drop(format!(
                    "{with} process has a secret and {without} one has none: set DM_STORE_SECRET alike on all hosts"
                ))
            }
            _ => Step::Drop(format!("it got the answer {answer:?}")),
        }
    }

    /// Takes the answer of the process to which this one connects, and proves itself.
    fn take_answer(&mut self, inner: &Inner, came: &[u8]) -> Step {
        let address = &self.address;
        let (second, proof) = came.split_at(HELLO);
        let hello = match Hello::parse(second) {
            Ok(hello) => hello,
            Err(why) => return Step::Fail(false, format!("the answer of {address} cannot be used: {why}")),
        };
        self.second.copy_from_slice(second);
        match hello.answer {
            Answer::Yes => {}
            Answer::Stranger => {
                return Step::Fail(true, format!("another process answers at {address}: the peer has ended"));
            }
            Answer::Lost => {
                return Step::Fail(false, format!("{address} has lost its connection to this process"));
            }
            Answer::Secret => {
                return Step::Fail(
                    false,
                    format!(
                        "{address} refuses the connection, because only one of the two processes has a secret: set DM_STORE_SECRET alike on all hosts"
                    ),
                );
            }
            Answer::Full => {
                return Step::Short(format!(
                    "{address} accepts no connection, because its process or machine has reached its limit of open files: raise `ulimit -n` there"
                ));
            }
            Answer::Unknown => return Step::Again(format!("{address} does not know this process yet")),
            Answer::Twice => {
                return Step::Again(format!("{address} already has a connection with this process"));
            }
        }
        let secret = inner.options.secret.as_deref();
        let right = hello.to == inner.contact.id
            && hello.is_secret == secret.is_some()
            && hello::is_proof(&self.token, Side::Accepts, &self.first, second, proof);
        if !right {
            return Step::Fail(false, format!("{address} could not prove that it belongs to this job"));
        }
        // The other process gives up a connection on which the proof does not come in time. If this
        // process was stopped meanwhile, it has to try again. Once it uses the connection, an end
        // of the connection means that the other process has gone.
        if has_ended(&self.socket) {
            return Step::Again(closed_early(address));
        }
        let mut bytes = hello::prove(&self.token, Side::Connects, &self.first, second).to_vec();
        let mut session = None;
        if let Some(secret) = secret {
            let made = Session::initiator(secret, &self.prologue()).and_then(|mut session| {
                session.write_message(&[], &mut bytes)?;
                Ok(session)
            });
            match made {
                Ok(made) => session = Some(made),
                Err(why) => return Step::Fail(false, why.to_string()),
            }
        }
        match (send_all(&self.socket, &bytes), session) {
            (Ok(()), None) => Step::Proved(None),
            (Ok(()), Some(session)) => {
                self.stage = Stage::Proved(Box::new(session));
                Step::Wait
            }
            (Err(reason), _) => self.broken(Some(&reason)),
        }
    }

    /// Takes the proof of a process that has connected.
    fn take_proof(&mut self, inner: &Inner, came: &[u8]) -> Step {
        let (proof, message) = came.split_at(PROOF);
        if !hello::is_proof(&self.token, Side::Connects, &self.first, &self.second, proof) {
            return Step::Drop("it could not prove that it belongs to this job".to_owned());
        }
        let Some(secret) = inner.options.secret.as_deref() else { return Step::Proved(None) };
        let mut answer = Vec::new();
        let made = Session::responder(secret, &self.prologue()).and_then(|mut session| {
            session.read_message(message, &mut Vec::new())?;
            session.write_message(&[], &mut answer)?;
            Ok(session)
        });
        match made {
            Ok(session) => match send_all(&self.socket, &answer) {
                Ok(()) => Step::Proved(Some(Box::new(Cipher::new(session)))),
                Err(reason) => self.broken(Some(&reason)),
            },
            Err(why) => {
                // The other side cannot open these bytes either, so it gives the same reason.
                let _ = send_all(&self.socket, &[0; HANDSHAKE_BYTES]);
                Step::Fail(false, format!("{}: {why}: set DM_STORE_SECRET alike on all hosts", self.address))
            }
        }
    }

    /// Binds the encryption to this connection.
    fn prologue(&self) -> Vec<u8> {
        [b"wire 1 ", &self.first[..], &self.second[..]].concat()
    }
}

/// Returns the step to take when the kernel could not connect.
pub(super) fn refused(address: &str, reason: &io::Error) -> Step {
    match reason.kind() {
        ErrorKind::ConnectionRefused => {
            Step::Fail(true, format!("{address} refuses connections: its process has ended"))
        }
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Step::Again(closed_early(address)),
        ErrorKind::TimedOut => Step::Fail(false, format!("{address} does not answer: {reason}")),
        _ => {
            let why = format!("connecting to {address}: {}", machine::explained(reason));
            match reason.raw_os_error() {
                // Such a shortage of this process or of this machine may pass.
                Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL) => {
                    Step::Short(why)
                }
                Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => Step::NoWay(why),
                _ => Step::Fail(false, why),
            }
        }
    }
}

/// Whether the other side has closed a connection on which no bytes are to come.
fn has_ended(socket: &Socket) -> bool {
    match socket.peek(&mut [MaybeUninit::uninit()]) {
        Ok(bytes) => bytes == 0,
        Err(reason) => !matches!(reason.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

/// Returns the reason for a try that has failed because the other side closed the connection.
fn closed_early(address: &str) -> String {
    format!("{address} closed the connection before accepting this process")
}

/// Writes a few bytes to a new connection, which always has room for them.
fn send_all(socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    let mut socket = socket;
    match socket.write(bytes) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(ErrorKind::WriteZero.into()),
        Err(reason) => Err(reason),
    }
}
