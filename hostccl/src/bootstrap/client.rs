//! The rank's side of a join: a state machine that never waits.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::greeting::{self, ANSWER_BYTES, HELLO_BYTES, Hello, Status};
use super::link::{self, Link, LinkState};
use super::message::{MESSAGE_BYTES, Message};
use crate::error::{Error, Result};
use crate::fork::Closed;
use crate::noise::{HANDSHAKE_BYTES, Session};
use crate::outside;
use crate::token::random_token;
use crate::types::*;
use crate::wire::{Token, here};

/// The pause before a rank connects again, where the maker's host could not be reached.
const RETRY: Duration = Duration::from_millis(100);
/// How long a rank tries to connect where this process or its machine can open no more files.
const SHORTAGE: Duration = Duration::from_secs(30);
/// A rank that leaves tries to reach the maker for some time. Once a connection has stood, the rank
/// tries for this many times that time: somebody is there, who may wait for a processor.
const PATIENCE_WHEN_REACHED: u32 = 10;

/// The next thing that the connection waits for.
#[derive(Debug)]
enum Progress {
    /// There is no connection. The rank tries to connect again at this time.
    Idle(Instant),
    /// The kernel is making the connection.
    Connecting(Link),
    /// The connection waits for the maker's answer to this greeting.
    Greeted(Link, Box<[u8; HELLO_BYTES]>),
    /// The connection waits for the second message of the Noise handshake.
    Noise(Link, Box<Session>),
    /// The rank has registered. The connection waits for messages of the maker.
    Ready(Link),
    /// The connection has ended.
    Ended,
}

/// The connection of a rank to the maker of the unique id.
#[derive(Debug)]
pub(crate) struct Client {
    /// The address of the maker.
    address: SocketAddr,
    /// The token of the id.
    token: Token,
    /// The first message: what this rank registers, or why it cannot join.
    first: Message,
    /// The next thing that the connection waits for.
    progress: Progress,
    /// Why the last try to connect failed.
    last_failure: Option<String>,
    /// Since when each try to connect has failed because this process or its machine can open no
    /// more files; `None` where the last one has not.
    short_since: Option<Instant>,
    /// Whether the maker has sent a message.
    is_heard: bool,
    /// Whether the maker has closed a connection on which this rank had registered, and has not
    /// answered since. While this is true, a failed try to connect means that the maker has ended
    /// during the join.
    is_dropped: bool,
}

impl Client {
    /// Returns a client that has not begun to connect. `first` is its first message.
    pub(crate) fn new(address: SocketAddr, token: Token, first: Message) -> Client {
        let (address, progress) = (with_own_scope(address), Progress::Idle(Instant::now()));
        Client {
            address,
            token,
            first,
            progress,
            last_failure: None,
            short_since: None,
            is_heard: false,
            is_dropped: false,
        }
    }

