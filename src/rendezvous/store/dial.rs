//! Reaches a TCPStore server: resolves its name, connects and greets, and tries again until the
//! deadline.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hostccl::fork::Private;
use hostccl::machine;
use once_cell::sync::OnceCell;
use rustix::event::{PollFd, PollFlags, poll};
use socket2::{Domain, Protocol, Socket, Type};

use super::connection::{Connection, ExchangeError};
use super::frame::{DENIED, MAGIC, OTHER_SECRET, Writer, op};
use super::names::{NotResolved, resolve_in_time};
use super::poll::timespec;
use super::random;
use super::records::{Records, number_of};
use super::secret::{Secret, VARIABLE};
use super::server::notice_silence;
use crate::error::{Error, Result, Status};
use crate::logging::Me;
use crate::wait::{Deadline, Wait};

/// The variable by which a rank finds the relay of its node. Its value is the name of the store as
/// messages have it, the address of the relay, and the address of this host from which the relay
/// reaches the store, with spaces between them. A rank that meets in another store uses no relay.
pub const RELAY: &str = "DM_STORE_RELAY";

/// The first and the last pause between two attempts to connect. The pause doubles each time, and
/// is cut short at random, so that thousands of ranks do not connect at the same moment.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// The longest time of one attempt. A packet may be lost, and then another attempt is made soon.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A client with a secret gives up after the server has closed so many connections at the greeting.
const CLOSED: u32 = 5;

/// Where a server listens, and how to greet it.
pub(super) struct Address {
    /// `tcp://host:port`, for messages.
    pub(super) name: String,
    /// The host, as the caller named it.
    pub(super) host: String,
    /// The port.
    pub(super) port: u16,
    /// The secret that the server must have too, if there is one.
    pub(super) secret: Option<Secret>,
    /// The address of the name that was reached. Later connections need no name server.
    pub(super) reached: OnceCell<SocketAddr>,
    /// The address of this host from which the server was reached first.
    pub(super) from: OnceCell<IpAddr>,
    /// The relay of this node, while it can be used.
    pub(super) relay: Mutex<Option<RelayAddress>>,
}

/// Why an attempt to connect failed.
enum Attempt {
    /// Another attempt may succeed.
    Again(io::Error),
    /// No other attempt can succeed.
    Final(Error),
}

impl Address {
    /// Returns a connection that has greeted. Tries again while nobody listens there yet.
    pub(super) fn reach(&self, wait: &Wait) -> Result<Connection> {
        let mut pause = FIRST_PAUSE;
        let mut known: Option<io::Error> = None;
        let mut closed = 0;
        loop {
            wait.look_around()?;
            let hurried = wait.deadline.left() < LAST_PAUSE;
            let error = match self.attempt(wait) {
                Ok(connection) => return Ok(connection),
                // If the last attempt had no time, the errors of the attempts before it say more.
                Err(Attempt::Again(error)) => match known.take() {
                    Some(known) if hurried && error.kind() == ErrorKind::TimedOut => known,
                    _ => error,
                },
                Err(Attempt::Final(error)) => return Err(error),
            };
            // A server that is about to end closes once. A server that closes again and again does
            // not know what a secret is.
            closed = if error.kind() == ErrorKind::UnexpectedEof { closed + 1 } else { 0 };
            if self.secret.is_some() && closed == CLOSED {
                return Err(Error::store_io(format!("the store at {}", self.name), &error));
            }
            if wait.deadline.passed() {
                let message = format!(
                    "no store at {} within {} ms: {}; is the process that serves it (rank 0 or the launcher) running, and is this its address?",
                    self.name,
                    wait.deadline.timeout().as_millis(),
                    machine::explained(&error)
                );
                return Err(Error::new(Status::Store, message).with_os_error(error.raw_os_error().unwrap_or(0)));
            }
            let random = random() as u32;
            let pause_now = pause / 2 + (pause / 2).mul_f64(f64::from(random) / f64::from(u32::MAX));
            let next = Deadline::after(pause_now.min(wait.deadline.left()));
            while !next.passed() {
                wait.cancel.check()?;
                std::thread::sleep(next.slice());
            }
            pause = (pause * 2).min(LAST_PAUSE);
            known = Some(error);
        }
    }

