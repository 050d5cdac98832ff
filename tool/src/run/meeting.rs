//! The options that say which nodes belong to a job and where they meet.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use super::environment::{STORE, is_in_rank, variable};
use super::hosts::{Hosts, Share};
use super::identity::Identity;
use super::launcher::Launcher;
use super::rendezvous::{Origin, Rendezvous};
use super::restart::Standing;
use crate::duration::duration;
use crate::endpoint::endpoint;
use crate::failure::Failure;

#[derive(Args)]
pub struct Meeting {
    /// Number of nodes: hosts that run this same command [default: those of the Slurm step, else 1]
    #[arg(long, value_name = "N", value_parser = nodes, allow_negative_numbers = true)]
    pub nnodes: Option<u32>,
    /// This node's number, from 0. Without it, Slurm or Kubernetes gives the numbers, else the
    /// order in which the nodes arrive. Node 0 has the first ranks
    #[arg(long, alias = "node_rank", value_name = "NODE", allow_negative_numbers = true)]
    pub node_rank: Option<u32>,
    /// Where the ranks meet, the same on all nodes: a host of the job (node 0's, where nodes are
    /// numbered), and a port that is free there [port: 29400]
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", value_parser = endpoint)]
    pub rdzv_endpoint: Option<(String, u16)>,
    /// The `devicemesh store` in which the ranks meet, the same on all nodes. Without it a node of
    /// the job serves the store, and the job ends with that node [default: DM_STORE] [port: 29400]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = service, conflicts_with = "rdzv_endpoint")]
    pub store: Option<(String, u16)>,
    /// A name for the job, the same on all nodes. A node with another name is refused. Without a
    /// name the nodes compare their commands
    #[arg(long, alias = "rdzv_id", value_name = "NAME")]
    pub rdzv_id: Option<String>,
    /// How long to wait until all nodes have arrived
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration, allow_negative_numbers = true)]
    pub rdzv_timeout: Duration,
}

fn nodes(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(nodes) if (1..=65536).contains(&nodes) => Ok(nodes),
        _ if text.contains(':') => Err("the number of nodes is fixed here: one number, as 2".to_owned()),
        _ => Err("1 to 65536".to_owned()),
    }
}

/// Reads the address of a service. `devicemesh store` says its own as tcp://HOST:PORT.
fn service(text: &str) -> Result<(String, u16), String> {
    endpoint(text.strip_prefix("tcp://").unwrap_or(text))
}

impl Meeting {
    /// The service that has the store. `None` where a node serves it.
    pub fn service(&self) -> Result<Option<(String, u16)>, Failure> {
        if self.store.is_some() || self.rdzv_endpoint.is_some() || is_in_rank(&variable) {
            return Ok(self.store.clone());
        }
        let Some(text) = variable(STORE) else { return Ok(None) };
        let wrong = |error: String| Failure::new(2, format!("environment variable {STORE} is {text:?}: {error}"));
        service(&text).map(Some).map_err(wrong)
    }

    /// Where this node meets the others. Options that are left out come from the launcher. A node
    /// that `--hosts` has started takes everything from its share.
    pub fn rendezvous(&self, ranks: u32, command: &[OsString], hosts: &Hosts) -> Result<Rendezvous, Failure> {
        if let Some(Share { node, hosts: names, host, port, id, .. }) = hosts.agent.clone() {
            let option = if hosts.hosts.is_some() { "--hosts" } else { "--hostfile" };
            let origin = match (self.service()?, &self.rdzv_endpoint) {
                (Some(_), _) => Origin::Service,
                (None, Some(_)) => Origin::Endpoint,
                (None, None) => Origin::Hosts(option),
            };
            return Ok(Rendezvous {
                host,
                origin,
                port,
                nodes: names.len() as u32,
                node: Some(node),
                ranks,
                id: Some(id),
                timeout: self.rdzv_timeout,
                identity: Identity::of_this_job(command, None),
                hosts: names,
                all_report: false,
                name_comes_late: false,
                restart: Standing::default(),
                heals: false,
                run: None,
            });
        }
        let wrong = |message: String| Failure::new(2, message);
        let service = self.service()?;
        let launcher = Launcher::from_environment();
        let scheduler = launcher.as_ref().and_then(Launcher::job_name);
        let identity = Identity::of_this_job(command, scheduler);
        let place = match (&launcher, self.nnodes, &self.rdzv_endpoint) {
            (Some(launcher), nodes @ (None | Some(2..)), None) => launcher.place(nodes).map_err(wrong)?,
            _ => None,
        };
        let nodes = self.nnodes.or(place.as_ref().map(|place| place.nodes)).unwrap_or(1);
        if let Some(node) = self.node_rank.filter(|node| *node >= nodes) {
            let most = nodes - 1;
            return Err(wrong(format!("--node-rank {node} with --nnodes {nodes}: the nodes are 0 to {most}")));
        }
        let is_service = service.is_some();
        if let Some(place) = place {
            let (host, port) = service.unwrap_or((place.host, place.port));
            return Ok(Rendezvous {
                host,
                origin: if is_service { Origin::Service } else { Origin::Launcher },
                port,
                nodes,
                node: self.node_rank.or(Some(place.node)),
                ranks,
                id: self.rdzv_id.clone().or(Some(place.id)),
                timeout: self.rdzv_timeout,
                identity,
                hosts: place.hosts,
                all_report: place.all_report,
                name_comes_late: place.name_comes_late,
                restart: Standing::default(),
                heals: false,
                run: None,
            });
        }
        if nodes > 1 && self.rdzv_endpoint.is_none() && !is_service {
            return Err(wrong(format!(
                "--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, the same on all nodes: a host of the job that the others reach, and a port that is free there; or --store HOST:PORT, where a `devicemesh store` runs"
            )));
        }
        let (host, port) = service.or(self.rdzv_endpoint.clone()).unwrap_or_else(|| ("127.0.0.1".to_owned(), 0));
        Ok(Rendezvous {
            host,
            origin: if is_service { Origin::Service } else { Origin::Endpoint },
            port,
            nodes,
            node: if nodes == 1 { Some(0) } else { self.node_rank },
            ranks,
            id: self.rdzv_id.clone(),
            timeout: self.rdzv_timeout,
            identity,
            hosts: Vec::new(),
            all_report: true,
            name_comes_late: matches!(launcher, Some(Launcher::Kubernetes { .. })),
            restart: Standing::default(),
            heals: false,
            run: None,
        })
    }
}
