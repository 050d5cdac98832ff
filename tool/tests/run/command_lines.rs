//! Command lines that are wrong, or that another launcher would understand.

use super::*;

#[test]
fn options_of_other_launchers_are_explained() {
    for (options, advice) in [
        (&["--standalone"][..], "leave it out"),
        (&["--master_port", "1"], "--rdzv-endpoint"),
        (&["-m", "pkg"], "python3 -m MODULE"),
        (&["--tag-output"], "--prefix"),
        (&["-np2"], "'-np2' found"),
        (&["-np=2"], "-n N is the number of ranks on each host"),
        (&["--nnodes", "1:2"], "number of nodes is fixed"),
        (&["--timeout", "0"], "leave the option out"),
        (&["--timeout", "1000000d"], "the longest time is 11574d"),
        (&["--tee", "3"], "--tee takes no value here"),
        (&["--tee=3"], "--prefix alone shows each line with its rank"),
        (&["--prefix", "/opt/mpi"], "/opt/mpi is no program; --prefix takes no value here"),
        (&["--prefix", "/"], "leave out mpirun's DIR"),
        (&["--prefix=/opt/mpi"], "leave out mpirun's DIR"),
        (&["--timeout", "-1"], "invalid value '-1' for '--timeout <TIME>'"),
        (&["--stdin", "-1"], "invalid value '-1' for '--stdin <RANK>'"),
        (&["--rdzv-endpoint", ":29500"], "the host is missing"),
        (&["--log-dir", "x", "--log-max-size", "100G"], "is too large: the largest size is 64GiB"),
        (&["--log_dir", "x", "--tee", "3"], "--tee takes no value here"),
        // The whole word is named, and not the letter that clap takes for an option.
        (&["-genv", "A", "b"], "'-genv' found"),
        (&["-hosts", "a,b"], "with two dashes: --hosts"),
        (&["-nnodes", "2"], "with two dashes: --nnodes"),
        (&["-bind-to=core"], "with two dashes: --bind-to"),
        (&["-hostlist", "a,b"], "--hosts alpha,beta:4"),
        (&["-launcher", "ssh"], "--rsh-agent"),
        (&["-c4"], "--bind core gives each rank its part of the cores (srun's -c)"),
        (&["-walpha,beta"], "--hosts alpha,beta:4"),
        (&["-t", "10:00"], "--timeout 10m"),
    ] {
        let output = tool(&[options, &["true"]].concat()).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(advice), "{options:?}: {said}");
        assert!(!said.contains("as a value"), "{said}");
    }
    // No advice is better than wrong advice. Wrong would be, for MPICH's long words, the advice for
    // their first letter. Wrong would also be clap's suggestions of a hidden option (--agent) and
    // of an option that is not similar (--grace-period).
    for option in ["-localhost", "-usize", "--use-agent-store", "--sockets-per-node"] {
        let said = text(&tool(&[option, "true"]).output().unwrap().stderr);
        assert!(said.contains(&format!("argument '{option}' found")) && !said.contains("tip:"), "{said}");
    }
    let help = tool(&["-help"]).output().unwrap();
    assert!(help.status.success() && text(&help.stdout).contains("Usage: devicemesh run"), "{}", text(&help.stderr));
}

#[test]
fn a_program_that_another_launcher_would_understand_is_explained() {
    for (command, advice) in [
        (
            &["-n", "1", "--", "true", ":", "-n", "2", "false"][..],
            "all ranks run one program, and `: -n 2` begins another",
        ),
        (&["-n", "1", "true", "x", ":", "-np", "2", "false"], "chooses by rank"),
        (&["--", "-m", "pkg.train", "--lr", "1"], "write -- python3 -m pkg.train --lr 1"),
        (&["--", "-n", "2", "true"], "write the options before --"),
    ] {
        let output = tool(command).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(advice), "{command:?}: {said}");
    }
    let colon = tool(&["-n", "1", "--", "expr", "a", ":", "a"]).output().unwrap();
    assert_eq!(text(&colon.stdout), "1\n", "{}", text(&colon.stderr));
}

#[test]
fn a_launchers_line_without_run_is_explained() {
    for (line, advice) in [
        (&["-n", "2", "./train"][..], "`devicemesh run` starts programs"),
        (&["--standalone", "./train"], "`devicemesh run` starts programs"),
        (&["./train"], "`devicemesh run` starts programs"),
        (&["train.py"], "`devicemesh run` starts programs"),
        (&["mpirun", "-n", "2"], "similar subcommand exists: 'run'"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_devicemesh")).args(line).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(advice), "{line:?}: {said}");
    }
}

#[test]
fn a_script_that_cannot_be_started_gets_its_command_line() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("not-in-path");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("train.py"), "print()\n").unwrap();
    for (name, script) in [("empty", ""), ("script", "echo script\n")] {
        std::fs::write(folder.join(name), script).unwrap();
        std::fs::set_permissions(folder.join(name), Permissions::from_mode(0o755)).unwrap();
    }
    for (program, code, advice) in [
        ("./empty", 126, "cannot start ./empty as rank 0: its file is empty"),
        ("/opt/none", 127, "cannot start /opt/none as rank 0: No such file"),
        ("./none", 127, "cannot start ./none as rank 0: there is no such file in /"),
        ("train.py", 127, "train.py is not in PATH; ./train.py is here: -- python3 train.py"),
        ("./train.py", 126, "-- python3 train.py"),
        ("", 127, "cannot start '' as rank 0: the program's name is empty"),
    ] {
        let output = tool(&["-n", "1", "--prefix", "--", program, "x"]).current_dir(&folder).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(advice), "{program:?}: {said}");
    }
    // Without a first line that names an interpreter it is a script of /bin/sh, as for a shell.
    let output = tool(&["-n", "1", "--", "./script"]).current_dir(&folder).output().unwrap();
    assert_eq!(text(&output.stdout), "script\n", "{}", text(&output.stderr));
}

#[test]
fn python_is_python3_where_only_that_is_in_path() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python3-only");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("python3"), "").unwrap();
    let output = tool(&["-n", "1", "--", "python", "train.py"]).env("PATH", &folder).output().unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("python is not in PATH, but python3 is\n"), "{said}");
}

#[test]
fn ranks_for_devices_need_a_device() {
    let output = tool(&["-n", "gpu", "--dry-run", "--", "true"]).output().unwrap();
    let said = text(&output.stderr);
    // The driver's own advice is for programs, which can use device type cpu.
    let is_told = said.contains("; say a number, or -n cpu") && !said.contains("device type");
    assert!(output.status.success() || is_told, "{said}");
}

#[test]
fn devicemesh_as_a_program_is_this_tool_where_path_has_no_other() {
    let output = tool(&["-n", "1", "--", "devicemesh", "--version"]).env("PATH", "/bin").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), concat!("devicemesh ", env!("CARGO_PKG_VERSION"), "\n"));
    let output = tool(&["-n", "1", "--", "elsewhere", "--version"]).env("PATH", "/bin").output().unwrap();
    assert_eq!(output.status.code(), Some(127), "{}", text(&output.stderr));
}
