use proptest::prelude::*;

use super::*;

/// The variables that each launcher really set, as far as they say who and where (2026-11-21: Open
/// MPI 4.1.4, MPICH 4.0.2, Slurm 22.05.8, torch 2.15).
const OPEN_MPI: &str = "OMPI_APP_CTX_NUM_PROCS=4 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=2 \
    OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_MCA_ess_base_jobid=723910657 OMPI_MCA_ess_base_vpid=2 OMPI_MCA_orte_ess_num_procs=4 \
    OMPI_MCA_orte_hnp_uri=723910656.0;tcp://192.0.2.2:38973;tcp6://[fd00::2]:47005 OMPI_MCA_orte_num_nodes=1 PMIX_HOSTNAME=vm \
    PMIX_ID=723910657.2 PMIX_NAMESPACE=723910657 PMIX_RANK=2 PMIX_SERVER_URI4=723910656.0;tcp4://127.0.0.1:38585";
const OPEN_MPI_TWO_HOSTS: &str = "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=1 \
    OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_ess_base_jobid=644284417 OMPI_MCA_orte_node_regex=vm,[3:127].0.0.5@0(2) OMPI_MCA_orte_num_nodes=2 \
    PMIX_NAMESPACE=644284417 PMIX_RANK=1";
/// A program of Open MPI's without mpirun, after MPI_Init.
const OPEN_MPI_SINGLETON: &str = "OMPI_COMMAND=./so OMPI_MCA_ess=singleton OMPI_MCA_orte_launch=1 PMIX_NAMESPACE=499974145 PMIX_RANK=0 \
    PMIX_HOSTNAME=vm OMPI_MCA_orte_ess_num_procs=1 OMPI_APP_CTX_NUM_PROCS=1";
const MPICH: &str = "HYDI_CONTROL_FD=7 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm MPI_LOCALNRANKS=4 MPI_LOCALRANKID=3 PMI_FD=8 PMI_RANK=3 PMI_SIZE=4";
const MPICH_TWO_HOSTS: &str =
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME=127.0.0.5 MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_FD=12 PMI_RANK=1 PMI_SIZE=2";
const SRUN: &str = "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node001 SLURM_LOCALID=3 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=node001 \
    SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node001 SLURM_STEP_NUM_NODES=1 \
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4";
const SRUN_TWO_HOSTS: &str = "SLURM_JOB_ID=2 SLURM_JOB_NODELIST=node[001-002] SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_PROCID=3 \
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[001-002] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 \
    SLURM_STEP_TASKS_PER_NODE=3,1";
/// The script itself: one process on the first node of a job of eight tasks.
const SBATCH_SCRIPT: &str = "SLURM_GTIDS=0 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=node[001-002] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 \
    SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=8 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=4(x2)";
/// `mpiexec.hydra -n 4` in a batch script: the step is that of the proxies, one per node.
const MPICH_IN_SLURM: &str = "MPI_LOCALNRANKS=3 MPI_LOCALRANKID=2 PMI_FD=9 PMI_RANK=2 PMI_SIZE=4 SLURM_JOB_ID=8 SLURM_LOCALID=0 SLURM_NODEID=0 \
    SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[001-002] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2";
/// `mpirun -n 2` in a batch script of two nodes: both ranks on the first, started by Slurm's step
/// of the daemons.
const OPEN_MPI_IN_SLURM: &str = "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
    PMIX_NAMESPACE=579010561 PMIX_RANK=1 SLURM_JOB_ID=7 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_ID=0 \
    SLURM_STEP_NODELIST=node[001-002] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2";
const TORCHRUN: &str = "GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=vm MASTER_PORT=41829 RANK=1 ROLE_RANK=1 \
    ROLE_WORLD_SIZE=2 WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=2 TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_RUN_ID=none \
    TORCHELASTIC_USE_AGENT_STORE=True";

