//! Signals that stop the tool and let it continue, and signals during its preparations.

use super::*;

/// Stops the tool, and waits until it stands still.
fn stop(tool: &Child) {
    kill_process(Pid::from_child(tool), Signal::TSTP).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while state(&tool.id().to_string()) != Some('T') && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Checks that the stopped tool starts no rank within `pause`. Then continues the tool, which
/// starts a rank that prints "again" and succeeds.
fn starts_when_it_continues(mut tool: Child, pause: Duration) {
    let out = tool.stdout.take().unwrap();
    let pause = Timespec::try_from(pause).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&out, PollFlags::IN)], Some(&pause)), Ok(0), "the rank has started");
    kill_process(Pid::from_child(&tool), Signal::CONT).unwrap();
    assert_eq!(std::io::read_to_string(out).unwrap(), "again\n");
    assert!(tool.wait().unwrap().success());
}

#[test]
fn no_rank_starts_while_the_job_is_stopped() {
    // The third restart comes after 2 s. On a busy machine, the rank may have started before the
    // tool stands still. Then a new tool is stopped.
    let script = "test $TORCHELASTIC_RESTART_COUNT = 3 || exit 3; echo again";
    for _ in 0..3 {
        let mut child = tool(&["-n", "1", "--max-restarts", "3", "--", "/bin/sh", "-c", script]).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("again after 2 s") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0);
        }
        stop(&child);
        let now = Timespec::default();
        if poll(&mut [PollFd::new(child.stdout.as_ref().unwrap(), PollFlags::IN)], Some(&now)) == Ok(0) {
            return starts_when_it_continues(child, Duration::from_millis(2500));
        }
        kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
        child.wait().unwrap();
    }
    panic!("the rank has always started before the tool stood still");
}

#[test]
fn no_rank_starts_after_a_stop_while_the_attempt_before_ends() {
    let folder = folder("stopped-in-the-end");
    // Rank 0 fails, and rank 1 ends by itself when the test lets it.
    let script = "case $RANK$TORCHELASTIC_RESTART_COUNT in \
        00) exit 3;; \
        10) until test -e released; do sleep 0.01; done;; \
        01) echo again;; esac";
    let options = ["-n", "2", "--max-restarts", "1", "--failure-grace", "60", "--", "/bin/sh", "-c", script];
    let mut child = tool(&options).current_dir(&folder).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    assert!(stderr.read_line(&mut line).unwrap() > 0 && line.contains("then all ranks start again"), "{line}");
    stop(&child);
    std::fs::write(folder.join("released"), "").unwrap();
    starts_when_it_continues(child, Duration::from_millis(500));
}

/// Whether a process catches a signal.
fn catches(pid: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    caught & (1 << (signal.as_raw() - 1)) != 0
}

/// The hostfile is a pipe, so the preparations last until the test has written it.
#[test]
fn a_signal_during_the_preparations_ends_nothing() {
    let hostfile = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostfile-{}", std::process::id()));
    let made = Command::new("mkfifo").arg(&hostfile).status().unwrap();
    assert!(made.success());
    let mut command = tool(&["--hostfile", hostfile.to_str().unwrap(), "-n", "1", "--", "true"]);
    let mut child = command.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    // This signal comes when the front alone catches it.
    let pid = Pid::from_child(&child);
    while !catches(child.id(), Signal::USR1) && Instant::now() < until {
        std::thread::yield_now();
    }
    kill_process(pid, Signal::USR1).unwrap();
    let writer = loop {
        // This succeeds when the tool reads the file.
        match rustix::fs::open(&hostfile, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
            Ok(writer) => break writer,
            Err(Errno::NXIO) if Instant::now() < until && child.try_wait().unwrap().is_none() => {
                std::thread::sleep(Duration::from_millis(10))
            }
            Err(error) => {
                let _ = child.kill();
                panic!("nobody reads the hostfile: {error}, {:?}", child.wait_with_output());
            }
        }
    };
    kill_process(pid, Signal::USR1).unwrap();
    // The front mostly passes the signal on within this time. Where it takes longer, the test
    // passes and shows nothing.
    std::thread::sleep(Duration::from_millis(100));
    drop(writer);
    let output = child.wait_with_output().unwrap();
    std::fs::remove_file(&hostfile).unwrap();
    assert_eq!(output.status.code(), Some(2), "a hostfile without hosts is refused: {}", text(&output.stderr));
}