    /// The address of the maker.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether this rank has registered.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.progress, Progress::Ready(_))
    }

    /// Whether the kernel has taken all of the first message.
    pub(crate) fn has_sent_first(&self) -> bool {
        matches!(&self.progress, Progress::Ready(link) if !link.has_to_send())
    }

    /// Returns why the maker could not be reached so far.
    pub(crate) fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    /// Returns the descriptor that the client waits for, and whether the client waits until it can
    /// write there. Otherwise the client waits for bytes to read.
    pub(crate) fn waits_for(&self) -> Option<(RawFd, bool)> {
        match &self.progress {
            Progress::Idle(_) | Progress::Ended => None,
            Progress::Connecting(link) => Some((link.fd(), true)),
            Progress::Greeted(link, _) | Progress::Noise(link, _) | Progress::Ready(link) => {
                Some((link.fd(), link.has_to_send()))
            }
        }
    }

    /// Tells the maker that this rank cannot join. Where this rank has not registered yet, the
    /// refusal takes the place of its registration. Only in that case does this function wait until
    /// the kernel has taken the refusal. It waits for at most `longest`, or once a connection has
    /// stood, for at most [`PATIENCE_WHEN_REACHED`] times `longest`.
    pub(crate) fn refuse(&mut self, error: &Error, longest: Duration) {
        let refusal = Message::Failed(error.clone());
        if self.is_ready() {
            return self.send(&refusal);
        }
        self.first = refusal;
        let (began, mut longest_now) = (Instant::now(), longest);
        while self.poll().is_ok() && !self.has_sent_first() {
            if matches!(self.progress, Progress::Greeted(..) | Progress::Noise(..) | Progress::Ready(_)) {
                longest_now = longest * PATIENCE_WHEN_REACHED;
            }
            let left = longest_now.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            outside::sleep(self.waits_for().into_iter(), left);
        }
    }

    /// Sends a message to the maker.
    pub(crate) fn send(&mut self, message: &Message) {
        if let Progress::Ready(link) = &mut self.progress {
            // After an error here, the next read finds the connection closed.
            let _ = link.put_frame(&link::frame(message));
            let _ = link.push();
        }
    }

    /// Does all that can be done without waiting. Returns the next message of the maker, or `None`
    /// while none has come. Fails where this rank cannot join.
    pub(crate) fn poll(&mut self) -> Result<Option<Message>> {
        loop {
            match std::mem::replace(&mut self.progress, Progress::Ended) {
                Progress::Ended => return Err(self.maker_gone()),
                Progress::Idle(due) if Instant::now() < due => {
                    self.progress = Progress::Idle(due);
                    return Ok(None);
                }
                Progress::Idle(_) => self.progress = self.connect()?,
                Progress::Connecting(mut link) => {
                    if !self.is_connected(&link)? {
                        // Where the connection has failed, `is_connected` has set the time of the
                        // next try.
                        if matches!(self.progress, Progress::Ended) {
                            self.progress = Progress::Connecting(link);
                            return Ok(None);
                        }
                        continue;
                    }
                    let hello = Hello::write(&self.token, here::own_secret().is_some(), &random_token()?);
                    link.put(&hello);
                    link.watch_host();
                    self.progress = Progress::Greeted(link, Box::new(hello));
                }
                Progress::Greeted(mut link, hello) => {
                    let state = link.pump();
                    let Some(answer) = link.take::<ANSWER_BYTES>() else {
                        if state == LinkState::Open {
                            self.progress = Progress::Greeted(link, hello);
                            return Ok(None);
                        }
                        // The maker had too many connections, or has just ended. The next try to
                        // connect tells these two apart.
                        self.closed();
                        continue;
                    };
                    self.progress = self.welcome(link, &hello, &answer)?;
                }
                Progress::Noise(mut link, mut session) => {
                    let state = link.pump();
                    let Some(message) = link.take::<HANDSHAKE_BYTES>() else {
                        if state == LinkState::Open {
                            self.progress = Progress::Noise(link, session);
                            return Ok(None);
                        }
                        // A maker with another secret answers before it closes the connection. So
                        // the maker had too many connections or has ended, as above.
                        self.closed();
                        continue;
                    };
                    session.read_message(&message, &mut Vec::new()).map_err(|_| self.other_secret())?;
                    link.seal(*session);
                    self.progress = self.register(link);
                }
                Progress::Ready(mut link) => {
                    let state = link.pump();
                    let message = link.message().map_err(|why| {
                        Error::new(ncclRemoteError, format!("the maker of the unique id, at {}: {why}", self.address))
                    })?;
                    self.is_heard |= message.is_some();
                    if message.is_some() || state == LinkState::Open {
                        self.progress = Progress::Ready(link);
                        return Ok(message);
                    }
                    if !self.is_heard {
                        // The maker may have closed the connection before it read the proof or the
                        // first message. It closes no connection of a registered rank, so this rank
                        // may register again.
                        self.is_dropped = true;
                        self.closed();
                    }
                }
            }
        }
    }

    /// Begins to connect.
    fn connect(&mut self) -> Result<Progress> {
        let opened = Closed::open(|| open(&self.address));
        let begun = opened.and_then(|socket| {
            link::tune(&socket);
            connect(&socket, &self.address).map(|()| socket)
        });
        match begun {
            Ok(socket) => {
                self.short_since = None;
                Ok(Progress::Connecting(Link::new(socket)))
            }
            Err(error) if is_shortage(&error) => {
                self.fell_short(error)?;
                Ok(std::mem::replace(&mut self.progress, Progress::Ended))
            }
            Err(error) => {
                self.short_since = None;
                self.failed_to_connect(&error)?;
                Ok(std::mem::replace(&mut self.progress, Progress::Ended))
            }
        }
    }

    /// Sets the time of the next try, because this process or its machine can open no more
    /// files now. Fails where that has lasted for [`SHORTAGE`].
    fn fell_short(&mut self, error: io::Error) -> Result<()> {
        let error = Error::system("opening a connection to the maker of the unique id", error);
        if self.short_since.get_or_insert_with(Instant::now).elapsed() >= SHORTAGE {
            return Err(error);
        }
        self.try_later(error.message().to_owned());
        Ok(())
    }

    /// Whether the connection is established. Where it has failed, sets the time of the next try.
    fn is_connected(&mut self, link: &Link) -> Result<bool> {
        let mut poll = libc::pollfd { fd: link.fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the structure outlives the call, which returns at once.
        if unsafe { libc::poll(&raw mut poll, 1, 0) } <= 0 {
            return Ok(false);
        }
        match link.failure() {
            None => Ok(true),
            Some(error) => self.failed_to_connect(&error).map(|()| false),
        }
    }

    /// Sets the time of the next try. Fails where the maker has ended or is out of reach during the
    /// join, and where the maker's host says that nobody listens there, because then no later try
    /// can succeed.
    fn failed_to_connect(&mut self, error: &io::Error) -> Result<()> {
        if self.is_dropped {
            return Err(self.maker_gone());
        }
        if error.kind() == ErrorKind::ConnectionRefused {
            return Err(Error::new(
                ncclRemoteError,
                format!(
                    "the unique id is used up, or the process that made it has gone: nobody listens at {} ({error}); one id starts one communicator, and the process that made the id must live until all ranks have joined",
                    self.address
                ),
            ));
        }
        self.try_later(format!("{}: {error}", self.address));
        Ok(())
    }

    /// Sets the time of the next try, after the maker has closed the connection.
    fn closed(&mut self) {
        self.try_later(format!("{} closed the connection", self.address));
    }

    /// Sets the time of the next try. `why` explains the failure, for the message at the deadline.
    fn try_later(&mut self, why: String) {
        self.last_failure = Some(why);
        self.progress = Progress::Idle(Instant::now() + RETRY);
    }

    /// Reads the maker's answer, and proves to it that this rank knows the token.
    fn welcome(&mut self, mut link: Link, hello: &[u8; HELLO_BYTES], answer: &[u8; ANSWER_BYTES]) -> Result<Progress> {
        let status = Status::of(answer[0]);
        if status == Some(Status::UnknownId) {
            return Err(Error::usage(format!(
                "the unique id is used up, or its maker has given it up: the process at {} does not know it any more; one id starts one communicator",
                self.address
            )));
        }
        if !greeting::is_proven(&self.token, hello, answer) {
            return Err(Error::new(
                ncclRemoteError,
                format!("the process at {} is not the one that made the unique id", self.address),
            ));
        }
        self.is_dropped = false;
        match status {
            Some(Status::Welcome) => {}
            Some(Status::RankHasNoSecret) => {
                return Err(Error::usage(
                    "the maker of the unique id has DM_STORE_SECRET set, and this process has not: set it to the same secret on all ranks",
                ));
            }
            Some(Status::MakerHasNoSecret) => {
                return Err(Error::usage(
                    "this process has DM_STORE_SECRET set, and the maker of the unique id has not: set it to the same secret on all ranks",
                ));
            }
            _ => {
                return Err(Error::usage(
                    "another version of hostccl made the unique id: all ranks need the same library",
                ));
            }
        }
        link.put(&greeting::proof(&self.token, hello, answer));
        let Some(secret) = here::own_secret() else { return Ok(self.register(link)) };
        let broken = |broken: crate::noise::Broken| Error::new(ncclSystemError, broken.to_string());
        let mut session = Session::initiator(&secret, &super::prologue(hello, answer)).map_err(broken)?;
        let mut message = Vec::new();
        session.write_message(&[], &mut message).map_err(broken)?;
        link.put(&message);
        Ok(Progress::Noise(link, Box::new(session)))
    }

    /// Sends this rank's first message.
    fn register(&self, mut link: Link) -> Progress {
        link.allow_messages(MESSAGE_BYTES);
        // After an error here, the next read finds the connection closed.
        let _ = link.put_frame(&link::frame(&self.first));
        let _ = link.push();
        Progress::Ready(link)
    }

    /// Returns the error that the maker has another secret.
    fn other_secret(&self) -> Error {
        Error::usage(format!(
            "the maker of the unique id, at {}, has another secret than this process: set DM_STORE_SECRET to the same secret on all ranks",
            self.address
        ))
    }

    /// Returns the error that the connection has ended, although the join is not over.
    fn maker_gone(&self) -> Error {
        Error::new(
            ncclRemoteError,
            format!(
                "the process that made the unique id, at {}, ended or became unreachable before all ranks had joined",
                self.address
            ),
        )
    }
}