/// The variables that Kubernetes adds to those of the manifest in pod 3 of a job. These variables
/// are taken from the documentation of Kubernetes 1.34, and were not recorded in a cluster.
const KUBERNETES_POD: &str = "HOSTNAME=train-3 JOB_COMPLETION_INDEX=3 KUBERNETES_PORT=tcp://10.96.0.1:443 KUBERNETES_SERVICE_HOST=10.96.0.1 \
    KUBERNETES_SERVICE_PORT=443 KUBERNETES_SERVICE_PORT_HTTPS=443";
/// The variables that `devicemesh run` sets in that pod, with two ranks in each of four pods.
const RUN_IN_POD: &str = "GROUP_RANK=3 GROUP_WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=train-0.train MASTER_PORT=29400 RANK=7 \
    WORLD_SIZE=8 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True";

fn detect_in(variables: &str) -> Result<Place> {
    detect(&|name| lookup(variables, name))
}

fn lookup(variables: &str, name: &str) -> Option<String> {
    // The last assignment counts.
    let mut pairs = variables.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.rfind(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
}

#[test]
fn each_launcher_is_known_by_what_it_really_sets() {
    let srun_pmi2 = format!("{SRUN} PMI_FD=13 PMI_JOBID=1.0 PMI_RANK=3 PMI_SIZE=4");
    let srun_pmix = format!("{SRUN_TWO_HOSTS} PMIX_NAMESPACE=slurm.pmix.2.0 PMIX_RANK=3");
    let torchrun_in_slurm = format!("{SRUN_TWO_HOSTS} {TORCHRUN}");
    let torchrun_in_mpi = format!("{OPEN_MPI_TWO_HOSTS} {TORCHRUN}");
    for (variables, launcher, rank, size, local_rank, host) in [
        (OPEN_MPI, "Open MPI", 2, 4, Some(2), Some("127.0.0.1")),
        (OPEN_MPI_TWO_HOSTS, "Open MPI", 1, 2, Some(0), None),
        (OPEN_MPI_SINGLETON, "PMIx", 0, 1, Some(0), None),
        (OPEN_MPI_IN_SLURM, "Open MPI", 1, 2, Some(1), Some("127.0.0.1")),
        (MPICH, "PMI", 3, 4, Some(3), Some("127.0.0.1")),
        (MPICH_TWO_HOSTS, "PMI", 1, 2, Some(0), None),
        (MPICH_IN_SLURM, "PMI", 2, 4, Some(2), None),
        (SRUN, "Slurm", 3, 4, Some(3), Some("127.0.0.1")),
        (SRUN_TWO_HOSTS, "Slurm", 3, 4, Some(0), Some("node001")),
        (&srun_pmi2, "Slurm", 3, 4, Some(3), Some("127.0.0.1")),
        (&srun_pmix, "Slurm", 3, 4, Some(0), Some("node001")),
        (SBATCH_SCRIPT, "alone", 0, 1, Some(0), None),
        (TORCHRUN, "torchrun", 1, 2, Some(1), Some("vm")),
        (&torchrun_in_slurm, "torchrun", 1, 2, Some(1), Some("vm")),
        (&torchrun_in_mpi, "torchrun", 1, 2, Some(1), Some("vm")),
        (
            "PALS_RANKID=3 PALS_LOCAL_RANKID=1 PMI_SIZE=8 MASTER_ADDR=x1 MASTER_PORT=29500",
            "PALS",
            3,
            8,
            Some(1),
            Some("x1"),
        ),
        (
            "PALS_RANKID=3 PALS_LOCAL_RANKID=3 PALS_LOCAL_SIZE=4 WORLD_SIZE=4 PALS_APID=a-b",
            "PALS",
            3,
            4,
            Some(3),
            Some("127.0.0.1"),
        ),
        ("PMIX_RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=2", "PMIx", 3, 8, None, None),
        (
            "JOB_COMPLETION_INDEX=3 WORLD_SIZE=8 MASTER_ADDR=j-0.s MASTER_PORT=1",
            "Kubernetes",
            3,
            8,
            None,
            Some("j-0.s"),
        ),
        ("RANK=3 WORLD_SIZE=8", "the environment", 3, 8, None, None),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=fd00::1 MASTER_PORT=1", "the environment", 0, 2, None, Some("fd00::1")),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=[fd00::1] MASTER_PORT=1", "the environment", 0, 2, None, Some("fd00::1")),
        ("RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", "the environment", 5, 8, None, None),
        ("RANK= OMPI_COMM_WORLD_RANK=", "alone", 0, 1, Some(0), None),
    ] {
        let place = detect_in(variables).unwrap_or_else(|error| panic!("{variables}: {error}"));
        let seen = (place.launcher, place.rank, place.size, place.local_rank);
        assert_eq!(seen, (launcher, rank, size, local_rank), "{variables}");
        assert_eq!(place.address.as_ref().map(|(host, _)| host.as_str()), host, "{variables}");
    }
}

