//! The join of communicators whose ranks are on several hosts. `DM_HOSTCCL_SHM=0` makes each
//! process a host of its own, and `DM_HOSTCCL_HOST` names the host of a process, so one machine
//! serves as many.
//!
//! A rank is this test program, started again with its ignored test `child`. Environment variables
//! give the rank and the id. A rank writes one line for each thing that it has done.

mod common;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use common::{Comm, DEADLINE, from_hex, hex_of, last_error, unique_id};
use hostccl::types::*;

/// A process of ranks.
struct Process {
    /// The process, which is killed and waited for at the end of the test.
    child: Child,
    /// The process goes on to its next step when it reads a line.
    input: Option<ChildStdin>,
    /// The lines that the process has written.
    lines: Receiver<String>,
}

impl Process {
    /// Starts a process with the ranks `ranks` of `size`.
    fn start(id: &ncclUniqueId, size: usize, ranks: &[usize], variables: &[(&str, &str)]) -> Process {
        let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_TEST_ID", hex_of(id))
            .env("HOSTCCL_TEST_SIZE", size.to_string())
            .env("HOSTCCL_TEST_RANKS", list.join(","))
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test program's own lines come too, and one may precede ours.
                if let Some((_, line)) = line.split_once("> ") {
                    let _ = out.send(line.to_owned());
                }
            }
        });
        Process { input: child.stdin.take(), child, lines }
    }

    /// Returns the next line.
    #[track_caller]
    fn line(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("the process writes a line")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Joins as one rank, and says how it went.
fn join(id: ncclUniqueId, size: usize, rank: usize) -> (String, Option<Comm>) {
    let (result, comm) = common::init(size as i32, id, rank as i32);
    match result {
        ncclSuccess => {
            let comm = Comm(comm);
            (format!("{} of {}", comm.rank(), comm.size()), Some(comm))
        }
        code => (format!("error {code}: {}", last_error()), None),
    }
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Ok(hex) = env::var("HOSTCCL_TEST_ID") else { return };
    let size: usize = env::var("HOSTCCL_TEST_SIZE").unwrap().parse().unwrap();
    let ranks: Vec<usize> =
        env::var("HOSTCCL_TEST_RANKS").unwrap().split(',').map(|rank| rank.parse().unwrap()).collect();
    let id = from_hex(&hex);
    let threads: Vec<_> = ranks.iter().map(|&rank| std::thread::spawn(move || join(id, size, rank))).collect();
    let joined: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    for (line, _) in &joined {
        println!("> {line}");
    }
    std::io::stdout().flush().unwrap();
    // The communicators live until the test is done.
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn each_process_a_host() {
    let id = unique_id();
    let processes: Vec<Process> =
        (0..3).map(|rank| Process::start(&id, 3, &[rank], &[("DM_HOSTCCL_SHM", "0")])).collect();
    for (rank, process) in processes.iter().enumerate() {
        assert_eq!(process.line(), format!("{rank} of 3"));
    }
}
