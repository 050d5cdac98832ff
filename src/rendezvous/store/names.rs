//! Finds the addresses of a host's name.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};

use rustix::system::uname;

use crate::error::Error;
use crate::wait::Wait;

/// Why a name was not resolved in time.
#[derive(Debug)]
pub(in crate::rendezvous) enum NotResolved {
    /// The system's resolver has no address for the name.
    Failed(io::Error),
    /// The thread that asks the resolver could not be started.
    NoThread(io::Error),
    /// The deadline has passed.
    Late,
    /// The wait was cancelled.
    Cancelled(Error),
}

/// Does what [`resolve`] does, on a thread of its own, because the system's resolver knows neither
/// the deadline nor the flag of `wait`. An address needs no resolver and no thread.
pub(in crate::rendezvous) fn resolve_in_time(
    host: &str,
    port: u16,
    wait: &Wait,
) -> Result<Vec<SocketAddr>, NotResolved> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let host = host.to_owned();
    in_time(move || resolve(&host, port), wait)
}

/// Runs the resolver on a thread of its own. The thread ends when the resolver does.
fn in_time(
    resolver: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    wait: &Wait,
) -> Result<Vec<SocketAddr>, NotResolved> {
    let (sender, receiver) = channel();
    let work = move || drop(sender.send(resolver()));
    hostccl::thread::spawn("dm-resolve", work).map_err(NotResolved::NoThread)?;
    loop {
        match receiver.recv_timeout(wait.deadline.slice()) {
            Ok(resolved) => return resolved.map_err(NotResolved::Failed),
            Err(RecvTimeoutError::Timeout) if !wait.deadline.passed() => {
                wait.cancel.check().map_err(NotResolved::Cancelled)?;
            }
            Err(_) => return Err(NotResolved::Late),
        }
    }
}

/// Returns the addresses that the system's resolver has for `host`. This function may take as long
/// as the resolver does.
///
/// A pod of Kubernetes knows itself by its short name at once, and the cluster's name server may
/// learn the pod's long name later. So where the long name of this host has no address yet, that
/// of the short name counts.
pub fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let of = |name: &str| (name, port).to_socket_addrs().map(Iterator::collect);
    of(host).or_else(|error| match short_name_of_this_host(host) {
        Some(short) => of(short).map_err(|_| error),
        None => Err(error),
    })
}

/// Returns the first part of `host` if it is the name of this host, and further parts follow.
fn short_name_of_this_host(host: &str) -> Option<&str> {
    let (short, _) = host.split_once('.')?;
    (short.as_bytes() == uname().nodename().to_bytes()).then_some(short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    #[test]
    fn a_long_name_of_this_host_has_a_short_one() {
        let name = uname().nodename().to_string_lossy().into_owned();
        let short = name.split('.').next().unwrap_or_default();
        if short == name {
            assert_eq!(short_name_of_this_host(&format!("{name}.train")), Some(short));
        }
        assert_eq!(short_name_of_this_host(&name), None);
        assert_eq!(short_name_of_this_host("no-host.train"), None);
        assert_eq!(resolve("127.0.0.1", 7).unwrap(), ["127.0.0.1:7".parse().unwrap()]);
        assert!(resolve("no-host.invalid", 7).is_err());
    }

    #[test]
    fn a_resolver_that_gives_no_answer_ends_at_the_deadline_or_when_the_wait_is_cancelled() {
        let (answer, question) = channel::<()>();
        let question = Arc::new(Mutex::new(question));
        let resolver = || {
            let question = Arc::clone(&question);
            move || {
                let _ = question.lock().unwrap().recv();
                Ok(Vec::new())
            }
        };
        let late = Wait::after(Duration::ZERO);
        assert!(matches!(in_time(resolver(), &late), Err(NotResolved::Late)));
        let cancelled = Wait::after(Duration::from_secs(600));
        cancelled.cancel.raise();
        assert!(matches!(in_time(resolver(), &cancelled), Err(NotResolved::Cancelled(_))));
        // Without a sender the resolvers end, and with them their threads.
        drop(answer);
        assert_eq!(resolve_in_time("::1", 7, &late).unwrap(), ["[::1]:7".parse().unwrap()]);
    }
}
