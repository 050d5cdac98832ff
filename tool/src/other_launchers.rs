//! The options of torchrun, mpirun and srun that people type out of habit, each with the advice what
//! to write here. docs/tool.md has the same table in "Options that are refused", and
//! tests/test_tool_page.py compares both.

/// Options without their leading dashes, and what to do here in place of them.
const ADVICE: &[(&[&str], &str)] = &[
    // torchrun
    (&["standalone"], "leave it out: without --nnodes and --hosts, a job is on this host alone"),
    (&["rdzv-backend", "rdzv-conf"], "leave it out: there is one rendezvous, at --rdzv-endpoint"),
    (&["max-restarts", "monitor-interval"], "leave it out: a job is not restarted, it ends when a rank fails"),
    (&["redirects", "r", "t", "local-ranks-filter"], "--log-dir DIR gives each rank files, and --tee shows them too"),
    (&["m", "module"], "write -- python3 -m MODULE"),
    (&["no-python", "run-path"], "leave it out: what follows -- is the program"),
    (&["master-addr", "master-port", "local-addr"], "--rdzv-endpoint HOST:PORT is where the nodes meet"),
    (&["role", "start-method"], "leave it out: there is one role, and each rank is a process of its own"),
    (&["numa-binding", "bind-to", "map-by", "rank-by", "cpu-bind"], "--bind core, numa or none binds the ranks"),
    (&["signals-to-handle"], "leave it out: all usual signals are passed on to the ranks"),
    // mpirun and srun
    (&["np", "npernode", "ppn", "ntasks", "ntasks-per-node"], "-n N is the number of ranks on each host"),
    (&["N"], "-n N is the number of ranks on each host (mpirun's -N), --nnodes N the number of hosts (srun's -N)"),
    (&["nodes"], "--nnodes N is the number of hosts, or --hosts names them"),
    (&["tag-output", "label", "l", "prepend-rank"], "--prefix begins each line with its rank"),
    (&["timestamp-output"], "--timestamps begins each line with the time"),
    (&["output-filename"], "--log-dir DIR gives each rank files"),
    (&["oversubscribe", "allow-run-as-root", "use-hwthread-cpus"], "leave it out: this is always allowed"),
    (&["report-bindings", "display-map"], "--dry-run shows the ranks with their CPUs"),
    (&["mca", "pmca", "gmca"], "leave it out: MPI has no part here; --rsh-agent names the command that reaches hosts"),
    (&["env", "genv", "envlist", "genvlist", "export"], "-x NAME or -x NAME=VALUE gives the ranks a variable"),
    (&["nodelist", "w", "f", "machinefile"], "--hosts alpha,beta:4 or --hostfile FILE names the hosts"),
    (&["wdir", "wd", "chdir", "D"], "change the folder first: the ranks start in this one"),
];

/// Returns what to do here in place of that option, which may have dashes and a value (`--np=2`).
pub fn advice(option: &str) -> Option<&'static str> {
    let name = option.trim_start_matches('-').split('=').next()?.replace('_', "-");
    ADVICE.iter().find(|(names, _)| names.contains(&name.as_str())).map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::{ADVICE, advice};

    #[test]
    fn options_are_known_however_they_are_written() {
        assert_eq!(advice("--master_port=1"), advice("--master-port"));
        assert_eq!(advice("-mca"), advice("--mca"));
        assert!(advice("--standalone").is_some() && advice("--nonsense").is_none() && advice("--").is_none());
        let mut names: Vec<&str> = ADVICE.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "each option has one advice");
    }
}
