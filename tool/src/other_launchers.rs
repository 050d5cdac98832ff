//! The options of torchrun, mpirun and srun that people type out of habit, each with the advice
//! what to write here. docs/tool.md has the same table in "Options that are refused", and
//! tests/test_tool_page.py compares both.

/// Options without their leading dashes, and what to do here in place of them.
const ADVICE: &[(&[&str], &str)] = &[
    // torchrun
    (&["standalone"], "leave it out: without --nnodes and --hosts, a job is on this host alone"),
    (&["rdzv-backend", "rdzv-conf"], "leave it out: there is one rendezvous, at --rdzv-endpoint"),
    (
        &["monitor-interval", "K", "kill-on-bad-exit", "enable-recovery", "disable-auto-cleanup"],
        "leave it out: a job ends when a rank fails, or --max-restarts N starts it again",
    ),
    (
        &["redirects", "r", "local-ranks-filter", "logs-specs"],
        "--log-dir DIR gives each rank files, and --tee shows them too",
    ),
    (&["m", "module"], "write -- python3 -m MODULE"),
    (&["no-python", "run-path"], "leave it out: what follows -- is the program"),
    (&["master-addr", "master-port", "local-addr"], "--rdzv-endpoint HOST:PORT is where the nodes meet"),
    (&["role", "start-method"], "leave it out: there is one role, and each rank is a process of its own"),
    (&["signals-to-handle"], "leave it out: all usual signals are passed on to the ranks"),
    // mpirun and srun
    (
        &["np", "npernode", "ppn", "perhost", "ntasks", "ntasks-per-node"],
        "-n N is the number of ranks on each host, and not of all ranks",
    ),
    (&["N"], "-n N is the number of ranks on each host (mpirun's -N); --nnodes N is the number of hosts (srun's -N)"),
    (
        &["c"],
        "-n N is the number of ranks on each host (mpirun's -c); --bind core gives each rank its part of the cores (srun's -c)",
    ),
    (
        &["cpus-per-task", "cpus-per-proc", "cpu-bind", "cpu-set", "cpu-list", "numa-binding", "binding", "hint"],
        "--bind core, numa or none binds the ranks; core gives each rank its part of the cores",
    ),
    (
        &["map-by", "rank-by", "distribution", "bynode", "byslot", "bycore", "rankfile", "rf", "rr"],
        "leave it out: each host has consecutive ranks; -n N is their number, and --bind binds them to CPUs",
    ),
    (
        &["tag-output", "label", "l", "prepend-rank", "log-line-prefix-template"],
        "--prefix begins each line with its rank",
    ),
    (&["timestamp-output"], "--timestamps begins each line with the time"),
    (
        &["o", "e", "output", "error", "output-filename", "outfile-pattern", "errfile-pattern"],
        "--log-dir DIR gives each rank files; > FILE and 2> FILE take the output of all ranks",
    ),
    (&["i", "input", "pty"], "--stdin 0 lets rank 0 read the tool's standard input, a terminal or < FILE"),
    (
        &["u", "unbuffered"],
        "leave it out: the tool holds no output back; PYTHONUNBUFFERED=1 makes Python write at once",
    ),
    (
        &["oversubscribe", "overcommit", "O", "allow-run-as-root", "use-hwthread-cpus"],
        "leave it out: this is always allowed",
    ),
    (&["report-bindings", "display-map", "display", "print-rank-map"], "--dry-run shows the ranks with their CPUs"),
    (&["v", "verbose"], "--dry-run shows what would be started; DM_LOG=info makes the ranks log"),
    (
        &["q", "Q", "quiet"],
        "leave it out: the tool writes few lines, all to standard error; a quality of service (srun's -q) belongs to srun's own options",
    ),
    (
        &["mca", "omca", "pmca", "gmca", "prtemca", "pmixmca", "mpi", "launcher", "launch-agent", "bootstrap", "rmk"],
        "leave it out: MPI has no part here; --rsh-agent names the command that reaches hosts",
    ),
    (&["iface"], "NCCL_SOCKET_IFNAME names the network interface"),
    (
        &["env", "envlist", "envall", "envnone", "genv", "genvlist", "genvall", "export"],
        "on this host, write NAME=VALUE before devicemesh; with --hosts, -x NAME or -x NAME=VALUE gives the ranks a variable",
    ),
    (&["nodes"], "--nnodes N is the number of hosts, or --hosts names them"),
    (&["nodelist", "hostlist", "w", "f"], "--hosts alpha,beta:4 or --hostfile FILE names the hosts"),
    (&["wdir", "wd", "chdir", "D"], "change the folder first: the ranks start in this one"),
    (&["multi-prog", "app", "configfile"], "all ranks run one program, which can be a script that chooses by $RANK"),
    (&["time"], "--timeout 10m ends the job after that time; a number alone is in seconds"),
    (
        &["t"],
        "--timeout 10m ends the job after that time (srun's -t); --log-dir DIR --tee writes files and shows them too (torchrun's -t)",
    ),
    (&["wait", "W"], "--failure-grace TIME is how long the other ranks have when one rank has failed"),
    (&["J", "job-name"], "--rdzv-id NAME names the job"),
    (
        &["gpus", "G", "gpus-per-node", "gpus-per-task", "gres"],
        "-n gpu starts one rank for each device; srun, salloc and sbatch reserve devices",
    ),
    (
        &[
            "exclusive",
            "overlap",
            "exclude",
            "p",
            "partition",
            "A",
            "account",
            "qos",
            "mem",
            "mem-per-cpu",
            "C",
            "constraint",
        ],
        "this is for srun, salloc or sbatch, which reserve the hosts",
    ),
];

/// The advice for torchrun's `--tee 3`.
pub const TEE: &str = "--tee takes no value here: --log-dir DIR --tee writes files and shows them too; --prefix alone shows each line with its rank";

/// The advice for mpirun's `--prefix DIR`.
pub const PREFIX: &str = "--prefix takes no value here, and begins each line with its rank: leave out mpirun's DIR";

/// Whether this is a value of torchrun's `--tee`: a number of streams, or one for each rank
/// (`0:1,1:3`).
pub fn is_streams(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_digit() || c == ':' || c == ',')
}

/// The name of an option that may have dashes, underscores and a value: `np` for `--np=2` and
/// `-np2`.
pub fn name(option: &str) -> String {
    let name = option.trim_start_matches('-').split('=').next().unwrap_or_default();
    name.trim_end_matches(|c: char| c.is_ascii_digit()).replace('_', "-")
}

/// Returns what to do here in place of that option, which may have dashes and a value.
pub fn advice(option: &str) -> Option<&'static str> {
    let name = name(option);
    ADVICE.iter().find(|(names, _)| names.contains(&name.as_str())).map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::{ADVICE, advice, name};

    #[test]
    fn options_are_known_however_they_are_written() {
        assert_eq!(advice("--master_port=1"), advice("--master-port"));
        assert_eq!(advice("-mca"), advice("--mca"));
        assert_eq!(["-np2", "--log_dir=x1", "-t3", "-3"].map(name), ["np", "log-dir", "t", ""]);
        assert!(advice("--standalone").is_some() && advice("--nonsense").is_none() && advice("--").is_none());
        let mut names: Vec<&str> = ADVICE.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "each option has one advice");
    }
}
