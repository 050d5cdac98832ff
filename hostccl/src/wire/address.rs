//! The address at which other processes reach this one.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// An address of an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    /// The interface's name.
    pub(crate) name: String,
    /// The address.
    pub(crate) address: IpAddr,
    /// The interface's number, which a link-local address needs.
    pub(crate) scope: u32,
    /// Whether the interface only reaches this host.
    pub(crate) is_loopback: bool,
}

/// Returns the addresses of all interfaces that are up.
pub(crate) fn interfaces() -> std::io::Result<Vec<Interface>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes the list's address.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: the entries of the list are valid until it is freed.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        let flags = entry.ifa_flags as i32;
        if entry.ifa_addr.is_null() || flags & libc::IFF_UP == 0 {
            continue;
        }
        // SAFETY: the name is a C string, and the family says which structure the address is.
        unsafe {
            let name = CStr::from_ptr(entry.ifa_name).to_string_lossy().into_owned();
            let is_loopback = flags & libc::IFF_LOOPBACK != 0;
            let (address, scope) = match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let address = &*entry.ifa_addr.cast::<libc::sockaddr_in>();
                    (IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))), 0)
                }
                libc::AF_INET6 => {
                    let address = &*entry.ifa_addr.cast::<libc::sockaddr_in6>();
                    (IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)), address.sin6_scope_id)
                }
                _ => continue,
            };
            found.push(Interface { name, address, scope, is_loopback });
        }
    }
    // SAFETY: the list came from `getifaddrs` and is not used again.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// Whether a list chooses an interface's name. The list follows NCCL's rules: prefixes of names,
/// separated by commas. A `^` in front excludes the interfaces, a `=` in front asks for whole
/// names, and `^=` does both.
fn is_chosen(list: &str, name: &str) -> bool {
    let (excludes, rest) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    let mut names = rest.split(',').map(|entry| entry.split(':').next().unwrap_or("").trim());
    let matches = names.any(|entry| !entry.is_empty() && if exact { name == entry } else { name.starts_with(entry) });
    matches != excludes
}

/// The order of an address among several addresses: the address with the smallest value is chosen.
/// IPv4 comes before IPv6, and link-local addresses come last.
fn order(interface: &Interface) -> u32 {
    match interface.address {
        IpAddr::V4(address) if address.is_link_local() => 2,
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) if address.is_unicast_link_local() => 3,
        IpAddr::V6(_) => 1,
    }
}

/// Chooses the address of this process. `list` is the value of the interface variable that is set,
/// and `fixed` the address that reaches the store. Fails with the reason where `list` fits no
/// interface.
pub(crate) fn choose(
    interfaces: &[Interface],
    list: Option<(&str, &str)>,
    fixed: Option<IpAddr>,
) -> Result<Interface, String> {
    let best = |found: &mut dyn Iterator<Item = &Interface>| found.min_by_key(|found| order(found)).cloned();
    if let Some((variable, list)) = list {
        // NCCL leaves loopback and Docker's bridges out unless nothing else fits the list.
        let mut fits = interfaces.iter().filter(|found| is_chosen(list, &found.name));
        let mut outward = interfaces
            .iter()
            .filter(|found| is_chosen(list, &found.name) && !found.is_loopback && !found.name.starts_with("docker"));
        let found = best(&mut outward).or_else(|| best(&mut fits));
        let mut names: Vec<&str> = interfaces.iter().map(|found| found.name.as_str()).collect();
        // An interface has an entry for each of its addresses.
        names.sort_unstable();
        names.dedup();
        return found.ok_or_else(|| {
            format!(
                "{variable} is {list:?}, and fits no interface that is up and has an address: there are {}",
                names.join(", ")
            )
        });
    }
    if let Some(address) = fixed {
        let known = interfaces.iter().find(|found| found.address == address).cloned();
        let is_loopback = address.is_loopback();
        return Ok(known.unwrap_or(Interface { name: String::new(), address, scope: 0, is_loopback }));
    }
    let mut outward = interfaces.iter().filter(|found| !found.is_loopback && !found.name.starts_with("docker"));
    let mut loopback = interfaces.iter().filter(|found| found.is_loopback);
    Ok(best(&mut outward).or_else(|| best(&mut loopback)).unwrap_or(Interface {
        name: "lo".to_owned(),
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        scope: 0,
        is_loopback: true,
    }))
}

/// Returns the bytes of an address in a contact.
pub(crate) fn to_bytes(address: &SocketAddr) -> Vec<u8> {
    let mut out = vec![if address.is_ipv4() { 4 } else { 6 }];
    out.extend_from_slice(&address.port().to_le_bytes());
    match address {
        SocketAddr::V4(address) => out.extend_from_slice(&address.ip().octets()),
        SocketAddr::V6(address) => {
            out.extend_from_slice(&address.scope_id().to_le_bytes());
            out.extend_from_slice(&address.ip().octets());
        }
    }
    out
}

/// The most bytes of the name of a host in a contact.
const MOST_NAME: usize = 64;

/// Returns the name of this host.
pub(crate) fn host_name() -> String {
    let mut name = [0_u8; MOST_NAME + 1];
    // SAFETY: the call writes at most that many bytes, and the last one stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), MOST_NAME) };
    readable(name.split(|byte| *byte == 0).next().unwrap_or_default())
}

/// Returns a text without the characters that would disturb a message.
fn readable(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().filter(|letter| !letter.is_control()).collect()
}

