//! `devicemesh info`: reports what the library finds on this machine and in this environment.

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use devicemesh::ccl::{self, Library};
use devicemesh::printable::printable;
use devicemesh::rendezvous::launcher::{self, Place, STARTED_BY_RUN};
use devicemesh::rendezvous::store::frame::SERVER_KEY;
use devicemesh::rendezvous::store::{Secret, Store, TcpStore};
use devicemesh::wait::Wait;
use rustix::fs::{Access, access};
use serde::Serialize;

use crate::endpoint::endpoint;
use crate::failure::Failure;
use crate::labelled::Labelled;
use crate::library::for_cuda;
use crate::stdio::print;
use crate::style::{Style, When};
use crate::terminal;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Exit codes:
  0  printed, whatever is missing
  2  wrong command line
  1  the output cannot be written";

/// How long the store may take to answer.
const SHORT: Duration = Duration::from_secs(2);
/// The variables that the library itself reads, beside those of the launchers.
const OWN: [&str; 23] = [
    "DM_CCL_LIBRARY",
    "DM_STORE_SECRET",
    "DM_LOG",
    "DM_RECORDER",
    "DM_TRACE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "DM_CHECK_COLLECTIVES",
    "DM_CHECK_POINTERS",
    "DM_WIRE",
    "DM_UCX_LIBRARY",
    "DM_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "DM_SOCKET_CONGESTION",
    "DM_HOST_TIMEOUT_MS",
    "DM_HOSTCCL_SHM",
    "DM_HOSTCCL_HOST",
    STARTED_BY_RUN,
    "DM_MESH_SIZE",
    "DM_STORE_RELAY",
    "DM_STORE_RELAY_FROM",
    "DM_JOIN",
    "DM_STORE",
    "DM_RSH_AGENT",
];

/// The options of `devicemesh info`. The comments of the fields are their help.
#[derive(Args)]
pub(crate) struct Options {
    /// A communicator library to look at, by path or SONAME, as dm_world_options.ccl_library
    #[arg(long, value_name = "LIBRARY")]
    library: Option<String>,
    /// A store to reach, instead of the one that the launcher names: tcp://host:port or
    /// file:///path
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// One line of JSON
    #[arg(long)]
    json: bool,
    /// Colours; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: When,
}

/// The answer to one question about this machine.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    /// The thing is there. The text describes it.
    Found(String),
    /// The thing is not there. The text says why.
    Missing(String),
    /// The thing is not there, and nothing needs it. The text says why.
    Unneeded(String),
}

/// The fields of the JSON output.
#[derive(Serialize)]
struct Report {
    /// The version of the tool.
    devicemesh: &'static str,
    /// The communicator library for host memory.
    cpu: Answer,
    /// The communicator library for GPUs.
    cuda: Answer,
    /// The GPUs that the driver sees.
    devices: Answer,
    /// The launcher that started this process, and the rank that it gave.
    launcher: Answer,
    /// This process's rank. This and the world size are `None` where the launcher's variables do
    /// not fit together.
    rank: Option<usize>,
    world_size: Option<usize>,
    /// The rank in the host; also `None` where the launcher does not say it. The ranks then find it
    /// out when they join the world.
    local_rank: Option<usize>,
    /// The variables that were read and are set, with their values. A secret has no value here.
    variables: Vec<(String, String)>,
    /// The store in which the ranks meet.
    store: Answer,
    /// How ranks of device type cpu reach ranks on other hosts.
    wire: Answer,
}

/// Prints the report. A thing that is missing is not a failure.
pub(crate) fn info(options: &Options) -> Result<u8, Failure> {
    let looked_up = RefCell::new(Vec::new());
    let get = |name: &str| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut known = looked_up.borrow_mut();
        if let Some(value) = value.as_ref().filter(|_| !known.iter().any(|(other, _)| other == name)) {
            known.push((name.to_owned(), shown(name, value)));
        }
        value
    };
    let place = launcher::detect(&get);
    OWN.iter().for_each(|name| drop(get(name)));
    let place_ok = place.as_ref().ok();
    let (store, from) = store(options, place_ok);
    let report = Report {
        devicemesh: env!("CARGO_PKG_VERSION"),
        cpu: library(ccl::for_device("cpu").map(|library| describe(&library))),
        cuda: library(for_cuda(options.library.as_deref()).map(|library| describe(&library))),
        devices: match ccl::devices() {
            Ok((count, release)) => Answer::Found(format!("{count}, driver for CUDA {release}")),
            Err(error) => Answer::Missing(error.message().to_owned()),
        },
        rank: place_ok.map(|place| place.rank),
        world_size: place_ok.map(|place| place.size),
        local_rank: place_ok.and_then(|place| place.local_rank),
        store,
        wire: library(ccl::describe_wire(from)),
        launcher: match &place {
            Ok(Place { launcher, rank, size, local_rank, address, .. }) => {
                let address =
                    address.as_ref().map_or(String::new(), |(host, port)| format!(", meeting at {host}:{port}"));
                let local_rank = local_rank.map_or(String::new(), |local| format!(", local rank {local}"));
                Answer::Found(format!("{launcher}: rank {rank} of {size}{local_rank}{address}"))
            }
            Err(error) => Answer::Missing(error.message().to_owned()),
        },
        variables: looked_up.borrow().clone(),
    };
    let text = match options.json {
        true => serde_json::to_string(&report)
            .map(|text| text + "\n")
            .map_err(|error| Failure::new(1, error.to_string()))?,
        false => report.text(terminal::width(), Style::new(options.color, &io::stdout())),
    };
    print(text)?;
    Ok(0)
}

