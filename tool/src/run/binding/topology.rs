//! The cores and NUMA nodes that this process may use, as Linux describes them in /proc and /sys.

use std::collections::BTreeMap;
use std::path::Path;

use crate::number_set::NumberSet;

/// The cores, the NUMA nodes and the GPUs of a host, as far as a plan needs them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    /// The cores, ordered by NUMA node and then by their first CPU.
    pub cores: Vec<Core>,
    /// The NUMA nodes that have memory which this process may use.
    pub memory: NumberSet,
    /// The NUMA node of each GPU, by the number that the CUDA driver gives it in this process.
    /// `None` where the host does not tell it.
    pub gpus: Vec<Option<u32>>,
}

/// A core, with the CPUs (hardware threads) of it that this process may use.
#[derive(Clone, Debug, PartialEq)]
pub struct Core {
    pub cpus: NumberSet,
    /// `None` where the kernel knows no NUMA nodes.
    pub node: Option<u32>,
}

impl Topology {
    /// Reads what this process may use. `root` is "/", or the folder of a recorded host in a test.
    /// The kernel's list of allowed CPUs already respects cpusets of cgroups and the binding that
    /// srun, mpirun or taskset gave this process. It may also have CPUs that are offline, on which
    /// no process can run. `None` where /proc does not have that list.
    pub fn read(root: &Path) -> Option<Topology> {
        let status = std::fs::read_to_string(root.join("proc/self/status")).ok()?;
        let allowed = |name: &str| {
            let list = status.lines().find_map(|line| line.strip_prefix(name))?;
            NumberSet::parse(list)
        };
        let folder = root.join("sys/devices/system/cpu");
        let topology = |cpu: u32| folder.join(format!("cpu{cpu}/topology"));
        let online = std::fs::read_to_string(folder.join("online")).ok().and_then(|text| NumberSet::parse(&text));
        // A container may have a list of its own there (LXCFS), with numbers that are not the
        // kernel's. A CPU that is offline has no topology either.
        let is_offline =
            |cpu: u32| online.as_ref().is_some_and(|online| !online.contains(cpu)) && !topology(cpu).exists();
        let cpus: NumberSet = allowed("Cpus_allowed_list:")?.iter().filter(|cpu| !is_offline(*cpu)).collect();
        let nodes = root.join("sys/devices/system/node");
        let mut node_of = BTreeMap::new();
        for node in list(&nodes.join("has_cpu")).iter() {
            node_of.extend(list(&nodes.join(format!("node{node}/cpulist"))).iter().map(|cpu| (cpu, node)));
        }
        let mut cores: BTreeMap<(Option<u32>, u32), Vec<u32>> = BTreeMap::new();
        for cpu in cpus.iter() {
            // Without this file each CPU is a core of its own.
            let first =
                list(&topology(cpu).join("thread_siblings_list")).iter().find(|sibling| cpus.contains(*sibling));
            let first = first.unwrap_or(cpu);
            cores.entry((node_of.get(&first).copied(), first)).or_default().push(cpu);
        }
        let cores = cores.into_iter().map(|((node, _), cpus)| Core { cpus: cpus.into_iter().collect(), node });
        let usable = allowed("Mems_allowed_list:").unwrap_or_default();
        let memory = list(&nodes.join("has_memory")).iter().filter(|node| usable.contains(*node)).collect();
        Some(Topology { cores: cores.collect(), memory, gpus: Vec::new() })
    }

    /// The NUMA nodes, each with its cores in [`Topology::cores`].
    pub fn nodes(&self) -> Vec<(Option<u32>, &[Core])> {
        self.cores.chunk_by(|one, other| one.node == other.node).map(|cores| (cores[0].node, cores)).collect()
    }

    /// The NUMA node of each GPU, from the PCI addresses that the driver names.
    pub fn find_gpus(&mut self, root: &Path, addresses: &[Option<String>]) {
        let node = |address: &Option<String>| {
            let file = root.join(format!("sys/bus/pci/devices/{}/numa_node", address.as_ref()?));
            // The kernel writes -1 where the firmware does not say it.
            std::fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        self.gpus = addresses.iter().map(node).collect();
    }
}

/// The list in that file. Empty where there is no such file.
fn list(file: &Path) -> NumberSet {
    std::fs::read_to_string(file).ok().and_then(|text| NumberSet::parse(&text)).unwrap_or_default()
}