/// Returns the address, with the number of this host's interface where it is a link-local address.
/// The number that the maker wrote means nothing on another host.
fn with_own_scope(address: SocketAddr) -> SocketAddr {
    match (address, here::own_address()) {
        (SocketAddr::V6(mut theirs), Ok(SocketAddr::V6(own)))
            if theirs.ip().is_unicast_link_local() && own.scope_id() != 0 =>
        {
            theirs.set_scope_id(own.scope_id());
            SocketAddr::V6(theirs)
        }
        _ => address,
    }
}

/// Whether the kernel has refused a connection because of the limit on open files.
fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Opens a socket that does not block.
fn open(address: &SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: the result is a new descriptor or -1.
    match unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) } {
        ..0 => Err(io::Error::last_os_error()),
        // SAFETY: nobody else owns the new descriptor.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }.into()),
    }
}

/// Begins to connect the socket.
fn connect(socket: &TcpStream, address: &SocketAddr) -> io::Result<()> {
    let fd = socket.as_raw_fd();
    let begun = match address {
        SocketAddr::V4(address) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the structure outlives the call, and has that length.
            unsafe { libc::connect(fd, (&raw const raw).cast(), size_of_val(&raw) as libc::socklen_t) }
        }
        SocketAddr::V6(address) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { libc::connect(fd, (&raw const raw).cast(), size_of_val(&raw) as libc::socklen_t) }
        }
    };
    match begun {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Ok(()),
            error => Err(error),
        },
    }
}
