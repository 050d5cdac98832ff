//! `devicemesh run`, with the real binary and shell programs.

mod command_lines;
#[path = "../../../tests/ports/mod.rs"]
mod ports;
mod stops;

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use devicemesh::error::Status;
use devicemesh::rendezvous::store::{Store, TcpStore};
use devicemesh::rendezvous::{JoinOptions, World};
use devicemesh::wait::Wait;
use ports::free_port;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

fn tool(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    command.arg("run").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs `script` in each of `ranks` ranks.
fn run(options: &[&str], ranks: &str, script: &str) -> Output {
    let arguments: Vec<&str> = options.iter().copied().chain(["-n", ranks, "--", "/bin/sh", "-c", script]).collect();
    tool(&arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The letter of a process's state.
fn state(pid: &str) -> Option<char> {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?.rsplit_once(") ")?.1.chars().next()
}

/// Makes an empty folder for a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A node that is killed between its arrival and its entry in the store.
#[test]
fn a_node_that_has_gone_without_a_name_ends_the_meeting() {
    let port = free_port();
    let endpoint = format!("127.0.0.1:{port}");
    let options = ["--nnodes", "2", "--rdzv-endpoint", &endpoint, "--rdzv-timeout", "30", "-n", "1", "--", "/bin/true"];
    let child = tool(&options).spawn().unwrap();
    let wait = Wait::after(Duration::from_secs(20));
    let store = TcpStore::connect("127.0.0.1", port, &wait).unwrap();
    store.get("devicemesh/run/node/1", &wait).unwrap();
    assert_eq!(store.add("devicemesh/run/nodes", 1, &wait).unwrap(), 2);
    assert!(store.leave_last_word("devicemesh/run/gone", b"2", &wait).unwrap());
    drop(store);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("the node that arrived as number 2 has gone"), "{said}");
}

/// Waits until the process is gone (reaped by whoever has it).
fn gone(pid: &str) -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    while Instant::now() < until {
        if !Path::new(&format!("/proc/{pid}")).exists() || state(pid) == Some('Z') {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// The first `count` lines that a running tool prints.
fn lines(child: &mut Child, count: usize) -> Vec<String> {
    let mut reader = BufReader::new(child.stdout.as_mut().unwrap());
    (0..count)
        .map(|_| {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            line.trim().to_owned()
        })
        .collect()
}

/// Whether nothing more fits into the pipe of the tool's output. The kernel tells this to writers
/// only, so this opens the other end of the pipe for a moment.
fn is_full(child: &Child) -> bool {
    let pipe = format!("/proc/self/fd/{}", child.stdout.as_ref().unwrap().as_raw_fd());
    let end = rustix::fs::open(pipe, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&end, PollFlags::OUT)], Some(&now)).unwrap() == 0
}

#[test]
fn ranks_have_torchruns_environment() {
    let output = run(
        &[],
        "3",
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_USE_AGENT_STORE; test $MASTER_PORT -gt 0",
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let expected: Vec<String> = (0..3).map(|rank| format!("{rank} {rank} 3 3 0 127.0.0.1 0 True")).collect();
    assert_eq!(sorted(&output.stdout), expected);
}

#[test]
fn a_job_in_a_rank_of_another_one_has_none_of_its_variables() {
    let said = |of_rank: &[(&str, &str)]| {
        let script = "echo ${DM_JOIN-unset} ${DM_STORE_RELAY-unset} ${DM_STORE-unset} $DM_MESH_SIZE";
        let mut tool = tool(&["-n", "1", "--", "/bin/sh", "-c", script]);
        tool.env("DM_JOIN", "running").env("DM_STORE_RELAY", "outer").envs(of_rank.iter().copied());
        let output = tool.output().unwrap();
        text(&output.stdout) + &text(&output.stderr)
    };
    let of_rank = [("RANK", "1"), ("TORCHELASTIC_RUN_ID", "outer"), ("DM_MESH_SIZE", "7"), ("DM_STORE", "127.0.0.1:1")];
    assert_eq!(said(&of_rank), "unset unset unset 1\n");
    // The user may have set this for the job.
    assert_eq!(said(&[]), "running unset unset 1\n");
}

#[test]
fn the_first_failure_is_named_and_its_code_passed_on() {
    let output = run(&["--failure-grace", "0.1"], "3", "if [ $RANK = 1 ]; then exit 41; fi; exec sleep 1000");
    assert_eq!(output.status.code(), Some(41));
    let said = text(&output.stderr);
    assert!(
        said.contains("rank 1 (pid ")
            && said.contains("exited with code 41; 2 ranks still run and get SIGTERM in 0.1 s"),
        "{said}"
    );
}

#[test]
fn a_rank_that_a_signal_killed_is_named_with_the_signal() {
    let output = run(&["--failure-grace", "0.1"], "2", "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 1000");
    assert_eq!(output.status.code(), Some(137));
    assert!(text(&output.stderr).contains("was killed by signal 9 (SIGKILL)"), "{}", text(&output.stderr));
}

#[test]
fn processes_that_a_rank_leaves_behind_are_reaped_while_it_runs() {
    // Each inner shell ends at once, so its child becomes a child of the tool.
    let script = "for i in 1 2 3 4 5; do sh -c 'sleep 0.05 & echo $!'; done; exec sleep 1000";
    let mut child = tool(&["-n", "1", "--", "/bin/sh", "-c", script]).spawn().unwrap();
    let left = lines(&mut child, 5);
    let until = Instant::now() + Duration::from_secs(20);
    let is_there = |pid: &String| Path::new(&format!("/proc/{pid}")).exists();
    while left.iter().any(is_there) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let zombies: Vec<&String> = left.iter().filter(|pid| is_there(pid)).collect();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait().unwrap();
    assert!(zombies.is_empty(), "{zombies:?}");
}

#[test]
fn the_others_may_end_by_themselves_in_the_grace_period() {
    let output =
        run(&["--failure-grace", "60"], "2", "if [ $RANK = 0 ]; then exit 3; fi; sleep 0.3; echo survivor saw it");
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(3), "survivor saw it\n"));
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let began = Instant::now();
    let output = run(
        &["--failure-grace", "0.1"],
        "2",
        "if [ $RANK = 0 ]; then exit 7; fi; trap '' TERM; while :; do sleep 0.1; done",
    );
    assert_eq!(output.status.code(), Some(7));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn lines_carry_their_rank_where_asked() {
    let output = run(&["--prefix"], "2", "printf 'a%s\\nb%s' $RANK $RANK; echo err$RANK >&2");
    assert!(output.status.success());
    assert_eq!(sorted(&output.stdout), ["[rank 0] a0", "[rank 0] b0", "[rank 1] a1", "[rank 1] b1"]);
    assert_eq!(sorted(&output.stderr), ["[rank 0] err0", "[rank 1] err1"]);
    let much = run(&["--prefix"], "2", "i=0; while [ $i -lt 3000 ]; do echo line $i of rank $RANK; i=$((i+1)); done");
    assert_eq!(sorted(&much.stdout).len(), 6000, "nothing is lost");
}

#[test]
fn signals_reach_the_ranks() {
    let mut child = tool(&[
        "-n",
        "2",
        "--",
        "/bin/sh",
        "-c",
        "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.05; done",
    ])
    .spawn()
    .unwrap();
    assert_eq!(lines(&mut child, 2), ["ready", "ready"]);
    kill_process(Pid::from_child(&child), Signal::USR1).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "got it\ngot it\n");
}

#[test]
fn sigterm_ends_the_job() {
    let mut child = tool(&["-n", "2", "--", "/bin/sh", "-c", "echo $$; exec sleep 1000"]).spawn().unwrap();
    let pids = lines(&mut child, 2);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(pids.iter().all(|pid| gone(pid)));
}

#[test]
fn no_rank_outlives_a_killed_tool() {
    let mut child = tool(&["-n", "2", "--", "/bin/sh", "-c", "echo $$; exec sleep 1000"]).spawn().unwrap();
    let pids = lines(&mut child, 2);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(pids.iter().all(|pid| gone(pid)), "{pids:?}");
}

#[test]
fn what_a_rank_started_ends_with_it() {
    let output = run(&[], "2", "sleep 1000 & echo $!");
    assert!(output.status.success());
    let pids = sorted(&output.stdout);
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|pid| gone(pid)), "{pids:?}");
}

