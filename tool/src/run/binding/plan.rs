//! Chooses the CPUs, the memory and the GPU of each rank of this host.

use clap::ValueEnum;

use super::topology::Topology;
use crate::number_set::NumberSet;
use crate::words::count;

/// How the ranks of a host are bound.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Bind {
    /// Whole cores for each rank alone, near its GPU, and memory of their NUMA node
    Core,
    /// All CPUs and the memory of one NUMA node, that of its GPU
    Numa,
    /// The CPUs and the memory policy that the tool itself has
    #[value(name = "none")]
    Nothing,
}

/// The CPUs and the memory that one rank gets.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    pub cpus: NumberSet,
    /// The number of cores to which these CPUs belong.
    pub cores: usize,
    /// The NUMA node from which the rank's memory comes as long as it has free memory.
    pub memory: Option<u32>,
}

/// The share of each of `ranks` ranks, by local rank. Fails where there are too few cores.
///
/// Ranks with a GPU go to the NUMA node of their GPU, where the process may use CPUs of that node.
/// The others go to the nodes in rank order, to each node in proportion to its cores.
pub fn plan(topology: &Topology, bind: Bind, ranks: usize) -> Result<Vec<Share>, String> {
    let cores = topology.cores.len();
    if bind == Bind::Core && ranks > cores {
        return Err(format!(
            "--bind core gives each rank cores of its own, and there are {ranks} ranks and {} that this process may use: start fewer ranks, or say --bind numa or --bind none",
            count(cores, "core")
        ));
    }
    let nodes = topology.nodes();
    let homes = homes(topology, ranks);
    let mut shares = Vec::with_capacity(ranks);
    for (local_rank, home) in homes.iter().enumerate() {
        let (node, cores) = nodes[*home];
        let here = homes.iter().filter(|other| *other == home).count();
        let before = homes[..local_rank].iter().filter(|other| *other == home).count();
        let own = match bind {
            Bind::Core if here > cores.len() => {
                let node = node.map_or(String::new(), |node| format!(" of NUMA node {node}"));
                return Err(format!(
                    "--bind core: {here} ranks have their GPUs next to the {} cores{node} that this process may use: start fewer ranks, or say --bind numa or --bind none",
                    cores.len()
                ));
            }
            Bind::Core => &cores[before * cores.len() / here..(before + 1) * cores.len() / here],
            Bind::Numa | Bind::Nothing => cores,
        };
        let cpus = own.iter().flat_map(|core| core.cpus.iter()).collect();
        let memory = node.filter(|node| topology.memory.contains(*node));
        shares.push(Share { cpus, cores: own.len(), memory });
    }
    Ok(shares)
}

/// The GPU that a rank takes by the usual rule: the GPU's number is the local rank.
pub fn gpu(topology: &Topology, local_rank: usize) -> Option<usize> {
    (!topology.gpus.is_empty()).then(|| local_rank % topology.gpus.len())
}

/// The index in [`Topology::nodes`] of each rank's NUMA node.
fn homes(topology: &Topology, ranks: usize) -> Vec<usize> {
    let nodes = topology.nodes();
    let of_core: Vec<usize> =
        nodes.iter().enumerate().flat_map(|(at, (_, cores))| std::iter::repeat_n(at, cores.len())).collect();
    let home = |local_rank: usize| {
        let of_gpu = gpu(topology, local_rank).and_then(|gpu| topology.gpus[gpu]);
        let at = of_gpu.and_then(|wanted| nodes.iter().position(|(node, _)| *node == Some(wanted)));
        at.unwrap_or_else(|| of_core[local_rank * of_core.len() / ranks])
    };
    (0..ranks).map(home).collect()
}

/// The binding where the user names none, and the reason for it.
///
/// It is `numa` only where that takes no CPU time from any rank: each rank's part of the CPUs is
/// then as large as without a binding, but its memory is near. Otherwise a binding could leave
/// cores idle while threads of a rank (data loaders, say) wait for one.
pub fn usual(topology: &Topology, ranks: usize) -> (Bind, String) {
    let (nodes, cores) = (topology.nodes(), topology.cores.len());
    if ranks > cores {
        return (Bind::Nothing, format!("{ranks} ranks share {}", count(cores, "core")));
    }
    if nodes.len() < 2 {
        return (Bind::Nothing, "the CPUs are all in one NUMA node".to_owned());
    }
    let homes = homes(topology, ranks);
    let is_even = nodes.iter().enumerate().all(|(at, (_, own))| {
        let here = homes.iter().filter(|home| **home == at).count();
        here * cores == own.len() * ranks
    });
    match is_even {
        true => (Bind::Numa, format!("the ranks divide evenly among the {} NUMA nodes", nodes.len())),
        false => (Bind::Nothing, format!("the ranks do not divide evenly among the {} NUMA nodes", nodes.len())),
    }
}