#[test]
fn the_manifests_of_kubernetes_say_all_that_is_needed() {
    let manifest = include_str!("../../../examples/kubernetes/one_rank_a_pod.yaml");
    let set = manifest.lines().filter_map(|line| {
        let (name, value) = line.trim().strip_prefix("- {name: ")?.strip_suffix('}')?.split_once(", value: ")?;
        Some(format!("{name}={}", value.trim_matches('"')))
    });
    let set = set.collect::<Vec<_>>().join(" ");
    assert!(manifest.contains("completions: 8\n"), "the size is that of the job");
    let place = detect_in(&format!("{KUBERNETES_POD} {set}")).unwrap();
    assert_eq!((place.launcher, place.rank, place.size, place.local_rank), ("Kubernetes", 3, 8, None));
    assert_eq!(place.address, Some(("train-0.train".to_owned(), 29_500)));
    // Every pod finds another rank and the same address.
    let last = detect_in(&format!("{KUBERNETES_POD} {set} JOB_COMPLETION_INDEX=7")).unwrap();
    assert_eq!((last.rank, last.address, last.job), (7, place.address, 0));
    let with_run = detect_in(&format!("{KUBERNETES_POD} {RUN_IN_POD}")).unwrap();
    assert_eq!((with_run.launcher, with_run.rank, with_run.size, with_run.local_rank), ("torchrun", 7, 8, Some(1)));
    assert!(with_run.agent && detect_in(KUBERNETES_POD).is_err());
    let by_run = include_str!("../../../examples/kubernetes/train.yaml");
    let (pods, ranks) = (by_run.matches("completions: 4 ").count(), by_run.contains("- --nnodes=4\n"));
    assert!(pods == 1 && ranks && !by_run.contains("--rdzv-endpoint"));
}

#[test]
fn master_addr_and_port_count_under_every_launcher() {
    for launcher in [OPEN_MPI, OPEN_MPI_TWO_HOSTS, MPICH, MPICH_TWO_HOSTS, SRUN, SRUN_TWO_HOSTS] {
        let place = detect_in(&format!("{launcher} MASTER_ADDR=node1 MASTER_PORT=29500")).unwrap();
        assert_eq!((place.address, place.job), (Some(("node1".to_owned(), 29_500)), 0), "{launcher}");
    }
}

#[test]
fn devicemesh_run_differs_from_torchrun() {
    let launcher = |run: &str| detect_in(&format!("{TORCHRUN} DM_STARTED_BY_RUN={run}")).unwrap().launcher;
    assert_eq!(launcher("vm:41829"), "devicemesh run");
    assert_eq!(launcher("127.0.0.1:29400"), "torchrun", "a torchrun that a rank of devicemesh run started");
    assert_eq!(
        (launcher("vm:41829/7"), launcher("vm:418290"), launcher("vm:41829/x")),
        ("devicemesh run", "torchrun", "torchrun")
    );
}

#[test]
fn jobs_in_one_store_have_numbers() {
    let job = |run: &str| detect_in(&format!("{TORCHRUN} DM_STARTED_BY_RUN={run}")).unwrap().job;
    assert_eq!((job("vm:41829"), job("vm:41829/7"), job("other:41829/7")), (0, 7, 0));
}