#[test]
fn what_a_rank_started_in_a_session_of_its_own_ends_with_the_job() {
    // Each rank leaves a daemon behind. The daemon has a child, holds the rank's pipes and ignores
    // SIGTERM. The last rank fails.
    let script = r#"setsid -f /bin/sh -c 'trap "" TERM HUP; sleep 60 & echo $! $$ >"$NOTE"; wait' & until [ -s "$NOTE" ]; do sleep 0.01; done; exit $((RANK * 9))"#;
    for options in [&["--prefix"][..], &[]] {
        let notes = [0, 1].map(|rank| format!("{}/daemon-{}-{rank}", env!("CARGO_TARGET_TMPDIR"), options.len()));
        notes.iter().for_each(|note| drop(std::fs::remove_file(note)));
        let began = Instant::now();
        let note = notes[0].trim_end_matches('0');
        let output = run(options, "2", &format!("export NOTE={note}$RANK; {script}"));
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        assert_eq!(output.status.code(), Some(9), "{}", text(&output.stderr));
        let pids: String = notes.iter().map(|note| std::fs::read_to_string(note).unwrap()).collect();
        assert_eq!(pids.split_whitespace().count(), 4, "{pids}");
        let alive = |pid: &&str| Path::new(&format!("/proc/{pid}")).exists();
        assert_eq!(pids.split_whitespace().find(alive), None, "outlives the tool");
    }
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let missing = tool(&["-n", "2", "--", "/nonexistent/program"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).contains("/nonexistent/program"), "{}", text(&missing.stderr));
    for (program, code, advice) in [
        ("/tmp", 126, "cannot start /tmp as rank 0: it is a folder, not a program"),
        ("4", 127, "4 is not in PATH; -n 4 is the number of ranks"),
        ("nonexistent", 127, "nonexistent is not in PATH\n"),
        ("A=b", 127, "A=b is not in PATH; to set a variable, write -- env A=b PROGRAM"),
        ("echo hi", 127, "-- sh -c 'echo hi'"),
        ("src", 127, "src is not in PATH, and ./src is a folder, not a program"),
    ] {
        let output = tool(&["-n", "1", "--", program]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(code) && said.contains(advice), "{program}: {said}");
    }
    for wrong in [&["-n", "0", "--", "true"][..], &["-n", "2"]] {
        assert_eq!(tool(wrong).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn the_whole_job_can_have_a_limit() {
    let output = run(&["--timeout", "0.3", "--failure-grace", "0.1"], "2", "exec sleep 1000");
    assert_eq!(output.status.code(), Some(124));
    assert!(text(&output.stderr).contains("not done after 0.3 s"), "{}", text(&output.stderr));
}

#[test]
fn a_rank_0_elsewhere_is_told_that_the_port_is_taken() {
    // The job's store holds the port for longer than rank 0 of another job waits for a server that
    // may be about to exit.
    let mut child = tool(&["-n", "1", "--", "/bin/sh", "-c", "echo $MASTER_PORT; exec sleep 60"]).spawn().unwrap();
    let port = lines(&mut child, 1).remove(0);
    let method = format!("tcp://127.0.0.1:{port}");
    let options = JoinOptions::ranked(0, 2).init_method(&method).timeout(Duration::from_secs(5));
    let error = World::join("cpu", &options).map(drop).unwrap_err();
    Command::new("kill").arg(child.id().to_string()).status().unwrap();
    child.wait().unwrap();
    assert_eq!((error.status(), error.os_error()), (Status::Store, Errno::ADDRINUSE.raw_os_error()), "{error}");
    assert!(error.message().contains(&port), "{error}");
}

#[test]
fn output_that_cannot_be_written_ends_the_job() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let endless = ["-n", "2", "--", "/bin/sh", "-c", "echo out; exec sleep 1000"];
    let prefixed = tool(&[&["--prefix"], &endless[..]].concat()).stdout(full()).output().unwrap();
    let said = text(&prefixed.stderr);
    assert_eq!(prefixed.status.code(), Some(1), "{said}");
    // The tool says it at once, and again in the last line, after the ranks that it ended.
    assert_eq!(said.matches("cannot write to standard output: No space left on device").count(), 2, "{said}");
    assert!(said.lines().next_back().is_some_and(|line| line.contains("cannot write to standard output")), "{said}");
    // Without a prefix the ranks write to standard output themselves. A rank that checks its
    // writes fails.
    let shared = tool(&["-n", "2", "--", "/bin/echo", "out"]).stdout(full()).output().unwrap();
    assert_eq!(shared.status.code(), Some(1), "{}", text(&shared.stderr));
    // When standard error is full, the message about that cannot be written anywhere.
    let mute = run_with_stderr(full(), &["-n", "2", "--", "/bin/sh", "-c", "echo err >&2; exit 0"]);
    assert_eq!(mute.status.code(), Some(1));
    let failed = run_with_stderr(full(), &["-n", "1", "--", "/bin/sh", "-c", "exit 7"]);
    assert_eq!(failed.status.code(), Some(7), "the job's own code stands");
    // Help and manual pages cannot be written either, and the tool fails.
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"], &["man"], &["completions", "bash"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
        assert_eq!(command.args(arguments).stdout(full()).status().unwrap().code(), Some(1), "{arguments:?}");
    }
}

fn run_with_stderr(stderr: std::fs::File, arguments: &[&str]) -> Output {
    tool(arguments).stderr(stderr).output().unwrap()
}

#[test]
fn ranks_that_write_to_a_reader_that_has_gone_end_as_without_the_tool() {
    for options in [&["--prefix"][..], &["--timestamps"], &[]] {
        let mut child = tool(&[options, &["-n", "1", "--", "yes"]].concat()).spawn().unwrap();
        lines(&mut child, 1);
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + 13), "{options:?}: {}", text(&output.stderr));
    }
    // A rank that writes nothing more does not notice this.
    let mut child = tool(&["--prefix", "-n", "1", "--", "/bin/sh", "-c", "echo; read line <$0; exit 5", "/dev/null"]);
    let mut child = child.spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn a_reader_that_has_stopped_keeps_no_deadline_and_no_signal() {
    for options in [&["--prefix", "--timeout", "0.3"][..], &["--tee", "--log-dir", env!("CARGO_TARGET_TMPDIR")]] {
        let mut child = tool(&[options, &["-n", "2", "--", "yes"]].concat()).spawn().unwrap();
        // Nobody reads the rest.
        lines(&mut child, 1);
        let code = if options[0] == "--tee" {
            // Before that, the tool could write all that the ranks have written, and end.
            let until = Instant::now() + Duration::from_secs(20);
            while !is_full(&child) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            // The tool's one child is dm-ranks, which has started the ranks.
            let children = |pid: &str| {
                let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
                text.unwrap().trim().to_owned()
            };
            let keeper = children(&child.id().to_string());
            let is_over = || children(&keeper).is_empty();
            let until = Instant::now() + Duration::from_secs(20);
            while !is_over() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            // The ranks have ended, and a second signal ends the wait for the reader. A signal
            // within half a second of the first one does not count.
            std::thread::sleep(Duration::from_millis(600));
            kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
            143
        } else {
            124
        };
        assert_eq!(child.wait().unwrap().code(), Some(code), "{options:?}");
    }
}

