//! `devicemesh run --bind` and `--dry-run`, on the CPUs that this machine has.

use std::process::{Command, Output};

fn tool(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    command.arg("run").args(arguments).env_remove("OMP_NUM_THREADS").output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The value of a line of /proc/self/status.
fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

fn allowed_here() -> String {
    field(&std::fs::read_to_string("/proc/self/status").unwrap(), "Cpus_allowed_list:")
}

#[test]
fn a_rank_has_cores_of_its_own_and_the_tool_stays_unbound() {
    let script = "grep Cpus_allowed_list /proc/self/status; echo threads $OMP_NUM_THREADS; grep Cpus_allowed_list /proc/$PPID/status";
    let output = tool(&["--bind", "core", "-n", "1", "--", "/bin/sh", "-c", script]);
    let lines: Vec<String> = text(&output).lines().map(str::to_owned).collect();
    assert!(output.status.success(), "{lines:?}");
    // One rank has all cores.
    let here = format!("Cpus_allowed_list:\t{}", allowed_here());
    assert_eq!((&lines[0], &lines[2]), (&here, &here), "{lines:?}");
    assert!(lines[1] != "threads " && lines[1] != "threads 0", "{lines:?}");
    let cores: usize = lines[1].trim_start_matches("threads ").parse().unwrap();
    if cores < 2 {
        return;
    }
    // With as many ranks as cores, each rank has another core.
    let script = "grep Cpus_allowed_list /proc/self/status";
    let output = tool(&["--bind", "core", "-n", &cores.to_string(), "--", "/bin/sh", "-c", script]);
    let mut sets: Vec<String> = text(&output).lines().map(str::to_owned).collect();
    sets.sort();
    sets.dedup();
    assert_eq!(sets.len(), cores, "{sets:?}");
    // A rank that starts later does not inherit the binding of an earlier rank.
    assert!(!sets.contains(&here), "{sets:?}");
}

#[test]
fn a_binding_never_leaves_the_cpus_that_the_tool_has() {
    let outer = allowed_here();
    let last = outer.rsplit([',', '-']).next().unwrap();
    for bind in ["core", "numa", "none"] {
        let mut taskset = Command::new("taskset");
        taskset.args(["-c", last, env!("CARGO_BIN_EXE_devicemesh"), "run", "--bind", bind, "-n", "1", "--"]);
        let output = taskset.args(["grep", "Cpus_allowed_list", "/proc/self/status"]).output().unwrap();
        assert_eq!(text(&output), format!("Cpus_allowed_list:\t{last}\n"), "{bind}");
    }
}

#[test]
fn memory_comes_from_the_ranks_node() {
    let policy = |bind: &str| text(&tool(&["--bind", bind, "-n", "1", "--", "head", "-1", "/proc/self/numa_maps"]));
    let (bound, unbound) = (policy("numa"), policy("none"));
    let Some(here) = unbound.split(' ').nth(1).filter(|policy| *policy == "default") else {
        return eprintln!("skipped: this machine has no NUMA policy, or another one than the default: {unbound}");
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let has_cap_sys_nice = u64::from_str_radix(&field(&status, "CapEff:"), 16).unwrap() & (1 << 23) != 0;
    if !has_cap_sys_nice && bound.contains(here) {
        return eprintln!("skipped: the container refuses set_mempolicy");
    }
    assert!(bound.split(' ').nth(1).is_some_and(|policy| policy.starts_with("prefer")), "{bound}");
}

#[test]
fn too_many_ranks_for_cores_are_refused_before_anything_starts() {
    let output = tool(&["--bind", "core", "-n", "4096", "--", "echo", "started"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("4096 ranks and ") && !said.contains("started") && said.lines().count() == 1, "{said}");
    let default = tool(&["--dry-run", "-n", "4096", "--", "true"]);
    assert!(text(&default).contains("none, because 4096 ranks share "), "{}", text(&default));
}

#[test]
fn a_dry_run_of_several_hosts_shows_how_they_are_reached() {
    let options = ["--hosts", "localhost:3,192.0.2.7", "--rsh-agent", "rsh -p 1", "-x", "DATA=two words", "--dry-run"];
    let output = tool(&[&options[..], &["-n", "2", "--", "./train", "a b"]].concat());
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for expected in [
        "on 2 hosts, one node on each",
        "./train 'a b'",
        "localhost -n 3, by",
        "192.0.2.7 -n 2, by rsh -p 1 192.0.2.7",
        "DATA",
    ] {
        assert!(words.contains(expected), "{expected:?} is not in {said}");
    }
    assert!(!said.contains("two words"), "values go over standard input only: {said}");
}

#[test]
fn a_dry_run_shows_all_variables_and_starts_nothing() {
    let folder = format!("{}/dry-run-logs", env!("CARGO_TARGET_TMPDIR"));
    let _ = std::fs::remove_dir_all(&folder);
    let options = ["--dry-run", "--rdzv-id", "two words", "--log-dir", &folder, "--timeout", "90s", "-n", "2", "--"];
    let program = ["/nonexistent", "it's", "a b"];
    let output = tool(&[&options[..], &program[..]].concat());
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(!std::path::Path::new(&folder).exists(), "it made {folder}");
    assert!(said.contains(r"/nonexistent 'it'\''s' 'a b'"), "{said}");
    assert!(said.contains("after 90 s (--timeout)") && said.contains(&folder), "{said}");
    // Every variable that a rank gets is there.
    let environment = tool(&["-n", "2", "--", "sh", "-c", "test $RANK = 1 || env"]);
    let got = text(&environment);
    let ours = ["RANK", "ROLE", "LOCAL_", "GROUP", "WORLD", "MASTER", "TORCHELASTIC", "OMP_"];
    let names = got.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name);
    let names: Vec<&str> = names.filter(|name| ours.iter().any(|start| name.starts_with(start))).collect();
    assert!(names.len() >= 16, "{names:?}");
    for name in names {
        assert!(said.split([' ', '\n', '=']).any(|word| word == name), "{name} is not in {said}");
    }
    assert!(said.contains("TORCHELASTIC_RUN_ID='two words'") && said.contains("MASTER_PORT=(a free one)"), "{said}");
}

#[test]
fn a_dry_run_of_several_nodes_says_what_it_assumes() {
    let at = ["--dry-run", "--nnodes", "2", "--rdzv-endpoint", "head.invalid:29411", "-n", "3"];
    let said = text(&tool(&[&at[..], &["--node-rank", "1", "--", "true"]].concat()));
    assert!(said.contains("as node 1 of 2") && said.contains("every node starts 3 ranks too"), "{said}");
    assert!(said.contains("WORLD_SIZE=6") && said.contains("MASTER_PORT=29411"), "{said}");
    let ranks: Vec<&str> = said.lines().rev().take(3).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(ranks, ["5", "4", "3"], "{said}");
    let unnumbered = text(&tool(&[&at[..], &["--", "true"]].concat()));
    assert!(unnumbered.contains("without --node-rank, nodes are numbered as they come"), "{unnumbered}");
}
