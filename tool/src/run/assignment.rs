//! The ranks of a job that this node starts.

use std::time::SystemTime;

use devicemesh::logging::utc;

use super::rendezvous::Rendezvous;

/// This node's share of the job, and what its ranks are told about the whole of it.
pub struct Assignment {
    /// This node's number, from 0.
    pub node: u32,
    /// The number of nodes in the job.
    pub nodes: u32,
    /// The rank in the world of this node's first rank. The others follow it.
    pub first_rank: u32,
    /// The number of ranks on this node.
    pub ranks: u32,
    /// The number of ranks in the job.
    pub world_size: u32,
    /// The host of the store in which the ranks meet.
    pub host: String,
    /// The port of that store.
    pub port: u16,
    /// The job's name, which the ranks get as TORCHELASTIC_RUN_ID.
    pub id: String,
    /// The name of this run of the job in `--log-dir`, the same on all nodes.
    pub run: String,
    /// This host's name, as the other nodes know it. `None` where this is the only node.
    pub host_name: Option<String>,
}

impl Assignment {
    /// All ranks of a job of one node, whose store has that port.
    pub fn whole_job(rendezvous: Rendezvous, port: u16) -> Assignment {
        let Rendezvous { host, ranks, id, .. } = rendezvous;
        let id = id.unwrap_or_else(|| format!("devicemesh-{}", std::process::id()));
        let run = run_name(SystemTime::now(), std::process::id());
        Assignment { node: 0, nodes: 1, first_rank: 0, ranks, world_size: ranks, host, port, id, run, host_name: None }
    }
}

/// The name of a run: the second in UTC in which it began, and the process number of the tool that
/// arrived first, because several runs may begin in one second.
pub fn run_name(began: SystemTime, pid: u32) -> String {
    let time = utc(began);
    let digits: String = time.split('.').next().unwrap_or_default().replace([':', '-'], "");
    format!("{digits}Z-{pid}")
}