/// Runs the tool under these limits on open files.
fn limited(hard: u32, soft: u32, arguments: &[&str]) -> Output {
    let script = format!("ulimit -Sn {soft}; ulimit -Hn {hard}; exec \"$0\" run \"$@\"");
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_devicemesh")).args(arguments);
    shell.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_low_limit_on_open_files_is_told_with_what_is_needed() {
    let refused = limited(60, 60, &["-n", "64", "--prefix", "--", "/bin/sh", "-c", "ulimit -n"]);
    let said = text(&refused.stderr);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(1), ""), "{said}");
    assert!(
        said.contains("64 ranks on this host need ") && said.contains("and the limit is 60: raise it with `ulimit -n "),
        "{said}"
    );
    // It names one number, however low the limit is.
    let number = said.split("need ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    for limit in [8, 12, 20, 40] {
        let refused = limited(limit, limit, &["-n", "64", "--prefix", "--", "/bin/sh", "-c", "ulimit -n"]);
        let said = text(&refused.stderr);
        assert!(said.contains(&format!("need {number} open files")), "{limit}: {said}");
    }
    // The number that it names is enough, as a hard limit. The ranks have the soft limit that the
    // tool had.
    let needed = said.split("`ulimit -n ").nth(1).and_then(|rest| rest.split('`').next()).unwrap();
    let enough = limited(needed.parse().unwrap(), 60, &["-n", "64", "--prefix", "--", "/bin/sh", "-c", "ulimit -Sn"]);
    assert!(enough.status.success(), "{}", text(&enough.stderr));
    assert_eq!(sorted(&enough.stdout).iter().filter(|line| line.ends_with("] 60")).count(), 64, "{enough:?}");
}

