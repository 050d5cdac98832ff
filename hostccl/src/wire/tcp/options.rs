//! The settings of the wire over TCP in the environment.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use super::sockets;
use crate::error::{Error, Result};
use crate::fork::Private;
use crate::wire::address::{self, Interface};

/// How long a host may be silent where `DM_HOST_TIMEOUT_MS` says nothing.
pub(crate) const SILENCE: Duration = Duration::from_secs(5);
/// The shortest time that `DM_HOST_TIMEOUT_MS` may give, in milliseconds. The kernel sends at most
/// one probe a second, and a probe may get lost.
const LEAST_SILENCE: u64 = 2000;
/// The longest time that `DM_HOST_TIMEOUT_MS` may give, in milliseconds. By default the kernel
/// itself ends a connection on which data is not acknowledged for about 15 minutes
/// (`tcp_retries2`). The limit of the wire must come first.
const MOST_SILENCE: u64 = 600_000;
/// How many new connections the kernel keeps until this process takes them.
const BACKLOG: i32 = 1024;
/// The congestion controls that take the place of BBR, the preferred one first. A process may not
/// be permitted to use the first one. Every process may use the second one.
const INSTEAD_OF_BBR: [&[u8]; 2] = [b"cubic", b"reno"];
/// Two hosts are near each other where the round trip between them is at most this long. Hosts of
/// one data centre are near each other.
const LONGEST_NEAR_ROUND_TRIP: Duration = Duration::from_millis(1);

/// How long a process that connects may take to prove itself, and how long that process may stay
/// unknown to this one.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process tries to reach a peer that answers, but does not take the connection. Half of
/// this time is longer than [`PATIENCE`], after which a running process closes a connection that it
/// has not answered.
const TRIES: Duration = Duration::from_secs(30);

/// The settings of a wire over TCP.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The interface at which the process listens.
    pub(crate) interface: Interface,
    /// How long a host may be silent before its processes count as lost.
    pub(crate) silence: Duration,
    /// How long the process tries to reach a peer that answers, but does not take the connection.
    pub(crate) tries: Duration,
    /// How long a process that connects may take to prove itself.
    pub(crate) patience: Duration,
    /// The name of the congestion control, where it is not the kernel's default.
    pub(crate) congestion: Option<String>,
    /// The secret of the job, with which connections are encrypted.
    pub(crate) secret: Option<Vec<u8>>,
}

/// Returns the value of a variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().trim().to_owned()).filter(|value| !value.is_empty())
}

/// Parses the value of `DM_HOST_TIMEOUT_MS`.
fn parse_silence(text: &str) -> Result<Duration> {
    let millis = text.parse().ok().filter(|millis| (LEAST_SILENCE..=MOST_SILENCE).contains(millis));
    millis.map(Duration::from_millis).ok_or_else(|| {
        Error::argument(format!(
            "DM_HOST_TIMEOUT_MS is {text:?}: it must be a whole number of milliseconds from {LEAST_SILENCE} to {MOST_SILENCE}"
        ))
    })
}

/// Returns how long a host may be silent: the value of `DM_HOST_TIMEOUT_MS`, or 5 s.
pub(crate) fn silence() -> Result<Duration> {
    variable("DM_HOST_TIMEOUT_MS").map_or(Ok(SILENCE), |text| parse_silence(&text))
}

/// Makes the kernel send probes on a connection over which nothing is on the way: after a third of
/// `silence`, but not before one second has passed. So the hosts hear of each other at least that
/// often.
pub(crate) fn keep_alive(socket: &Socket, silence: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs((silence / 3).as_secs().max(1)))
        .with_interval(Duration::from_secs(silence.as_secs().div_ceil(100).max(1)))
        .with_retries((silence.as_secs() as u32).clamp(3, 100));
    socket.set_tcp_keepalive(&keepalive)
}

