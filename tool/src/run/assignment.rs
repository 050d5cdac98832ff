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
    /// The rank in the world of this node's first rank. The others follow it, except for the
    /// spares.
    pub first_rank: u32,
    /// The rank in the world of this node's first spare. The spares of all nodes come after all
    /// other ranks of the world.
    pub first_spare: u32,
    /// The number of ranks on this node, with its spares.
    pub ranks: u32,
    /// The number of spares on this node. They have its last local ranks.
    pub spares: u32,
    /// The number of ranks in the job.
    pub world_size: u32,
    /// The number of ranks in the job without the spares.
    pub mesh_size: u32,
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
    /// How often the whole job was started again.
    pub restarts: u32,
    /// How many nodes had this node's place before it, if it came to a job that runs already.
    pub rejoins: u32,
    /// The value of `--max-restarts`.
    pub max_restarts: u32,
    /// The number of the job in the store of a service (`--store`), which has one job after the
    /// other. `None` where a node serves the store.
    pub job: Option<u64>,
    /// How the ranks find the relay of this node ([`relaying`](super::relaying)). `None` where the
    /// node has none.
    pub relay: Option<String>,
}

impl Assignment {
    /// All ranks of a job of one node, whose store has that port.
    pub fn whole_job(rendezvous: &Rendezvous, port: u16) -> Assignment {
        let Rendezvous { host, ranks, id, restart, run, .. } = rendezvous.clone();
        let mesh_size = ranks - restart.spares;
        Assignment {
            node: 0,
            nodes: 1,
            first_rank: 0,
            first_spare: mesh_size,
            ranks,
            spares: restart.spares,
            world_size: ranks,
            mesh_size,
            host,
            port,
            id: id.unwrap_or_else(|| format!("devicemesh-{}", std::process::id())),
            run: run.map_or_else(|| run_name(SystemTime::now(), std::process::id()), |run| run.folder),
            host_name: None,
            restarts: restart.restarts,
            rejoins: 0,
            max_restarts: restart.most,
            job: None,
            relay: None,
        }
    }

    /// The rank in the world of a local rank.
    pub fn rank(&self, local_rank: u32) -> u32 {
        match local_rank.checked_sub(self.ranks - self.spares) {
            Some(spare) => self.first_spare + spare,
            None => self.first_rank + local_rank,
        }
    }

    /// The local rank of a rank of this node.
    pub fn local_rank(&self, rank: u32) -> u32 {
        match rank.checked_sub(self.mesh_size) {
            Some(_) => self.ranks - self.spares + (rank - self.first_spare),
            None => rank - self.first_rank,
        }
    }
}

/// The name of a run: the second in UTC in which it began, and the process number of the tool that
/// arrived first, because several runs may begin in one second.
pub fn run_name(began: SystemTime, pid: u32) -> String {
    let time = utc(began);
    let digits: String = time.split('.').next().unwrap_or_default().replace([':', '-'], "");
    format!("{digits}Z-{pid}")
}
