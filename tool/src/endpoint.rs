//! HOST:PORT on the command line.

use std::net::Ipv6Addr;

/// The port where none is given. It is torchrun's.
const PORT: u16 = 29400;

/// Reads HOST, HOST:PORT, [IPv6]:PORT, or an IPv6 address alone.
pub fn endpoint(text: &str) -> Result<(String, u16), String> {
    let bare = |host: &str| host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host).to_owned();
    let address = text.split('%').next().unwrap_or_default();
    let alone = address.parse::<Ipv6Addr>().is_ok() || text.ends_with(']');
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !alone => {
            (host, port.parse().map_err(|_| format!("{port:?} is no port from 1 to 65535"))?)
        }
        _ => (text, PORT),
    };
    match (bare(host), port) {
        (host, _) if host.is_empty() => Err("the host is missing: it is HOST or HOST:PORT".to_owned()),
        (host, _) if host.contains('/') => Err("it is HOST:PORT, without tcp://".to_owned()),
        (_, 0) => Err("port 0 is none that the other nodes could know".to_owned()),
        (host, port) => Ok((host, port)),
    }
}

#[cfg(test)]
mod tests {
    use super::endpoint;

    #[test]
    fn endpoints_are_names_and_addresses() {
        let at = |host: &str, port| Ok((host.to_owned(), port));
        assert_eq!(endpoint("alpha"), at("alpha", 29400));
        assert_eq!(endpoint("alpha:1"), at("alpha", 1));
        assert_eq!(endpoint("fd77::1"), at("fd77::1", 29400));
        assert_eq!(endpoint("[fd77::1]:80"), at("fd77::1", 80));
        assert_eq!(endpoint("[fe80::1%net0]"), at("fe80::1%net0", 29400));
        for wrong in ["", ":80", "alpha:", "alpha:0", "alpha:70000", "tcp://alpha:80"] {
            assert!(endpoint(wrong).is_err(), "{wrong}");
        }
        for hostless in ["", ":80", "[]:80"] {
            assert_eq!(endpoint(hostless).unwrap_err(), "the host is missing: it is HOST or HOST:PORT", "{hostless}");
        }
    }
}
