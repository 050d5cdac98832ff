//! Binding: which CPUs a rank may run on, and which NUMA node its memory comes from.
//!
//! The thread that starts a rank binds itself for that moment ([`Binding::enter`]). The rank
//! inherits the binding, and so do the processes that the rank starts. A binding has only CPUs
//! that this process may use.

mod memory_policy;
mod plan;
#[cfg(test)]
mod tests;
mod topology;

use std::io;
use std::path::Path;

use clap::Args;
use devicemesh::ccl;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use self::plan::{Bind, Share, gpu, plan, usual};
use self::topology::Topology;
use crate::failure::Failure;
use crate::number_set::NumberSet;

/// The options about binding. The comments of the fields are their help.
#[derive(Args)]
pub struct BindingOptions {
    /// The CPUs and the memory that each rank gets. Left out: numa where the ranks of this host
    /// divide evenly among several NUMA nodes, else none
    #[arg(long, alias = "bind-to", value_name = "WHERE")]
    bind: Option<Bind>,
}

/// The binding of this host's ranks.
pub struct Binding {
    bind: Bind,
    /// The reason for this binding, where the user has not named it.
    why: Option<String>,
    topology: Topology,
    /// The PCI addresses of the GPUs by their number, where the driver was asked and tells them.
    gpus: Vec<Option<String>>,
    /// The share of each rank, by local rank. The list is empty where the ranks are not bound.
    shares: Vec<Share>,
    /// Whether the ranks' memory policy is set.
    sets_memory: bool,
}

impl Binding {
    /// Chooses the binding of that many ranks, before anything is started.
    pub fn choose(options: &BindingOptions, ranks: u32) -> Result<Binding, Failure> {
        let ranks = ranks as usize;
        let mut topology = Topology::read(Path::new("/")).unwrap_or_default();
        // The driver takes a while, so without --bind it is asked only where GPUs can make a
        // difference.
        let asks = match options.bind {
            Some(bind) => bind != Bind::Nothing,
            None => topology.nodes().len() > 1,
        };
        let gpus = if asks { ccl::device_addresses().unwrap_or_default() } else { Vec::new() };
        topology.find_gpus(Path::new("/"), &gpus);
        let (bind, why) = match options.bind {
            Some(bind) => (bind, None),
            None => match can_bind(&topology) {
                Ok(()) => {
                    let (bind, why) = usual(&topology, ranks);
                    (bind, Some(why))
                }
                Err(why) => (Bind::Nothing, Some(why)),
            },
        };
        let shares = match bind {
            Bind::Nothing => Vec::new(),
            _ => can_bind(&topology)
                .map_err(|why| format!("--bind: {why}; say --bind none"))
                .and_then(|()| plan(&topology, bind, ranks))
                .map_err(|message| Failure::new(1, message))?,
        };
        let sets_memory = shares.iter().any(|share| share.memory.is_some()) && memory_policy::is_default();
        Ok(Binding { bind, why, topology, gpus, shares, sets_memory })
    }

    /// The share of that rank. It is `None` where the ranks are not bound.
    pub fn share(&self, local_rank: u32) -> Option<&Share> {
        self.shares.get(local_rank as usize)
    }

    /// The number of cores that the rank has for itself. `None` where it shares them.
    pub fn own_cores(&self, local_rank: u32) -> Option<usize> {
        self.share(local_rank).filter(|_| self.bind == Bind::Core).map(|share| share.cores)
    }

    /// The GPU next to which the rank was placed, with its PCI address. `None` where the driver
    /// sees no GPU.
    pub fn gpu(&self, local_rank: u32) -> Option<String> {
        let gpu = gpu(&self.topology, local_rank as usize)?;
        let address = self.gpus.get(gpu)?.as_ref().map_or(String::new(), |address| format!(" at {address}"));
        Some(format!("{gpu}{address}"))
    }

    /// Binds the calling thread as that rank is to be bound, until the result is dropped.
    pub fn enter(&self, local_rank: u32) -> io::Result<Bound> {
        let mut bound = Bound { cpus: None, memory: false };
        let Some(share) = self.share(local_rank) else { return Ok(bound) };
        let mut set = CpuSet::new();
        share.cpus.iter().for_each(|cpu| set.set(cpu as usize));
        let before = sched_getaffinity(None)?;
        sched_setaffinity(None, &set).map_err(|error| {
            io::Error::other(format!("cannot bind it to CPUs {}: {}", share.cpus, io::Error::from(error)))
        })?;
        bound.cpus = Some(before);
        bound.memory = self.sets_memory && share.memory.is_some_and(memory_policy::prefer);
        Ok(bound)
    }

    /// One line for the user.
    pub fn describe(&self) -> String {
        let (name, what) = match self.bind {
            Bind::Core => ("core", "each rank has cores of its own".to_owned()),
            Bind::Numa => ("numa", "each rank has the CPUs of one NUMA node".to_owned()),
            Bind::Nothing => {
                let cpus: NumberSet = self.topology.cores.iter().flat_map(|core| core.cpus.iter()).collect();
                let s = if cpus.iter().nth(1).is_some() { "s" } else { "" };
                ("none", format!("the ranks run where the tool may run, on CPU{s} {cpus}"))
            }
        };
        let why = self.why.as_ref().map_or(String::new(), |why| format!(", because {why}"));
        let memory = match self.shares.iter().any(|share| share.memory.is_some()) && !self.sets_memory {
            true => "; the memory policy stays the tool's own",
            false => "",
        };
        format!("{name}{why}: {what}{memory}")
    }
}

/// Why no process can be bound on this host.
fn can_bind(topology: &Topology) -> Result<(), String> {
    match topology.cores.iter().filter_map(|core| core.cpus.largest()).max() {
        None => Err("/proc/self/status does not say which CPUs this process may use".to_owned()),
        Some(largest) if largest as usize >= CpuSet::MAX_CPU => {
            let most = CpuSet::MAX_CPU;
            Err(format!("this process may use CPU {largest}, and the tool can bind to CPUs below {most} only"))
        }
        Some(_) => Ok(()),
    }
}

/// The calling thread is bound as a rank is to be, until this is dropped.
pub struct Bound {
    /// The CPUs on which the thread may run otherwise.
    cpus: Option<CpuSet>,
    /// Whether its memory policy was changed.
    memory: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(cpus) = &self.cpus {
            let _ = sched_setaffinity(None, cpus);
        }
        if self.memory {
            memory_policy::reset();
        }
    }
}
