//! Finds the addresses of a host's name.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use rustix::system::uname;

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
}