#[test]
fn torchruns_agent_may_serve_the_store() {
    let place = detect_in(TORCHRUN).unwrap();
    assert_eq!((place.agent, place.job), (true, 0));
    let own = detect_in(&format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=False")).unwrap();
    assert!(!own.agent);
}

#[test]
fn a_port_is_made_from_the_job_alone() {
    let port = |variables: &str| detect_in(variables).unwrap().address.unwrap().1;
    let other_rank = |variables: &str, rank: &str| format!("{variables} {rank}");
    assert_eq!(
        port(OPEN_MPI),
        port(&other_rank(OPEN_MPI, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=0"))
    );
    assert_eq!(port(SRUN), port(&other_rank(SRUN, "SLURM_PROCID=0 SLURM_LOCALID=0")));
    assert_ne!(port(SRUN), port(&other_rank(SRUN, "SLURM_STEP_ID=1")));
    // MPICH names no job, so the job is known by the process that started this one, which has no
    // PMI_RANK.
    let (mpich, rank_0) =
        (detect_in(MPICH).unwrap(), detect_in(&other_rank(MPICH, "PMI_RANK=0 MPI_LOCALRANKID=0")).unwrap());
    assert!(mpich.job != 0 && (mpich.job, &mpich.address) == (rank_0.job, &rank_0.address));
    let ports: std::collections::BTreeSet<u16> =
        (0..400).map(|job| port(&format!("{SRUN} SLURM_JOB_ID={job}"))).collect();
    assert!(ports.iter().all(|port| *port >= 61_440), "{ports:?}");
    // When 400 of 4096 ports are drawn at random, 381 are different on average, with a deviation
    // of 4.
    assert!(ports.len() > 360, "{} different ports for 400 jobs", ports.len());
}

#[test]
fn options_take_the_address_of_the_same_rank_only() {
    let given_in = |variables: &str, rank, size| given(&|name| lookup(variables, name), rank, size, Some(0)).unwrap();
    let same = given_in(OPEN_MPI, 2, 4);
    assert_eq!(
        (same.launcher, same.local_rank, same.address),
        ("dm_world_options", Some(0), detect_in(OPEN_MPI).unwrap().address)
    );
    assert_eq!(given_in(OPEN_MPI, 1, 4).address, None);
    let torchrun = given_in(TORCHRUN, 7, 8);
    assert_eq!((torchrun.address, torchrun.agent), (Some(("vm".to_owned(), 41_829)), true));
    assert_eq!(given_in("RANK=x", 1, 4).address, None);
}

#[test]
fn partial_and_contradictory_environments_name_their_variables() {
    for (variables, words) in [
        ("RANK=1", &["RANK is 1", "but WORLD_SIZE is not set"][..]),
        ("WORLD_SIZE=4", &["WORLD_SIZE is 4", "RANK is not set"]),
        ("RANK=4 WORLD_SIZE=4", &["RANK is 4", "WORLD_SIZE is 4"]),
        ("RANK=0 WORLD_SIZE=0", &["RANK is 0", "WORLD_SIZE is 0"]),
        ("RANK=x WORLD_SIZE=4", &["RANK is \"x\""]),
        ("RANK=-1 WORLD_SIZE=4", &["RANK is \"-1\""]),
        ("RANK=1 WORLD_SIZE=4294967296", &["WORLD_SIZE is \"4294967296\""]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", &["MASTER_ADDR is a", "MASTER_PORT is not set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=9", &["MASTER_PORT is 9", "MASTER_ADDR is not set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=99999", &["MASTER_PORT is \"99999\""]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", &["MASTER_PORT is \"0\""]),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=2", &["LOCAL_RANK is 2", "WORLD_SIZE is 2"]),
        ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", &["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"]),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", &["LOCAL_WORLD_SIZE is 4", "WORLD_SIZE is 2"]),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0", &["LOCAL_WORLD_SIZE is 0", "WORLD_SIZE is 2"]),
        (
            "OMPI_COMM_WORLD_RANK=0",
            &["OMPI_COMM_WORLD_RANK is 0 (Open MPI)", "OMPI_COMM_WORLD_SIZE or WORLD_SIZE is not set"],
        ),
        ("OMPI_COMM_WORLD_SIZE=2", &["OMPI_COMM_WORLD_SIZE is 2 (Open MPI)", "OMPI_COMM_WORLD_RANK is not set"]),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 WORLD_SIZE=4",
            &["WORLD_SIZE is 4", "OMPI_COMM_WORLD_SIZE is 2"],
        ),
        (
            "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=1",
            &["MPI_LOCALRANKID is 1", "MPI_LOCALNRANKS is 1"],
        ),
        ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=3", &["MPI_LOCALNRANKS is 3", "PMI_SIZE is 2"]),
        ("PMIX_RANK=0", &["PMIX_RANK is 0 (PMIx)", "PMIX_SIZE", "WORLD_SIZE is not set"]),
        ("PALS_RANKID=0", &["PALS_RANKID is 0 (PALS)", "PALS_SIZE or PMI_SIZE or WORLD_SIZE is not set"]),
        ("JOB_COMPLETION_INDEX=0", &["JOB_COMPLETION_INDEX is 0 (Kubernetes)", "WORLD_SIZE is not set", "works alone"]),
        ("JOB_COMPLETION_INDEX=2 WORLD_SIZE=2", &["JOB_COMPLETION_INDEX is 2", "WORLD_SIZE is 2"]),
        ("SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=2", &["SLURM_STEP_NUM_TASKS", "SLURM_PROCID is not set"]),
        (
            "SLURM_STEP_NODELIST=n1 SLURM_PROCID=1 SLURM_NTASKS=2",
            &["SLURM_PROCID is 1 (Slurm)", "SLURM_JOB_ID is not set"],
        ),
    ] {
        let error = detect_in(variables).expect_err(variables);
        assert!(words.iter().all(|word| error.message().contains(word)), "{variables}: {error}");
    }
}

