//! The hosts of a job, as `--hosts` and a hostfile name them.

use std::net::Ipv6Addr;

use crate::run::nodelist::{expand, split};

/// A host that gets one node of the job.
#[derive(Debug, PartialEq)]
pub struct Host {
    /// The name as the user wrote it, for ssh: it may begin with a user and "@".
    pub target: String,
    /// The number of ranks, where the list has one.
    pub ranks: Option<u32>,
}

impl Host {
    fn new(target: &str, ranks: Option<&str>) -> Result<Host, String> {
        // ssh would read a name that begins with "-" as an option.
        if target.starts_with('-')
            || target.ends_with('@')
            || target.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            return Err(format!("{target:?} is no name of a host"));
        }
        let count = |text: &str| match text.parse() {
            Ok(ranks @ 1..=65536) => Ok(ranks),
            _ => Err(format!("{target}: {text:?} is no number of ranks from 1 to 65536, as in {target}:4")),
        };
        Ok(Host { target: target.to_owned(), ranks: ranks.map(count).transpose()? })
    }

    /// The name without the user.
    pub fn name(&self) -> &str {
        self.target.rsplit('@').next().unwrap_or(&self.target)
    }
}

/// Reads `alpha,beta:4` or `alpha[01-16]:8`.
pub fn from_text(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (index, item) in split(text).enumerate() {
        if item.trim().is_empty() {
            let number = index + 1;
            return Err(format!(
                "host {number} of {text:?} has no name: write alpha,beta with one comma between two hosts"
            ));
        }
        hosts.extend(item_hosts(item)?);
    }
    distinct(hosts)
}

/// The hosts of `alpha`, `alpha:4`, `alpha[01-16]:4`, `fd77::1` or `[fd77::1]:4`.
fn item_hosts(item: &str) -> Result<Vec<Host>, String> {
    let item = item.trim();
    if let Some((address, rest)) = item.strip_prefix('[').and_then(|item| item.split_once(']')) {
        let ranks = rest.strip_prefix(':');
        return match is_ipv6(address) && (rest.is_empty() || ranks.is_some()) {
            true => Ok(vec![Host::new(address, ranks)?]),
            false => Err(format!("{item:?} is no host: write [fd77::1] or [fd77::1]:4")),
        };
    }
    let (names, ranks) = match item.split_once(':') {
        _ if is_ipv6(item) => return Ok(vec![Host::new(item, None)?]),
        Some((name, after)) if after.contains(':') => {
            let ranks = after.split(':').next().unwrap_or_default();
            return Err(format!(
                "{item:?} has two colons: write {name}:{ranks}, with one number of ranks, and an IPv6 address with a number as [fd77::1]:4"
            ));
        }
        Some(("", ranks)) => return Err(format!("{item:?} has no name before the colon: write alpha:{ranks}")),
        Some((names, ranks)) => (names, Some(ranks)),
        None => (item, None),
    };
    expand(names)?.iter().map(|name| Host::new(name, ranks)).collect()
}

/// Whether this is an IPv6 address, which may have a login before it and a zone after it.
fn is_ipv6(text: &str) -> bool {
    let address = text.rsplit('@').next().unwrap_or(text).split('%').next().unwrap_or_default();
    address.parse::<Ipv6Addr>().is_ok()
}

/// Reads a hostfile as mpirun's: a host in each line, `slots=N` or `:N`, and comments after "#".
pub fn from_file(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |error: String| format!("line {} ({:?}): {error}", number + 1, line.trim());
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(item) = words.next() else { continue };
        let mut found = item_hosts(item).map_err(wrong)?;
        for word in words {
            match word.split_once('=') {
                Some(("slots", ranks)) => {
                    for host in &mut found {
                        *host = Host::new(&host.target, Some(ranks)).map_err(wrong)?;
                    }
                }
                // mpirun's limit for more ranks than slots, which no node here starts.
                Some(("max_slots" | "max-slots", _)) => {}
                _ => return Err(wrong(format!("{word:?} is unknown; slots=N is the number of ranks"))),
            }
        }
        hosts.extend(found);
    }
    if hosts.is_empty() {
        return Err("it names no host".to_owned());
    }
    distinct(hosts)
}

/// Adds up the ranks of a host that is there several times, as mpirun does, because each host gets
/// one node. A host without a number then counts as one rank.
fn distinct(hosts: Vec<Host>) -> Result<Vec<Host>, String> {
    let mut all: Vec<Host> = Vec::with_capacity(hosts.len());
    for host in hosts {
        match all.iter_mut().find(|other| other.name() == host.name()) {
            Some(other) if other.target != host.target => {
                return Err(format!(
                    "{} and {} are one host, which gets one node: write one of the two",
                    other.target, host.target
                ));
            }
            Some(other) => other.ranks = Some(other.ranks.unwrap_or(1) + host.ranks.unwrap_or(1)),
            None => all.push(host),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(hosts: &[Host]) -> String {
        let text = |host: &Host| format!("{}={}", host.target, host.ranks.unwrap_or_default());
        hosts.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn hosts_have_names_and_ranks() {
        for (text, hosts) in [
            ("alpha", "alpha=0"),
            ("alpha, beta:4", "alpha=0 beta=4"),
            ("anna@n[1-2,4]:8,n9", "anna@n1=8 anna@n2=8 anna@n4=8 n9=0"),
            ("a,b,a,a,c:2,c:3", "a=3 b=0 c=5"),
            ("fd77::1,[fd77::2]:3,10.0.0.1:2", "fd77::1=0 fd77::2=3 10.0.0.1=2"),
            ("u@fd77::1,[u@fe80::1%net0]:2,::1", "u@fd77::1=0 u@fe80::1%net0=2 ::1=0"),
        ] {
            assert_eq!(written(&from_text(text).unwrap()), hosts);
        }
        for wrong in ["", "a,", "a:0", "a:x", "-oProxyCommand=x", "a b", "u@a,a", "[::1]x", "u@", "[a]:2"] {
            assert!(from_text(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn errors_say_where_and_what_is_right() {
        for (text, error) in [
            ("alpha,beta:2:3", r#""beta:2:3" has two colons: write beta:2, with one number"#),
            ("alpha,,beta", r#"host 2 of "alpha,,beta" has no name: write alpha,beta"#),
            ("alpha,:4", r#"":4" has no name before the colon: write alpha:4"#),
            ("alpha:two", r#"alpha: "two" is no number of ranks from 1 to 65536, as in alpha:4"#),
        ] {
            let said = from_text(text).unwrap_err();
            assert!(said.starts_with(error), "{said}");
        }
        let said = from_file("alpha\nbeta:2:3 # two\n").unwrap_err();
        assert!(said.starts_with(r#"line 2 ("beta:2:3 # two"): "beta:2:3" has two colons"#), "{said}");
        let said = from_file("alpha\n:4\n").unwrap_err();
        assert!(said.starts_with(r#"line 2 (":4"): ":4" has no name before the colon"#), "{said}");
    }

    #[test]
    fn hostfiles_are_those_of_mpirun() {
        let text = "# two hosts\nalpha slots=4 max_slots=8\n\n  beta:2 # half\nn[1-2] slots=1\ngamma\n";
        assert_eq!(written(&from_file(text).unwrap()), "alpha=4 beta=2 n1=1 n2=1 gamma=0");
        assert_eq!(
            from_file("a\nb cpus=3").unwrap_err(),
            r#"line 2 ("b cpus=3"): "cpus=3" is unknown; slots=N is the number of ranks"#
        );
        assert!(from_file("# none\n").is_err());
    }
}