/// Returns the bytes of an address and the name of its host, for a contact.
pub(crate) fn with_name(mut address: Vec<u8>, host: &str) -> Vec<u8> {
    address.extend_from_slice(&host.as_bytes()[..host.len().min(MOST_NAME)]);
    address
}

/// Returns "beta (10.0.0.2:4711)" for the text of an address of the host with that contact, or the
/// text alone where the contact has no name.
pub(crate) fn in_words(contact: &[u8], address: &str) -> String {
    let bytes = match contact.first() {
        Some(4) => V4_BYTES,
        _ => V6_BYTES,
    };
    let name = contact.get(bytes..).unwrap_or_default();
    match readable(&name[..name.len().min(MOST_NAME)]) {
        name if name.is_empty() => address.to_owned(),
        name => format!("{name} ({address})"),
    }
}

/// The length of an address in a contact.
const V4_BYTES: usize = 7;
const V6_BYTES: usize = 23;

/// Reads the address of a contact, behind which the name of the host may follow. Returns `None`
/// where the bytes are no address. `scope` is the number of this host's interface: a link-local
/// address needs it, and the sender's number means nothing here.
pub(crate) fn parse(bytes: &[u8], scope: u32) -> Option<SocketAddr> {
    let (family, rest) = bytes.split_first()?;
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let port = u16::from_le_bytes(*port);
    match family {
        4 => {
            let octets: [u8; 4] = *rest.first_chunk()?;
            Some(SocketAddr::V4(SocketAddrV4::new(octets.into(), port)))
        }
        6 => {
            let (theirs, rest) = rest.split_first_chunk::<4>()?;
            let octets: [u8; 16] = *rest.first_chunk()?;
            let address = Ipv6Addr::from(octets);
            let scope = match address.is_unicast_link_local() {
                true if scope != 0 => scope,
                true => u32::from_le_bytes(*theirs),
                false => 0,
            };
            Some(SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, address: &str) -> Interface {
        let address: IpAddr = address.parse().unwrap();
        Interface { name: name.to_owned(), address, scope: 3, is_loopback: address.is_loopback() }
    }

    #[test]
    fn the_lists_have_the_rules_of_nccl() {
        for (list, name, chosen) in [
            ("eth", "eth0", true),
            ("eth", "ens3", false),
            ("ens,eth", "eth1", true),
            ("=eth1", "eth1", true),
            ("=eth1", "eth10", false),
            ("^docker", "eth0", true),
            ("^docker,lo", "lo", false),
            ("^=eth1", "eth10", true),
            ("eth0:5", "eth0", true),
        ] {
            assert_eq!(is_chosen(list, name), chosen, "{list} {name}");
        }
    }

    #[test]
    fn the_best_address_is_chosen() {
        let all = [
            interface("lo", "127.0.0.1"),
            interface("docker0", "172.17.0.1"),
            interface("eth0", "fe80::1"),
            interface("eth0", "10.0.0.2"),
            interface("ib0", "10.1.0.2"),
            interface("lo", "::1"),
        ];
        let name = |list, fixed| choose(&all, list, fixed).map(|found| found.address.to_string());
        assert_eq!(name(None, None).unwrap(), "10.0.0.2");
        assert_eq!(name(None, Some("10.1.0.2".parse().unwrap())).unwrap(), "10.1.0.2");
        assert_eq!(name(Some(("V", "ib")), Some("10.0.0.2".parse().unwrap())).unwrap(), "10.1.0.2");
        assert_eq!(name(Some(("V", "^eth")), None).unwrap(), "10.1.0.2");
        assert_eq!(name(Some(("V", "lo")), None).unwrap(), "127.0.0.1");
        let error = name(Some(("DM_SOCKET_IFNAME", "wlan")), None).unwrap_err();
        assert!(
            error.contains("DM_SOCKET_IFNAME is \"wlan\"") && error.ends_with("there are docker0, eth0, ib0, lo"),
            "{error}"
        );
        assert_eq!(choose(&all[..1], None, None).unwrap().name, "lo");
        // Where only loopback is left, a list that excludes another interface chooses loopback.
        for list in ["^docker0", "^docker,eth", "lo"] {
            assert_eq!(choose(&all[..2], Some(("V", list)), None).unwrap().name, "lo", "{list}");
        }
        assert_eq!(choose(&all[..2], Some(("V", "^lo")), None).unwrap().name, "docker0");
        assert!(choose(&all[..2], Some(("V", "^lo,docker")), None).is_err());
    }

    #[test]
    fn an_address_survives_its_bytes_and_a_scope_is_this_hosts() {
        for text in ["10.0.0.2:41733", "[2001:db8::1]:80"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(parse(&to_bytes(&address), 9), Some(address));
            let (text, named) = (address.to_string(), with_name(to_bytes(&address), "be\nta"));
            assert_eq!((parse(&named, 9), in_words(&named, &text)), (Some(address), format!("beta ({text})")));
            assert_eq!(in_words(&to_bytes(&address), &text), text);
        }
        let link = SocketAddr::V6(SocketAddrV6::new("fe80::1".parse().unwrap(), 80, 0, 2));
        assert_eq!(parse(&to_bytes(&link), 9).unwrap().to_string(), "[fe80::1%9]:80");
        assert_eq!(parse(&to_bytes(&link), 0), Some(link));
        for bytes in [&[][..], &[4], &[4, 0, 0, 1], &[6; 7], &[9; 20]] {
            assert_eq!(parse(bytes, 0), None);
        }
    }
}
