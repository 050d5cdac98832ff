//! Plans the commands that reach the hosts of a job, and the place where its nodes meet.

use std::ffi::OsString;
use std::net::IpAddr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::host_name;

use super::list::Host;
use crate::failure::Failure;
use crate::run::identity::shell_word;
use crate::run::options::Options;
use crate::run::rendezvous::{is_loopback, resolves_here};

/// How long the names of the hosts are looked up, to find this host among them.
const LOOK_UP: Duration = Duration::from_secs(2);

/// A host with what starts an agent on it.
pub struct Planned {
    pub host: Host,
    /// Whether the starter is on this host, so that no other program reaches it.
    pub is_local: bool,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// The job that `--hosts` starts.
pub struct Plan {
    pub hosts: Vec<Planned>,
    /// The host of the store.
    pub meeting: String,
    /// The port of the store. It is `None` where the first host chooses it.
    pub port: Option<u16>,
}

impl Plan {
    pub fn new(options: &Options, hosts: Vec<Host>) -> Result<Plan, Failure> {
        let tool = std::env::current_exe();
        let tool = tool.map_err(|error| Failure::new(1, format!("cannot find the path of devicemesh: {error}")))?;
        let rsh = options.hosts.rsh()?;
        let line = match &options.hosts.remote_tool {
            Some(path) => format!("exec {} agent", shell_word(&path.to_string_lossy())),
            None => {
                let script = r#"if [ -x "$0" ]; then exec "$0" agent; else exec devicemesh agent; fi"#;
                format!("exec sh -c {} {}", shell_word(script), shell_word(&tool.to_string_lossy()))
            }
        };
        let local = local(&hosts);
        let plan = |(host, is_local): (Host, bool)| {
            let command = match is_local {
                true => vec![tool.clone().into_os_string(), "agent".into()],
                false => rsh.iter().chain([&host.target, &line]).map(OsString::from).collect(),
            };
            Planned { host, is_local, command }
        };
        let hosts: Vec<Planned> = hosts.into_iter().zip(local).map(plan).collect();
        let service = options.meeting.service()?;
        let (meeting, port) = match service.or(options.meeting.rdzv_endpoint.clone()) {
            Some((host, port)) => (host, Some(port)),
            None => (meeting_host(&hosts), None),
        };
        Ok(Plan { hosts, meeting, port })
    }
}

/// The host of the store: the first one, by a name that the others know.
fn meeting_host(hosts: &[Planned]) -> String {
    let name = hosts[0].host.name();
    if is_loopback(name) && !hosts.iter().all(|planned| planned.is_local) { host_name() } else { name.to_owned() }
}

/// Whether a name may be that of a host which calls itself `own`: both have the same first part,
/// and they do not have two domains.
fn may_be(name: &str, own: &str) -> bool {
    let has_domain = |name: &str| name.contains('.');
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    match has_domain(name) && has_domain(own) {
        true => name.eq_ignore_ascii_case(own),
        false => short(name) == short(own),
    }
}

/// Returns which of the hosts is the one on which this process runs. A host with the login of
/// another user does not count.
fn local(hosts: &[Host]) -> Vec<bool> {
    let (sender, receiver) = channel();
    let own = host_name();
    let mut found = vec![false; hosts.len()];
    for (index, host) in hosts.iter().enumerate() {
        let (name, sender) = (host.name().to_owned(), sender.clone());
        let is_plain = host.target == name;
        if !is_plain || name == "localhost" || name.eq_ignore_ascii_case(&own) {
            found[index] = is_plain;
            continue;
        }
        // The resolver decides. Where it has no answer, a name that may be this host's is this
        // host.
        found[index] = name.parse::<IpAddr>().is_err() && may_be(&name, &own);
        // The resolver knows no deadline.
        let work = move || {
            let _ = resolves_here(&name).map(|is_local| sender.send((index, is_local)));
        };
        let _ = std::thread::Builder::new().name("dm-resolve".to_owned()).spawn(work);
    }
    drop(sender);
    let until = Instant::now() + LOOK_UP;
    while let Ok((index, is_local)) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
        found[index] = is_local;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_two_domains_are_two_hosts() {
        for (one, other) in [("node1", "node1.east.example"), ("NODE1.East.example", "node1.east.example")] {
            assert!(may_be(one, other) && may_be(other, one), "{one} {other}");
        }
        for other in ["node1.west.example", "node2.east.example", "node2"] {
            assert!(!may_be("node1.east.example", other), "{other}");
        }
    }

    /// No name below .invalid has an address.
    #[test]
    fn a_name_that_the_resolver_does_not_know_is_this_hosts_where_it_begins_with_this_hosts_name() {
        let own = host_name();
        let named = |name: &str| Host { target: name.to_owned(), ranks: None };
        let short = own.split('.').next().unwrap();
        let hosts = [named(&own), named(&format!("{short}.domain.invalid")), named("another.domain.invalid")];
        assert_eq!(local(&hosts), [true, !own.contains('.'), false]);
    }
}
