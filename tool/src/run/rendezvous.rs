//! The place where the nodes of a job meet, and the values that this node gives there.

use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::identity::Identity;
use super::restart::Standing;

/// Who chose the host of the store. Messages need it to say what the user can change.
#[derive(Clone, Copy)]
pub enum Origin {
    /// The user, by `--rdzv-endpoint`, or nobody in a job of one node.
    Endpoint,
    /// The starter: it is the first host of this option, `--hosts` or `--hostfile`.
    Hosts(&'static str),
    /// Slurm or Kubernetes.
    Launcher,
    /// The user, by `--store` or DM_STORE: a `devicemesh store` serves the store.
    Service,
}

/// The meeting of the nodes, as the command line or the launcher describes it.
#[derive(Clone)]
pub struct Rendezvous {
    /// The host of the store in which the nodes meet.
    pub host: String,
    /// Who chose that host.
    pub origin: Origin,
    /// The port of that store. 0 where there is one node alone, which takes any free port.
    pub port: u16,
    /// The number of nodes in the job.
    pub nodes: u32,
    /// This node's number, from `--node-rank` or the launcher. `None` leaves it to the order of
    /// arrival.
    pub node: Option<u32>,
    /// The number of ranks on this node, with its spares.
    pub ranks: u32,
    /// The job's name from `--rdzv-id` or the launcher, which is the same on all nodes.
    pub id: Option<String>,
    /// How long a node waits for the others.
    pub timeout: Duration,
    /// The user and the command of the job.
    pub identity: Identity,
    /// The name of each node's host by the node's number, where the launcher knows them. The list
    /// is empty where the launcher does not know them.
    pub hosts: Vec<String>,
    /// Whether every node says for which nodes it waits. Where one terminal shows all nodes, only
    /// the node that serves the store does.
    pub all_report: bool,
    /// Whether the endpoint's name may be unknown until `timeout`, because the name server learns
    /// it when the host starts.
    pub name_comes_late: bool,
    /// This node's spares, its options on restarts, and how often it has seen the job start again.
    pub restart: Standing,
    /// Whether the job goes on when a node is lost, and a node that joins takes the place of the
    /// lost one. It is so with `--restart rank`.
    pub heals: bool,
    /// The names of this run of the job, where the job starts again. `None` at the first start.
    pub run: Option<Run>,
}

/// The names that a run of a job keeps when the job starts again.
#[derive(Clone)]
pub struct Run {
    /// The name of its folder in `--log-dir`.
    pub folder: String,
    /// The job's name for the ranks (TORCHELASTIC_RUN_ID), which may be made from the first node.
    pub id: String,
}

impl Rendezvous {
    /// Advises the user what to do if the store's host has no address on this host.
    pub fn advice_on_name(&self) -> String {
        match self.origin {
            Origin::Endpoint => "check --rdzv-endpoint, or name the host's address".to_owned(),
            Origin::Hosts(option) => format!(
                "by this name the nodes meet on the first host of {option}; write a name that all hosts know, or give an address of that host with --rdzv-endpoint"
            ),
            Origin::Launcher => "give an address of that host with --rdzv-endpoint".to_owned(),
            Origin::Service => "check --store (or DM_STORE), or name the host's address".to_owned(),
        }
    }

    /// Advises the user what to do for another job than the one that the store has.
    pub fn advice_on_another_job(&self) -> &'static str {
        match self.has_service() {
            true => "for another job at the same time start another `devicemesh store`",
            false => "for another job choose another port with --rdzv-endpoint",
        }
    }

    /// Whether a `devicemesh store` serves the store, so that no node of the job does.
    pub fn has_service(&self) -> bool {
        matches!(self.origin, Origin::Service)
    }

    /// Whether this node meets nobody, because the job has one node and no endpoint.
    pub fn is_private(&self) -> bool {
        self.port == 0
    }

    /// The store's address for messages.
    pub fn store(&self) -> String {
        match self.host.contains(':') {
            true => format!("tcp://[{}]:{}", self.host, self.port),
            false => format!("tcp://{}:{}", self.host, self.port),
        }
    }
}

/// Whether a name or an address is this host's. The function asks the resolver, so it may take
/// long: the resolver knows no deadline.
pub fn is_here(host: &str) -> bool {
    resolves_here(host).unwrap_or(false)
}

/// Does what [`is_here`] does. Returns `None` for a name that the resolver does not know.
pub fn resolves_here(host: &str) -> Option<bool> {
    let mut addresses = (host, 0).to_socket_addrs().ok()?.peekable();
    addresses.peek()?;
    Some(addresses.any(|address| !address.ip().is_unspecified() && TcpListener::bind(address).is_ok()))
}

/// Whether this is localhost or a loopback address, by which each host reaches only itself.
pub fn is_loopback(host: &str) -> bool {
    host.split('.').next() == Some("localhost") || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns a text that identifies the network of this process: the kernel's boot id and the network
/// namespace. Two processes with the same text reach each other at 127.0.0.1. Empty where /proc
/// does not show these.
pub fn network() -> String {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let space = std::fs::read_link("/proc/self/ns/net");
    match (machine, space) {
        (Ok(machine), Ok(space)) => format!("{} {}", machine.trim(), space.display()),
        _ => String::new(),
    }
}
