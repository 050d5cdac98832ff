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
use crate::run::rendezvous::{is_here, is_loopback};

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

/// Returns which of the hosts is the one on which this process runs. A host with the login of
/// another user does not count.
fn local(hosts: &[Host]) -> Vec<bool> {
    let (sender, receiver) = channel();
    let mut found = vec![false; hosts.len()];
    for (index, host) in hosts.iter().enumerate() {
        let (name, sender) = (host.name().to_owned(), sender.clone());
        let is_plain = host.target == name;
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        if !is_plain || name == "localhost" || (name.parse::<IpAddr>().is_err() && short(&name) == short(&host_name()))
        {
            found[index] = is_plain;
            continue;
        }
        // The resolver knows no deadline. Where no thread starts, the host counts as another one.
        let work = move || {
            let _ = sender.send((index, is_here(&name)));
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
