//! Tests that find jobs among processes which are written down here.

use std::collections::BTreeMap;

use devicemesh::rendezvous::launcher::detect;

use super::{Job, State, jobs};
use crate::ps::process::Process;

/// A process from its number, its parent, its command line and its variables.
fn process(pid: u32, parent: u32, command: &str, variables: &str) -> Process {
    let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
    let variables: BTreeMap<&str, &str> = variables.split(' ').filter_map(|word| word.split_once('=')).collect();
    let get = |name: &str| variables.get(name).map(|value| (*value).to_owned());
    Process {
        pid,
        parent,
        is_stopped: false,
        started: pid.into(),
        program: command[0].rsplit('/').next().unwrap_or_default().to_owned(),
        command,
        place: detect(&get).ok().filter(|place| place.launcher != "alone"),
        id: get("TORCHELASTIC_RUN_ID"),
        restarts: get("TORCHELASTIC_RESTART_COUNT").map_or(0, |count| count.parse().unwrap()),
        mesh_size: get("DM_MESH_SIZE").map(|size| size.parse().unwrap()),
    }
}

fn rank(rank: u32, of: u32, id: &str) -> String {
    format!(
        "RANK={rank} WORLD_SIZE={of} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={} MASTER_ADDR=127.0.0.1 MASTER_PORT=2000 TORCHELASTIC_RUN_ID={id}",
        of.min(2)
    )
}

fn all(processes: Vec<Process>) -> BTreeMap<u32, Process> {
    processes.into_iter().map(|process| (process.pid, process)).collect()
}

fn said(jobs: &[Job]) -> Vec<String> {
    let said = |job: &Job| {
        let ranks: Vec<String> =
            job.ranks.iter().map(|rank| format!("{}:{}", rank.rank, rank.processes.len())).collect();
        let starter = job.starter.map_or("-".to_owned(), |pid| pid.to_string());
        format!("{} {starter} {} {:?} [{}] of {:?}", job.name, job.launcher, job.state, ranks.join(" "), job.world_size)
    };
    jobs.iter().map(said).collect()
}

#[test]
fn ranks_belong_to_the_tool_that_started_them() {
    let all = all(vec![
        process(5, 1, "devicemesh run -n 2 --rdzv-id llama -- python3 -u train.py", ""),
        // A process of the tool's own between it and the ranks.
        process(6, 5, "devicemesh run -n 2 --rdzv-id llama -- python3 -u train.py", ""),
        process(7, 6, "python3 -u train.py", &rank(0, 4, "llama")),
        process(8, 6, "python3 -u train.py", &rank(1, 4, "llama")),
        process(9, 8, "python3 -u train.py", &rank(1, 4, "llama")),
        // A process that a rank left behind has become the tool's child.
        process(10, 5, "sleep 9", &rank(0, 4, "llama")),
        // A second job without a name, and one that waits.
        process(20, 1, "devicemesh run -n 2 -- python3 -m pkg.main", ""),
        process(21, 20, "python3 -m pkg.main", &rank(1, 2, "devicemesh-20")),
        process(30, 1, "/opt/devicemesh run -n 2 --nnodes 2 --rdzv-endpoint h -- ./solve 1", ""),
        process(40, 1, "devicemesh run --unknown 7 -- ./later -- x", ""),
        // A check of the mesh.
        process(50, 1, "devicemesh run -n 1 -- devicemesh check 1 dp", ""),
        process(51, 50, "devicemesh check 1 dp", &rank(0, 1, "devicemesh-50")),
    ]);
    let found = jobs(&all, &|_| false);
    assert_eq!(
        said(&found),
        [
            "llama 5 devicemesh run Running [0:2 1:2] of Some(4)",
            "pkg.main 20 devicemesh run Ending [1:1] of Some(2)",
            "solve 30 devicemesh run Waiting [] of None",
            "later 40 devicemesh run Waiting [] of None",
            "check 50 devicemesh run Running [0:1] of Some(1)",
        ]
    );
}

#[test]
fn a_job_on_several_hosts_is_one_job() {
    let second = |pid, parent| Process {
        program: "devicemesh".to_owned(),
        ..process(pid, parent, &format!("dm-ranks {parent}"), "")
    };
    let all = all(vec![
        process(5, 1, "devicemesh run --hosts a,b -- ./a", ""),
        second(6, 5),
        process(7, 6, "devicemesh run --agent {} --hosts a,b -- ./a", ""),
        second(8, 7),
        process(9, 8, "./a", &rank(0, 2, "devicemesh-5")),
    ]);
    assert_eq!(said(&jobs(&all, &|_| false)), ["a 5 devicemesh run Ending [0:1] of Some(2)"]);
}