#[test]
fn a_taken_port_that_nobody_chose_says_how_to_choose_one() {
    let taken = || Error::store("cannot listen").with_os_error(98);
    let derived = detect_in(OPEN_MPI).unwrap().taken(taken());
    assert!(derived.os_error() == 98 && derived.message().contains("-x MASTER_PORT"), "{derived}");
    assert_eq!(detect_in(TORCHRUN).unwrap().taken(taken()), taken());
}

#[test]
fn broken_host_lists_are_refused() {
    for list in ["", "node[1-2", "node[]", "node[a]", ",b", "node]"] {
        assert!(first_host(list).is_err(), "{list:?}");
    }
}

/// Returns a part of a host's name: letters, or numbers of a width with their places in brackets.
fn part() -> impl Strategy<Value = (String, Vec<String>)> {
    let ranges = prop::collection::vec((0u32..90, 0u32..9), 1..4);
    prop_oneof![
        "[a-z][a-z0-9-]{0,4}".prop_map(|text| (text.clone(), vec![text])),
        (ranges, 1usize..4).prop_map(|(ranges, width)| {
            let padded = |number: u32| format!("{number:0width$}");
            let write = |&(first, more): &(u32, u32)| match more {
                0 => padded(first),
                _ => format!("{}-{}", padded(first), padded(first + more)),
            };
            let expanded = ranges.iter().flat_map(|&(first, more)| (first..=first + more).map(padded)).collect();
            (format!("[{}]", ranges.iter().map(write).collect::<Vec<_>>().join(",")), expanded)
        }),
    ]
}

proptest! {
    #[test]
    fn the_first_host_is_that_of_the_expanded_list(hosts in prop::collection::vec(prop::collection::vec(part(), 1..4), 1..4)) {
        let mut expanded = Vec::new();
        let mut written = Vec::new();
        for parts in hosts {
            written.push(parts.iter().map(|(text, _)| text.as_str()).collect::<String>());
            let names = parts.iter().fold(vec![String::new()], |names, (_, values)| {
                names.iter().flat_map(|name| values.iter().map(move |value| format!("{name}{value}"))).collect()
            });
            expanded.extend(names);
        }
        prop_assert_eq!(first_host(&written.join(",")).unwrap(), expanded[0].clone());
    }
}