/// Gives a socket another congestion control where BBR is the kernel's default.
///
/// BBR sends no faster than the rate at which it has seen bytes acknowledged. A collective sends a
/// short burst to every host at the same time, and a receiver may wait for its processor. BBR
/// takes such a wait for a slow network: single messages of 128 KiB took 20 to 100 ms, where they
/// take 0.2 ms with cubic.
fn avoid_bbr(socket: &Socket) {
    if socket.tcp_congestion().is_ok_and(|name| name.starts_with(b"bbr")) {
        // Where the kernel has neither of the two, the connection keeps BBR.
        let _ = INSTEAD_OF_BBR.into_iter().find(|name| socket.set_tcp_congestion(name).is_ok());
    }
}

impl Options {
    /// Reads the environment. `fixed` is the address that reaches the store.
    pub(crate) fn read(fixed: Option<IpAddr>, secret: Option<Vec<u8>>) -> Result<Options> {
        let list = ["DM_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
            .into_iter()
            .find_map(|name| variable(name).map(|value| (name, value)));
        let interfaces = address::interfaces().map_err(|reason| Error::system("listing the interfaces", reason))?;
        let list = list.as_ref().map(|(name, value)| (*name, value.as_str()));
        let interface = address::choose(&interfaces, list, fixed).map_err(Error::argument)?;
        let silence = silence()?;
        Ok(Options {
            interface,
            silence,
            tries: TRIES,
            patience: PATIENCE,
            congestion: variable("DM_SOCKET_CONGESTION"),
            secret,
        })
    }

    /// The settings of a wire of a test, which listens at 127.0.0.1.
    #[cfg(test)]
    pub(crate) fn of_test() -> Options {
        let address = IpAddr::from([127, 0, 0, 1]);
        let interface = Interface { name: "lo".to_owned(), address, scope: 0, is_loopback: true };
        Options { interface, silence: SILENCE, tries: TRIES, patience: PATIENCE, congestion: None, secret: None }
    }

    /// Opens a listener. Returns it with its address in a contact's format.
    pub(in crate::wire) fn listen(&self) -> Result<(Private<Socket>, Vec<u8>)> {
        let Interface { address, scope, .. } = self.interface;
        let wanted = match address {
            IpAddr::V4(address) => SocketAddr::V4(SocketAddrV4::new(address, 0)),
            IpAddr::V6(address) => SocketAddr::V6(SocketAddrV6::new(address, 0, 0, scope)),
        };
        let open = || {
            let socket = Self::socket(&wanted)?;
            socket.bind(&SockAddr::from(wanted))?;
            socket.listen(BACKLOG)?;
            Ok(socket)
        };
        let what = format!("listening at {address} (DM_SOCKET_IFNAME chooses another interface)");
        let listener = Private::open(open).map_err(|reason| Error::system(&what, reason))?;
        if let Some(name) = &self.congestion {
            listener.set_tcp_congestion(name.as_bytes()).map_err(|reason| {
                Error::argument(format!(
                    "DM_SOCKET_CONGESTION is {name:?}, which this process may not use ({reason}): /proc/sys/net/ipv4/tcp_allowed_congestion_control names those that it may"
                ))
            })?;
        }
        let bound = listener.local_addr().map_err(|reason| Error::system(&what, reason))?;
        let bound = bound.as_socket().unwrap_or(wanted);
        Ok((listener, address::to_bytes(&bound)))
    }

    /// Makes a socket that does not block, for connections with that address.
    pub(super) fn socket(address: &SocketAddr) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(*address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        Ok(socket)
    }

    /// Sets the socket options of every connection.
    ///
    /// [`Silence`](super::silence::Silence) decides when a host is lost, and its limit comes
    /// before that of the probes. `TCP_USER_TIMEOUT` is the limit while a connection is being
    /// made, and later on a kernel that does not tell the number of segments.
    pub(super) fn prepare(&self, socket: &Socket) -> io::Result<()> {
        socket.set_tcp_nodelay(true)?;
        keep_alive(socket, self.silence)?;
        socket.set_tcp_user_timeout(Some(self.silence))?;
        // After a cut, the host is heard again when the kernel sends a lost packet again. That must
        // happen before the host counts as lost. With much shorter pauses the kernel's own limit,
        // which counts the tries (`tcp_retries2`), would come before that of the wire.
        sockets::limit_pause(socket, self.silence / 5);
        match &self.congestion {
            Some(name) => socket.set_tcp_congestion(name.as_bytes()),
            None => {
                avoid_bbr(socket);
                Ok(())
            }
        }
    }

    /// Chooses the congestion control of a connection whose round trip is known: reno in place of
    /// cubic where the two hosts are near each other.
    ///
    /// Cubic has HyStart, which ends slow start when the acknowledgements of one burst arrive over
    /// more than half a round trip. Where a round trip takes some microseconds, the first bursts
    /// meet that condition. From then on the congestion window grows slowly. The window was seen
    /// to stay just above the length of one message, so that the sender waited for
    /// acknowledgements again and again: an all-reduce of 1 MiB between two hosts took 560 us, and
    /// takes 190 us with reno. Reno has no HyStart. Over short distances cubic's window grows as
    /// reno's does (RFC 9438, section 4.3), so nothing else is lost.
    pub(super) fn adapt_to_distance(&self, socket: &Socket) {
        let is_cubic = || socket.tcp_congestion().is_ok_and(|name| name.starts_with(b"cubic"));
        let is_near = || sockets::least_round_trip(socket).is_some_and(|time| time <= LONGEST_NEAR_ROUND_TRIP);
        if self.congestion.is_none() && is_cubic() && is_near() {
            // Every process may use reno. Where the kernel lacks it, the connection keeps cubic.
            let _ = socket.set_tcp_congestion(b"reno");
        }
    }

    /// Reads the address of a contact.
    pub(super) fn address(&self, bytes: &[u8]) -> Option<SocketAddr> {
        address::parse(bytes, self.interface.scope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_default_of_bbr_is_replaced_and_a_chosen_one_stays() {
        let socket = Options::socket(&SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        if socket.set_tcp_congestion(b"bbr").is_err() {
            eprintln!("skipped: this process may not use bbr");
            return;
        }
        let mut options = Options::of_test();
        options.prepare(&socket).unwrap();
        assert!(!socket.tcp_congestion().unwrap().starts_with(b"bbr"));
        options.congestion = Some("bbr".to_owned());
        options.prepare(&socket).unwrap();
        assert!(socket.tcp_congestion().unwrap().starts_with(b"bbr"));
    }

    #[test]
    fn near_hosts_use_reno_in_place_of_cubic_unless_it_was_asked_for() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = Socket::from(std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        if socket.set_tcp_congestion(b"cubic").is_err() {
            eprintln!("skipped: this process may not use cubic");
            return;
        }
        // Until data are acknowledged, the kernel knows the round trip of the handshake alone.
        assert!(sockets::least_round_trip(&socket).unwrap() <= LONGEST_NEAR_ROUND_TRIP);
        let mut options = Options { congestion: Some("cubic".to_owned()), ..Options::of_test() };
        options.adapt_to_distance(&socket);
        assert!(socket.tcp_congestion().unwrap().starts_with(b"cubic"));
        options.congestion = None;
        options.adapt_to_distance(&socket);
        assert!(socket.tcp_congestion().unwrap().starts_with(b"reno"));
    }

    #[test]
    fn a_silence_that_is_no_time_is_refused_with_its_value() {
        assert_eq!(parse_silence("2500").unwrap(), Duration::from_millis(2500));
        for text in ["0", "1999", "-1", "abc", "1.5", "600001"] {
            let error = parse_silence(text).unwrap_err();
            assert!(error.message().contains(&format!("DM_HOST_TIMEOUT_MS is {text:?}")), "{}", error.message());
        }
    }

    #[test]
    fn the_pause_before_a_lost_packet_is_sent_again_is_short_where_the_kernel_limits_it() {
        let socket = Options::socket(&SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let options = Options { silence: Duration::from_secs(30), ..Options::of_test() };
        options.prepare(&socket).unwrap();
        // Kernels before Linux 6.15 do not know the option.
        if let Some(millis) = sockets::longest_pause(&socket) {
            assert_eq!(millis, 6000);
        }
    }
}
