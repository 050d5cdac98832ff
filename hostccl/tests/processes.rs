//! The checks of `reference.rs` with ranks as processes, and as processes of several threads each.
//!
//! A rank is this test program, started again with its ignored test `child`. Environment variables
//! give the rank and the id.

mod common;

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::call::Case;
use common::{DEADLINE, from_hex, hex_of, ranks_of, unique_id};
use hostccl::types::*;

/// The processes of a test. They are killed and waited for when the test ends in any way.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts `processes` of `threads` ranks each, and waits until all have done their checks.
fn check(processes: usize, threads: usize) {
    let hex = hex_of(&unique_id());
    let start = |process: usize| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("HOSTCCL_TEST_ID", &hex)
            .env("HOSTCCL_TEST_SIZE", (processes * threads).to_string())
            .env("HOSTCCL_TEST_FIRST", (process * threads).to_string())
            .env("HOSTCCL_TEST_THREADS", threads.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children = Children((0..processes).map(start).collect());
    let started = Instant::now();
    for (process, child) in children.0.iter_mut().enumerate() {
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(started.elapsed() < DEADLINE, "process {process} of {processes} is not done after {DEADLINE:?}");
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "process {process} of {processes}: {status}; its error is above");
    }
}

/// Returns fewer cases than the test with threads has, because every process computes all of them:
/// each type once, each reduction twice.
fn cases(size: usize) -> Vec<Case> {
    let counts = [1, 0, 7, 4097, 2, 1023, 3, 31, 12345, 65];
    let slot = ((12 << 20) / (3 * size) / 4096 * 4096).clamp(64 << 10, 1 << 20);
    let mut cases: Vec<Case> = DataType::ALL
        .into_iter()
        .zip(counts)
        .enumerate()
        .map(|(i, (dtype, count))| Case::new(dtype, size, count, count, &[ReduceOp::ALL[i % 5]], &[i % size]))
        .collect();
    let whole = slot / 4 + 1;
    cases.push(Case::new(DataType::Float32, size, whole, 2 * whole - 3, &[ReduceOp::Sum], &[size - 1]));
    cases
}

#[test]
#[ignore = "started by the other tests as ranks"]
fn child() {
    let Ok(hex) = env::var("HOSTCCL_TEST_ID") else { return };
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let (size, first) = (number("HOSTCCL_TEST_SIZE"), number("HOSTCCL_TEST_FIRST"));
    let threads = number("HOSTCCL_TEST_THREADS");
    // With this variable, each process is a host.
    let seats = if env::var("DM_HOSTCCL_SHM").is_ok_and(|value| value == "0") { threads } else { size };
    let cases: Vec<Case> = cases(size).into_iter().map(|case| case.on_hosts_of(seats)).collect();
    ranks_of(from_hex(&hex), size, first..first + threads, |comm, rank| {
        assert_eq!((comm.size(), comm.rank()), (size, rank));
        cases.iter().for_each(|case| case.run(comm, rank));
    });
}

#[test]
fn two_processes() {
    check(2, 1);
}

#[test]
fn three_processes() {
    check(3, 1);
}

#[test]
fn eight_processes() {
    check(8, 1);
}

#[test]
fn two_processes_of_two_threads() {
    check(2, 2);
}
