//! Tests of the plans for hosts that are written down here.

use std::fs;
use std::path::{Path, PathBuf};

use super::plan::{Bind, plan, usual};
use super::topology::{Core, Topology};
use crate::number_set::NumberSet;

fn set(text: &str) -> NumberSet {
    NumberSet::parse(text).unwrap()
}

/// A host from its NUMA nodes' cores, each as the CPUs of the core. All nodes have memory.
fn host(nodes: &[&[&str]]) -> Topology {
    let cores = nodes
        .iter()
        .enumerate()
        .flat_map(|(node, cores)| cores.iter().map(move |cpus| Core { cpus: set(cpus), node: Some(node as u32) }));
    Topology { cores: cores.collect(), memory: (0..nodes.len() as u32).collect(), gpus: Vec::new() }
}

/// Two sockets with four cores of two hardware threads each, numbered as Linux numbers them on most
/// hosts: first one thread of each core, then the others.
fn two_sockets() -> Topology {
    host(&[&["0,8", "1,9", "2,10", "3,11"], &["4,12", "5,13", "6,14", "7,15"]])
}

/// The CPUs of each rank, and the node of its memory.
fn shares(topology: &Topology, bind: Bind, ranks: usize) -> Vec<String> {
    let shares = plan(topology, bind, ranks).unwrap();
    let memory = |memory: Option<u32>| memory.map_or("-".to_owned(), |node| node.to_string());
    shares.iter().map(|share| format!("{} @{}", share.cpus, memory(share.memory))).collect()
}

#[test]
fn one_socket() {
    let topology = host(&[&["0", "1", "2", "3"]]);
    assert_eq!(shares(&topology, Bind::Core, 2), ["0-1 @0", "2-3 @0"]);
    assert_eq!(shares(&topology, Bind::Core, 3), ["0 @0", "1 @0", "2-3 @0"]);
    assert_eq!(shares(&topology, Bind::Numa, 2), ["0-3 @0", "0-3 @0"]);
    assert_eq!(usual(&topology, 2).0, Bind::Nothing);
}

#[test]
fn two_sockets_with_hardware_threads() {
    let topology = two_sockets();
    assert_eq!(shares(&topology, Bind::Core, 2), ["0-3,8-11 @0", "4-7,12-15 @1"]);
    assert_eq!(shares(&topology, Bind::Core, 4), ["0-1,8-9 @0", "2-3,10-11 @0", "4-5,12-13 @1", "6-7,14-15 @1"]);
    // A rank never has cores of two nodes.
    assert_eq!(shares(&topology, Bind::Core, 3), ["0-1,8-9 @0", "2-3,10-11 @0", "4-7,12-15 @1"]);
    assert_eq!(shares(&topology, Bind::Numa, 2), ["0-3,8-11 @0", "4-7,12-15 @1"]);
    assert_eq!(plan(&topology, Bind::Core, 8).unwrap().iter().map(|share| share.cores).sum::<usize>(), 8);
}

#[test]
fn more_ranks_than_cores() {
    let topology = two_sockets();
    let refused = plan(&topology, Bind::Core, 9).unwrap_err();
    assert!(refused.contains("9 ranks and 8 cores") && refused.contains("--bind numa"), "{refused}");
    assert_eq!(shares(&topology, Bind::Numa, 9)[8], "4-7,12-15 @1");
    assert_eq!(usual(&topology, 9), (Bind::Nothing, "9 ranks share 8 cores".to_owned()));
}

#[test]
fn the_usual_binding_leaves_no_core_idle() {
    let topology = two_sockets();
    for (ranks, expected) in [(1, Bind::Nothing), (2, Bind::Numa), (3, Bind::Nothing), (8, Bind::Numa)] {
        assert_eq!(usual(&topology, ranks).0, expected, "{ranks}");
    }
    // Both GPUs are next to one socket: a binding would leave the other socket idle.
    let beside_one = Topology { gpus: vec![Some(1), Some(1)], ..two_sockets() };
    assert_eq!(usual(&beside_one, 2).0, Bind::Nothing);
    let uneven = host(&[&["0", "1", "2"], &["3"]]);
    assert_eq!(usual(&uneven, 2).0, Bind::Nothing);
    assert_eq!(usual(&uneven, 4).0, Bind::Numa);
}

#[test]
fn ranks_are_next_to_their_gpus() {
    // The first four GPUs are at the second socket, as on a DGX.
    let gpus: Vec<Option<u32>> = [1, 1, 1, 1, 0, 0, 0, 0].map(Some).into();
    let topology = Topology { gpus, ..two_sockets() };
    let expected = ["4,12 @1", "5,13 @1", "6,14 @1", "7,15 @1", "0,8 @0", "1,9 @0", "2,10 @0", "3,11 @0"];
    assert_eq!(shares(&topology, Bind::Core, 8), expected);
    assert_eq!(shares(&topology, Bind::Numa, 2), ["4-7,12-15 @1", "4-7,12-15 @1"]);
    assert_eq!(usual(&topology, 8).0, Bind::Numa);
    let refused = plan(&Topology { gpus: vec![Some(1); 8], ..two_sockets() }, Bind::Core, 5).unwrap_err();
    assert!(refused.contains("5 ranks have their GPUs next to the 4 cores of NUMA node 1"), "{refused}");
    // Where the host does not tell a GPU's node, or the process has no CPU there, the rank order
    // counts.
    let unknown = Topology { gpus: vec![None, Some(7)], ..two_sockets() };
    assert_eq!(shares(&unknown, Bind::Numa, 2), ["0-3,8-11 @0", "4-7,12-15 @1"]);
}