#[test]
fn a_job_inside_a_rank_is_a_job_of_its_own() {
    let all = all(vec![
        process(5, 1, "devicemesh run -n 1 -- sh job.sh", ""),
        process(6, 5, "sh job.sh", &rank(0, 1, "devicemesh-5")),
        process(7, 6, "devicemesh run -n 2 -- ./inner", &rank(0, 1, "devicemesh-5")),
        process(8, 7, "./inner", &rank(0, 2, "devicemesh-7")),
        process(9, 7, "./inner", &rank(1, 2, "devicemesh-7")),
    ]);
    let found = jobs(&all, &|_| false);
    assert_eq!(
        said(&found),
        ["job.sh 5 devicemesh run Running [0:1] of Some(1)", "inner 7 devicemesh run Running [0:1 1:1] of Some(2)"]
    );
}

#[test]
fn jobs_of_other_launchers_are_those_that_use_the_library() {
    let mpi = |rank: u32| {
        format!(
            "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=2"
        )
    };
    let all = all(vec![
        process(5, 1, "mpirun -n 2 ./a", ""),
        process(6, 5, "./a", &mpi(0)),
        process(7, 5, "./a", &mpi(1)),
        process(8, 1, "mpirun -n 2 ./b", ""),
        process(9, 8, "./b", &mpi(0)),
        process(10, 8, "./b", &mpi(1)),
        // A daemon that a killed tool's rank has left behind.
        process(11, 1, "./c", &format!("{} DM_STARTED_BY_RUN=127.0.0.1:2000", rank(0, 2, "solve"))),
    ]);
    let found = jobs(&all, &|process| process.pid == 10);
    assert_eq!(
        said(&found),
        ["b 8 Open MPI Running [0:1 1:1] of Some(2)", "solve - devicemesh run LeftOver [0:1] of Some(2)"]
    );
}

#[test]
fn a_job_is_stopped_when_all_its_processes_are() {
    let mut first = process(6, 5, "./a", &rank(0, 2, "x"));
    let mut second = process(7, 5, "./a", &rank(1, 2, "x"));
    first.is_stopped = true;
    let tool = || process(5, 1, "devicemesh run -n 2 -- ./a", "");
    let one = all(vec![tool(), first, process(7, 5, "./a", &rank(1, 2, "x"))]);
    assert_eq!(jobs(&one, &|_| false)[0].state, State::Running);
    first = process(6, 5, "./a", &rank(0, 2, "x"));
    (first.is_stopped, second.is_stopped) = (true, true);
    let both = all(vec![tool(), first, second]);
    assert_eq!(jobs(&both, &|_| false)[0].state, State::Stopped);
}

#[test]
fn a_tool_that_is_stopped_while_it_waits_is_stopped() {
    let mut tool = process(5, 1, "devicemesh run -n 2 --nnodes 2 --rdzv-endpoint h -- ./a", "");
    tool.is_stopped = true;
    // Ctrl-Z stops the tool, and not the process beside it.
    let second = Process {
        program: "devicemesh".to_owned(),
        command: vec!["dm-ranks".to_owned()],
        ..process(6, 5, "dm-ranks", "")
    };
    assert_eq!(jobs(&all(vec![tool, second]), &|_| false)[0].state, State::Stopped);
}

#[test]
fn restarts_count_for_the_job_or_for_each_rank() {
    let restarted = |restart: &str, counts: [u32; 2]| {
        let ranks = counts.iter().enumerate().map(|(at, count)| {
            let variables = rank(at as u32, 2, "heals");
            let variables = format!("{variables} TORCHELASTIC_RESTART_COUNT={count} DM_MESH_SIZE=1");
            process(6 + at as u32, 5, "./train", &variables)
        });
        let tool = process(5, 1, &format!("devicemesh run -n 1 --restart {restart} --max-restarts 3 -- ./train"), "");
        let all = all(std::iter::once(tool).chain(ranks).collect());
        let jobs = jobs(&all, &|_| true);
        assert_eq!(jobs.len(), 1, "{:?}", said(&jobs));
        (jobs[0].restarts, jobs[0].spares)
    };
    assert_eq!(restarted("job", [2, 2]), (2, 1));
    assert_eq!(restarted("rank", [2, 1]), (3, 1));
}