    /// Returns a connection to a server that was there before. If nobody listens now, the server
    /// has gone. A server that gives no answer may be busy, or packets were lost, so it is tried
    /// again.
    pub(super) fn reach_again(&self, wait: &Wait) -> Result<Connection> {
        loop {
            wait.look_around()?;
            return Err(match self.attempt(wait) {
                Ok(connection) => return Ok(connection),
                Err(Attempt::Final(error)) => error,
                Err(Attempt::Again(error)) if wait.deadline.passed() => Error::timeout(format!(
                    "the store at {} took no other connection within {} ms: {error}; the process that serves it (rank 0 or the launcher) is stopped or out of reach",
                    self.name,
                    wait.deadline.timeout().as_millis()
                )),
                Err(Attempt::Again(error)) if error.kind() == ErrorKind::TimedOut => continue,
                Err(Attempt::Again(error)) => Error::store_io(
                    format!(
                        "no other connection to the store at {}; the process that serves it (rank 0 or the launcher) may have ended",
                        self.name
                    ),
                    &error,
                ),
            });
        }
    }

    /// Tries once to connect and to greet.
    fn attempt(&self, wait: &Wait) -> std::result::Result<Connection, Attempt> {
        let limited = wait.with_deadline(Deadline::after(wait.deadline.left().min(ATTEMPT)));
        let relay = *self.relay.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(relay) = relay {
            let why = match self.attempt_by(relay, &limited) {
                Ok(connection) => return Ok(connection),
                // The server may be busy, with as many ranks as make relays worth while.
                Err(Attempt::Again(error)) if error.kind() == ErrorKind::TimedOut => return Err(Attempt::Again(error)),
                Err(Attempt::Final(error)) if wait.cancel.is_raised() => return Err(Attempt::Final(error)),
                Err(Attempt::Again(error)) => error.to_string(),
                // Another program may listen there, after the relay has ended.
                Err(Attempt::Final(error)) => error.message().to_owned(),
            };
            let RelayAddress { at, .. } = relay;
            log::debug!(
                "{Me}: the relay at {at} gives no connection ({why}), so this process connects to the store itself from now on"
            );
            *self.relay.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        let addresses = match self.reached.get() {
            Some(address) => vec![*address],
            None => self.resolve(&limited)?,
        };
        let stream = connect_to_any(&addresses, &limited)?;
        stream.set_nodelay(true).and_then(|()| notice_silence(&*stream)).map_err(Attempt::Again)?;
        let address = stream.peer_addr().map_err(Attempt::Again)?;
        let from = stream.local_addr().map_err(Attempt::Again)?.ip();
        let greeted = self.greet(Connection::new(stream), &limited)?;
        self.reached.get_or_init(|| address);
        self.from.get_or_init(|| from.to_canonical());
        Ok(greeted)
    }

    /// Tries once to connect by the relay of this node, and to greet.
    fn attempt_by(&self, relay: RelayAddress, wait: &Wait) -> std::result::Result<Connection, Attempt> {
        let stream = connect_to_any(&[relay.at], wait)?;
        stream.set_nodelay(true).map_err(Attempt::Again)?;
        let greeted = self.greet(Connection::new(stream), wait)?;
        // The relay is on this host, so the connection to it does not show by which address this
        // host reaches the server.
        self.from.get_or_init(|| relay.from);
        Ok(greeted)
    }

    fn resolve(&self, wait: &Wait) -> std::result::Result<Vec<SocketAddr>, Attempt> {
        resolve_in_time(&self.host, self.port, wait).map_err(|why| match why {
            NotResolved::Failed(error) => Attempt::Again(error),
            NotResolved::NoThread(error) => Attempt::Again(io::Error::new(error.kind(), machine::no_thread(&error))),
            NotResolved::Late => {
                let late = format!("{} was not resolved in time", self.host);
                Attempt::Again(io::Error::new(ErrorKind::TimedOut, late))
            }
            NotResolved::Cancelled(error) => Attempt::Final(error),
        })
    }

    /// Sends VALIDATE and PING in one write, as PyTorch's client does, because its libuv server
    /// closes the connection when they come apart. The reply shows that a TCPStore listens there.
    /// With a secret, a handshake takes the place of the PING.
    fn greet(&self, mut connection: Connection, wait: &Wait) -> std::result::Result<Connection, Attempt> {
        let hello = Writer::new(op::VALIDATE).word(MAGIC);
        let greeted = match &self.secret {
            None => self.ping(&mut connection, hello, wait),
            Some(secret) => self.shake_hands(&mut connection, hello, secret, wait),
        };
        match greeted {
            Ok(()) => Ok(connection),
            // A server that is about to end closes the connection, and so does a server that is no
            // store. The caller tries again until the deadline.
            Err(ExchangeError::Io(error)) => Err(Attempt::Again(error)),
            Err(ExchangeError::Late) => {
                Err(Attempt::Again(io::Error::new(ErrorKind::TimedOut, "no answer to the greeting")))
            }
            Err(ExchangeError::Ended(error)) => Err(Attempt::Final(error)),
        }
    }

    fn ping(&self, connection: &mut Connection, hello: Writer, wait: &Wait) -> std::result::Result<(), ExchangeError> {
        let nonce = random() as u32;
        connection.nonce = nonce;
        let mut echo = [0; 4];
        connection.send(&hello.then(op::PING).word(nonce).finish(), wait)?;
        connection.receive(&mut echo, wait)?;
        if echo == DENIED && echo != nonce.to_le_bytes() {
            return Err(ExchangeError::Ended(Error::store(format!(
                "the store at {} takes only clients that have its secret: set {VARIABLE} as it is set where the store is served",
                self.name
            ))));
        }
        if echo != nonce.to_le_bytes() {
            return Err(ExchangeError::Ended(Error::store(format!(
                "what listens at {} is no TCPStore: it answers a ping of {nonce:#010x} with {:#010x}",
                self.name,
                u32::from_le_bytes(echo)
            ))));
        }
        Ok(())
    }

    /// Exchanges the messages of the handshake with the server. Fails where the server does not
    /// have the secret. Afterwards the connection is encrypted.
    fn shake_hands(
        &self,
        connection: &mut Connection,
        hello: Writer,
        secret: &Secret,
        wait: &Wait,
    ) -> std::result::Result<(), ExchangeError> {
        let refuse = |why: &str| ExchangeError::Ended(Error::store(format!("the store at {} {why}", self.name)));
        let (mut records, first) = Records::initiator(secret)
            .map_err(|why| ExchangeError::Ended(Error::store(format!("no connection to the store: {why}"))))?;
        connection.nonce = number_of(&first);
        connection.send(&hello.then(op::HANDSHAKE).string(&first).finish(), wait)?;
        let second = match connection.string(wait) {
            Err(ExchangeError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => {
                let why = format!(
                    "it closes connections that bring a secret: PyTorch's server does, and version 0.1 of this library, so unset {VARIABLE}, or meet elsewhere"
                );
                return Err(ExchangeError::Io(io::Error::new(error.kind(), why)));
            }
            answer => answer?,
        };
        if second.is_empty() {
            return Err(refuse(&format!("is served without a secret, but {VARIABLE} is set here: set it there too")));
        }
        if second == OTHER_SECRET {
            return Err(refuse(&format!("has another secret: {VARIABLE} must be the same on all ranks")));
        }
        let finished = records.finish(&second);
        finished.map_err(|_| refuse(&format!("does not have the secret that {VARIABLE} holds here")))?;
        connection.encrypt(records)
    }
}

/// How the ranks of a node reach the store by the node's relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RelayAddress {
    /// Where the relay listens.
    at: SocketAddr,
    /// The address of this host from which the relay reaches the store.
    from: IpAddr,
}

impl RelayAddress {
    /// Returns the relay for the store of that name, by the value of [`RELAY`].
    pub(super) fn of_store(name: &str, variable: &str) -> Option<RelayAddress> {
        let words: Vec<&str> = variable.split(' ').collect();
        let [store, at, from] = words[..] else { return None };
        (store == name).then(|| Some(RelayAddress { at: at.parse().ok()?, from: from.parse().ok()? })).flatten()
    }
}

/// Tries all addresses of a name at the same time, IPv6 and IPv4, because one of them may lead
/// nowhere.
fn connect_to_any(addresses: &[SocketAddr], wait: &Wait) -> std::result::Result<Private<TcpStream>, Attempt> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    let mut trying: Vec<(Private<Socket>, SocketAddr)> = Vec::new();
    for address in addresses {
        match start_connecting(*address) {
            Ok(socket) => trying.push((socket, *address)),
            // Waiting does not help a process that has no descriptor left.
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                return Err(Attempt::Final(Error::store_io("no socket to connect to the store with", &error)));
            }
            Err(error) => last = error,
        }
    }
    while !trying.is_empty() {
        wait.cancel.check().map_err(Attempt::Final)?;
        if wait.deadline.passed() {
            let names: Vec<String> = trying.iter().map(|(_, address)| address.to_string()).collect();
            last = io::Error::new(ErrorKind::TimedOut, format!("no answer from {}", names.join(", ")));
            break;
        }
        let mut polled: Vec<PollFd<'_>> =
            trying.iter().map(|(socket, _)| PollFd::new(&**socket, PollFlags::OUT)).collect();
        let slice = timespec(wait.deadline.slice().max(Duration::from_millis(1)));
        let _ = poll(&mut polled, Some(&slice));
        let ready: Vec<bool> = polled.iter().map(|entry| !entry.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        let (done, still): (Vec<_>, Vec<_>) = trying.into_iter().partition(|_| ready.next().unwrap_or(false));
        trying = still;
        for (socket, address) in done {
            match socket.take_error() {
                // When nobody listens on a local port, the socket may have connected to itself.
                Ok(None) if socket.local_addr().ok().is_some_and(|local| local.as_socket() == Some(address)) => {
                    last = ErrorKind::ConnectionRefused.into();
                }
                Ok(None) => return Ok(socket.map(TcpStream::from)),
                Ok(Some(error)) | Err(error) => last = error,
            }
        }
    }
    Err(Attempt::Again(last))
}

fn start_connecting(address: SocketAddr) -> io::Result<Private<Socket>> {
    let socket = Private::open(|| Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)))?;
    socket.set_nonblocking(true)?;
    // The kernel may give this connection the port at which rank 0 is to listen soon. With this
    // option rank 0 can listen there all the same.
    socket.set_reuse_address(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => Ok(socket),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_is_for_one_store() {
        let of = |name, variable| RelayAddress::of_store(name, variable).map(|relay| (relay.at, relay.from));
        let (at, from) = ("127.0.0.1:41000".parse().unwrap(), "fd00::7".parse().unwrap());
        assert_eq!(of("tcp://a:1", "tcp://a:1 127.0.0.1:41000 fd00::7"), Some((at, from)));
        for variable in [
            "tcp://a:2 127.0.0.1:41000 fd00::7",
            "tcp://a:1 127.0.0.1:41000",
            "tcp://a:1 x fd00::7",
            "tcp://a:1 127.0.0.1:41000 fd00::7 x",
            "",
        ] {
            assert_eq!(of("tcp://a:1", variable), None, "{variable}");
        }
    }
}