#[test]
fn more_numa_nodes_than_ranks() {
    let topology = host(&[&["0", "1"], &["2", "3"], &["4", "5"], &["6", "7"]]);
    assert_eq!(shares(&topology, Bind::Numa, 2), ["0-1 @0", "4-5 @2"]);
    assert_eq!(usual(&topology, 2).0, Bind::Nothing);
}

/// A folder with the files of a host, which is removed at the end.
struct Recorded(PathBuf);

impl Recorded {
    fn new(name: &str, files: &[(&str, &str)]) -> Recorded {
        let root = std::env::temp_dir().join(format!("devicemesh-{}-{name}", std::process::id()));
        let recorded = Recorded(root);
        for (file, text) in files {
            recorded.write(file, text);
        }
        recorded
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn read(&self) -> Topology {
        Topology::read(&self.0).unwrap()
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_host_is_read_from_its_files() {
    // Two nodes with two cores of two threads, and a third node that has memory alone (CXL, HBM).
    // The cpuset has holes: it has one thread of core 1, and no thread of core 2.
    let status = "Name:\tx\nCpus_allowed:\tba\nCpus_allowed_list:\t0-1,3-4,7\nMems_allowed_list:\t0,2";
    let host = Recorded::new(
        "files",
        &[
            ("proc/self/status", status),
            ("sys/devices/system/node/has_cpu", "0-1"),
            ("sys/devices/system/node/has_memory", "0-2"),
            ("sys/devices/system/node/node0/cpulist", "0-1,4-5"),
            ("sys/devices/system/node/node1/cpulist", "2-3,6-7"),
            ("sys/devices/system/node/node2/cpulist", ""),
            ("sys/bus/pci/devices/0000:17:00.0/numa_node", "1"),
            ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "-1"),
        ],
    );
    for cpu in 0..8 {
        let siblings = format!("{},{}", cpu % 4, cpu % 4 + 4);
        host.write(&format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), &siblings);
    }
    let mut topology = host.read();
    let cores = [("0,4", 0), ("1", 0), ("3,7", 1)].map(|(cpus, node)| Core { cpus: set(cpus), node: Some(node) });
    assert_eq!(topology, Topology { cores: cores.into(), memory: set("0,2"), gpus: Vec::new() });
    // Node 1 has no memory that the process may use, so its rank has no memory policy.
    assert_eq!(shares(&topology, Bind::Core, 3), ["0,4 @0", "1 @0", "3,7 @-"]);
    let addresses = ["0000:17:00.0", "0000:c1:00.0", "0000:ff:00.0"].map(|address| Some(address.to_owned()));
    topology.find_gpus(&host.0, &addresses);
    assert_eq!(topology.gpus, [Some(1), None, None]);
}

/// A host with room for more CPUs: a task in the root cpuset may use CPUs that are not there.
#[test]
fn cpus_that_are_offline_are_no_cores() {
    let host = Recorded::new(
        "offline",
        &[
            ("proc/self/status", "Cpus_allowed_list:\t0-127\nMems_allowed_list:\t0-1"),
            ("sys/devices/system/cpu/online", "0-2,4"),
            ("sys/devices/system/cpu/cpu3/online", "0"),
            ("sys/devices/system/node/has_cpu", "0-1"),
            ("sys/devices/system/node/has_memory", "0-1"),
            ("sys/devices/system/node/node0/cpulist", "0-1"),
            ("sys/devices/system/node/node1/cpulist", "2,4"),
        ],
    );
    for cpu in [0, 1, 2, 4] {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        host.write(&file, &cpu.to_string());
    }
    let topology = host.read();
    assert_eq!(shares(&topology, Bind::Core, 4), ["0 @0", "1 @0", "2 @1", "4 @1"]);
    assert_eq!(usual(&topology, 2).0, Bind::Numa);
    // LXCFS shows a list that begins with 0, whatever CPUs the container may use.
    host.write("proc/self/status", "Cpus_allowed_list:\t2,4");
    host.write("sys/devices/system/cpu/online", "0-1");
    assert_eq!(shares(&host.read(), Bind::Core, 2), ["2 @-", "4 @-"]);
}

#[test]
fn a_host_without_sys_has_one_node_and_a_core_for_each_cpu() {
    let host = Recorded::new("bare", &[("proc/self/status", "Cpus_allowed_list:\t4-5")]);
    assert_eq!(shares(&host.read(), Bind::Core, 2), ["4 @-", "5 @-"]);
    assert_eq!(shares(&host.read(), Bind::Numa, 1), ["4-5 @-"]);
    assert_eq!(Topology::read(Path::new("/nonexistent")), None);
}