impl Report {
    /// The lines of the report. A line that is wider than `width` goes on below its beginning.
    fn text(&self, width: Option<usize>, style: Style) -> String {
        let mut lines = Labelled::new(style, width);
        lines.line("devicemesh", self.devicemesh);
        let mut line = |label: &str, found: &Answer, missing: &str| {
            let said = match found {
                Answer::Found(said) => printable(said).into_owned(),
                Answer::Unneeded(said) => format!("none: {}", printable(said)),
                Answer::Missing(said) => style.wrong(&format!("{missing}{}", printable(said))),
            };
            lines.line(label, &said);
        };
        line("cpu", &self.cpu, "none: ");
        line("cuda", &self.cuda, "none: ");
        line("devices", &self.devices, "none: ");
        line("launcher", &self.launcher, "");
        let variables: Vec<String> = self.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let variables = if variables.is_empty() { "none".to_owned() } else { variables.join(" ") };
        line("variables", &Answer::Found(variables), "");
        line("store", &self.store, "not reached: ");
        line("wire", &self.wire, "none: ");
        lines.into_text()
    }
}

/// The value of a variable as it may be shown. A secret is not shown.
fn shown(name: &str, value: &str) -> String {
    let secret = ["SECRET", "TOKEN", "PASSWORD", "CREDENTIAL"].iter().any(|part| name.contains(part));
    match secret {
        true => "(set, not shown)".to_owned(),
        false => value.to_owned(),
    }
}

/// Tries to reach the store that the command line names, else the one that the launcher names.
/// Returns also the address of this host from which the store was reached.
fn store(options: &Options, place: Option<&Place>) -> (Answer, Option<IpAddr>) {
    // A job with such a secret is refused.
    if let Err(error) = Secret::from_environment() {
        return (Answer::Missing(error.message().to_owned()), None);
    }
    if let Some(url) = &options.store {
        return match (url.strip_prefix("file://"), url.strip_prefix("tcp://")) {
            (Some(path), _) => (folder(url, path), None),
            (None, address) => match endpoint(address.unwrap_or(url)) {
                Ok((host, port)) => server(&host, port, ""),
                Err(why) => (Answer::Missing(format!("{url}: {why}")), None),
            },
        };
    }
    match place {
        None => (Answer::Unneeded("the launcher's variables do not fit together".to_owned()), None),
        Some(place) => match &place.address {
            Some((host, port)) if place.agent || place.rank > 0 => server(host, *port, ""),
            Some((host, port)) => server(host, *port, "; rank 0, which this is, will serve it when it joins"),
            None if place.size == 1 => (Answer::Unneeded("one rank alone needs none".to_owned()), None),
            None => (Answer::Missing(format!("nobody says where: {}", place.advice)), None),
        },
    }
}

/// Connects to a server and finds out whose it is, and from which address it was reached.
fn server(host: &str, port: u16, hint: &str) -> (Answer, Option<IpAddr>) {
    let (began, wait) = (Instant::now(), Wait::after(SHORT));
    let reached =
        Secret::from_environment().and_then(|secret| TcpStore::connect_with_secret(host, port, secret, &wait));
    let asked = reached.and_then(|store| {
        let key = String::from_utf8_lossy(SERVER_KEY).trim_start_matches('/').to_owned();
        let ours = store.present(&[key], &wait)?.first() == Some(&true);
        Ok((store.name().to_owned(), ours, store.local_address()))
    });
    match asked {
        Ok((name, ours, from)) => {
            let who = if ours { "libdevicemesh" } else { "PyTorch, or another TCPStore" };
            let found = format!("{name}, served by {who}, reached in {} ms", began.elapsed().as_millis());
            (Answer::Found(found), from)
        }
        Err(error) => (Answer::Missing(format!("{}{hint}", error.message())), None),
    }
}

/// Checks a store that is a folder. The part of the path that exists must be writable. Nothing is
/// made.
fn folder(url: &str, path: &str) -> Answer {
    if !path.starts_with('/') {
        return Answer::Missing(format!("{url}: the path is not absolute; it is file:///path"));
    }
    let direct = Path::new(path).parent().unwrap_or(Path::new("/"));
    let parent = direct.ancestors().find(|parent| parent.exists()).unwrap_or(Path::new("/"));
    match access(parent, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) if parent != direct => Answer::Missing(format!(
            "{url}: {} is not there yet; the ranks can make it in {}",
            direct.display(),
            parent.display()
        )),
        Ok(()) => Answer::Found(format!("{url}, in {}, which can be written", parent.display())),
        Err(error) => {
            let error = io::Error::from(error);
            Answer::Missing(format!("{url}: cannot write in {}: {error}", parent.display()))
        }
    }
}

fn describe(library: &Library) -> String {
    let version = library.version();
    format!("{}, NCCL {}.{}.{}", library.name(), version / 10_000, version / 100 % 100, version % 100)
}

fn library(found: devicemesh::error::Result<String>) -> Answer {
    found.map_or_else(|error| Answer::Missing(error.message().to_owned()), Answer::Found)
}