#[test]
fn a_signal_that_is_ignored_stays_so() {
    let script = "trap '' HUP; exec \"$0\" run -n 1 -- /bin/sh -c 'kill -HUP $PPID $$; sleep 0.2; echo lives'";
    let output = Command::new("/bin/sh").args(["-c", script, env!("CARGO_BIN_EXE_devicemesh")]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "lives\n");
}

#[test]
fn a_rank_that_starts_again_after_the_reader_has_gone_ends_by_sigpipe() {
    let folder = folder("reader-gone");
    // Rank 0 writes until it notices that nobody reads. Then rank 1 fails by itself.
    let script = "case $RANK$TORCHELASTIC_RESTART_COUNT in \
        00) trap '' PIPE; while echo more 2>/dev/null; do sleep 0.01; done; touch noticed; exec sleep 100;; \
        10) until test -e noticed; do sleep 0.01; done; exit 3;; \
        *) exec yes;; esac";
    let options =
        ["--prefix", "-n", "2", "--restart", "rank", "--max-restarts", "1", "--timeout", "10", "--failure-grace", "0"];
    let mut child =
        tool(&[&options[..], &["--", "/bin/sh", "-c", script]].concat()).current_dir(&folder).spawn().unwrap();
    lines(&mut child, 1);
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 13), "{}", text(&output.stderr));
}

/// The ranks write nothing to standard error, so only the tool's own messages wait for the reader.
#[test]
fn the_tools_own_messages_keep_no_deadline() {
    let (reader, mut writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    writer.set_nonblocking(false).unwrap();
    let options = ["--log-dir", env!("CARGO_TARGET_TMPDIR"), "--timeout", "0.3", "-n", "1", "--", "sleep", "1000"];
    let mut child = tool(&options).stderr(OwnedFd::from(writer)).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let code = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
        }
    };
    drop(reader);
    assert_eq!(code, Some(124));
}
